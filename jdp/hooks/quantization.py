"""Quantization: buckets that travel as 8-bit integers, with one scale per chunk."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jdp import types
from jdp.collectives import base
from jdp.hooks.base import (
    CommHook,
    HookAllReduce,
    is_real,
    map_buckets,
    sum_rows,
)
from jdp.trees.buckets import BucketAval

_LARGEST = 127
_PEAK_BYTES = 4  # float32.


def int8(*, chunk_size: int = 256) -> CommHook[tuple[()]]:
    """Returns the hook that sends 8 bits per element, a quarter of float32.

    Each chunk of a bucket is rounded to multiples of its own scale, max |x| / 127, at
    any magnitude that is a normal number of float32. Replica i receives part i of every
    bucket in this form, sums it in float32, and sends the sum to all replicas in the
    same form. The error of an element of the sum is at most half the scale of its chunk
    per replica, plus half the scale of the sum. There is no error feedback.

    A chunk that holds a NaN or an infinity arrives as NaN in all its elements.

    Args:
      chunk_size: most elements per chunk; its maximum travels with it, in 4 bytes.

    Returns:
      The hook; it has no state. Buckets that are not real floats travel unchanged.

    Raises:
      TypeError: `chunk_size` is not an integer.
      ValueError: `chunk_size` is less than 1.
    """
    chunk_size = types.as_count(chunk_size, "chunk_size", least=1)

    def send(x: jax.Array, all_reduce: HookAllReduce) -> jax.Array:
        if not is_real(x.dtype) or x.size == 0:
            return all_reduce(x)
        num_replicas = all_reduce.num_replicas
        # Chunks of equal width, with little padding.
        part_size = -(-x.size // num_replicas)
        width = -(-part_size // -(-part_size // chunk_size))
        rows = base.pad(x, num_replicas * width).astype(jnp.float32)
        rows = rows.reshape(num_replicas, -1)
        received = _decode(all_reduce.exchange(_encode(rows, width)), width)
        part = sum_rows(received)
        whole = _decode(all_reduce.gather(_encode(part[None], width)[0]), width)
        return whole.reshape(-1)[: x.size].astype(x.dtype)

    def init(avals: Sequence[BucketAval]) -> tuple[()]:
        del avals
        return ()

    def apply(
        buckets: list[jax.Array], state: tuple[()], all_reduce: HookAllReduce
    ) -> tuple[list[jax.Array], tuple[()]]:
        return map_buckets(lambda x: send(x, all_reduce), all_reduce, buckets), state

    return CommHook(init, apply, "int8", False, is_elementwise=False)


def _encode(rows: jax.Array, width: int) -> jax.Array:
    """Packs rows, float32 (r, m), with their peaks into int8 (r, m + 4 m / width).

    A scale, peak / 127, can be subnormal where the peak is not, and devices flush
    subnormals to zero. So the peak is sent, and the scale is never computed.
    """
    chunks = rows.reshape(rows.shape[0], -1, width)
    peaks = jnp.abs(chunks).max(-1)
    is_finite = jnp.isfinite(chunks).all(-1)
    peaks = jnp.where(is_finite, peaks, jnp.nan)
    # XLA may multiply by the inverse, which is flushed to zero if it is subnormal.
    step_down = jnp.where(peaks > 2.0**64, jnp.float32(2.0**-64), 1)
    divisor = jnp.where(peaks > 0, peaks * step_down, 1)
    shares = chunks * step_down[..., None] / divisor[..., None]
    steps = jnp.round(shares * _LARGEST)
    steps = jnp.where(is_finite[..., None], steps, 0).astype(jnp.int8)
    peak_bytes = lax.bitcast_convert_type(peaks, jnp.int8)
    return jnp.concatenate(
        [x.reshape(rows.shape[0], -1) for x in (steps, peak_bytes)], axis=1
    )


def _decode(packed: jax.Array, width: int) -> jax.Array:
    """Inverts `_encode`, up to rounding."""
    num_rows, size = packed.shape
    num_chunks = size // (width + _PEAK_BYTES)
    steps, peak_bytes = jnp.split(packed, [num_chunks * width], axis=1)
    peaks = lax.bitcast_convert_type(
        peak_bytes.reshape(num_rows, num_chunks, _PEAK_BYTES), jnp.float32
    )
    steps = steps.reshape(num_rows, num_chunks, width).astype(jnp.float32)
    # One mantissa bit less than float32, so that XLA keeps the operation. Otherwise it
    # would divide `peaks` instead, which could become subnormal.
    shares = lax.reduce_precision(steps / _LARGEST, exponent_bits=8, mantissa_bits=22)
    return (shares * peaks[..., None]).reshape(num_rows, -1)
