"""Simulation: is the right process named, in time, whatever the schedule?

    python -m tests.watch.simulation --runs 10000 --processes 256

A job of many processes takes steps that need all. Processes load for times of a heavy
tail, compile, stop and go on, or die; reports come late; the watcher itself sleeps. An
oracle that sees the whole job, and shares no code with the rules, tells for which
processes the others have really waited.
"""

import argparse
import bisect
import random
import sys
from typing import NamedTuple

from jdp.watch import rules
from jdp.watch.process_report import Awaited, ProcessReport
from jdp.watch.rules import WatchOptions

STALL_S = 10.0
PERIOD_S = 0.5  # between the reports of a host.
_SLACK_S = 3.0  # from the limit to the alarm.
_HOST = 8  # processes per host.
_FOREVER = 1e9


class Fault(NamedTuple):
    """An interruption of one process."""

    process: int
    begin_s: float
    end_s: float
    kind: str  # "stop", "sleep", "die" or "compile".


class Schedule(NamedTuple):
    """What happens in a job.

    Attributes:
      arrivals: for each step, when each process comes to it.
      ends: for each step, when it ends for all.
      faults: interruptions.
      num_processes: number of processes.
      end_s: end of the simulation.
      sleeps: times in which the watcher does not run.
      delays: longest delay of a report, by host, in seconds.
    """

    arrivals: list[list[float]]
    ends: list[float]
    faults: list[Fault]
    num_processes: int
    end_s: float
    sleeps: list[tuple[float, float]]
    delays: list[float]


def make_schedule(rng: random.Random, num_processes: int) -> Schedule:
    """Draws a schedule."""
    faults = []
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        process = rng.randrange(num_processes)
        if process in (fault.process for fault in faults):
            continue
        begin_s = rng.uniform(1.0, 20.0)
        kind = rng.choice(["stop", "sleep", "die", "compile"])
        lasts_s = rng.choice([1.0, 5.0, 9.0, 11.0, 20.0, 40.0, _FOREVER])
        if kind == "die":
            lasts_s = _FOREVER
        elif kind == "compile":
            lasts_s = rng.choice([5.0, 15.0, 25.0])
        faults.append(Fault(process, begin_s, begin_s + lasts_s, kind))
    end_s = 60.0
    at_fault = {fault.process: fault for fault in faults}
    arrivals, ends, begin = [], [], 0.0
    program_s = rng.choice([0.05, 0.3, 1.0])
    while begin < end_s:
        row = []
        for process in range(num_processes):
            load_s = min(4.0, 0.02 * rng.paretovariate(1.5))
            row.append(_delay(begin, load_s, at_fault.get(process)))
        last = max(row)
        # A process that stops or dies in the program keeps the others there.
        ill = [fault for fault in faults if fault.kind in ("stop", "die")]
        end = last + program_s
        for fault in sorted(ill, key=lambda fault: fault.begin_s):
            if last < fault.end_s and fault.begin_s < end:
                end = max(end, fault.end_s + program_s)
        arrivals.append(row)
        ends.append(end)
        begin = end
    sleeps = []
    if rng.random() < 0.2:
        start_s = rng.uniform(5.0, 40.0)
        sleeps.append((start_s, start_s + rng.choice([3.0, 12.0, 30.0])))
    num_hosts = -(-num_processes // _HOST)
    delays = [rng.choice([0.0, 0.1, 1.0]) for _ in range(num_hosts)]
    return Schedule(arrivals, ends, faults, num_processes, end_s, sleeps, delays)


def _delay(begin_s: float, work_s: float, fault: Fault | None) -> float:
    """Returns when work ends that a fault may interrupt."""
    if fault is None or begin_s >= fault.end_s or begin_s + work_s <= fault.begin_s:
        return begin_s + work_s
    if fault.begin_s <= begin_s:
        return fault.end_s + work_s
    return begin_s + work_s + fault.end_s - fault.begin_s


class Job:
    """A schedule as its processes report it, and as the oracle sees it."""

    def __init__(self, schedule: Schedule):
        self._schedule = schedule
        self._faults = {fault.process: fault for fault in schedule.faults}

    def report(self, process: int, at_s: float) -> ProcessReport:
        """Returns the true report about a process at a time."""
        schedule = self._schedule
        step = bisect.bisect_right(schedule.ends, at_s)
        arrivals = schedule.arrivals[min(step, len(schedule.arrivals) - 1)]
        fault = self._faults.get(process)
        is_hit = fault is not None and fault.begin_s <= at_s < fault.end_s
        begin_s = schedule.ends[step - 1] if step else 0.0
        has_come = arrivals[process] <= at_s
        place, since_s = ("program", arrivals[process]) if has_come else ("python", 0)
        since_s = since_s if has_come else begin_s
        wait = None
        if has_come:
            wait = Awaited("step", step + 1, "step", at_s - arrivals[process])
        state, state_s, is_busy = "well", 1e3, True
        if is_hit and fault.kind in ("stop", "die"):
            state = "stopped" if fault.kind == "stop" else "gone"
            state_s = at_s - fault.begin_s
            if fault.kind == "die":
                wait = None
        if is_hit and fault.kind == "compile" and not has_come:
            place = "compile"
        return ProcessReport(
            process=process,
            host=process // _HOST,
            place=place,
            place_s=at_s - since_s,
            state=state,
            state_s=state_s,
            is_busy=is_busy,
            wait=wait,
            begun=step + has_come,
            reached=step + has_come,
            finished=step,
            step_s=0.0,
        )

    def holders(self, at_s: float) -> dict[int, float]:
        """Returns since when each process has held up others, if it does now.

        Time in which it compiles does not count. By the schedule alone.
        """
        schedule = self._schedule
        step = bisect.bisect_right(schedule.ends, at_s)
        if step == len(schedule.ends):
            return {}
        arrivals = schedule.arrivals[step]
        waiting = {
            i: s
            for i, s in enumerate(arrivals)
            if s <= at_s and not self._is_dead(i, at_s)
        }
        found = {}
        for process, arrived_s in enumerate(arrivals):
            others = [s for i, s in waiting.items() if i != process]
            if not others:
                continue
            since_s, fault = min(others), self._faults.get(process)
            is_hit = fault is not None and fault.begin_s <= at_s < fault.end_s
            if arrived_s <= at_s:
                if is_hit and fault.kind in ("stop", "die"):
                    found[process] = max(since_s, fault.begin_s)
                continue
            if fault is not None and fault.kind == "compile":
                if is_hit:
                    continue
                if fault.end_s <= at_s:
                    since_s = max(since_s, fault.end_s)
            found[process] = since_s
        return found

    def _is_dead(self, process: int, at_s: float) -> bool:
        fault = self._faults.get(process)
        return fault is not None and fault.kind == "die" and fault.begin_s <= at_s


def run(seed: int, num_processes: int) -> tuple[list[str], int]:
    """Runs one schedule; returns what was wrong, and how many stalls were named."""
    rng = random.Random(seed)
    schedule = make_schedule(rng, num_processes)
    job = Job(schedule)
    state = rules.start(WatchOptions(STALL_S, num_processes), now_s=0.0)
    wrong: list[str] = []
    due: dict[int, float] = {}  # when a process must have been named.
    named: set[int] = set()
    awake_s = 0.0
    num_named, at_s = 0, 0.0
    while at_s < schedule.end_s:
        at_s += PERIOD_S
        if any(begin <= at_s < end for begin, end in schedule.sleeps):
            continue
        slept = [end for _, end in schedule.sleeps if end <= at_s]
        awake_s = max([0.0, *slept])
        for host, most_s in enumerate(schedule.delays):
            sent_s = max(0.0, at_s - rng.uniform(0.0, most_s))
            first = host * _HOST
            members = range(first, min(first + _HOST, num_processes))
            reports = [job.report(i, sent_s) for i in members]
            state = rules.receive(state, reports, now_s=at_s)
        state, findings = rules.tick(state, now_s=at_s)
        for stall in findings.begun:
            num_named += 1
            named.add(stall.process)
            since_s = _since(job, stall.process, at_s)
            if since_s is None or at_s - since_s < STALL_S - 2 * PERIOD_S:
                wrong.append(f"{seed}: {stall.process} named at {at_s}, held {since_s}")
        for each in findings.resumed:
            named.discard(each.process)
        held = job.holders(at_s)
        due = {i: due.get(i, 0.0) for i in held}
        for process, since_s in held.items():
            late_s = at_s - max(since_s, awake_s) - STALL_S - _SLACK_S
            if late_s > 0.0 and process not in named:
                wrong.append(f"{seed}: {process} missed at {at_s}, held {since_s}")
    return wrong, num_named


def _since(job: Job, process: int, at_s: float) -> float | None:
    """Returns since when a process holds up others, now or a moment ago.

    Reports are late, so an alarm may come a moment after the process has gone on.
    """
    held = [job.holders(at_s - before_s) for before_s in (0.0, 0.5, 1.0, 1.5)]
    return min((each[process] for each in held if process in each), default=None)


def main() -> None:
    """Runs many schedules."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=256)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    num_named = num_wrong = 0
    for seed in range(options.first, options.first + options.runs):
        wrong, count = run(seed, options.processes)
        num_named += count
        num_wrong += len(wrong)
        for text in wrong[:3]:
            print(text)
    print(f"{options.runs} schedules, {num_named} named, {num_wrong} wrong or missed")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
