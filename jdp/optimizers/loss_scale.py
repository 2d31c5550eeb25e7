"""Loss scale: how do small gradients survive float16, and what if large ones do not?"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp import types
from jdp.gradients import weighted_mean
from jdp.optimizers import selection, update_arguments
from jdp.optimizers.zero_state import ZeroState
from jdp.types import PyTree


class LossScaleState(NamedTuple):
    """State of `jdp.dynamic_loss_scale`."""

    scale: jax.Array  # float32 (): the factor of the loss.
    num_finite: jax.Array  # int32 (): finite steps since the factor has changed.
    inner: Any  # state of the inner optimizer.


def dynamic_loss_scale(
    tx: optax.GradientTransformation,
    *,
    init_scale: float = 2.0**15,
    growth_interval: int = 2000,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for gradients of a loss that is multiplied by a factor.

    In float16, gradients below 6e-8 are zero and above 65504 infinite. Multiply the
    loss by `opt_state.scale`; the wrapper divides the gradients by it. If a gradient is
    not finite, parameters and the inner state stay bit for bit as they are, and the
    factor becomes smaller; after some finite steps it becomes larger (Micikevicius et
    al., 2018: Mixed Precision Training; torch's `GradScaler`).

        tx = jdp.dynamic_loss_scale(optax.adam(1e-3))

        @jdp.data_parallel(num_states=2)
        def step(params, opt_state, batch):
            def scaled_loss(params, batch):
                return loss_fn(params, batch).astype(jnp.float32) * opt_state.scale

            loss, grads = jdp.value_and_grad(scaled_loss)(params, batch)
            loss = loss / opt_state.scale
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

    `update` takes averaged gradients, so that all replicas decide alike: an average
    with a gradient that is not finite is not finite. With `jdp.distributed_optimizer`,
    which averages, it goes inside.

    Args:
      tx: the optimizer.
      init_scale: the first factor, above 0.
      growth_interval: number of finite steps after which the factor grows.
      growth_factor: by which it grows, at least 1. It stays finite.
      backoff_factor: by which it shrinks after a step that was not finite, above 0 and
        below 1.

    Returns:
      An optax transformation; its state is a `LossScaleState`. `jdp.loss_scale` reads
      the factor where this state lies in another one.

    Raises:
      TypeError: `tx` is not an optimizer, or an option is not a number.
      ValueError: an option is out of range.
    """
    update_arguments.check_optimizer(tx, "dynamic_loss_scale")
    growth_interval = types.as_count(growth_interval, "growth_interval", least=1)
    _check_factors(init_scale, growth_factor, backoff_factor)
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> LossScaleState:
        scale = jnp.asarray(init_scale, jnp.float32)
        return LossScaleState(scale, jnp.zeros((), jnp.int32), inner.init(params))

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, LossScaleState]:
        grads = jax.tree.map(lambda x: _divide(x, state.scale), updates)
        is_finite = _is_finite(grads)

        def step() -> tuple[PyTree, Any]:
            return inner.update(grads, state.inner, params, **extra_args)

        out, new = selection.choose_step(is_finite, step, state.inner)
        num_finite = state.num_finite + 1
        is_due = num_finite >= growth_interval
        grown = state.scale * np.float32(growth_factor)
        grown = jnp.where(is_due & jnp.isfinite(grown), grown, state.scale)
        least = np.finfo(np.float32).tiny
        smaller = jnp.maximum(state.scale * np.float32(backoff_factor), least)
        scale = jnp.where(is_finite, grown, smaller)
        num_finite = jnp.where(is_finite & ~is_due, num_finite, 0)
        return out, LossScaleState(scale, num_finite, new)

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale(opt_state: PyTree) -> jax.Array:
    """Reads the factor of the loss from the state of an optimizer.

    The state may lie in the state of another optimizer, such as the one of
    `optax.chain`, `jdp.distributed_optimizer(jdp.dynamic_loss_scale(tx))` or
    `jdp.zero1(jdp.dynamic_loss_scale(tx))`. Works inside of a step and outside.

    Args:
      opt_state: pytree with the state of one `jdp.dynamic_loss_scale`.

    Returns:
      float32 (): the factor.

    Raises:
      ValueError: `opt_state` has no such state, or several.
    """
    found: list[jax.Array] = []

    def is_state(x: Any) -> bool:
        return isinstance(x, LossScaleState | ZeroState)

    for x in jax.tree.leaves(opt_state, is_leaf=is_state):
        if isinstance(x, LossScaleState):
            found.append(x.scale)
        elif isinstance(x, ZeroState):
            found.extend(_find_in_shared(x))
    if len(found) != 1:
        raise ValueError(
            "`opt_state` must have the state of one `jdp.dynamic_loss_scale`, got "
            f"{len(found)}. Wrap the optimizer, `jdp.dynamic_loss_scale(tx)`, and pass "
            "the state that its `init` or `update` returned; with several scales, pass "
            "the part of the state that has one."
        )
    return found[0]


def _find_in_shared(state: ZeroState) -> list[jax.Array]:
    """Returns the factors among the arrays that replicas have whole, by their names."""
    arrays = dict(zip(state.shared_names, state.shared, strict=True))
    key, other = (f".{field} []" for field in LossScaleState._fields[:2])
    return [
        x
        for name, x in arrays.items()
        if name.endswith(key) and name.removesuffix(key) + other in arrays
    ]


def _divide(grad: Any, scale: jax.Array) -> Any:
    if grad.dtype == jax.dtypes.float0:
        return grad
    wide = weighted_mean.wide_dtype(grad.dtype)
    return (grad.astype(wide) / scale.astype(wide)).astype(grad.dtype)


def _is_finite(grads: PyTree) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(grads) if x.dtype != jax.dtypes.float0]
    flags = [jnp.isfinite(x).all() for x in leaves]
    return functools.reduce(operator.and_, flags, jnp.ones((), bool))


def _check_factors(
    init_scale: float, growth_factor: float, backoff_factor: float
) -> None:
    given = {
        "init_scale": init_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
    }
    for name, value in given.items():
        types.check_number(value, name)
    if not 0 < init_scale < float("inf"):
        raise ValueError(f"`init_scale` must be above 0, got {init_scale}.")
    if not 1 <= growth_factor < float("inf"):
        raise ValueError(f"`growth_factor` must be at least 1, got {growth_factor}.")
    if not 0 < backoff_factor < 1:
        raise ValueError(
            f"`backoff_factor` must be above 0 and below 1, got {backoff_factor}."
        )
