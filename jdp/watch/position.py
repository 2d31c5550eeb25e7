"""Position: what does a process do now, by the entries of its record?

Pure: entries in, a position out.
"""

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


class Position(NamedTuple):
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
    for entry in entries:
        position = _follow(position, entry)
    return position


def _follow(position: Position, entry: Entry) -> Position:
    kind, at_ns = entry.kind, entry.at_ns
    if kind == stamps.STEP_FINISHED:
        return _finish(position, entry)
    if kind in (stamps.READ_BEGUN, stamps.READ_ENDED):  # By another thread.
        is_begun = kind == stamps.READ_BEGUN
        return position._replace(reading_ns=at_ns if is_begun else 0)
    if kind in (stamps.COMPILE_BEGUN, stamps.COMPILE_ENDED):
        return _compile(position, entry)
    position = position._replace(changed_ns=at_ns)
    if kind in _WAITS:
        return _begin_wait(position, entry)
    if kind - 1 in _WAITS:
        ended = _WAITS[kind - 1]
        waits = position.waits
        if waits and waits[-1].kind == ended:
            waits = waits[:-1]
        elif any(wait.kind == ended for wait in waits):  # An entry was lost.
            waits = ()
        is_joined = position.is_joined or ended == "init"
        return position._replace(waits=waits, is_joined=is_joined, step_ns=at_ns)
    if kind in (stamps.LOAD_BEGUN, stamps.LOAD_ENDED):
        is_begun = kind == stamps.LOAD_BEGUN
        return position._replace(loading_ns=at_ns if is_begun else 0)
    if kind == stamps.PROGRAM_ENDED:
        return position._replace(has_ended=True, waits=())
    return _take_step(position, entry)


def _take_step(position: Position, entry: Entry) -> Position:
    kind, at_ns, number = entry.kind, entry.at_ns, entry.number
    match kind:
        case stamps.STEP_BEGUN:
            # Earlier things have ended, even if its entry was lost.
            return position._replace(
                begun=number,
                dispatched=number - 1,
                step=entry.name,
                is_placed=False,
                is_tracing=False,
                step_ns=at_ns,
                waits=(),
                loading_ns=0,
            )
        case stamps.STEP_PLACED:
            return position._replace(is_placed=True, step_ns=at_ns)
        case stamps.TRACE_BEGUN | stamps.TRACE_ENDED:
            is_tracing = kind == stamps.TRACE_BEGUN
            return position._replace(is_tracing=is_tracing, step_ns=at_ns)
        case stamps.STEP_DISPATCHED:
            since_ns = position.unfinished_ns or position.step_ns
            return position._replace(
                begun=number, dispatched=number, unfinished_ns=since_ns
            )
        case stamps.STEP_FAILED:
            before = number - 1
            return position._replace(begun=before, dispatched=before, failed=number)
    return position


def _begin_wait(position: Position, entry: Entry) -> Position:
    kind = _WAITS[entry.kind]
    wait = Wait(kind, entry.number, entry.name, entry.at_ns)
    position = position._replace(waits=(*position.waits, wait))
    if kind == "init":
        return position._replace(has_begun=True, meeting=-1, iteration=-1)
    if kind == "meeting":
        return position._replace(meeting=max(position.meeting, entry.number))
    if kind == "iteration":
        return position._replace(iteration=max(position.iteration, entry.number))
    return position


def _finish(position: Position, entry: Entry) -> Position:
    at_ns, number = entry.at_ns, entry.number
    if number <= position.finished:  # After a step was taken back.
        return position
    intervals = position.intervals_ns
    if position.finished_ns and position.finished:
        count = number - position.finished
        each = (at_ns - position.finished_ns) // count
        intervals = (*intervals, *(each,) * min(count, _MOST_INTERVALS))
    return position._replace(
        finished=number,
        finished_ns=at_ns,
        unfinished_ns=at_ns if position.dispatched > number else 0,
        intervals_ns=intervals[-_MOST_INTERVALS:],
    )


def _compile(position: Position, entry: Entry) -> Position:
    count = position.num_compiling
    if entry.kind == stamps.COMPILE_BEGUN:
        since_ns = position.compiling_ns or entry.at_ns
        return position._replace(
            num_compiling=count + 1, compiling_ns=since_ns, compiled=entry.name
        )
    count = max(0, count - 1)
    left_ns = position.compiling_ns if count else 0
    return position._replace(
        num_compiling=count, compiling_ns=left_ns, step_ns=entry.at_ns
    )
