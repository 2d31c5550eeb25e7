"""Local: a process set of one process, which moves no data."""

from jdp.collectives.base import Op
from jdp.eager.execution.base import Array, CollectiveTask, SetMembers


class LocalCopy:
    """Implementation for one member; returns its arguments."""

    name = "local copy"
    is_bounded = True

    def __init__(self, members: SetMembers):
        self._is_alone = members.size == 1

    def is_enabled(self, task: CollectiveTask) -> bool:
        """See `Implementation`."""
        return self._is_alone

    def describe(self) -> str:
        """See `Implementation`."""
        return "for a process set of one process"

    def switch(self, *, all_reduce: bool, all_gather: bool) -> None:
        """See `Implementation`."""

    def close(self) -> None:
        """See `Implementation`."""

    def all_reduce(self, arrays: list[Array], op: Op) -> list[Array]:
        """See `Implementation`."""
        return arrays

    def adaptive_sum(self, array: Array) -> Array:
        """See `Implementation`."""
        return array

    def all_gather(self, part: Array) -> Array:
        """See `Implementation`."""
        return part.reshape(1, -1)

    def reduce_scatter(self, parts: Array, op: Op) -> Array:
        """See `Implementation`."""
        return parts[0]

    def all_to_all(self, parts: Array) -> Array:
        """See `Implementation`."""
        return parts

    def broadcast(self, array: Array, root: int) -> Array:
        """See `Implementation`."""
        return array
