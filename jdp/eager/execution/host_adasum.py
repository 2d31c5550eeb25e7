"""Host adasum: one level of `jdp.collectives.adasum`, in numpy.

In float64, in which the subnormal numbers of narrower dtypes are normal.
"""

import numpy as np

_LIMIT = 1021  # 2^-limit and 2^limit are normal numbers of float64.


@np.errstate(all="ignore")
def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b, in the dtype of `a`.

    Args:
      a: array of the lower rank, shape (m,), floating.
      b: array of the upper rank, the same shape and dtype.
    """
    x, y = a.astype(np.float64), b.astype(np.float64)
    if not x.size:
        return a
    x_unit, x_scale = _scale(x)
    y_unit, y_scale = _scale(y)
    half_dot = (x_unit * y_unit).sum() / 2
    # If a norm is zero, so is the numerator.
    x_share = half_dot / ((x_unit * x_unit).sum() or 1.0)
    y_share = half_dot / ((y_unit * y_unit).sum() or 1.0)
    # In this order nothing overflows: |share| * scale is at most the other's norm.
    result = (x - x_share * y_scale * x_unit) + (y - y_share * x_scale * y_unit)
    return result.astype(a.dtype)


def _scale(x: np.ndarray) -> tuple[np.ndarray, float]:
    """Splits `x` exactly into numbers of order 1 and a power of two."""
    largest = float(np.abs(x).max())
    exponent = int(np.frexp(largest)[1]) - 1 if np.isfinite(largest) else 0
    exponent = max(-_LIMIT, min(exponent, _LIMIT))
    return np.ldexp(x, -exponent), float(np.ldexp(1.0, exponent))
