"""Data-parallel step: what happens at each call of a step of all replicas?"""

import contextlib
import functools
from typing import TYPE_CHECKING, Any, overload

import jax

from jdp.collectives import auto
from jdp.fingerprints.replica_check import ReplicaCheck
from jdp.gradients import step_trace
from jdp.gradients.step_trace import StepTrace
from jdp.gradients.weighted_mean import DivideBy
from jdp.replicas import (
    agreement,
    mesh,
    progress,
    shared_replicas,
    stamps,
    virtual_replicas,
    world_end,
)
from jdp.replicas.joinable import Joinable, JoinHook
from jdp.replicas.mesh import World
from jdp.step import (
    call_arguments,
    call_avals,
    join_hook,
    methods,
    placement,
    whole_batches,
)
from jdp.step.call_arguments import CallBinder, NotGiven
from jdp.step.flat_state import FlatState
from jdp.step.join_hook import StepJoinHook
from jdp.step.options import StepOptions, check_step
from jdp.step.placement import StatePlacer
from jdp.step.replica_program import Step
from jdp.step.signature import A, P, R, Rest, S, StepCall, TakesOne
from jdp.step.step_form import StepForm
from jdp.step.step_program import StepProgram
from jdp.trees import nnx_objects
from jdp.types import PyTree

_NOTHING = contextlib.nullcontext()


class DataParallelStep(Joinable, StepCall[P, S, R]):
    """Step of all replicas, as `jdp.data_parallel` returns it; a `jdp.Joinable`.

    To type checkers it is a function of the arguments of the step that returns what the
    step returns.

    Inside a `jdp.Join`, processes may call it different numbers of times, with batches
    of one shape. A process that has joined runs it on zeros. Its replicas have weight
    0 in gradients and metrics, as if `weight=0` were passed to every function that
    takes a weight. It still applies the updates, so that the parts of the state that
    only this process holds stay up to date.
    """

    join_options = ("divide_by", "example")

    def __init__(self, step: Step, options: StepOptions):
        """Use `data_parallel`."""
        check_step(step)
        self._is_static = isinstance(step, staticmethod)
        self._is_of_class = isinstance(step, classmethod)
        if isinstance(step, staticmethod | classmethod):
            step = step.__func__
        functools.update_wrapper(self, step)
        self._options = options
        self.name = getattr(step, "__name__", "step")
        self._form = StepForm(step, self.name, options.num_states)
        self._step = self._form.packed
        self._binder = CallBinder(
            self._step,
            self.name,
            static_argnames=options.static_argnames,
            replicated_argnames=options.replicated_argnames,
        )
        self._begin_in_world()
        self._join_hook: StepJoinHook | None = None  # for the surrounding `jdp.Join`.
        self.last_state: S | None = None
        self._owners: tuple[type, ...] = (type,)
        self._core = self  # a bound step has here the step without the object.
        self._bound = methods.PerObject(
            lambda owner: DataParallelStep(methods.bind_weakly(step, owner), options),
            _BoundStep,
            what=f"The step `{self.name}`",
        )

    def _begin_in_world(self) -> None:
        """Forgets what belongs to the devices of an earlier world."""
        self._num_ended = world_end.count_ended()
        vars(self).pop("world", None)
        vars(self).pop("_needs_limit", None)
        vars(self).pop("_replica_check", None)
        vars(self).pop("_program", None)
        self.calling_thread = 0
        self._placer = StatePlacer(self.name, donates=self._options.donate_state)
        self._binder.forget_placed()

    def __set_name__(self, owner: type, name: str) -> None:
        """Notes the class whose method the step is."""
        if not (self._is_static or self._is_of_class):
            self._owners = (type, owner)

    @overload
    def __get__(
        self: TakesOne[A, Rest, S, R], instance: object, owner: A
    ) -> "DataParallelStep[Rest, S, R]": ...
    @overload
    def __get__(
        self, instance: None, owner: type | None = None
    ) -> "DataParallelStep[P, S, R]": ...
    @overload
    def __get__(
        self: TakesOne[A, Rest, S, R], instance: A, owner: type | None = None
    ) -> "DataParallelStep[Rest, S, R]": ...
    @overload
    def __get__(
        self, instance: object, owner: type | None = None
    ) -> "DataParallelStep[P, S, R]": ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Returns the step of an object, for a step that is a method."""
        of = owner if self._is_of_class else instance
        return self if of is None or self._is_static else self._bound.of(of)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataParallelStep[P, S, R]":
        """Returns the step itself, as a copy of a function does."""
        return self

    def _call(
        self, state: PyTree = NotGiven, /, *batches: PyTree, **named: PyTree
    ) -> Any:
        """Runs one step; see `data_parallel`."""
        # `Trainer.step(trainer, state, batch)`. For `classmethod(step)`, Python 3.13
        # and later pass the class here. An object that is a pytree node is a state.
        if isinstance(state, self._owners) and jax.tree_util.all_leaves((state,)):
            if state is not NotGiven:
                return self.__get__(state)._call(*batches, **named)
        if self._num_ended != world_end.count_ended():
            self._begin_in_world()
        try:
            return self._call_bound(*self._bind(state, batches, dict(named)))
        except (TypeError, ValueError) as error:
            if not self._options.takes_modules:
                held = self._binder.names
                self._form.hint_at_states(error, (state, *batches), named, held)
            raise

    def _call_bound(self, state: PyTree, batches: tuple[PyTree, ...]) -> Any:
        context = self.join_context
        if context is not None and context.is_enabled:
            context.notify(self)
            assert self._join_hook is not None
            out = self._join_hook.run(state, batches, has_data=True)
        else:
            out = self.run(None, state, batches)
            if context is not None:
                self.last_state = out[0]
        return self._form.ungroup(*out)

    def _bind(
        self, state: PyTree, batches: tuple[PyTree, ...], named: dict[str, PyTree]
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Returns the state of a call, and its other arguments; see `CallBinder`."""
        state, batches = self._form.group(state, batches, named)
        if state is NotGiven:
            state = self._binder.take_state(named)
        if named or self._binder.has_names:
            batches = self._binder.bind(batches, named)
        if self._options.split_batches:
            batches = whole_batches.take_part(self.world, batches)
        return state, batches

    if not TYPE_CHECKING:  # For checkers, `StepCall` has it.
        __call__ = _call

    @placement.from_python
    @mesh.without_ambient
    @progress.in_one_thread
    @progress.counted
    def run(
        self, divide_by: DivideBy | None, state: PyTree, batches: tuple[PyTree, ...]
    ) -> tuple[PyTree, PyTree]:
        """Runs one step; with a divisor, the first batch marks replicas with data."""
        flat, *placed = self._place(state, batches)
        record = self._options.record_fingerprints
        if record is not None:
            record.begin(flat.to_tree(), world=self.world)
        stamps.stamp(stamps.STEP_PLACED)
        compiled = self._program.compiled(divide_by)
        if self._needs_limit:
            progress.CallLimit.wait_for_earlier()
        flat, metrics = compiled(flat, *placed)
        if self._needs_limit:
            progress.CallLimit.note((flat, metrics))
        placer = self._placer
        if self._binder.has_names and call_arguments.has_static(batches):
            placer.note_other_program()
        new_state = placer.take_returned(self.world, flat)
        if self._replica_check is not None:
            self._replica_check.after_call(new_state)
        if record is not None:
            record.after_step(new_state, world=self.world)
        return new_state, metrics

    @functools.cached_property
    def _replica_check(self) -> ReplicaCheck | None:
        every = self._options.check_every
        if every is None:
            return None
        return ReplicaCheck(self.world, self.name, every=every)

    @functools.cached_property
    def _needs_limit(self) -> bool:
        world = self.world
        is_cpu = world.mesh.devices.flat[0].platform == "cpu"
        return is_cpu and min(world.process_count, len(world.local_devices)) > 1

    def join_hook(
        self,
        *,
        divide_by: DivideBy = "weight",
        example: tuple[PyTree, ...] | None = None,
        **kwargs: Any,
    ) -> JoinHook:
        """Returns the hook that stands in for this step; see `jdp.Joinable`.

        Inside the `jdp.Join`, `last_state` is the state that the last call returned,
        made by the user or by the hook. After it, `last_state` is the state of the last
        joiner, bit for bit the same on all processes; of several last joiners the
        process with the highest index counts. If no process calls the step, it is the
        state in `example`, or the state that the previous `jdp.Join` left.

        Args:
          divide_by: see `jdp.sync_gradients`. Each replica with data has the same
            weight, so "weight" and "active" (torch:
            `divide_by_initial_world_size=False`) are equivalent; "world" is torch's
            default.
          example: the arguments of a call, `(state, *batches)`, for a process that
            might have no batch at all. The values of the batches are not used.
          **kwargs: options of other joinables; ignored.
        """
        step_trace.check_divide_by(divide_by)
        if example is not None:
            join_hook.check_example(example)
            state, batches = self._bind(example[0], tuple(example[1:]), {})
            example = state, *batches
            self.last_state = example[0]
        elif join_hook.has_deleted(self.last_state):
            self.last_state = None
        self._join_hook = StepJoinHook(self._core, divide_by, example)
        return self._join_hook

    @property
    def join_world(self) -> World:
        """Replicas that the `jdp.Join` must have."""
        return self.world

    @mesh.without_ambient
    def lower(
        self, state: PyTree = NotGiven, /, *batches: PyTree, **named: PyTree
    ) -> jax.stages.Lowered:
        """Lowers the step for such arguments, to inspect the program.

        Every process must call it, as it would call the step. Values are not read.

        Args:
          state: see `trace`.
          *batches: see `trace`.
          **named: see `trace`.
        """
        return self._program.lower(*self._avals(state, batches, named))

    @mesh.without_ambient
    def fingerprint(
        self, state: PyTree = NotGiven, /, *batches: PyTree, **named: PyTree
    ) -> str:
        """Returns the text of the program for such arguments.

        It ends with a digest of the arrays that the step captures. Processes with equal
        texts run the same program. Values of arguments are not read, nothing runs, and
        no other process takes part.

        Args:
          state: see `trace`.
          *batches: see `trace`.
          **named: see `trace`.
        """
        with auto.without_measuring():
            return self._program.fingerprint(*self._avals(state, batches, named))

    @mesh.without_ambient
    def trace(
        self, state: PyTree = NotGiven, /, *batches: PyTree, **named: PyTree
    ) -> StepTrace:
        """Traces the step for such arguments, to see what it synchronises.

        Values are not read, nothing runs, and no other process takes part.

        Args:
          state: pytree of arrays or `jax.ShapeDtypeStruct`s.
          *batches: likewise, with the samples of this process.
          **named: arguments by name.
        """
        with auto.without_measuring():
            return self._program.trace(*self._avals(state, batches, named))

    def _avals(
        self, state: PyTree, batches: tuple[PyTree, ...], named: dict[str, PyTree]
    ) -> tuple[PyTree, ...]:
        """Returns the avals of the arguments of all processes together."""
        state, arguments = self._bind(state, batches, named)
        self._check_is_copied(state, arguments)
        return (
            placement.state_avals(self.world, state),
            *call_avals.global_avals(self.world, arguments),
        )

    @functools.cached_property
    def world(self) -> World:
        """The replicas that the step runs on."""
        world = self._options.world or mesh.current_world()
        world_end.check_is_alive(world)
        if self._options.num_shards is not None:
            world = virtual_replicas.with_shards(world, self._options.num_shards)
        return world

    @functools.cached_property
    def _program(self) -> StepProgram:
        place = self.world, self._placer
        return StepProgram(self._step, self.name, self._options, *place)

    def _place(self, state: PyTree, batches: tuple[PyTree, ...]) -> tuple[Any, ...]:
        placer = self._placer
        flat = placer.find_known(state) if self._program.is_compared else None
        if flat is None:
            flat, batches = self._place_anew(state, batches)
        else:
            batches = self._binder.place(self.world, batches)
        if self._options.donate_state:
            batches = placer.part_from(flat, batches)
        return flat, *batches

    def _place_anew(
        self, state: PyTree, batches: tuple[PyTree, ...]
    ) -> tuple[FlatState, tuple[PyTree, ...]]:
        """Places a state that is not the unchanged result of this step."""
        world, placer = self.world, self._placer
        # The other processes may be about to compare their state with ours.
        is_awaited = not self._program.is_compared or placer.needs_others(world, state)
        reporting = agreement.reporting(world, self._program.topic, is_local=True)
        with reporting if is_awaited else _NOTHING:
            self._check_is_copied(state, batches)
            placer.check(state)
            batches = self._binder.place(world, batches)
        if not (self._program.is_compared or world.has_whole_replicas):
            split = call_arguments.split_trees(batches)
            shared_replicas.compare_samples(world, split, name=self.name)
        return placer.place(world, state), batches

    def _check_is_copied(self, state: PyTree, batches: tuple[PyTree, ...]) -> None:
        """Raises TypeError for objects that should change in place."""
        arguments = call_arguments.by_name(batches)
        if not self._options.takes_modules:
            arguments = {"state": state, **arguments}
        nnx_objects.check_arguments(self.name, arguments)


class _BoundStep(DataParallelStep[P, S, R]):
    """Step of one object: shares the attributes of its core and holds the object."""

    __slots__ = ("__self__",)

    def __init__(self, core: DataParallelStep[..., S, R], owner: Any):
        object.__setattr__(self, "__dict__", core.__dict__)
        self.__self__ = owner

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self
