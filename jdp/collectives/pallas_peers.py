"""Pallas peers: who the replicas of a kernel are, and how one reads from another."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdp import compat, mesh
from jdp.types import AxisName

WARPGROUP = 128  # threads.
VECTOR_BYTES = 16  # the widest load and store of a thread.
BLOCK_AXIS, WARPGROUP_AXIS, RANK_AXIS = "block", "warpgroup", "rank"

Ref = Any  # a reference to memory of the GPU, inside a kernel.
Rank = int | jax.Array  # int32 ()


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a buffer is cut into tiles, and the tiles given to warpgroups.

    A tile is what the 128 threads of a warpgroup load in `unroll` vectors of 16 bytes
    each. What is left after the last whole tile, the tail, is reduced as a tile that
    ends with the buffer, by the warpgroup of the last whole tile, so that nobody else
    writes where the two overlap.
    """

    num_replicas: int
    size: int  # elements of the buffer.
    dtype: Any
    num_blocks: int
    num_warpgroups: int  # of a block.
    unroll: int = 1

    def __post_init__(self):
        """Checks itself."""
        assert self.size >= self.tile and self.size % self.vector == 0

    @property
    def vector(self) -> int:
        """Elements of one load."""
        return VECTOR_BYTES // jnp.dtype(self.dtype).itemsize

    @property
    def tile(self) -> int:
        """Elements of a tile."""
        return WARPGROUP * self.vector * self.unroll

    @property
    def num_tiles(self) -> int:
        """Whole tiles of the buffer."""
        return self.size // self.tile

    @property
    def has_tail(self) -> bool:
        """Whether something is left after the last whole tile."""
        return self.size % self.tile != 0

    @property
    def tiles_per_part(self) -> int:
        """Tiles that one replica reduces in two stages; the last ones get fewer."""
        return -(-self.num_tiles // self.num_replicas)

    @property
    def part_size(self) -> int:
        """Elements of the temporary buffer: a part, and a tail."""
        return (self.tiles_per_part + self.has_tail) * self.tile

    @property
    def layout(self) -> Any:
        """How a tile lies in the registers: vectors, thread by thread."""
        return plgpu.Layout.WG_STRIDED((self.tile,), vec_size=self.vector)

    def for_each_tile(self, num_tiles: int) -> Callable[[Callable[..., None]], None]:
        """Decorates what is done with tile i; each has its warpgroup, in every loop."""

        def run(fn: Callable[[jax.Array], None]) -> None:
            axes = (BLOCK_AXIS, WARPGROUP_AXIS)

            @plgpu.nd_loop((num_tiles,), collective_axes=axes)
            def _(info):
                fn(info.index[0])

        return run


class Peers(abc.ABC):
    """The replicas of a kernel: all that differs between real and virtual ones.

    A reference passed to `load` or `own` is one of the kernel's own arguments. To wait
    for each other, warpgroups count up in semaphores that are zero at the start: who
    never resets a counter needs no second round.
    """

    def __init__(self, tiling: Tiling):
        """Takes how the buffers are cut."""
        self.tiling = tiling
        self._arrived: Ref = None  # what this warpgroup waits for.

    def scratch(self) -> list[Any]:
        """Returns what `enter` wants to be allocated: a counter for each warpgroup."""
        return [plgpu.SemaphoreType.REGULAR((self.tiling.num_warpgroups,))]

    def enter(self, *scratch: Ref) -> None:
        """Begins a kernel; called once, before everything else."""
        (arrived,) = scratch
        self._arrived = arrived.at[lax.axis_index(WARPGROUP_AXIS)]

    @abc.abstractmethod
    def rank(self) -> Rank:
        """Returns which replica this is; an int where it is known when traced."""

    @abc.abstractmethod
    def own(self, ref: Ref) -> Ref:
        """Returns this replica's buffer."""

    @abc.abstractmethod
    def load(self, ref: Ref, peer: Rank, offset: Rank) -> jax.Array:
        """Loads a tile, shape (tile,), of the buffer of `peer`."""

    @abc.abstractmethod
    def meet(self, phase: int) -> None:
        """Waits until this warpgroup has come to `phase` = 1, 2, ... on all replicas.

        What they have written before, all see afterwards.
        """


class RemotePeers(Peers):
    """Every replica is a GPU: a device of a mesh axis, read through `remote_ref`."""

    def __init__(self, tiling: Tiling, axis_name: AxisName):
        """Takes the axis, or axes, of the replicas."""
        super().__init__(tiling)
        self.axis_names = mesh.as_axis_names(axis_name)
        self.sizes = [lax.axis_size(name) for name in self.axis_names]

    def rank(self) -> jax.Array:
        """The index along the axis."""
        return lax.axis_index(self.axis_names)

    def own(self, ref: Ref) -> Ref:
        """The reference itself."""
        return ref

    def load(self, ref: Ref, peer: Rank, offset: Rank) -> jax.Array:
        """Loads over NVLink."""
        t = self.tiling
        return compat.load_from_peer(
            ref.at[pl.ds(offset, t.tile)], self._device(peer), t.layout, t.vector
        )

    def meet(self, phase: int) -> None:
        """Signals the same warpgroup of the same block of all."""
        n = self.tiling.num_replicas
        for i in range(n):
            peer = self._device(lax.rem(self.rank() + i, n))
            pl.semaphore_signal(self._arrived, 1, device_id=peer)
        pl.semaphore_wait(self._arrived, n * phase, decrement=False)

    def meet_by_switch(self) -> None:
        """Waits, once in a kernel, for all replicas and what the switch wrote for them.

        The signal is sent the way of the data, which orders it behind them.
        """
        plgpu.semaphore_signal_multicast(self._arrived, collective_axes=self.axis_names)
        pl.semaphore_wait(self._arrived, self.tiling.num_replicas, decrement=False)

    def _device(self, rank: Rank) -> dict[str, Rank]:
        """Where a rank lies in the mesh; on axes not named, at this device's place."""
        rank = jnp.asarray(rank, jnp.int32)
        device: dict[str, Rank] = {}
        for name, size in zip(self.axis_names[::-1], self.sizes[::-1], strict=True):
            device[name] = lax.rem(rank, size)
            rank = lax.div(rank, size)
        return device


class ClusterPeers(Peers):
    """Every replica is a block of one cluster on one GPU; for correctness, not speed.

    Buffers have a row for each replica, shape (num_replicas, n). The blocks of a
    cluster run at the same time, so that they can wait for each other.
    """

    def scratch(self) -> list[Any]:
        """Nothing: other blocks could not see it."""
        return []

    def enter(self, *scratch: Ref) -> None:
        """Gets the counters of all replicas."""
        t = self.tiling
        shape = (t.num_blocks, t.num_warpgroups, t.num_replicas)
        every = pl.get_global(plgpu.SemaphoreType.REGULAR(shape))
        block, warpgroup = map(lax.axis_index, (BLOCK_AXIS, WARPGROUP_AXIS))
        self._arrived = every.at[block, warpgroup]

    def rank(self) -> jax.Array:
        """The index of the block in its cluster."""
        return lax.axis_index(RANK_AXIS)

    def own(self, ref: Ref) -> Ref:
        """A row."""
        return ref.at[self.rank()]

    def load(self, ref: Ref, peer: Rank, offset: Rank) -> jax.Array:
        """Loads from a row."""
        return _load(ref.at[peer, pl.ds(offset, self.tiling.tile)], self.tiling)

    def meet(self, phase: int) -> None:
        """As `RemotePeers`, with the counters of the cluster."""
        n = self.tiling.num_replicas
        for i in range(n):
            peer = lax.rem(self.rank() + i, n)
            pl.semaphore_signal(self._arrived.at[peer], 1)
        pl.semaphore_wait(self._arrived.at[self.rank()], n * phase, decrement=False)


class SoloPeers(Peers):
    """One replica alone on one GPU does its share of the work; for its time.

    The input has a row for each replica, shape (num_replicas, n). A pair of references
    stands for a temporary buffer: the own one, and the rows that the peers would have
    written. This is a lower bound: memory in place of NVLink, and nobody to wait for.
    """

    def __init__(self, tiling: Tiling, rank: int):
        """Takes which replica it is."""
        super().__init__(tiling)
        self._rank = rank

    def rank(self) -> int:
        """The same in every program."""
        return self._rank

    def own(self, ref: Ref) -> Ref:
        """The own one of a pair, or the reference itself."""
        return ref[0] if isinstance(ref, tuple) else ref

    def load(self, ref: Ref, peer: Rank, offset: Rank) -> jax.Array:
        """Loads from a row, or from what this replica wrote itself."""
        span = pl.ds(offset, self.tiling.tile)
        if isinstance(ref, tuple):
            own, rows = ref
            is_own = peer == self._rank
            return _load(own.at[span] if is_own else rows.at[peer, span], self.tiling)
        return _load(ref.at[peer, span], self.tiling)

    def meet(self, phase: int) -> None:
        """Signals itself as often as it would signal the others."""
        n = self.tiling.num_replicas
        for _ in range(n):
            pl.semaphore_signal(self._arrived, 1)
        pl.semaphore_wait(self._arrived, n * phase, decrement=False)


def _load(ref: Ref, tiling: Tiling) -> jax.Array:
    return plgpu.layout_cast(ref[...], tiling.layout)
