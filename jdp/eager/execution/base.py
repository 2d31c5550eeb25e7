"""Base: the interface of implementations that move data within a process set."""

import dataclasses
import functools
from typing import Any, Protocol

import numpy as np

from jdp.collectives.base import Op
from jdp.eager.messages import Kind
from jdp.replicas.mesh import World

Array = Any  # numpy array on the host, JAX array on other devices than CPUs.


@dataclasses.dataclass(frozen=True)
class SetMembers:
    """Process set, as seen by one of its members."""

    world: World
    set_id: int
    ranks: tuple[int, ...]  # ascending.

    @functools.cached_property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @functools.cached_property
    def place(self) -> int:
        """Position of this process among the members."""
        return self.ranks.index(self.world.process_index)


@dataclasses.dataclass(frozen=True)
class CollectiveTask:
    """Properties by which implementations accept work; the same on all members."""

    kind: Kind
    op: str  # the reduction; "" without one.
    dtype: np.dtype
    num_bytes: int
    is_on_device: bool  # whether numpy cannot read the tensors in place.


class Implementation(Protocol):
    """One way to move data; the members of a set construct it together.

    All members call its methods in the same order, with the same dtypes and sizes; `n`
    is the number of members. Arrays are flat unless a shape is given. The
    implementation may overwrite its arguments; results belong to the caller.
    """

    name: str
    # Whether calls end within `EagerOptions.timeout_s`, whatever other members do.
    is_bounded: bool

    def is_enabled(self, task: CollectiveTask) -> bool:
        """Whether it accepts the task; the same on all members."""
        ...

    def describe(self) -> str:
        """Describes in a few words what it runs on, or why it is not available."""
        ...

    def switch(self, *, all_reduce: bool, all_gather: bool) -> None:
        """Sets the kinds of a hierarchical implementation; others ignore it."""
        ...

    def close(self) -> None:
        """Frees its resources; no method is called afterwards."""
        ...

    def all_reduce(self, arrays: list[Array], op: Op) -> list[Array]:
        """Reduces several arrays of one dtype, each of some shape (m,)."""
        ...

    def adaptive_sum(self, array: Array) -> Array:
        """Combines one tensor, shape (m,), like `jdp.collectives.adasum`."""
        ...

    def all_gather(self, part: Array) -> Array:
        """Gathers shape (m,) to (n, m), in rank order."""
        ...

    def reduce_scatter(self, parts: Array, op: Op) -> Array:
        """Reduces (n, m), one row per member; returns the row of this member, (m,)."""
        ...

    def all_to_all(self, parts: Array) -> Array:
        """Sends row i of (n, m) to member i; row i of the result comes from it."""
        ...

    def broadcast(self, array: Array, root: int) -> Array:
        """Returns the array, shape (m,), of the member at position `root`."""
        ...
