"""Arithmetic: reductions of numpy arrays, with the rounding of the contract."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdp.collectives import base
from jdp.collectives.base import Op
from jdp.compat import host_functions

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


@np.errstate(all="ignore")
def reduce(operands: Sequence[np.ndarray], op: Op, *, out: np.ndarray) -> None:
    """Reduces arrays of one process into `out`, which may be the first of them.

    As in JAX, overflow gives infinity and inf - inf gives NaN, without a warning.

    Args:
      operands: two or more, of one shape and dtype.
      op: see `HostAllReduce`.
      out: array of the same shape, with their dtype or the dtype of their sum.
    """
    ufunc, (first, second, *rest) = _UFUNCS[op], operands
    dtype = base.accumulator(first.dtype, "sum")
    total = out if out.dtype == dtype else np.empty(out.shape, dtype)
    ufunc(_as_type(first, dtype), _as_type(second, dtype), out=total)
    for operand in rest:
        ufunc(total, _as_type(operand, dtype), out=total)
    if op == "mean":
        divide(total, len(operands))
    if total is not out:
        out[...] = total


@np.errstate(all="ignore")
def reduce_pair(a: np.ndarray, b: np.ndarray, op: Op, *, out: np.ndarray) -> None:
    """Reduces two arrays into `out`, of the dtype of one of them; a mean is a sum."""
    _UFUNCS[op](_as_type(a, out.dtype), _as_type(b, out.dtype), out=out)


def _as_type(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return x if x.dtype == dtype else x.astype(dtype)


def divide(x: np.ndarray, count: int) -> None:
    """Divides in place; integers are rounded towards zero."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        np.divide(x, count, out=x)
        return
    if x.dtype.itemsize == 1:  # 8 bits or fewer might not hold `count`.
        x[...] = np.trunc(x.astype(np.float32) / count).astype(x.dtype)
        return
    is_rounded_down = (x < 0) & (x % count != 0)
    np.floor_divide(x, count, out=x)
    x += is_rounded_down


def can_reduce(dtype: Any) -> bool:
    """Whether numpy reduces arrays of this dtype as XLA does."""
    return jnp.issubdtype(dtype, jnp.number) and host_functions.can_see(dtype)
