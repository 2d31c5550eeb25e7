"""Replica program: how does the step of one replica become a program of all?

The step is traced once, without JAX's types for values that vary, so that `jax.grad`
inside it returns the gradient of one replica, as under `pmap`. Then `sameness` finds
which results are the same on all replicas. The new state must be the same; metrics
that differ are averaged.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdp import compat
from jdp.backward import flow
from jdp.collectives.host import ordered, program_order
from jdp.gradients import averaging, metric_objects, step_trace
from jdp.gradients.step_trace import StepTrace
from jdp.gradients.watched_values import WatchedValues
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.replicas import axes, device_program, layouts, per_replica
from jdp.replicas.mesh import World
from jdp.step import (
    call_arguments,
    manual_results,
    result_checks,
    sample_draws,
    state_layouts,
    trivial_collectives,
    watch_answers,
)
from jdp.step.result_checks import StepOutlines
from jdp.step.state_layouts import Layouts
from jdp.types import PyTree

Step = Callable[..., tuple[PyTree, PyTree]]


class ProgramOptions(NamedTuple):
    """Options of turning a step into a program."""

    world: World
    # Inside a `jdp.Join`; then the first batch marks the replicas with data.
    divide_by: DivideBy | None
    is_proven: bool  # whether the program must prove that the new state is the same.
    layouts: Layouts = None  # of the state.


class Program:
    """Traced step of all replicas; the processes compare its text."""

    def __init__(
        self,
        world: World,
        step: Any,
        averaging: Any | None,
        outlines: "StepOutlines",
    ):
        """Use `trace_step`.

        Args:
          world: the replicas.
          step: closed jaxpr: leaves of state and batches -> leaves of the new state,
            and the metrics of each replica.
          averaging: closed jaxpr: shared metrics of each replica -> their means; None
            if every metric is in a `jdp.PerReplica`.
          outlines: the results of the step.
        """
        self._world = world
        self._step = step
        self._averaging = averaging
        self._state = outlines.state
        self._metrics = outlines.metrics
        self.layouts = outlines.layouts  # of the new state.

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
        leaves = state_layouts.pin(self._world, leaves, self.layouts)
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
            spreads = result_checks.find_spreads(traced, outlines, world)
            trace.differing = [bool(spread.axes) for spread in spreads.metrics]
        differing = result_checks.find_weighed(outlines)
        traced = trivial_collectives.remove(traced, world.axis_names)
        return _make_program(traced, outlines, differing, world)

    @functools.cache
    def trace_wide() -> tuple[Any, WatchedValues]:
        def run(batches: tuple[PyTree, ...]) -> tuple[Any, WatchedValues]:
            wide = StepTrace()
            return _trace(step, options, state, batches, wide)[0], wide.watched

        return sample_draws.trace_wide(world, batches, run)

    def take_parts(traced: Any) -> Any:
        return sample_draws.take_parts(traced, world, batches, lambda: trace_wide()[0])

    if trace.watched.shapes:
        answers = watch_answers.find(
            traced,
            take_parts,
            world,
            trace.watched,
            outlines.sample_counts,
            lambda: trace_wide()[1],
        )
        trace.restart(answers)
        traced, outlines = _trace(step, options, state, batches, trace)
    traced = take_parts(traced)
    spreads = result_checks.find_spreads(traced, outlines, world)
    result_checks.check_state(
        traced, outlines, spreads, world, trace, is_proven=options.is_proven
    )
    differing = result_checks.check_metrics(outlines, spreads.metrics, world)
    trace.differing = differing
    traced = _keep_order(traced, outlines, differing, world)
    return _make_program(traced, outlines, differing, world)


def _keep_order(
    traced: Any, outlines: StepOutlines, differing: list[bool], world: World
) -> Any:
    """Returns a program whose collectives run in one order; metrics come last."""
    is_alone = world.process_count == 1 or world.num_shards is not None
    if is_alone or world.manual_axes:
        return traced
    first = len(outlines.state.leaves)
    pairs = zip(differing, outlines.metrics.are_own, strict=True)
    averaged = [first + i for i, (differs, own) in enumerate(pairs) if differs > own]
    if averaged:  # The weight of the replica comes after the metrics.
        averaged += range(first + len(differing), len(traced.out_avals))
    return program_order.keep(traced, world, averaged)


def _trace(
    step: Step,
    options: ProgramOptions,
    state: PyTree,
    batches: tuple[PyTree, ...],
    trace: StepTrace,
) -> tuple[Any, StepOutlines]:
    """Returns the closed jaxpr of the step on all replicas, and its results."""
    world = options.world
    traces: list[StepOutlines] = []
    treedef = jax.tree.structure(state)
    trace.model_axes = world.manual_axes

    def run(leaves: list[Any], *batches: PyTree) -> Any:
        if world.manual_axes:  # Derivatives are of one replica, as elsewhere.
            leaves = compat.cast_tree_varying(leaves, world.axis_name)
        state = per_replica.enter(jax.tree.unflatten(treedef, leaves))
        before = per_replica.outline(state)
        new_state, metrics, counts = _run_on_replica(
            step, options, state, batches, trace
        )
        trees = per_replica.outline(new_state), per_replica.outline(metrics)
        weighting = trace.weighting.noted
        trace.weighting = trace.weighting.without_arrays()
        found = state_layouts.after(world, before, options.layouts, trees[0])
        traces.append(StepOutlines(*trees, trace.weighting, counts, found))
        shared, own = per_replica.split_leaves(per_replica.leave(new_state))
        amounts = [] if weighting is None else [weighting.amount]
        raw = [*jax.tree.leaves(metrics), *amounts]
        return shared, own, [jnp.asarray(x)[None] for x in raw]

    in_specs = _in_specs(world, options.layouts, state, batches)
    arguments = jax.tree.leaves(state), *batches
    if world.manual_axes:
        program = device_program.trace(
            world, lambda *args: jax.tree.leaves(run(*args)), in_specs, arguments
        )
        return manual_results.put_together(program, traces[-1], world)
    split = PartitionSpec(world.axis_names)
    mapped = jax.shard_map(
        run,
        mesh=world.mesh,
        in_specs=in_specs,
        out_specs=(PartitionSpec(), split, split),
        axis_names=world.program_axes,
        check_vma=False,
    )
    return jax.make_jaxpr(mapped)(*arguments), traces[-1]


def _in_specs(
    world: World, found: Layouts, state: PyTree, batches: tuple[PyTree, ...]
) -> tuple[PyTree, ...]:
    """Returns how the arguments of the step of one device are cut."""
    if found is None:
        specs = per_replica.specs(state, world.axis_names)
    else:
        specs = [layouts.keep(spec, world.program_axes) for spec in found]
    return specs, *call_arguments.specs(batches, world.axis_names)


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
    """Returns the new state, the metrics, and the lengths that rows would have."""
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
    except (NameError, ValueError) as error:
        _explain_axes(error, options.world)
        raise
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        check_is_array(jax.tree_util.keystr(path) or "(root)", leaf)
    split = [] if trace.has_no_rows else call_arguments.split_leaves(batches)
    return state, metrics, frozenset(x.shape[0] for x in split)


def _explain_axes(error: Exception, world: World) -> None:
    """Adds to an error about the name of an axis which names there are."""
    text = str(error)
    if re.search("Resource axis: .* not found in mesh", text):
        error.add_note(
            f"The mesh of the world has the axes {', '.join(world.mesh.axis_names)}. "
            "The step, or an annotation of a parameter, names another one. Pass a mesh "
            "with this axis, `jdp.init(mesh=...)`; it may have the size 1. Or take the "
            "annotation off: `flax.linen.unbox(variables)`, before the state is made."
        )
        return
    if "axis name" not in text and "is not bound here" not in text:
        return
    free = [name for name in world.model_axes if name not in world.manual_axes]
    for name in free:
        if re.search(rf"\b{re.escape(name)}\b", text.split(";")[0]):
            error.add_note(
                f"{name!r} is a model axis, along which JAX partitions the step, as "
                "`jax.jit` does: write the step for whole arrays, without collectives "
                "along it. A step that communicates along it needs "
                f"`jdp.init(mesh=..., manual_axes={name!r})`."
            )
            return
    if isinstance(error, NameError):
        error.add_note(
            f"The replicas of this step lie along the axis {world.axis_name!r}. Pass "
            "this name to `lax.pmean` and other collectives, or choose another one "
            "with `jdp.init(axis_name=...)`."
        )


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


def _widen(x: jax.Array) -> jax.Array:
    """Returns numbers too narrow for JAX to average in float32; others as they are."""
    dtype = x.dtype
    is_float = jnp.issubdtype(dtype, jnp.floating)
    is_narrow = is_float and jnp.finfo(dtype).bits <= 8
    if jnp.issubdtype(dtype, jnp.integer):
        is_narrow = jnp.iinfo(dtype).bits < 8
    return x.astype(jnp.float32) if is_narrow else x


def _make_program(
    traced: Any, outlines: StepOutlines, differing: list[bool], world: World
) -> Program:
    """Adds a jaxpr that averages the metrics whose leaves are `differing`."""
    program = Program(world, traced, None, outlines)
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
    return Program(world, traced, average_program, outlines)
