"""Batch norm layer of nnx: statistics over the samples of all replicas."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from jdp.batch_norm import layer
from jdp.batch_norm.global_moments import Moments
from jdp.gradients import weighted_mean
from jdp.types import AxisName

__all__ = ["SyncBatchNorm", "convert_batch_norm"]

Model = TypeVar("Model", bound=nnx.Module)
NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class SyncBatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` with statistics over the samples of all replicas.

    Takes the arguments of Flax's `BatchNorm` and has the same state. As in
    `jdp.flax_linen.SyncBatchNorm`, each sample of all replicas counts the same, or by
    its weight, in one collective forwards and one backwards.
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros_init(),  # noqa: B008
        scale_init: Initializer = nnx.initializers.ones_init(),  # noqa: B008
        axis_name: AxisName | None = layer.DEFAULT_AXIS,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
        scale_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        """Makes scale, bias and running statistics.

        Args:
          num_features: see `flax.nnx.BatchNorm`.
          use_running_average: see there.
          axis: see there.
          momentum: see there.
          epsilon: see there.
          dtype: see there.
          param_dtype: see there.
          use_bias: see there.
          use_scale: see there.
          bias_init: see there.
          scale_init: see there.
          axis_name: the axis, or pair of axes, over which replicas lie; None for the
            samples of one replica alone. The default, "auto", is the axis of the world,
            and acts like None where it is not bound: on one device, in evaluation.
          axis_index_groups: must be None.
          use_fast_variance: whether to read the input once for both statistics, around
            one sample, not once per statistic. Both are accurate for large means.
          promote_dtype: see there.
          rngs: see there.
          bias_metadata: see there.
          scale_metadata: see there.
        """
        super().__init__(
            num_features,
            use_running_average=use_running_average,
            axis=axis,
            momentum=momentum,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_bias=use_bias,
            use_scale=use_scale,
            bias_init=bias_init,
            scale_init=scale_init,
            axis_name=axis_name,  # type: ignore[arg-type]
            axis_index_groups=axis_index_groups,
            use_fast_variance=use_fast_variance,
            promote_dtype=promote_dtype,
            rngs=rngs,
            bias_metadata=bias_metadata,
            scale_metadata=scale_metadata,
        )

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
        use_running_average = nnx.module.first_from(
            use_running_average,
            self.use_running_average,
            error_msg="Pass `use_running_average` to `SyncBatchNorm`, or to its call.",
        )
        x = jnp.asarray(x)
        options = layer.make_options(
            x,
            axis=self.axis,
            axis_name=None if use_running_average else self.axis_name,
            axis_index_groups=self.axis_index_groups,
            use_fast_variance=self.use_fast_variance,
            epsilon=self.epsilon,
            momentum=self.momentum,
        )
        running = Moments(self.mean[...], self.var[...])
        given = [None if v is None else v[...] for v in (self.scale, self.bias)]
        # It returns an array for each array.
        promoted: Any = self.promote_dtype((x, *running, *given), dtype=self.dtype)
        x, mean, var, scale, bias = promoted
        moments, inputs = Moments(mean, var), layer.Inputs(x, None, None)
        if not use_running_average:
            inputs = layer.count_samples(x, options, weight=weight, mask=mask)
            dtype = weighted_mean.wide_dtype(x.dtype)
            moments, updated = layer.take_moments(inputs, running, options, dtype)
            assert updated is not None
            self.mean[...], self.var[...] = updated
        y = layer.normalize(inputs, moments, scale, bias, options)
        arrays = [a for a in (x, scale, bias) if a is not None]
        return y.astype(dtypes.canonicalize_dtype(*arrays, dtype=self.dtype))


def convert_batch_norm(
    model: Model, *, axis_name: AxisName = layer.DEFAULT_AXIS
) -> Model:
    """Makes each `nnx.BatchNorm` of a model a `SyncBatchNorm`, in place.

    Parameters, statistics, other attributes and shared layers stay the same objects.
    Weights reach the layers as their argument `weight` or, if the model does not pass
    them on, through `jdp.batch_norm.sample_weights`.

    Args:
      model: any module. A graph definition that was split from it earlier keeps Flax's
        layers.
      axis_name: see `SyncBatchNorm`; replaces the `axis_name` of each `nnx.BatchNorm`.

    Returns:
      `model`.

    Raises:
      TypeError: a layer has a class derived from `nnx.BatchNorm`; the message has its
        path, and nothing is changed. Or `model` is not an nnx module.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"`model` must be an nnx module, got {type(model).__name__}. For linen, "
            "use `jdp.flax_linen.convert_batch_norm`."
        )
    found = [
        (path, module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.BatchNorm)
    ]
    for path, module in found:
        if type(module) not in (nnx.BatchNorm, SyncBatchNorm):
            name = ".".join(map(str, path)) or "(root)"
            raise TypeError(
                f"`{name}` is a `{type(module).__name__}`, which derives from "
                "`nnx.BatchNorm` and may normalise in its own way. Let it derive from "
                "`jdp.flax_nnx.SyncBatchNorm`."
            )
    for _, module in found:
        module.__class__ = SyncBatchNorm
        module.axis_name = axis_name  # type: ignore[assignment]
    return model
