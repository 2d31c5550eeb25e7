"""Sums: the total of small values, such as counts, over the replicas."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp import compat, types
from jdp.collectives import base
from jdp.gradients import reduced_values, step_trace, weighted_mean
from jdp.replicas import axes
from jdp.trees import buckets, tree_paths
from jdp.types import AxisName, PyTree


def sum_over_replicas(tree: PyTree, *, axis_name: AxisName | None = None) -> PyTree:
    """Sums small values, such as counts, over the replicas.

    Called inside a traced function by every replica. One collective is sent per dtype.
    In a `jdp.Join`, and for the padding of `jdp.replicated`, values without data do not
    count, whatever they are.

    Args:
      tree: pytree of arrays or numbers of this replica.
      axis_name: the axis, or axes, over which replicas lie; None: the world's.

    Returns:
      A pytree of the same shapes, the same on all replicas. Booleans and narrow
      integers become int32 (int64 with `jax_enable_x64`), as in `jnp.sum`, and float16
      and bfloat16 are summed in float32. A sum that its dtype does not hold wraps, as
      with `jnp.sum`: sum large counts as floats, or with `jax_enable_x64`.

    Raises:
      TypeError: a leaf is neither an array of numbers nor a number.
      ValueError: the axis is not bound.
    """
    axis_name = axes.find(axis_name)
    compat.axis_size(axis_name)  # It raises if the axis is not bound.
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [_as_array(tree, i, x) for i, x in enumerate(leaves)]
    # As `jnp.sum`: booleans and narrow integers become wide ones.
    dtypes = [jax.eval_shape(jnp.sum, x).dtype for x in leaves]
    weighting = step_trace.current().resolve(None, "weight")
    groups: dict[Any, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        wide = dtype
        if jnp.issubdtype(dtype, jnp.inexact):
            wide = weighted_mean.wide_dtype(dtype)
        leaves[i] = base.cast_varying(leaves[i].astype(wide), axis_name)
        if weighting is not None:
            has_data = weighted_mean.has_data(weighting.amount)
            zero = jnp.zeros_like(leaves[i])
            leaves[i] = jnp.where(has_data, leaves[i], zero)
        groups.setdefault(jnp.dtype(wide), []).append(i)
    names = types.as_axis_names(axis_name)
    for members in groups.values():
        total = lax.psum(buckets.pack([leaves[i] for i in members]), names)
        shapes = [leaves[i].shape for i in members]
        for i, x in zip(members, buckets.unpack(total, shapes), strict=True):
            leaves[i] = x.astype(dtypes[i])
    reduced_values.note(leaves, "sum")
    return jax.tree.unflatten(treedef, leaves)


def _as_array(tree: PyTree, index: int, leaf: Any) -> jax.Array:
    x = weighted_mean.try_as_array(leaf)
    if x is None or not _is_number(x.dtype):
        path = tree_paths.leaf_paths(tree)[index]
        found = repr(leaf) if x is None else str(x.dtype)
        raise TypeError(
            "`jdp.sum_over_replicas` takes arrays and numbers, but the leaf "
            f"`{path}` is {found}. Leave it out."
        )
    return x


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_
