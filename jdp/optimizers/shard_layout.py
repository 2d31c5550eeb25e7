"""Shard layout: arrays cut into one shard per replica."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import compat
from jdp.collectives import base
from jdp.collectives.base import ReduceScatterAllGather
from jdp.types import AxisName

ArrayT = TypeVar("ArrayT", jax.Array, np.ndarray)


class ArrayShard(NamedTuple):
    """Shard of an array on one replica."""

    # Shape (1, ceil(size / num_replicas)), the shape of a row of the state: XLA neither
    # copies nor recomputes arrays that keep their shape up to the result.
    data: jax.Array
    shape: tuple[int, ...]  # of the whole array.

    @property
    def row(self) -> jax.Array:
        """The data, shape (k,)."""
        return lax.squeeze(self.data, (0,))  # `data[0]` takes ten times as long.


class ShardLayout(NamedTuple):
    """Replicas that have the shards of an array, as seen from one of them."""

    axis_name: AxisName
    num_replicas: int
    rank: jax.Array  # int32 ().

    @property
    def tracked_axes(self) -> frozenset[str]:
        """The mesh axes over which JAX tracks varying values by type here."""
        return compat.varying_axes(self.rank)

    def cut(self, x: jax.Array) -> ArrayShard:
        """Returns this replica's shard of an array."""
        rows = self.rows(x)
        # Not `dynamic_slice_in_dim`, which adds equations for a negative index.
        start = (self.rank, np.int32(0))
        data = lax.dynamic_slice(
            rows, start, (1, rows.shape[1]), allow_negative_indices=False
        )
        return ArrayShard(data, x.shape)

    def as_shard(self, x: "ArrayShard | jax.Array") -> ArrayShard:
        """Returns a shard as it is, and this replica's shard of an array."""
        return x if isinstance(x, ArrayShard) else self.cut(x)

    def rows(self, x: jax.Array) -> jax.Array:
        """Cuts an array into the shards of all replicas: shape (num_replicas, k)."""
        n = self.num_replicas
        if x.size % n:
            x = base.pad(jnp.ravel(x), n)
        return lax.reshape(x, (n, x.size // n))

    def width(self, shape: Sequence[int]) -> int:
        """Returns the number of elements per shard of an array of this shape."""
        return -(-math.prod(shape) // self.num_replicas)

    def mask(self, shard: ArrayShard, fill: Any) -> jax.Array:
        """Returns the data of a shard with `fill` in place of the padding."""
        size = math.prod(shard.shape)
        if size % self.num_replicas == 0:
            return shard.data
        position = self.rank * shard.data.size + jnp.arange(shard.data.size)
        return jnp.where(
            position < size, shard.data, jnp.asarray(fill, shard.data.dtype)
        )


def find_layout(axis_name: AxisName) -> ShardLayout:
    """Returns the layout over an axis, while tracing."""
    group = base.find_group(axis_name)
    return ShardLayout(axis_name, group.size, group.rank)


def restore(rows: ArrayT, shape: tuple[int, ...]) -> ArrayT:
    """Puts the shards of all replicas, shape (num_replicas, k), together."""
    if rows.size == math.prod(shape):
        return rows.reshape(shape)
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape)


def scatter(
    rows: Sequence[jax.Array], layout: ShardLayout, halves: ReduceScatterAllGather
) -> list[jax.Array]:
    """Averages arrays over the replicas; each replica gets its shards of the means.

    Args:
      rows: arrays of one dtype, shape (num_replicas, k) each; see `ShardLayout.rows`.
      layout: the replicas; replica i gets row i.
      halves: the reduce-scatter to use.

    Returns:
      One array of shape (1, k) per array of `rows`.
    """
    axis_name = layout.axis_name
    if halves.scatter_rows is not None and layout.num_replicas > 1:
        parts = halves.scatter_rows(rows, axis_name, op="mean")
    else:
        packed = jnp.concatenate(rows, axis=1).reshape(-1)
        part = halves.reduce_scatter(packed, axis_name, op="mean")
        parts = _cut_up(part, [row.shape[1] for row in rows])
    return [lax.reshape(part, (1, part.size)) for part in parts]


def gather(
    shards: Sequence[ArrayShard], layout: ShardLayout, halves: ReduceScatterAllGather
) -> list[jax.Array]:
    """Gathers whole arrays from shards of one dtype, in one collective."""
    axis_name = layout.axis_name
    if shards[0].data.dtype == jnp.bool_:
        as_bytes = [p._replace(data=p.data.astype(jnp.uint8)) for p in shards]
        return [x.astype(jnp.bool_) for x in gather(as_bytes, layout, halves)]
    parts = [base.cast_varying(shard.row, axis_name) for shard in shards]
    if halves.gather_rows is not None and layout.num_replicas > 1:
        rows = halves.gather_rows(parts, axis_name)
    else:
        whole = halves.all_gather(jnp.concatenate(parts), axis_name)
        whole = whole.reshape(layout.num_replicas, -1)
        rows = _cut_up(whole, [part.size for part in parts])
    return [restore(x, p.shape) for x, p in zip(rows, shards, strict=True)]


def _cut_up(x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    """Cuts the last dimension into parts of these widths."""
    ends = list(itertools.accumulate(widths))
    return [
        lax.slice_in_dim(x, end - width, end, axis=-1)
        for width, end in zip(widths, ends, strict=True)
    ]
