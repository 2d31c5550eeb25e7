"""Hook reduction: buckets passed through a communication hook, and checked."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp import compat
from jdp.gradients import weighted_mean
from jdp.gradients.weighted_mean import GradientWeighting
from jdp.hooks import base
from jdp.hooks.base import CommHook, Wire
from jdp.hooks.state import avals_of
from jdp.replicas import per_replica
from jdp.trees import buckets, tree_paths
from jdp.trees.buckets import BucketAval, BucketPlan, LeafSpec
from jdp.types import AxisName, PyTree


class HookSums(NamedTuple):
    """Results of a hook."""

    buffers: list[jax.Array]  # per bucket: the sum, shape (n,).
    before: PyTree  # the state that the hook was given.
    after: PyTree  # the next state.


def sum_buckets(
    hook: CommHook,
    wire: Wire,
    avals: Sequence[BucketAval],
    groups: Sequence[Sequence[jax.Array]],
    share: "Share | None",
    hook_state: PyTree,
) -> HookSums:
    """Sums buckets over the replicas through the hook.

    The hook gets g n w / W, where w is this replica's weight and W the total. The plain
    mean of that is the weighted mean, and equal weights leave it at g.

    Args:
      hook: the hook.
      wire: the collectives of the hook.
      avals: the buckets.
      groups: gradients per bucket.
      share: factor of the gradients.
      hook_state: the state that the user passed.

    Raises:
      ValueError: the state does not fit the hook and these buckets.
    """
    hook_state = _check_state(hook, avals, hook_state)
    packed = [
        scale(buckets.pack([x.astype(aval.dtype) for x in group]), share)
        for group, aval in zip(groups, avals, strict=True)
    ]
    out = hook.apply(packed, hook_state, wire)
    sums, state = _check_result(hook, out, avals, hook_state)
    return HookSums(sums, hook_state, state)


def unpack_means(
    means: Iterable[Sequence[jax.Array]],
    groups: Sequence[Sequence[jax.Array]],
    sums: HookSums,
    total: jax.Array | int | None,
) -> tuple[list[list[jax.Array]], PyTree]:
    """Returns the mean gradients, by bucket, and the next state of the hook.

    Args:
      means: one buffer per bucket, shape (n,): the sum of the hook, divided.
      groups: gradients that the hook was given, per bucket.
      sums: the result of the hook.
      total: weight of all replicas; None: equal weights.
    """
    averaged = []
    for (mean,), group in zip(means, groups, strict=True):
        parts = buckets.unpack(mean, [x.shape for x in group])
        averaged.append([p.astype(x.dtype) for p, x in zip(parts, group, strict=True)])
    if total is None:
        return averaged, sums.after
    has_data = weighted_mean.has_data(total)  # Without any data, nothing changes.
    averaged = [
        [weighted_mean.zero_unless(has_data, x) for x in group] for group in averaged
    ]
    state = jax.tree.map(
        lambda old, new: jnp.where(has_data, new, old), sums.before, sums.after
    )
    return averaged, state


def hook_bytes(
    hook: CommHook, plan: BucketPlan, done: Collection[int], num_replicas: int
) -> int:
    """Returns the bytes that a hook sends per replica, without the leaves in `done`."""
    avals = avals_of(plan, buckets.remaining_buckets(plan, done))
    return round(base.measure(hook, avals, num_replicas).num_bytes)


class Share(NamedTuple):
    """Factor for this replica's gradients; equal weights make it 1."""

    factor: jax.Array  # float32 or float64 ().
    has_data: jax.Array  # bool ().


def find_share(
    weighing: GradientWeighting, total: jax.Array | int, axis_name: AxisName
) -> Share | None:
    """Returns n w / W: number of replicas, weight of this one, total weight.

    Gradients that were multiplied by w already get n / W, or n / `divisor`. None: the
    factor is 1.
    """
    weighting, is_weighed, divisor = weighing
    if weighting is None:
        return None
    num_replicas = compat.axis_size(axis_name)
    amount = weighting.amount
    has_data = weighted_mean.has_data(amount)
    if weighting.divide_by == "world" and divisor is None:
        return Share(jnp.sign(amount), has_data)
    # As precise as the widest gradients.
    dtype = jnp.result_type(float)
    own = jnp.ones((), dtype) if is_weighed else amount
    factor = weighted_mean.ratio(
        own * num_replicas, total if divisor is None else divisor, dtype
    )
    return Share(factor, has_data)


def scale(x: jax.Array, share: Share | None) -> jax.Array:
    """Returns `x` times the share of this replica.

    float16 comes back as float32: times n, a gradient may be out of range where the
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
            wanted, found, "the hook", "`hook_state`"
        )
        raise ValueError(
            f"`hook_state` does not belong to the hook `{hook.name}` and these "
            f"gradients.\n{difference}Make it with the same hook, parameters and plan."
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
      TypeError: they are not a pair of a list of arrays and a state.
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
        f"The hook `{hook.name}` must return a state like the state it was given.\n"
        f"  given:    {given}\n  returned: {returned}"
    )


def _kind(found: tuple[Any, Any] | None) -> str:
    return "nothing" if found is None else f"{found[1]}{list(found[0])}"


def _name_of(x: Any) -> str:
    return "None" if x is None else f"a {type(x).__name__}"
