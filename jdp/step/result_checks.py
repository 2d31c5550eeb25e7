"""Result checks: is the new state the same on all replicas, and have metrics means?"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jdp import compat
from jdp.backward import flow
from jdp.gradients.step_trace import StepTrace, StepWeighting
from jdp.replicas.mesh import World
from jdp.replicas.per_replica import Outline
from jdp.step import sameness, spread_reasons
from jdp.step.sameness import Spread
from jdp.step.state_layouts import Layouts


class StepOutlines(NamedTuple):
    """Results of the step of one replica, without the arrays of its trace."""

    state: Outline
    metrics: Outline
    weighting: StepWeighting
    sample_counts: frozenset[int]  # lengths of batches, which metrics must not have.
    layouts: Layouts = None  # of the new state.


class ResultSpreads(NamedTuple):
    """Possible differences of the results between replicas."""

    state: list[Spread]  # per leaf that is not in a `jdp.PerReplica`.
    metrics: list[Spread]  # per leaf.


def find_spreads(traced: Any, outlines: StepOutlines, world: World) -> ResultSpreads:
    """Follows the results of a step of all replicas."""
    body, inputs = compat.sharded_program(flow.open_jaxpr(traced)[0])
    spreads = sameness.find_spreads(body, inputs, world.axis_names)
    first = len(outlines.state.leaves)
    end = first + len(outlines.metrics.leaves)
    return ResultSpreads(spreads[: outlines.state.num_shared], spreads[first:end])


def check_state(
    traced: Any,
    outlines: StepOutlines,
    spreads: ResultSpreads,
    world: World,
    trace: StepTrace,
    *,
    is_proven: bool,
) -> None:
    """Raises ValueError if a shared leaf of the new state may differ.

    Args:
      traced: the closed jaxpr of the step.
      outlines: the results of the step.
      spreads: their possible differences.
      world: the replicas.
      trace: the facts about the step.
      is_proven: whether the program must prove that the leaves are the same.
    """
    flags = zip(outlines.state.paths, outlines.state.are_own, strict=True)
    paths = [path for path, is_own in flags if not is_own]
    refused = [
        i
        for i, spread in enumerate(spreads.state)
        if (spread.axes if is_proven else spread.is_local)
    ]
    if not refused:
        return
    first, others = refused[0], len(refused) - 1
    also = f", and so may {others} more" if others else ""
    begin = f"The new state's leaf `{paths[first]}` may differ between the replicas"
    for name, remedy in trace.remedies.items():
        if paths[first].startswith(f"[{name!r}]"):
            raise ValueError(f"{begin}{also}: {remedy}")
    spread = spreads.state[first]
    hint = ""
    if is_proven and not spread.is_local:
        hint = (
            " If it is equal for a reason that the program does not show, such as your "
            "own all-reduce, pass `check_vma=False`."
        )
    if ".acc_grads" in paths[first]:
        reason = (
            "`optax.MultiSteps` adds up gradients that are not averaged yet. Average "
            "them before it, with `jdp.value_and_grad`, or wrap it in the function "
            "that averages: `jdp.distributed_optimizer(optax.MultiSteps(tx, k))`, or "
            "likewise `jdp.zero1`."
        )
    else:
        has_synchronized = bool(trace.synchronizations)
        reason = spread_reasons.explain(
            spread, traced, first, world, has_synchronized=has_synchronized
        )
    raise ValueError(
        f"{begin}{also}: {reason} If it is meant to differ, hold it in a "
        f"`jdp.PerReplica`.{hint}"
    )


def check_metrics(
    outlines: StepOutlines, spreads: Sequence[Spread], world: World
) -> list[bool]:
    """Returns whether to average the metric, per leaf.

    Raises:
      TypeError: a leaf that differs has no mean.
      ValueError: a leaf that differs has one row per sample.
    """
    differing = []
    tree = outlines.metrics
    for path, leaf, spread, is_own in zip(
        tree.paths, tree.leaves, spreads, tree.are_own, strict=True
    ):
        differing.append(bool(spread.axes) and not is_own)
        if not differing[-1]:
            continue
        shape, dtype = jnp.shape(leaf), dtype_of(leaf)
        if not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
            raise TypeError(
                f"The metric `{path}` differs between the replicas and is {dtype}, "
                "which has no mean. Return a value that is the same on all replicas, "
                "or return one value per replica, in a `jdp.PerReplica`."
            )
        if shape and shape[0] in outlines.sample_counts:
            raise ValueError(
                f"The metric `{path}`, {dtype}{list(shape)}, seems to have a row per "
                "sample of a replica. The mean over replicas would mix rows of "
                "different samples. Return `jdp.PerReplica(x)` to get the rows of "
                "each replica, return a mean over the samples, or, if the mix is "
                f"intended, return `jdp.average(x, axis_name={world.axis_name!r})`."
            )
    return differing


def dtype_of(x: Any) -> Any:
    """Returns the dtype of an array or a number."""
    return x.dtype if hasattr(x, "dtype") else jnp.asarray(x).dtype


def find_weighed(outlines: StepOutlines) -> list[bool]:
    """Returns whether weight 0 of the only replica sets a metric to 0, per leaf."""
    is_weighed = outlines.weighting.noted is not None
    pairs = zip(outlines.metrics.leaves, outlines.metrics.are_own, strict=True)
    return [
        is_weighed and not own and jnp.issubdtype(dtype_of(x), jnp.inexact)
        for x, own in pairs
    ]
