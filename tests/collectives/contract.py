"""Contract: what every all-reduce must do, as a table of cases with exact results."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

OPS = ("sum", "mean", "min", "max", "product")
DTYPES = ("float32", "float16", "bfloat16", "float64", "int32")


class Case(NamedTuple):
    """A flat buffer, and how it is reduced."""

    op: str
    dtype: str
    size: int

    def values(self, n):
        """What the replicas hold, shape (n, size).

        Sums and products are exact in float32, and more than 16 bits can hold.
        """
        rng = np.random.default_rng([n, self.size, OPS.index(self.op)])
        shape = (n, self.size)
        if self.op == "product":
            choices = [-3, -1, 1, 2, 3] if self.dtype == "int32" else [-2, 0.75, 1, 1.5]
            values = rng.choice(choices, shape)
        else:
            values = rng.integers(-256, 257, shape)
        return values.astype(jnp.dtype(self.dtype))

    def expected(self, values):
        """The reduction, shape (size,), rounded once to the dtype."""
        is_integer = self.dtype == "int32"
        wide = np.int64 if is_integer else np.float64
        values = values.astype(wide)
        match self.op:
            case "min":
                result = values.min(0)
            case "max":
                result = values.max(0)
            case "product":
                result = values.prod(0)
            case "sum":
                result = values.sum(0)
            case "mean" if is_integer:
                result = np.trunc(values.sum(0) / len(values))
            case "mean":
                accumulator = np.float64 if self.dtype == "float64" else np.float32
                result = values.sum(0).astype(accumulator) / accumulator(len(values))
        return result.astype(jnp.dtype(self.dtype))


SIZES = tuple(Case("sum", "float32", size) for size in (0, 1, 2, 8, 1000))
EVERY_KIND = tuple(Case(op, dtype, 37) for op in OPS for dtype in DTYPES)
# Every op and every dtype, where pairs of them are known to be right.
EACH_KIND = tuple(c for c in EVERY_KIND if c.op == "mean" or c.dtype == "int32")
# Of what needs no option of JAX, an integer, a narrow and a wide one.
A_FEW = (
    Case("mean", "float16", 5),
    Case("max", "int32", 3),
    Case("product", "float32", 37),
)


def check(case, values, reduced):
    """Checks the results of some replicas, shape (k, size), bit by bit.

    XLA multiplies by the reciprocal where a mean divides: that may be one unit off.
    """
    dtype = jnp.dtype(case.dtype)
    assert reduced.dtype == dtype, (case, reduced.dtype)
    assert reduced.shape == (len(reduced), case.size), (case, reduced.shape)
    expected = case.expected(values)
    for got in reduced:
        _assert_same_bits(got, reduced[0], case)
    if case.op == "mean" and case.dtype != "int32":
        difference = np.abs(np.float64(reduced[0]) - np.float64(expected))
        limit = float(jnp.finfo(dtype).eps) * np.abs(np.float64(expected))
        assert (difference <= limit).all(), case
    else:
        _assert_same_bits(reduced[0], expected, case)


def _assert_same_bits(a, b, case):
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), str(case))
