"""Optimizer: optax transformations that synchronise gradients first."""

from typing import Any

import optax

from jdp import grad_sync
from jdp.buckets import BucketPlan
from jdp.grad_sync import Packing
from jdp.types import AllReduce, AxisName, PyTree


def distributed_optimizer(
    tx: optax.GradientTransformation,
    *,
    axis_name: AxisName = "data",
    plan: BucketPlan | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduce | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it steps on the average of all replicas' gradients.

    The state is the inner optimizer's own. `update` is called inside a traced function
    by every replica, with its local gradients (`jdp.local_gradients`).

    Args:
      tx: the optimizer.
      axis_name: see `sync_gradients`, as for the other options.
      plan: see `sync_gradients`.
      packing: see `sync_gradients`.
      all_reduce: see `sync_gradients`.

    Returns:
      An optax transformation; its `update` raises what `sync_gradients` raises.
    """
    inner = optax.with_extra_args_support(tx)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        grads = grad_sync.sync_gradients(
            updates,
            axis_name=axis_name,
            plan=plan,
            packing=packing,
            all_reduce=all_reduce,
        )
        return inner.update(grads, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)
