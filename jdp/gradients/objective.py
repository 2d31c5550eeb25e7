"""Objective: the mean loss, as a function that optimizers differentiate."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jdp import compat, types
from jdp.backward.loss import LossProgram, trace_loss
from jdp.compat import annotations
from jdp.compat.cotangents import Transpose, scale, with_transpose
from jdp.gradients import (
    averaging,
    differentiation,
    reduce,
    reduce_options,
    step_trace,
    weighted_mean,
)
from jdp.gradients.reduce import ReduceOptions
from jdp.gradients.step_facts import LossFacts
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.trees import buckets, tree_paths
from jdp.trees.buckets import BucketPlan, Packing
from jdp.types import AllReduceOption, AxisName, PyTree

P = ParamSpec("P")


def mean_loss(
    loss_fn: Callable[P, jax.typing.ArrayLike],
    argnums: int | Sequence[int] = 0,
    *,
    weight: jax.typing.ArrayLike | None = None,
    divide_by: DivideBy = "weight",
    axis_name: AxisName | None = None,
    plan: BucketPlan | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduceOption = "auto",
) -> Callable[P, jax.Array]:
    """Makes a loss the mean over the replicas, also where it is differentiated.

    For optimizers that call and differentiate a loss themselves: the `value_fn` of a
    line search and of `optax.lbfgs`, the `obj_fn` of Sophia, the `grad_fn` of
    `optax.contrib.sam`.

        mean = jdp.mean_loss(loss_fn)
        value_fn = lambda params: mean(params, batch)
        value, grads = jax.value_and_grad(value_fn)(params)
        updates, state = tx.update(
            grads, state, params, value=value, grad=grads, value_fn=value_fn
        )

    `jax.grad` of `jdp.average(loss_fn(params, batch))` is the gradient of one replica
    instead, as with `lax.pmean`. Here the parameters pass through an identity whose
    backward pass averages, bucket by bucket, in the order of the backward pass. All
    derivatives are derivatives of the mean: `jax.grad`, `jax.jvp`, compositions of
    both, and under `vmap`, `scan`, `while_loop` and `cond`. A `custom_vjp` rule that is
    not linear gets the cotangent of the mean: multiplied by the weight of the replica
    over the mean weight, or, in a loss of float16, over the largest weight, so that it
    does not overflow.

    Called inside a traced function, by every replica the same number of times.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns a scalar loss over this
        replica's samples.
      argnums: which positional argument holds the parameters, as in
        `jax.value_and_grad`; or which arguments. They must be the same on all replicas.
        Derivatives with respect to other arguments are of this replica alone.
      weight: how many samples this replica has; see `sync_gradients`. The value of a
        replica without data does not count, nor does its gradient, whatever they are;
        without any data both are zero. A weight of NaN or below zero makes both NaN;
        a negative constant is refused. Metrics of the step do not get it.
      divide_by: see `average`.
      axis_name: see `sync_gradients`, as for the other options.
      plan: see `sync_gradients`; by default one in `gradient_order`.
      packing: see `sync_gradients`.
      all_reduce: see `sync_gradients`; second derivatives need an `all_reduce` that
        JAX can differentiate, as "auto" is.

    Returns:
      A function of the same arguments that returns the mean, a scalar of the dtype of
      the loss, the same on all replicas. It raises what `value_and_grad` raises, and
      ValueError where a parameter may differ between the replicas.
    """
    differentiation.check_loss(loss_fn)
    options = reduce_options.make_options(axis_name, plan, packing, all_reduce)

    @functools.wraps(loss_fn)
    def mean(*args: Any, **kwargs: Any) -> jax.Array:
        here = options.here()
        axis_name = here.axis_name
        compat.axis_size(axis_name)
        of_params, params, rest = differentiation.pick_params(loss_fn, argnums, args)
        weighting = step_trace.current().resolve(weight, divide_by)
        params = _check_same(params, axis_name)
        own = compat.cast_tree_varying(params, axis_name)
        program = trace_loss(of_params, own, rest, kwargs)
        _check_no_markers(program, weighting)
        if not compat.is_alone(axis_name):
            facts = step_trace.facts_of(program, axis_name)
            if facts.has_exchanges and weighting is not None:
                names = types.as_axis_names(axis_name)
                has_data = weighted_mean.has_data(weighting.amount)
                program = program.gated(own, has_data, names)
            peak = None
            if weighting is not None and program.has_narrow_range:
                peak = _find_peak(params, weighting, axis_name)
            own = _averaged_in_backward(params, own, facts, here, weighting, peak)
            loss = compat.cast_tree_varying(program.evaluate(own)[0], axis_name)
            wide = loss if peak is None else _divided_in_backward(loss, peak)
            mean = averaging.average_weighted(wide, axis_name, lambda: weighting)
            return mean.astype(loss.dtype)
        loss, _ = program.evaluate(own)
        return averaging.average_weighted(loss, axis_name, lambda: weighting)

    return mean


def _find_peak(
    params: PyTree, weighting: Weighting, axis_name: AxisName
) -> jax.Array | None:
    """Returns the largest factor of a cotangent, float32 (): n times its share.

    In float16 cotangents with that factor would overflow where the mean does not. So
    they are divided by it in the backward pass, and their mean is multiplied by it.
    None where JAX itself sums gradients, by types: there factors are at most 1.
    """
    tracked = compat.tracked_axes(axis_name)
    if not all(tracked <= compat.varying_axes(x) for x in jax.tree.leaves(params)):
        return None
    amount = compat.cast_tree_varying(weighting.amount, axis_name)
    totals = weighted_mean.sum_over_replicas(amount, axis_name)
    share = weighted_mean.ratio(totals.largest, totals.amount, jnp.float32)
    share = jnp.where(share == 0, jnp.ones_like(share), share)
    return share * compat.axis_size(axis_name)


def _divided_in_backward(loss: jax.Array, peak: jax.Array) -> jax.Array:
    """Returns a loss in float32 or wider, whose cotangent is divided by `peak`."""
    wide = loss.astype(weighted_mean.wide_dtype(loss.dtype))
    return scale(wide, 1 / peak, in_backward=True)


def _averaged_in_backward(
    params: PyTree,
    own: PyTree,
    facts: LossFacts,
    options: ReduceOptions,
    weighting: Weighting | None,
    peak: jax.Array | None,
) -> PyTree:
    """Returns `own`, whose cotangents are averaged in the backward pass.

    The mean of the losses gives each replica its weight. Each cotangent is multiplied
    by the number of replicas, so that the plain mean of the cotangents is right; and by
    `peak` if it was divided by that.
    """
    leaves, treedef = jax.tree.flatten(own)
    tracked = compat.tracked_axes(options.axis_name)
    # JAX itself sums the gradients of parameters that are the same by type.
    places = [
        i
        for i, x in enumerate(jax.tree.leaves(params))
        if tracked <= compat.varying_axes(x)
    ]
    divide_by = None if weighting is None else weighting.divide_by
    avals = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]

    # It outlives the trace, so it must not hold arrays of the trace.
    def transpose(
        cotangents: list[jax.Array | None], *peaks: jax.Array
    ) -> list[jax.Array]:
        given = dict(zip(places, cotangents, strict=True))
        missing = [i for i in range(len(avals)) if given.get(i) is None]
        zeros = {i: jnp.zeros(avals[i].shape, avals[i].dtype) for i in missing}
        whole = [zeros[i] if i in zeros else given[i] for i in range(len(avals))]
        tree = compat.cast_tree_varying(
            jax.tree.unflatten(treedef, whole), options.axis_name
        )
        plan = buckets.fit_plan(options.plan, tree, facts.timeline.order())
        for peak in peaks:
            tree, plan = _scaled(tree, peak), _widened(plan)
        planned = options._replace(plan=plan)
        means = reduce.mean_over_replicas(tree, planned, done=missing).grads
        step_trace.current().add_synchronization(planned, divide_by, (), facts, missing)
        found = jax.tree.leaves(compat.cast_tree_varying(means, options.axis_name))
        return [found[i].astype(avals[i].dtype) for i in places]

    found = with_transpose(
        [jnp.asarray(leaves[i]) for i in places],
        Transpose("mean_over_replicas", transpose),
        [] if peak is None else [peak],
    )
    for i, x in zip(places, found, strict=True):
        leaves[i] = x
    if weighting is not None:  # The cotangent may be NaN where there is no data.
        has_data = weighted_mean.has_data(weighting.amount)
        leaves = [_without_gradient_unless(has_data, x) for x in leaves]
    return jax.tree.unflatten(treedef, leaves)


def _scaled(tree: PyTree, peak: jax.Array) -> PyTree:
    """Returns cotangents times `peak`, in float32 or wider."""
    wide = jax.tree.map(lambda x: x.astype(weighted_mean.wide_dtype(x.dtype)), tree)
    return jax.tree.map(lambda x: scale(x, peak), wide)


def _widened(plan: BucketPlan) -> BucketPlan:
    leaves = [
        dataclasses.replace(x, dtype=weighted_mean.wide_dtype(x.dtype))
        for x in plan.leaves
    ]
    return dataclasses.replace(plan, leaves=tuple(leaves))


def _without_gradient_unless(has_data: jax.Array, x: jax.Array) -> jax.Array:
    chosen = jnp.broadcast_to(has_data, jnp.shape(x))
    return lax.select(chosen, x, lax.stop_gradient(x))


def _check_same(params: PyTree, axis_name: AxisName) -> PyTree:
    """Returns parameters that must be the same on all replicas."""
    if compat.tracked_axes(axis_name):
        return params  # They may have been cast to varying ones.
    names = types.as_axis_names(axis_name)
    paths = tree_paths.leaf_paths(params)
    leaves, treedef = jax.tree.flatten(params)
    for i, x in enumerate(leaves):
        if isinstance(x, jax.core.Tracer):
            leaves[i] = annotations.expect_same(x, names, _message(paths[i], axis_name))
    return jax.tree.unflatten(treedef, leaves)


def _message(path: str, axis_name: AxisName) -> str:
    return (
        f"The parameter `{path}` of a `jdp.mean_loss` may differ between the replicas "
        f"of {axis_name!r}, so that there is no one point at which to take the mean of "
        "their losses. Give an optimizer that calls it averaged gradients, such as "
        "the gradients of `jax.value_and_grad` of the same function."
    )


def _check_no_markers(program: LossProgram, weighting: Weighting | None) -> None:
    if weighting is not None and program.markers:
        raise ValueError(
            "`jdp.mean_loss` weights the losses, and the `jdp.sync_in_backward` in "
            "`loss_fn` would weight their gradients again. Leave it out of this loss."
        )
