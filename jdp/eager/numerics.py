"""Numerics: properties of dtypes that their numpy kind does not tell.

Integers of 1 to 4 bits and most floats of 4 to 16 bits are of kind "V" to numpy.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np


@functools.cache
def is_integer(dtype: np.dtype) -> bool:
    """Whether a dtype is an integer dtype, signed or not, of any width."""
    return bool(jnp.issubdtype(dtype, jnp.integer))


@functools.cache
def scaled_in(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which arrays are multiplied by a factor."""
    if is_integer(dtype):
        return np.dtype(np.float64)
    is_narrow = dtype.itemsize <= 2 and jnp.issubdtype(dtype, jnp.floating)
    return np.dtype(np.float32) if is_narrow else dtype


@functools.cache
def limits(dtype: np.dtype) -> tuple[Any, Any]:
    """Returns the lowest and the highest value of a real dtype, in this dtype.

    These are infinities if the dtype has them, and its finite limits otherwise.
    """
    if is_integer(dtype):
        info = jnp.iinfo(dtype)
        return dtype.type(info.min), dtype.type(info.max)
    infinity = np.array(np.inf).astype(dtype)
    if np.isinf(infinity):
        return (-infinity)[()], infinity[()]
    info = jnp.finfo(dtype)
    return dtype.type(info.min), dtype.type(info.max)


@functools.cache
def has_zero(dtype: np.dtype) -> bool:
    """Whether a dtype can represent zero; float8_e8m0fnu, powers of two, cannot."""
    return not np.zeros(1, dtype).astype(np.complex128).any()
