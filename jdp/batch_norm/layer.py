"""Layer: the steps of a batch norm whose statistics cover all replicas."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import compat, types
from jdp.batch_norm import global_moments
from jdp.batch_norm.global_moments import Moments
from jdp.compat import trace_reuse
from jdp.gradients import step_trace, weighted_mean
from jdp.replicas import axes
from jdp.types import AxisName

DEFAULT_AXIS = "auto"  # the axis of the world, where it is bound.


class Inputs(NamedTuple):
    """Samples of one replica, and how much each counts."""

    x: jax.Array  # (n, ...); values that neither count nor are finite are zero.
    # Both broadcast to the shape of x and have its number of dimensions.
    weight: jax.Array | None  # float32, at least 0; None: all count the same.
    is_kept: jax.Array | None  # bool: outputs that pass a gradient; None: all.


@dataclasses.dataclass(frozen=True)
class BatchNormOptions:
    """How a layer normalises."""

    feature_axes: tuple[int, ...]  # of x; from 0 up, sorted.
    reduction_axes: tuple[int, ...]  # all others.
    axis_name: AxisName | None  # bound here, or None for the samples at hand alone.
    one_pass: bool  # reads x once, around one sample; False: twice, around the mean.
    epsilon: float
    momentum: float

    def spread(self, values: jax.Array, ndim: int) -> jax.Array:
        """Reshapes one value per feature so that it broadcasts over x."""
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
) -> BatchNormOptions:
    """Resolves the arguments of a Flax layer, for an input `x`.

    Raises:
      ValueError: `x` does not have a feature axis, an axis name is not bound, or
        `axis_index_groups` is given.
    """
    if axis_index_groups is not None:
        raise ValueError(
            "`axis_index_groups` would leave each group of replicas with running "
            "statistics of its own, but the state of a step is the same on all. Leave "
            "it out, or arrange the replicas on a pair of axes, normalise over one of "
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
    return BatchNormOptions(
        feature_axes,
        reduction_axes,
        find_axis(axis_name),
        use_fast_variance,
        epsilon,
        momentum,
    )


def find_axis(axis_name: AxisName | None) -> AxisName | None:
    """Returns the axes to reduce over, or None if nothing needs to be sent.

    Nothing is sent with None, with "auto" if the axis of the world is not bound, and
    with one replica.

    Raises:
      ValueError: a name other than "auto" is not bound.
    """
    if axis_name is None:
        return None
    if axis_name == DEFAULT_AXIS:
        axis_name = axes.find(None)
        if not compat.is_bound(axis_name):
            return None
    types.check_axis_name(axis_name)
    compat.axis_size(axis_name)
    return None if compat.is_alone(axis_name) else axis_name


_sample_weight: contextvars.ContextVar[jax.typing.ArrayLike | None] = (
    contextvars.ContextVar("sample_weight", default=None)
)


@contextlib.contextmanager
def sample_weights(weight: jax.typing.ArrayLike | None) -> Iterator[None]:
    """Weights the samples of a model, for layers that get no weights of their own.

    Use it for models whose code does not pass weights to their layers:

        with jdp.batch_norm.sample_weights(weight):
            logits = model(images)

    Weights that are being traced hold for each function inside, also under
    `jax.checkpoint` or `jax.jit`. But JAX does not trace a function again because
    weights outside of a trace changed. So put the `with` inside the outermost jitted
    function, not around a call of a jitted function.

    Args:
      weight: shape (n,), as `jdp.join_batches` yields it; see `SyncBatchNorm`.
    """
    # Operations that run one by one would be compiled again.
    is_traced = isinstance(weight, jax.core.Tracer) and compat.is_staging()
    token = _sample_weight.set(weight)
    try:
        with trace_reuse.only_here() if is_traced else contextlib.nullcontext():
            yield
    finally:
        _sample_weight.reset(token)


def count_samples(
    x: jax.Array,
    options: BatchNormOptions,
    *,
    weight: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
) -> Inputs:
    """Determines which values of `x` count, and how much.

    Outputs of samples of weight 0 pass no gradient. Neither do the outputs of a replica
    on which nothing counts: its loss may compute 0 / 0 from them, which must not reach
    other replicas through the statistics. Outputs outside of `mask` pass a gradient, as
    in Flax.

    Args:
      x: shape (n, ...).
      options: options of the layer.
      weight: shape (n,); None: the weights of `sample_weights`. Negative numbers and
        NaN count as 0. In a `jdp.Join`, the weight of a replica without data is 0 in
        any case.
      mask: bool, broadcasts to the shape of `x`.

    Raises:
      ValueError: `weight` or `mask` has a wrong shape, or no dimension is left to take
        statistics over.
      TypeError: `weight` is not real.
    """
    weight = _sample_weight.get() if weight is None else weight
    if not options.reduction_axes and options.axis_name is None:
        raise ValueError(
            f"An input of shape {x.shape} whose features are the dimensions "
            f"{options.feature_axes} has none left to take statistics over. Give it a "
            "dimension of samples, or call the layer under an axis of replicas."
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
    weight: jax.typing.ArrayLike, x: jax.Array, options: BatchNormOptions
) -> jax.Array:
    weight = jnp.asarray(weight)
    if 0 not in options.reduction_axes:
        raise ValueError(
            "`weight` holds one number per sample, along dimension 0 of the input, but "
            f"dimension 0 is a feature axis here (shape {x.shape}). Use `mask`."
        )
    if weight.shape != x.shape[:1]:
        raise ValueError(
            "`weight` must hold one number per sample: the input has shape "
            f"{x.shape}, `weight` {weight.shape}. If the model has folded other "
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
    options: BatchNormOptions,
    dtype: jax.typing.DTypeLike,
) -> tuple[Moments, Moments | None]:
    """Takes the moments of the samples of all replicas, in one collective.

    Each replica reduces its samples around one of them, and sends their count, mean and
    sum of squares around that mean. The formula of Chan, Golub and LeVeque (1983)
    combines these. Sums of x and x * x would be fewer numbers, but in float32 they lose
    the variance if the mean is a few thousand times the deviation. The mean of each
    replica travels in a row of its own, so a layer of C features sends
    (replicas + 1) * C numbers. The backward pass also takes one collective. It sends
    2 * C numbers if JAX tracks by type what varies, otherwise (replicas + 1) * C.

    Args:
      inputs: samples of this replica.
      running: statistics so far; they also normalise where no sample counts.
      options: options of the layer.
      dtype: dtype of the moments; they are computed in float32 at least.

    Returns:
      The moments to normalise with, and the new running statistics, which are not
      differentiated. Where no sample of any replica counts, running statistics stay.
    """
    wides = [weighted_mean.wide_dtype(each) for each in (inputs.x.dtype, dtype)]
    wide = jax.dtypes.canonicalize_dtype(np.promote_types(*wides))
    mean, var, total = global_moments.take(
        inputs.x.astype(wide),
        inputs.weight,
        axes=options.reduction_axes,
        axis_name=options.axis_name,
        one_pass=options.one_pass,
    )
    kept_shape = mean.shape
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
    is_any = jnp.broadcast_to(total > 0, kept_shape).reshape(shape)

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
    options: BatchNormOptions,
) -> jax.Array:
    """Returns `(x - mean) / sqrt(var + epsilon) * scale + bias`.

    Args:
      inputs: samples of this replica.
      moments: mean and variance.
      scale: one number per feature, or None.
      bias: one number per feature, or None.
      options: options of the layer.
    """
    x = inputs.x
    mean, var = global_moments.cast_together(moments, options.axis_name)
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
