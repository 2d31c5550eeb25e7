"""Differentiation: loss and gradients, averaged over the replicas."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import compat, types
from jdp.backward.loss import LossProgram, trace_loss
from jdp.gradients import (
    in_backward,
    loss_weighting,
    noise,
    reduce,
    reduce_options,
    signatures,
    step_trace,
    used_flags,
    weighted_mean,
)
from jdp.gradients.loss_weighting import Seed
from jdp.gradients.reduce import ReduceOptions
from jdp.gradients.step_facts import LossFacts
from jdp.gradients.step_trace import StepTrace
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.hooks.base import CommHook
from jdp.trees.buckets import BucketPlan, Packing
from jdp.types import AllReduceOption, AxisName, PyTree


class LossCall(NamedTuple):
    """A loss and its positional arguments, parameters first."""

    loss_fn: Callable[..., Any]  # of (params, *rest, **kwargs).
    params: PyTree  # an argument, or a tuple of arguments.
    rest: tuple[Any, ...]


class LocalGradients(NamedTuple):
    """Loss and gradients of one replica."""

    loss: jax.Array
    aux: PyTree
    grads: PyTree
    used: PyTree | None  # with `find_unused`.
    facts: LossFacts
    seed: Seed | None = None  # None: the loss was not weighted.


@signatures.of_value_and_grad
def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    find_unused: bool = False,
    allow_int: bool = False,
    weight: jax.typing.ArrayLike | None = None,
    divide_by: DivideBy = "weight",
    axis_name: AxisName | None = None,
    plan: BucketPlan | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduceOption = "auto",
    hook: CommHook | None = None,
    hook_state: PyTree = None,
    find_norms: bool = False,
) -> Callable[..., Any]:
    """A drop-in for `jax.value_and_grad` that averages over the replicas.

    Returns the mean of the replicas' losses and its gradients, the same on every
    replica. Buckets are sent in the order in which the backward pass finishes them
    (`gradient_order`). The loss travels in a bucket of its dtype, and so do the usage
    flags of `find_unused`; they need no collective of their own.

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
        `jax.value_and_grad`; a tuple for several, and then parameters, gradients and
        usage flags are tuples, too.
      has_aux: whether `loss_fn` returns a pair; the second part stays local.
      find_unused: whether to return which parameters were used on any replica, as
        `jdp.skip_unused` wants it. A replica without data uses no parameter whose use
        control flow decides.
      allow_int: whether parameters may hold integers, booleans and PRNG keys, whose
        gradients are zeros of dtype float0, as in `jax.value_and_grad`.
      weight: see `sync_gradients`; NaN and negative weights make loss and gradients
        NaN. In a step of `jdp.data_parallel` its metrics are averaged with it, too.
        Where gradients go through a collective, the cotangent of the loss is the weight
        over the largest weight of a replica. It is never above 1, so weights make
        nothing overflow.
      divide_by: see `sync_gradients`. It concerns the gradients; the loss is always the
        mean over the replicas with data, and 0 without any data.
      axis_name: the axis, or axes, over which replicas lie; None: the world's.
      plan: see `sync_gradients`; by default a plan in `gradient_order`, but with a
        `hook_state` the plan of `jdp.hooks.init_state`.
      packing: see `sync_gradients`.
      all_reduce: see `sync_gradients`.
      hook: see `sync_gradients`. The loss and other riders stay exact, in a small
        collective of their own.
      hook_state: see `sync_gradients`.
      find_norms: whether to return the norms that `jdp.noise_scale` needs, which
        travel with the loss.

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
    check_loss(loss_fn)
    types.check_flags(
        has_aux=has_aux,
        find_unused=find_unused,
        allow_int=allow_int,
        find_norms=find_norms,
    )
    options = reduce_options.make_options(axis_name, plan, packing, all_reduce, hook)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        trace = step_trace.current()
        weighting = trace.resolve(weight, divide_by)
        here = options.here()
        local = differentiate(
            pick_params(loss_fn, argnums, args),
            kwargs,
            here.axis_name,
            trace,
            has_aux=has_aux,
            find_unused=find_unused,
            allow_int=allow_int,
            weighting=weighting,
        )
        samples = noise.count_samples(weight, weighting) if find_norms else None
        return sync_local(local, here, weighting, trace, has_aux, hook_state, samples)

    return wrapped


def check_loss(loss_fn: Any) -> None:
    """Raises TypeError for a loss that is not a function."""
    if not callable(loss_fn):
        raise TypeError(
            "`loss_fn` must be a function `(params, *args) -> loss`, got "
            f"{type(loss_fn).__name__}. Pass the function, not what it returns; its "
            "arguments go to the function that comes back."
        )


def sync_local(
    local: LocalGradients,
    options: ReduceOptions,
    weighting: Weighting | None,
    trace: StepTrace,
    has_aux: bool,
    hook_state: PyTree = None,
    samples: jax.Array | None = None,
) -> Any:
    """Averages loss and gradients over the replicas, and unites the usage flags.

    Args:
      local: loss and gradients of this replica.
      options: the options of the reduction.
      weighting: weight of this replica; None: equal weights.
      trace: the trace of the step.
      has_aux: whether to return `local.aux`.
      hook_state: state of the hook.
      samples: number of samples of this replica, float32 (), to return norms; or None.

    Returns:
      The results of `value_and_grad`.
    """
    facts, seed = local.facts, local.seed
    # A hook's state keeps the order of the parameters.
    order = None if hook_state is not None else facts.timeline.order()
    options = reduce.with_plan(options, local.grads, order)
    used, riders = local.used, [local.loss]
    decided = [] if used is None else used_flags.find_decided(used, local.grads)
    if decided:
        riders.append(used_flags.as_rider(decided, local.loss.dtype))
    if samples is not None:
        facts.check_is_local("find_norms")
        factor = None if seed is None else seed.factor
        riders.append(noise.as_rider(local.grads, samples, local.loss.dtype, factor))
    # Zeros need not travel.
    grads = _with_zeros(local.grads, facts.never_used)
    done = {*facts.synced_in_backward, *facts.never_used}
    if hook_state is not None:  # It covers all gradients.
        facts.check_is_local("a hook with a state")
        grads, done = compat.cast_tree_varying(grads, options.axis_name), set()
    means = reduce.mean_over_replicas(
        grads,
        options,
        hook_state=hook_state,
        weighting=weighting,
        is_weighed=seed is not None,
        divisor=None if seed is None else seed.divisor,
        riders=riders,
        done=done,
    )
    trace.add_reduction(
        options, weighting, riders, facts, done, is_weighed=seed is not None
    )
    if decided:
        used = used_flags.from_rider(used, means.riders[1])
    out = arranged(means.riders[0], local.aux, means.grads, used, has_aux)
    if samples is not None:
        out = out, noise.norms_of(means, weighting, options.axis_name)
    return out if hook_state is None else (out, means.hook_state)


def arranged(
    loss: jax.Array, aux: PyTree, grads: PyTree, used: PyTree | None, has_aux: bool
) -> Any:
    """Returns loss and gradients as `value_and_grad` does."""
    out = ((loss, aux) if has_aux else loss), grads
    return out if used is None else (out, used)


def pick_params(
    loss_fn: Callable[..., Any], argnums: int | Sequence[int], args: tuple[Any, ...]
) -> LossCall:
    """Takes the parameters out of the positional arguments of a call.

    Args:
      loss_fn: the loss, of `args`.
      argnums: as `jax.value_and_grad` takes it: the place of the parameters, or
        places; negative ones count from the end.
      args: the arguments.

    Raises:
      TypeError: `argnums` is neither an integer nor integers.
      ValueError: there is no such argument, or one is named twice.
    """
    places = _places(argnums, len(args))
    if argnums == 0:
        return LossCall(loss_fn, args[0], args[1:])
    is_one = not isinstance(argnums, Sequence)
    chosen = tuple(args[place] for place in places)
    rest = tuple(x for place, x in enumerate(args) if place not in places)

    @functools.wraps(loss_fn)
    def of_params(params: PyTree, *rest: Any, **kwargs: Any) -> Any:
        left = iter(rest)
        given = dict(zip(places, (params,) if is_one else params, strict=True))
        ordered = [given[i] if i in given else next(left) for i in range(len(args))]
        return loss_fn(*ordered, **kwargs)

    return LossCall(of_params, chosen[0] if is_one else chosen, rest)


def differentiate(
    call: LossCall,
    kwargs: dict[str, Any],
    axis_name: AxisName,
    trace: StepTrace,
    *,
    has_aux: bool,
    find_unused: bool,
    allow_int: bool,
    weighting: Weighting | None = None,
) -> LocalGradients:
    """Traces the loss once, and runs it forwards and backwards.

    Args:
      call: the loss, its parameters and its other positional arguments.
      kwargs: its keyword arguments.
      axis_name: the axis, or axes, over which replicas lie.
      trace: the trace of the step.
      has_aux: see `value_and_grad`, as for the next two.
      find_unused: whether to return usage flags.
      allow_int: whether parameters may be integers.
      weighting: weight of this replica, for its loss; None: gradients stay unweighted.
    """
    compat.axis_size(axis_name)
    own = compat.cast_tree_varying(call.params, axis_name)
    trace_own = functools.partial(
        trace_loss,
        call.loss_fn,
        args=call.rest,
        kwargs=kwargs,
        has_aux=has_aux,
        allow_int=allow_int,
    )
    program = trace_own(own)
    if program.markers:
        in_backward.check_markers(program, axis_name, weighting)
    if program.synced_in_backward and compat.tracked_axes(axis_name):
        own = in_backward.uncast(call.params, own, program.synced_in_backward)
        program = trace_own(own)

    facts = step_trace.facts_of(program, axis_name, finds_unused=find_unused)
    factor, seed = None, None
    # Gradients that stay local are weighted later, but a `jdp.Join` tells which
    # replicas have data.
    known = weighting or trace.weighting.ambient
    if known is not None and not compat.is_alone(axis_name):
        factor, seed = loss_weighting.find_seed(
            program, facts, weighting, known, trace, axis_name
        )
    if facts.has_exchanges and factor is not None:
        names = types.as_axis_names(axis_name)
        program = program.gated(own, weighted_mean.has_data(factor), names)
    loss, aux, used, grads = _run(
        program, own, factor, axis_name, find_unused, allow_int
    )
    _check_is_of_replica(loss, trace.model_axes)
    trace.add_loss(facts)
    return LocalGradients(loss, aux, grads, used, facts, seed)


def _run(
    program: LossProgram,
    own: PyTree,
    factor: jax.Array | None,
    axis_name: AxisName,
    find_unused: bool,
    allow_int: bool,
) -> tuple[jax.Array, PyTree, PyTree | None, PyTree]:
    """Returns loss, aux, usage flags, and the gradients of `factor` times the loss."""

    def run(params: PyTree) -> tuple[jax.Array, Any]:
        if find_unused:
            loss, aux, used = program.evaluate_marked(params)
        else:
            loss, aux, used = *program.evaluate(params), None
        # A loss that `loss_fn` averaged over the replicas itself counts on each.
        loss = compat.cast_tree_varying(loss, axis_name)
        objective = loss
        if factor is not None:
            # Only the cotangent matters: it is the factor in the dtype of the loss.
            wide = weighted_mean.wide_dtype(loss.dtype)
            objective = loss.astype(wide) * factor.astype(wide)
        return objective, (loss, aux, used)

    grad_fn = jax.value_and_grad(run, has_aux=True, allow_int=allow_int)
    (_, (loss, aux, used)), grads = grad_fn(own)
    return loss, aux, used, grads


def _check_is_of_replica(loss: jax.Array, model_axes: Sequence[str]) -> None:
    """Raises ValueError for a loss in which the devices of a replica may differ."""
    over = sorted(compat.varying_axes(loss).intersection(model_axes))
    if over:
        raise ValueError(
            f"The loss may differ along the model axis {over[0]!r}: each device of a "
            "replica would train on a loss of its own. Return a loss that is the same "
            f"on all of them: sum what devices compute in parts, `lax.psum(x, "
            f"{over[0]!r})`, or average what is equal, `lax.pmean(x, {over[0]!r})`. "
            "If the loss is written for whole arrays, leave `manual_axes` out of "
            "`jdp.init`."
        )


def _places(argnums: int | Sequence[int], count: int) -> list[int]:
    try:
        given = argnums if isinstance(argnums, Sequence) else [argnums]
        found = [operator.index(number) for number in given]
    except TypeError:
        raise TypeError(
            f"`argnums` must be an integer or a tuple of integers, got {argnums!r}."
        ) from None
    for number in found:
        if not -count <= number < count:
            raise ValueError(
                f"`argnums={argnums!r}` names the positional argument {number}, but "
                f"the call has {count}. Pass parameters by position."
            )
    places = [number % count for number in found]
    if len(set(places)) < len(places) or not places:
        raise ValueError(
            f"`argnums={argnums!r}` must name at least one argument, and each once."
        )
    return places


def _with_zeros(tree: PyTree, indices: Sequence[int]) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    for i in indices:
        leaves[i] = jnp.zeros(leaves[i].shape, leaves[i].dtype)
    return jax.tree.unflatten(treedef, leaves)
