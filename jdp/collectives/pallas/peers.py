"""Peers: the replicas of a kernel, real or virtual, and loads between them."""

import abc
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdp import types
from jdp.compat import mosaic_kernels
from jdp.types import AxisName

WARPGROUP = 128  # threads.
VECTOR_BYTES = 16  # the widest load and store of a thread.
BLOCK_AXIS, WARPGROUP_AXIS, RANK_AXIS = "block", "warpgroup", "rank"

Ref = Any  # a reference to memory of the GPU, inside a kernel.
Rank = int | jax.Array  # int32 ()


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tiles of a buffer, and their distribution over warpgroups.

    The 128 threads of a warpgroup load one tile, in `unroll` vectors of 16 bytes each.
    The tail, after the last whole tile, is reduced as a tile that ends with the buffer.
    The warpgroup of the last whole tile does that, so that no other warpgroup writes
    where the two tiles overlap.
    """

    num_replicas: int
    size: int  # elements of the buffer.
    dtype: Any
    num_blocks: int
    num_warpgroups: int  # per block.
    unroll: int = 1

    def __post_init__(self):
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
        """Whether elements are left after the last whole tile."""
        return self.size % self.tile != 0

    @property
    def tiles_per_part(self) -> int:
        """Tiles that one replica reduces in two stages; the last replicas get fewer."""
        return -(-self.num_tiles // self.num_replicas)

    @property
    def part_size(self) -> int:
        """Elements of the temporary buffer: a part, and a tail."""
        return (self.tiles_per_part + self.has_tail) * self.tile

    @property
    def layout(self) -> Any:
        """Register layout of a tile: vectors, thread by thread."""
        return plgpu.Layout.WG_STRIDED((self.tile,), vec_size=self.vector)

    def for_each_tile(self, num_tiles: int) -> Callable[[Callable[..., None]], None]:
        """Decorates a function of tile i; a tile has one warpgroup in all loops."""

        def run(fn: Callable[[jax.Array], None]) -> None:
            axes = (BLOCK_AXIS, WARPGROUP_AXIS)

            @plgpu.nd_loop((num_tiles,), collective_axes=axes)
            def _(info):
                fn(info.index[0])

        return run


class Peers(abc.ABC):
    """Replicas of a kernel: the operations that differ between real and virtual ones.

    A reference passed to `load` or `own` is one of the kernel's own arguments. To wait
    for each other, warpgroups count up in semaphores that are zero at the start.
    Counters are never reset, so no second round is needed.
    """

    def __init__(self, tiling: Tiling):
        self.tiling = tiling
        self._arrived: Ref = None  # counter that this warpgroup waits for.

    def scratch(self) -> list[Any]:
        """Returns the scratch memory for `enter`: one counter per warpgroup."""
        return [plgpu.SemaphoreType.REGULAR((self.tiling.num_warpgroups,))]

    def enter(self, *scratch: Ref) -> None:
        """Begins a kernel; called once, before everything else."""
        (arrived,) = scratch
        self._arrived = arrived.at[lax.axis_index(WARPGROUP_AXIS)]

    @abc.abstractmethod
    def rank(self) -> Rank:
        """Returns the rank of this replica, an int if it is known when traced."""

    @abc.abstractmethod
    def own(self, ref: Ref) -> Ref:
        """Returns this replica's buffer."""

    @abc.abstractmethod
    def load(self, ref: Ref, peer: Rank, offset: Rank) -> jax.Array:
        """Loads a tile, shape (tile,), of the buffer of `peer`."""

    def meet(self, phase: int) -> None:
        """Waits until this warpgroup has reached `phase` = 1, 2, ... on all replicas.

        Their earlier writes are visible to all afterwards, as
        `mosaic_kernels.SignalAll` explains.
        """
        self._signal_all()
        count = self.tiling.num_replicas * phase
        pl.semaphore_wait(self._counter(), count, decrement=False)

    @abc.abstractmethod
    def _signal_all(self) -> None:
        """Adds one to the counter of this warpgroup on every replica, at once."""

    def _counter(self) -> Ref:
        """Returns the counter that other replicas add to."""
        return self._arrived


class RemotePeers(Peers):
    """Replicas that are GPUs: devices of a mesh axis, read through `remote_ref`."""

    def __init__(self, tiling: Tiling, axis_name: AxisName):
        super().__init__(tiling)
        self.axis_names = types.as_axis_names(axis_name)
        self.sizes = [lax.axis_size(name) for name in self.axis_names]

    def rank(self) -> jax.Array:
        """Returns the index along the axis."""
        return lax.axis_index(self.axis_names)

    def own(self, ref: Ref) -> Ref:
        """Returns the reference itself."""
        return ref

    def load(self, ref: Ref, peer: Rank, offset: Rank) -> jax.Array:
        """Loads over NVLink."""
        t = self.tiling
        return mosaic_kernels.load_from_peer(
            ref.at[pl.ds(offset, t.tile)], self._device(peer), t.layout, t.vector
        )

    def _signal_all(self) -> None:
        first, offsets = self._devices()
        mosaic_kernels.signal_all_devices(self._arrived, first, offsets)

    def meet_by_switch(self) -> None:
        """Waits, once per kernel, for all replicas and the data that the switch wrote.

        The signal takes the same way as the data, so it arrives after the data.
        """
        plgpu.semaphore_signal_multicast(self._arrived, collective_axes=self.axis_names)
        pl.semaphore_wait(self._arrived, self.tiling.num_replicas, decrement=False)

    def _devices(self) -> tuple[jax.Array, tuple[int, ...]]:
        """Finds the devices of the replicas, in the order of the mesh.

        Returns:
          The device index of rank 0, and per rank the offset from it.
        """
        first: Rank = 0
        strides: dict[str, int] = {}  # devices from one index of an axis to the next.
        stride = 1
        for name, size in reversed(jax.sharding.get_abstract_mesh().shape.items()):
            if name not in self.axis_names:
                first = first + stride * lax.axis_index(name)
            strides[name], stride = stride, stride * size
        steps = [
            [strides[name] * i for i in range(size)]
            for name, size in zip(self.axis_names, self.sizes, strict=True)
        ]
        offsets = tuple(map(sum, itertools.product(*steps)))
        return jnp.asarray(first, jnp.int32), offsets

    def _device(self, rank: Rank) -> dict[str, Rank]:
        """Returns the mesh coordinates of a rank; other axes stay at this device's."""
        rank = jnp.asarray(rank, jnp.int32)
        device: dict[str, Rank] = {}
        for name, size in zip(self.axis_names[::-1], self.sizes[::-1], strict=True):
            device[name] = lax.rem(rank, size)
            rank = lax.div(rank, size)
        return device


class ClusterPeers(Peers):
    """Replicas that are blocks of a cluster on one GPU; for correctness, not speed.

    Buffers have one row per replica, shape (num_replicas, n). The blocks of a cluster
    run at the same time, so that they can wait for each other.
    """

    def scratch(self) -> list[Any]:
        """Returns nothing, since other blocks could not see it."""
        return []

    def enter(self, *scratch: Ref) -> None:
        """Gets the counters of all replicas."""
        t = self.tiling
        shape = (t.num_blocks, t.num_warpgroups, t.num_replicas)
        every = pl.get_global(plgpu.SemaphoreType.REGULAR(shape))
        block, warpgroup = map(lax.axis_index, (BLOCK_AXIS, WARPGROUP_AXIS))
        self._arrived = every.at[block, warpgroup]

    def rank(self) -> jax.Array:
        """Returns the index of the block in its cluster."""
        return lax.axis_index(RANK_AXIS)

    def own(self, ref: Ref) -> Ref:
        """Returns the row of this replica."""
        return ref.at[self.rank()]

    def load(self, ref: Ref, peer: Rank, offset: Rank) -> jax.Array:
        """Loads from a row."""
        return _load(ref.at[peer, pl.ds(offset, self.tiling.tile)], self.tiling)

    def _signal_all(self) -> None:
        everyone = tuple(range(self.tiling.num_replicas))
        mosaic_kernels.signal_all(self._arrived, everyone)

    def _counter(self) -> Ref:
        return self._arrived.at[self.rank()]


class SoloPeers(Peers):
    """One replica alone on one GPU, to time its work.

    The input has one row per replica, shape (num_replicas, n). A pair of references
    stands for a temporary buffer: this replica's own, and the rows that the peers would
    have written. The time is a lower bound, with local memory in place of NVLink and no
    peer to wait for.
    """

    def __init__(self, tiling: Tiling, rank: int):
        super().__init__(tiling)
        self._rank = rank

    def rank(self) -> int:
        """Returns the rank, which is known when traced."""
        return self._rank

    def own(self, ref: Ref) -> Ref:
        """Returns the first of a pair, or the reference itself."""
        return ref[0] if isinstance(ref, tuple) else ref

    def load(self, ref: Ref, peer: Rank, offset: Rank) -> jax.Array:
        """Loads from a row, or from the own temporary buffer."""
        span = pl.ds(offset, self.tiling.tile)
        if isinstance(ref, tuple):
            own, rows = ref
            is_own = peer == self._rank
            return _load(own.at[span] if is_own else rows.at[peer, span], self.tiling)
        return _load(ref.at[peer, span], self.tiling)

    def _signal_all(self) -> None:
        """Signals itself as often as it would signal other replicas.

        ptxas merges the atomics of a warp to one address into one. The fence before it,
        which takes most of the time, is the same.
        """
        mosaic_kernels.signal_all(self._arrived, (0,) * self.tiling.num_replicas)


def _load(ref: Ref, tiling: Tiling) -> jax.Array:
    return plgpu.layout_cast(ref[...], tiling.layout)
