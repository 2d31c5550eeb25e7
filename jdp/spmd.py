"""SPMD: a train step of one replica becomes the step of all of them."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, overload

import jax
import numpy as np

from jdp import (
    agreement,
    mesh,
    placement,
    progress,
    recording,
    replica_step,
    replicas,
    weights,
)
from jdp.collectives import dispatch
from jdp.join import Joinable, JoinHook
from jdp.mesh import World
from jdp.recording import Recording
from jdp.replica_step import Program, Step
from jdp.types import PyTree
from jdp.weights import DivideBy

_logger = logging.getLogger("jdp")
_NOTHING = contextlib.nullcontext()


@overload
def data_parallel(step: Step, /) -> "DataParallelStep": ...
@overload
def data_parallel(
    step: Step,
    /,
    *,
    world: World | None = ...,
    donate_state: bool = ...,
    check_vma: bool = ...,
    static_graph: bool = ...,
    compiler_options: dict[str, Any] | None = ...,
) -> "DataParallelStep": ...
@overload
def data_parallel(
    step: None = None,
    /,
    *,
    world: World | None = ...,
    donate_state: bool = ...,
    check_vma: bool = ...,
    static_graph: bool = ...,
    compiler_options: dict[str, Any] | None = ...,
) -> Callable[[Step], "DataParallelStep"]: ...
def data_parallel(
    step: Step | None = None,
    /,
    *,
    world: World | None = None,
    donate_state: bool = True,
    check_vma: bool = True,
    static_graph: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Turns the step of one replica into a compiled step of all replicas.

    `step(state, *batches) -> (state, metrics)` is written for one replica: it sees
    that replica's samples, and averages gradients over the axis `world.axis_name` with
    `jdp.value_and_grad`, `jdp.sync_gradients` or `jdp.distributed_optimizer`. Also a
    decorator, with and without arguments.

    Every process calls the returned step, the same number of times. Before a program
    runs for the first time, the processes compare it and the paths, shapes and dtypes
    of its arguments; JAX traces again for other shapes, and they compare again.

    Args:
      step: the step of one replica; `jax.grad` in it is that replica's own gradient,
        as under `jax.pmap`. The state must come back with the same value on every
        replica, but for its `jdp.PerReplica` parts. A metric that is the same on all
        replicas comes back as it is; others are averaged, integers and booleans in
        JAX's default float, but for those in a `jdp.PerReplica`, which come back with
        a row for each replica.
      world: the replicas; by default, at the first call, what `jdp.init` made.
      donate_state: whether the memory of the state passed in is used for the new one.
        A donated state cannot be used again.
      check_vma: whether the program must show that the new state is the same on all
        replicas. jdp follows its values from the batches to the new state, through
        control flow; a reduction over the axis ends what differs. False is for a
        reduction that the program does not show, such as an `all_reduce` of your own
        of `lax.ppermute` or a callback: refused is then only what was never sent. The
        name is that of the option of `jax.shard_map` that this stands for.
      static_graph: whether it is an error that another trace of the step, for other
        shapes, finds other used parameters or another order of their gradients. False
        logs the difference.
      compiler_options: options of XLA for this step, over jdp's own.

    Returns:
      A callable `(state, *batches) -> (state, metrics)`. The state may be anything
      that `jdp.replicate` takes; every batch is a pytree of host arrays with the
      samples of this process, or what `jdp.global_batch` returned.

    Raises:
      RuntimeError: from a call: the processes do not have the same state or the same
        program; on every process, naming the difference.
      ValueError: from a call: a batch does not divide among the replicas, or the new
        state differs between replicas; the leaf is named. Or a metric has a row per
        sample. Or a reduction is in a `cond`, or in a `while` loop, that replicas
        decide differently, so that some would wait for ever.
      TypeError: from a call: a metric is no number, or one without a mean that
        differs.
      RuntimeError: from a call: the state was donated before.
    """

    def wrap(step: Step) -> DataParallelStep:
        return DataParallelStep(
            step,
            world=world,
            donate_state=donate_state,
            check_vma=check_vma,
            static_graph=static_graph,
            compiler_options=compiler_options or {},
        )

    return wrap if step is None else wrap(step)


class DataParallelStep(Joinable):
    """A step of all replicas; see `data_parallel`.

    It is a joinable: in a `jdp.Join`, processes may call it different numbers of times,
    with batches of one shape. A process that has joined runs it on zeros, and its
    replicas count for nothing in gradients and metrics, as if `weight=0` were passed
    to each function that takes one. So a joined process does whatever the step does
    with the result, and what it alone may hold of the state goes on being updated.
    """

    def __init__(
        self,
        step: Step,
        *,
        world: World | None,
        donate_state: bool,
        check_vma: bool,
        static_graph: bool,
        compiler_options: dict[str, Any],
    ):
        """Use `data_parallel`."""
        functools.update_wrapper(self, step)
        self._step = step
        self.name = getattr(step, "__name__", "step")
        self._topic = f"first call of the step `{self.name}`"
        self._world = world
        self._donate_state = donate_state
        self._check_vma = check_vma
        self._static_graph = static_graph
        self._compiler_options = compiler_options
        self._recording: Recording | None = None  # of the last trace.
        self._is_compared = False
        self._placer = placement.StatePlacer(self.name, donates=donate_state)
        self._jitted: dict[DivideBy | None, Any] = {}
        self._join_hook: _StepJoinHook | None = None  # of the `jdp.Join` it is in.
        self.last_state: PyTree | None = None

    def __call__(self, state: PyTree, *batches: PyTree) -> tuple[PyTree, PyTree]:
        """Runs one step; see `data_parallel`."""
        if self.join_context is None:
            return self._run(None, state, batches)
        self.join_context.notify(self)
        assert self._join_hook is not None
        return self._join_hook.run(state, batches, has_data=True)

    @progress.counted
    def _run(self, divide_by: Any, state: PyTree, batches: Any) -> Any:
        out = self._jit(divide_by)(*self._place(state, batches))
        self._placer.note_returned(out[0])
        return out

    def join_hook(
        self,
        *,
        divide_by: DivideBy = "weight",
        example: tuple[PyTree, ...] | None = None,
        **kwargs: Any,
    ) -> JoinHook:
        """Returns what stands in for this step; see `jdp.Joinable`.

        `last_state` is then what the last call in the `jdp.Join` returned, whoever
        made it; after it that of the last joiner, of several the process with the
        highest index, bit for bit the same on all.

        Args:
          divide_by: see `jdp.sync_gradients`. Each replica with data counts the same,
            so "weight" and "active" (torch: `divide_by_initial_world_size=False`) are
            one; "world" is torch's default.
          example: the arguments of a call, `(state, *batches)`, for a process that may
            have no batch at all. The values of the batches are not used.
          **kwargs: ignored; of other joinables.
        """
        weights.check_divide_by(divide_by)
        self._join_hook = _StepJoinHook(self, divide_by, example)
        self.last_state = None
        return self._join_hook

    @property
    def join_world(self) -> World:
        """See `jdp.Joinable`."""
        return self.world

    def lower(self, state: PyTree, *batches: PyTree) -> jax.stages.Lowered:
        """Lowers the step for arguments of a call, to look at the program.

        Every process calls it, as it would call the step.
        """
        return self._jit(None).lower(*self._place(state, batches))

    def fingerprint(self, state: PyTree, *batches: PyTree) -> str:
        """Returns the text of the program for arguments like these.

        Values are not read, nothing runs, and no other process is asked. Processes
        whose texts are equal run the same program.

        Args:
          state: see `trace`.
          *batches: see `trace`.
        """
        with dispatch.without_measuring():
            avals = jax.tree.map(_aval, state), self._global_avals(batches)
            return str(self._shard(None, *avals))

    def trace(self, state: PyTree, *batches: PyTree) -> Recording:
        """Traces the step for arguments like these, to see what it synchronises.

        Values are not read, nothing runs, and no other process is asked.

        Args:
          state: pytree of arrays or `jax.ShapeDtypeStruct`s.
          *batches: the same, with the samples of this process.
        """
        with recording.collect() as found, dispatch.without_measuring():
            avals = jax.tree.map(_aval, state), self._global_avals(batches)
            self._shard(None, *avals)
        return found

    def _global_avals(self, batches: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Shapes and dtypes of batches of all processes together."""
        count = self.world.process_count

        def global_aval(leaf: Any) -> jax.ShapeDtypeStruct:
            if isinstance(leaf, jax.Array) and leaf.sharding == self.world.split:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            aval = _aval(leaf)
            return aval.update(shape=(aval.shape[0] * count, *aval.shape[1:]))

        return jax.tree.map(global_aval, batches)

    @functools.cached_property
    def world(self) -> World:
        """The replicas that the step runs on."""
        return self._world or mesh.current_world()

    def _place(self, state: PyTree, batches: tuple[PyTree, ...]) -> tuple[Any, ...]:
        world = self.world
        if self._placer.is_known(state):
            # The other processes may be about to compare theirs with ours.
            is_awaited = not self._is_compared
            with agreement.reporting(world, self._topic) if is_awaited else _NOTHING:
                batches = mesh.global_batch(world, batches)
        else:
            state, batches = self._place_anew(state, batches)
        return state, *self._placer.part_from(state, batches)

    def _place_anew(
        self, state: PyTree, batches: tuple[PyTree, ...]
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Places a state that did not come from this step as it is."""
        world, placer = self.world, self._placer
        is_awaited = not self._is_compared or placer.needs_others(world, state)
        with agreement.reporting(world, self._topic) if is_awaited else _NOTHING:
            placer.check(state)
            batches = mesh.global_batch(world, batches)
        return placer.place(world, state), batches

    def _jit(self, divide_by: DivideBy | None) -> Any:
        """The compiled step; with a divisor its first batch says who has data."""
        if divide_by in self._jitted:
            return self._jitted[divide_by]

        def step(state: PyTree, *batches: PyTree) -> tuple[PyTree, PyTree]:
            self._placer.note_traced()
            return self._trace(divide_by, state, *batches)

        step.__name__ = self.name  # of the compiled program, in profiles and dumps.
        self._jitted[divide_by] = jax.jit(
            step,
            donate_argnums=(0,) if self._donate_state else (),
            compiler_options=_default_compiler_options() | self._compiler_options,
        )
        return self._jitted[divide_by]

    def _trace(
        self, divide_by: DivideBy | None, state: PyTree, *batches: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Runs when JAX traces; compares the program before it can be compiled."""
        world = self.world
        arguments = {"state": state}
        arguments |= {f"batch[{i}]": batch for i, batch in enumerate(batches)}
        replica_step.check_is_tracing(self.name, arguments)
        with agreement.reporting(world, self._topic):
            with recording.collect() as found:
                program = self._shard(divide_by, state, batches)
            self._check_graph(found)
        replicas.compare_programs(world, program, arguments, topic=self._topic)
        self._is_compared = True
        return program.run(state, batches)

    def _check_graph(self, found: Recording) -> None:
        """Compares with the last trace of this step; warns at the first."""
        before, is_main = self._recording, self.world.is_main_process
        if before is None:
            for facts in found.distinct_losses() if is_main else ():
                recording.warn_of_never_used(facts)
            if is_main and any(made.divide_by for made in found.synchronizations):
                recording.warn_of_batch_norms(found.losses)
                recording.warn_of_late_weights(found.synchronizations, found.losses)
        else:
            difference = recording.graph_difference(before, found)
            text = f"The step `{self.name}` was traced again, and {difference}."
            if difference is not None and self._static_graph:
                raise ValueError(
                    f"{text} With `static_graph=True` every trace must find the same; "
                    "leave it out if the difference is meant."
                )
            if difference is not None and is_main:
                _logger.warning(text)
        self._recording = found

    def _shard(
        self, divide_by: DivideBy | None, state: PyTree, batches: tuple[PyTree, ...]
    ) -> Program:
        options = replica_step.Options(self.world, divide_by, self._check_vma)
        return replica_step.trace_step(self._step, options, state, batches)


def _aval(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda x: x, leaf)


def _default_compiler_options() -> dict[str, Any]:
    # On CPU this pass merges all all-reduces into one that runs buffer by buffer, after
    # the last gradient. Apart, buckets of 25 MiB overlap with the backward pass: 240 ms
    # a step instead of 300 ms with one flat buffer of 100 MB, and the same time where
    # there is but one bucket (2 processes, gloo; docs/performance.md).
    if jax.default_backend() == "cpu":
        return {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
    return {}


class _StepJoinHook(JoinHook):
    """Runs a step in a `jdp.Join`, also for a process that has joined."""

    def __init__(
        self,
        step: DataParallelStep,
        divide_by: DivideBy,
        example: tuple[PyTree, ...] | None,
    ):
        self._step = step
        self._divide_by: DivideBy = divide_by
        self._arguments = example  # of the last call; the state is that it returned.

    def run(
        self, state: PyTree, batches: tuple[PyTree, ...], *, has_data: bool
    ) -> tuple[PyTree, PyTree]:
        """Runs the step; without data the replicas of this process do not count."""
        step = self._step
        amount = np.full(step.world.num_local_replicas, has_data, np.float32)
        out = step._run(self._divide_by, state, (amount, *batches))
        step.last_state = out[0]
        self._arguments = out[0], *batches
        return out

    def main_hook(self) -> None:
        """Runs the step on zeros."""
        if self._arguments is None:
            raise RuntimeError(
                f"This process has not called the step `{self._step.name}` in the "
                "`jdp.Join`, so it knows no state and no shapes to stand in with. Pass "
                "`example=(state, *batches)` to `jdp.Join`, or use `jdp.join_batches`."
            )
        state, *batches = self._arguments
        zeros = jax.tree.map(functools.partial(_zeros_of, self._step.world), batches)
        self.run(state, tuple(zeros), has_data=False)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives all processes the state of the last joiner."""
        step = self._step
        context = step.join_context
        assert context is not None and context.last_joiner is not None
        self._arguments = None  # Nothing but `last_state` is kept alive.
        # Nobody has called the step, or all have run it.
        if step.last_state is not None:
            step.last_state = replicas.copy_from(
                step.world, step.last_state, process=context.last_joiner
            )


def _zeros_of(world: World, leaf: Any) -> np.ndarray:
    """Zeros in the shape of this process' part of a batch."""
    aval = _aval(leaf)
    if isinstance(leaf, jax.Array) and leaf.sharding == world.split:
        part = aval.shape[0] // world.num_replicas * world.num_local_replicas
        return np.zeros((part, *aval.shape[1:]), aval.dtype)
    return np.zeros(aval.shape, aval.dtype)
