"""Compression: the mean over the replicas, through a communication hook."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.gradients import reduce, weighted_mean
from jdp.gradients.reduce import Options
from jdp.gradients.weighted_mean import Weighting
from jdp.hooks import base
from jdp.hooks.base import CommHook, Wire
from jdp.hooks.state import avals_of
from jdp.replicas import mesh, per_replica
from jdp.trees import buckets, tree_paths
from jdp.trees.buckets import BucketAval, BucketPlan, LeafSpec
from jdp.types import PyTree


class Means(NamedTuple):
    """Results of `jdp.gradients.reduce.mean_over_replicas`, and the next state."""

    grads: PyTree
    riders: list[jax.Array]
    total: jax.Array | int
    hook_state: PyTree


def mean_over_replicas(
    grads: PyTree,
    options: Options,
    *,
    hook_state: PyTree = None,
    weighting: Weighting | None = None,
    is_weighed: bool = False,
    divisor: jax.Array | None = None,
    riders: Sequence[jax.Array] = (),
    done: Collection[int] = (),
) -> Means:
    """`reduction.mean_over_replicas`, through `options.hook` if there is one.

    The hook gets the gradients of a replica times n w / W, where w is how much it
    counts of W together: their mean is what is wanted, for any weights, and
    they are the undivided gradients where all count the same. What rides with them is
    summed exactly, before, in a collective of its own.

    Raises:
      ValueError: the state is not that of the hook for these buckets, or there is no
        hook.
    """
    hook, plan = options.hook, options.plan
    assert plan is not None
    if hook is None and hook_state is not None:
        raise ValueError(
            "`hook_state` is given, but no `hook`. Pass the hook that it was made for."
        )
    if hook is None or reduce.is_alone(options.axis_name):
        means = reduce.mean_over_replicas(
            grads,
            options,
            weighting=weighting,
            is_weighed=is_weighed,
            divisor=divisor,
            riders=riders,
            done=done,
        )
        return Means(*means, hook_state)
    leaves = reduce.check_are_local(grads, plan, done, options.axis_name)
    bucketed = reduce.remaining_buckets(plan, done)
    avals = avals_of(plan, bucketed)
    hook_state = _check_state(hook, avals, hook_state)
    found, total = reduce.mean_of_riders(riders, options, weighting)
    share = find_share(weighting, is_weighed, total, options, divisor)
    packed = [
        scale(buckets.pack([leaves[i].astype(aval.dtype) for i in bucket]), share)
        for bucket, aval in zip(bucketed, avals, strict=True)
    ]
    wire = Wire(options.axis_name, options.all_reduce)
    sums, state = _check_result(
        hook, hook.apply(packed, hook_state, wire), avals, hook_state
    )
    synced = list(leaves)
    for bucket, buffer in zip(bucketed, sums, strict=True):
        mean = buffer / wire.num_replicas
        parts = buckets.unpack(mean, [leaves[i].shape for i in bucket])
        for i, part in zip(bucket, parts, strict=True):
            synced[i] = part.astype(leaves[i].dtype)
    if weighting is not None:  # Without any data nothing happens.
        has_data = weighted_mean.has_data(total)
        for i in (i for bucket in bucketed for i in bucket):
            synced[i] = weighted_mean.zero_unless(has_data, synced[i])
        state = jax.tree.map(
            lambda old, new: jnp.where(has_data, new, old), hook_state, state
        )
    return Means(jax.tree.unflatten(plan.treedef, synced), found, total, state)


def hook_bytes(
    hook: CommHook | None, plan: BucketPlan, done: Collection[int], num_replicas: int
) -> int:
    """Returns what a hook sends of one replica, for the leaves that are not `done`."""
    if hook is None:
        return 0
    avals = avals_of(plan, reduce.remaining_buckets(plan, done))
    return round(base.measure(hook, avals, num_replicas).num_bytes)


class Share(NamedTuple):
    """How much the gradients of this replica count, of the mean that is 1."""

    factor: jax.Array  # float32 or float64 ().
    has_data: jax.Array  # bool ().


def find_share(
    weighting: Weighting | None,
    is_weighed: bool,
    total: jax.Array | int,
    options: Options,
    divisor: jax.Array | None = None,
) -> Share | None:
    """Returns n w / W, or 1 / w of it where gradients are times w; None if it is 1.

    With `divisor`, of gradients that are weighed, n / `divisor`.
    """
    if weighting is None:
        return None
    num_replicas = mesh.axis_size(options.axis_name)
    amount = weighting.amount
    has_data = weighted_mean.has_data(amount)
    if weighting.divide_by == "world" and divisor is None:
        return Share(jnp.sign(amount), has_data)
    # The quotient is as precise as what it is multiplied with may be.
    dtype = jnp.result_type(float)
    own = jnp.ones((), dtype) if is_weighed else amount
    factor = weighted_mean.ratio(
        own * num_replicas, total if divisor is None else divisor, dtype
    )
    return Share(factor, has_data)


def scale(x: jax.Array, share: Share | None) -> jax.Array:
    """Returns what the mean over the replicas is to be taken of.

    Weighed float16 comes back as float32: times n, it may be out of its range where the
    mean is not.
    """
    if share is None:
        return x
    wide = weighted_mean.wide_dtype(x.dtype)
    scaled = x.astype(wide) * share.factor.astype(jnp.finfo(wide).dtype)
    if x.dtype != jnp.float16:
        scaled = scaled.astype(x.dtype)
    return weighted_mean.zero_unless(share.has_data, scaled)


def _check_state(
    hook: CommHook, avals: Sequence[BucketAval], hook_state: PyTree
) -> PyTree:
    expected = jax.eval_shape(lambda: hook.init(avals))
    if not jax.tree.leaves(expected):
        return expected
    if hook_state is None:
        raise ValueError(
            f"The hook `{hook.name}` has a state, and `hook_state` is missing. Keep "
            "`jdp.hooks.init_state(hook, params)` in the train state, and pass it."
        )
    wanted, found = (tree_paths.leaf_paths(x) for x in (expected, hook_state))
    if wanted != found:
        difference = tree_paths.first_difference(
            wanted, found, "that of the hook", "`hook_state`"
        )
        raise ValueError(
            f"`hook_state` is not that of the hook `{hook.name}` for these gradients.\n"
            f"{difference}Make it with the same hook, parameters and plan."
        )
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(hook_state), strict=True)
    for path, (a, b) in zip(wanted, pairs, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            advice = per_replica.explain_rows(b.shape, a.shape)
            raise ValueError(
                f"`hook_state{path}` is {b.dtype}{list(b.shape)}, but the hook "
                f"`{hook.name}` has {a.dtype}{list(a.shape)} there for these gradients."
                + (advice or " Make it with the same hook, parameters and plan.")
            )
    return hook_state


def _check_result(
    hook: CommHook, out: Any, avals: Sequence[BucketAval], before: PyTree
) -> tuple[list[jax.Array], PyTree]:
    """Returns the buckets and the state that a hook has returned.

    Raises:
      TypeError: they are no pair of a list of arrays and a state.
      ValueError: buckets or state have other shapes, dtypes or another structure.
    """
    if not isinstance(out, tuple) or len(out) != 2:
        found = f"a tuple of {len(out)}" if isinstance(out, tuple) else _name_of(out)
        raise TypeError(
            f"The hook `{hook.name}` must return a pair `(buckets, state)`, got "
            f"{found}. Return `(sums, state)` from `apply`, also without a state."
        )
    sums, state = out
    if not isinstance(sums, list | tuple):
        raise TypeError(
            f"The hook `{hook.name}` must return a list of {len(avals)} buckets, as it "
            f"was given, and a state; instead of the list it returned {_name_of(sums)}."
        )
    stray = [x for x in sums if not isinstance(x, jax.Array | np.ndarray)]
    if stray:
        raise TypeError(
            f"The hook `{hook.name}` must return buckets that are arrays, got "
            f"{_name_of(stray[0])} among them."
        )
    sums = [jnp.asarray(x) for x in sums]
    expected = [str(LeafSpec(tuple(a.shape), a.dtype)) for a in avals]
    found = [str(LeafSpec(tuple(x.shape), x.dtype)) for x in sums]
    if found != expected:
        raise ValueError(
            f"The hook `{hook.name}` must return buckets of the shapes and dtypes that "
            f"it was given.\n  given:    {expected}\n  returned: {found}"
        )
    _check_same_state(hook, before, state)
    return sums, state


def _check_same_state(hook: CommHook, before: PyTree, after: PyTree) -> None:
    kinds = [
        {
            path: (jnp.shape(x), x.dtype if hasattr(x, "dtype") else type(x))
            for path, x in zip(
                tree_paths.leaf_paths(tree), jax.tree.leaves(tree), strict=True
            )
        }
        for tree in (before, after)
    ]
    if kinds[0] == kinds[1] and jax.tree.structure(before) == jax.tree.structure(after):
        return
    paths = [p for p in kinds[0] | kinds[1] if kinds[0].get(p) != kinds[1].get(p)]
    given, returned = (
        f"`{paths[0]}` of {_kind(k.get(paths[0]))}" if paths else jax.tree.structure(t)
        for k, t in zip(kinds, (before, after), strict=True)
    )
    raise ValueError(
        f"The hook `{hook.name}` must return a state like the one that it was given.\n"
        f"  given:    {given}\n  returned: {returned}"
    )


def _kind(found: tuple[Any, Any] | None) -> str:
    return "nothing" if found is None else f"{found[1]}{list(found[0])}"


def _name_of(x: Any) -> str:
    return "None" if x is None else f"a {type(x).__name__}"
