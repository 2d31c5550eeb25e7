"""Group sums: groups of arrays, each summed over the replicas in one collective."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdp import compat
from jdp.compat import annotations
from jdp.gradients import weighted_mean
from jdp.gradients.weighted_mean import Weighting
from jdp.trees import buckets
from jdp.types import AllReduce, AxisName


class Wiring(NamedTuple):
    """How groups are sent; see `jdp.sync_gradients`."""

    axis_name: AxisName
    packing: str | None  # "tuple"; others are "flat".
    all_reduce: AllReduce | None


class GroupSum(NamedTuple):
    """Arrays of one collective after the reduction."""

    arrays: list[jax.Array]
    is_mean: bool = False  # whether the all-reduce has divided them.


def sum_groups(
    groups: list[list[jax.Array]],
    wire: Wiring,
    weighting: Weighting | None,
    *,
    by_total: bool = True,
) -> tuple[list[GroupSum], jax.Array | int]:
    """Sums weighed arrays over the replicas, each group in one collective.

    Args:
      groups: the arrays; with a `weighting`, times the weight of this replica.
      wire: how groups are sent.
      weighting: weight of this replica; None: equal weights.
      by_total: whether the total divides the sums, so that the all-reduce may do it.

    Returns:
      The sums, and the total: weight of all replicas, their number without weighting.
    """
    num_replicas = compat.axis_size(wire.axis_name)
    if not groups:
        return [], num_replicas
    if weighting is None:
        are_means = [_is_divided_before(group[0]) for group in groups]
        groups = [[_before(x, num_replicas) for x in group] for group in groups]

        def find_scale(group: list[jax.Array], _: list[GroupSum]) -> float | None:
            return None if _is_divided_before(group[0]) else 1.0 / num_replicas

        sums = _reduce(groups, wire, None, find_scale)
        pairs = zip(sums, are_means, strict=True)
        sums = [x._replace(is_mean=x.is_mean or is_mean) for x, is_mean in pairs]
        return sums, num_replicas
    # The total travels in the first group that it fits in, or in a group of its own.
    fitting = [g for g, x in enumerate(groups) if vary_alike(x[0], weighting.amount)]
    fitting.sort(key=lambda g: not holds_weights(groups[g][0], weighting))
    seat = fitting[0] if fitting else len(groups)
    groups = [*groups] if fitting else [*groups, []]
    dtype = groups[seat][0].dtype if fitting else jnp.float32
    encoded = weighted_mean.encode(weighting.amount, dtype, wire.axis_name)
    groups[seat] = [*groups[seat], encoded]

    def find_inverse(
        _: list[jax.Array], reduced: list[GroupSum]
    ) -> jax.typing.ArrayLike | None:
        if len(reduced) <= seat or not by_total or weighting.divide_by == "world":
            return None
        total = weighted_mean.decode(reduced[seat].arrays[-1])
        return weighted_mean.divide(jnp.ones(()), total, jnp.float32)

    has_data = weighted_mean.has_data(weighting.amount)
    sums = _reduce(groups, wire, has_data, find_inverse)
    total = weighted_mean.decode(sums[seat].arrays.pop())
    return sums if fitting else sums[:seat], total


def divide(
    x: jax.Array, is_mean: bool, divisor: jax.Array | int, dtype: Any
) -> jax.Array:
    """Returns a mean in `dtype`, from a sum or from a mean."""
    if is_mean:
        return x.astype(dtype)
    if isinstance(divisor, int):
        return (x / divisor).astype(dtype)
    return weighted_mean.divide(x, divisor, dtype)


def holds_weights(x: jax.Array, weighting: Weighting) -> bool:
    """Whether a sum in the dtype of `x` keeps all digits of the weights."""
    return jnp.finfo(x.dtype).bits == 64 or weighting.amount.dtype != jnp.float64


def vary_alike(a: jax.Array, b: jax.Array) -> bool:
    """Whether two arrays may differ over the same mesh axes.

    If they are packed together, JAX takes both to differ where one may.
    """
    return compat.varying_axes(a) == compat.varying_axes(b)


# Returns the factor that divides the sums of a group, given the sums before it.
_FindScale = Callable[[list[jax.Array], list[GroupSum]], jax.typing.ArrayLike | None]


def _reduce(
    groups: list[list[jax.Array]],
    wire: Wiring,
    has_data: jax.Array | None,
    find_scale: _FindScale,
) -> list[GroupSum]:
    """Sums over the replicas; the arrays of a replica without data do not count."""
    if wire.packing == "tuple":
        if has_data is not None:
            groups = [
                [weighted_mean.zero_unless(has_data, x) for x in g] for g in groups
            ]
        return [GroupSum(g) for g in _reduce_tuples(groups, wire.axis_name)]
    reduced: list[GroupSum] = []
    for group in groups:
        all_reduce = _choose_all_reduce(group, wire)
        scale = find_scale(group, reduced) if all_reduce.takes_scale else None
        reduced.append(_reduce_group(group, all_reduce, wire, has_data, scale))
    return reduced


def _choose_all_reduce(group: list[jax.Array], wire: Wiring) -> AllReduce:
    all_reduce = wire.all_reduce or _PSUM
    if all_reduce.choose is None:
        return all_reduce
    buffer = jax.ShapeDtypeStruct((sum(x.size for x in group),), group[0].dtype)
    return all_reduce.choose(buffer, wire.axis_name)


_PSUM = AllReduce(lax.psum, name="psum")


def _reduce_group(
    group: list[jax.Array],
    all_reduce: AllReduce,
    wire: Wiring,
    has_data: jax.Array | None,
    scale: jax.typing.ArrayLike | None,
) -> GroupSum:
    axis_name = wire.axis_name
    if all_reduce.reduce_group is not None:
        return GroupSum(all_reduce.reduce_group(group, axis_name, has_data=has_data))
    buffer = _pack(group, has_data)
    if scale is None:
        buffer = all_reduce.reduce(buffer, axis_name)
    else:
        buffer = all_reduce.reduce(buffer, axis_name, scale=scale)
    arrays = buckets.unpack(buffer, [x.shape for x in group])
    return GroupSum(arrays, is_mean=scale is not None)


def _pack(group: list[jax.Array], has_data: jax.Array | None) -> jax.Array:
    if has_data is None:
        return buckets.pack(group)
    if jax.default_backend() != "cpu":
        return weighted_mean.zero_unless(has_data, buckets.pack(group))
    # XLA on CPU copies into a bucket what is there; to select, it would go through all
    # gradients once more: 6 ms of a step of 24 ms (12.7 MB of gradients, 2 processes).
    return lax.cond(
        has_data, buckets.pack, lambda xs: jnp.zeros_like(buckets.pack(xs)), group
    )


def _reduce_tuples(
    groups: list[list[jax.Array]], axis_name: AxisName
) -> list[list[jax.Array]]:
    """Sums leaf by leaf, side by side within a bucket and one bucket after another.

    XLA combines all-reduces that do not depend on each other, so a bucket becomes one
    all-reduce with as many operands, and the dependence keeps buckets apart; on CPU
    only if the pass "cse_barrier_expander" does not remove it first.
    """
    reduced: list[list[jax.Array]] = []
    for group in groups:
        if reduced:
            group, reduced[-1] = annotations.order_after(group, reduced[-1])
        reduced.append([lax.psum(x, axis_name) for x in group])
    return reduced


def _before(x: jax.Array, num_replicas: int) -> jax.Array:
    return x / num_replicas if _is_divided_before(x) else x


def _is_divided_before(x: jax.Array) -> bool:
    # The sum of float16 gradients overflows where their mean does not; torch's
    # DistributedDataParallel divides before it sums for that reason. The wider types
    # are divided once, after the sum, with one rounding instead of many.
    return x.dtype == jnp.float16
