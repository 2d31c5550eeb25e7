"""Batch norm: the mean and variance of the samples of all replicas together."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import compat
from jdp.compat import origins
from jdp.gradients import reduce, step_trace, weighted_mean
from jdp.replicas import mesh
from jdp.trees import buckets
from jdp.types import AxisName

DEFAULT_AXIS = "data"


class Moments(NamedTuple):
    """Mean and variance of each feature."""

    mean: jax.Array  # at least float32, or complex; the shape of the features.
    var: jax.Array  # real; biased, as in Flax: divided by the count.


class Inputs(NamedTuple):
    """Samples that one replica normalises, and how much each counts."""

    x: jax.Array  # (n, ...); zero where it neither counts nor is finite.
    # Both have the number of dimensions of x, each of size 1 or that of x.
    weight: jax.Array | None  # float32, at least 0; None: all count the same.
    is_kept: jax.Array | None  # bool: whose outputs pass a gradient; None: all.


@dataclasses.dataclass(frozen=True)
class Options:
    """How a layer normalises."""

    feature_axes: tuple[int, ...]  # of x; from 0 up, sorted.
    reduction_axes: tuple[int, ...]  # all others.
    axis_name: AxisName | None  # bound here, or None for the samples at hand alone.
    one_pass: bool  # over x, around a sample of its own; False: around their mean.
    epsilon: float
    momentum: float

    def spread(self, values: jax.Array, ndim: int) -> jax.Array:
        """Gives one value a feature the dimensions of x."""
        shape = [1] * ndim
        for size, axis in zip(values.shape, self.feature_axes, strict=True):
            shape[axis] = size
        return values.reshape(shape)


def make_options(
    x: jax.Array,
    *,
    axis: int | Iterable[int],
    axis_name: AxisName | None,
    axis_index_groups: object,
    use_fast_variance: bool,
    epsilon: float,
    momentum: float,
) -> Options:
    """Makes the arguments of a layer of Flax into what is done to `x`.

    Raises:
      ValueError: a feature axis that `x` does not have, an axis name that is not
        bound, or `axis_index_groups`.
    """
    if axis_index_groups is not None:
        raise ValueError(
            "`axis_index_groups` would leave each group of replicas with running "
            "statistics of its own, but the state of a step is the same on all. Leave "
            "it out, or lay the replicas out on a pair of axes, normalise over one of "
            "them with `axis_name=`, and average the statistics with `jdp.average`."
        )
    axes = [int(a) for a in (axis if isinstance(axis, Iterable) else [axis])]
    if not all(-x.ndim <= a < x.ndim for a in axes):
        raise ValueError(
            f"`axis={axis}` must name dimensions of the input, whose shape is "
            f"{x.shape}."
        )
    feature_axes = tuple(sorted({a % x.ndim for a in axes}))
    reduction_axes = tuple(i for i in range(x.ndim) if i not in feature_axes)
    return Options(
        feature_axes,
        reduction_axes,
        find_axis(axis_name),
        use_fast_variance,
        epsilon,
        momentum,
    )


def find_axis(axis_name: AxisName | None) -> AxisName | None:
    """Returns the axes to reduce over: None where nothing is to be communicated.

    That is the case with None, for the default name where it is not bound, and where
    there is one replica.

    Raises:
      ValueError: a name other than the default is not bound.
    """
    if axis_name is None:
        return None
    if axis_name == DEFAULT_AXIS and DEFAULT_AXIS not in compat.bound_axis_names():
        return None
    mesh.check_axis_name(axis_name)
    mesh.axis_size(axis_name)
    return None if reduce.is_alone(axis_name) else axis_name


_sample_weight: contextvars.ContextVar[jax.typing.ArrayLike | None] = (
    contextvars.ContextVar("sample_weight", default=None)
)


@contextlib.contextmanager
def sample_weights(weight: jax.typing.ArrayLike | None) -> Iterator[None]:
    """While a model is called: the weights of its samples, for layers given none.

    For models whose code does not hand weights to its layers:

        with jdp.batch_norm.sample_weights(weight):
            logits = model(images)

    A function inside that JAX has traced before, such as one that is jitted by itself,
    is not traced again for other weights: keep the `with` in what is jitted as a
    whole.

    Args:
      weight: shape (n,), as `jdp.join_batches` yields it; see `SyncBatchNorm`.
    """
    token = _sample_weight.set(weight)
    try:
        yield
    finally:
        _sample_weight.reset(token)


def count_samples(
    x: jax.Array,
    options: Options,
    *,
    weight: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
) -> Inputs:
    """Finds out what of `x` counts, and how much.

    The outputs of samples of weight 0 pass no gradient, nor do those of a replica on
    which nothing counts: what its loss makes of them, such as 0 / 0, must not reach
    the others through the statistics. Outside of `mask` they do, as in Flax.

    Args:
      x: shape (n, ...).
      options: of the layer.
      weight: shape (n,); None: that of `sample_weights`. Negative numbers and NaN
        count as 0. In a `jdp.Join`, a replica without data has 0 in any case.
      mask: bool, of a shape that broadcasts to that of `x`.

    Raises:
      ValueError: `weight` or `mask` has another shape, or there is nothing to take
        statistics over.
      TypeError: `weight` is not real.
    """
    weight = _sample_weight.get() if weight is None else weight
    if not options.reduction_axes and options.axis_name is None:
        raise ValueError(
            f"An input of shape {x.shape} whose features are the dimensions "
            f"{options.feature_axes} has none left to take statistics over. Give it a "
            "dimension of samples, or call it where an axis of replicas is bound."
        )
    ambient = step_trace.current().resolve(None, "weight")
    amount = is_kept = None
    if weight is not None:
        amount = _of_samples(weight, x, options)
        is_kept = amount > 0
    if ambient is not None:
        has_data = (ambient.amount > 0).reshape((1,) * x.ndim)
        is_kept = has_data if is_kept is None else is_kept & has_data
        amount = has_data * (jnp.float32(1) if amount is None else amount)
    if mask is not None:
        is_counted = _as_mask(mask, x)
        amount = is_counted * (jnp.float32(1) if amount is None else amount)
        is_any = jnp.any(amount > 0, keepdims=True)
        is_kept = is_any if is_kept is None else is_kept & is_any
    if amount is not None:
        x = jnp.where((amount > 0) | jnp.isfinite(x), x, jnp.zeros((), x.dtype))
    return Inputs(x, amount, is_kept)


def _of_samples(
    weight: jax.typing.ArrayLike, x: jax.Array, options: Options
) -> jax.Array:
    weight = jnp.asarray(weight)
    if 0 not in options.reduction_axes:
        raise ValueError(
            "`weight` holds one number for each sample, dimension 0 of the input, but "
            f"that is a feature axis of an input of shape {x.shape}. Use `mask`."
        )
    if weight.shape != x.shape[:1]:
        raise ValueError(
            "`weight` must hold one number for each sample: the input has shape "
            f"{x.shape}, `weight` {weight.shape}. Where the model has folded other "
            "dimensions into the first, fold the weights too, or use `mask`."
        )
    real = jnp.issubdtype(weight.dtype, jnp.floating)
    if not real and not jnp.issubdtype(weight.dtype, jnp.integer):
        if weight.dtype != jnp.bool_:
            raise TypeError(f"`weight` must be real numbers, got {weight.dtype}.")
    weight = weight.astype(jnp.float32).reshape(-1, *(1,) * (x.ndim - 1))
    return lax.stop_gradient(jnp.where(weight > 0, weight, 0.0))


def _as_mask(mask: jax.typing.ArrayLike, x: jax.Array) -> jax.Array:
    mask = jnp.asarray(mask, bool)
    shape = (1,) * (x.ndim - mask.ndim) + mask.shape
    if len(shape) != x.ndim or any(
        m not in (1, n) for m, n in zip(shape, x.shape, strict=True)
    ):
        raise ValueError(
            f"`mask` of shape {mask.shape} does not broadcast to the input's shape "
            f"{x.shape}."
        )
    return mask.reshape(shape)


def take_moments(
    inputs: Inputs,
    running: Moments | None,
    options: Options,
    dtype: jax.typing.DTypeLike,
) -> tuple[Moments, Moments | None]:
    """Takes the moments of the samples of all replicas, in one collective.

    Each replica reduces its own samples around a value among them, and sends their
    count, mean and sum of squares around that mean; these are combined by the formula
    of Chan, Golub and LeVeque (1983). Sums of x and x * x would be fewer numbers, but
    lose the variance where the mean is a few thousand times the deviation, in float32.
    The mean of each replica travels in a row of its own, so a layer of C features
    sends (replicas + 1) * C numbers. Its backward pass, by one collective too, sends
    2 * C where JAX's types tell what is the same on all replicas, else as many.

    Args:
      inputs: of this replica.
      running: statistics so far; used for the samples too where none count at all.
      options: of the layer.
      dtype: of the moments; they are computed in float32 at least.

    Returns:
      The moments to normalise with, and the new running statistics, which are not
      differentiated: what they were, where no sample of any replica counts.
    """
    wides = [weighted_mean.wide_dtype(each) for each in (inputs.x.dtype, dtype)]
    wide = jax.dtypes.canonicalize_dtype(np.promote_types(*wides))
    mean, var, total = _union(inputs.x.astype(wide), inputs.weight, options)
    shape = [inputs.x.shape[a] for a in options.feature_axes]
    real = jnp.finfo(dtype).dtype
    mean, var = mean.reshape(shape).astype(dtype), var.reshape(shape).astype(real)
    if running is None:
        return Moments(mean, var), None
    blended = [
        options.momentum * old + (1 - options.momentum) * lax.stop_gradient(new)
        for old, new in ((running.mean, mean), (running.var, var))
    ]
    updated = Moments(*blended)
    if inputs.weight is None and inputs.x.size > 0:
        return Moments(mean, var), updated
    is_any = jnp.broadcast_to(total > 0, _kept_shape(inputs.x, options)).reshape(shape)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(is_any, new, old.astype(new.dtype))

    taken = Moments(choose(mean, running.mean), choose(var, running.var))
    mean, var = map(choose, updated, running)
    return taken, Moments(mean, var)


def normalize(
    inputs: Inputs,
    moments: Moments,
    scale: jax.Array | None,
    bias: jax.Array | None,
    options: Options,
) -> jax.Array:
    """Returns `(x - mean) / sqrt(var + epsilon) * scale + bias`.

    Args:
      inputs: of this replica.
      moments: what to normalise with.
      scale: one number a feature, or None.
      bias: one number a feature, or None.
      options: of the layer.
    """
    x = inputs.x
    mean, var = _cast_together(moments, options.axis_name)
    y = x - options.spread(mean, x.ndim)
    factor = lax.rsqrt(options.spread(var, x.ndim) + options.epsilon)
    if scale is not None:
        factor *= options.spread(scale, x.ndim)
    y *= factor
    if bias is not None:
        y += options.spread(bias, x.ndim)
    if inputs.is_kept is not None:
        y = jnp.where(inputs.is_kept, y, lax.stop_gradient(y))
    return y


def _cast_together(moments: Moments, axis_name: AxisName | None) -> Moments:
    """Casts to what may differ between replicas; the transpose is one collective."""
    if axis_name is None or not mesh.tracked_axes(axis_name):
        return moments
    parts = _real_parts(moments)
    with origins.bound_by(origins.BATCH_NORM):  # Its transpose is a collective.
        packed = reduce.cast_varying(buckets.pack(parts), axis_name)
    return Moments(*_from_real_parts(_unpacked(packed, parts), moments))


def _union(
    x: jax.Array, weight: jax.Array | None, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, variance and count over all replicas; with the dimensions of x."""
    count, mean, squares = _local_moments(x, weight, options)
    if options.axis_name is None:
        total = jnp.where(count > 0, count, 1)
        return mean, squares / total, count
    names = mesh.as_axis_names(options.axis_name)
    num_replicas = lax.axis_size(names)
    is_mine = jnp.arange(num_replicas) == lax.axis_index(names)

    def in_own_row(part: jax.Array) -> jax.Array:
        return jnp.where(is_mine.reshape(-1, *(1,) * part.ndim), part, 0)

    # Without weights, all replicas have the same count: the shapes are the same.
    sent = [*map(in_own_row, _real_parts([mean]))]
    sent += [squares] if weight is None else [squares, in_own_row(count)]
    packed = buckets.pack(sent)
    with origins.bound_by(origins.BATCH_NORM):
        packed = reduce.cast_varying(packed, options.axis_name)
        summed = lax.psum(packed, options.axis_name)
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
    """Mean, variance and count, of those of the replicas, dimension 0."""
    total = counts.sum(0)
    divisor = jnp.where(total > 0, total, 1)
    share = counts / divisor[None]
    rough = lax.stop_gradient((share * means).sum(0))  # any value around does.
    off = means - rough[None]
    left = (share * off).sum(0)  # what the sum was rounded by.
    between = (share * _abs_squared(off)).sum(0) - _abs_squared(left)
    var = squares / divisor + jnp.maximum(between, 0)
    return rough + left, var, total


def _local_moments(
    x: jax.Array, weight: jax.Array | None, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Count, mean, and sum of squares around it, of this replica's samples."""
    axes = options.reduction_axes
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

    pivot = _some_sample(x, weight, axes) if options.one_pass else None
    pivot = lax.stop_gradient(average(x) if pivot is None else pivot)
    centred = x - pivot
    if weight is not None:  # Its square must not overflow.
        centred = jnp.where(weight > 0, centred, jnp.zeros_like(centred))
    left = average(centred)
    squares = average(_abs_squared(centred)) - _abs_squared(left)
    return count, pivot + left, count * jnp.maximum(squares, 0)


def _some_sample(
    x: jax.Array, weight: jax.Array | None, axes: Sequence[int]
) -> jax.Array | None:
    """Returns the first value of each feature that counts, or None if it costs a pass.

    Around a value among n, squares lose at most the digits of n: it lies no further
    than sqrt(n) deviations from the mean.
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


def _kept_shape(x: jax.Array, options: Options) -> list[int]:
    return _kept_dims(x, options.reduction_axes)


def _abs_squared(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return lax.square(x.real) + lax.square(x.imag)
    return lax.square(x)


def _real_parts(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays as real ones, of which complex ones make two."""
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
