"""Batch norm layer of linen: statistics over the samples of all replicas."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import dtypes

from jdp.batch_norm import layer
from jdp.batch_norm.global_moments import Moments
from jdp.batch_norm.layer import BatchNormOptions, Inputs
from jdp.gradients import weighted_mean
from jdp.types import AxisName

__all__ = ["SyncBatchNorm", "convert_batch_norm", "sync_batch_norms"]


class SyncBatchNorm(nn.BatchNorm):
    """`flax.linen.BatchNorm` with statistics over the samples of all replicas.

    Takes the arguments of Flax's `BatchNorm` and makes the same variables: `scale` and
    `bias` in `params`, `mean` and `var` in `batch_stats`. Flax averages the means of
    replicas as if all had the same number of samples. Here each sample counts the same,
    or by its weight; values that do not count have no influence, NaN included. All
    replicas call the layer the same number of times. It takes one collective in the
    forward pass and one in the backward pass, and none with running averages or during
    initialisation.

    Statistics are computed in float32 at least, whatever the dtype of the input and of
    `force_float32_reductions`, and stay accurate if the mean is large compared to the
    deviation. If no sample of any replica counts, the running statistics do not change
    and are used to normalise.

    Attributes:
      axis_name: the axis, or pair of axes, over which replicas lie; None for the
        samples of one replica alone. The default, "auto", is the axis of the world,
        and acts like None where it is not bound: on one device, in evaluation.
      axis_index_groups: must be None.
      use_fast_variance: whether to read the input once for both statistics, around one
        sample, not once per statistic. Both are accurate for large means.
    """

    axis_name: AxisName | None = layer.DEFAULT_AXIS  # type: ignore[assignment]

    @nn.compact
    def __call__(  # type: ignore[override]
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        weight: jax.Array | None = None,
    ) -> jax.Array:
        """Normalises `x`.

        Args:
          x: shape (n, ...).
          use_running_average: whether to normalise with the running statistics and not
            update them; `weight` and `mask` are ignored then.
          mask: bool, broadcasts to the shape of `x`: which values count.
          weight: shape (n,): how much each sample counts, 0 for padding, as
            `jdp.join_batches` yields it. None: the weights of
            `jdp.batch_norm.sample_weights`, or equal weights. No gradient passes
            through samples of weight 0.

        Returns:
          The shape of `x`.

        Raises:
          ValueError: `weight` or `mask` has another shape, `axis_name` is not bound,
            or no dimension is left to take statistics over.
          TypeError: `weight` is not real.
        """
        return _normalize(
            self, x, use_running_average, self.axis_name, mask=mask, weight=weight
        )


@contextlib.contextmanager
def sync_batch_norms(*, axis_name: AxisName = layer.DEFAULT_AXIS) -> Iterator[None]:
    """Makes each `BatchNorm` that is called in this context a `SyncBatchNorm`.

    Use it around `init` and `apply` of a model. Names and variables stay the same.

        with jdp.flax_linen.sync_batch_norms():
            logits, updates = model.apply(variables, x, mutable=["batch_stats"])

    Args:
      axis_name: see `SyncBatchNorm`; replaces the `axis_name` of each `BatchNorm`.
    """

    def intercept(
        next_fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        # A class derived from `nn.BatchNorm` may call it through `super()`.
        method = getattr(context.orig_method, "func", context.orig_method)
        if inspect.unwrap(method) is not _FLAX_CALL:
            return next_fun(*args, **kwargs)
        assert isinstance(context.module, nn.BatchNorm)
        return _normalize(context.module, *args, axis_name=axis_name, **kwargs)

    with nn.intercept_methods(intercept):
        yield


def convert_batch_norm(
    model: nn.Module, *, axis_name: AxisName = layer.DEFAULT_AXIS
) -> nn.Module:
    """Returns a module like `model` in which each `BatchNorm` is a `SyncBatchNorm`.

    Variables keep their names, so variables and checkpoints of `model` fit. The module
    has only `__call__`; call other methods of `model` in `sync_batch_norms`. Weights
    reach the layers as their argument `weight` or, if the model does not pass them on,
    through `jdp.batch_norm.sample_weights`.

    Args:
      model: any module; it is not changed.
      axis_name: see `SyncBatchNorm`; replaces the `axis_name` of each `BatchNorm`.

    Raises:
      TypeError: `model` is not a linen module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` must be a linen module, got {type(model).__name__}. For nnx, "
            "use `jdp.flax_nnx.convert_batch_norm`."
        )
    return _Converted(model, axis_name)


class _Converted(nn.Module):
    """A model whose batch norms are synced."""

    model: nn.Module
    synced_over: AxisName

    def setup(self) -> None:
        """Keeps the variables of the model at the top level."""
        nn.share_scope(self, self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        with sync_batch_norms(axis_name=self.synced_over):
            return self.model(*args, **kwargs)


_FLAX_CALL = inspect.unwrap(nn.BatchNorm.__call__)


def _normalize(
    module: nn.BatchNorm,
    x: jax.Array,
    use_running_average: bool | None = None,
    axis_name: AxisName | None = None,
    *,
    mask: jax.Array | None = None,
    weight: jax.Array | None = None,
) -> jax.Array:
    """`BatchNorm.__call__`; makes the same variables in the same order."""
    x = jnp.asarray(x)
    use_running_average = nn.merge_param(
        "use_running_average", module.use_running_average, use_running_average
    )
    is_initializing = module.is_initializing()
    options = layer.make_options(
        x,
        axis=module.axis,
        axis_name=None if is_initializing or use_running_average else axis_name,
        axis_index_groups=module.axis_index_groups,
        use_fast_variance=module.use_fast_variance,
        epsilon=module.epsilon,
        momentum=module.momentum,
    )
    shape = [x.shape[a] for a in options.feature_axes]
    is_wide = module.force_float32_reductions
    kept = jnp.float32 if is_wide else module.param_dtype
    mean = module.variable("batch_stats", "mean", jnp.zeros, shape, kept)
    var = module.variable("batch_stats", "var", jnp.ones, shape, kept)
    running = Moments(mean.value, var.value)
    inputs = Inputs(x, None, None)
    if use_running_average:
        moments = running if is_wide else Moments(*(v.astype(kept) for v in running))
    else:
        dtype = jnp.result_type(x) if module.dtype is None else module.dtype
        dtype = weighted_mean.wide_dtype(dtype) if is_wide else dtype
        if not is_initializing:
            inputs = layer.count_samples(x, options, weight=weight, mask=mask)
        moments, updated = layer.take_moments(
            inputs, None if is_initializing else running, options, dtype
        )
        if updated is not None:
            mean.value, var.value = updated
    return _scale_and_shift(module, inputs, moments, options)


def _scale_and_shift(
    module: nn.BatchNorm, inputs: Inputs, moments: Moments, options: BatchNormOptions
) -> jax.Array:
    """Normalises with the scale and bias that the module has."""
    shape = [inputs.x.shape[a] for a in options.feature_axes]
    scale = bias = None
    if module.use_scale:
        scale = _parameter(module, "scale", module.scale_init, shape)
    if module.use_bias:
        bias = _parameter(module, "bias", module.bias_init, shape)
    y = layer.normalize(inputs, moments, scale, bias, options)
    given = [a for a in (inputs.x, scale, bias) if a is not None]
    return y.astype(dtypes.canonicalize_dtype(*given, dtype=module.dtype))


def _parameter(
    module: nn.BatchNorm, name: str, init: nn.initializers.Initializer, shape: list[int]
) -> jax.Array:
    made = module.param(name, init, shape, module.param_dtype)
    is_wide = module.force_float32_reductions
    return jnp.asarray(made, None if is_wide else module.param_dtype)
