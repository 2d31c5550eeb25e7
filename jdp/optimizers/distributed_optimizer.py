"""Distributed optimizer: an optax transformation of averaged gradients."""

import functools
from typing import Any, NamedTuple

import jax
import optax

from jdp.gradients import reduce_options, step_trace, sync, weighted_mean
from jdp.gradients.reduce import ReduceOptions
from jdp.gradients.weighted_mean import DivideBy
from jdp.hooks.base import CommHook
from jdp.hooks.state import init_state
from jdp.optimizers import outer_transforms, selection, update_arguments
from jdp.optimizers.transformation import SyncedTransformation
from jdp.replicas.mesh import World
from jdp.trees.buckets import BucketPlan, Packing
from jdp.types import AllReduceOption, AxisName, PyTree


def distributed_optimizer(
    tx: optax.GradientTransformation,
    *,
    divide_by: DivideBy = "weight",
    axis_name: AxisName | None = None,
    plan: BucketPlan | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduceOption = "auto",
    hook: CommHook | None = None,
    world: World | None = None,
) -> SyncedTransformation[optax.OptState]:
    """Wraps an optimizer so that it steps on the average of all replicas' gradients.

    The state is the state of the inner optimizer, or a `HookedState` for a hook with a
    state. `update` is called inside a traced function by every replica, with its local
    gradients (`jdp.local_gradients`). It takes two more arguments. `used`: which
    parameters this replica used, from `local_gradients(find_unused=True)`; the inner
    optimizer, such as `jdp.skip_unused`, gets whether any replica used them. `weight`:
    number of samples of this replica, which weights its gradients. If no replica has
    any, the state stays bit for bit what it was, and updates are -0.0, which changes no
    parameter.

    Transformations that are not linear in the gradients go inside:
    `jdp.distributed_optimizer(optax.chain(optax.clip_by_global_norm(1.0), tx))`. In
    front, in an `optax.chain` around both, each replica would clip by its own norm; a
    step of `jdp.data_parallel` refuses that.

    Args:
      tx: the optimizer.
      divide_by: see `sync_gradients`, as for the other options.
      axis_name: see `sync_gradients`.
      plan: see `sync_gradients`.
      packing: see `sync_gradients`.
      all_reduce: see `sync_gradients`.
      hook: see `sync_gradients`.
      world: the replicas, for the `init` of a hook with a state outside of a step;
        None: the world of `jdp.init`.

    Returns:
      An optax transformation; its `update` raises what `sync_gradients` raises.

    Raises:
      TypeError: `tx` is not an optimizer, or `hook` is not a hook.
      ValueError: `divide_by`, `packing` or `all_reduce` is unknown.
    """
    update_arguments.check_optimizer(tx, "distributed_optimizer")
    step_trace.check_divide_by(divide_by)
    inner = optax.with_extra_args_support(tx)
    options = reduce_options.make_options(axis_name, plan, packing, all_reduce, hook)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        used: PyTree | None = None,
        weight: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        update_arguments.check_shapes(updates, params)
        updates = outer_transforms.mark(updates, "distributed_optimizer")
        here, trace = options.here(), step_trace.current()
        extra_args = update_arguments.check_extra(
            extra_args, tx, distributed_optimizer, here.axis_name
        )
        weighting = trace.resolve(weight, divide_by)
        old = state if isinstance(state, HookedState) else HookedState(state, None)
        synced = sync.sync_weighted(updates, used, weighting, here, trace, old.hook)
        if used is not None:
            extra_args["used"] = synced.used

        def step() -> tuple[PyTree, Any]:
            return inner.update(synced.grads, old.inner, params, **extra_args)

        if weighting is None:
            out, new = step()
        else:
            has_data = weighted_mean.has_data(synced.total)
            out, new = selection.choose_step(has_data, step, old.inner)
        kept = new if old.hook is None else HookedState(new, synced.hook_state)
        return out, kept

    init = functools.partial(_init, inner, options, world)
    return SyncedTransformation(init, update)


class HookedState(NamedTuple):
    """State of `distributed_optimizer` with a hook that has a state."""

    inner: Any  # of the inner optimizer.
    hook: Any  # see `jdp.hooks.init_state`.


def _init(
    inner: optax.GradientTransformation,
    options: ReduceOptions,
    world: World | None,
    params: PyTree,
) -> Any:
    """Returns a new state of `inner`, with the state of the hook if that has one."""
    state, hook = inner.init(params), options.hook
    if hook is None:
        return state
    hook_state = init_state(
        hook,
        params,
        plan=options.plan,
        axis_name=options.axis_name or None,
        world=world,
    )
    return HookedState(state, hook_state) if jax.tree.leaves(hook_state) else state
