"""Join: what a process does for the others once its own input has ended."""

import abc
from typing import Any, Protocol

from jdp.mesh import World
from jdp.types import Device


class JoinContext(Protocol):
    """What a `Joinable` knows of the `jdp.Join` that it is in."""

    is_enabled: bool  # False: every process has as many iterations.
    last_joiner: int | None  # index of a process; known once all have joined.

    def notify(self, joinable: "Joinable") -> None:
        """See `jdp.Join.notify_join_context`."""
        ...


class JoinHook:
    """What a process does in place of an iteration, and after the last of all.

    Both do nothing unless they are overridden.
    """

    def main_hook(self) -> None:
        """Stands in for one iteration: joins in the communication of the others.

        Called while some process goes on, once for each of its iterations.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Ends the loop on all processes; called once, when all have joined.

        Args:
          is_last_joiner: whether this process had the most iterations, alone or with
            others; if so its state is the newest.
        """


class Joinable(abc.ABC):
    """Something that communicates in each iteration, for use in a `jdp.Join`.

    It calls `jdp.Join.notify_join_context(self)` in each iteration, before it
    communicates.
    """

    join_context: JoinContext | None = None  # set by the `jdp.Join` it is in.

    @abc.abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook; `kwargs` are those of the `jdp.Join`, for all joinables."""

    @property
    @abc.abstractmethod
    def join_world(self) -> World:
        """The processes that it communicates with."""

    @property
    def join_device(self) -> Device:
        """The first of this process' devices in `join_world`."""
        return self.join_world.local_devices[0]
