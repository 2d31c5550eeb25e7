"""Layout: arrays in as many pieces as there are replicas, one on each."""

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


class Piece(NamedTuple):
    """Part of an array on one replica."""

    # Shape (1, ceil(size / num_replicas)): a state is handed to a step in rows, and XLA
    # neither copies nor computes twice what keeps its shape from there to the result.
    data: jax.Array
    shape: tuple[int, ...]  # of the whole.


class Layout(NamedTuple):
    """The replicas that have the pieces, as one of them sees them."""

    axis_name: AxisName
    num_replicas: int
    rank: jax.Array  # int32 ().

    @property
    def tracked_axes(self) -> frozenset[str]:
        """The axes whose varying values JAX tracks by type here."""
        return compat.varying_axes(self.rank)

    def cut(self, x: jax.Array) -> Piece:
        """Returns this replica's piece of an array."""
        return Piece(lax.dynamic_slice_in_dim(self.rows(x), self.rank, 1), x.shape)

    def rows(self, x: jax.Array) -> jax.Array:
        """Cuts an array into the pieces of all replicas: shape (num_replicas, k)."""
        return base.pad(jnp.ravel(x), self.num_replicas).reshape(self.num_replicas, -1)

    def width(self, shape: Sequence[int]) -> int:
        """Elements of a piece of an array."""
        return -(-math.prod(shape) // self.num_replicas)

    def mask(self, piece: Piece, fill: Any) -> jax.Array:
        """Returns the data of a piece with `fill` where the whole has ended."""
        size = math.prod(piece.shape)
        if size % self.num_replicas == 0:
            return piece.data
        position = self.rank * piece.data.size + jnp.arange(piece.data.size)
        return jnp.where(
            position < size, piece.data, jnp.asarray(fill, piece.data.dtype)
        )


def find_layout(axis_name: AxisName) -> Layout:
    """Returns the replicas of an axis, while tracing."""
    group = base.find_group(axis_name)
    return Layout(axis_name, group.size, group.rank)


def restore(rows: ArrayT, shape: tuple[int, ...]) -> ArrayT:
    """Puts the pieces of all replicas, shape (num_replicas, k), together."""
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape)


def scatter(
    rows: Sequence[jax.Array], layout: Layout, halves: ReduceScatterAllGather
) -> list[jax.Array]:
    """Averages the rows of all replicas, of which each gets its own.

    Args:
      rows: of one dtype, shape (num_replicas, k) each; see `Layout.rows`.
      layout: who gets which.
      halves: of the all-reduce that does it.

    Returns:
      Shape (1, k) each.
    """
    axis_name = layout.axis_name
    if halves.scatter_rows is not None and layout.num_replicas > 1:
        parts = halves.scatter_rows(rows, axis_name, op="mean")
    else:
        packed = jnp.concatenate(rows, axis=1).reshape(-1)
        part = halves.reduce_scatter(packed, axis_name, op="mean")
        parts = _cut_up(part, [row.shape[1] for row in rows])
    return [part[None] for part in parts]


def gather(
    pieces: Sequence[Piece], layout: Layout, halves: ReduceScatterAllGather
) -> list[jax.Array]:
    """Puts pieces of one dtype together on all replicas, in one collective."""
    axis_name = layout.axis_name
    if pieces[0].data.dtype == jnp.bool_:
        as_bytes = [p._replace(data=p.data.astype(jnp.uint8)) for p in pieces]
        return [x.astype(jnp.bool_) for x in gather(as_bytes, layout, halves)]
    parts = [base.cast_varying(piece.data[0], axis_name) for piece in pieces]
    if halves.gather_rows is not None and layout.num_replicas > 1:
        rows = halves.gather_rows(parts, axis_name)
    else:
        whole = halves.all_gather(jnp.concatenate(parts), axis_name)
        whole = whole.reshape(layout.num_replicas, -1)
        rows = _cut_up(whole, [part.size for part in parts])
    return [restore(x, p.shape) for x, p in zip(rows, pieces, strict=True)]


def _cut_up(x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    """Cuts the last dimension."""
    ends = list(itertools.accumulate(widths))
    return [
        lax.slice_in_dim(x, end - width, end, axis=-1)
        for width, end in zip(widths, ends, strict=True)
    ]
