"""Loss scaling: by how much is a float16 loss multiplied, on all replicas alike?"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.training import dynamic_scale
from flax.training.dynamic_scale import DynamicScaleResult

from jdp import compat
from jdp.batch_norm import layer
from jdp.gradients import differentiation, weighted_mean
from jdp.gradients.weighted_mean import DivideBy
from jdp.replicas import axes
from jdp.types import AxisName, PyTree


class DynamicScale(dynamic_scale.DynamicScale):
    """Flax's `DynamicScale` with gradients averaged over the replicas.

    Takes Flax's arguments and has the same state. Gradients are averaged in float32,
    in the buckets of `jdp.value_and_grad`. All replicas find the same: if the gradients
    of one replica overflow, none of them is finite, and the scale shrinks everywhere.
    Each replica multiplies its loss by its share of the scale, so that cotangents are
    as large as on one device with all samples, and overflow or vanish there too.
    """

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: AxisName | None = layer.DEFAULT_AXIS,
        *,
        weight: jax.typing.ArrayLike | None = None,
        divide_by: DivideBy = "weight",
    ) -> Callable[..., DynamicScaleResult]:
        """Differentiates a loss, in place of `jdp.value_and_grad`.

        Args:
          fun: see `jdp.value_and_grad`.
          argnums: see there.
          has_aux: see there.
          axis_name: the axis, or axes, over which replicas lie; None averages nothing.
            The default, "auto", is the axis of the world, and acts like None where
            that is not bound: on one device.
          weight: see `jdp.value_and_grad`.
          divide_by: see there.

        Returns:
          A function of the arguments of `fun` that returns Flax's
          `DynamicScaleResult`: the next scale, whether all gradients are finite, bool
          (), loss and aux as `has_aux` says, and the gradients, in float32.

        Raises:
          ValueError: from a call: `axis_name` is not bound.
        """
        axis_name = _find_axis(axis_name)
        if axis_name is None:
            return super().value_and_grad(fun, argnums, has_aux)

        @functools.wraps(fun)
        def wrapped(*args: Any, **kwargs: Any) -> DynamicScaleResult:
            share = 1 / compat.axis_size(axis_name)
            chosen = argnums if isinstance(argnums, Sequence) else [argnums]
            places = [i if i >= 0 else i + len(args) for i in chosen]
            # Gradients have the dtypes of these, and are float32 before they are sent.
            wide = [_widen(x) if i in places else x for i, x in enumerate(args)]

            @functools.wraps(fun)
            def scaled(*wide: Any, **kwargs: Any) -> Any:
                pairs = zip(wide, args, strict=True)
                own = (
                    _with_dtypes_of(x, like) if i in places else x
                    for i, (x, like) in enumerate(pairs)
                )
                loss, *aux = _as_tuple(fun(*own, **kwargs), has_aux)
                loss = self.scale * loss * share
                return (loss, *aux) if has_aux else loss

            grad_fn = differentiation.value_and_grad(
                scaled,
                argnums,
                has_aux=has_aux,
                weight=weight,
                divide_by=divide_by,
                axis_name=axis_name,
            )
            out, grads = grad_fn(*wide, **kwargs)
            factor = share * self.scale
            loss, *aux = _as_tuple(out, has_aux)
            out = (loss / factor, *aux) if has_aux else loss / factor
            return self._judge(out, jax.tree.map(lambda g: g / factor, grads))

        return wrapped

    def _judge(self, out: Any, grads: PyTree) -> DynamicScaleResult:
        """Returns the result, with the next scale: the rule of Flax."""
        is_finite = jnp.asarray(True)
        for g in jax.tree.leaves(grads):
            is_finite &= jnp.isfinite(g).all()
        grows = self.fin_steps == self.growth_interval
        largest = jnp.finfo(jnp.float32).max
        grown = jnp.minimum(self.scale * self.growth_factor, largest)
        shrunk = self.scale * self.backoff_factor
        if self.minimum_scale is not None:
            shrunk = jnp.maximum(shrunk, self.minimum_scale)
        kept = jnp.where(grows & is_finite, grown, self.scale)
        fin_steps = jnp.where(grows | ~is_finite, 0, self.fin_steps + 1)
        after = self.replace(
            fin_steps=fin_steps, scale=jnp.where(is_finite, kept, shrunk)
        )
        return DynamicScaleResult(after, is_finite, out, grads)


def _find_axis(axis_name: AxisName | None) -> AxisName | None:
    if axis_name != layer.DEFAULT_AXIS:
        return axis_name
    axis_name = axes.find(None)
    return axis_name if compat.is_bound(axis_name) else None


def _as_tuple(out: Any, has_aux: bool) -> tuple[Any, ...]:
    return out if has_aux else (out,)


def _widen(tree: PyTree) -> PyTree:
    """Returns parameters with floats of at least 32 bits."""

    def widen(x: Any) -> Any:
        return jnp.asarray(x, weighted_mean.wide_dtype(jnp.result_type(x)))

    return jax.tree.map(widen, tree)


def _with_dtypes_of(tree: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), tree, like)
