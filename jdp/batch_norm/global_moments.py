"""Global moments: mean and variance of all replicas' samples, in one collective."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import compat, types
from jdp.compat import origins
from jdp.trees import buckets
from jdp.types import AxisName


class Moments(NamedTuple):
    """Mean and variance of each feature."""

    mean: jax.Array  # at least float32, or complex; the shape of the features.
    var: jax.Array  # real; biased, as in Flax: divided by the count.


def cast_together(moments: Moments, axis_name: AxisName | None) -> Moments:
    """Casts to values that vary over `axis_name`; the transpose is one collective."""
    if axis_name is None or not compat.tracked_axes(axis_name):
        return moments
    parts = _real_parts(moments)
    with origins.bound_by(origins.BATCH_NORM):  # Its transpose is a collective.
        packed = compat.cast_tree_varying(buckets.pack(parts), axis_name)
    return Moments(*_from_real_parts(_unpacked(packed, parts), moments))


def take(
    x: jax.Array,
    weight: jax.Array | None,
    *,
    axes: Sequence[int],
    axis_name: AxisName | None,
    one_pass: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns mean, variance and count over all replicas, with the dimensions of x.

    Args:
      x: shape (n, ...); samples of this replica.
      weight: see `jdp.batch_norm.layer.Inputs`.
      axes: dimensions of x to reduce.
      axis_name: axes of replicas; None: this replica alone.
      one_pass: whether to read x once, around one sample, not twice.
    """
    count, mean, squares = _local_moments(x, weight, axes, one_pass)
    if axis_name is None:
        total = jnp.where(count > 0, count, 1)
        return mean, squares / total, count
    names = types.as_axis_names(axis_name)
    num_replicas = lax.axis_size(names)
    is_mine = jnp.arange(num_replicas) == compat.axis_index(names)

    def in_own_row(part: jax.Array) -> jax.Array:
        return jnp.where(is_mine.reshape(-1, *(1,) * part.ndim), part, 0)

    # Without weights, all replicas have the same count: the shapes are the same.
    sent = [*map(in_own_row, _real_parts([mean]))]
    sent += [squares] if weight is None else [squares, in_own_row(count)]
    packed = buckets.pack(sent)
    with origins.bound_by(origins.BATCH_NORM):
        packed = compat.cast_tree_varying(packed, axis_name)
        summed = lax.psum(packed, axis_name)
    received = _unpacked(summed, sent)
    if weight is not None:
        counts = received.pop()
    else:
        counts = jnp.broadcast_to(count, (num_replicas, *count.shape))
    squares = received.pop()
    (means,) = _from_real_parts(received, [mean])
    return _combine(counts, means, squares)


def _combine(
    counts: jax.Array, means: jax.Array, squares: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Combines the statistics of the replicas, which lie along dimension 0."""
    total = counts.sum(0)
    divisor = jnp.where(total > 0, total, 1)
    share = counts / divisor[None]
    rough = lax.stop_gradient((share * means).sum(0))  # any near value does.
    off = means - rough[None]
    left = (share * off).sum(0)  # rounding error of `rough`.
    between = (share * _abs_squared(off)).sum(0) - _abs_squared(left)
    var = squares / divisor + jnp.maximum(between, 0)
    return rough + left, var, total


def _local_moments(
    x: jax.Array, weight: jax.Array | None, axes: Sequence[int], one_pass: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns count, mean, and sum of squares around it, of this replica's samples."""
    real = jnp.finfo(x.dtype).dtype
    if weight is None:
        size = math.prod(x.shape[a] for a in axes)
        count = jnp.full((1,) * x.ndim, size, real)
    else:
        weight = weight.astype(real)
        repeats = math.prod(x.shape[a] for a in axes if weight.shape[a] == 1)
        count = repeats * weight.sum(axes, keepdims=True)
    divisor = jnp.where(count > 0, count, 1)

    def average(values: jax.Array) -> jax.Array:
        if weight is not None:
            values = jnp.where(weight > 0, values, jnp.zeros_like(values)) * weight
        return values.sum(axes, keepdims=True) / divisor

    pivot = _some_sample(x, weight, axes) if one_pass else None
    pivot = lax.stop_gradient(average(x) if pivot is None else pivot)
    centred = x - pivot
    if weight is not None:  # Squares of values that do not count must not overflow.
        centred = jnp.where(weight > 0, centred, jnp.zeros_like(centred))
    left = average(centred)
    squares = average(_abs_squared(centred)) - _abs_squared(left)
    return count, pivot + left, count * jnp.maximum(squares, 0)


def _some_sample(
    x: jax.Array, weight: jax.Array | None, axes: Sequence[int]
) -> jax.Array | None:
    """Returns the first sample that counts, or None if finding it costs a pass.

    Squares around one of n samples lose at most the digits of n, since a sample lies at
    most sqrt(n) deviations from the mean.
    """
    if x.size == 0 or not axes:
        return jnp.zeros(_kept_dims(x, axes), x.dtype)
    if weight is None:
        sample = x
    elif 0 in axes and weight.size == weight.shape[0]:
        first = jnp.argmax(weight.ravel() > 0)
        sample = lax.dynamic_index_in_dim(x, first, 0)
        sample = jnp.where(weight.max() > 0, sample, jnp.zeros_like(sample))
    else:
        return None
    for axis in axes:
        sample = lax.slice_in_dim(sample, 0, 1, axis=axis)
    return sample


def _kept_dims(x: jax.Array, axes: Sequence[int]) -> list[int]:
    return [1 if i in axes else size for i, size in enumerate(x.shape)]


def _abs_squared(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return lax.square(x.real) + lax.square(x.imag)
    return lax.square(x)


def _real_parts(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Splits each complex array into its real and imaginary parts."""
    parts: list[jax.Array] = []
    for x in arrays:
        parts += [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    return parts


def _from_real_parts(
    parts: Sequence[jax.Array], like: Sequence[jax.Array]
) -> list[jax.Array]:
    left = iter(parts)
    return [
        lax.complex(next(left), next(left)) if jnp.iscomplexobj(x) else next(left)
        for x in like
    ]


def _unpacked(buffer: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    return list(buckets.unpack(buffer, [np.shape(x) for x in like]))
