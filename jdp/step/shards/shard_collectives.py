"""Shard collectives: the results of collectives, given the values of all shards.

A function of this module takes the rows of all shards, shape (num_shards, ...), the
number of a shard, int32 (), and the parameters of the collective. It returns what the
collective gives that shard.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp.collectives import base, fixed_tree


def all_gather(rows: jax.Array, index: jax.Array, params: Any) -> jax.Array:
    """Returns the result of `lax.all_gather`."""
    rows = _of_group(rows, index, params)
    dim = params["all_gather_dimension"]
    if not params["tiled"]:
        return jnp.moveaxis(rows, 0, dim)
    return jnp.concatenate(list(rows), axis=dim)


def psum(rows: jax.Array, index: jax.Array, params: Any) -> jax.Array:
    """Returns the result of a `lax.psum` with groups."""
    own = _of_group(rows, index, params)
    wide = own.astype(base.accumulator(own.dtype, "sum"))
    total = fixed_tree.reduce_in_order(list(wide), lambda a, b: a + b)
    return total.astype(own.dtype)


def reduce_scatter(rows: jax.Array, index: jax.Array, params: Any) -> jax.Array:
    """Returns the result of `lax.psum_scatter` with groups."""
    return part_of(psum(rows, index, params), index, params)


def part_of(total: jax.Array, index: jax.Array, params: Any) -> jax.Array:
    """Returns the part of a sum that a `lax.psum_scatter` gives a shard."""
    dim, size = params["scatter_dimension"], params["axis_size"]
    rank = _rank_in_group(index, params)
    if params["tiled"]:
        width = total.shape[dim] // size
        return lax.dynamic_slice_in_dim(total, rank * width, width, dim)
    return lax.dynamic_index_in_dim(total, rank, dim, keepdims=False)


def all_to_all(rows: jax.Array, index: jax.Array, params: Any) -> jax.Array:
    """Returns the result of `lax.all_to_all`."""
    rows = _of_group(rows, index, params)
    split, joined = params["split_axis"], params["concat_axis"]
    rank, count = _rank_in_group(index, params), len(rows)
    if params["tiled"]:
        width = rows.shape[1 + split] // count
        parts = lax.dynamic_slice_in_dim(rows, rank * width, width, 1 + split)
        return jnp.concatenate(list(parts), axis=joined)
    parts = lax.dynamic_index_in_dim(rows, rank, 1 + split, keepdims=False)
    return jnp.moveaxis(parts, 0, joined)


def ppermute(rows: jax.Array, index: jax.Array, params: Any) -> jax.Array:
    """Returns the result of `lax.ppermute`."""
    sources = [len(rows)] * len(rows)
    for source, destination in params["perm"]:
        sources[destination] = source
    source = jnp.asarray(sources)[index]
    found = lax.dynamic_index_in_dim(rows, source, keepdims=False)
    return jnp.where(source < len(rows), found, jnp.zeros_like(found))


def _of_group(rows: jax.Array, index: jax.Array, params: Any) -> jax.Array:
    """Returns the rows of the group that a shard is in."""
    groups = params.get("axis_index_groups")
    if not groups:
        return rows
    group_of = {shard: list(group) for group in groups for shard in group}
    members = jnp.asarray([group_of[shard] for shard in range(len(rows))])
    return rows[members[index]]


def _rank_in_group(index: jax.Array, params: Any) -> jax.Array:
    groups = params.get("axis_index_groups")
    if not groups:
        return index
    ranks = {shard: rank for group in groups for rank, shard in enumerate(group)}
    return jnp.asarray([ranks[shard] for shard in range(len(ranks))])[index]


# By the name of the collective.
FROM_ROWS: dict[str, Callable[[jax.Array, jax.Array, Any], jax.Array]] = {
    fn.__name__: fn for fn in (all_gather, all_to_all, ppermute, psum, reduce_scatter)
}
