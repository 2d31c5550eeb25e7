"""Argument types: can the arguments of a call be sent to all processes?

Wrong arguments are refused at the call, before another process hears of it, so the
engine keeps running everywhere.
"""

import numbers
import operator
import threading
from collections.abc import Iterable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jdp.eager import gradients
from jdp.replicas import host_arrays
from jdp.types import PyTree


def check_name(name: Any, argument: str = "name") -> str:
    """Returns a name as a plain `str`.

    Args:
      name: given by the caller; may be a subclass such as `numpy.str_`.
      argument: name of the argument, for errors.

    Raises:
      TypeError: `name` is not a string.
      ValueError: `name` has half a surrogate, which UTF-8 cannot encode.
    """
    if type(name) is str and name.isascii():
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"`{argument}` must be a str, got {name!r} of type "
            f"{type(name).__name__}. Pass `str(name)`."
        )
    name = str.__str__(name)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"`{argument}` must be text that UTF-8 can hold, got {name!a} with half a "
            "surrogate. Pass it without."
        ) from None
    return name


def check_integer(value: Any, argument: str) -> int:
    """Returns an integer of Python, numpy or JAX as `int`.

    Raises:
      TypeError: the value is not an integer, or it is a bool.
    """
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(
        f"`{argument}` must be an integer, got {value!r} of type "
        f"{type(value).__name__}."
    )


def check_ranks(ranks: Iterable[Any]) -> tuple[int, ...]:
    """Returns the distinct ranks in ascending order.

    Raises:
      TypeError: a rank is not an integer.
    """
    if isinstance(ranks, str | bytes) or not isinstance(ranks, Iterable):
        raise TypeError(f"`ranks` must be a list of integers, got {ranks!r}.")
    return tuple(sorted({check_integer(rank, "ranks") for rank in ranks}))


def check_factor(value: Any, argument: str) -> float:
    """Returns a real number, or an array of no dimensions, as `float`.

    Raises:
      TypeError: the value is not a real number.
    """
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        is_known = not isinstance(value, jax.core.Tracer)
        is_real = value.dtype.kind in "iufb" or jnp.issubdtype(
            value.dtype, jnp.floating
        )
        if is_known and value.ndim == 0 and is_real:
            return float(value)
    elif isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            return float("inf")
    raise TypeError(
        f"`{argument}` must be a real number, the same for all elements, got "
        f"{value!r}. Multiply the array by other factors before the call."
    )


def check_timeout(timeout_s: Any) -> float | None:
    """Returns a time-out in seconds as `float`; None where there is no limit.

    Args:
      timeout_s: given by the caller; None and values beyond `threading.TIMEOUT_MAX`
        set no limit.

    Raises:
      TypeError: `timeout_s` is not a number.
      ValueError: `timeout_s` is negative or NaN.
    """
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, numbers.Real):
        raise TypeError(
            f"`timeout_s` must be a number of seconds or None, got {timeout_s!r} of "
            f"type {type(timeout_s).__name__}."
        )
    seconds: Any = timeout_s  # An integer may be more than a float can hold.
    if not seconds >= 0:
        raise ValueError(
            f"`timeout_s` must be at least 0 seconds, got {timeout_s}. Pass None to "
            "wait without a limit."
        )
    return float(seconds) if seconds <= threading.TIMEOUT_MAX else None


def check_op(op: Any) -> str:
    """Returns the name of a reduction as a plain `str`.

    Raises:
      TypeError: `op` is not a string.
    """
    if not isinstance(op, str):
        raise TypeError(f'`op` must be a str such as "sum", got {op!r}.')
    return str.__str__(op)


def check_dtype(dtype: Any, argument: str) -> np.dtype:
    """Returns the numpy dtype of an argument.

    Raises:
      TypeError: `dtype` does not name a dtype.
    """
    try:
        return jnp.dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(
            f'`{argument}` must be a dtype such as "float16", got {dtype!r}.'
        ) from None


def check_array(leaf: Any, name: str) -> Any:
    """Returns the leaf called `name` as an array of numpy or JAX.

    Raises:
      TypeError: the leaf is not an array of numbers.
      ValueError: the leaf is a global array that is split over the processes.
    """
    host_arrays.check_has_no_mask(leaf, f"`{name}`")
    if type(leaf) is np.ndarray:
        array = leaf
    elif isinstance(leaf, jax.core.Tracer):
        raise TypeError(gradients.describe_unsupported(leaf))
    elif is_key(leaf):
        raise TypeError(
            f"`{name}` must be an array of numbers, got keys, {leaf.dtype}. Send "
            "`jax.random.key_data(keys)`, and wrap the result with "
            "`jax.random.wrap_key_data`. `broadcast_parameters` accepts keys."
        )
    elif isinstance(leaf, jax.Array):
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise ValueError(
                f"`{name}`, {leaf.dtype}{list(leaf.shape)}, is split over the "
                "processes; pass the part of this process."
            )
        return leaf
    else:
        array = np.asarray(leaf)
    if array.dtype.kind not in "iufcb" and not jnp.issubdtype(array.dtype, jnp.number):
        raise TypeError(f"`{name}` must be an array of numbers, got {array.dtype}.")
    if not array.dtype.isnative:  # A message does not tell the byte order.
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of `jax.random` keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def is_traced(tree: PyTree) -> bool:
    """Whether a leaf of the tree is a JAX tracer."""
    if isinstance(tree, np.ndarray):
        return False
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def check_splits(array: Any, splits: Any, count: int) -> tuple[int, ...]:
    """Returns the number of rows of an array to send to each of `count` processes."""
    if array.ndim == 0:
        return ()  # The coordinator reports the scalar to all ranks.
    num_rows = array.shape[0]
    if splits is None:
        if num_rows % count:
            raise ValueError(
                f"`splits` is not given, but the {num_rows} rows do not divide among "
                f"the {count} processes."
            )
        return (num_rows // count,) * count
    splits = np.asarray(splits)
    if splits.ndim != 1 or splits.dtype.kind not in "iu":
        raise ValueError(
            "`splits` must be integers, shape (k,), got "
            f"{splits.dtype}{list(splits.shape)}."
        )
    if splits.size != count:
        raise ValueError(
            f"`splits` must have an entry for each of the {count} processes, got "
            f"{splits.size}."
        )
    rows = tuple(splits.tolist())  # Numpy integers would overflow in the sum.
    if min(rows) < 0 or sum(rows) > num_rows:
        raise ValueError(
            f"`splits` must be at least 0, and no more than the {num_rows} rows of the "
            f"array together, got {list(rows)}."
        )
    return rows
