"""Selection: a step that is taken or not, decided while tracing or at run time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp.gradients import used_flags
from jdp.types import PyTree


def choose_step(
    flag: jax.Array, step: Callable[[], tuple[PyTree, Any]], old: Any
) -> tuple[PyTree, Any]:
    """Returns updates and state of `step`; without it, updates of -0.0 and `old`."""
    updates, new = step()
    return jax.tree.map(lambda x: _or_no_update(flag, x), updates), jax.tree.map(
        lambda a, b: _select(flag, a, b), old, new
    )


def choose_leaf_step(
    flag: Any, step: Callable[[], tuple[jax.Array, Any]], old: Any
) -> tuple[jax.Array, Any]:
    """`choose_step` for one parameter; a Python bool decides while tracing."""
    if used_flags.is_static(flag):
        if flag:
            update, new = step()
            return update, jax.tree.map(_in_type_of, old, new)
        return no_update(jax.eval_shape(lambda: step()[0])), old
    update, new = step()
    state = jax.tree.map(lambda a, b: _select(flag, a, b), old, new)
    return _or_no_update(flag, update), state


def no_update(aval: Any) -> jax.Array:
    """Returns -0.0 everywhere, which changes no number, not even -0.0."""
    return lax.full(aval.shape, _negative_zero(aval.dtype), aval.dtype)


def _or_no_update(flag: jax.Array, update: jax.Array) -> jax.Array:
    zero = lax.full_like(update, _negative_zero(update.dtype))
    return lax.select(flag, update, zero)


def _select(flag: jax.Array, old: Any, new: Any) -> jax.Array:
    """Returns `new` if `flag`, else `old`, in the dtype of `old`."""
    new, old = _in_type_of(old, new), jnp.asarray(old)
    return lax.select(flag, new, old)


def _negative_zero(dtype: Any) -> complex:
    return complex(-0.0, -0.0) if jnp.issubdtype(dtype, jnp.complexfloating) else -0.0


def _in_type_of(old: Any, new: Any) -> jax.Array:
    """Returns `new` in the dtype of `old`, so that a scan can carry the state."""
    return lax.convert_element_type(new, jnp.result_type(old))
