"""Pallas bodies: the algorithms of the custom all-reduce, for one replica."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jdp.collectives.pallas.peers import Peers, Rank, Ref, RemotePeers, Tiling

Scale = Any  # a float, a reference to float32 (1,), or None.


def one_stage(peers: Peers, tiling: Tiling, x: Ref, y: Ref, scale: Scale) -> None:
    """Sums on every replica the buffers of all replicas.

    All replicas sum in rank order, so that they get the same bits.
    """
    t, order = tiling, range(tiling.num_replicas)
    y = peers.own(y)

    def reduce_at(offset: Rank) -> None:
        y[pl.ds(offset, t.tile)] = _reduce(peers, t, x, order, offset, scale)

    @t.for_each_tile(t.num_tiles)
    def _(i):
        reduce_at(pl.multiple_of(i * t.tile, t.tile))
        _when(t.has_tail and i == t.num_tiles - 1, lambda: reduce_at(t.size - t.tile))

    peers.meet(1)  # No replica may go on and free `x` while a peer reads it.


def two_stage(
    peers: Peers, tiling: Tiling, x: Ref, y: Ref, part: Ref, scale: Scale
) -> None:
    """Sums one part of the buffer on every replica; then each gathers all parts.

    One replica sums a part, so that all get the same bits, in any order of summation.
    The warpgroup that wrote a tile meets the warpgroups that will read it: they have
    the same index in the same block of their replicas, because both loops give tile i
    of a part to the same warpgroup. So no barrier of the whole grid is needed.

    Args:
      peers: the replicas.
      tiling: tiling of `x`.
      x: shape (n,), the buffer to be reduced.
      y: shape (n,), the result.
      part: shape (tiling.part_size,), the sums of this replica.
      scale: factor of the sum.
    """
    t, n, rank = tiling, tiling.num_replicas, peers.rank()
    # Each replica begins with another peer, so that not all read from the same one.
    order = [_rem(rank + i, n) for i in range(n)]
    y, own_part = peers.own(y), peers.own(part)
    tail_owner, tail_index = divmod(t.num_tiles - 1, t.tiles_per_part)
    tail_at = t.tiles_per_part * t.tile  # in the part, behind its tiles.

    @t.for_each_tile(t.tiles_per_part)
    def _(i):
        def reduce_at(offset: Rank, to: Rank) -> None:
            total = _reduce(peers, t, x, order, offset, scale)
            own_part[pl.ds(to, t.tile)] = total

        tile = rank * t.tiles_per_part + i
        at = pl.multiple_of(i * t.tile, t.tile)
        from_ = pl.multiple_of(tile * t.tile, t.tile)
        _when(_is_full(t) or tile < t.num_tiles, lambda: reduce_at(from_, at))
        is_tail = t.has_tail and tile == t.num_tiles - 1
        _when(is_tail, lambda: reduce_at(t.size - t.tile, tail_at))

    peers.meet(1)

    @t.for_each_tile(t.tiles_per_part)
    def _(i):
        at = pl.multiple_of(i * t.tile, t.tile)
        # All loads first, as each takes long. Tiles beyond the buffer are not stored.
        sums = [peers.load(part, p, at) for p in order]
        for p, total in zip(order, sums, strict=True):
            tile = p * t.tiles_per_part + i
            to = pl.multiple_of(tile * t.tile, t.tile)
            is_there = _is_full(t) or tile < t.num_tiles
            _when(is_there, lambda to=to, total=total: _store(y, t, to, total))

        def gather_tail() -> None:
            _store(y, t, t.size - t.tile, peers.load(part, tail_owner, tail_at))

        _when(t.has_tail and i == tail_index, gather_tail)

    peers.meet(2)  # No replica may go on while a peer reads its part.


def multimem(peers: RemotePeers, tiling: Tiling, x: Ref, y: Ref, scale: Scale) -> None:
    """Lets the NVLink switch sum one part per replica and send it to all replicas.

    It needs GPUs on a switch that reduces (NVLink SHARP). A part is summed once, so
    that all replicas get the same bits. There is no tail, which the switch would sum
    twice, possibly with different results.
    """
    t, axes = tiling, peers.axis_names
    first = peers.rank() * t.tiles_per_part
    assert not t.has_tail

    @t.for_each_tile(t.tiles_per_part)
    def _(i):
        def reduce() -> None:
            span = pl.ds(pl.multiple_of((first + i) * t.tile, t.tile), t.tile)
            total = plgpu.multimem_load_reduce(
                x.at[span], collective_axes=axes, reduction_op="add"
            )
            total = plgpu.layout_cast(total, t.layout).astype(jnp.float32)
            plgpu.multimem_store(_finish(total, scale, t.dtype), y.at[span], axes)

        _when(_is_full(t) or first + i < t.num_tiles, reduce)

    peers.meet_by_switch()  # All parts have arrived, and no peer still reads.


def _reduce(
    peers: Peers,
    tiling: Tiling,
    x: Ref,
    order: Sequence[Rank],
    offset: Rank,
    scale: Scale,
) -> jax.Array:
    """Sums a tile over all replicas, in float32; all loads first."""
    tiles = [peers.load(x, p, offset) for p in order]
    total = tiles[0].astype(jnp.float32)
    for tile in tiles[1:]:
        total = total + tile.astype(jnp.float32)
    return _finish(total, scale, tiling.dtype)


def _finish(total: jax.Array, scale: Scale, dtype: Any) -> jax.Array:
    if scale is not None:
        factor = scale if isinstance(scale, float) else scale[0]
        total = total * factor
    return total.astype(dtype)


def _store(ref: Ref, tiling: Tiling, offset: Rank, tile: jax.Array) -> None:
    ref[pl.ds(offset, tiling.tile)] = tile


def _is_full(tiling: Tiling) -> bool:
    """Whether all parts have the same number of tiles."""
    return tiling.num_tiles % tiling.num_replicas == 0


def _when(condition: bool | jax.Array, fn) -> None:
    """Runs `fn` if `condition`; makes no branch if that is known when traced."""
    if isinstance(condition, bool):
        if condition:
            fn()
    else:
        pl.when(condition)(fn)


def _rem(a: Rank, n: int) -> Rank:
    return a % n if isinstance(a, int) else lax.rem(a, n)
