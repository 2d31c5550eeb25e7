"""State: the state of a hook before the first step, on all replicas."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jdp.hooks import base
from jdp.hooks.base import CommHook
from jdp.replicas import initial_state
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
    plan = buckets.fit_plan(plan, jax.tree.map(_gradient_of, grads))
    avals = avals_of(plan)
    return initial_state.init_on_replicas(
        lambda: hook.init(avals), axis_name=axis_name, world=world
    )


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
