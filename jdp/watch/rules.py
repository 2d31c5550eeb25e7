"""Rules: which process do the others wait for, since when, and is that too long?

Pure: `receive` takes the reports of a host, and `tick` the time; both return the next
state. A process is behind another one if it has not come to the step, meeting or
iteration that the other waits for. Of the processes that are behind, those count that
wait for nothing themselves. Where all wait for each other, the smaller group counts.
Where no process is behind, a process that cannot run holds up the others: it is
stopped, gone, or its host is not heard.
"""

import collections
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from jdp.watch.process_report import ProcessReport

UNHEARD_S = 4.0  # without a report of a host that reports four times per second.
# A watcher that has slept for so long has not seen what the others did meanwhile.
_MOST_SLEPT_S = 2.0
_NOTHING = "", 0  # No process waits for it.
_WAITING_PLACES = {"init", "program", "meeting", "iteration", "eager"}
_MANY_LIMITS = 6.0  # of time for a step without a process that holds it up.


class WatchOptions(NamedTuple):
    """Limits of the watch.

    Attributes:
      stall_s: longest time to wait for a process beyond the median step, in seconds.
      num_processes: number of processes of the job.
    """

    stall_s: float
    num_processes: int


class Seen(NamedTuple):
    """Last report about a process, and when it came."""

    report: ProcessReport
    at_s: float


class Stall(NamedTuple):
    """A process for which others wait too long.

    Attributes:
      process: index of the process; -1: all wait, and no process holds them up.
      waited_s: for how long, in seconds.
      report: report about the process, or about the first process that waits.
      waiting: reports about the processes that wait for it.
    """

    process: int
    waited_s: float
    report: ProcessReport
    waiting: tuple[ProcessReport, ...]


class Resumed(NamedTuple):
    """A process that has gone on after an alarm."""

    process: int
    waited_s: float


class WatchState(NamedTuple):
    """Knowledge of the watcher of a job.

    Attributes:
      options: limits.
      seen: last report by process.
      ticked_s: time of the last tick.
      began_s: begin of the watch.
      excused: when each process was last excused, by process.
      stalls: alarms under way, by process.
      noted: processes whose compilation was named, by the step it is in.
    """

    options: WatchOptions
    began_s: float
    ticked_s: float
    seen: Mapping[int, Seen] = {}
    excused: Mapping[int, float] = {}
    stalls: Mapping[int, Stall] = {}
    noted: frozenset[int] = frozenset()


class Findings(NamedTuple):
    """Results of a tick.

    Attributes:
      begun: new alarms.
      excused: processes that others wait for longer than the limit and that are
        compiled or started; each is named once.
      resumed: processes that went on after an alarm.
      lasting: all alarms under way.
    """

    begun: tuple[Stall, ...] = ()
    excused: tuple[Stall, ...] = ()
    resumed: tuple[Resumed, ...] = ()
    lasting: tuple[Stall, ...] = ()


def start(options: WatchOptions, *, now_s: float) -> WatchState:
    """Starts without a report."""
    return WatchState(options, now_s, now_s)


def receive(
    state: WatchState, reports: Iterable[ProcessReport], *, now_s: float
) -> WatchState:
    """Takes the reports of one host.

    Args:
      state: the knowledge so far.
      reports: reports about the processes of that host.
      now_s: the time of the watcher's monotonic clock.
    """
    new = {report.process: Seen(report, now_s) for report in reports}
    return state._replace(seen={**state.seen, **new})


def tick(state: WatchState, *, now_s: float) -> tuple[WatchState, Findings]:
    """Judges the reports; called a few times per second.

    Args:
      state: the knowledge so far.
      now_s: the time of the watcher's monotonic clock.
    """
    slept_s = now_s - state.ticked_s
    if slept_s > _MOST_SLEPT_S:
        # This watcher or its host was stopped: nothing is known about that time.
        excused = dict.fromkeys(state.seen, now_s)
        seen = {i: each._replace(at_s=each.at_s + slept_s) for i, each in _of(state)}
        state = state._replace(seen=seen, excused=excused, ticked_s=now_s)
        return state, Findings(lasting=tuple(state.stalls.values()))
    reports = {i: _age(each, now_s) for i, each in _of(state)}
    excused = dict(state.excused)
    for i, each in _of(state):
        if each.report.is_excused:  # Only until its host was heard last.
            excused[i] = now_s if reports[i].is_excused else each.at_s
    limit_s = state.options.stall_s + _median_step_s(reports.values())
    found = _find_stalls(reports, excused, now_s=now_s, limit_s=limit_s)
    waiting = [report for report in reports.values() if report.wait is not None]
    longest_s = _longest_s(waiting)
    are_all = not found and len(waiting) == state.options.num_processes
    if are_all and longest_s > _MANY_LIMITS * limit_s and not find_behind(reports):
        found[-1] = Stall(-1, longest_s, waiting[0], tuple(waiting))
    late = {
        stall.process: stall
        for stall in find_excused(reports)
        if stall.waited_s > limit_s and stall.process not in state.noted
    }
    begun = tuple(s for i, s in found.items() if i not in state.stalls)
    over = [s for i, s in state.stalls.items() if i not in found]
    resumed = tuple(Resumed(stall.process, stall.waited_s) for stall in over)
    kept = {i for i in state.noted if i in reports and reports[i].is_excused}
    state = state._replace(
        ticked_s=now_s,
        excused=excused,
        stalls=found,
        noted=frozenset(kept | late.keys()),
    )
    lasting = tuple(found.values())
    return state, Findings(begun, tuple(late.values()), resumed, lasting)


def find_behind(
    reports: Mapping[int, ProcessReport],
) -> dict[int, list[ProcessReport]]:
    """Returns which processes wait for each process that holds up others.

    Args:
      reports: by process.
    """
    groups = _group_waiting(reports.values())
    behind = {
        target: _find_missing(group[0], reports) for target, group in groups.items()
    }
    target_of = {q.process: target for target, group in groups.items() for q in group}
    blamed = {p for missing in behind.values() for p in missing}
    roots = [p for p in blamed if not behind.get(target_of.get(p, _NOTHING))]
    if blamed and not roots:
        roots = _find_smaller_group([reports[p] for p in sorted(blamed)])
    return {
        p: [q for target in groups if p in behind[target] for q in groups[target]]
        for p in sorted(roots)
    }


def find_excused(reports: Mapping[int, ProcessReport]) -> list[Stall]:
    """Returns the processes that hold up others, and are excused."""
    return [
        Stall(p, _longest_s(waiting), reports[p], tuple(waiting))
        for p, waiting in find_behind(reports).items()
        if reports[p].is_excused and waiting
    ]


def _of(state: WatchState) -> Iterable[tuple[int, Seen]]:
    return state.seen.items()


def _age(seen: Seen, now_s: float) -> ProcessReport:
    """Returns a report as it would be now, if nothing has changed."""
    report, age_s = seen.report, now_s - seen.at_s
    if age_s <= 0.0:
        return report
    wait = report.wait
    if wait is not None:
        wait = replace(wait, waited_s=wait.waited_s + age_s)
    state, state_s = report.state, report.state_s + age_s
    if age_s > UNHEARD_S and state != "gone":
        state, state_s = "unheard", age_s
    place_s = report.place_s + age_s
    return replace(report, place_s=place_s, state=state, state_s=state_s, wait=wait)


def _median_step_s(reports: Iterable[ProcessReport]) -> float:
    known = [report.step_s for report in reports if report.step_s > 0.0]
    return statistics.median(known) if known else 0.0


def _group_waiting(
    reports: Iterable[ProcessReport],
) -> dict[tuple[str, int], list[ProcessReport]]:
    """Returns the reports of waiting processes by what they wait for."""
    groups = collections.defaultdict[tuple[str, int], list[ProcessReport]](list)
    for report in reports:
        if report.wait is not None:
            groups[report.wait.kind, report.wait.number].append(report)
    return groups


def _find_missing(
    waiting: ProcessReport, reports: Mapping[int, ProcessReport]
) -> set[int]:
    """Returns the processes that have not come to what `waiting` waits for."""
    wait = waiting.wait
    assert wait is not None
    return {i for i, report in reports.items() if not report.has_reached(wait)}


def _find_smaller_group(reports: Sequence[ProcessReport]) -> list[int]:
    """Returns the fewest of processes that all wait for each other.

    Of two groups of one size, the group with fewer steps counts, then the group without
    process 0.
    """

    def order(group: list[ProcessReport]) -> tuple[int, int, bool]:
        steps = min(report.begun for report in group)
        return len(group), steps, any(report.process == 0 for report in group)

    groups = _group_waiting(reports)
    return [report.process for report in min(groups.values(), key=order)]


def _find_stalls(
    reports: Mapping[int, ProcessReport],
    excused: Mapping[int, float],
    *,
    now_s: float,
    limit_s: float,
) -> dict[int, Stall]:
    """Returns the processes for which others wait longer than `limit_s`."""
    found = {}

    def add(report: ProcessReport, waiting: Sequence[ProcessReport]) -> None:
        since_excused_s = now_s - excused.get(report.process, -math.inf)
        waited_s = min(_longest_s(waiting), since_excused_s)
        if report.state not in ("well", "prompt"):
            waited_s = min(waited_s, max(report.state_s, _left_s(report)))
        elif report.place == "end":
            waited_s = min(waited_s, report.place_s)
        if waiting and waited_s > limit_s:
            stall = Stall(report.process, waited_s, report, tuple(waiting))
            found[report.process] = stall

    behind = find_behind(reports)
    for process, waiting in behind.items():
        add(reports[process], waiting)
    waiting = [report for report in reports.values() if report.wait is not None]
    ill = [r for r in reports.values() if r.state not in ("well", "prompt")]
    for report in ill:
        if report.process not in behind:
            add(report, [q for q in waiting if q.process != report.process])
    return found


def _left_s(report: ProcessReport) -> float:
    """Returns for how long others may have waited before the process fell ill."""
    return 0.0 if report.place in _WAITING_PLACES else report.place_s


def _longest_s(waiting: Iterable[ProcessReport]) -> float:
    return max((q.wait.waited_s for q in waiting if q.wait is not None), default=0.0)
