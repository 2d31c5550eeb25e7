"""Differentiation: the loss of one replica, run forwards and backwards."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp.backward import exchange
from jdp.backward.loss import LossProgram, is_of_synced_batch_norm, trace_loss
from jdp.gradients import in_backward, reduce, step_trace, weighted_mean
from jdp.gradients.step_trace import LossFacts
from jdp.gradients.weighted_mean import Totals, Weighting
from jdp.replicas import mesh
from jdp.types import AxisName, PyTree


class Local(NamedTuple):
    """Results of the backward pass of one replica."""

    loss: jax.Array
    aux: PyTree
    grads: PyTree
    used: PyTree | None  # with `find_unused`.
    facts: LossFacts
    seed: "Seed | None" = None  # what the loss was weighed by; None: by nothing.


class Seed(NamedTuple):
    """Factor that a loss was multiplied with before its backward pass, to weigh it."""

    factor: jax.Array  # floating (): the cotangent that the loss got.
    # None where `factor` is the weight of the replica; else it is that over the largest
    # weight of a replica.
    totals: Totals | None = None
    # The divisor of the sum of the gradients; None: the total weight.
    divisor: jax.Array | None = None


def differentiate(
    loss_fn: Callable[..., Any],
    params: PyTree,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    axis_name: AxisName,
    has_aux: bool,
    find_unused: bool,
    weighting: Weighting | None = None,
    *,
    allow_int: bool = False,
) -> Local:
    """Traces the loss once, and runs it forwards and backwards."""
    mesh.axis_size(axis_name)
    own = reduce.cast_varying(params, axis_name)
    trace = functools.partial(
        trace_loss,
        loss_fn,
        args=args,
        kwargs=kwargs,
        has_aux=has_aux,
        allow_int=allow_int,
    )
    program = trace(own)
    in_backward.check_markers(program, axis_name, weighting)
    if program.synced_in_backward and mesh.tracked_axes(axis_name):
        # What is reduced in the backward pass comes out the same on all replicas, so
        # that by JAX's types it must go in the same on all replicas.
        own = _only_cast_others(params, own, program.synced_in_backward)
        program = trace(own)

    facts = dataclasses.replace(facts_of(program, axis_name), finds_unused=find_unused)
    factor, seed = _find_seed(program, facts, weighting, axis_name)
    if facts.has_exchanges and factor is not None:
        names = mesh.as_axis_names(axis_name)
        program = program.gated(own, weighted_mean.has_data(factor), names)

    def run(params: PyTree) -> tuple[jax.Array, Any]:
        if find_unused:
            loss, aux, used = program.evaluate_marked(params)
        else:
            loss, aux, used = *program.evaluate(params), None
        # A loss that `loss_fn` averaged over the replicas itself counts on each.
        loss = reduce.cast_varying(loss, axis_name)
        objective = loss
        if factor is not None:
            # Only its cotangent matters, which has the factor in the dtype of the loss.
            wide = weighted_mean.wide_dtype(loss.dtype)
            objective = loss.astype(wide) * factor.astype(wide)
        return objective, (loss, aux, used)

    grad_fn = jax.value_and_grad(run, has_aux=True, allow_int=allow_int)
    (_, (loss, aux, used)), grads = grad_fn(own)
    step_trace.add_loss(facts)
    return Local(loss, aux, grads, used, facts, seed)


def _find_seed(
    program: LossProgram,
    facts: LossFacts,
    weighting: Weighting | None,
    axis_name: AxisName,
) -> tuple[jax.Array | None, Seed | None]:
    """Returns what the loss is multiplied by, None for 1, and if that weighs it.

    To multiply the loss costs nothing, to multiply all gradients a fifth of a step on
    CPU. But where the backward pass is not linear, or ends its range before float32
    does, or reduces by itself, gradients are weighed afterwards.

    Not so where gradients go through a collective: what comes of it belongs to the
    losses of several replicas. There each loss is multiplied by its weight over the
    largest weight, which is exactly 1 where all that have data count the same. It is
    never more, so that nothing overflows that would not without weights; the rest of
    the mean is divided by after the sum, in float32 or wider.
    """
    # Gradients that stay local are weighed later, but a `jdp.Join` knows who has data.
    known = weighting or weighted_mean.resolve(None, "weight")
    if known is None or reduce.is_alone(axis_name):
        return None, None
    amount = reduce.cast_varying(known.amount, axis_name)
    if facts.has_exchanges:
        is_binary = known.divide_by != "weight" or weighted_mean.is_ambient(known)
        if is_binary or program.markers:
            return jnp.sign(amount), None
        totals = weighted_mean.sum_over_replicas(amount, axis_name)
        return seed_of(amount, totals, program.jaxpr.out_avals[0].dtype)
    if weighting is None or weighting.divide_by != "weight" or program.markers:
        return None, None
    if not program.is_scalable or program.has_custom_backward:
        return None, None
    return amount, Seed(amount)


def seed_of(amount: jax.Array, totals: Totals, dtype: Any) -> tuple[jax.Array, Seed]:
    """Returns the share of the largest weight that a replica counts, and the seed.

    Both are in `dtype`, that of the loss, or in float32 if it is narrower.
    """
    factor = weighted_mean.ratio(amount, totals.largest, dtype)
    divisor = weighted_mean.ratio(totals.amount, totals.largest, dtype)
    return factor, Seed(factor, totals, divisor)


def facts_of(program: LossProgram, axis_name: AxisName = "data") -> LossFacts:
    """Returns what the program of a loss tells."""
    exchanges = program.exchanges(mesh.as_axis_names(axis_name))
    synced = [eqn for eqn in exchanges if is_of_synced_batch_norm(eqn)]
    others = [eqn for eqn in exchanges if not is_of_synced_batch_norm(eqn)]
    return LossFacts(
        program.paths,
        program.timeline,
        program.never_used,
        program.undecided,
        program.synced_in_backward,
        program.batch_norms,
        tuple(dict.fromkeys(str(eqn.source_info.name_stack) for eqn in synced)),
        tuple(dict.fromkeys(map(exchange.describe, others))),
        bool(exchanges),
    )


def check_is_local(local: Local, name: str) -> None:
    """Raises ValueError if the backward pass reduced gradients already."""
    facts = local.facts
    if facts.synced_in_backward:
        raise ValueError(
            f"`{name}` keeps gradients local, but the loss reduces that of "
            f"`{facts.paths[facts.synced_in_backward[0]]}` in the backward pass "
            "(`jdp.sync_in_backward`). Use `jdp.value_and_grad`, or leave that out."
        )


def _only_cast_others(params: PyTree, cast: PyTree, kept: Sequence[int]) -> PyTree:
    leaves, treedef = jax.tree.flatten(params)
    others = jax.tree.leaves(cast)
    return jax.tree.unflatten(
        treedef, [x if i in kept else others[i] for i, x in enumerate(leaves)]
    )
