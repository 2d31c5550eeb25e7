"""Row selection: gradients of tables of which only the nonzero rows travel."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import types
from jdp.hooks.base import CommHook, HookAllReduce, is_real, map_buckets
from jdp.trees import buckets as packing
from jdp.trees.buckets import BucketAval


class RowsState(NamedTuple):
    """State of `rows`: shapes, and no arrays.

    Attributes:
      leaf_shapes: per bucket, the shapes of its leaves.
    """

    leaf_shapes: tuple[tuple[tuple[int, ...], ...], ...]


# `flax.serialization` writes any namedtuple; its numbers are not leaves.
jax.tree_util.register_static(RowsState)


def rows(max_rows: int) -> CommHook[RowsState]:
    """Returns the hook that sends the nonzero rows of tables, exactly.

    It is meant for embeddings: the gradient of a table, (r, c), has one nonzero row per
    distinct token in the replica's samples. Each replica sends `max_rows` rows with
    their indices and adds up the rows of all replicas in rank order. The result is the
    sum of an all-reduce, in another order of summation. In a step in which any replica
    has more nonzero rows in a table, the bucket of that table travels whole.

    Args:
      max_rows: most rows per table that a replica sends, for example the number of
        tokens in its batch.

    Returns:
      The hook; its state need not be kept. Leaves that are not two-dimensional tables
      of real floats travel unchanged. So do tables that would not become smaller: with
      n replicas and 4-byte floats, tables for which n * max_rows * (c + 1) is not below
      the 2 * r * c of an all-reduce.

    Raises:
      TypeError: `max_rows` is not an integer.
      ValueError: `max_rows` is below 1.
    """
    max_rows = types.as_count(max_rows, "max_rows", least=1)

    def init(avals: Sequence[BucketAval]) -> RowsState:
        return RowsState(tuple(aval.leaf_shapes for aval in avals))

    def apply(
        buckets: list[jax.Array], state: RowsState, all_reduce: HookAllReduce
    ) -> tuple[list[jax.Array], RowsState]:
        sums = map_buckets(
            lambda x, shapes: _sum(x, shapes, max_rows, all_reduce),
            all_reduce,
            buckets,
            state.leaf_shapes,
        )
        return sums, state

    return CommHook(init, apply, f"rows({max_rows})", only_sums=False)


def _sum(
    bucket: jax.Array,
    leaf_shapes: Sequence[tuple[int, ...]],
    max_rows: int,
    all_reduce: HookAllReduce,
) -> jax.Array:
    """Sums one bucket over the replicas."""
    num_replicas = all_reduce.num_replicas
    places = [
        i
        for i, shape in enumerate(leaf_shapes)
        if is_real(bucket.dtype)
        and _is_smaller(shape, bucket.dtype.itemsize, max_rows, num_replicas)
    ]
    if not places:
        return all_reduce(bucket)
    leaves = packing.unpack(bucket, leaf_shapes)
    is_nonzero = [jnp.any(leaves[i] != 0, axis=1) for i in places]  # NaN is not zero.
    is_too_many = [jnp.sum(found) > max_rows for found in is_nonzero]
    is_any = jnp.any(jnp.stack(is_too_many)).astype(jnp.float32).reshape(1)
    is_sparse = all_reduce(is_any)[0] == 0

    def sparse() -> jax.Array:
        sums = list(leaves)
        others = [i for i in range(len(leaves)) if i not in places]
        if others:
            total = all_reduce(packing.pack([leaves[i] for i in others]))
            parts = packing.unpack(total, [leaves[i].shape for i in others])
            for i, part in zip(others, parts, strict=True):
                sums[i] = part
        tables = [leaves[i] for i in places]
        found = _sum_rows_of(tables, is_nonzero, max_rows, all_reduce)
        for i, table in zip(places, found, strict=True):
            sums[i] = table
        return packing.pack(sums)

    return all_reduce.switch(is_sparse, sparse, lambda: all_reduce(bucket))


def _sum_rows_of(
    tables: list[jax.Array],
    is_nonzero: list[jax.Array],
    max_rows: int,
    all_reduce: HookAllReduce,
) -> list[jax.Array]:
    """Sums tables with at most `max_rows` nonzero rows per replica, in two gathers."""
    indices = [
        # The index after the last stands for an unused slot.
        jnp.nonzero(found, size=max_rows, fill_value=len(found))[0].astype(jnp.int32)
        for found in is_nonzero
    ]
    sent = [
        x.at[at].get(mode="fill", fill_value=0)
        for x, at in zip(tables, indices, strict=True)
    ]
    values_of_all = all_reduce.gather(packing.pack(sent))
    indices_of_all = all_reduce.gather(packing.pack(indices))
    sums = []
    for table in tables:
        is_narrow = jnp.finfo(table.dtype).bits < 32
        wide: Any = jnp.dtype(jnp.float32) if is_narrow else table.dtype
        sums.append(jnp.zeros_like(values_of_all, wide, shape=table.shape))
    # In rank order, so that all replicas round alike.
    for values, places in zip(values_of_all, indices_of_all, strict=True):
        parts = packing.unpack(values, [x.shape for x in sent])
        ats = packing.unpack(places, [at.shape for at in indices])
        for k, (part, at) in enumerate(zip(parts, ats, strict=True)):
            sums[k] = sums[k].at[at].add(part.astype(sums[k].dtype), mode="drop")
    return [x.astype(t.dtype) for x, t in zip(sums, tables, strict=True)]


def _is_smaller(
    shape: tuple[int, ...], itemsize: int, max_rows: int, num_replicas: int
) -> bool:
    """Whether the rows and indices of all replicas are smaller than an all-reduce."""
    if len(shape) != 2:
        return False
    num_rows, num_columns = shape
    sparse = num_replicas * max_rows * (num_columns * itemsize + 4)
    return sparse < 2 * num_rows * num_columns * itemsize
