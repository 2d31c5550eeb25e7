"""Reduction: gradients, bucket by bucket, become their mean over the replicas."""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jdp import compat, types
from jdp.gradients import group_sums, hook_reduction, option_checks, weighted_mean
from jdp.gradients.group_sums import GroupSum, Wiring
from jdp.gradients.weighted_mean import Weighting
from jdp.hooks.base import CommHook, Wire
from jdp.hooks.state import avals_of
from jdp.trees import buckets
from jdp.trees.buckets import BucketPlan
from jdp.types import AllReduce, AllReduceOption, AxisName, PyTree

Packing = Literal["flat", "tuple"]


class ReduceOptions(NamedTuple):
    """How gradients are averaged; see `jdp.sync_gradients`."""

    axis_name: AxisName
    plan: BucketPlan | None = None
    packing: Packing | None = None
    all_reduce: AllReduce | None = None
    hook: CommHook | None = None


def make_options(
    axis_name: AxisName,
    plan: BucketPlan | None,
    packing: Packing | None,
    all_reduce: AllReduceOption,
    hook: CommHook | None = None,
) -> ReduceOptions:
    """Validates the public arguments and resolves them into `ReduceOptions`.

    Raises:
      ValueError: `all_reduce` is neither a function nor "auto", or does not sum;
        `packing` is unknown, or "tuple" with a hook.
      TypeError: `plan` is not a plan, or `hook` is not a hook.
    """
    if hook is not None or packing is not None:
        option_checks.check_hook(hook, packing)
    return ReduceOptions(
        axis_name,
        plan if plan is None else option_checks.check_plan(plan),
        packing,
        None if all_reduce is None else option_checks.find_all_reduce(all_reduce),
        hook,
    )


def choose_packing(packing: Packing | None, all_reduce: AllReduce | None) -> Packing:
    """Returns the packing in use; the default is "flat" on CPU or with `all_reduce`."""
    if all_reduce is not None:
        if packing == "tuple":
            raise ValueError(
                "`packing='tuple'` sends leaves as they are, but `all_reduce` takes "
                "flat buffers. Leave one of the two out."
            )
        return "flat"
    return packing or ("flat" if jax.default_backend() == "cpu" else "tuple")


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
      divisor: divides the sum of weighed gradients; None: as `weighting` says.
      riders: averaged over the replicas with data, whatever divides the gradients.
      done: leaf indices of gradients that the backward pass has averaged.

    Raises:
      ValueError: `hook_state` does not fit the hook and these buckets, or there is no
        hook.
    """
    axis_name, plan = options.axis_name, options.plan
    assert plan is not None
    if options.hook is None and hook_state is not None:
        raise ValueError(
            "`hook_state` is given, but no `hook`. Pass the hook that it was made for."
        )
    if options.hook is None:
        packing = choose_packing(options.packing, options.all_reduce)
        options = options._replace(packing=packing)
    compat.axis_size(axis_name)  # It raises, if the axis is not bound.
    leaves = check_are_local(grads, plan, done, axis_name)
    bucketed = buckets.remaining_buckets(plan, done)
    if is_alone(axis_name):
        return Means(*_alone(grads, bucketed, riders, weighting), hook_state)
    groups = [[leaves[i] for i in bucket] for bucket in bucketed]
    weighed = _Weighed(weighting, is_weighed, divisor)
    if options.hook is None:
        averaged, found, total = _average(groups, riders, options, weighed)
    else:
        found, total = mean_of_riders(riders, options, weighting)
        averaged, hook_state = _average_through_hook(
            bucketed, groups, options, weighed, total, hook_state
        )
    synced = list(leaves)  # keeps the leaves that are in no bucket.
    for bucket, group in zip(bucketed, averaged, strict=True):
        for i, x in zip(bucket, group, strict=True):
            synced[i] = x.astype(leaves[i].dtype)
    grads = jax.tree.unflatten(plan.treedef, synced)
    return Means(grads, found, total, hook_state)


def mean_of_riders(
    riders: Sequence[jax.Array], options: ReduceOptions, weighting: Weighting | None
) -> tuple[list[jax.Array], jax.Array | int]:
    """Averages riders without gradients, in one collective per dtype.

    Returns:
      The riders and the total weight, as in `Means`.
    """
    weighting = cast_amount(weighting, options.axis_name)
    groups: list[list[jax.Array]] = []
    own = weigh(cast_varying(list(riders), options.axis_name), weighting)
    seats = [_seat(groups, rider) for rider in own]
    if weighting is not None and not any(
        group_sums.holds_weights(x[0], weighting) for x in groups
    ):
        # The total travels alone.
        alone = jnp.zeros(0, weighting.amount.dtype)
        groups.append([cast_varying(alone, options.axis_name)])
    flat = options._replace(packing="flat")
    sums, total = group_sums.sum_groups(groups, _wiring(flat), weighting)
    return _divide_riders(sums, seats, riders, total), total


def _wiring(options: ReduceOptions) -> Wiring:
    return Wiring(options.axis_name, options.packing, options.all_reduce)


class _Weighed(NamedTuple):
    """How gradients count; see `mean_over_replicas`."""

    weighting: Weighting | None
    is_weighed: bool
    divisor: jax.Array | None


def _average(
    groups: list[list[jax.Array]],
    riders: Sequence[jax.Array],
    options: ReduceOptions,
    weighed: _Weighed,
) -> tuple[list[list[jax.Array]], list[jax.Array], jax.Array | int]:
    """Averages gradients, by bucket, and riders; also returns the total weight."""
    weighting, is_weighed, divisor = weighed
    weighting = cast_amount(weighting, options.axis_name)
    num_replicas = compat.axis_size(options.axis_name)
    kinds = [[x.dtype for x in group] for group in groups]
    if not is_weighed:
        groups = [weigh(group, weighting) for group in groups]
    elif divisor is not None:
        groups = [[weighted_mean.widen(x) for x in group] for group in groups]
    own = weigh(cast_varying(list(riders), options.axis_name), weighting)
    seats = [_seat(groups, rider) for rider in own]
    sums, total = group_sums.sum_groups(
        groups, _wiring(options), weighting, by_total=divisor is None
    )
    by = total if divisor is None else divisor
    if weighting is not None and weighting.divide_by == "world" and divisor is None:
        by = jnp.where(jnp.isnan(total), total, num_replicas)
    # Riders come after the gradients: within a group, and in groups of their own.
    averaged = [
        [
            group_sums.divide(x, found.is_mean, by, dtype)
            for x, dtype in zip(found.arrays, dtypes, strict=False)
        ]
        for found, dtypes in zip(sums, kinds, strict=False)
    ]
    return averaged, _divide_riders(sums, seats, riders, total), total


def _average_through_hook(
    bucketed: Sequence[tuple[int, ...]],
    groups: list[list[jax.Array]],
    options: ReduceOptions,
    weighed: _Weighed,
    total: jax.Array | int,
    hook_state: PyTree,
) -> tuple[list[list[jax.Array]], PyTree]:
    """Averages gradients, by bucket, through the hook; also returns the next state.

    The hook gets g n w / W, where w is this replica's weight and W the total. The plain
    mean of that is the weighted mean, and equal weights leave it at g.
    """
    weighting, is_weighed, divisor = weighed
    axis_name, plan, hook = options.axis_name, options.plan, options.hook
    num_replicas = compat.axis_size(axis_name)
    assert hook is not None and plan is not None
    avals = avals_of(plan, bucketed)
    share = hook_reduction.find_share(weighting, is_weighed, total, axis_name, divisor)
    sums, before, state = hook_reduction.sum_buckets(
        hook, Wire(axis_name, options.all_reduce), avals, groups, share, hook_state
    )
    averaged = []
    for buffer, group in zip(sums, groups, strict=True):
        mean = group_sums.divide(buffer, False, num_replicas, buffer.dtype)
        parts = buckets.unpack(mean, [x.shape for x in group])
        averaged.append([p.astype(x.dtype) for p, x in zip(parts, group, strict=True)])
    if weighting is not None:  # Without any data, nothing changes.
        has_data = weighted_mean.has_data(total)
        averaged = [
            [weighted_mean.zero_unless(has_data, x) for x in group]
            for group in averaged
        ]
        state = jax.tree.map(
            lambda old, new: jnp.where(has_data, new, old), before, state
        )
    return averaged, state


def _divide_riders(
    sums: Sequence[GroupSum],
    seats: Sequence[tuple[int, int]],
    riders: Sequence[jax.Array],
    total: jax.Array | int,
) -> list[jax.Array]:
    return [
        group_sums.divide(sums[g].arrays[k], sums[g].is_mean, total, rider.dtype)
        for (g, k), rider in zip(seats, riders, strict=True)
    ]


def _seat(groups: list[list[jax.Array]], rider: jax.Array) -> tuple[int, int]:
    """Appends `rider` to the first group of its dtype and its mesh axes."""
    for g, group in enumerate(groups):
        if group[0].dtype == rider.dtype and group_sums.vary_alike(group[0], rider):
            group.append(rider)
            return g, len(group) - 1
    groups.append([rider])
    return len(groups) - 1, 0


def _alone(
    grads: PyTree,
    bucketed: Sequence[tuple[int, ...]],
    riders: Sequence[jax.Array],
    weighting: Weighting | None,
) -> tuple[PyTree, list[jax.Array], jax.Array | int]:
    """Mean over a single replica: its own values, and zeros where it has no data."""
    if weighting is None:
        return grads, list(riders), 1
    leaves, treedef = jax.tree.flatten(grads)
    for i in (i for bucket in bucketed for i in bucket):
        leaves[i] = weighted_mean.of_one(weighting.amount, leaves[i])
    means = [weighted_mean.of_one(weighting.amount, x) for x in riders]
    return jax.tree.unflatten(treedef, leaves), means, weighting.amount


def weigh(arrays: Sequence[jax.Array], weighting: Weighting | None) -> list[jax.Array]:
    """Returns arrays times the weight of this replica."""
    if weighting is None:
        return list(arrays)
    return [weighted_mean.weigh(x, weighting) for x in arrays]


def cast_amount(weighting: Weighting | None, axis_name: AxisName) -> Weighting | None:
    """Casts the weight as `cast_varying` does."""
    if weighting is None:
        return None
    return weighting._replace(amount=cast_varying(weighting.amount, axis_name))


def is_alone(axis_name: AxisName) -> bool:
    """Whether there is one replica, and no type to be satisfied by a collective."""
    return compat.axis_size(axis_name) == 1 and not compat.tracked_axes(axis_name)


def cast_varying(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Casts leaves to what may differ between the replicas; no data moves."""
    tracked = compat.tracked_axes(axis_name)
    if not tracked:
        return tree
    names = tuple(n for n in types.as_axis_names(axis_name) if n in tracked)
    return jax.tree.map(lambda x: compat.cast_varying(x, names), tree)


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
