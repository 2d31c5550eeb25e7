"""Sparsification: buckets of which the largest elements travel, the rest later."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jdp import types
from jdp.hooks import selection
from jdp.hooks.base import (
    CommHook,
    ErrorFeedbackState,
    HookAllReduce,
    is_real,
    map_buckets,
)
from jdp.replicas.per_replica import PerReplica
from jdp.trees.buckets import BucketAval

# Share of the places that a replica fills at least. The first threshold aims at 0.89:
# five standard deviations from 1 of the number of elements above the quantile of a
# sample that has 2000 of them, and three if it has 700.
_LEAST = 0.75


def top_k(fraction: float) -> CommHook[ErrorFeedbackState]:
    """Returns the hook that sends the elements of the largest magnitude.

    A replica has `fraction` of n places for elements of a bucket, rounded up, and fills
    at least 3/4 of them, rounded up. No element that it keeps is larger than an element
    that it sends. Between equal elements the position decides. The number of elements
    is not exact because a threshold is faster than a sort; buckets of at most 16,384
    elements are sorted, and fill all places.

    The replica adds the elements that it does not send to its next gradient (error
    feedback), so everything is sent eventually. If d of n elements are sent, the rest
    has at most (1 - d / n) of the squared norm (Stich et al., 2018). If gradients are
    zeros from some step on, all is sent after at most n / d more steps. Each replica
    sends a 4-byte position with each element, also for empty places, which is
    `fraction` times the number of replicas, relative to the bytes of a float32
    all-reduce.

    NaN counts as larger than infinity, and infinity as larger than any number. A
    replica sends as many such elements as above, at least one, and drops the others.

    Args:
      fraction: share of the elements of each bucket; there is at least one place.

    Returns:
      The hook; its state holds the elements that were not sent and is as large as the
      gradients. Buckets that are not real floats travel unchanged.

    Raises:
      TypeError: `fraction` is not a number.
      ValueError: `fraction` is not above 0 and at most 1.
    """
    types.check_number(fraction, "fraction")
    if not 0 < fraction <= 1:
        raise ValueError(
            f"`fraction` must be above 0 and at most 1, got {fraction}: with none of "
            "the elements nothing would be sent at all."
        )

    def init(avals: Sequence[BucketAval]) -> ErrorFeedbackState:
        return ErrorFeedbackState(
            PerReplica(
                # None in place of an empty array, which orbax does not save.
                [jnp.zeros(a.shape, a.dtype) if _is_cut(a) else None for a in avals]
            )
        )

    def apply(
        buckets: list[jax.Array], state: ErrorFeedbackState, all_reduce: HookAllReduce
    ) -> tuple[list[jax.Array], ErrorFeedbackState]:
        pairs = map_buckets(
            lambda x, residual: _send(x, residual, fraction, all_reduce),
            all_reduce,
            buckets,
            state.residuals.value,
        )
        residuals = PerReplica([residual for _, residual in pairs])
        return [total for total, _ in pairs], ErrorFeedbackState(residuals)

    return CommHook(init, apply, f"top_k({fraction:g})", False, is_elementwise=False)


def _send(
    x: jax.Array,
    residual: jax.Array | None,
    fraction: float,
    all_reduce: HookAllReduce,
) -> tuple[jax.Array, jax.Array | None]:
    """Sums one bucket; returns the sum and the elements that were not sent."""
    if not _is_cut(x):
        return all_reduce(x), residual
    assert residual is not None
    x = x + residual
    most = math.ceil(fraction * x.size)
    places = selection.find_largest(x, least=math.ceil(_LEAST * most), most=most)
    sent = x.at[places].get(mode="fill", fill_value=0, unique_indices=True)
    values_of_all = all_reduce.gather(sent)
    places_of_all = all_reduce.gather(places)
    # A zero that depends on the gather: otherwise XLA makes the zeros before the
    # backward pass, and holds them during it.
    zero = jnp.minimum(places_of_all[0, 0], 0).astype(x.dtype)
    total = jnp.full_like(values_of_all, zero, shape=x.shape)
    # In rank order: in one sum over all replicas the device would choose the order,
    # and replicas could round differently.
    for values, at in zip(values_of_all, places_of_all, strict=True):
        total = total.at[at].add(values, unique_indices=True, mode="drop")
    # A difference depends on `sent`, so that it can take the place of `x`.
    left = x.at[places].add(-sent, unique_indices=True, mode="drop")
    # Only a replica that sends elements that are not finite has more of them. The
    # loop has one turn or none: unlike a branch, it copies nothing.
    is_finite = jnp.isfinite(sent).all()
    left = lax.fori_loop(0, jnp.where(is_finite, 0, 1), _drop_infinite, left)
    return total, left


def _is_cut(bucket: BucketAval | jax.Array) -> bool:
    return is_real(bucket.dtype) and bucket.size > 0


def _drop_infinite(_: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)
