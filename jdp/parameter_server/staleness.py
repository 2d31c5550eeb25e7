"""Staleness: how does an optimizer scale gradients of old parameters down?"""

import numbers
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp.parameter_server import option_checks
from jdp.types import PyTree


def scale_by_staleness(
    tx: optax.GradientTransformation, *, power: float = 1.0
) -> optax.GradientTransformationExtraArgs:
    """Divides the updates of `tx` by `max(1, staleness) ** power`.

    The rule of Zhang et al., 2016, "Staleness-aware Async-SGD for Distributed Deep
    Learning", with a power of 1. A `Server` passes the staleness of each push: the
    number of updates between its pull and its application.

    Args:
      tx: any optax transformation.
      power: exponent, at least 0; 0: staleness has no effect.

    Raises:
      TypeError: `tx` is not an optimizer, or `power` is not a number.
      ValueError: `power` is out of its range.

    Returns:
      The transformation; its `update` takes `staleness=`, int ().
    """
    option_checks.check_optimizer(tx)
    is_array = isinstance(power, jax.Array | np.ndarray) and power.shape == ()
    is_number = isinstance(power, numbers.Real) or is_array
    if not is_number or isinstance(power, bool):
        raise TypeError(f"`power` must be a number, at least 0, got {power!r}.")
    if not 0 <= power < float("inf"):
        raise ValueError(f"`power` must be a number, at least 0, got {power}.")
    inner = optax.with_extra_args_support(tx)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        if "staleness" not in extra_args:
            raise TypeError(
                "`scale_by_staleness` needs `update(..., staleness=)`, as a `Server` "
                "calls it."
            )
        updates, state = _update(inner, updates, state, params, extra_args)
        staleness = jnp.maximum(1, extra_args["staleness"])
        factor = staleness.astype(jnp.float32) ** -power
        scaled = jax.tree.map(lambda u: (u * factor).astype(u.dtype), updates)
        return scaled, state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def run_update(
    tx: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    staleness: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Calls the `update` of an optimizer; the only extra argument is the staleness.

    Raises:
      TypeError: `update` requires other arguments.
    """
    try:
        return _update(tx, grads, state, params, {"staleness": staleness})
    except TypeError as error:
        if not _IS_OF_ARGUMENTS.search(str(error)):
            raise
        raise TypeError(
            "A server calls the optimizer with gradients, state, parameters and "
            f"`staleness=` only, which is too little: {error}. "
            "Workers send only gradients, without the `value=` that "
            "`optax.contrib.reduce_on_plateau` needs, for example. Take an optimizer "
            "without such a part."
        ) from error


def _update(
    tx: optax.GradientTransformationExtraArgs,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    extra_args: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    """Calls `update`, without the staleness if it does not take that argument."""
    try:
        return tx.update(updates, state, params, **extra_args)
    except TypeError as error:
        # The signature does not tell: `optax.chain` accepts arguments its parts reject.
        if _NOT_TAKEN not in str(error):
            raise
    rest = {name: x for name, x in extra_args.items() if name != "staleness"}
    return tx.update(updates, state, params, **rest)


# Python's wording.
_NOT_TAKEN = "unexpected keyword argument 'staleness'"
_IS_OF_ARGUMENTS = re.compile(r"missing \d+ required")
