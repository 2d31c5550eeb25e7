"""Flax nnx: batch norm over the samples of all replicas."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from jdp import batch_norm
from jdp.batch_norm import Moments
from jdp.gradients import weighted_mean
from jdp.types import AxisName

_Model = TypeVar("_Model", bound=nnx.Module)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class SyncBatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` whose statistics are those of all replicas' samples.

    Takes the arguments of Flax's own and has the same state. What differs is what
    `jdp.flax_linen.SyncBatchNorm` says: each sample counts the same, or by its weight,
    over all replicas, in one collective forwards and one backwards.
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
        axis_name: AxisName | None = batch_norm.DEFAULT_AXIS,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = _NOTHING,
        scale_metadata: Mapping[str, Any] = _NOTHING,
    ):
        """Makes scale, bias and running statistics.

        Args:
          num_features: see `flax.nnx.BatchNorm`, as for all that is not named here.
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
            samples of one replica alone. The default, "data", also is that where no
            such axis is bound: on one device, in evaluation.
          axis_index_groups: must be None.
          use_fast_variance: whether to read the input once for both statistics, around
            a sample, instead of once for each. Both are right for large means.
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
          use_running_average: whether to normalise with the running statistics, and
            leave them as they are; `weight` and `mask` do not matter then.
          mask: bool, broadcasts to the shape of `x`: which values count.
          weight: shape (n,): how much each sample counts, 0 for padding, as
            `jdp.join_batches` yields it. None: what `jdp.batch_norm.sample_weights`
            says, or all the same. No gradient passes through samples of weight 0.

        Returns:
          The shape of `x`.

        Raises:
          ValueError: `weight` or `mask` has another shape, `axis_name` is not bound,
            or no axis is left to take statistics over.
          TypeError: `weight` is not real.
        """
        use_running_average = nnx.module.first_from(
            use_running_average,
            self.use_running_average,
            error_msg="Pass `use_running_average` to `SyncBatchNorm`, or to its call.",
        )
        x = jnp.asarray(x)
        options = batch_norm.make_options(
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
        # Of an array, it makes an array.
        promoted: Any = self.promote_dtype((x, *running, *given), dtype=self.dtype)
        x, mean, var, scale, bias = promoted
        moments, inputs = Moments(mean, var), batch_norm.Inputs(x, None, None)
        if not use_running_average:
            inputs = batch_norm.count_samples(x, options, weight=weight, mask=mask)
            dtype = weighted_mean.wide_dtype(x.dtype)
            moments, updated = batch_norm.take_moments(inputs, running, options, dtype)
            assert updated is not None
            self.mean[...], self.var[...] = updated
        y = batch_norm.normalize(inputs, moments, scale, bias, options)
        arrays = [a for a in (x, scale, bias) if a is not None]
        return y.astype(dtypes.canonicalize_dtype(*arrays, dtype=self.dtype))


def convert_batch_norm(
    model: _Model, *, axis_name: AxisName = batch_norm.DEFAULT_AXIS
) -> _Model:
    """Makes each `nnx.BatchNorm` of a model, in place, a `SyncBatchNorm`.

    Parameters, statistics, other attributes and shared layers stay what they are: the
    same objects. Weights reach the layers through `SyncBatchNorm`'s argument or, where
    the code of the model does not know them, through
    `jdp.batch_norm.sample_weights`.

    Args:
      model: any module; a graph definition that was split from it before still has
        Flax's own.
      axis_name: see `SyncBatchNorm`; in place of that of each `nnx.BatchNorm`.

    Returns:
      `model`.

    Raises:
      TypeError: a layer is of a class that derives from `nnx.BatchNorm`, by path; then
        nothing is changed. Or `model` is not a module of nnx.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"`model` must be an nnx module, got {type(model).__name__}. For linen "
            "there is `jdp.flax_linen.convert_batch_norm`."
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
