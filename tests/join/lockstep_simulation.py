"""Lockstep in simulated time: many processes, random delays, steps as collectives.

`python -m tests.join.lockstep_simulation --runs 10000` is the long test. Every run
draws counts, sizes, prefetch and delays; the same seed gives the same run.
"""

import argparse
import heapq
import itertools
import time
from typing import NamedTuple

import numpy as np

from jdp.join import lockstep
from jdp.join.batch_spec import BatchLeafSpec, BatchSpec

SPECS = [
    BatchSpec("PyTreeDef(*)", b'"*"', (BatchLeafSpec("(root)", "float32", (width,)),))
    for width in (1, 2, 3)
]


class Job(NamedTuple):
    """What is random in a run."""

    sizes: list[tuple[int, ...]]  # per process and batch: samples per replica.
    read_s: list[list[float]]  # per process and batch, and the end: to read it.
    step_s: list[float]  # per iteration.
    prefetch: list[int]  # per process.
    message_s: np.ndarray  # a stock of delays that messages take in turn.
    specs: tuple[tuple[int, int], ...] = ((0, 0),)  # (iteration, number in `SPECS`).
    timeout_s: float = 1e9
    fails_at: dict[int, int] = {}  # noqa: RUF012  process -> the batch it cannot read.


class Result(NamedTuple):
    """What became of a run."""

    iterations: list[list[int]]  # per process: samples per replica, by iteration.
    decided: list[list[tuple[int, int]]]  # per process: (iteration, spec) changes.
    error: str | None
    num_begun: int
    num_rounds: int
    num_held: int  # the most batches that a process held before its loop.
    seconds: float  # simulated.


class Deadlock(Exception):
    """Nothing is left to happen, and the loop has not ended."""


def draw_job(rng: np.random.Generator, num_processes: int, max_count: int) -> Job:
    """Draws a job; about as often slow readers as slow steps or slow messages."""
    n = num_processes
    counts = rng.integers(0, max_count + 1, n)
    if rng.random() < 0.2:
        counts[:] = counts[0]
    counts[rng.random(n) < rng.choice([0.0, 0.0, 0.3, 0.9])] = 0
    scale_s = 10.0 ** rng.uniform(-5, -1, 3)  # of reading, steps, messages.
    pace = rng.lognormal(0.0, rng.choice([0.0, 1.0]), n)
    full = int(rng.integers(1, 33))
    prefetch = int(rng.integers(1, 65))
    is_same = rng.random() < 0.5
    stock = rng.exponential(scale_s[0], max_count + 2)
    cuts = rng.integers(0, max_count + 1, 2 * n).tolist()
    sizes = np.full(max_count, full)
    return Job(
        sizes=[
            tuple(np.append(sizes[: c - 1], rng.integers(0, full + 1)).tolist())
            if c
            else ()
            for c in counts
        ],
        read_s=[
            # A window of one stock of delays, at the pace of the process.
            (np.roll(stock, cuts[p])[: c + 1] * pace[p]).tolist()
            for p, c in enumerate(counts)
        ],
        step_s=rng.exponential(scale_s[1], int(counts.max()) + 1).tolist(),
        prefetch=[prefetch] * n
        if is_same
        else (prefetch + rng.integers(0, 9, n)).tolist(),
        message_s=rng.exponential(scale_s[2], 1021),
    )


class _Process:
    """One process of a run."""

    __slots__ = (
        "member sizes read_s fails_at num_sizes num_read read_at_s version posted "
        "announced_s changes specs iterations decided proposal decided_spec ends_at"
    ).split()

    def __init__(self, job: Job, index: int):
        self.member = lockstep.MemberState(prefetch=job.prefetch[index])
        self.sizes = job.sizes[index]
        self.read_s = job.read_s[index]
        self.fails_at = job.fails_at.get(index)
        self.num_sizes = len(self.sizes) if self.fails_at is None else self.fails_at
        self.num_read = 0
        self.read_at_s = 0.0  # when the last of them was.
        self.changes = [(i, SPECS[k]) for i, k in job.specs if i < self.num_sizes]
        self.version = 0  # of the wake-up that counts.
        self.posted = False
        self.announced_s = 0.0
        self.iterations: list[int] = []
        self.decided: list[tuple[int, int]] = []
        self.proposal = None
        self.specs: list[BatchSpec] = []


class Simulation:
    """One run: an event heap, processes, process 0's coordinator."""

    def __init__(self, job: Job, decide=lockstep.decide):
        self.job = job
        self.decide = decide
        self.processes = [_Process(job, p) for p in range(len(job.sizes))]
        self.coordinator = lockstep.start_coordinator(
            len(self.processes), timeout_s=job.timeout_s
        )
        self.delays = itertools.cycle(job.message_s.tolist())
        self.heap: list[tuple[float, int, str, int, int]] = []
        self.order = itertools.count()
        self.announcements: list = [None] * len(self.processes)
        self.num_missing = len(self.processes)
        self.complete_s = 0.0
        self.num_rounds = 0
        self.num_held = 0
        self.begun_s: list[float] = []  # when each iteration began, on all.
        self.reached_s: list[tuple[int, float]] = []
        self.decision = None
        self.num_everywhere = 0  # iterations that all processes know of.
        self.num_decided = 0
        self.num_receiving = 0
        self.is_stepping = False
        self.waiting_since_s = 0.0  # since when the loops wait for an iteration.

    def push(self, time_s: float, kind: str, process: int = -1, version: int = 0):
        heapq.heappush(self.heap, (time_s, next(self.order), kind, process, version))

    def run(self) -> Result:
        for p in range(len(self.processes)):
            self.consider(p, 0.0)
        now_s = 0.0
        while True:
            if not self.heap:
                raise Deadlock(f"at {now_s} s, in round {self.num_rounds}")
            now_s, _, kind, p, version = heapq.heappop(self.heap)
            if kind == "wake":
                process = self.processes[p]
                if version == process.version and not process.posted:
                    self.consider(p, now_s)
            elif kind == "decide":
                self.publish(now_s)
            elif kind == "receive":
                self.receive(p, now_s)
            elif kind == "step":
                self.is_stepping = False
                self.waiting_since_s = now_s
                self.begin(now_s)
            if (
                self.decision is not None
                and self.decision.is_final
                and self.num_receiving == 0
                and not self.is_stepping
                and len(self.begun_s) == self.num_everywhere
            ):
                break
        return Result(
            [process.iterations for process in self.processes],
            [process.decided for process in self.processes],
            self.decision.error,
            len(self.begun_s),
            self.num_rounds,
            self.num_held,
            now_s,
        )

    def read_until(self, process: _Process, now_s: float, stop: int) -> float:
        """Reads what there is time and space for, up to batch `stop`.

        Returns:
          When batch `stop - 1` is read, or the end; infinity while there is no space.
        """
        k, read_at_s, read_s = process.num_read, process.read_at_s, process.read_s
        begun_s = self.begun_s
        freed, num_begun = k - process.member.prefetch, len(begun_s)
        start, num_read, until_s = k, k, read_at_s
        while k < stop and freed < num_begun:
            if freed >= 0 and begun_s[freed] > until_s:
                until_s = begun_s[freed]
            until_s += read_s[k]
            k += 1
            freed += 1
            if until_s <= now_s:
                num_read, read_at_s = k, until_s
        process.num_read, process.read_at_s = num_read, read_at_s
        if num_read > start:
            specs = ()
            if process.changes and process.changes[0][0] < num_read:
                changes = process.changes
                specs = tuple((i - start, s) for i, s in changes if i < num_read)
                process.changes = [c for c in changes if c[0] >= num_read]
            sizes = process.sizes[start:num_read]
            process.member = lockstep.read(process.member, sizes, specs)
            self.num_held = max(self.num_held, num_read - min(num_begun, num_read))
        if k < stop:
            return np.inf
        if num_read == process.num_sizes:  # Reading one more finds the end.
            if freed >= num_begun:
                return np.inf
            if freed >= 0 and begun_s[freed] > until_s:
                until_s = begun_s[freed]
            until_s += read_s[k]
            if until_s <= now_s:
                error = None if process.fails_at is None else "ValueError: boom"
                process.member = lockstep.end(process.member, error)
        return until_s

    def consider(self, p: int, now_s: float) -> None:
        """Lets process `p` announce, or says when to look again."""
        process = self.processes[p]
        member, num_begun = process.member, len(self.begun_s)
        is_dry = member.num_decided <= num_begun
        next_s = np.inf
        if not member.has_ended:
            # Everything that is read by now, and when there will be enough.
            window = 1 if is_dry else member.prefetch - member.prefetch // 4
            known = member.num_announced + len(member.sizes)
            total = process.num_sizes
            stop = min(total, max(member.num_announced + window, known))
            next_s = self.read_until(process, now_s, stop)
            if next_s <= now_s and not process.member.has_ended:
                next_s = self.read_until(process, now_s, total)
            member = process.member
        process.version += 1
        reading_s = 0.0
        if not lockstep.has_to_announce(member, num_begun):
            alive_s = process.announced_s + self.job.timeout_s / 2
            if next_s < np.inf and not self.is_stepping and not member.sizes:
                started_s = next_s - process.read_s[process.num_read]
                since_s = max(started_s, self.waiting_since_s)
                reading_s = max(0.0, now_s - since_s)
                alive_s = min(alive_s, since_s + self.job.timeout_s)
            if now_s < alive_s:
                wake_s = min(next_s, alive_s)
                if wake_s < 1e8:
                    self.push(wake_s, "wake", p, process.version)
                return
        process.member, announcement = lockstep.announce(member, reading_s)
        process.posted = True
        process.announced_s = now_s
        assert self.announcements[p] is None
        self.announcements[p] = announcement
        self.complete_s = max(self.complete_s, now_s + next(self.delays))
        self.num_missing -= 1
        if self.num_missing == 0:
            self.push(self.complete_s, "decide")

    def publish(self, now_s: float) -> None:
        self.coordinator, self.decision = self.decide(
            self.coordinator, self.announcements
        )
        n = len(self.processes)
        self.announcements = [None] * n
        self.num_missing = self.num_receiving = n
        self.complete_s = now_s
        self.num_decided += len(self.decision.sizes)
        self.num_rounds += 1
        if self.num_rounds > 20 * len(self.job.step_s) + 100:
            raise Deadlock(f"at {now_s} s, after {self.num_rounds} rounds")
        for p in range(n):
            self.push(now_s + next(self.delays), "receive", p)

    def receive(self, p: int, now_s: float) -> None:
        process, decision = self.processes[p], self.decision
        process.member = lockstep.receive(process.member, decision)
        if process.proposal is not None and decision.error is None:
            process.specs.append(process.proposal)
        process.proposal = decision.proposal
        if decision.specs:
            start = len(process.iterations)
            changes = [(start + i, k) for i, k in decision.specs]
            process.decided += changes
        process.iterations += decision.sizes
        self.num_receiving -= 1
        process.posted = False
        if self.num_receiving == 0:
            self.num_everywhere = self.num_decided
            self.begin(now_s)
        if not decision.is_final and not process.posted:
            self.consider(p, now_s)

    def begin(self, now_s: float) -> None:
        """Begins the next step on all processes, once all know of it."""
        i = len(self.begun_s)
        if self.is_stepping or i >= self.num_everywhere:
            return
        self.begun_s.append(now_s)
        self.is_stepping = True
        self.push(now_s + self.job.step_s[i], "step")
        for p, process in enumerate(self.processes):
            # Those that wait for their loop look when there is nothing left before it,
            # and when there is space for all that they wait to read.
            left = process.member.num_decided - i - 1
            if not process.posted and (
                left <= 0 or left == process.member.prefetch // 4
            ):
                self.consider(p, now_s)


def find_errors(job: Job, result: Result) -> list[str]:
    """Compares a run without failures with what must come out."""
    errors = []
    counts = [len(sizes) for sizes in job.sizes]
    last = max(counts)
    if result.error is not None:
        errors.append(f"error: {result.error}")
    if result.num_begun != last:
        errors.append(f"{result.num_begun} iterations, must be {last}")
    if any(seen != result.iterations[0] for seen in result.iterations):
        errors.append("processes disagree on the samples per replica")
    if any(seen != result.decided[0] for seen in result.decided):
        errors.append("processes disagree on the specs")
    expected = expected_sizes(job)
    if result.iterations[0] != expected:
        errors.append(f"{result.iterations[0][:5]}..., must be {expected[:5]}...")
    if result.num_held > max(job.prefetch):
        errors.append(f"{result.num_held} batches held, prefetch {max(job.prefetch)}")
    return errors


def expected_sizes(job: Job) -> list[int]:
    """The largest size of any process at each iteration, never less than before."""
    last = max(len(sizes) for sizes in job.sizes)
    largest = np.zeros(last, int)
    for sizes in job.sizes:
        if sizes:
            np.maximum(largest[: len(sizes)], sizes, out=largest[: len(sizes)])
    places = [*job.specs, (last, -1)]
    marks: dict[int, int] = {}
    expected: list[int] = []
    for (start, k), (stop, _) in itertools.pairwise(places):
        for i in range(start, min(stop, last)):
            marks[k] = max(marks.get(k, 1), int(largest[i]))
            expected.append(marks[k])
    return expected


def run_many(
    num_runs: int, num_processes: int, seed: int = 0, decide=lockstep.decide
) -> tuple[int, int, list[str]]:
    """Runs seeds `seed`, `seed + 1`, ...; returns iterations, rounds and errors."""
    errors, num_iterations, num_rounds = [], 0, 0
    for run in range(seed, seed + num_runs):
        rng = np.random.default_rng(run)
        max_count = int(rng.choice([1, 10, 1000, 1000, 1000, 1000]))
        job = draw_job(rng, num_processes, max_count)
        try:
            result = Simulation(job, decide).run()
        except Deadlock as deadlock:
            errors.append(f"seed {run}: deadlock {deadlock}")
            continue
        num_iterations += result.num_begun
        num_rounds += result.num_rounds
        errors += [f"seed {run}: {text}" for text in find_errors(job, result)]
    return num_iterations, num_rounds, errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start_s = time.monotonic()
    iterations, rounds, errors = run_many(options.runs, options.processes, options.seed)
    for error in errors[:20]:
        print(error)
    print(
        f"{options.runs} runs of {options.processes} processes, {iterations} "
        f"iterations, {rounds} rounds, {time.monotonic() - start_s:.0f} s, "
        f"{len(errors)} errors"
    )
    raise SystemExit(bool(errors))


if __name__ == "__main__":
    main()
