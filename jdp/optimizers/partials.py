"""Partials: parts of a reduction, one per replica."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp.collectives import base
from jdp.gradients import weighted_mean
from jdp.types import AxisName

Op = Literal["sum", "max", "min"]


class Partial(NamedTuple):
    """A part of a reduction, to be combined with the parts of the other replicas."""

    data: jax.Array
    op: Op


def reduce_elements(data: jax.Array, op: Op, shape: Sequence[int]) -> Partial:
    """Reduces all elements that this replica has.

    Args:
      data: any shape, also without elements; where it is padded, with `neutral`.
      op: the reduction.
      shape: shape of the result, which has one element.

    Returns:
      The part of this replica. A NaN element makes a maximum or a minimum NaN.
    """
    if op == "sum":
        return Partial(data.sum(dtype=data.dtype).reshape(shape), op)
    fill = neutral(data.dtype, op)
    found = (data.max if op == "max" else data.min)(initial=fill)
    return Partial(found.reshape(shape), op)


def has_parts(dtype: Any, op: Op) -> bool:
    """Whether the parts of the replicas determine the reduction."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return op == "sum"
    # Not for floats of 8 bits: parts of a sum lose all digits, and some dtypes have no
    # infinity for a maximum to start with.
    return not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits >= 16


def neutral(dtype: Any, op: Op) -> Any:
    """Returns the value that changes no reduction."""
    if op == "sum":
        return 0
    if dtype == jnp.bool_:
        return op == "min"
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return np.asarray(info.min if op == "max" else info.max, dtype)
    return -jnp.inf if op == "max" else jnp.inf


def combine(partials: Sequence[Partial], axis_name: AxisName) -> list[jax.Array]:
    """Combines the parts of all replicas: one collective per operation and dtype.

    A maximum of floats is taken over integers in the same order: backends differ in
    what an all-reduce of floats does with NaN. Here NaN stays NaN, as in the reduction
    of a whole array.

    Returns:
      One reduction per partial, the same on all replicas.
    """
    groups: dict[Any, list[int]] = {}
    sent = [_encode(x.data, x.op) for x in partials]
    for i, (x, data) in enumerate(zip(partials, sent, strict=True)):
        groups.setdefault((x.op, data.dtype), []).append(i)
    found: list[Any] = [None] * len(sent)
    for (op, _), members in groups.items():
        stacked = jnp.concatenate([sent[i].reshape(-1) for i in members])
        stacked = base.cast_varying(stacked, axis_name)
        total = _REDUCTIONS[op](stacked, axis_name)
        start = 0
        for i in members:
            shape = partials[i].data.shape
            part = total[start : start + math.prod(shape)].reshape(shape)
            found[i] = _decode(part, partials[i])
            start += math.prod(shape)
    return found


_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "sum": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
}


def _encode(x: jax.Array, op: Op) -> jax.Array:
    if op == "sum":
        return x
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(weighted_mean.wide_dtype(x.dtype))
        kind = _integer_like(x.dtype)
        bits = lax.bitcast_convert_type(x, kind)
        # The magnitude of negative numbers is reversed.
        keys = jnp.where(bits < 0, bits ^ jnp.iinfo(kind).max, bits)
        limits = jnp.iinfo(kind)
        return jnp.where(jnp.isnan(x), limits.max if op == "max" else limits.min, keys)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.int32)
    if jnp.iinfo(x.dtype).bits < 32:
        is_signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
        return x.astype(jnp.int32 if is_signed else jnp.uint32)
    return x


def _decode(x: jax.Array, partial: Partial) -> jax.Array:
    dtype = partial.data.dtype
    if partial.op != "sum" and jnp.issubdtype(dtype, jnp.floating):
        wide = weighted_mean.wide_dtype(dtype)
        bits = jnp.where(x < 0, x ^ jnp.iinfo(x.dtype).max, x)
        x = lax.bitcast_convert_type(bits, wide)
    return x.astype(dtype)


def _integer_like(dtype: Any) -> Any:
    return jnp.int32 if jnp.dtype(dtype).itemsize == 4 else jnp.int64
