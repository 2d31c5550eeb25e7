"""Weighted mean: the arithmetic of a mean in which replicas count differently."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import compat, types
from jdp.trees import buckets
from jdp.types import AxisName

DivideBy = Literal["weight", "active", "world"]

_NUM_DIGITS = 3  # of 8 bits each, the significand of bfloat16; float32 has 24.


class Weighting(NamedTuple):
    """Weight of this replica."""

    # float32 (), or float64 for a weight of 64 bits; 0 for a replica without data, NaN
    # for an invalid weight.
    amount: jax.Array
    divide_by: DivideBy


def as_weighting(weight: jax.typing.ArrayLike, divide_by: DivideBy) -> Weighting:
    """Returns the weighting of a replica; see `StepTrace.resolve`."""
    x = as_real(weight)
    if x.shape != ():
        raise ValueError(
            "`weight` must be a scalar, how much this replica counts, got shape "
            f"{x.shape}. Pass `weight.sum()`, the sum of the weights of its samples."
        )
    if x.dtype == jnp.bool_:
        raise TypeError(f"`weight` must be a real number, got {x.dtype}.")
    amount = nan_if_negative(x)
    return Weighting(amount if divide_by == "weight" else jnp.sign(amount), divide_by)


def as_real(weight: jax.typing.ArrayLike) -> jax.Array:
    """Returns a weight, or weights, as an array of booleans, integers or floats.

    Raises:
      TypeError: it is not an array of numbers, or they are complex.
      ValueError: a number that is known while tracing is negative.
    """
    check_constant(weight)
    x = try_as_array(weight)
    if x is None:
        raise TypeError(f"`weight` must be a real number, got {weight!r}.")
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
        raise TypeError(f"`weight` must be a real number, got {x.dtype}.")
    return x


def try_as_array(x: Any) -> jax.Array | None:
    """Returns a number or an array as an array; None for anything else."""
    if isinstance(x, str | bytes):  # numpy may take a letter for a dtype.
        return None
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        return None


def check_constant(weight: jax.typing.ArrayLike) -> None:
    """Raises ValueError if a weight that is known while tracing is negative."""
    if isinstance(weight, bool | int | float | np.generic | np.ndarray):
        known = np.asarray(weight)
        if known.dtype.kind in "if" and (known < 0).any():
            raise ValueError(
                "`weight` must be at least 0, the number of samples, got "
                f"{weight!r}. Pass 0 where there is no data."
            )


def nan_if_negative(weight: jax.Array) -> jax.Array:
    """Returns numbers as floats of 32 or 64 bits; negative ones as NaN."""
    x = weight.astype(jnp.float64 if weight.dtype.itemsize == 8 else jnp.float32)
    return jnp.where(x < 0, jnp.asarray(jnp.nan, x.dtype), x)


class GradientWeighting(NamedTuple):
    """How the gradients of this replica count; see `reduce.mean_over_replicas`."""

    weighting: Weighting | None  # None: equal weights; the rest is not set then.
    is_weighed: bool = False
    divisor: jax.Array | None = None

    def weigh(self, groups: Sequence[Sequence[jax.Array]]) -> list[list[jax.Array]]:
        """Returns gradients as they are summed."""
        assert self.weighting is not None
        if not self.is_weighed:
            return [[weigh(x, self.weighting) for x in group] for group in groups]
        if self.divisor is None:
            return [list(group) for group in groups]
        return [[widen(x) for x in group] for group in groups]

    def find_divisor(
        self, total: jax.Array | int, axis_name: AxisName
    ) -> jax.Array | int:
        """Returns the divisor of the sum, given the total weight."""
        assert self.weighting is not None
        if self.divisor is not None:
            return self.divisor
        if self.weighting.divide_by != "world":
            return total
        return jnp.where(jnp.isnan(total), total, compat.axis_size(axis_name))


def cast_amount(weighting: Weighting, axis_name: AxisName) -> Weighting:
    """Casts the weight to a type that may differ between the replicas."""
    amount = compat.cast_tree_varying(weighting.amount, axis_name)
    return weighting._replace(amount=amount)


def has_data(amount: jax.Array | int) -> jax.Array:
    """Whether an amount or a total is not 0; True for NaN, which stays visible."""
    return jnp.not_equal(amount, 0)


class Totals(NamedTuple):
    """Total weight of the replicas."""

    amount: jax.Array  # () of the dtype of the amounts.
    largest: jax.Array  # likewise: the largest amount of a replica.


def sum_over_replicas(amount: jax.Array, axis_name: AxisName) -> Totals:
    """Returns the totals of `amount`, a float (), by a small collective."""
    names = types.as_axis_names(axis_name)
    is_mine = jnp.arange(lax.axis_size(names)) == compat.axis_index(names)
    own = jnp.where(is_mine, amount, jnp.zeros((), amount.dtype))
    missing = compat.tracked_axes(axis_name) - compat.varying_axes(own)
    amounts = lax.psum(compat.cast_varying(own, sorted(missing)), names)
    return Totals(amounts.sum(), amounts.max())


def ratio(amount: jax.Array, total: jax.Array | int, dtype: Any) -> jax.Array:
    """Returns `amount / total` in float32 or wider, as `dtype` is; 0 for a total of 0.

    The quotient is as precise as the arrays of `dtype` that it multiplies.
    """
    wide = jnp.finfo(wide_dtype(dtype)).dtype
    return divide(amount.astype(wide), total, wide)


def weigh(x: jax.Array, weighting: Weighting) -> jax.Array:
    """Returns `x` times the weight of its replica; a weight of 0 may give NaN.

    Dtypes narrower than 32 bits come back as float32, except bfloat16: the sum of a few
    samples' gradients may exceed their range.
    """
    if weighting.divide_by != "weight":
        return widen(x)
    wide = wide_dtype(x.dtype)
    product = x.astype(wide) * weighting.amount.astype(jnp.finfo(wide).dtype)
    # Rounded to bfloat16 once.
    return product.astype(x.dtype) if x.dtype == jnp.bfloat16 else product


def widen(x: jax.Array) -> jax.Array:
    """Returns `x`, in float32 if its dtype is narrower and not bfloat16."""
    return x if x.dtype == jnp.bfloat16 else x.astype(wide_dtype(x.dtype))


def zero_unless(is_kept: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x`, or zeros, whatever it holds, where `is_kept`, bool (), is False."""
    return lax.select(jnp.broadcast_to(is_kept, x.shape), x, jnp.zeros_like(x))


def pack_unless_empty(has_data: jax.Array, arrays: Sequence[jax.Array]) -> jax.Array:
    """Packs arrays into a buffer, shape (n,); zeros where `has_data` is False."""
    if jax.default_backend() != "cpu":
        return zero_unless(has_data, buckets.pack(arrays))
    # XLA on CPU copies into a bucket what is there; to select, it would go through all
    # gradients once more: 6 ms of a step of 24 ms (12.7 MB of gradients, 2 processes).
    return lax.cond(
        has_data, buckets.pack, lambda xs: jnp.zeros_like(buckets.pack(xs)), arrays
    )


def of_one(amount: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the mean over one replica: `x`; zeros without data; NaN for NaN."""
    kind = jnp.isnan(amount) * 2 + (amount == 0)
    kind = jnp.broadcast_to(kind.astype(jnp.int32), x.shape)
    return lax.select_n(kind, x, jnp.zeros_like(x), jnp.full_like(x, jnp.nan))


def divide(x: jax.Array, total: jax.Array | int, dtype: Any) -> jax.Array:
    """Returns `x / total` in `dtype`; zeros, as `x` must be, where `total` is zero."""
    wide = wide_dtype(x.dtype)
    divisor = jnp.where(total == 0, 1, total).astype(jnp.finfo(wide).dtype)
    return (x.astype(wide) / divisor).astype(dtype)


def invert(total: jax.Array) -> jax.Array:
    """Returns 1 / `total`, float32 (); 1 where `total` is zero."""
    return divide(jnp.ones(()), total, jnp.float32)


def encode(amount: jax.Array, dtype: Any, axis_name: AxisName) -> jax.Array:
    """Writes `amount` so that its sum over the replicas in `dtype` loses no digit.

    In 32 bits and more it is the number itself, exact up to a total of 2^24 samples. In
    bfloat16 sums are exact only up to 256. There each replica writes its number, in
    digits of 8 bits, into its own column, to which the sum adds only zeros.

    Returns:
      Shape (), or (3, num_replicas) in bfloat16; `decode` reads its sum.
    """
    if dtype != jnp.bfloat16:
        return amount.astype(dtype)
    amount = amount.astype(jnp.float32)
    digits = []
    for _ in range(_NUM_DIGITS):
        # XLA may leave out a cast to bfloat16 and back, but not this.
        digits.append(lax.reduce_precision(amount, exponent_bits=8, mantissa_bits=7))
        amount = amount - digits[-1]
    names = types.as_axis_names(axis_name)
    is_mine = jnp.arange(lax.axis_size(names)) == compat.axis_index(names)
    return jnp.where(is_mine, jnp.stack(digits)[:, None], 0.0).astype(dtype)


def _holds_weights(x: jax.Array, weighting: Weighting) -> bool:
    """Whether a sum in the dtype of `x` keeps all digits of the weights."""
    return jnp.finfo(x.dtype).bits == 64 or weighting.amount.dtype != jnp.float64


def keep_digits(
    groups: list[list[jax.Array]], weighting: Weighting, axis_name: AxisName
) -> list[list[jax.Array]]:
    """Adds an empty group for the weight, if all groups would round it."""
    if any(_holds_weights(group[0], weighting) for group in groups):
        return groups
    alone = jnp.zeros(0, weighting.amount.dtype)
    return [*groups, [compat.cast_tree_varying(alone, axis_name)]]


def add_total(
    groups: Sequence[list[jax.Array]], weighting: Weighting, axis_name: AxisName
) -> tuple[list[list[jax.Array]], int]:
    """Adds the encoded weight to the group of arrays with which it travels.

    It is the last array of the first group that it fits in, or in a group of its own.
    JAX takes arrays that are packed together to differ over all axes over which one
    does, so it fits only where all differ over the same axes.

    Returns:
      The groups, and the index of the group with the weight.
    """
    axes = compat.varying_axes(weighting.amount)
    fitting = [g for g, x in enumerate(groups) if compat.varying_axes(x[0]) == axes]
    fitting.sort(key=lambda g: not _holds_weights(groups[g][0], weighting))
    seat = fitting[0] if fitting else len(groups)
    groups = [*groups] if fitting else [*groups, []]
    dtype = groups[seat][0].dtype if fitting else jnp.float32
    encoded = encode(weighting.amount, dtype, axis_name)
    groups[seat] = [*groups[seat], encoded]
    return groups, seat


def num_encoded_bytes(
    dtypes: Sequence[Any], weighting: Weighting, num_replicas: int
) -> int:
    """Returns the bytes of the weight that `add_total` adds.

    Args:
      dtypes: dtypes of the gradients of each group, and of riders.
      weighting: the weight of this replica.
      num_replicas: number of replicas.
    """
    sent = [x if x == jnp.bfloat16 else wide_dtype(x) for x in dtypes]
    if weighting.amount.dtype == jnp.float64:
        sent.sort(key=lambda dtype: jnp.finfo(dtype).bits != 64)
    dtype = jnp.dtype(sent[0] if sent else jnp.float32)
    num_numbers = _NUM_DIGITS * num_replicas if dtype == jnp.bfloat16 else 1
    return num_numbers * dtype.itemsize


def decode(total: jax.Array) -> jax.Array:
    """Reads the sum of results of `encode`; float32 or wider, ()."""
    real = total.real.astype(wide_dtype(total.real.dtype))
    return real.sum(0).sum() if real.ndim else real


def wide_dtype(dtype: Any) -> Any:
    """The dtype itself, or float32 in place of a narrower one or of integers."""
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    return dtype if is_inexact and jnp.finfo(dtype).bits >= 32 else np.dtype("float32")


def as_inexact(x: Any) -> jax.Array:
    """Returns a number or an array as an array of a floating or complex dtype."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float)
