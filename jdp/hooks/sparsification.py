"""Sparsification: buckets of which the largest elements travel, the rest later."""

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

    A replica adds the elements that it does not send to its next gradient (error
    feedback), so everything is sent eventually. If d of n elements are sent, the rest
    has at most (1 - d / n) of the squared norm (Stich et al., 2018). Each replica sends
    its own elements with a 4-byte position each, which is `fraction` times the number
    of replicas, relative to the bytes of a float32 all-reduce.

    NaN counts as larger than infinity, and infinity as larger than any number. A
    replica sends as many such elements as its share allows, at least one, and drops the
    others.

    Args:
      fraction: share of the elements of each bucket; at least one element is sent.

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
        # In rank order: in one sum over all replicas the device would choose the order,
        # and replicas could round differently.
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
