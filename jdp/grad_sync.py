"""Gradient synchronisation: buckets are summed over the replicas and averaged."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jdp import buckets, compat, mesh
from jdp.buckets import BucketPlan
from jdp.types import AllReduce, AxisName, PyTree

Packing = Literal["flat", "tuple"]


def sync_gradients(
    grads: PyTree,
    *,
    axis_name: AxisName = "data",
    plan: BucketPlan | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduce | None = None,
) -> PyTree:
    """Averages the gradients of all replicas, bucket by bucket.

    Called inside a traced function whose axis `axis_name` is bound by `shard_map`,
    `pmap` or `vmap`, by every replica, once a step.

    Args:
      grads: pytree of this replica's own gradients: arrays of a floating or complex
        dtype. Leaves of dtype float0 (gradients of integers) are returned as they are.
      axis_name: the axis, or axes, over which replicas lie.
      plan: which leaves travel together. None: `plan_buckets(grads)`, on CPU without
        the small first bucket.
      packing: "flat" concatenates a bucket into one buffer; "tuple" sends its leaves
        side by side, for XLA to combine into one all-reduce with many operands and no
        copies. None: "flat" on CPU, where XLA runs such an all-reduce operand by
        operand, and "tuple" elsewhere; "flat" with an `all_reduce`.
      all_reduce: sums a buffer of shape (n,) over an axis; `lax.psum` if None.

    Returns:
      A pytree like `grads`, the mean over the replicas, the same on all of them.

    Raises:
      ValueError: `axis_name` is not bound, the gradients do not fit the plan, they
        were summed over the axis already, or `packing` does not go with `all_reduce`.
      TypeError: a leaf has an integer or boolean dtype.
    """
    synced, _ = _mean_over_replicas(
        grads,
        (),
        axis_name=axis_name,
        plan=plan,
        packing=packing,
        all_reduce=all_reduce,
    )
    return synced


def local_gradients(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, axis_name: AxisName = "data"
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, of this replica's own samples.

    `jax.grad` of parameters that are the same on all replicas sums the gradient over
    the replicas by itself, leaf by leaf, inside `shard_map`. This keeps it local, as
    `sync_gradients` and `distributed_optimizer` want it.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns a scalar loss, or with
        `has_aux` a pair of it and anything else.
      has_aux: whether `loss_fn` returns a pair.
      axis_name: the axis, or axes, over which replicas lie.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or with `has_aux`
      `((loss, aux), grads)`; each replica has its own.
    """

    def with_aux(params: PyTree, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        out = loss_fn(params, *args, **kwargs)
        loss, aux = out if has_aux else (out, None)
        # A loss that `loss_fn` averaged over the replicas itself counts on each.
        return _cast_varying(loss, axis_name), aux

    def wrapped(params: PyTree, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        _axis_size(axis_name)
        params = _cast_varying(params, axis_name)
        grad_fn = jax.value_and_grad(with_aux, has_aux=True)
        (loss, aux), grads = grad_fn(params, *args, **kwargs)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    axis_name: AxisName = "data",
    plan: BucketPlan | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduce | None = None,
) -> Callable[..., Any]:
    """A drop-in for `jax.value_and_grad` that averages over the replicas.

    Loss and gradients are those of the mean of the replicas' losses, the same on every
    replica. The loss travels in a bucket of its dtype; it costs no collective of its
    own.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns a scalar loss over this
        replica's samples, or with `has_aux` a pair of it and anything else.
      has_aux: whether `loss_fn` returns a pair; the second part stays local.
      axis_name: the axis, or axes, over which replicas lie.
      plan: see `sync_gradients`.
      packing: see `sync_gradients`.
      all_reduce: see `sync_gradients`.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or with `has_aux`
      `((loss, aux), grads)`. It raises what `sync_gradients` raises.
    """
    local = local_gradients(loss_fn, has_aux=has_aux, axis_name=axis_name)

    def wrapped(params: PyTree, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        value, grads = local(params, *args, **kwargs)
        loss, aux = value if has_aux else (value, None)
        grads, (loss,) = _mean_over_replicas(
            grads,
            (loss,),
            axis_name=axis_name,
            plan=plan,
            packing=packing,
            all_reduce=all_reduce,
        )
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


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
    num_replicas = _axis_size(axis_name)
    tracked = _tracked_axes(axis_name)
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [_as_inexact(x) for x in leaves]
    local = [
        i
        for i, x in enumerate(leaves)
        if not tracked or tracked & compat.varying_axes(x)
    ]
    groups: dict[Any, list[int]] = {}
    for i in local:
        groups.setdefault(leaves[i].dtype, []).append(i)
    for members in groups.values():
        parts = [_cast_varying(leaves[i], axis_name) for i in members]
        means = _reduce_flat(parts, num_replicas, axis_name, lax.psum)
        for i, mean in zip(members, means, strict=True):
            leaves[i] = mean
    return jax.tree.unflatten(treedef, leaves)


def _mean_over_replicas(
    grads: PyTree,
    riders: Sequence[jax.Array],
    *,
    axis_name: AxisName,
    plan: BucketPlan | None,
    packing: Packing | None,
    all_reduce: AllReduce | None,
) -> tuple[PyTree, list[jax.Array]]:
    """Averages `grads`, and `riders` inside the first bucket of their dtype."""
    packing = _choose_packing(packing, all_reduce)
    num_replicas = _axis_size(axis_name)
    plan = _default_plan(grads) if plan is None else plan
    leaves = buckets.check_fits(plan, grads)
    _check_are_gradients(plan)
    if num_replicas == 1 and not _tracked_axes(axis_name):
        return grads, list(riders)
    _check_are_local(plan, leaves, axis_name)
    groups = [[leaves[i] for i in bucket] for bucket in plan.buckets]
    seats = [_seat(groups, rider) for rider in riders]
    if packing == "flat":
        reduce_one = all_reduce or lax.psum
        groups = [
            _reduce_flat(group, num_replicas, axis_name, reduce_one) for group in groups
        ]
    else:
        groups = _reduce_tuples(groups, num_replicas, axis_name)
    synced = list(leaves)  # keeps the float0 leaves, which are in no bucket.
    for bucket, group in zip(plan.buckets, groups, strict=False):
        for i, leaf in zip(bucket, group, strict=False):
            synced[i] = leaf
    riders = [groups[g][position] for g, position in seats]
    return jax.tree.unflatten(plan.treedef, synced), list(riders)


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
    buffer = _after(all_reduce(buffer, axis_name), num_replicas)
    return buckets.unpack(buffer, [x.shape for x in group])


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


def _default_plan(grads: PyTree) -> BucketPlan:
    # The small first bucket starts communication early. XLA on CPU starts it no
    # earlier, and one more all-reduce over gloo costs 1 to 2 ms of a step of 25 ms
    # (`jdp bench step`, 12.7 MB of gradients, 2 processes).
    if jax.default_backend() == "cpu":
        return buckets.plan_buckets(
            grads, first_bucket_bytes=buckets.DEFAULT_BUCKET_BYTES
        )
    return buckets.plan_buckets(grads)


def _choose_packing(packing: Packing | None, all_reduce: AllReduce | None) -> Packing:
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


def _axis_size(axis_name: AxisName) -> int:
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"`axis_name={axis_name!r}` is not bound here; bound axes: "
            f"{compat.bound_axis_names() or 'none'}. Call this inside a step that "
            "`jdp.data_parallel` wraps, or under `shard_map`, `pmap(axis_name=)` or "
            "`vmap(axis_name=)` with that name."
        ) from None


def _tracked_axes(axis_name: AxisName) -> frozenset[str]:
    """The axes whose varying values JAX tracks by type here; empty if it does not."""
    names = mesh.as_axis_names(axis_name)
    return compat.varying_axes(lax.axis_index(names))


def _cast_varying(tree: PyTree, axis_name: AxisName) -> PyTree:
    tracked = _tracked_axes(axis_name)
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


def _check_are_local(plan: BucketPlan, leaves: list, axis_name: AxisName) -> None:
    tracked = _tracked_axes(axis_name)
    for bucket in plan.buckets:
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


def _as_inexact(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
