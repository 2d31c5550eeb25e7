"""Policy: what does the end of one process mean for the others of its job?"""

from collections.abc import Collection
from typing import Literal, Protocol

from jdp.launch.endings import Exit


class Policy(Protocol):
    """Rules for the end of a process: its effect on the job. Pure, without clocks."""

    def judge(
        self, end: Exit, running: Collection[int]
    ) -> Literal["count", "forgive", "restart"]:
        """Says whether an end counts as it does in every job, or what else it means.

        Args:
          end: of a process, while nothing has gone wrong.
          running: ids of those that still run.
        """
        ...

    def find_superfluous(self, running: Collection[int]) -> list[int]:
        """Returns the processes that are to end now, well, since others have."""
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
