"""Gradient synchronisation: the gradients of one replica become those of all."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import types
from jdp.gradients import (
    loss_arguments,
    noise,
    reduce,
    reduce_with_hook,
    step_trace,
    used_flags,
    weighted_mean,
)
from jdp.gradients.differentiation import Local, check_is_local, differentiate
from jdp.gradients.noise import GradientNorms
from jdp.gradients.reduce import Options, Packing
from jdp.gradients.reduce_with_hook import Means
from jdp.gradients.step_trace import LossFacts, Synchronization
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.hooks.base import CommHook
from jdp.replicas import mesh
from jdp.trees import buckets
from jdp.trees.buckets import BucketPlan
from jdp.types import AllReduceOption, AxisName, PyTree


def sync_gradients(
    grads: PyTree,
    *,
    used: PyTree | None = None,
    weight: jax.typing.ArrayLike | None = None,
    divide_by: DivideBy = "weight",
    axis_name: AxisName = "data",
    plan: BucketPlan | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduceOption = None,
    hook: CommHook | None = None,
    hook_state: PyTree = None,
    find_norms: bool = False,
) -> Any:
    """Averages the gradients of all replicas, bucket by bucket.

    Called inside a traced function whose axis `axis_name` is bound by `shard_map`,
    `pmap` or `vmap`, by every replica, once a step.

    Args:
      grads: pytree of this replica's own gradients: arrays of a floating or complex
        dtype. Leaves of dtype float0 (gradients of integers) are returned as they are.
        Those of float16 are divided by the number of replicas before the sum, whose
        range ends at 65504; what is below 6e-8 times that number is rounded to zero.
        A `weight`, of 1 too, sums them in float32.
      used: pytree like `grads` of Python bools, the same on all replicas, and arrays,
        bool (): whether this replica used the parameter. They ride in a bucket.
      weight: scalar, floating or integer: how many samples this replica has. None
        counts every replica the same, but in a `jdp.Join`, which knows who has data.
        The gradients of a replica of weight 0 do not count, whatever they hold, NaN
        included; without any data all gradients are zero. A weight of NaN makes all
        gradients NaN, and so does one below zero; as a constant, that is refused. The
        total weight rides in a bucket. float16 gradients travel as float32, so that the
        mean is finite wherever it is in their range.
      divide_by: what divides the sum over the replicas. "weight": the total weight, so
        that each sample counts the same. "active": the number of replicas with data,
        each of which counts the same. "world": the number of all replicas; what is
        missing makes the step smaller.
      axis_name: the axis, or axes, over which replicas lie.
      plan: which leaves travel together. None: `plan_buckets(grads)`, on CPU without
        the small first bucket.
      packing: "flat" concatenates a bucket into one buffer; "tuple" sends its leaves
        side by side, for XLA to combine into one all-reduce with many operands and no
        copies. None: "flat" on CPU, where XLA runs such an all-reduce operand by
        operand, and "tuple" elsewhere; "flat" with an `all_reduce`.
      all_reduce: sums a buffer of shape (n,) over an axis, such as those of
        `jdp.collectives`; "auto": whichever is the fastest for a bucket on this mesh,
        measured when the first step is traced; None: `lax.psum`.
      hook: compresses what travels; see `jdp.hooks`. None: nothing does.
      hook_state: what `jdp.hooks.init_state` made, and then the last step returned;
        None for a hook without a state.
      find_norms: whether to return what `jdp.noise_scale` wants to know: two numbers
        that ride in a bucket, if there is one of float32.

    Returns:
      A pytree like `grads`, the mean over the replicas, the same on all of them. With
      `used` a pair of it and the same for all replicas: whether any used it. With
      `find_norms` a pair of that and `jdp.GradientNorms`. With `hook_state` a pair of
      that and the next state.

    Raises:
      ValueError: `axis_name` is not bound, the gradients do not fit the plan, they
        were summed over the axis already, `used` has another structure, `weight` is
        not a scalar or is a negative constant, `all_reduce` does not sum, `packing`
        does not go with `all_reduce` or `hook`, or `hook_state` is not that of the
        hook for these gradients.
      TypeError: a leaf has an integer or boolean dtype, one of `used` is no bool,
        `weight` is not a real number, `plan` is no plan, `hook` is no hook, or
        `find_norms` no bool.
    """
    types.check_flags(find_norms=find_norms)
    options = reduce.make_options(axis_name, plan, packing, all_reduce, hook)
    weighting = weighted_mean.resolve(weight, divide_by)
    samples = noise.count_samples(weight, weighting) if find_norms else None
    synced = sync_weighted(grads, used, weighting, options, hook_state, samples)
    out = synced.grads if used is None else (synced.grads, synced.used)
    out = (out, synced.norms) if find_norms else out
    return out if hook_state is None else (out, synced.hook_state)


class Synced(NamedTuple):
    """Results of a reduction, the same on all replicas."""

    grads: PyTree
    used: PyTree | None
    total: jax.Array | int  # how much they count together.
    hook_state: PyTree
    norms: GradientNorms | None


def sync_weighted(
    grads: PyTree,
    used: PyTree | None,
    weighting: Weighting | None,
    options: Options,
    hook_state: PyTree = None,
    samples: jax.Array | None = None,
) -> Synced:
    """`sync_gradients`; also returns how much all replicas count together.

    With `samples`, float32 (), how many this replica has, norms are found.
    """
    plan = buckets.fit_plan(options.plan, grads)
    options = options._replace(plan=plan)
    decided = used_flags.find_decided(used, grads)
    riders = [used_flags.as_rider(decided, _first_dtype(plan))] if decided else []
    if samples is not None:
        riders.append(noise.as_rider(grads, samples, _first_dtype(plan)))
    means = reduce_with_hook.mean_over_replicas(
        grads, options, hook_state=hook_state, weighting=weighting, riders=riders
    )
    _record_weighted(options, weighting, riders, is_weighed=False)
    if decided:
        used = used_flags.from_rider(used, means.riders[0])
    norms = None if samples is None else _find_norms(means, options, weighting)
    return Synced(means.grads, used, means.total, means.hook_state, norms)


def local_gradients(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    find_unused: bool = False,
    allow_int: bool = False,
    axis_name: AxisName = "data",
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, of this replica's own samples.

    In a `shard_map` with `check_vma=True`, `jax.grad` of parameters that are the same
    on all replicas sums the gradient over the replicas by itself, leaf by leaf. This
    keeps it local everywhere, as `sync_gradients` and `distributed_optimizer` want it;
    in a step of `jdp.data_parallel`, `jax.value_and_grad` does so too. Gradients of
    several batches may be added up before they are synchronised; that is torch's
    `no_sync`.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns a scalar loss, or with
        `has_aux` a pair of it and anything else.
      argnums: see `value_and_grad`.
      has_aux: whether `loss_fn` returns a pair.
      find_unused: whether to return which parameters this replica used.
      allow_int: see `value_and_grad`.
      axis_name: the axis, or axes, over which replicas lie.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or with `has_aux`
      `((loss, aux), grads)`; each replica has its own. With `find_unused` a pair of
      that and a pytree like the parameters, as `used_parameters` returns it. It raises
      TypeError and ValueError for parameters and losses that have no gradient.

    Raises:
      TypeError: `loss_fn` is no function, or an option no bool.
    """
    loss_arguments.check_loss(loss_fn)
    types.check_flags(has_aux=has_aux, find_unused=find_unused, allow_int=allow_int)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        of_params, params, rest = loss_arguments.pick(loss_fn, argnums, args)
        local = differentiate(
            of_params,
            params,
            rest,
            kwargs,
            axis_name,
            has_aux,
            find_unused,
            allow_int=allow_int,
        )
        check_is_local(local, "local_gradients")
        return arranged(local.loss, local.aux, local.grads, local.used, has_aux)

    return wrapped


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    find_unused: bool = False,
    allow_int: bool = False,
    weight: jax.typing.ArrayLike | None = None,
    divide_by: DivideBy = "weight",
    axis_name: AxisName = "data",
    plan: BucketPlan | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduceOption = None,
    hook: CommHook | None = None,
    hook_state: PyTree = None,
    find_norms: bool = False,
) -> Callable[..., Any]:
    """A drop-in for `jax.value_and_grad` that averages over the replicas.

    Loss and gradients are those of the mean of the replicas' losses, the same on every
    replica. Buckets are sent in the order in which the backward pass finishes them
    (`gradient_order`). The loss travels in a bucket of its dtype, and so does what
    `find_unused` has to tell; they cost no collective of their own.

    With batches of `jdp.join_batches`, the loss is the mean over the samples whose
    weight is 1, and the replica counts by their number:

        def loss_fn(params, batch, weight):
            losses = ...  # (samples,)
            return (losses * weight).sum() / weight.sum()

        grad_fn = jdp.value_and_grad(loss_fn, weight=weight.sum())
        loss, grads = grad_fn(params, batch, weight)

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns a scalar loss over this
        replica's samples, or with `has_aux` a pair of it and anything else.
      argnums: which positional argument holds the parameters, as in
        `jax.value_and_grad`; of several a tuple, and then parameters, gradients and
        what was used are tuples too.
      has_aux: whether `loss_fn` returns a pair; the second part stays local.
      find_unused: whether to return which parameters were used on any replica, as
        `jdp.skip_unused` wants it. A replica without data uses none of what control
        flow decides.
      allow_int: whether parameters may hold integers, booleans and PRNG keys, whose
        gradients are zeros of dtype float0, as in `jax.value_and_grad`.
      weight: see `sync_gradients`, also of NaN and negative weights, which make loss
        and gradients NaN. In a step of `jdp.data_parallel` its metrics are averaged
        with it too. Where gradients go through a collective, the cotangent of the loss
        is the weight over the largest of a replica, never above 1: nothing overflows
        that would not without weights.
      divide_by: see `sync_gradients`. It concerns the gradients; the loss is the mean
        over what has data also with "world", and 0 where nothing has.
      axis_name: the axis, or axes, over which replicas lie.
      plan: see `sync_gradients`; by default one in `gradient_order`, but with a
        `hook_state` that of `jdp.hooks.init_state`.
      packing: see `sync_gradients`.
      all_reduce: see `sync_gradients`.
      hook: see `sync_gradients`. The loss, and what else rides, stays exact, in a small
        collective of its own.
      hook_state: see `sync_gradients`.
      find_norms: whether to return what `jdp.noise_scale` wants to know, which rides
        with the loss.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or with `has_aux`
      `((loss, aux), grads)`. With `find_unused` a pair of that and a pytree like the
      parameters: a Python bool where the program decides, an array, bool (), where
      control flow does. With `find_norms` a pair of that and `jdp.GradientNorms`. With
      `hook_state` a pair of that and the next state. It raises what `sync_gradients`
      raises, and TypeError and ValueError for parameters and losses that have no
      gradient. It warns, at the first trace, of parameters that can never receive a
      gradient.
    """
    loss_arguments.check_loss(loss_fn)
    types.check_flags(
        has_aux=has_aux,
        find_unused=find_unused,
        allow_int=allow_int,
        find_norms=find_norms,
    )
    options = reduce.make_options(axis_name, plan, packing, all_reduce, hook)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        of_params, params, rest = loss_arguments.pick(loss_fn, argnums, args)
        weighting = weighted_mean.resolve(weight, divide_by)
        local = differentiate(
            of_params,
            params,
            rest,
            kwargs,
            axis_name,
            has_aux,
            find_unused,
            weighting,
            allow_int=allow_int,
        )
        samples = noise.count_samples(weight, weighting) if find_norms else None
        return sync_local(local, options, weighting, has_aux, hook_state, samples)

    return wrapped


def sync_local(
    local: Local,
    options: Options,
    weighting: Weighting | None,
    has_aux: bool,
    hook_state: PyTree = None,
    samples: jax.Array | None = None,
) -> Any:
    """Averages loss and gradients, and unites what was used; on all replicas.

    With `samples`, float32 (), how many this replica has, norms are found.

    Returns:
      What `value_and_grad` returns.
    """
    # A state knows no order but that of the parameters.
    order = None if hook_state is not None else local.facts.timeline.order()
    plan = buckets.fit_plan(options.plan, local.grads, order)
    options = options._replace(plan=plan)
    used = local.used
    decided = used_flags.find_decided(used, local.grads)
    riders = [local.loss]
    if decided:
        riders.append(used_flags.as_rider(decided, local.loss.dtype))
    if samples is not None:
        check_is_local(local, "find_norms")
        factor = None if local.seed is None else local.seed.factor
        riders.append(noise.as_rider(local.grads, samples, local.loss.dtype, factor))
    # Zeros need not travel.
    never_used = local.facts.never_used
    grads = _with_zeros(local.grads, never_used)
    done = {*local.facts.synced_in_backward, *never_used}
    if hook_state is not None:  # It is one of all gradients.
        check_is_local(local, "a hook with a state")
        grads, done = reduce.cast_varying(grads, options.axis_name), set()
    means = reduce_with_hook.mean_over_replicas(
        grads,
        options,
        hook_state=hook_state,
        weighting=weighting,
        is_weighed=local.seed is not None,
        divisor=None if local.seed is None else local.seed.divisor,
        riders=riders,
        done=done,
    )
    _record_weighted(
        options,
        weighting,
        riders,
        local.facts,
        done,
        is_weighed=local.seed is not None,
    )
    if decided:
        used = used_flags.from_rider(used, means.riders[1])
    out = arranged(means.riders[0], local.aux, means.grads, used, has_aux)
    if samples is not None:
        out = out, _find_norms(means, options, weighting)
    return out if hook_state is None else (out, means.hook_state)


def arranged(
    loss: jax.Array, aux: PyTree, grads: PyTree, used: PyTree | None, has_aux: bool
) -> Any:
    """Returns loss and gradients as `value_and_grad` does."""
    out = ((loss, aux) if has_aux else loss), grads
    return out if used is None else (out, used)


def _find_norms(
    means: Means, options: Options, weighting: Weighting | None
) -> GradientNorms:
    """Returns the norms; what they need has ridden last."""
    return noise.from_rider(
        means.riders[-1],
        means.grads,
        weighting=weighting,
        total=means.total,
        axis_name=options.axis_name,
    )


def _first_dtype(plan: BucketPlan) -> Any:
    return plan.leaves[plan.buckets[0][0]].dtype if plan.buckets else jnp.float32


def _record_weighted(
    options: Options,
    weighting: Weighting | None,
    riders: Sequence[jax.Array],
    facts: LossFacts | None = None,
    done: Collection[int] = (),
    *,
    is_weighed: bool,
) -> None:
    is_weighed_by_hand = (
        weighting is not None
        and not weighted_mean.is_ambient(weighting)
        and not is_weighed
        and not reduce.is_alone(options.axis_name)
    )
    by_samples = weighting is not None and weighting.divide_by == "weight"
    weighted_mean.note(weighting)
    divide_by = None if weighting is None else weighting.divide_by
    record(
        options,
        divide_by,
        riders,
        facts,
        done,
        is_weighed_late=is_weighed_by_hand and by_samples,
        is_weighed_blindly=is_weighed_by_hand and facts is None,
    )


def record(
    options: Options,
    divide_by: DivideBy | None,
    riders: Sequence[jax.Array],
    facts: LossFacts | None,
    done: Collection[int],
    *,
    is_weighed_late: bool = False,
    is_weighed_blindly: bool = False,
) -> None:
    """Notes what a step synchronises; the options must have a plan."""
    assert options.plan is not None
    num_replicas = mesh.axis_size(options.axis_name)
    all_reduce = options.all_reduce
    step_trace.add_synchronization(
        Synchronization(
            plan=options.plan,
            packing=reduce.choose_packing(options.packing, all_reduce),
            algorithm="psum" if all_reduce is None else all_reduce.name,
            hook=None if options.hook is None else options.hook.name,
            hook_bytes=reduce_with_hook.hook_bytes(
                options.hook, options.plan, done, num_replicas
            ),
            num_replicas=num_replicas,
            riders=tuple(buckets.LeafSpec(r.shape, r.dtype) for r in riders),
            divide_by=divide_by,
            loss=facts,
            is_weighed_late=is_weighed_late,
            is_weighed_blindly=is_weighed_blindly,
        )
    )


def _with_zeros(tree: PyTree, indices: Sequence[int]) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    for i in indices:
        leaves[i] = jnp.zeros(leaves[i].shape, leaves[i].dtype)
    return jax.tree.unflatten(treedef, leaves)
