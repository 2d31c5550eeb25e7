"""Timeline merge: how do records and timelines of a job become one file?"""

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from jdp.eager.diagnosis import timeline as eager_timeline
from jdp.watch import record_file, timeline_page, trace
from jdp.watch.record_file import Recorded
from jdp.watch.trace import Span

_RECORDS = "record_*.jsonl"  # of a folder.
_RECORD_BEGINS = b'{"jdp_record"'
_PAGE = ".html"
# Threads of the eager engine come after the threads of the record.
_FIRST_TID = 100

_Timeline = tuple[str, int, list[dict[str, Any]]]  # path, start in us, events.


def merge(files: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> str:
    """Merges records of processes, and timelines of the eager engine.

    Args:
      files: folders of `jdp launch --timeline`, files of them, and timelines.
      out: the file to write: a page if it ends with ".html", else Chrome's format.

    Returns:
      What is in it, such as "processes 0, 1".

    Raises:
      OSError: a file cannot be read or written; the error has the path.
      ValueError: a file is neither, or two are of the same process.
    """
    records, paths = {}, []
    for path in _find(files):
        with open(path, "rb") as file:
            is_record = file.read(len(_RECORD_BEGINS)) == _RECORD_BEGINS
        if is_record:
            records[path] = record_file.read(path)
        else:
            paths.append(path)
    is_page = os.fspath(out).endswith(_PAGE)
    if not records and not is_page:
        return _name("rank", eager_timeline.merge(paths, out))
    trace.check(records)
    found = sorted(records.values(), key=lambda each: each.process)
    timelines = [(path, *eager_timeline.read(path)) for path in paths]
    if is_page:
        lanes = [_make_lane(each, found) for each in timelines]
        pathlib.Path(out).write_text(timeline_page.make(found, lanes))
    else:
        _write_events(found, timelines, out)
    ranks = {event["pid"] for *_, events in timelines for event in events}
    return _name("process", sorted({each.process for each in found} | ranks))


def _find(files: Sequence[str | os.PathLike[str]]) -> Iterator[str]:
    for path in map(pathlib.Path, files):
        if not path.is_dir():
            yield os.fspath(path)
            continue
        found = sorted(path.glob(_RECORDS))
        if not found:
            raise ValueError(
                f"{path} has no {_RECORDS}, as `jdp launch --timeline` writes it."
            )
        yield from map(os.fspath, found)


def _write_events(
    records: Sequence[Recorded],
    timelines: Sequence[_Timeline],
    out: str | os.PathLike[str],
) -> None:
    first_ns, epoch_ns = trace.find_start(records)
    zero_us = (first_ns + epoch_ns) / 1000
    events = [*trace.make_events(records, first_ns=first_ns)]
    known = {each.process for each in records}
    for _, start_us, some in timelines:
        for event in some:
            if event.get("name") == "process_name" and event["pid"] in known:
                continue
            if "tid" in event:
                event["tid"] += _FIRST_TID
            if "ts" in event:
                event["ts"] += start_us - zero_us
            events.append(event)
    with open(out, "wb") as file:
        file.write(b"[\n" + b",\n".join(map(msgspec.json.encode, events)) + b"\n]\n")


def _make_lane(
    timeline: _Timeline, records: Sequence[Recorded]
) -> tuple[str, list[Span]]:
    """Returns the spans of a rank of the eager engine, in one lane."""
    _, start_us, events = timeline
    epoch_ns = trace.find_start(records)[1] if records else 0
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "thread_name"
    }
    rank = events[0]["pid"]
    spans = []
    for event in events:
        if "dur" in event:
            name = f"{event['name']} {names.get(event['tid'], '')}".rstrip()
            begin_ns = round((start_us + event["ts"]) * 1000) - epoch_ns
            end_ns = begin_ns + round(event["dur"] * 1000)
            spans.append(Span(rank, 0, name, begin_ns, end_ns, event["tid"]))
    return f"process {rank}, jdp.eager", sorted(spans, key=lambda span: span.begin_ns)


def _name(noun: str, indices: Sequence[int]) -> str:
    if len(indices) != 1:
        noun += "es" if noun.endswith("s") else "s"
    return f"{noun} {', '.join(map(str, indices))}"
