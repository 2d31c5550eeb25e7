"""Arguments: is what a caller gives of the type that all processes can be told?

What is wrong is refused where it is called, before any process hears of it, so that the
engine goes on everywhere.
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
from jdp.replicas import mesh
from jdp.types import PyTree


def check_name(name: Any, argument: str = "name") -> str:
    """Returns a name as a plain `str`.

    Args:
      name: given by the caller; a subclass such as `numpy.str_` will do.
      argument: how it is called in errors.

    Raises:
      TypeError: it is no string.
      ValueError: it has half a surrogate, which no message can hold.
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
      TypeError: it is none, or a bool.
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
    """Returns the ranks in ascending order, each once.

    Raises:
      TypeError: they are no integers.
    """
    if isinstance(ranks, str | bytes) or not isinstance(ranks, Iterable):
        raise TypeError(f"`ranks` must be a list of integers, got {ranks!r}.")
    return tuple(sorted({check_integer(rank, "ranks") for rank in ranks}))


def check_factor(value: Any, argument: str) -> float:
    """Returns a real number, also one in an array of no dimensions, as `float`.

    Raises:
      TypeError: it is none.
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
        f"{value!r}. Multiply the array before the call with what differs."
    )


def check_timeout(timeout_s: Any) -> float | None:
    """Returns a longest wait in seconds as `float`; None where there is no limit.

    Args:
      timeout_s: given by the caller; None, and what no clock can hold, is no limit.

    Raises:
      TypeError: it is no number.
      ValueError: it is negative or not a number.
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
      TypeError: it is no string.
    """
    if not isinstance(op, str):
        raise TypeError(f'`op` must be a str such as "sum", got {op!r}.')
    return str.__str__(op)


def check_dtype(dtype: Any, argument: str) -> np.dtype:
    """Returns a dtype.

    Raises:
      TypeError: it is none.
    """
    try:
        return jnp.dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(
            f'`{argument}` must be a dtype such as "float16", got {dtype!r}.'
        ) from None


def check_array(leaf: Any, name: str) -> Any:
    """Returns a leaf, which goes under `name`, as an array of numpy or JAX.

    Raises:
      TypeError: it is no array of numbers.
      ValueError: it is a global array that is split over the processes.
    """
    mesh.check_has_no_mask(leaf, f"`{name}`")
    if type(leaf) is np.ndarray:
        array = leaf
    elif isinstance(leaf, jax.core.Tracer):
        raise TypeError(gradients.describe_unsupported(leaf))
    elif is_key(leaf):
        raise TypeError(
            f"`{name}` must be an array of numbers, got keys, {leaf.dtype}. Send "
            "`jax.random.key_data(keys)`, and make keys of what comes with "
            "`jax.random.wrap_key_data`; `broadcast_parameters` does so by itself."
        )
    elif isinstance(leaf, jax.Array):
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise ValueError(
                f"`{name}`, {leaf.dtype}{list(leaf.shape)}, is split over the "
                "processes; give what this process has of it."
            )
        return leaf
    else:
        array = np.asarray(leaf)
    if array.dtype.kind not in "iufcb" and not jnp.issubdtype(array.dtype, jnp.number):
        raise TypeError(f"`{name}` must be an array of numbers, got {array.dtype}.")
    if not array.dtype.isnative:  # Other ranks cannot see in which order bytes are.
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def is_key(leaf: Any) -> bool:
    """Whether this is an array of keys of `jax.random`."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def is_traced(tree: PyTree) -> bool:
    """Whether a leaf is a tracer of JAX."""
    if isinstance(tree, np.ndarray):
        return False
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def check_splits(array: Any, splits: Any, count: int) -> tuple[int, ...]:
    """Returns how many rows of an array go to each of `count` processes."""
    if array.ndim == 0:
        return ()  # All ranks hear of it from the coordinator.
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
    rows = tuple(splits.tolist())  # Integers of numpy would overflow in the sum.
    if min(rows) < 0 or sum(rows) > num_rows:
        raise ValueError(
            f"`splits` must be at least 0, and no more than the {num_rows} rows of the "
            f"array together, got {list(rows)}."
        )
    return rows
