"""Position: what does a process do now, by the entries of its record?

Pure: entries in, a position out.
"""

import copy
import dataclasses
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from jdp.replicas import stamps
from jdp.watch.record import Entry

_MOST_INTERVALS = 21  # between steps, for their median.
_WAITS = {
    stamps.INIT_BEGUN: "init",
    stamps.MEETING_BEGUN: "meeting",
    stamps.ITERATION_BEGUN: "iteration",
    stamps.EAGER_BEGUN: "eager",
}


class Wait(NamedTuple):
    """Something that ends only with other processes.

    Attributes:
      kind: "init", "step", "meeting", "iteration" or "eager".
      number: position in the sequence of its kind, the same on all processes.
      name: name of the step or topic of the meeting.
      since_ns: begin of the wait.
    """

    kind: str
    number: int
    name: str
    since_ns: int


@dataclasses.dataclass(slots=True)
class Position:
    """Position of one process in its program; times are on the clock of its host.

    Attributes:
      has_begun: whether it has called `jdp.init`.
      is_joined: whether it has returned from `jdp.init`.
      has_ended: whether its program has ended.
      begun: number of the step that it has begun last; 0: no step yet.
      dispatched: number of the step whose call has returned last.
      finished: number of the step whose results were ready last.
      failed: number of the last step whose call has raised; 0: no step.
      step: name of the step that it has begun last.
      is_placed: whether the arguments of that step are on the devices.
      is_tracing: whether that step is being traced.
      step_ns: when it came to the program of that step, or to its call.
      unfinished_ns: since when it waits for the result of the next step.
      finished_ns: when the last step was seen to end.
      changed_ns: when the main thread was last seen to begin or end something.
      meeting: number of the last meeting that it has come to.
      iteration: number of the last iteration of `jdp.join_batches` that it has asked.
      waits: waits on the host under way, innermost last.
      reading_ns: since when `jdp.join_batches` reads a batch; 0: it does not.
      loading_ns: since when `world.shard` makes a batch; 0: it does not.
      compiling_ns: since when JAX compiles; 0: it does not.
      compiled: name of the program that is compiled.
      num_compiling: number of programs that are compiled.
      intervals_ns: the last times between the ends of steps.
    """

    has_begun: bool = False
    is_joined: bool = False
    has_ended: bool = False
    begun: int = 0
    dispatched: int = 0
    finished: int = 0
    failed: int = 0
    step: str = ""
    is_placed: bool = False
    is_tracing: bool = False
    step_ns: int = 0
    unfinished_ns: int = 0
    finished_ns: int = 0
    changed_ns: int = 0
    meeting: int = -1
    iteration: int = -1
    waits: tuple[Wait, ...] = ()
    reading_ns: int = 0
    loading_ns: int = 0
    compiling_ns: int = 0
    compiled: str = ""
    num_compiling: int = 0
    intervals_ns: tuple[int, ...] = ()

    @property
    def is_in_call(self) -> bool:
        """Whether it is in the call of a step."""
        return self.begun > self.dispatched

    @property
    def reached(self) -> int:
        """Number of the last step whose program it has come to."""
        is_in_program = self.is_in_call and self.is_placed and not self.is_tracing
        if is_in_program and not self.waits and not self.num_compiling:
            return self.begun
        return self.dispatched

    @property
    def wait(self) -> Wait | None:
        """Its wait for other processes; None: it needs no other process now."""
        if self.has_ended:
            return None
        if self.waits:
            return self.waits[-1]
        if self.reached > self.finished:
            since_ns = self.unfinished_ns or self.step_ns
            return Wait("step", self.finished + 1, self.step, since_ns)
        return None

    @property
    def step_s(self) -> float:
        """Median time between the ends of steps, in seconds; 0.0 before the third."""
        if len(self.intervals_ns) < 2:
            return 0.0
        return statistics.median(self.intervals_ns) * 1e-9


def follow(position: Position, entries: Iterable[Entry]) -> Position:
    """Returns the position after some more entries."""
    position = copy.copy(position)  # It has no part that is changed in place.
    for entry in entries:
        _follow(position, entry)
    return position


def _follow(position: Position, entry: Entry) -> None:
    kind, at_ns = entry.kind, entry.at_ns
    if kind == stamps.STEP_FINISHED:
        _finish(position, entry)
        return
    if kind in (stamps.READ_BEGUN, stamps.READ_ENDED):  # By another thread.
        position.reading_ns = at_ns if kind == stamps.READ_BEGUN else 0
        return
    if kind in (stamps.COMPILE_BEGUN, stamps.COMPILE_ENDED):
        _compile(position, entry)
        return
    position.changed_ns = at_ns
    if kind in _WAITS:
        _begin_wait(position, entry)
    elif kind - 1 in _WAITS:
        _end_wait(position, entry)
    elif kind in (stamps.LOAD_BEGUN, stamps.LOAD_ENDED):
        position.loading_ns = at_ns if kind == stamps.LOAD_BEGUN else 0
    elif kind == stamps.PROGRAM_ENDED:
        position.has_ended, position.waits = True, ()
    else:
        _take_step(position, entry)


def _take_step(position: Position, entry: Entry) -> None:
    kind, at_ns, number = entry.kind, entry.at_ns, entry.number
    match kind:
        case stamps.STEP_BEGUN:
            # Earlier things have ended, even if its entry was lost.
            position.begun, position.dispatched = number, number - 1
            position.step, position.step_ns = entry.name, at_ns
            position.is_placed = position.is_tracing = False
            position.waits, position.loading_ns = (), 0
        case stamps.STEP_PLACED:
            position.is_placed, position.step_ns = True, at_ns
        case stamps.TRACE_BEGUN | stamps.TRACE_ENDED:
            position.is_tracing = kind == stamps.TRACE_BEGUN
            position.step_ns = at_ns
        case stamps.STEP_DISPATCHED:
            position.begun = position.dispatched = number
            position.unfinished_ns = position.unfinished_ns or position.step_ns
        case stamps.STEP_FAILED:
            position.begun = position.dispatched = number - 1
            position.failed = number


def _begin_wait(position: Position, entry: Entry) -> None:
    kind = _WAITS[entry.kind]
    wait = Wait(kind, entry.number, entry.name, entry.at_ns)
    position.waits = (*position.waits, wait)
    if kind == "init":
        position.has_begun, position.meeting, position.iteration = True, -1, -1
    elif kind == "meeting":
        position.meeting = max(position.meeting, entry.number)
    elif kind == "iteration":
        position.iteration = max(position.iteration, entry.number)


def _end_wait(position: Position, entry: Entry) -> None:
    ended, waits = _WAITS[entry.kind - 1], position.waits
    if waits and waits[-1].kind == ended:
        position.waits = waits[:-1]
    elif any(wait.kind == ended for wait in waits):  # An entry was lost.
        position.waits = ()
    position.is_joined = position.is_joined or ended == "init"
    position.step_ns = entry.at_ns


def _finish(position: Position, entry: Entry) -> None:
    at_ns, number = entry.at_ns, entry.number
    if number <= position.finished:  # After a step was taken back.
        return
    if position.finished_ns and position.finished:
        count = number - position.finished
        each = (at_ns - position.finished_ns) // count
        intervals = *position.intervals_ns, *(each,) * min(count, _MOST_INTERVALS)
        position.intervals_ns = intervals[-_MOST_INTERVALS:]
    position.finished, position.finished_ns = number, at_ns
    position.unfinished_ns = at_ns if position.dispatched > number else 0


def _compile(position: Position, entry: Entry) -> None:
    if entry.kind == stamps.COMPILE_BEGUN:
        position.num_compiling += 1
        position.compiling_ns = position.compiling_ns or entry.at_ns
        position.compiled = entry.name
        return
    position.num_compiling = max(0, position.num_compiling - 1)
    position.compiling_ns = position.compiling_ns if position.num_compiling else 0
    position.step_ns = entry.at_ns
