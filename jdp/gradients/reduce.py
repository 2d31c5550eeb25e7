"""Reduction: buckets of gradients become their mean over the replicas."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdp import compat
from jdp.compat import annotations
from jdp.gradients import option_checks, weighted_mean
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.hooks.base import CommHook
from jdp.replicas import mesh
from jdp.trees import buckets
from jdp.trees.buckets import BucketPlan
from jdp.types import AllReduce, AllReduceOption, AxisName, PyTree

Packing = Literal["flat", "tuple"]


class Options(NamedTuple):
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
) -> Options:
    """Validates the public arguments and resolves them into `Options`.

    Raises:
      ValueError: `all_reduce` is no function and not "auto", or does not sum;
        `packing` is unknown, or "tuple" with a hook.
      TypeError: `plan` is no plan, or `hook` no hook.
    """
    return Options(
        axis_name,
        option_checks.check_plan(plan),
        packing,
        option_checks.find_all_reduce(all_reduce),
        option_checks.check_hook(hook, packing),
    )


def average(
    tree: PyTree,
    *,
    weight: jax.typing.ArrayLike | None = None,
    divide_by: DivideBy = "weight",
    axis_name: AxisName = "data",
) -> PyTree:
    """Averages small values, such as metrics, over the replicas in one collective.

    As with `lax.pmean`, `jax.grad` of an average is the gradient of one replica; for a
    loss that is differentiated by others than jdp there is `jdp.mean_loss`.

    Integers and booleans are averaged in JAX's default float, which is float32, and
    float64 with `jax_enable_x64`. Under a `shard_map` whose types track what varies, a
    leaf that is the same on all replicas is returned as it is.

    Args:
      tree: pytree of arrays or numbers.
      weight: see `sync_gradients`. Values of a replica without data do not count,
        whatever they are; the average of no data is zero, with a weight of NaN or below
        zero it is NaN. A negative constant is refused.
      divide_by: "weight" averages by weight; with "active" and "world" each replica
        with data counts the same.
      axis_name: the axis, or axes, over which replicas lie.

    Returns:
      A pytree of the same shapes, the same on all replicas; what was averaged is
      floating or complex.
    """
    weighting = weighted_mean.resolve(weight, divide_by)
    return average_weighted(tree, axis_name, lambda: weighting)


def average_weighted(
    tree: PyTree, axis_name: AxisName, find_weighting: Callable[[], Weighting | None]
) -> PyTree:
    """`average`; asks for the weighting if there is something to average."""
    num_replicas = mesh.axis_size(axis_name)
    tracked = mesh.tracked_axes(axis_name)
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(x) for x in leaves]
    local = [
        i
        for i, x in enumerate(leaves)
        if not tracked or tracked & compat.varying_axes(x)
    ]
    if not local:
        return jax.tree.unflatten(treedef, leaves)
    weighting = find_weighting()
    groups: dict[Any, list[int]] = {}
    for i in local:
        leaves[i] = weighted_mean.as_inexact(leaves[i])
        kind = leaves[i].dtype, compat.varying_axes(leaves[i]) - tracked
        groups.setdefault(kind, []).append(i)
    parts = [
        [cast_varying(leaves[i], axis_name) for i in group] for group in groups.values()
    ]
    options = Options(axis_name, packing="flat")
    weighting = _cast_varying_amount(weighting, axis_name)
    parts = [_weigh(group, weighting) for group in parts]
    sums, total = _sum_groups(parts, num_replicas, options, weighting)
    for members, group in zip(groups.values(), sums, strict=True):
        for i, x in zip(members, group.arrays, strict=True):
            leaves[i] = _divide(x, group.is_mean, total, leaves[i].dtype)
    return jax.tree.unflatten(treedef, leaves)


def mean_over_replicas(
    grads: PyTree,
    options: Options,
    *,
    weighting: Weighting | None = None,
    is_weighed: bool = False,
    divisor: jax.Array | None = None,
    riders: Sequence[jax.Array] = (),
    done: Collection[int] = (),
) -> tuple[PyTree, list[jax.Array], jax.Array | int]:
    """Averages gradients, and what rides with them.

    Args:
      grads: see `jdp.sync_gradients`.
      options: how; its plan must not be None.
      weighting: how much each replica counts; None: all the same.
      is_weighed: whether the gradients are times that already; NaN times zero is
        still a zero here.
      divisor: what divides the sum of weighed gradients; None: as `weighting` says.
      riders: further arrays; each travels in the first bucket of its dtype. They are
        averaged over the replicas with data, whatever divides the gradients.
      done: leaf indices of gradients that were averaged before, in the backward pass.

    Returns:
      The averaged gradients, the averaged riders, and how much all replicas count
      together: an array, float32 (), or their number where there is no weighting.
    """
    axis_name, plan = options.axis_name, options.plan
    packing = choose_packing(options.packing, options.all_reduce)
    options = options._replace(packing=packing)
    num_replicas = mesh.axis_size(axis_name)
    assert plan is not None
    leaves = check_are_local(grads, plan, done, axis_name)
    bucketed = remaining_buckets(plan, done)
    if is_alone(axis_name):
        return _alone(grads, bucketed, riders, weighting)
    weighting = _cast_varying_amount(weighting, axis_name)
    groups = [[leaves[i] for i in bucket] for bucket in bucketed]
    if not is_weighed:
        groups = [_weigh(group, weighting) for group in groups]
    elif divisor is not None:
        groups = [[weighted_mean.widen(x) for x in group] for group in groups]
    own = _weigh(cast_varying(list(riders), axis_name), weighting)
    seats = [_seat(groups, rider) for rider in own]
    sums, total = _sum_groups(groups, num_replicas, options, weighting, divisor is None)
    by = total if divisor is None else divisor
    if weighting is not None and weighting.divide_by == "world" and divisor is None:
        by = jnp.where(jnp.isnan(total), total, num_replicas)
    synced = list(leaves)  # keeps the leaves that are in no bucket.
    # What rides comes after the gradients: in groups of its own, and within a group.
    for bucket, group in zip(bucketed, sums[: len(bucketed)], strict=True):
        for i, x in zip(bucket, group.arrays[: len(bucket)], strict=True):
            synced[i] = _divide(x, group.is_mean, by, leaves[i].dtype)
    means = [
        _divide(sums[g].arrays[k], sums[g].is_mean, total, rider.dtype)
        for (g, k), rider in zip(seats, riders, strict=True)
    ]
    return jax.tree.unflatten(plan.treedef, synced), means, total


def mean_of_riders(
    riders: Sequence[jax.Array], options: Options, weighting: Weighting | None
) -> tuple[list[jax.Array], jax.Array | int]:
    """Averages what rides with gradients by itself, in a collective a dtype.

    Returns:
      The second and the third of what `mean_over_replicas` returns.
    """
    num_replicas = mesh.axis_size(options.axis_name)
    weighting = _cast_varying_amount(weighting, options.axis_name)
    groups: list[list[jax.Array]] = []
    own = _weigh(cast_varying(list(riders), options.axis_name), weighting)
    seats = [_seat(groups, rider) for rider in own]
    if weighting is not None and not any(_holds(x[0], weighting) for x in groups):
        # The total travels alone.
        alone = jnp.zeros(0, weighting.amount.dtype)
        groups.append([cast_varying(alone, options.axis_name)])
    flat = options._replace(packing="flat")
    sums, total = _sum_groups(groups, num_replicas, flat, weighting)
    means = [
        _divide(sums[g].arrays[k], sums[g].is_mean, total, rider.dtype)
        for (g, k), rider in zip(seats, riders, strict=True)
    ]
    return means, total


def remaining_buckets(plan: BucketPlan, done: Collection[int]) -> list[tuple[int, ...]]:
    """Returns the buckets of a plan without the leaves in `done`."""
    kept = [tuple(i for i in bucket if i not in done) for bucket in plan.buckets]
    return [bucket for bucket in kept if bucket]


def _seat(groups: list[list[jax.Array]], rider: jax.Array) -> tuple[int, int]:
    """Appends `rider` to the first group of its dtype and its mesh axes."""
    for g, group in enumerate(groups):
        if group[0].dtype == rider.dtype and _vary_alike(group[0], rider):
            group.append(rider)
            return g, len(group) - 1
    groups.append([rider])
    return len(groups) - 1, 0


def _holds(x: jax.Array, weighting: Weighting) -> bool:
    """Whether a sum in the dtype of `x` keeps all digits of the weights."""
    return jnp.finfo(x.dtype).bits == 64 or weighting.amount.dtype != jnp.float64


def _vary_alike(a: jax.Array, b: jax.Array) -> bool:
    # Packed together, both would be taken to differ where one of them may.
    return compat.varying_axes(a) == compat.varying_axes(b)


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


def _cast_varying_amount(
    weighting: Weighting | None, axis_name: AxisName
) -> Weighting | None:
    if weighting is None:
        return None
    return weighting._replace(amount=cast_varying(weighting.amount, axis_name))


def _weigh(arrays: Sequence[jax.Array], weighting: Weighting | None) -> list[jax.Array]:
    if weighting is None:
        return list(arrays)
    return [weighted_mean.weigh(x, weighting) for x in arrays]


class _Reduced(NamedTuple):
    """Arrays of one collective after the reduction."""

    arrays: list[jax.Array]
    is_mean: bool = False  # whether the all-reduce has divided them.


# What divides the sums of a group, as a factor, given what was reduced before it.
_FindScale = Callable[[list[jax.Array], list[_Reduced]], jax.typing.ArrayLike | None]


def _sum_groups(
    groups: list[list[jax.Array]],
    num_replicas: int,
    options: Options,
    weighting: Weighting | None,
    by_total: bool = True,
) -> tuple[list[_Reduced], jax.Array | int]:
    """Sums weighed arrays, each group in one collective; if `by_total`, to be divided.

    Returns:
      The sums, and what divides them to the mean: what all replicas count together,
      or their number.
    """
    if not groups:
        return [], num_replicas
    if weighting is None:
        groups = [[_before(x, num_replicas) for x in group] for group in groups]

        def find_scale(group: list[jax.Array], _: list[_Reduced]) -> float | None:
            return None if _is_divided_before(group[0]) else 1.0 / num_replicas

        return _reduce(groups, options, None, find_scale), num_replicas
    # The total rides in the first group that it fits in, or in one of its own.
    fitting = [g for g, x in enumerate(groups) if _vary_alike(x[0], weighting.amount)]
    fitting.sort(key=lambda g: not _holds(groups[g][0], weighting))
    seat = fitting[0] if fitting else len(groups)
    groups = [*groups] if fitting else [*groups, []]
    dtype = groups[seat][0].dtype if fitting else jnp.float32
    encoded = weighted_mean.encode(weighting.amount, dtype, options.axis_name)
    groups[seat] = [*groups[seat], encoded]

    def find_inverse(
        _: list[jax.Array], reduced: list[_Reduced]
    ) -> jax.typing.ArrayLike | None:
        if len(reduced) <= seat or not by_total or weighting.divide_by == "world":
            return None
        total = weighted_mean.decode(reduced[seat].arrays[-1])
        return weighted_mean.divide(jnp.ones(()), total, jnp.float32)

    has_data = weighted_mean.has_data(weighting.amount)
    sums = _reduce(groups, options, has_data, find_inverse)
    total = weighted_mean.decode(sums[seat].arrays.pop())
    return sums if fitting else sums[:seat], total


def _reduce(
    groups: list[list[jax.Array]],
    options: Options,
    has_data: jax.Array | None,
    find_scale: _FindScale,
) -> list[_Reduced]:
    """Sums over the replicas; what one without data holds does not count."""
    if options.packing == "tuple":
        if has_data is not None:
            groups = [
                [weighted_mean.zero_unless(has_data, x) for x in g] for g in groups
            ]
        return [_Reduced(g) for g in _reduce_tuples(groups, options.axis_name)]
    reduced: list[_Reduced] = []
    for group in groups:
        all_reduce = _choose_all_reduce(group, options)
        scale = find_scale(group, reduced) if all_reduce.takes_scale else None
        reduced.append(_reduce_group(group, all_reduce, options, has_data, scale))
    return reduced


def _choose_all_reduce(group: list[jax.Array], options: Options) -> AllReduce:
    all_reduce = options.all_reduce or _PSUM
    if all_reduce.choose is None:
        return all_reduce
    buffer = jax.ShapeDtypeStruct((sum(x.size for x in group),), group[0].dtype)
    return all_reduce.choose(buffer, options.axis_name)


_PSUM = AllReduce(lax.psum, name="psum")


def _reduce_group(
    group: list[jax.Array],
    all_reduce: AllReduce,
    options: Options,
    has_data: jax.Array | None,
    scale: jax.typing.ArrayLike | None,
) -> _Reduced:
    axis_name = options.axis_name
    if all_reduce.reduce_group is not None:
        return _Reduced(all_reduce.reduce_group(group, axis_name, has_data=has_data))
    buffer = _pack(group, has_data)
    if scale is None:
        buffer = all_reduce.reduce(buffer, axis_name)
    else:
        buffer = all_reduce.reduce(buffer, axis_name, scale=scale)
    arrays = buckets.unpack(buffer, [x.shape for x in group])
    return _Reduced(arrays, is_mean=scale is not None)


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


def _divide(
    x: jax.Array, is_mean: bool, divisor: jax.Array | int, dtype: Any
) -> jax.Array:
    if is_mean:
        return x.astype(dtype)
    if isinstance(divisor, int):
        # What was not widened to be weighed.
        return x if _is_divided_before(x) else (x / divisor).astype(dtype)
    return weighted_mean.divide(x, divisor, dtype)


def choose_packing(packing: Packing | None, all_reduce: AllReduce | None) -> Packing:
    """Returns the packing that is used; "flat" on CPU and for an `all_reduce`."""
    if all_reduce is not None:
        if packing == "tuple":
            raise ValueError(
                "`packing='tuple'` sends leaves as they are, but `all_reduce` takes "
                "flat buffers. Leave one of the two out."
            )
        return "flat"
    return packing or ("flat" if jax.default_backend() == "cpu" else "tuple")


def is_alone(axis_name: AxisName) -> bool:
    """Whether there is one replica, and no type to be satisfied by a collective."""
    return mesh.axis_size(axis_name) == 1 and not mesh.tracked_axes(axis_name)


def cast_varying(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Casts leaves to what may differ between the replicas; no data moves."""
    tracked = mesh.tracked_axes(axis_name)
    if not tracked:
        return tree
    names = tuple(n for n in mesh.as_axis_names(axis_name) if n in tracked)
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
    tracked = mesh.tracked_axes(axis_name)
    for i in (i for bucket in remaining_buckets(plan, done) for i in bucket):
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
