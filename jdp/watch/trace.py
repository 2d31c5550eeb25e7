"""Trace: what did each process do, as spans on one clock?

Pure: records in, spans and events of Chrome's trace format out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jdp.replicas import stamps
from jdp.watch import shares
from jdp.watch.record import Entry
from jdp.watch.record_file import Recorded
from jdp.watch.shares import SharesState, StepSample
from jdp.watch.stragglers import StepShares, Stragglers

TRACKS = ("main thread", "programs", "compiler", "loader thread")
_MAIN, _PROGRAMS, _COMPILER, _LOADER = range(len(TRACKS))
# By the kind of the begin; the kind of the end follows.
_PAIRS = {
    stamps.INIT_BEGUN: (_MAIN, "jdp.init"),
    stamps.COMPILE_BEGUN: (_COMPILER, "compile"),
    stamps.READ_BEGUN: (_LOADER, "read"),
    stamps.LOAD_BEGUN: (_MAIN, "load"),
    stamps.MEETING_BEGUN: (_MAIN, "meeting"),
    stamps.ITERATION_BEGUN: (_MAIN, "wait for a batch"),
    stamps.EAGER_BEGUN: (_MAIN, "jdp.eager"),
    stamps.TRACE_BEGUN: (_MAIN, "trace"),
}
_ENDED = {kind + 1: kind for kind in _PAIRS}
_STEP_ENDS = (stamps.STEP_DISPATCHED, stamps.STEP_FAILED)
_MOST_MEANS = 1 << 20


class Span(NamedTuple):
    """Something that a process has done.

    Attributes:
      process: index of the process.
      track: index into `TRACKS`.
      name: name of the step, program, meeting or operation.
      begin_ns: when it began, on the clock of host 0.
      end_ns: when it ended.
      number: number of the step, meeting or iteration.
      is_open: whether the record ends before it.
    """

    process: int
    track: int
    name: str
    begin_ns: int
    end_ns: int
    number: int
    is_open: bool = False


class Summary(NamedTuple):
    """Where the time of the steps of a process has gone.

    Attributes:
      process: index of the process.
      num_steps: steps that are compared.
      shares: the mean of these steps.
    """

    process: int
    num_steps: int
    shares: StepShares


def make_spans(recorded: Recorded) -> list[Span]:
    """Returns the spans of a process, in the order of their begins."""
    return sorted(_find_spans(recorded.process, recorded.entries), key=_by_begin)


def summarize(records: Sequence[Recorded]) -> list[Summary]:
    """Returns where the time of each process has gone, the slowest first.

    Processes are compared over the steps that all records have.
    """
    if not records:
        return []
    samples: list[dict[int, StepSample]] = []
    for recorded in records:
        _, found = shares.follow(SharesState(), recorded.entries)
        samples.append({sample.step: sample for sample in found})
    common = sorted(set.intersection(*map(set, samples)))
    if len(common) < 2:
        return [Summary(each.process, 0, StepShares()) for each in records]
    means = Stragglers(len(records), most_means=_MOST_MEANS)
    for step in common:
        for index, each in enumerate(samples):
            means.add(index, [each[step]])
    num_steps = len(common) - 1
    summaries = [
        Summary(each.process, num_steps, means.mean(i))
        for i, each in enumerate(records)
    ]
    return sorted(summaries, key=lambda each: -each.shares.work_s)


def make_events(
    records: Sequence[Recorded], *, first_ns: int
) -> Iterator[dict[str, Any]]:
    """Yields events of Chrome's trace format; a process is a process of the trace.

    Args:
      records: records of different processes.
      first_ns: the time of the trace's zero, on the clock of host 0.
    """
    for recorded in records:
        pid = recorded.process
        name = f"process {pid} ({recorded.host_name})"
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
        for tid, track in enumerate(TRACKS, start=1):
            args = {"name": track}
            yield dict(name="thread_name", ph="M", pid=pid, tid=tid, args=args)
        for span in make_spans(recorded):
            yield {
                "name": span.name,
                "ph": "X",
                "pid": pid,
                "tid": span.track + 1,
                "ts": (span.begin_ns - first_ns) / 1000,
                "dur": (span.end_ns - span.begin_ns) / 1000,
                "args": {"number": span.number, "is_open": span.is_open},
            }


def _by_begin(span: Span) -> tuple[int, int]:
    return span.begin_ns, -span.end_ns


def _find_spans(process: int, entries: Iterable[Entry]) -> Iterator[Span]:
    open_at: dict[int, list[Entry]] = {}
    step: Entry | None = None
    arrived: dict[int, tuple[int, str]] = {}  # when it came to each program.
    finished_ns = last_ns = 0
    for entry in entries:
        kind, last_ns = entry.kind, max(last_ns, entry.at_ns)
        if kind in _PAIRS:
            open_at.setdefault(kind, []).append(entry)
        elif kind in _ENDED:
            begun = open_at.get(_ENDED[kind])
            if begun:
                yield _close(process, begun.pop(), entry.at_ns)
        elif kind == stamps.STEP_BEGUN:
            step = entry
        elif kind == stamps.STEP_PLACED and step is not None:
            arrived[step.number] = entry.at_ns, step.name
        elif kind in _STEP_ENDS and step is not None:
            name = f"call {step.name}"
            if kind == stamps.STEP_FAILED:
                name += " (raised)"
                arrived.pop(step.number, None)
            place = process, _MAIN, name
            yield Span(*place, step.at_ns, entry.at_ns, step.number)
            step = None
        elif kind == stamps.STEP_FINISHED:
            yield from _finish(process, arrived, entry, finished_ns)
            finished_ns = entry.at_ns
    for begun in open_at.values():
        for entry in begun:
            yield _close(process, entry, last_ns)._replace(is_open=True)
    for number, (begin_ns, name) in arrived.items():
        begin_ns = max(begin_ns, finished_ns)
        yield Span(process, _PROGRAMS, name, begin_ns, last_ns, number, is_open=True)
        finished_ns = last_ns


def _close(process: int, begun: Entry, end_ns: int) -> Span:
    track, name = _PAIRS[begun.kind]
    if begun.name:
        name = f"{name} {begun.name}"
    return Span(process, track, name, begun.at_ns, end_ns, begun.number)


def _finish(
    process: int,
    arrived: dict[int, tuple[int, str]],
    entry: Entry,
    finished_ns: int,
) -> Iterator[Span]:
    """Yields the programs that have ended; of several, the ends are not known."""
    ended = sorted(number for number in arrived if number <= entry.number)
    for i, number in enumerate(ended):
        begin_ns, name = arrived.pop(number)
        begin_ns = max(begin_ns, finished_ns)
        left = len(ended) - i
        end_ns = begin_ns + max(0, entry.at_ns - begin_ns) // left
        yield Span(process, _PROGRAMS, name, begin_ns, end_ns, number)
        finished_ns = end_ns


def find_start(records: Sequence[Recorded]) -> tuple[int, int]:
    """Returns the first time of records, and its difference to the epoch, in ns."""
    first_ns = min(each.entries[0].at_ns for each in records if each.entries)
    host = min(records, key=lambda each: each.host)
    return first_ns, host.epoch_ns


def check(records: Mapping[str, Recorded]) -> None:
    """Checks that records are of different processes, and have entries.

    Args:
      records: by path.

    Raises:
      ValueError: two are of one process, or all are empty.
    """
    paths: dict[int, str] = {}
    for path, recorded in records.items():
        other = paths.setdefault(recorded.process, path)
        if other != path:
            raise ValueError(
                f"{other} and {path} are both of process {recorded.process}."
            )
    if records and not any(recorded.entries for recorded in records.values()):
        raise ValueError("The records are empty: no process has come to `jdp.init`.")
