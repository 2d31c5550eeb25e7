"""State: the state of a hook before the first step, of all replicas."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.hooks.base import CommHook
from jdp.replicas import initial_state
from jdp.replicas.mesh import World
from jdp.trees import buckets
from jdp.trees.buckets import BucketAval, BucketPlan
from jdp.types import AxisName, PyTree


def init_state(
    hook: CommHook,
    grads: PyTree,
    *,
    plan: BucketPlan | None = None,
    axis_name: AxisName = "data",
    world: World | None = None,
) -> PyTree:
    """Makes the state of a hook, to be kept in the train state.

    It knows leaves by their place and their shapes, not by their names: make it anew
    where parameters are added, removed, renamed or reordered.

    Inside of a step it is that of one replica. Outside, every process calls it, and its
    `jdp.PerReplica` parts are split over the replicas.

    Args:
      hook: the hook.
      grads: pytree like the gradients, which is one like the parameters; values are not
        read. Integers and PRNG keys stand for gradients of dtype float0.
      plan: which gradients travel together, the same as that of the step; None:
        `jdp.plan_buckets(grads)`, as the step has it without a plan.
      axis_name: the axis, or axes, over which replicas lie.
      world: the replicas; None: what `jdp.init` made.

    Returns:
      The state; `()` of a hook without one.

    Raises:
      RuntimeError: outside of a step, without a world.
    """
    plan = buckets.fit_plan(plan, jax.tree.map(_gradient_of, grads))
    avals = avals_of(plan)
    return initial_state.init_on_replicas(
        lambda: hook.init(avals), axis_name=axis_name, world=world
    )


def _gradient_of(leaf: Any) -> Any:
    """A gradient may stand for itself, a parameter for its gradient."""
    dtype = jnp.result_type(leaf) if not hasattr(leaf, "dtype") else leaf.dtype
    if jnp.issubdtype(dtype, jnp.inexact):
        return leaf
    return np.zeros(jnp.shape(leaf), jax.dtypes.float0)


def avals_of(
    plan: BucketPlan, bucketed: Sequence[tuple[int, ...]] | None = None
) -> list[BucketAval]:
    """Returns the buckets as a hook gets them.

    The sum of float16 gradients overflows where their mean does not, so a hook gets
    them in float32.

    Args:
      plan: the plan.
      bucketed: the leaves that are left in its buckets; None: all.
    """
    avals = []
    for bucket in plan.buckets if bucketed is None else bucketed:
        dtype = plan.leaves[bucket[0]].dtype
        dtype = jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype
        avals.append(BucketAval([plan.leaves[i].shape for i in bucket], dtype))
    return avals
