"""Gradient synchronisation in two calls: local gradients, and their mean."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jdp import types
from jdp.gradients import (
    differentiation,
    noise,
    reduce,
    reduce_options,
    step_trace,
    used_flags,
)
from jdp.gradients.noise import GradientNorms
from jdp.gradients.reduce import ReduceOptions
from jdp.gradients.signatures import (
    GradFn,
    GradFnWith,
    LocalOptions,
    No,
    P,
    Pair,
    State,
    SyncOptions,
    T,
    Used,
    Yes,
)
from jdp.gradients.step_trace import StepTrace
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.hooks.base import CommHook
from jdp.replicas import axes
from jdp.trees import buckets
from jdp.trees.buckets import BucketPlan, Packing
from jdp.types import AllReduceOption, AxisName, PyTree


@overload
def local_gradients(
    loss_fn: Callable[P, ArrayLike],
    argnums: Literal[0] = ...,
    *,
    has_aux: No = ...,
    find_unused: No = ...,
    **options: Unpack[LocalOptions],
) -> GradFn[P, jax.Array]: ...
@overload
def local_gradients(
    loss_fn: Callable[P, Pair],
    argnums: Literal[0] = ...,
    *,
    has_aux: Yes,
    find_unused: No = ...,
    **options: Unpack[LocalOptions],
) -> GradFn[P, Pair]: ...
@overload
def local_gradients(
    loss_fn: Callable[P, ArrayLike],
    argnums: Literal[0] = ...,
    *,
    has_aux: No = ...,
    find_unused: Yes,
    **options: Unpack[LocalOptions],
) -> GradFnWith[P, jax.Array, PyTree]: ...
@overload
def local_gradients(
    loss_fn: Callable[P, Pair],
    argnums: Literal[0] = ...,
    *,
    has_aux: Yes,
    find_unused: Yes,
    **options: Unpack[LocalOptions],
) -> GradFnWith[P, Pair, PyTree]: ...
@overload
def local_gradients(
    loss_fn: Callable[P, ArrayLike],
    argnums: int | Sequence[int],
    *,
    has_aux: No = ...,
    find_unused: No = ...,
    **options: Unpack[LocalOptions],
) -> Callable[P, tuple[jax.Array, Any]]: ...
@overload
def local_gradients(
    loss_fn: Callable[P, Pair],
    argnums: int | Sequence[int],
    *,
    has_aux: Yes,
    find_unused: No = ...,
    **options: Unpack[LocalOptions],
) -> Callable[P, tuple[Pair, Any]]: ...
@overload
def local_gradients(
    loss_fn: Callable[P, Any],
    argnums: int | Sequence[int],
    *,
    has_aux: bool = ...,
    find_unused: bool = ...,
    **options: Unpack[LocalOptions],
) -> Callable[P, Any]: ...
def local_gradients(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    find_unused: bool = False,
    allow_int: bool = False,
    axis_name: AxisName | None = None,
) -> Any:
    """`jax.value_and_grad` over this replica's own samples.

    In a `shard_map` with `check_vma=True`, `jax.grad` of parameters that are the same
    on all replicas also sums the gradient over the replicas, leaf by leaf. This
    function keeps it local everywhere, as `sync_gradients` and `distributed_optimizer`
    need it; in a step of `jdp.data_parallel`, `jax.value_and_grad` does so, too.
    Gradients of several batches may be added up before they are synchronised, as with
    torch's `no_sync`.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns a scalar loss, or with
        `has_aux` a pair of it and anything else.
      argnums: see `value_and_grad`.
      has_aux: whether `loss_fn` returns a pair.
      find_unused: whether to return which parameters this replica used.
      allow_int: see `value_and_grad`.
      axis_name: the axis, or axes, over which replicas lie; None: the world's.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or with `has_aux`
      `((loss, aux), grads)`; each replica has its own. With `find_unused` a pair of
      that and a pytree like the parameters, as `used_parameters` returns it. It raises
      TypeError and ValueError for parameters and losses that have no gradient.

    Raises:
      TypeError: `loss_fn` is not a function, or an option is not a bool.
    """
    differentiation.check_loss(loss_fn)
    types.check_flags(has_aux=has_aux, find_unused=find_unused, allow_int=allow_int)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        local = differentiation.differentiate(
            differentiation.pick_params(loss_fn, argnums, args),
            kwargs,
            axes.find(axis_name),
            step_trace.current(),
            has_aux=has_aux,
            find_unused=find_unused,
            allow_int=allow_int,
        )
        local.facts.check_is_local("local_gradients")
        return differentiation.arranged(
            local.loss, local.aux, local.grads, local.used, has_aux
        )

    return wrapped


@overload
def sync_gradients(
    grads: T,
    *,
    used: None = ...,
    find_norms: No = ...,
    hook_state: None = ...,
    **options: Unpack[SyncOptions],
) -> T: ...
@overload
def sync_gradients(
    grads: T,
    *,
    used: None = ...,
    find_norms: No = ...,
    hook_state: State,
    **options: Unpack[SyncOptions],
) -> tuple[T, State]: ...
@overload
def sync_gradients(
    grads: T,
    *,
    used: None = ...,
    find_norms: Yes,
    hook_state: None = ...,
    **options: Unpack[SyncOptions],
) -> tuple[T, GradientNorms]: ...
@overload
def sync_gradients(
    grads: T,
    *,
    used: None = ...,
    find_norms: Yes,
    hook_state: State,
    **options: Unpack[SyncOptions],
) -> tuple[tuple[T, GradientNorms], State]: ...
@overload
def sync_gradients(
    grads: T,
    *,
    used: Used,
    find_norms: No = ...,
    hook_state: None = ...,
    **options: Unpack[SyncOptions],
) -> tuple[T, Used]: ...
@overload
def sync_gradients(
    grads: T,
    *,
    used: Used,
    find_norms: No = ...,
    hook_state: State,
    **options: Unpack[SyncOptions],
) -> tuple[tuple[T, Used], State]: ...
@overload
def sync_gradients(
    grads: T,
    *,
    used: Used,
    find_norms: Yes,
    hook_state: None = ...,
    **options: Unpack[SyncOptions],
) -> tuple[tuple[T, Used], GradientNorms]: ...
@overload
def sync_gradients(
    grads: T,
    *,
    used: Used,
    find_norms: Yes,
    hook_state: State,
    **options: Unpack[SyncOptions],
) -> tuple[tuple[tuple[T, Used], GradientNorms], State]: ...
def sync_gradients(
    grads: PyTree,
    *,
    used: PyTree | None = None,
    weight: jax.typing.ArrayLike | None = None,
    divide_by: DivideBy = "weight",
    axis_name: AxisName | None = None,
    plan: BucketPlan | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduceOption = "auto",
    hook: CommHook | None = None,
    hook_state: PyTree = None,
    find_norms: bool = False,
) -> Any:
    """Averages the gradients of all replicas, bucket by bucket.

    Called inside a traced function whose axis `axis_name` is bound by `shard_map`,
    `pmap` or `vmap`, by every replica, once per step.

    Args:
      grads: pytree of this replica's own gradients: arrays of a floating or complex
        dtype. Leaves of dtype float0 (gradients of integers) are returned as they are.
        Gradients of float16 are divided by the number of replicas before the sum, whose
        range ends at 65504; what is below 6e-8 times that number is rounded to zero.
        A `weight`, of 1 too, sums them in float32.
      used: pytree like `grads` of Python bools, the same on all replicas, and arrays,
        bool (): whether this replica used the parameter. They ride in a bucket.
      weight: scalar, floating or integer: number of samples of this replica. None:
        equal weights, except inside `jdp.Join`, where replicas without data get 0.
        The gradients of a replica of weight 0 do not count, whatever they hold, NaN
        included; without any data all gradients are zero. A weight of NaN makes all
        gradients NaN, and so does one below zero; as a constant, that is refused. The
        total weight rides in a bucket. float16 gradients travel as float32, so that the
        mean is finite wherever it is in their range.
      divide_by: divisor of the sum over the replicas. "weight": the total weight, so
        that each sample counts the same. "active": the number of replicas with data,
        each of which counts the same. "world": the number of all replicas; replicas
        without data make the step smaller.
      axis_name: the axis, or axes, over which replicas lie; None: the world's.
      plan: which leaves travel together. None: `plan_buckets(grads)`, on CPU without
        the small first bucket.
      packing: "flat" concatenates a bucket into one buffer; "tuple" sends its leaves
        side by side, for XLA to combine into one all-reduce with many operands and no
        copies. None: "flat" on CPU, where XLA runs such an all-reduce operand by
        operand, and "tuple" elsewhere. Only XLA's all-reduce has the choice.
      all_reduce: sums a buffer of shape (n,) over an axis, such as the functions of
        `jdp.collectives`; "auto": the fastest for a bucket on this mesh, see
        `jdp.collectives.AutoAllReduce`; None: `lax.psum`.
      hook: compresses the messages; see `jdp.hooks`. None: no compression.
      hook_state: the result of `jdp.hooks.init_state`, and then of the last step; None
        for a hook without a state.
      find_norms: whether to return the norms that `jdp.noise_scale` needs: two numbers
        that travel in a bucket of float32, if there is one.

    Returns:
      A pytree like `grads`, the mean over the replicas, the same on all of them. With
      `used` a pair of it and the same for all replicas: whether any used it. With
      `find_norms` a pair of that and `jdp.GradientNorms`. With `hook_state` a pair of
      that and the next state.

    Raises:
      ValueError: `axis_name` is not bound, the gradients do not fit the plan, they
        were summed over the axis already, `used` has another structure, `weight` is
        not a scalar or is a negative constant, `all_reduce` does not sum, `packing`
        does not go with `all_reduce` or `hook`, or `hook_state` does not belong to
        the hook and these gradients.
      TypeError: a leaf has an integer or boolean dtype, one of `used` is not a bool,
        `weight` is not a real number, `plan` is not a plan, `hook` is not a hook, or
        `find_norms` is not a bool.
    """
    types.check_flags(find_norms=find_norms)
    options = reduce_options.make_options(
        axis_name, plan, packing, all_reduce, hook
    ).here()
    trace = step_trace.current()
    weighting = trace.resolve(weight, divide_by)
    samples = noise.count_samples(weight, weighting) if find_norms else None
    synced = sync_weighted(grads, used, weighting, options, trace, hook_state, samples)
    out = synced.grads if used is None else (synced.grads, synced.used)
    out = (out, synced.norms) if find_norms else out
    return out if hook_state is None else (out, synced.hook_state)


class Synced(NamedTuple):
    """Results of `sync_weighted`, the same on all replicas."""

    grads: PyTree
    used: PyTree | None
    total: jax.Array | int  # weight of all replicas; their number without weighting.
    hook_state: PyTree
    norms: GradientNorms | None


def sync_weighted(
    grads: PyTree,
    used: PyTree | None,
    weighting: Weighting | None,
    options: ReduceOptions,
    trace: StepTrace,
    hook_state: PyTree = None,
    samples: jax.Array | None = None,
) -> Synced:
    """`sync_gradients` with a resolved weighting; also returns the total weight.

    Norms are found if `samples` is given: the number of samples of this replica,
    float32 ().
    """
    plan = buckets.fit_plan(options.plan, grads)
    options = options._replace(plan=plan)
    decided = [] if used is None else used_flags.find_decided(used, grads)
    riders = [used_flags.as_rider(decided, _first_dtype(plan))] if decided else []
    if samples is not None:
        riders.append(noise.as_rider(grads, samples, _first_dtype(plan)))
    means = reduce.mean_over_replicas(
        grads, options, hook_state=hook_state, weighting=weighting, riders=riders
    )
    trace.add_reduction(options, weighting, riders, is_weighed=False)
    if decided:
        used = used_flags.from_rider(used, means.riders[0])
    norms = None
    if samples is not None:
        norms = noise.norms_of(means, weighting, options.axis_name)
    return Synced(means.grads, used, means.total, means.hook_state, norms)


def _first_dtype(plan: BucketPlan) -> Any:
    return plan.leaves[plan.buckets[0][0]].dtype if plan.buckets else jnp.float32
