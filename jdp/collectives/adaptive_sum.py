"""Adaptive sum: gradients that agree are averaged, and orthogonal ones are added."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdp.collectives import base, folding
from jdp.replicas import axes
from jdp.trees import buckets, tree_paths
from jdp.types import AxisName, PyTree


def adasum(tree: PyTree, axis_name: AxisName | None = None) -> PyTree:
    """Combines gradients as Horovod's `op=Adasum` does, tensor by tensor.

    Two gradients become

        (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b,

    their sum if they are orthogonal and their mean if they are parallel (Maleki et al.,
    2020, "Scaling distributed training with adaptive summation"). Replicas combine in
    pairs at distance 1, 2, 4, ..., in log2(n) exchanges of all gradients, so their
    order matters. As in Horovod, results are rounded to the tensor's dtype at every
    level. Dot products are computed in float32 or wider, of numbers scaled so that
    none overflows.

    `adasum` cannot be passed as `all_reduce=`: a bucket holds several tensors, and the
    result is not a sum. Take local gradients and pass all of them in one call.

    Args:
      tree: pytree of floating arrays, any shapes; each leaf is a tensor.
      axis_name: the axis, or axes, over which replicas lie, 2^k of them; None: the axes
        of the world.

    Returns:
      A pytree of the same shapes and dtypes, bitwise the same on all replicas.

    Raises:
      ValueError: the number of replicas is not a power of two.
      TypeError: a leaf is not floating; the message names it.
    """
    axis_name = axes.find(axis_name)
    group = base.find_group(axis_name)
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(x) for x in leaves]
    for path, x in zip(tree_paths.leaf_paths(tree), leaves, strict=True):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"`{path}` must be floating for `adasum`, got {x.dtype}.")
    if group.size & (group.size - 1):
        raise ValueError(
            f"`adasum` needs a power of two of replicas, got {group.size} on "
            f"`axis_name={axis_name!r}`."
        )
    leaves = [base.cast_varying(x, axis_name) for x in leaves]
    by_dtype: dict[jnp.dtype, list[int]] = {}
    for i, x in enumerate(leaves):
        if x.size:
            by_dtype.setdefault(x.dtype, []).append(i)
    team = folding.make_team(group)
    distance = 1
    while distance < team.size:
        for indices in by_dtype.values():
            combined = _one_level(team, [leaves[i] for i in indices], distance)
            for i, x in zip(indices, combined, strict=True):
                leaves[i] = x
        distance *= 2
    leaves = [base.replicated(x, axis_name) for x in leaves]
    return jax.tree.unflatten(treedef, leaves)


def _one_level(
    team: folding.Team, tensors: Sequence[jax.Array], distance: int
) -> list[jax.Array]:
    """Combines tensors of one dtype with the tensors of the replica at `distance`."""
    shapes = [x.shape for x in tensors]
    lower, upper = team.swap_rows(buckets.pack(tensors), distance)
    lower, upper = buckets.unpack(lower, shapes), buckets.unpack(upper, shapes)
    return [_combine(a, b) for a, b in zip(lower, upper, strict=True)]


def _combine(a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = base.accumulator(a.dtype, "sum")
    x, y = a.astype(dtype), b.astype(dtype)
    x_unit, x_scale = _scale(x)
    y_unit, y_scale = _scale(y)
    half_dot = (x_unit * y_unit).sum() / 2
    # If a norm is zero, the dot product is zero too.
    x_share = half_dot / _nonzero((x_unit * x_unit).sum())
    y_share = half_dot / _nonzero((y_unit * y_unit).sum())
    # In this order nothing overflows: |share| * scale is at most the other's norm.
    result = (x - x_share * y_scale * x_unit) + (y - y_share * x_scale * y_unit)
    return result.astype(a.dtype)


def _scale(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits `x` into numbers of order 1 and a power of two, exactly."""
    limit = -int(jnp.finfo(x.dtype).minexp)  # 2^-limit and 2^limit are normal numbers.
    _, exponent = jnp.frexp(jnp.abs(x).max())
    exponent = jnp.clip(exponent - 1, -limit, limit)
    power = functools.partial(jnp.ldexp, jnp.ones((), x.dtype))
    return x * power(-exponent), power(exponent)


def _nonzero(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, 1, x)
