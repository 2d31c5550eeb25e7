"""Policy: what does the end of one process mean for the others of its job?"""

from collections.abc import Collection
from typing import Literal, Protocol

from jdp.launch.endings import Exit


class Policy(Protocol):
    """Rules for the effect of one end on the job. Pure, without clocks."""

    def judge(
        self, end: Exit, running: Collection[int]
    ) -> Literal["count", "forgive", "restart"]:
        """Decides whether an end counts, is forgiven, or the process restarts.

        Args:
          end: the end of a process, while nothing has gone wrong.
          running: ids of the processes that still run.
        """
        ...

    def find_superfluous(self, running: Collection[int]) -> list[int]:
        """Returns the processes that are no longer needed, and get SIGTERM."""
        ...


class FirstFailurePolicy:
    """Every process is needed to the end."""

    def judge(self, end: Exit, running: Collection[int]) -> Literal["count"]:
        """See `Policy`."""
        del end, running
        return "count"

    def find_superfluous(self, running: Collection[int]) -> list[int]:
        """See `Policy`."""
        del running
        return []
