"""Replica program: how does the step of one replica become a program of all?

The step is traced once, without JAX's types for values that vary, so that `jax.grad`
inside it returns the gradient of one replica, as under `pmap`. Then `sameness` finds
which results are the same on all replicas. The new state must be the same; metrics
that differ are averaged.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdp import compat
from jdp.backward import flow
from jdp.collectives.shared_memory import ordered
from jdp.gradients import averaging, metric_objects, step_trace
from jdp.gradients.step_trace import StepTrace, StepWeighting
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.replicas import axes, per_replica
from jdp.replicas.mesh import World
from jdp.replicas.per_replica import Outline
from jdp.step import (
    call_arguments,
    sameness,
    sample_draws,
    spread_reasons,
    trivial_collectives,
)
from jdp.step.sameness import Spread
from jdp.types import PyTree

Step = Callable[..., tuple[PyTree, PyTree]]


class ProgramOptions(NamedTuple):
    """Options of turning a step into a program."""

    world: World
    # Inside a `jdp.Join`; then the first batch marks the replicas with data.
    divide_by: DivideBy | None
    is_proven: bool  # whether the program must prove that the new state is the same.


class Program:
    """Traced step of all replicas; the processes compare its text."""

    def __init__(self, step: Any, averaging: Any | None, outlines: "_StepOutlines"):
        """Use `trace_step`.

        Args:
          step: closed jaxpr: leaves of state and batches -> leaves of the new state,
            and the metrics of each replica.
          averaging: closed jaxpr: shared metrics of each replica -> their means; None
            if every metric is in a `jdp.PerReplica`.
          outlines: the results of the step.
        """
        self._step = step
        self._averaging = averaging
        self._state = outlines.state
        self._metrics = outlines.metrics

    def __str__(self) -> str:
        """Returns the text of both jaxprs."""
        return "\n".join(map(str, self.jaxprs))

    @property
    def jaxprs(self) -> list[Any]:
        """The closed jaxprs that run."""
        return [x for x in (self._step, self._averaging) if x is not None]

    def run(self, state: PyTree, batches: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """Returns the new state and the metrics of the step."""
        results = _run(self._step, jax.tree.leaves((state, batches)))
        leaves, (shared, own), amount = self.split(results)
        if self._averaging is not None:
            shared = _run(self._averaging, [*shared, *amount])
        metrics = per_replica.merge_leaves(self._metrics.are_own, shared, own)
        return self._state.unflatten(leaves), self._metrics.unflatten(metrics)

    def split(
        self, results: list[Any]
    ) -> tuple[list[Any], tuple[list[Any], list[Any]], list[Any]]:
        """Takes the results of the step apart.

        Returns:
          The leaves of the state; the leaves of the metrics with one row per replica,
          first the shared ones, then the ones in a `jdp.PerReplica`; and the weight of
          each replica, in a list that is empty if no weight was noted.
        """
        num_shared, first = self._state.num_shared, len(self._state.leaves)
        end = first + len(self._metrics.leaves)
        state = per_replica.merge_leaves(
            self._state.are_own, results[:num_shared], results[num_shared:first]
        )
        metrics: tuple[list[Any], list[Any]] = ([], [])
        for x, is_own in zip(results[first:end], self._metrics.are_own, strict=True):
            metrics[is_own].append(x)
        return state, metrics, results[end:]


def trace_step(
    step: Step,
    options: ProgramOptions,
    state: PyTree,
    batches: tuple[PyTree, ...],
    trace: StepTrace,
) -> Program:
    """Traces the step of one replica and checks its results.

    Args:
      step: see `jdp.data_parallel`.
      options: the options of the program.
      state: the state as it is outside of a step: arrays or `jax.ShapeDtypeStruct`s.
      batches: the batches of all replicas together.
      trace: collects the facts about the step.

    Raises:
      TypeError: a metric is not a number.
      ValueError: the new state differs between replicas, a metric has one row per
        sample, a collective is in control flow that replicas decide differently, or it
        is unclear which numbers of a draw belong to a replica.
    """
    world = options.world
    traced, outlines = _trace(step, options, state, batches, trace)
    if world.num_replicas == 1:
        if trace.needs_differing:
            spreads = _find_spreads(traced, outlines, world)
            trace.differing = [bool(spread.axes) for spread in spreads.metrics]
        traced = trivial_collectives.remove(traced, world.axis_names)
        return _make_program(traced, outlines, _find_weighed(outlines), world)

    def trace_other(batches: tuple[PyTree, ...]) -> Any:
        return _trace(step, options, state, batches, StepTrace())[0]

    traced = sample_draws.take_parts(traced, world, batches, trace_other)
    spreads = _find_spreads(traced, outlines, world)
    _check_state(traced, outlines, spreads, options, trace)
    trace.differing = differing = _check_metrics(outlines, spreads.metrics, world)
    return _make_program(traced, outlines, differing, world)


def _trace(
    step: Step,
    options: ProgramOptions,
    state: PyTree,
    batches: tuple[PyTree, ...],
    trace: StepTrace,
) -> tuple[Any, "_StepOutlines"]:
    """Returns the closed jaxpr of the step on all replicas, and its results."""
    world = options.world
    split = PartitionSpec(world.axis_names)
    traces: list[_StepOutlines] = []
    treedef = jax.tree.structure(state)

    def run(leaves: list[Any], *batches: PyTree) -> Any:
        state = per_replica.enter(jax.tree.unflatten(treedef, leaves))
        new_state, metrics, counts = _run_on_replica(
            step, options, state, batches, trace
        )
        trees = per_replica.outline(new_state), per_replica.outline(metrics)
        weighting = trace.weighting.noted
        trace.weighting = trace.weighting.without_arrays()
        traces.append(_StepOutlines(*trees, trace.weighting, counts))
        shared, own = per_replica.split_leaves(per_replica.leave(new_state))
        amounts = [] if weighting is None else [weighting.amount]
        raw = [*jax.tree.leaves(metrics), *amounts]
        return shared, own, [jnp.asarray(x)[None] for x in raw]

    mapped = jax.shard_map(
        run,
        mesh=world.mesh,
        in_specs=(
            per_replica.specs(state, world.axis_names),
            *call_arguments.specs(batches, world.axis_names),
        ),
        out_specs=(PartitionSpec(), split, split),
        check_vma=False,
    )
    traced = jax.make_jaxpr(mapped)(jax.tree.leaves(state), *batches)
    return traced, traces[-1]


class _StepOutlines(NamedTuple):
    """Results of the step of one replica, without the arrays of its trace."""

    state: Outline
    metrics: Outline
    weighting: StepWeighting
    sample_counts: frozenset[int]  # the lengths of this replica's batches.


class _ResultSpreads(NamedTuple):
    """Possible differences of the results between replicas."""

    state: list[Spread]  # per leaf that is not in a `jdp.PerReplica`.
    metrics: list[Spread]  # per leaf.


def _run(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    # Not `jaxpr_as_fun`, which leaves `jax_debug_nans` switched off.
    body, consts = flow.open_jaxpr(jaxpr)
    return jax.core.eval_jaxpr(body, consts, *operands)


def _run_on_replica(
    step: Step,
    options: ProgramOptions,
    state: PyTree,
    batches: tuple[PyTree, ...],
    trace: StepTrace,
) -> tuple[PyTree, PyTree, frozenset[int]]:
    """Returns the new state, the metrics, and the lengths of the batches."""
    ambient = None
    if options.divide_by is not None:
        ambient = Weighting(batches[0][0], options.divide_by)
        batches = batches[1:]
    try:
        axis_name = options.world.axis_name
        with (
            step_trace.running(trace, ambient),
            axes.inside_step(axis_name),
            ordered.tracing_body(),
        ):
            state, metrics = step(state, *batches)
            if metric_objects.has_metric_objects(metrics):
                metrics = metric_objects.merge_over_replicas(
                    metrics, axis_name, trace.weighting.of_metrics()
                )
    except NameError as error:
        if "axis name" in str(error):
            error.add_note(
                "The replicas of this step lie along the axis "
                f"{options.world.axis_name!r}. Pass this name to `lax.pmean` and other "
                "collectives, or choose another one with `jdp.init(axis_name=...)`."
            )
        raise
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        check_is_array(jax.tree_util.keystr(path) or "(root)", leaf)
    counts = frozenset(x.shape[0] for x in call_arguments.split_leaves(batches))
    return state, metrics, counts


def check_is_array(path: str, leaf: Any) -> None:
    """Raises TypeError for a metric that no program can return."""
    if isinstance(leaf, bool | int | float | complex | jax.Array):
        return
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufcV":
        return  # "V" is bfloat16 and narrower floats.
    if hasattr(leaf, "__jax_array__"):
        return
    raise TypeError(
        f"The metric `{path}` is {leaf!r}, of type {type(leaf).__name__}. Metrics must "
        "be numbers and arrays; keep text and other objects outside of the step."
    )


def _find_spreads(traced: Any, outlines: _StepOutlines, world: World) -> _ResultSpreads:
    body, inputs = compat.sharded_program(flow.open_jaxpr(traced)[0])
    spreads = sameness.find_spreads(body, inputs, world.axis_names)
    first = len(outlines.state.leaves)
    end = first + len(outlines.metrics.leaves)
    return _ResultSpreads(spreads[: outlines.state.num_shared], spreads[first:end])


def _check_state(
    traced: Any,
    outlines: _StepOutlines,
    spreads: _ResultSpreads,
    options: ProgramOptions,
    trace: StepTrace,
) -> None:
    """Raises ValueError if a shared leaf of the new state may differ."""
    flags = zip(outlines.state.paths, outlines.state.are_own, strict=True)
    paths = [path for path, is_own in flags if not is_own]
    refused = [
        i
        for i, spread in enumerate(spreads.state)
        if (spread.axes if options.is_proven else spread.is_local)
    ]
    if not refused:
        return
    first, others = refused[0], len(refused) - 1
    also = f", and so may {others} more" if others else ""
    spread = spreads.state[first]
    hint = ""
    if options.is_proven and not spread.is_local:
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
            spread, traced, first, options.world, has_synchronized=has_synchronized
        )
    raise ValueError(
        f"The new state's leaf `{paths[first]}` may differ between the replicas{also}: "
        f"{reason} If it is meant to differ, hold it in a `jdp.PerReplica`.{hint}"
    )


def _check_metrics(
    outlines: _StepOutlines, spreads: Sequence[Spread], world: World
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
        shape, dtype = jnp.shape(leaf), _dtype_of(leaf)
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


def _widen(x: jax.Array) -> jax.Array:
    """Returns numbers too narrow for JAX to average in float32; others as they are."""
    dtype = x.dtype
    is_float = jnp.issubdtype(dtype, jnp.floating)
    is_narrow = is_float and jnp.finfo(dtype).bits <= 8
    if jnp.issubdtype(dtype, jnp.integer):
        is_narrow = jnp.iinfo(dtype).bits < 8
    return x.astype(jnp.float32) if is_narrow else x


def _dtype_of(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.asarray(x).dtype


def _find_weighed(outlines: _StepOutlines) -> list[bool]:
    """Returns whether weight 0 of the only replica sets a metric to 0, per leaf."""
    is_weighed = outlines.weighting.noted is not None
    pairs = zip(outlines.metrics.leaves, outlines.metrics.are_own, strict=True)
    return [
        is_weighed and not own and jnp.issubdtype(_dtype_of(x), jnp.inexact)
        for x, own in pairs
    ]


def _make_program(
    traced: Any, outlines: _StepOutlines, differing: list[bool], world: World
) -> Program:
    """Adds a jaxpr that averages the metrics whose leaves are `differing`."""
    program = Program(traced, None, outlines)
    own = outlines.metrics.are_own
    if all(own):
        return program
    weighting = outlines.weighting.of_metrics() if any(differing) else None
    chosen = [d for d, is_own in zip(differing, own, strict=True) if not is_own]

    def average(metrics: list[jax.Array], amount: list[jax.Array]) -> list[jax.Array]:
        leaves = [x[0] for x in metrics]
        here = None
        if weighting is not None:
            here = weighting._replace(amount=amount[0][0])
        local = {i: _widen(leaves[i]) for i, differs in enumerate(chosen) if differs}
        means = averaging.average_weighted(local, world.axis_name, lambda: here)
        return [means.get(i, x) for i, x in enumerate(leaves)]

    mapped = jax.shard_map(
        average,
        mesh=world.mesh,
        in_specs=PartitionSpec(world.axis_names),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in traced.out_avals]
    _, (shared, _), amount = program.split(avals)
    average_program = jax.make_jaxpr(mapped)(shared, amount)
    if world.num_replicas == 1:
        average_program = trivial_collectives.remove(average_program, world.axis_names)
    return Program(traced, average_program, outlines)
