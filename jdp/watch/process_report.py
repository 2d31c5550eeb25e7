"""Report: where is a process, and for how long, as its watcher is told?

Pure: a position, facts about the process and the time in; a report out. Reports have
durations, not times, because the clocks of hosts differ.
"""

from typing import Literal, NamedTuple

import msgspec

from jdp.watch.position import Position

# "start": before `jdp.init`. "python": between steps, in no loader that jdp knows.
# "tail": in a program that other processes have seen to end.
Place = Literal[
    "start",
    "init",
    "python",
    "loader",
    "call",
    "trace",
    "compile",
    "program",
    "tail",
    "meeting",
    "iteration",
    "eager",
    "end",
]
# "deaf": no Python code runs, though the process is not stopped. "prompt": it reads
# from the keyboard. "unheard": its host does not report.
State = Literal["well", "stopped", "traced", "deaf", "prompt", "gone", "unheard"]
_START_S = 60.0  # before `jdp.init`, such as for imports.
_DEAF_S = 3.0  # without a beat, of which there are ten per second.


class Facts(NamedTuple):
    """Facts about a process that do not come from its record.

    Attributes:
      state: "well", "stopped", "traced", "prompt" or "gone".
      since_ns: since when it is in that state.
      is_busy: whether its CPU time has moved in the last second.
      is_main_busy: whether the CPU time of its main thread has.
      end: how it has ended, in words; "" if it runs.
    """

    state: State
    since_ns: int
    is_busy: bool = False
    is_main_busy: bool = False
    end: str = ""


class Awaited(msgspec.Struct, frozen=True, array_like=True):
    """Something for which a process needs others; see `position.Wait`."""

    kind: str
    number: int
    name: str
    waited_s: float


class ProcessReport(msgspec.Struct, frozen=True, array_like=True):
    """Report of the watcher of a host about one process.

    Attributes:
      process: index of the process.
      host: index of its host.
      place: where its main thread is.
      place_s: for how long, in seconds.
      state: state of the process.
      state_s: for how long, in seconds.
      is_busy: whether its CPU time moves.
      is_main_busy: whether the CPU time of its main thread moves.
      wait: its wait for others; None: it needs no other process now.
      begun: number of the last step that it has begun; 0: no step yet.
      reached: number of the last step whose program it has come to.
      finished: number of the last step that has ended.
      meeting: number of the last meeting that it has come to.
      iteration: number of the last iteration for which it has a batch or asks others.
      failed: number of the last step whose call has raised.
      name: name of the last step, or of the program that is compiled.
      step_s: median time per step, in seconds; 0.0: not known.
      end: how it has ended, in words.
      frame: place in the user's code, if its stack is known.
    """

    process: int
    host: int
    place: Place
    place_s: float
    state: State = "well"
    state_s: float = 0.0
    is_busy: bool = False
    is_main_busy: bool = False
    wait: Awaited | None = None
    begun: int = 0
    reached: int = 0
    finished: int = 0
    meeting: int = -1
    iteration: int = -1
    failed: int = 0
    name: str = ""
    step_s: float = 0.0
    end: str = ""
    frame: str = ""

    @property
    def is_excused(self) -> bool:
        """Whether others may wait for it for long without an alarm."""
        if self.state == "prompt":
            return True
        is_slow = self.place == "compile" or (
            self.place == "start" and self.place_s < _START_S
        )
        return is_slow and self.is_busy and self.state == "well"

    def has_reached(self, wait: Awaited) -> bool:
        """Returns whether it has come to what another process waits for."""
        if self.place == "end" or self.state == "gone":
            return False
        match wait.kind:
            case "init":
                return self.place != "start"
            case "step":
                return self.reached >= wait.number
            case "meeting":
                return self.meeting >= wait.number
            case "iteration":
                return self.iteration >= wait.number
        return True  # Operations of `jdp.eager` have no common order.


def make(
    process: int,
    host: int,
    position: Position,
    facts: Facts,
    *,
    now_ns: int,
    beat_ns: int,
) -> ProcessReport:
    """Makes the report about one process.

    Args:
      process: index of the process.
      host: index of its host.
      position: its position, by its record.
      facts: facts that the host knows about it.
      now_ns: the time, on the clock of its host.
      beat_ns: when its Python code ran last; 0: it has no record yet.
    """
    place, since_ns = _find_place(position)
    state, state_ns = facts.state, facts.since_ns
    is_deaf = beat_ns and now_ns - beat_ns > _DEAF_S * 1e9 and place != "end"
    if state == "well" and is_deaf:
        state, state_ns = "deaf", beat_ns
    wait = position.wait
    awaited = iteration = None
    if wait is not None:
        waited_s = _seconds(now_ns, wait.since_ns)
        awaited = Awaited(wait.kind, wait.number, wait.name, waited_s)
        if place == "loader" and wait.kind == "iteration":
            # It waits for its own reader: the others wait for it.
            awaited, iteration = None, wait.number - 1
    return ProcessReport(
        process=process,
        host=host,
        place=place,
        place_s=_seconds(now_ns, since_ns or facts.since_ns),
        state=state,
        state_s=_seconds(now_ns, state_ns),
        is_busy=facts.is_busy,
        is_main_busy=facts.is_main_busy,
        wait=awaited,
        begun=position.begun,
        reached=position.reached,
        finished=position.finished,
        meeting=position.meeting,
        iteration=position.iteration if iteration is None else iteration,
        failed=position.failed,
        name=position.compiled if place == "compile" else position.step,
        step_s=position.step_s,
        end=facts.end,
    )


def _find_place(position: Position) -> tuple[Place, int]:
    """Returns where the main thread is, and since when."""
    if not position.has_begun:
        return "start", 0
    if position.has_ended:
        return "end", position.changed_ns
    if position.num_compiling:
        return "compile", position.compiling_ns
    if position.waits:
        wait = position.waits[-1]
        if wait.kind == "iteration" and position.reading_ns:
            return "loader", max(position.reading_ns, wait.since_ns)
        return _AS_PLACE[wait.kind], wait.since_ns
    if position.loading_ns:
        return "loader", position.loading_ns
    if position.is_in_call and position.reached < position.begun:
        place: Place = "trace" if position.is_tracing else "call"
        return place, position.step_ns
    if position.reached > position.finished:
        return "program", position.unfinished_ns or position.step_ns
    return "python", max(position.changed_ns, position.finished_ns)


_AS_PLACE: dict[str, Place] = {
    "init": "init",
    "meeting": "meeting",
    "iteration": "iteration",
    "eager": "eager",
}


def _seconds(now_ns: int, since_ns: int) -> float:
    return max(0.0, (now_ns - since_ns) * 1e-9)
