"""Step program: which program of all replicas is a step, for given arguments?"""

import contextlib
import functools
from typing import Any

import jax

from jdp.backward import captured
from jdp.gradients.step_trace import StepTrace
from jdp.gradients.weighted_mean import DivideBy
from jdp.replicas import agreement, axes, comparison, stamps, virtual_replicas
from jdp.replicas.mesh import World
from jdp.step import call_arguments, nan_search, replica_program, state_layouts
from jdp.step.options import StepOptions
from jdp.step.placement import StatePlacer
from jdp.step.replica_program import Program, ProgramOptions, Step
from jdp.step.shards import sharded_step
from jdp.step.state_layouts import Layouts
from jdp.trees import nnx_objects
from jdp.types import PyTree


class StepProgram:
    """The traced and compiled programs of one step in one world."""

    def __init__(
        self,
        step: Step,
        name: str,
        options: StepOptions,
        world: World,
        placer: StatePlacer,
    ):
        """Starts without a program.

        Args:
          step: `(state, *batches) -> (state, metrics)`, of one replica.
          name: name of the step, for messages and compiled programs.
          options: options of the step.
          world: replicas that run it.
          placer: places the states of the step.
        """
        self._step = step
        self._name = name
        self._options = options
        self._world = world
        # The replicas whose program is traced.
        self._traced_world = world
        if world.num_shards is not None:
            self._traced_world = virtual_replicas.world_of_shards(world)
        self._placer = placer
        self._compiled: dict[DivideBy | None, Any] = {}
        self._last_trace: StepTrace | None = None
        self.is_compared = False
        self.topic = f"first call of the step `{name}`"

    def compiled(self, divide_by: DivideBy | None) -> Any:
        """Returns the compiled step of flat states.

        It takes a `FlatState` and the batches. A divisor puts weights before the
        batches.
        """
        found = self._compiled.get(divide_by)
        if found is None:
            trace = functools.partial(self._trace_noted, divide_by)
            step = self._placer.structures.take_flat(trace)
            if self._world.num_shards is None:
                found = self._options.compile(step, self._name)
            else:
                found = sharded_step.ShardedStep(step, self._world, self._options)
            self._compiled[divide_by] = found
        return found

    def lower(self, state: PyTree, *batches: PyTree) -> jax.stages.Lowered:
        """Lowers the step for arguments of such avals; a call of all processes.

        Raises:
          ValueError: the step has shards, and so several programs.
        """
        if self._world.num_shards is not None:
            raise ValueError(
                f"The step `{self._name}` has `num_shards`, and so consists of several "
                "programs; `fingerprint` has the text of what they compute together."
            )
        layouts = state_layouts.of_state(self._world, state)

        def run(state: PyTree, *batches: PyTree) -> tuple[PyTree, PyTree]:
            return self._trace(None, layouts, state, *batches)[:2]

        return self._options.compile(run, self._name).lower(state, *batches)

    def fingerprint(self, state: PyTree, *batches: PyTree) -> str:
        """Returns the text of the program, and a digest of the arrays it captures."""
        unread = StepTrace(warns_at_once=True)
        layouts = state_layouts.of_state(self._world, state)
        program = self._shard(None, layouts, state, batches, unread)
        constants = captured.find(program.jaxprs)
        return f"{program}\ncaptured arrays: {constants.digest.hex()}"

    def trace(self, state: PyTree, *batches: PyTree) -> StepTrace:
        """Traces the step for arguments of such avals."""
        trace = StepTrace()
        layouts = state_layouts.of_state(self._world, state)
        self._shard(None, layouts, state, batches, trace)
        return trace

    def _trace_noted(self, *arguments: Any) -> tuple[PyTree, PyTree, Layouts]:
        """Is `_trace`, with its begin and end in the record of this process."""
        with stamps.during(stamps.TRACE_BEGUN, name=self._name):
            return self._trace(*arguments)

    def _trace(
        self,
        divide_by: DivideBy | None,
        layouts: Layouts,
        state: PyTree,
        *batches: PyTree,
    ) -> tuple[PyTree, PyTree, Layouts]:
        """Traces the step, and compares the program before it can be compiled."""
        self._placer.note_other_program()
        world, is_main = self._world, self._world.is_main_process
        arguments = {"state": state, **call_arguments.by_name(batches)}
        nan_search.check_is_tracing(self._name, arguments)
        with agreement.reporting(world, self.topic, is_local=True):
            trace = StepTrace()
            given = batches[0 if divide_by is None else 1 :]  # without marks of `run`.
            if world.num_shards is not None:
                call_arguments.check_divide(given, world.num_shards)
            try:
                program = self._shard(divide_by, layouts, state, batches, trace)
            except (TypeError, ValueError) as error:
                call_arguments.explain_unequal_lengths(error, given)
                raise
            if self._last_trace is None and is_main:
                call_arguments.warn_of_unequal_lengths(world, given)
            fixed = self._options.static_graph
            trace.follow(self._last_trace, self._name, is_main=is_main, is_fixed=fixed)
            self._last_trace = trace
        comparison.compare_programs(
            world, program, arguments, topic=self.topic, jaxprs=program.jaxprs
        )
        self.is_compared = True
        return *program.run(state, batches), program.layouts

    def _shard(
        self,
        divide_by: DivideBy | None,
        layouts: Layouts,
        state: PyTree,
        batches: tuple[PyTree, ...],
        trace: StepTrace,
    ) -> Program:
        is_proven = self._options.check_vma
        world = self._traced_world
        options = ProgramOptions(world, divide_by, is_proven, layouts)
        step = functools.partial(call_arguments.run, self._step, world)
        marked = axes.tracing_shards() if world.num_shards else contextlib.nullcontext()
        with nnx_objects.explaining(self._name), marked:
            return replica_program.trace_step(step, options, state, batches, trace)
