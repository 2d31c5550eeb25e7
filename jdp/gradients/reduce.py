"""Reduction: gradients, bucket by bucket, become their mean over the replicas."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import compat
from jdp.collectives import xla
from jdp.gradients import hook_reduction, weighted_mean
from jdp.gradients.reduce_options import ReduceOptions
from jdp.gradients.weighted_mean import GradientWeighting, Weighting
from jdp.hooks.base import Wire
from jdp.hooks.state import avals_of
from jdp.trees import bucket_names, buckets
from jdp.trees.buckets import BucketPlan, LeafSpec, Packing
from jdp.types import AllReduce, AxisName, PyTree


def choose_route(
    group: Sequence[jax.Array] | Sequence[LeafSpec], options: ReduceOptions
) -> tuple[AllReduce, Packing]:
    """Chooses how gradients of one dtype are summed together."""
    chosen = options.all_reduce
    if chosen.choose is not None:
        size = sum(x.size for x in group)
        buffer = jax.ShapeDtypeStruct((size,), group[0].dtype)
        chosen = chosen.choose(buffer, options.axis_name)
    if options.packing == "tuple" and chosen.reduce_group is None:
        chosen = xla.PLAIN
    is_plain = chosen is xla.PLAIN
    return chosen, options.packing or buckets.default_packing() if is_plain else "flat"


# With fewer, the meetings of the processes cost more than the cache saves: 12.7 MB take
# 14.7 ms in one bucket and 18.0 ms in four (`jdp bench step`, 2 processes).
_LEAST_BUCKETS = 8


def with_plan(
    options: ReduceOptions, grads: PyTree, order: Sequence[int] | None
) -> ReduceOptions:
    """Returns options with a plan for `grads`: their own, or one for their all-reduce.

    Args:
      options: how gradients are reduced.
      grads: the gradients.
      order: the order in which they become ready; None: of the leaves.
    """
    plan = options.plan
    if plan is None and options.hook is None:
        # Whatever is chosen for a large bucket of float32.
        num_elements = buckets.DEFAULT_BUCKET_BYTES // 4
        spec = LeafSpec((num_elements,), jnp.dtype(jnp.float32))
        size = choose_route([spec], options)[0].bucket_bytes
        total = sum(x.nbytes for x in jax.tree.leaves(grads))
        if size is not None and total >= _LEAST_BUCKETS * size:
            plan = buckets.plan_buckets(
                grads, bucket_bytes=size, first_bucket_bytes=size, order=order
            )
    return options._replace(plan=buckets.fit_plan(plan, grads, order))


class Means(NamedTuple):
    """Results of a reduction, the same on all replicas."""

    grads: PyTree
    riders: list[jax.Array]
    total: jax.Array | int  # weight of all replicas; their number without weighting.
    hook_state: PyTree = None


def mean_over_replicas(
    grads: PyTree,
    options: ReduceOptions,
    *,
    hook_state: PyTree = None,
    weighting: Weighting | None = None,
    is_weighed: bool = False,
    divisor: jax.Array | None = None,
    riders: Sequence[jax.Array] = (),
    done: Collection[int] = (),
) -> Means:
    """Averages gradients, and riders: small arrays that travel with them.

    Without a hook, each rider travels in the first bucket of its dtype. With a hook,
    riders are summed exactly, in a collective of their own before the buckets.

    Args:
      grads: see `jdp.sync_gradients`.
      options: the options; with a plan.
      hook_state: state of `options.hook`.
      weighting: weight of this replica; None: equal weights.
      is_weighed: whether the gradients were multiplied by the weight already; the
        gradients of a replica without data are zero here even where they hold NaN.
      divisor: divides the sum of weighted gradients; None: as `weighting` says.
      riders: averaged over the replicas with data, whatever divides the gradients.
      done: leaf indices of gradients that the backward pass has averaged.

    Raises:
      ValueError: `hook_state` does not fit these buckets, or there is no hook.
    """
    axis_name, plan = options.axis_name, options.plan
    assert plan is not None
    if options.hook is None and hook_state is not None:
        raise ValueError(
            "`hook_state` is given, but no `hook`. Pass the hook that it was made for."
        )
    compat.axis_size(axis_name)  # It raises, if the axis is not bound.
    leaves = check_are_local(grads, plan, done, axis_name)
    bucketed = buckets.remaining_buckets(plan, done)
    groups = [[leaves[i] for i in bucket] for bucket in bucketed]
    if not compat.is_alone(axis_name):
        weighing = GradientWeighting(weighting, is_weighed, divisor)
        averaged, found, total, hook_state = _average(
            bucketed, groups, riders, options, weighing, hook_state
        )
    elif weighting is not None:
        total = weighting.amount
        averaged = [[weighted_mean.of_one(total, x) for x in g] for g in groups]
        found = [weighted_mean.of_one(total, x) for x in riders]
    else:
        return Means(grads, list(riders), 1, hook_state)
    synced = list(leaves)  # keeps the leaves that are in no bucket.
    for bucket, group in zip(bucketed, averaged, strict=True):
        for i, x in zip(bucket, group, strict=True):
            synced[i] = x.astype(leaves[i].dtype)
    return Means(jax.tree.unflatten(plan.treedef, synced), found, total, hook_state)


def _average(
    bucketed: Sequence[tuple[int, ...]],
    groups: list[list[jax.Array]],
    riders: Sequence[jax.Array],
    options: ReduceOptions,
    weighing: GradientWeighting,
    hook_state: PyTree,
) -> tuple[list[list[jax.Array]], list[jax.Array], jax.Array | int, PyTree]:
    """Averages gradients, by bucket, and riders.

    Returns:
      Gradients and riders; the total weight; the next state of the hook.
    """
    axis_name, weighting = options.axis_name, weighing.weighting
    assert options.plan is not None
    names = bucket_names.scope_names(options.plan, bucketed)
    if options.hook is None:
        dtypes = [[x.dtype for x in group] for group in groups]
        if weighting is not None:
            weighting = weighted_mean.cast_amount(weighting, axis_name)
            groups = weighing._replace(weighting=weighting).weigh(groups)
        seats = _seat_riders(groups, riders, weighting, axis_name)
        sums, total = sum_groups(
            groups, options, weighting, by_total=weighing.divisor is None, names=names
        )
        divisor = total
        if weighting is not None:
            divisor = weighing.find_divisor(total, axis_name)
        # Riders come after the gradients: in a group, and in groups of their own.
        averaged = list(divide_sums(sums, divisor, dtypes))
        return averaged, _mean_riders(sums, seats, riders, total), total, hook_state
    found, total = mean_of_riders(riders, options, weighting)
    passed = hook_reduction.sum_buckets(
        options.hook,
        Wire(axis_name, options.all_reduce, names),
        avals_of(options.plan, bucketed),
        groups,
        hook_reduction.find_share(weighing, total, axis_name),
        hook_state,
    )
    sums = [GroupSum([buffer]) for buffer in passed.buffers]
    dtypes = [[buffer.dtype] for buffer in passed.buffers]
    means = divide_sums(sums, compat.axis_size(axis_name), dtypes)
    averaged, hook_state = hook_reduction.unpack_means(
        means, groups, passed, None if weighting is None else total
    )
    return averaged, found, total, hook_state


def mean_of_riders(
    riders: Sequence[jax.Array], options: ReduceOptions, weighting: Weighting | None
) -> tuple[list[jax.Array], jax.Array | int]:
    """Averages riders without gradients, in one collective per dtype.

    Returns:
      The riders and the total weight, as in `Means`.
    """
    groups: list[list[jax.Array]] = []
    if weighting is not None:
        weighting = weighted_mean.cast_amount(weighting, options.axis_name)
    seats = _seat_riders(groups, riders, weighting, options.axis_name)
    if weighting is not None:
        groups = weighted_mean.keep_digits(groups, weighting, options.axis_name)
    sums, total = sum_groups(groups, options._replace(packing="flat"), weighting)
    return _mean_riders(sums, seats, riders, total), total


def _seat_riders(
    groups: list[list[jax.Array]],
    riders: Sequence[jax.Array],
    weighting: Weighting | None,
    axis_name: AxisName,
) -> list[tuple[int, int]]:
    """Weighs riders; appends each to the first group of its dtype and its mesh axes.

    Returns:
      Per rider, the index of its group and its index there.
    """
    own = compat.cast_tree_varying(list(riders), axis_name)
    if weighting is not None:
        own = [weighted_mean.weigh(x, weighting) for x in own]
    kinds = [(x[0].dtype, compat.varying_axes(x[0])) for x in groups]
    seats = []
    for rider in own:
        kind = rider.dtype, compat.varying_axes(rider)
        if kind not in kinds:
            kinds.append(kind)
            groups.append([])
        group = groups[kinds.index(kind)]
        group.append(rider)
        seats.append((kinds.index(kind), len(group) - 1))
    return seats


class GroupSum(NamedTuple):
    """Arrays of one collective after the reduction."""

    arrays: list[jax.Array]
    is_mean: bool = False  # whether the all-reduce has divided them.


def sum_groups(
    groups: list[list[jax.Array]],
    options: ReduceOptions,
    weighting: Weighting | None,
    *,
    by_total: bool = True,
    names: Sequence[str] = (),
) -> tuple[list[GroupSum], jax.Array | int]:
    """Sums weighted arrays over the replicas, each group in one collective.

    Args:
      groups: the arrays; with a `weighting`, times the weight of this replica.
      options: how groups are sent.
      weighting: weight of this replica; None: equal weights.
      by_total: whether the total divides the sums, so that the all-reduce may do it.
      names: name scopes of the first groups, for profilers.

    Returns:
      The sums, and the total: weight of all replicas, their number without weighting.
    """
    num_replicas = compat.axis_size(options.axis_name)
    if not groups:
        return [], num_replicas
    if weighting is None:
        # The sum of float16 gradients overflows where their mean does not; torch's
        # DistributedDataParallel divides before it sums for that reason. The wider
        # types are divided once, after the sum, with one rounding instead of many.
        are_means = [group[0].dtype == jnp.float16 for group in groups]
        groups = [
            [x / num_replicas for x in group] if is_mean else group
            for group, is_mean in zip(groups, are_means, strict=True)
        ]

        def find_scale(reduced: list[GroupSum]) -> float | None:
            return None if are_means[len(reduced)] else 1.0 / num_replicas

        sums = _reduce(groups, names, options, None, find_scale)
        pairs = zip(sums, are_means, strict=True)
        sums = [x._replace(is_mean=x.is_mean or is_mean) for x, is_mean in pairs]
        return sums, num_replicas
    groups, seat = weighted_mean.add_total(groups, weighting, options.axis_name)

    def find_inverse(reduced: list[GroupSum]) -> jax.typing.ArrayLike | None:
        is_wide = jnp.finfo(groups[len(reduced)][0].dtype).bits == 64
        is_late = len(reduced) <= seat or is_wide  # The factor is float32.
        if is_late or not by_total or weighting.divide_by == "world":
            return None
        return weighted_mean.invert(weighted_mean.decode(reduced[seat].arrays[-1]))

    has_data = weighted_mean.has_data(weighting.amount)
    sums = _reduce(groups, names, options, has_data, find_inverse)
    return sums, weighted_mean.decode(sums[seat].arrays.pop())


def divide_sums(
    sums: Sequence[GroupSum], divisor: jax.Array | int, dtypes: Sequence[Sequence[Any]]
) -> Iterator[list[jax.Array]]:
    """Yields the means of each group, in `dtypes`, and leaves out further arrays."""
    for group, kinds in zip(sums, dtypes, strict=False):
        arrays = zip(group.arrays, kinds, strict=False)
        if group.is_mean:
            yield [x.astype(dtype) for x, dtype in arrays]
        elif isinstance(divisor, int):
            yield [(x / divisor).astype(dtype) for x, dtype in arrays]
        else:
            yield [weighted_mean.divide(x, divisor, dtype) for x, dtype in arrays]


def _mean_riders(
    sums: Sequence[GroupSum],
    seats: Sequence[tuple[int, int]],
    riders: Sequence[jax.Array],
    total: jax.Array | int,
) -> list[jax.Array]:
    own = [GroupSum([sums[g].arrays[k]], sums[g].is_mean) for g, k in seats]
    return [x for (x,) in divide_sums(own, total, [[x.dtype] for x in riders])]


def check_are_local(
    grads: PyTree, plan: BucketPlan, done: Collection[int], axis_name: AxisName
) -> list:
    """Returns the leaves of `grads`, which must be gradients of this replica alone.

    Raises:
      ValueError: they do not fit the plan, or were summed over the axis already.
      TypeError: one is not floating or complex.
    """
    leaves = buckets.check_fits(plan, grads)
    for i, spec in enumerate(plan.leaves):
        if spec.dtype == jax.dtypes.float0 or jnp.issubdtype(spec.dtype, jnp.inexact):
            continue
        raise TypeError(
            f"The gradient `{plan.leaf_paths()[i]}` is {spec}; only floating and "
            "complex gradients can be averaged. Keep integers out of the parameters, "
            "or use `jax.grad(..., allow_int=True)`, whose float0 leaves pass through."
        )
    tracked = compat.tracked_axes(axis_name)
    for i in (i for bucket in buckets.remaining_buckets(plan, done) for i in bucket):
        if tracked <= compat.varying_axes(leaves[i]):
            continue
        raise ValueError(
            f"The gradient `{plan.leaf_paths()[i]}` is already the same on all "
            f"replicas of {axis_name!r}, so it was summed or averaged before. "
            "`jax.grad` of replicated parameters does that, leaf by leaf; take "
            "gradients with `jdp.local_gradients`, and do not synchronise what "
            "`jdp.value_and_grad` has synchronised."
        )
    return leaves


def _reduce(
    groups: list[list[jax.Array]],
    names: Sequence[str],
    options: ReduceOptions,
    has_data: jax.Array | None,
    find_scale: Callable[[list[GroupSum]], jax.typing.ArrayLike | None],
) -> list[GroupSum]:
    """Sums over the replicas; the arrays of a replica without data do not count.

    `find_scale` returns the factor that divides the sums of a group, given the sums of
    the groups before it.
    """
    names = [*names, *[bucket_names.VALUES] * (len(groups) - len(names))]
    routes = [choose_route(group, options) for group in groups]
    if all(packing == "tuple" for _, packing in routes):
        return _reduce_unpacked(groups, names, options, has_data)
    reduced: list[GroupSum] = []
    for group, name, (all_reduce, packing) in zip(groups, names, routes, strict=True):
        if packing == "tuple":
            reduced += _reduce_unpacked([group], [name], options, has_data)
            continue
        scale = find_scale(reduced) if all_reduce.takes_scale else None
        with jax.named_scope(name):
            reduced.append(_reduce_group(group, all_reduce, options, has_data, scale))
    return reduced


def _reduce_unpacked(
    groups: list[list[jax.Array]],
    names: Sequence[str],
    options: ReduceOptions,
    has_data: jax.Array | None,
) -> list[GroupSum]:
    if has_data is not None:
        groups = [[weighted_mean.zero_unless(has_data, x) for x in g] for g in groups]
    return [GroupSum(g) for g in xla.psum_in_order(groups, options.axis_name, names)]


def _reduce_group(
    group: list[jax.Array],
    all_reduce: AllReduce,
    options: ReduceOptions,
    has_data: jax.Array | None,
    scale: jax.typing.ArrayLike | None,
) -> GroupSum:
    axis_name = options.axis_name
    if all_reduce.reduce_group is not None:
        return GroupSum(all_reduce.reduce_group(group, axis_name, has_data=has_data))
    if has_data is None:
        buffer = buckets.pack(group)
    else:
        buffer = weighted_mean.pack_unless_empty(has_data, group)
    if scale is None:
        buffer = all_reduce.reduce(buffer, axis_name)
    else:
        buffer = all_reduce.reduce(buffer, axis_name, scale=scale)
    arrays = buckets.unpack(buffer, [x.shape for x in group])
    return GroupSum(arrays, is_mean=scale is not None)
