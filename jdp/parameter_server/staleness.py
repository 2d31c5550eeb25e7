"""Staleness: a learning rate that is smaller for gradients of old parameters."""

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
    """Divides the updates of `tx` by max(1, staleness) ** power.

    The rule of Zhang et al., 2016, "Staleness-aware Async-SGD for Distributed Deep
    Learning", where the power is 1. A `Server` tells the staleness of each push: how
    many updates were made between the pull that it is computed from and the push.

    Args:
      tx: any optax transformation.
      power: 0: staleness makes no difference.

    Raises:
      TypeError: `tx` is no optimizer, or `power` is no number.
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
    """Calls the `update` of an optimizer, which is told the staleness, int (), alone.

    Raises:
      TypeError: it requires other arguments.
    """
    try:
        return _update(tx, grads, state, params, {"staleness": staleness})
    except TypeError as error:
        if not _IS_OF_ARGUMENTS.search(str(error)):
            raise
        raise TypeError(
            "A server calls the optimizer with gradients, state, parameters and "
            f"`staleness=`, and with nothing else, which is too little: {error}. "
            "Workers send gradients alone, without the `value=` that "
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
    """Calls `update`, without the staleness where that takes no such argument."""
    try:
        return tx.update(updates, state, params, **extra_args)
    except TypeError as error:
        # A signature does not tell: `optax.chain` takes all that one part may not.
        if _NOT_TAKEN not in str(error):
            raise
    rest = {name: x for name, x in extra_args.items() if name != "staleness"}
    return tx.update(updates, state, params, **rest)


# As Python words it.
_NOT_TAKEN = "unexpected keyword argument 'staleness'"
_IS_OF_ARGUMENTS = re.compile(r"missing \d+ required")
