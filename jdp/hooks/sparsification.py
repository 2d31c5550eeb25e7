"""Sparsification: of each bucket the largest elements travel, the rest later."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jdp import types
from jdp.hooks.base import CommHook, ErrorFeedbackState, HookAllReduce, is_real
from jdp.replicas.per_replica import PerReplica
from jdp.trees.buckets import BucketAval


def top_k(fraction: float) -> CommHook:
    """Returns the hook that sends the elements of the largest magnitude.

    What a replica does not send it adds to its next gradient (error feedback), so that
    all is sent in the end: with d of n elements, what is left is at most
    (1 - d / n) of the squared norm (Stich et al., 2018). Each replica sends its own
    elements, with 4 bytes for the position of each: `fraction` of the bytes times the
    number of replicas, over those of a plain float32 all-reduce.

    A NaN counts as the largest of all, then an infinity. A replica sends at least one
    of those it has, and as many as its share allows; it does not keep the others.

    Args:
      fraction: of the elements of each bucket; at least one is sent.

    Returns:
      The hook; its state holds what was not sent, as much as the gradients. Buckets of
      other than real floats travel as they are.

    Raises:
      TypeError: `fraction` is no number.
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
                # No empty array: orbax saves none.
                [jnp.zeros(a.shape, a.dtype) if _is_cut(a) else None for a in avals]
            )
        )

    def send(
        x: jax.Array, residual: jax.Array | None, all_reduce: HookAllReduce
    ) -> tuple[jax.Array, jax.Array | None]:
        if not _is_cut(x):
            return all_reduce(x), residual
        assert residual is not None
        x = x + residual
        _, places = lax.top_k(jnp.abs(x), math.ceil(fraction * x.size))
        sent = x[places]
        values = all_reduce.gather(sent)
        places_of_all = all_reduce.gather(places)
        total = jnp.zeros_like(values, shape=x.shape)
        # One replica after the other: in a sum of all at once their order would be
        # left to the device, and replicas might round otherwise.
        for i in range(all_reduce.num_replicas):
            total = total.at[places_of_all[i]].add(
                values[i], unique_indices=True, mode="promise_in_bounds"
            )
        left = x.at[places].set(0, unique_indices=True, mode="promise_in_bounds")
        return total, jnp.where(jnp.isfinite(left), left, 0)

    def apply(
        buckets: list[jax.Array], state: ErrorFeedbackState, all_reduce: HookAllReduce
    ) -> tuple[list[jax.Array], ErrorFeedbackState]:
        pairs = [
            send(x, residual, all_reduce)
            for x, residual in zip(buckets, state.residuals.value, strict=True)
        ]
        residuals = PerReplica([residual for _, residual in pairs])
        return [total for total, _ in pairs], ErrorFeedbackState(residuals)

    return CommHook(init, apply, f"top_k({fraction:g})", only_sums=False)


def _is_cut(bucket: BucketAval | jax.Array) -> bool:
    return is_real(bucket.dtype) and bucket.size > 0
