"""Base: the interface of what moves flat arrays between members of a process set."""

import dataclasses
import functools
from typing import Any, Protocol

import numpy as np

from jdp.collectives.base import Op
from jdp.eager.messages import Kind
from jdp.replicas.mesh import World

Array = Any  # of numpy or JAX; JAX where it lies on a device that is no CPU.


@dataclasses.dataclass(frozen=True)
class SetMembers:
    """A process set, as one of its members sees it."""

    world: World
    set_id: int
    ranks: tuple[int, ...]  # ascending.

    @functools.cached_property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    @functools.cached_property
    def place(self) -> int:
        """Position of this process among them."""
        return self.ranks.index(self.world.process_index)


@dataclasses.dataclass(frozen=True)
class CollectiveTask:
    """Facts by which an implementation accepts work; the same on all members."""

    kind: Kind
    op: str  # of a reduction; "" otherwise.
    dtype: np.dtype
    num_bytes: int
    is_on_device: bool  # whether the tensors are where numpy cannot read them.


class Implementation(Protocol):
    """One way to move data; the members of a set make it together.

    Every method is called by all members in the same order, with the same dtypes and
    sizes, `n` being the number of members. Arrays are flat unless said otherwise. They
    belong to the implementation, which may change them, and results to the caller.
    """

    name: str
    # Whether a call ends within `EagerOptions.timeout_s` whatever the others do.
    is_bounded: bool

    def is_enabled(self, task: CollectiveTask) -> bool:
        """Whether it takes the task; the same on all members."""
        ...

    def describe(self) -> str:
        """Says in a few words what it runs on, or why it is not available."""
        ...

    def switch(self, *, all_reduce: bool, all_gather: bool) -> None:
        """Says which kinds a hierarchical implementation takes; others ignore it."""
        ...

    def close(self) -> None:
        """Frees what it holds; nothing is called after it."""
        ...

    def all_reduce(self, arrays: list[Array], op: Op) -> list[Array]:
        """Reduces arrays of one dtype, shape (m,) each."""
        ...

    def adaptive_sum(self, array: Array) -> Array:
        """Combines one tensor, shape (m,), as `jdp.collectives.adasum`."""
        ...

    def all_gather(self, part: Array) -> Array:
        """Gathers shape (m,) to (n, m), in the order of the ranks."""
        ...

    def reduce_scatter(self, parts: Array, op: Op) -> Array:
        """Reduces shape (n, m), one part for each member, to the own part, (m,)."""
        ...

    def all_to_all(self, parts: Array) -> Array:
        """Sends part i of shape (n, m) to member i; part i of the result is from it."""
        ...

    def broadcast(self, array: Array, root: int) -> Array:
        """Returns the array, shape (m,), of the member at place `root`."""
        ...
