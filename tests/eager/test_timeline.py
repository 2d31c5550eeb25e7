"""The timeline of a rank: a file of trace events, whatever becomes of the process."""

import json
import logging
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time

import pytest

from jdp.eager.diagnosis import timeline
from tests import harness

PHASES = (
    "NEGOTIATE_ALL_REDUCE",
    "QUEUE",
    "MEMCPY_IN_FUSION_BUFFER",
    "ALL_REDUCE",
    "MEMCPY_OUT_FUSION_BUFFER",
)
REQUIRED = {
    "M": {"name", "ph", "pid", "args"},
    "X": {"name", "ph", "ts", "dur", "pid", "tid"},
    "i": {"name", "ph", "ts", "s", "pid", "tid"},
}


def _read(path):
    return json.loads(pathlib.Path(path).read_text())


def _of_kind(events, kind):
    return [event for event in events if event["ph"] == kind]


def _threads(events):
    """Threads by rank and tid, each named once."""
    metadata = [event for event in events if event["name"] == "thread_name"]
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in metadata}
    assert len(names) == len(metadata)
    return names


def _check(events):
    """Checks what a viewer relies on."""
    threads = _threads(events)
    ends_ns = {}
    for event in events:
        assert REQUIRED[event["ph"]] <= set(event), event
        if event["ph"] == "M":
            continue
        key = (event["pid"], event["tid"])
        assert key in threads and event["tid"] >= 1 and event["ts"] >= 0
        if event["ph"] == "X":
            start_ns = round(event["ts"] * 1000)
            assert event["dur"] >= 0 and start_ns >= ends_ns.get(key, 0), event
            ends_ns[key] = start_ns + round(event["dur"] * 1000)


def _trace_all_reduces(path, rank, names, *, start_s=None, seed=0, **options):
    """Phases that touch, of odd lengths, one tensor after the other."""
    rng = random.Random(seed)
    traced = timeline.RankTimeline(path, rank=rank, **options)
    at_s = time.perf_counter() if start_s is None else start_s
    for name in names:
        traced.mark_cycle(at_s)
        for phase in PHASES:
            end_s = at_s + rng.uniform(0, 3e-4)
            traced.add_span(name, phase, at_s, end_s, num_bytes=4096)
            at_s = end_s
    return traced


def test_a_closed_file_has_the_phases_of_each_tensor_in_order(tmp_path):
    path = tmp_path / "trace.json"
    names = [f'grad/{i % 7}"\n' for i in range(300)]
    _trace_all_reduces(path, 3, names).close()
    events = _read(path)
    _check(events)
    first, second = events[:2]
    assert (first["name"], first["args"]["name"]) == ("process_name", "rank 3")
    assert (second["name"], second["args"]) == ("process_sort_index", {"sort_index": 3})
    assert {event["pid"] for event in events} == {3}
    assert sorted(_threads(events).values()) == sorted(set(names))
    spans = _of_kind(events, "X")
    assert [span["name"] for span in spans] == list(PHASES) * len(names)
    assert all(span["args"] == {"num_bytes": 4096} for span in spans)


def test_times_are_microseconds_from_a_start_on_the_wall_clock(tmp_path):
    before_us = time.time() * 1e6
    traced = timeline.RankTimeline(tmp_path / "t.json", rank=0)
    opened_s = time.perf_counter()
    after_us = time.time() * 1e6
    traced.add_span("x", "QUEUE", opened_s + 0.25, opened_s + 0.75)
    traced.add_instant("x", "rank 3 is ready", opened_s + 0.5)
    traced.close()
    events = _read(tmp_path / "t.json")
    start_us = events[0]["args"]["start_time_since_epoch_in_micros"]
    assert before_us - 1 <= start_us <= after_us
    (span,), (instant,) = _of_kind(events, "X"), _of_kind(events, "i")
    assert span["dur"] == pytest.approx(500_000, abs=0.01)
    assert instant["ts"] - span["ts"] == pytest.approx(250_000, abs=0.01)
    assert 250_000 <= span["ts"] <= 250_000 + (after_us - before_us) + 1
    assert (instant["name"], instant["s"]) == ("rank 3 is ready", "t")


def test_what_was_before_the_start_is_cut_off(tmp_path):
    began_s = time.perf_counter()
    traced = timeline.RankTimeline(tmp_path / "t.json", rank=0)
    traced.add_span("x", "QUEUE", began_s - 2, began_s - 1)
    traced.add_span("x", "ALL_REDUCE", began_s - 1, began_s + 1)
    traced.add_instant("x", "rank 1 is ready", began_s - 1)
    traced.close()
    (span,) = [event for event in _read(tmp_path / "t.json") if event["ph"] != "M"]
    assert (span["name"], span["ts"]) == ("ALL_REDUCE", 0)
    assert 0 < span["dur"] <= 1e6


@pytest.mark.parametrize("mark_cycles", [False, True])
def test_cycles_are_marked_where_it_is_asked_for(tmp_path, mark_cycles):
    path = tmp_path / "t.json"
    _trace_all_reduces(path, 0, ["a"] * 9, mark_cycles=mark_cycles).close()
    marks = _of_kind(_read(path), "i")
    assert [mark["name"] for mark in marks] == ["CYCLE_START"] * 9 * mark_cycles


def test_closing_twice_and_adding_after_it_change_nothing(tmp_path):
    path = tmp_path / "t.json"
    traced = _trace_all_reduces(path, 0, ["a", "b"])
    traced.close()
    content = path.read_bytes()
    traced.add_span("c", "QUEUE", 0.0, time.perf_counter() + 10)
    traced.add_instant("c", "x", time.perf_counter() + 10)
    traced.mark_cycle(time.perf_counter() + 10)
    traced.close()
    assert path.read_bytes() == content


def test_values_that_json_lacks_are_written_as_text(tmp_path):
    traced = timeline.RankTimeline(tmp_path / "t.json", rank=0)
    now_s = time.perf_counter()
    args = {"names": ("a", "b"), "path": pathlib.Path("p"), "rate": float("nan")}
    traced.add_span("x", "ALL_REDUCE", now_s, now_s, **args)
    traced.close()
    (span,) = _of_kind(_read(tmp_path / "t.json"), "X")
    assert span["args"] == {"names": ["a", "b"], "path": "p", "rate": None}


def test_a_file_that_is_not_closed_lacks_the_last_second_and_the_bracket(tmp_path):
    path = tmp_path / "t.json"
    traced = timeline.RankTimeline(path, rank=0)
    start_s = time.perf_counter()
    for i in range(21):
        traced.add_span("x", "QUEUE", start_s + i / 10, start_s + (i + 1) / 10)
    events = json.loads(path.read_text() + "]")
    _check(events)
    assert 10 <= len(_of_kind(events, "X")) < 21
    # The engine waits: no more spans, but cycles.
    traced.mark_cycle(start_s + 3.5)
    assert len(_of_kind(json.loads(path.read_text() + "]"), "X")) == 21
    traced.close()


def test_memory_stays_bounded_while_spans_are_short(tmp_path):
    path = tmp_path / "t.json"
    traced = timeline.RankTimeline(path, rank=0)
    start_s = time.perf_counter()
    for _ in range(5000):
        traced.add_span("x", "QUEUE", start_s, start_s)
        traced.add_instant("x", "rank 1 is ready", start_s)
    assert len(_of_kind(json.loads(path.read_text() + "]"), "X")) >= 4000
    traced.close()


@pytest.mark.multiprocess
def test_what_a_killed_process_leaves_behind_can_be_read(tmp_path):
    code = """
import os, signal, sys, time
from jdp.eager.diagnosis import timeline
traced = timeline.RankTimeline(sys.argv[1], rank=0)
start_s = time.perf_counter()
for i in range(1000):
    traced.add_span(f"grad/{i % 5}", "ALL_REDUCE", start_s, start_s)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "t.json"
    done = subprocess.run(
        [sys.executable, "-c", code, path], cwd=harness.ROOT, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    events = json.loads(path.read_text() + "]")
    assert len(_of_kind(events, "X")) >= 488


def test_a_path_that_cannot_be_written_is_in_the_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere/t.json"):
        timeline.RankTimeline(tmp_path / "nowhere/t.json", rank=0)
    if pathlib.Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space left.*/dev/full"):
            timeline.RankTimeline("/dev/full", rank=0)


def test_a_disk_that_fills_ends_the_timeline_and_not_the_engine(tmp_path, caplog):
    path = tmp_path / "t.json"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    try:
        with caplog.at_level(logging.WARNING, logger="jdp"):
            traced = _trace_all_reduces(path, 5, [f"grad/{i}" for i in range(1000)])
            traced.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (record,) = caplog.records
    assert "Rank 5 ends its timeline" in record.getMessage()
    assert str(path) in record.getMessage()
    events = _read(path)  # with its bracket: the part of an event was taken away.
    _check(events)
    assert len(_of_kind(events, "X")) > 100


def test_the_path_of_a_rank():
    assert timeline.rank_path("a.b/trace.json", 0) == pathlib.Path(
        "a.b/trace.rank0.json"
    )
    assert timeline.rank_path("trace", 12) == pathlib.Path("trace.rank12")


def test_merged_ranks_lie_over_each_other_by_the_wall_clock(tmp_path, monkeypatch):
    paths = []
    for rank, start_us in enumerate([2_000_500, 2_000_000, 2_000_750]):
        monkeypatch.setattr(time, "time_ns", lambda us=start_us: us * 1000)
        paths.append(timeline.rank_path(tmp_path / "trace.json", rank))
        traced = timeline.RankTimeline(paths[-1], rank=rank)
        traced.add_span("x", "QUEUE", traced._start_s, traced._start_s + 1e-3)
        traced.add_span("x", "ALL_REDUCE", traced._start_s + 1e-3, traced._start_s + 1)
        traced.close()
    out = tmp_path / "all.json"
    assert timeline.merge(paths, out) == [0, 1, 2]
    events = _read(out)
    _check(events)
    queues = {event["pid"]: event for event in events if event["name"] == "QUEUE"}
    assert {rank: queue["ts"] for rank, queue in queues.items()} == {
        0: 500,
        1: 0,
        2: 750,
    }
    starts = {
        event["args"]["start_time_since_epoch_in_micros"]
        for event in events
        if event["name"] == "process_name"
    }
    assert starts == {2_000_000}
    again = tmp_path / "again.json"
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000 * 1000)
    timeline.RankTimeline(tmp_path / "t3.json", rank=3).close()
    assert timeline.merge([out, tmp_path / "t3.json"], again) == [0, 1, 2, 3]
    later = [event for event in _read(again) if event["name"] == "QUEUE"]
    assert later[0]["ts"] == 1_000_500


@pytest.mark.parametrize("num_left", [1, 2, 3, 20, 80, 200, 250, 300])
def test_merging_reads_a_cut_file_up_to_its_last_whole_event(tmp_path, num_left):
    whole, cut = tmp_path / "whole.json", tmp_path / "cut.json"
    now_s = time.perf_counter() + 1
    traced = timeline.RankTimeline(whole, rank=0)
    for i in range(3):
        traced.add_span("x", "QUEUE", now_s, now_s, names=["a", "b"], i={"i": i})
    traced.close()
    content = whole.read_bytes()
    cut.write_bytes(content[:-num_left])
    assert timeline.merge([cut], tmp_path / "out.json") == [0]
    events = _read(tmp_path / "out.json")
    assert events == _read(whole)[: len(events)]
    num_lost = content[-num_left:].count(b"}}\n") + content[-num_left:].count(b"}},\n")
    assert len(_of_kind(events, "X")) == max(3 - num_lost, 0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a timeline of jdp"),
        (b"[", "is not a timeline of jdp"),
        (b"nothing\n", "is not a timeline of jdp"),
        (b'{"traceEvents": []}', "is not a timeline of jdp"),
        (b"[1, 2]", "is not a timeline of jdp"),
        (b'[{"name": "a", "args": 3}]', "is not a timeline of jdp"),
        (b'[{"name": "a"}]', "an event has no rank as its `pid`"),
        (b'[{"name": "a", "pid": 0, "ts": "1"}]', "a time is not a number"),
        (b'[{"name": "a", "pid": 0}]', "no event has 'start_time_since"),
    ],
)
def test_merging_refuses_what_is_no_timeline(tmp_path, content, says):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"other.json.*{says}"):
        timeline.merge([path], tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_merging_refuses_two_files_of_one_rank(tmp_path):
    for name in ("a.json", "b.json"):
        timeline.RankTimeline(tmp_path / name, rank=4).close()
    with pytest.raises(ValueError, match="a.json and .*b.json are both of rank 4"):
        timeline.merge([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "out")
    with pytest.raises(ValueError, match="at least one"):
        timeline.merge([], tmp_path / "out")
