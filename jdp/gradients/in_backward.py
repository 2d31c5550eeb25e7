"""Sync in the backward pass: gradients of a layer, averaged once they are complete."""

from collections.abc import Collection
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jdp import compat, types
from jdp.backward import flow
from jdp.backward.loss import LossProgram
from jdp.compat import origins
from jdp.gradients import reduce, reduce_options, step_trace
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.trees import buckets
from jdp.trees.buckets import Packing
from jdp.types import AllReduceOption, AxisName, PyTree

_Leaves = list[jax.Array]
T = TypeVar("T")


def sync_in_backward(
    params: T,
    *,
    weight: jax.typing.ArrayLike | None = None,
    divide_by: DivideBy = "weight",
    axis_name: AxisName | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduceOption = "auto",
) -> T:
    """The identity; its backward pass averages the gradients over the replicas.

    For layers that are stacked and run by `lax.scan`: applied to the slice of one
    layer inside the loop, it starts communication with the last layer. Without it, the
    gradients of the whole stack leave the loop together, at its end.
    `jdp.value_and_grad` finds it in the loss and does not reduce these parameters
    again, unless they are used elsewhere too.

    Args:
      params: pytree of parameters, such as this layer's slice, or of values computed
        from parameters alone. No leaf may depend on a batch.
      weight: see `sync_gradients`, also for NaN and negative weights; the same as
        the `weight` of `jdp.value_and_grad`.
      divide_by: see `sync_gradients`, as for the other options.
      axis_name: see `sync_gradients`.
      packing: see `sync_gradients`.
      all_reduce: see `sync_gradients`.

    Returns:
      `params`. It raises what `sync_gradients` raises.
    """
    options = reduce_options.make_options(axis_name, None, packing, all_reduce).here()
    axis_name = options.axis_name
    compat.axis_size(axis_name)
    weighting = step_trace.current().resolve(weight, divide_by)
    # A list of leaves: JAX describes the fields of operands by text, which a class of
    # the user's may refuse.
    operands, treedef = jax.tree.flatten(params)
    varying = [frozenset(compat.varying_axes(x)) for x in operands]

    @jax.custom_vjp
    def identity(leaves: _Leaves, amount: jax.Array | None) -> _Leaves:
        return compat.cast_tree_varying(leaves, axis_name)

    def forward(leaves: _Leaves, amount: jax.Array | None) -> tuple[_Leaves, Any]:
        return identity(leaves, amount), amount

    def backward(amount: jax.Array | None, cotangents: _Leaves) -> tuple[_Leaves, Any]:
        tree = jax.tree.unflatten(treedef, cotangents)
        plan = buckets.default_plan(tree)
        here = None if weighting is None else weighting._replace(amount=amount)
        means = reduce.mean_over_replicas(
            tree, options._replace(plan=plan), weighting=here
        ).grads
        # The types of custom_vjp: a cotangent varies over the axes of its operand.
        leaves = [
            compat.cast_varying(x, sorted(axes))
            for x, axes in zip(jax.tree.leaves(means), varying, strict=True)
        ]
        return leaves, jax.tree.map(jnp.zeros_like, amount)

    def sync_in_backward(leaves: _Leaves, amount: jax.Array | None) -> _Leaves:
        return identity(leaves, amount)

    identity.defvjp(forward, backward)
    amount = None if weighting is None else weighting.amount
    # `flow` finds the `jit` in a jaxpr by its scope.
    with origins.bound_by(_marker_name(axis_name, weighting)):
        leaves = jax.jit(sync_in_backward)(operands, amount)
    return jax.tree.unflatten(treedef, leaves)


def check_markers(
    program: LossProgram, axis_name: AxisName, weighting: Weighting | None
) -> None:
    """Raises ValueError if the loss averages in another way than the rest."""
    expected = _marker_name(axis_name, weighting)
    others = sorted(program.markers - {expected})
    if others:
        raise ValueError(
            "The gradients and a `jdp.sync_in_backward` in the loss are averaged in "
            f"different ways: `{expected}` and `{others[0]}`. Pass the same "
            "`axis_name`, `weight` and `divide_by` to both."
        )


def uncast(params: PyTree, own: PyTree, synced: Collection[int]) -> PyTree:
    """Returns `own`, with the parameters that the loss synchronises as in `params`.

    Their gradients are the same on all replicas, so by JAX's types they must be, too.

    Args:
      params: the parameters.
      own: the parameters, cast to what may differ between the replicas.
      synced: leaf indices.
    """
    leaves, treedef = jax.tree.flatten(params)
    others = jax.tree.leaves(own)
    return jax.tree.unflatten(
        treedef, [x if i in synced else others[i] for i, x in enumerate(leaves)]
    )


def _marker_name(axis_name: AxisName, weighting: Weighting | None) -> str:
    by = None if weighting is None else weighting.divide_by
    return flow.marker_name(types.as_axis_names(axis_name), by)
