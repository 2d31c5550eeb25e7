"""Casting: buckets that travel unchanged, or in a narrower dtype."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdp import types
from jdp.hooks.base import CommHook, HookAllReduce, is_real, map_buckets
from jdp.trees.buckets import BucketAval


def none() -> CommHook[tuple[()]]:
    """Returns the hook that changes nothing: buckets are summed exactly."""

    def apply(
        buckets: list[jax.Array], state: tuple[()], all_reduce: HookAllReduce
    ) -> tuple[list[jax.Array], tuple[()]]:
        return map_buckets(all_reduce, all_reduce, buckets), state

    return CommHook(_no_state, apply, "none")


def cast(dtype: jax.typing.DTypeLike) -> CommHook[tuple[()]]:
    """Returns the hook that sends wider floats in a narrower dtype.

    Each replica's gradient is rounded to `dtype` once, and so is the sum, which is
    computed in float32. With the unit roundoff u of the dtype (2^-9 for bfloat16, 2^-11
    for float16) the error of a sum of g_i is at most u * (sum |g_i| + |sum g_i|) to
    first order. float16 is divided by the number of replicas before it is sent, as in
    torch's `fp16_compress_hook`, so the sum overflows only where the mean would. Values
    beyond its range, 65504, arrive as infinity.

    Args:
      dtype: a floating dtype, such as `jnp.bfloat16`. Buckets that are not real floats,
        or not of a wider dtype, travel unchanged.

    Returns:
      The hook; it has no state.

    Raises:
      TypeError: `dtype` is not a floating dtype.
    """
    narrow = types.as_floating(dtype, "dtype")

    def send(x: jax.Array, all_reduce: HookAllReduce) -> jax.Array:
        if not is_real(x.dtype) or x.dtype.itemsize <= narrow.itemsize:
            return all_reduce(x)
        divisor = all_reduce.num_replicas if narrow == jnp.float16 else 1
        return all_reduce((x / divisor).astype(narrow)).astype(x.dtype) * divisor

    def apply(
        buckets: list[jax.Array], state: tuple[()], all_reduce: HookAllReduce
    ) -> tuple[list[jax.Array], tuple[()]]:
        return map_buckets(lambda x: send(x, all_reduce), all_reduce, buckets), state

    return CommHook(_no_state, apply, f"cast({narrow})")


def _no_state(avals: Sequence[BucketAval]) -> tuple[()]:
    del avals
    return ()
