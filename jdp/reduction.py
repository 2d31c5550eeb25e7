"""Reduction: buckets of gradients become their mean over the replicas."""

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdp import buckets, compat, mesh
from jdp.buckets import BucketPlan
from jdp.types import AllReduce, AxisName, PyTree

Packing = Literal["flat", "tuple"]


def average(tree: PyTree, *, axis_name: AxisName = "data") -> PyTree:
    """Averages small values, such as metrics, over the replicas in one collective.

    Integers and booleans are averaged in float32. A leaf that is known to be the same
    on all replicas is returned as it is.

    Args:
      tree: pytree of arrays or numbers.
      axis_name: the axis, or axes, over which replicas lie.

    Returns:
      A pytree of the same shapes, floating or complex, the same on all replicas.
    """
    num_replicas = axis_size(axis_name)
    tracked = tracked_axes(axis_name)
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [as_inexact(x) for x in leaves]
    local = [
        i
        for i, x in enumerate(leaves)
        if not tracked or tracked & compat.varying_axes(x)
    ]
    groups: dict[Any, list[int]] = {}
    for i in local:
        groups.setdefault(leaves[i].dtype, []).append(i)
    for members in groups.values():
        parts = [cast_varying(leaves[i], axis_name) for i in members]
        means = _reduce_flat(parts, num_replicas, axis_name, lax.psum)
        for i, mean in zip(members, means, strict=True):
            leaves[i] = mean
    return jax.tree.unflatten(treedef, leaves)


class Options(NamedTuple):
    """How gradients are averaged; see `jdp.sync_gradients`."""

    axis_name: AxisName
    plan: BucketPlan | None = None
    packing: Packing | None = None
    all_reduce: AllReduce | None = None


def mean_over_replicas(
    grads: PyTree,
    options: Options,
    *,
    riders: Sequence[jax.Array] = (),
    done: Collection[int] = (),
) -> tuple[PyTree, list[jax.Array]]:
    """Averages gradients, and what rides with them.

    Args:
      grads: see `jdp.sync_gradients`.
      options: how; its plan must not be None.
      riders: further arrays; each travels in the first bucket of its dtype.
      done: leaf indices of gradients that were averaged before, in the backward pass.

    Returns:
      The averaged gradients and riders.
    """
    axis_name, plan, packing, all_reduce = options
    packing = choose_packing(packing, all_reduce)
    num_replicas = axis_size(axis_name)
    assert plan is not None
    leaves = buckets.check_fits(plan, grads)
    _check_are_gradients(plan)
    if num_replicas == 1 and not tracked_axes(axis_name):
        return grads, list(riders)
    bucketed = remaining_buckets(plan, done)
    _check_are_local(plan, bucketed, leaves, axis_name)
    groups = [[leaves[i] for i in bucket] for bucket in bucketed]
    seats = [_seat(groups, rider) for rider in riders]
    if packing == "flat":
        reduce_one = all_reduce or lax.psum
        groups = [
            _reduce_flat(group, num_replicas, axis_name, reduce_one) for group in groups
        ]
    else:
        groups = _reduce_tuples(groups, num_replicas, axis_name)
    synced = list(leaves)  # keeps the leaves that are in no bucket.
    for bucket, group in zip(bucketed, groups, strict=False):
        for i, leaf in zip(bucket, group, strict=False):
            synced[i] = leaf
    means = [groups[g][position] for g, position in seats]
    return jax.tree.unflatten(plan.treedef, synced), means


def remaining_buckets(plan: BucketPlan, done: Collection[int]) -> list[tuple[int, ...]]:
    """Returns the buckets of a plan without the leaves in `done`."""
    kept = [tuple(i for i in bucket if i not in done) for bucket in plan.buckets]
    return [bucket for bucket in kept if bucket]


def _seat(groups: list[list[jax.Array]], rider: jax.Array) -> tuple[int, int]:
    """Appends `rider` to the first group of its dtype; returns where it sits."""
    for g, group in enumerate(groups):
        if group[0].dtype == rider.dtype:
            group.append(rider)
            return g, len(group) - 1
    groups.append([rider])
    return len(groups) - 1, 0


def _reduce_flat(
    group: list[jax.Array],
    num_replicas: int,
    axis_name: AxisName,
    all_reduce: AllReduce,
) -> list[jax.Array]:
    buffer = _before(buckets.pack(group), num_replicas)
    leaves = buckets.unpack(all_reduce(buffer, axis_name), [x.shape for x in group])
    return [_after(x, num_replicas) for x in leaves]


def _reduce_tuples(
    groups: list[list[jax.Array]], num_replicas: int, axis_name: AxisName
) -> list[list[jax.Array]]:
    """Sums leaf by leaf, side by side within a bucket and one bucket after another.

    XLA combines all-reduces that do not depend on each other, so a bucket becomes one
    all-reduce with as many operands, and the dependence keeps buckets apart; on CPU
    only if the pass "cse_barrier_expander" does not remove it first.
    """
    reduced: list[list[jax.Array]] = []
    for group in groups:
        if reduced:
            group, reduced[-1] = compat.order_after(group, reduced[-1])
        reduced.append([lax.psum(_before(x, num_replicas), axis_name) for x in group])
    return [[_after(x, num_replicas) for x in group] for group in reduced]


def _before(x: jax.Array, num_replicas: int) -> jax.Array:
    # The sum of float16 gradients overflows where their mean does not; torch's
    # DistributedDataParallel divides before it sums for that reason. The wider types
    # are divided once, after the sum, with one rounding instead of many.
    return x / num_replicas if x.dtype == jnp.float16 else x


def _after(x: jax.Array, num_replicas: int) -> jax.Array:
    return x if x.dtype == jnp.float16 else x / num_replicas


def default_plan(grads: PyTree, order: Sequence[int] | None = None) -> BucketPlan:
    """Returns the plan that is used where none is given."""
    # The small first bucket starts communication early. XLA on CPU starts it no
    # earlier, and one more all-reduce over gloo costs 1 to 2 ms of a step of 25 ms
    # (`jdp bench step`, 12.7 MB of gradients, 2 processes).
    if jax.default_backend() == "cpu":
        return buckets.plan_buckets(
            grads, first_bucket_bytes=buckets.DEFAULT_BUCKET_BYTES, order=order
        )
    return buckets.plan_buckets(grads, order=order)


def choose_packing(packing: Packing | None, all_reduce: AllReduce | None) -> Packing:
    """Returns the packing that is used; "flat" on CPU and for an `all_reduce`."""
    if packing not in (None, "flat", "tuple"):
        raise ValueError(f"`packing` must be 'flat' or 'tuple', got {packing!r}.")
    if all_reduce is not None:
        if packing == "tuple":
            raise ValueError(
                "`packing='tuple'` sends leaves as they are, but `all_reduce` takes "
                "flat buffers. Leave one of the two out."
            )
        return "flat"
    return packing or ("flat" if jax.default_backend() == "cpu" else "tuple")


def axis_size(axis_name: AxisName) -> int:
    """Returns the number of replicas, or raises ValueError where it is not bound."""
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"`axis_name={axis_name!r}` is not bound here; bound axes: "
            f"{compat.bound_axis_names() or 'none'}. Call this inside a step that "
            "`jdp.data_parallel` wraps, or under `shard_map`, `pmap(axis_name=)` or "
            "`vmap(axis_name=)` with that name."
        ) from None


def tracked_axes(axis_name: AxisName) -> frozenset[str]:
    """The axes whose varying values JAX tracks by type here; empty if it does not."""
    names = mesh.as_axis_names(axis_name)
    return compat.varying_axes(lax.axis_index(names))


def cast_varying(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Casts leaves to what may differ between the replicas; no data moves."""
    tracked = tracked_axes(axis_name)
    if not tracked:
        return tree
    names = tuple(n for n in mesh.as_axis_names(axis_name) if n in tracked)
    return jax.tree.map(lambda x: compat.cast_varying(x, names), tree)


def _check_are_gradients(plan: BucketPlan) -> None:
    for i, spec in enumerate(plan.leaves):
        if spec.dtype == jax.dtypes.float0 or jnp.issubdtype(spec.dtype, jnp.inexact):
            continue
        raise TypeError(
            f"The gradient `{plan.leaf_paths()[i]}` is {spec}; only floating and "
            "complex gradients can be averaged. Keep integers out of the parameters, "
            "or use `jax.grad(..., allow_int=True)`, whose float0 leaves pass through."
        )


def _check_are_local(
    plan: BucketPlan,
    bucketed: Sequence[tuple[int, ...]],
    leaves: list,
    axis_name: AxisName,
) -> None:
    tracked = tracked_axes(axis_name)
    for bucket in bucketed:
        for i in bucket:
            if tracked <= compat.varying_axes(leaves[i]):
                continue
            raise ValueError(
                f"The gradient `{plan.leaf_paths()[i]}` is already the same on all "
                f"replicas of {axis_name!r}, so it was summed or averaged before. "
                "`jax.grad` of replicated parameters does that, leaf by leaf; take "
                "gradients with `jdp.local_gradients`, and do not synchronise what "
                "`jdp.value_and_grad` has synchronised."
            )


def as_inexact(x: Any) -> jax.Array:
    """Returns a number or an array as one that can be averaged."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
