"""Option checks: is an option of the right type, and in its range?"""

import numbers
import os
from typing import Any

import jax
import optax

from jdp.hooks import CommHook

_LEAST_S, _MOST_S = 0.01, 1e6


def check_seconds(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless `value` is from 0.01 to 1e6 seconds."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number of seconds, got {value!r}.")
    if not _LEAST_S <= float(value) <= _MOST_S:
        raise ValueError(f"`{name}` must be from 0.01 to 1e6 seconds, got {value}.")


def check_count(name: str, value: Any, least: int) -> int:
    """Returns `value`, possibly a numpy integer, as an int.

    Raises:
      TypeError: `value` is not a whole number.
      ValueError: `value` is less than `least`.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a whole number, got {value!r}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    return int(value)


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")


def check_is(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raises TypeError unless `value` is a `kind`, described by `wanted`."""
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` must be {wanted}, got {value!r}.")


def check_optimizer(value: Any) -> None:
    """Raises TypeError unless `value` is an optimizer of optax."""
    wanted = "an optimizer, such as `optax.sgd(0.1)`"
    if isinstance(value, optax.MultiSteps):
        wanted += " or `optax.MultiSteps(...).gradient_transformation()`"
    check_is("tx", value, optax.GradientTransformation, wanted)


def check_folder(name: str, value: Any) -> None:
    """Raises TypeError or ValueError unless `value` is a path or None."""
    is_path = isinstance(value, str | os.PathLike)
    if not is_path or not isinstance(os.fspath(value), str):
        raise TypeError(f"`{name}` must be a path or None, got {value!r}.")
    if not os.fspath(value):
        raise ValueError(f"`{name}` must be the path of a folder or None, got ''.")


def check_hook(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a communication hook or None."""
    if value is not None and not isinstance(value, CommHook):
        raise TypeError(
            f"`{name}` must be a hook, such as `jdp.hooks.int8()`, or None, got "
            f"{value!r}."
        )


def check_device(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a device of JAX or None."""
    if value is not None and not isinstance(value, jax.Device):
        raise TypeError(
            f"`{name}` must be a device, such as `jax.devices()[0]`, or None, got "
            f"{value!r}."
        )
