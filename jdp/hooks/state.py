"""State: the state of a hook before the first step, on all replicas."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jdp import compat, types
from jdp.hooks import base
from jdp.hooks.base import CommHook
from jdp.replicas import axes, initial_state, mesh
from jdp.replicas.mesh import World
from jdp.trees import buckets
from jdp.trees.buckets import BucketAval, BucketPlan
from jdp.types import AxisName, PyTree

State = TypeVar("State")


def init_state(
    hook: CommHook[State],
    grads: PyTree,
    *,
    plan: BucketPlan | None = None,
    axis_name: AxisName | None = None,
    world: World | None = None,
) -> State:
    """Makes the state of a hook, to be kept in the train state.

    The state identifies leaves by position and shape, not by name. Make a new one when
    parameters are added, removed, renamed or reordered.

    Inside a step it is the state of one replica. Outside, every process calls this, and
    the `jdp.PerReplica` parts are split over the replicas.

    Args:
      hook: the hook.
      grads: pytree with the structure, shapes and dtypes of the gradients, such as the
        parameters; values are not read. Integers and PRNG keys stand for gradients of
        dtype float0.
      plan: the bucket plan of the step; None: `jdp.plan_buckets(grads)`, which is also
        the default of the step.
      axis_name: the axis, or axes, over which replicas lie; None: the world's.
      world: the replicas; None: the world of `jdp.init`.

    Returns:
      The state; `()` for a hook without a state.

    Raises:
      RuntimeError: it is called outside a step, and there is no world.
      TypeError: `hook`, `plan` or `world` is not one, or a leaf of `grads` is neither
        an array nor a number.
    """
    base.check_hook(hook)
    buckets.check_plan(plan)
    axis_name = axes.find_outside(axis_name, world)
    is_bound = compat.is_bound(axis_name)
    here = mesh.find_current_world() if world is None else world
    # Outside of a step `grads` are whole, and beside manual axes a device has parts.
    has_parts = not is_bound and isinstance(here, World) and bool(here.manual_axes)
    given = jax.tree.map(_gradient_of, grads)
    avals = [] if has_parts else avals_of(buckets.fit_plan(plan, given))

    def make() -> PyTree:
        if not is_bound and not has_parts:
            return hook.init(avals)
        parts = given
        if has_parts and isinstance(here, World):
            parts = initial_state.parts_of_device(here, given)
        return _make_on_device(hook, plan, parts, axis_name)

    return initial_state.init_on_replicas(make, axis_name=axis_name, world=world)


def _make_on_device(
    hook: CommHook, plan: BucketPlan | None, grads: PyTree, axis_name: AxisName
) -> PyTree:
    """Makes the state of a hook, in a traced function, for gradients like `grads`.

    Along model axes, by JAX's types, the state varies as it will after a step.
    """
    plan = buckets.fit_plan(plan, grads)
    avals = avals_of(plan)
    state = hook.init(avals)
    own = types.as_axis_names(axis_name)
    free = [_model_axes(grads, bucket, own) for bucket in plan.buckets]
    if not any(free):
        return state
    zeros = [
        compat.cast_varying(jnp.zeros(aval.shape, aval.dtype), [*own, *sorted(names)])
        for aval, names in zip(avals, free, strict=True)
    ]
    while True:  # A part of the state may depend on another part.
        given = compat.cast_tree_varying(state, axis_name)
        _, after = hook.apply(zeros, given, base.Wire(axis_name))
        wanted = [
            compat.varying_axes(x).difference(own) for x in jax.tree.leaves(after)
        ]
        leaves, treedef = jax.tree.flatten(state)
        pairs = list(zip(leaves, wanted, strict=True))
        if all(names <= compat.varying_axes(x) for x, names in pairs):
            return state
        cast = [compat.cast_varying(x, sorted(names)) for x, names in pairs]
        state = jax.tree.unflatten(treedef, cast)


def _model_axes(
    grads: PyTree, bucket: Sequence[int], own: Sequence[str]
) -> frozenset[str]:
    """Returns the axes beside `own` over which the leaves of a bucket vary."""
    leaves = jax.tree.leaves(grads)
    found = [compat.varying_axes(x) for i in bucket if hasattr(x := leaves[i], "dtype")]
    return frozenset[str]().union(*found).difference(own)


def _gradient_of(leaf: Any) -> Any:
    """Returns a gradient like `leaf`, which is a gradient or a parameter."""
    if isinstance(leaf, bool | int | float | complex):
        dtype = jnp.result_type(leaf)
    elif hasattr(leaf, "dtype"):
        dtype = leaf.dtype
    else:
        return leaf  # No plan takes it, and the error names its path.
    if jnp.issubdtype(dtype, jnp.inexact):
        return leaf
    return np.zeros(jnp.shape(leaf), jax.dtypes.float0)


def avals_of(
    plan: BucketPlan, bucketed: Sequence[tuple[int, ...]] | None = None
) -> list[BucketAval]:
    """Returns the shapes and dtypes of the buckets that a hook gets.

    The sum of float16 gradients can overflow where their mean does not, so a hook gets
    them in float32.

    Args:
      plan: the plan.
      bucketed: the leaves that remain in each bucket; None: all.
    """
    avals = []
    for bucket in plan.buckets if bucketed is None else bucketed:
        dtype = plan.leaves[bucket[0]].dtype
        dtype = jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype
        avals.append(BucketAval([plan.leaves[i].shape for i in bucket], dtype))
    return avals
