"""Differentiation: the loss of one replica, run forwards and backwards."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jdp import layer_sync, mesh, recording, reduction, weights
from jdp.backward.loss import LossProgram, trace_loss
from jdp.recording import LossFacts
from jdp.types import AxisName, PyTree
from jdp.weights import Weighting


class Local(NamedTuple):
    """What one replica has after its backward pass."""

    loss: jax.Array
    aux: PyTree
    grads: PyTree
    used: PyTree | None  # with `find_unused`.
    facts: LossFacts
    is_weighed: bool = False  # whether gradients are times what the replica counts.


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
    own = reduction.cast_varying(params, axis_name)
    trace = functools.partial(
        trace_loss,
        loss_fn,
        args=args,
        kwargs=kwargs,
        has_aux=has_aux,
        allow_int=allow_int,
    )
    program = trace(own)
    layer_sync.check_markers(program, axis_name, weighting)
    if program.synced_in_backward and mesh.tracked_axes(axis_name):
        # What is reduced in the backward pass comes out the same on all replicas, so
        # that by JAX's types it must go in the same on all replicas.
        own = _only_cast_others(params, own, program.synced_in_backward)
        program = trace(own)

    def run(params: PyTree) -> tuple[jax.Array, Any]:
        if find_unused:
            loss, aux, used = program.evaluate_marked(params)
        else:
            loss, aux, used = *program.evaluate(params), None
        # A loss that `loss_fn` averaged over the replicas itself counts on each.
        loss = reduction.cast_varying(loss, axis_name)
        objective = loss
        if is_weighed:
            assert weighting is not None
            objective = weights.weigh(loss, weighting)
        return objective, (loss, aux, used)

    # To multiply the loss costs nothing, to multiply all gradients a fifth of a step on
    # CPU. What is reduced in the backward pass is weighed there.
    is_weighed = (
        weighting is not None
        and weighting.divide_by == "weight"
        and not reduction.is_alone(axis_name)
        and not program.markers
        # Through statistics of all samples, a loss reaches other replicas' gradients.
        and (program.is_scalable or bool(program.synced_batch_norms))
    )
    grad_fn = jax.value_and_grad(run, has_aux=True, allow_int=allow_int)
    (_, (loss, aux, used)), grads = grad_fn(own)
    facts = dataclasses.replace(facts_of(program), finds_unused=find_unused)
    recording.add_loss(facts)
    return Local(loss, aux, grads, used, facts, is_weighed)


def facts_of(program: LossProgram) -> LossFacts:
    """Returns what the program of a loss tells."""
    return LossFacts(
        tuple(program.paths),
        program.timeline,
        program.never_used,
        program.undecided,
        program.synced_in_backward,
        program.batch_norms,
        program.synced_batch_norms,
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
