"""Weights: how much each replica counts in a mean, and where that is known from."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import compat
from jdp.replicas import mesh
from jdp.types import AxisName

DivideBy = Literal["weight", "active", "world"]

_NUM_PIECES = 3  # of 8 bits each, the significand of bfloat16; float32 has 24.


class Weighting(NamedTuple):
    """How much this replica counts."""

    # float32 (), float64 where the weight is of 64 bits; 0 for a replica without data,
    # NaN where it is none.
    amount: jax.Array
    divide_by: DivideBy


def _as_aval(weighting: Weighting | None) -> Weighting | None:
    if weighting is None:
        return None
    x = weighting.amount
    return weighting._replace(amount=jax.ShapeDtypeStruct(x.shape, x.dtype))


class Replica:
    """State of the weighting while the step of one replica is traced."""

    def __init__(self, ambient: Weighting | None):
        """Starts with what holds for all that is given no weight."""
        self.ambient = ambient
        self._trace = compat.current_trace()
        self._last: Weighting | None = None
        self._is_out_of_reach = False  # a weight was given, in a loop or a branch.

    def note(self, weighting: Weighting) -> None:
        """Notes how gradients were weighted."""
        if compat.current_trace() is self._trace:
            self._last = weighting
        else:
            self._is_out_of_reach = True

    def without_arrays(self) -> "Replica":
        """Copy for use after the trace has ended: amounts become shapes."""
        copy = Replica(_as_aval(self.ambient))
        copy._trace = None
        copy._last = _as_aval(self._last)
        copy._is_out_of_reach = self._is_out_of_reach
        return copy

    @property
    def noted(self) -> Weighting | None:
        """The weights of the last gradients, as far as they are in reach."""
        return self._last or self.ambient

    def of_metrics(self) -> Weighting | None:
        """How the metrics of the step are weighted: as the last of its gradients.

        Raises:
          ValueError: the weight is known in a loop or a branch of the step alone.
        """
        if self._last is None and self._is_out_of_reach:
            raise ValueError(
                "The step weighs its gradients inside of a `scan`, a `cond` or a "
                "`jit`, where its metrics do not know the weight. Average them there, "
                "with `jdp.average(metrics, weight=...)`."
            )
        return self.noted


_replica: contextvars.ContextVar[Replica | None] = contextvars.ContextVar(
    "replica", default=None
)


@contextlib.contextmanager
def replica(ambient: Weighting | None = None) -> Iterator[Replica]:
    """While the step of one replica is traced; `ambient` where no weight is given."""
    found = Replica(ambient)
    token = _replica.set(found)
    try:
        yield found
    finally:
        _replica.reset(token)


def resolve(
    weight: jax.typing.ArrayLike | None, divide_by: DivideBy
) -> Weighting | None:
    """Returns how this replica counts; None where every replica counts the same.

    A traced weight below zero, which no replica can have, becomes NaN, as a NaN stays
    one: what is averaged with it is NaN, too.

    Raises:
      ValueError: `weight` is not a scalar or is a negative constant, or `divide_by` is
        unknown.
      TypeError: `weight` is not a real number.
    """
    check_divide_by(divide_by)
    current = _replica.get()
    if weight is None:
        ambient = current.ambient if current is not None else None
        if ambient is None or divide_by == "weight":
            return ambient
        return ambient._replace(divide_by=divide_by)
    if isinstance(weight, str | bytes):
        raise TypeError(f"`weight` must be a real number, got {weight!r}.")
    check_constant(weight)
    x = jnp.asarray(weight)
    if x.shape != ():
        raise ValueError(
            "`weight` must be a scalar, how much this replica counts, got shape "
            f"{x.shape}. Pass `weight.sum()` of one number a sample."
        )
    if not any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(f"`weight` must be a real number, got {x.dtype}.")
    amount = nan_if_negative(x)
    return Weighting(amount if divide_by == "weight" else jnp.sign(amount), divide_by)


def check_constant(weight: jax.typing.ArrayLike) -> None:
    """Raises ValueError if a weight that is known already is negative."""
    if isinstance(weight, bool | int | float | np.generic | np.ndarray):
        known = np.asarray(weight)
        if known.dtype.kind in "if" and (known < 0).any():
            raise ValueError(
                "`weight` must be at least 0, how many samples a replica has, got "
                f"{weight!r}. Pass 0 where there is no data."
            )


def nan_if_negative(weight: jax.Array) -> jax.Array:
    """Returns numbers as floats of 32 or 64 bits; negative ones as NaN."""
    x = weight.astype(jnp.float64 if weight.dtype.itemsize == 8 else jnp.float32)
    return jnp.where(x < 0, jnp.asarray(jnp.nan, x.dtype), x)


def has_data(amount: jax.Array | int) -> jax.Array:
    """Whether an amount, or a total, is one of data: also NaN, which is to be seen."""
    return jnp.not_equal(amount, 0)


def check_divide_by(divide_by: str) -> None:
    """Raises ValueError if `divide_by` is unknown."""
    if divide_by not in get_args(DivideBy):
        raise ValueError(
            f"`divide_by` must be 'weight', 'active' or 'world', got {divide_by!r}."
        )


def is_ambient(weighting: Weighting) -> bool:
    """Whether it says no more than which replicas have data: no weight was given."""
    current = _replica.get()
    ambient = current.ambient if current is not None else None
    return ambient is not None and weighting.amount is ambient.amount


def note(weighting: Weighting | None) -> None:
    """Tells the step that is traced how its gradients were weighted."""
    current = _replica.get()
    if current is not None and weighting is not None:
        current.note(weighting)


class Totals(NamedTuple):
    """Total weight of the replicas."""

    amount: jax.Array  # () of the dtype of the amounts.
    largest: jax.Array  # likewise: what the replica with most data counts.


def sum_over_replicas(amount: jax.Array, axis_name: AxisName) -> Totals:
    """Returns the totals of `amount`, a float (), by a small collective."""
    names = mesh.as_axis_names(axis_name)
    is_mine = jnp.arange(lax.axis_size(names)) == lax.axis_index(names)
    own = jnp.where(is_mine, amount, jnp.zeros((), amount.dtype))
    missing = mesh.tracked_axes(axis_name) - compat.varying_axes(own)
    amounts = lax.psum(compat.cast_varying(own, sorted(missing)), names)
    return Totals(amounts.sum(), amounts.max())


def ratio(amount: jax.Array, total: jax.Array | int, dtype: Any) -> jax.Array:
    """Returns `amount / total` in float32 or wider, as `dtype` is; 0 for a total of 0.

    A quotient of narrower amounts is as precise as what is multiplied by it.
    """
    wide = jnp.finfo(wide_dtype(dtype)).dtype
    return divide(amount.astype(wide), total, wide)


def weigh(x: jax.Array, weighting: Weighting) -> jax.Array:
    """Returns `x` times what its replica counts; for 0, NaN may come of it.

    Types narrower than 32 bits come back as float32, but for bfloat16: their range
    ends where the sum of a few samples' gradients may lie.
    """
    if weighting.divide_by != "weight":
        return widen(x)
    wide = wide_dtype(x.dtype)
    product = x.astype(wide) * weighting.amount.astype(jnp.finfo(wide).dtype)
    # Rounded to bfloat16 once.
    return product.astype(x.dtype) if x.dtype == jnp.bfloat16 else product


def widen(x: jax.Array) -> jax.Array:
    """Returns `x`, in float32 if its type is narrow and no bfloat16."""
    return x if x.dtype == jnp.bfloat16 else x.astype(wide_dtype(x.dtype))


def zero_unless(is_kept: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x`, or zeros, whatever it holds, where `is_kept`, bool (), is False."""
    return lax.select(jnp.broadcast_to(is_kept, x.shape), x, jnp.zeros_like(x))


def of_one(amount: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the mean over one replica: `x`, zeros without data, or NaN of a NaN."""
    kind = jnp.isnan(amount) * 2 + (amount == 0)
    kind = jnp.broadcast_to(kind.astype(jnp.int32), x.shape)
    return lax.select_n(kind, x, jnp.zeros_like(x), jnp.full_like(x, jnp.nan))


def divide(x: jax.Array, total: jax.Array | int, dtype: Any) -> jax.Array:
    """Returns `x / total` in `dtype`; zeros, as `x` must be, where `total` is zero."""
    wide = wide_dtype(x.dtype)
    divisor = jnp.where(total == 0, 1, total).astype(jnp.finfo(wide).dtype)
    return (x.astype(wide) / divisor).astype(dtype)


def encode(amount: jax.Array, dtype: Any, axis_name: AxisName) -> jax.Array:
    """Writes `amount` so that its sum over the replicas in `dtype` loses no digit.

    In 32 bits and more that is the number itself, exact up to a total of 2^24 samples.
    A sum in bfloat16 would end at 256, so there each replica has a column of its own,
    in which it writes its number in pieces, and the sum adds only zeros.

    Returns:
      Shape (), or (3, num_replicas) in bfloat16; `decode` reads its sum.
    """
    if dtype != jnp.bfloat16:
        return amount.astype(dtype)
    amount = amount.astype(jnp.float32)
    pieces = []
    for _ in range(_NUM_PIECES):
        # XLA may leave out a cast to bfloat16 and back, but not this.
        pieces.append(lax.reduce_precision(amount, exponent_bits=8, mantissa_bits=7))
        amount = amount - pieces[-1]
    names = mesh.as_axis_names(axis_name)
    is_mine = jnp.arange(lax.axis_size(names)) == lax.axis_index(names)
    return jnp.where(is_mine, jnp.stack(pieces)[:, None], 0.0).astype(dtype)


def decode(total: jax.Array) -> jax.Array:
    """Reads the sum of what `encode` wrote; float32 or wider, ()."""
    real = total.real.astype(wide_dtype(total.real.dtype))
    return real.sum(0).sum() if real.ndim else real


def wide_dtype(dtype: Any) -> Any:
    """The dtype itself, or float32 in place of a narrower one or of integers."""
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    return dtype if is_inexact and jnp.finfo(dtype).bits >= 32 else np.dtype("float32")


def as_inexact(x: Any) -> jax.Array:
    """Returns a number or an array as one that can be averaged."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float)
