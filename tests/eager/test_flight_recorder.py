"""The flight recorder: what it keeps, and what it writes."""

import json
import os
import sys
import threading

import numpy as np
import pytest

from jdp.eager.diagnosis import flight_recorder
from jdp.eager.diagnosis.flight_recorder import FlightRecorder, Record
from tests.eager.records import Rank, all_reduce, train


def test_a_dump_has_what_was_recorded(tmp_path):
    rank = Rank(3, size=8)
    rank.submit(all_reduce("a"))
    rank.submit(Record("b", "barrier"))
    rank.submit(all_reduce("c", shape=(np.int64(5),), num_bytes=np.int64(20)))
    rank.run("b", 0)
    rank.run("a", 1, error="Mismatched data types")
    dump = rank.dump(tmp_path / "dump.json", "stalled for 60 s")
    assert (dump.rank, dump.size, dump.reason) == (3, 8, "stalled for 60 s")
    assert (dump.version, dump.num_dropped, dump.dropped_order) == (1, 0, -1)
    assert [(r.number, r.name, r.order) for r in dump.records] == [
        (0, "a", 1),
        (1, "b", 0),
        (2, "c", -1),
    ]
    assert dump.records[0].error == "Mismatched data types"
    assert dump.records[2].shape == (5,) and dump.records[2].num_bytes == 20
    assert [r.is_waiting for r in dump.records] == [False, False, True]
    # Below 0 on a machine that has just started, and never what is not set.
    assert 0 != dump.records[0].submitted_s < dump.clock_s
    assert [path.name for path in tmp_path.iterdir()] == ["dump.json"]


@pytest.mark.parametrize("capacity", [2, 7, 2000])
def test_the_last_requests_are_kept(capacity):
    rank = Rank(0, capacity=capacity)
    num_added = train([rank], ["a", "b"], 8)
    dump = rank.dump()
    num_kept = min(capacity, num_added)
    assert [r.number for r in dump.records] == [*range(num_added)][-num_kept:]
    assert dump.num_dropped == num_added - num_kept
    assert dump.dropped_order == dump.num_dropped - 1


def test_a_request_that_waits_is_kept_for_longer():
    rank = Rank(0, capacity=4)
    for name in ("late", "later"):
        rank.submit(all_reduce(name))
    order = train([rank], ["a", "b", "c"], 5)
    dump = rank.dump()
    assert [r.name for r in dump.records] == ["late", "later", "c", "a", "b", "c"]
    assert (dump.num_dropped, dump.dropped_order) == (11, 10)
    # Once the ranks have agreed on it, it is dropped as the others are, but only when
    # there are too many: here at 4.
    rank.run("late", order)
    for i in range(12):
        rank.submit(all_reduce(f"waits {i}"))
    dump = rank.dump()
    assert "late" not in [r.name for r in dump.records]
    assert [r.name for r in dump.records if r.is_waiting] == [
        "later",
        *(f"waits {i}" for i in range(12)),
    ]
    assert dump.dropped_order == order
    assert dump.num_dropped + len(dump.records) == 2 + 15 + 12


def test_many_that_wait_cost_no_more_each():
    recorder = FlightRecorder(rank=0, size=2, capacity=10)
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        for i in range(2000):
            recorder.add(Record(str(i), "barrier"))
    finally:
        sys.setprofile(None)
    assert calls < 2000 * 20


def test_another_thread_may_dump(tmp_path):
    rank = Rank(0, capacity=50)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            rank.submit(all_reduce("a"))
            rank.run("a", 0)

    thread = threading.Thread(target=work, name="submits")
    thread.start()
    try:
        for _ in range(20):
            numbers = [r.number for r in rank.dump(tmp_path / "d").records]
            assert numbers == sorted(set(numbers))
    finally:
        stop.set()
        thread.join(timeout=30)


def test_names_that_are_not_text_do_not_lose_the_rest():
    rank = Rank(0)
    rank.submit(all_reduce("bad \ud800"))
    rank.submit(all_reduce("grüß"))
    assert [r.name for r in rank.dump().records] == ["bad \\ud800", "grüß"]


def test_a_path_that_cannot_be_written_is_in_the_error(tmp_path):
    recorder = FlightRecorder(rank=0, size=2)
    with pytest.raises(FileNotFoundError, match="nowhere/dump.json'$"):
        recorder.dump(tmp_path / "nowhere/dump.json", "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder'$"):
        recorder.dump(tmp_path / "folder", "")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file/dump.json'$"):
        recorder.dump(tmp_path / "file/dump.json", "")


def test_a_dump_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "dump.json"
    rank = Rank(0)
    rank.dump(path, "first")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(flight_recorder.os, "replace", fail)
    with pytest.raises(OSError, match="No space left.*dump.json"):
        rank.dump(path, "second")
    assert flight_recorder.read_dump(path).reason == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["dump.json"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: "", "is not a flight record: .*truncated"),
        (lambda text: "no json", "is not a flight record: .*malformed"),
        (lambda text: text[:-9], "is not a flight record: .*truncated"),
        (lambda text: "[1]", "is not a flight record: Expected `object`"),
        (lambda text: "{}", "is not a flight record: .*missing required field"),
        (
            lambda text: text.replace("jdp flight record", "other"),
            "is not a flight record: its `format` is 'other'",
        ),
        (
            lambda text: text.replace('"version":1', '"version":2'),
            "is a flight record of version 2, and this jdp reads version 1",
        ),
        (
            lambda text: text.replace('"rank":0', '"rank":"zero"'),
            r"is not a flight record: Expected `int`.*\$.rank",
        ),
    ],
)
def test_what_is_no_dump_is_refused_by_name(tmp_path, change, says):
    path = tmp_path / "dump.json"
    Rank(0).dump(path)
    json.loads(path.read_text())
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=f"dump.json {says}"):
        flight_recorder.read_dump(path)


def test_a_dump_that_is_not_there_keeps_its_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.json"):
        flight_recorder.read_dump(tmp_path / "none.json")


def test_the_capacity_is_at_least_one():
    with pytest.raises(ValueError, match="`capacity` must be at least 1, got 0"):
        FlightRecorder(rank=0, size=2, capacity=0)


def test_the_ten_newest_files_of_a_rank_are_kept(tmp_path):
    for i in range(14):
        old = tmp_path / f"jdp_flight_{i}.rank1.json"
        old.write_text("{}")
        os.utime(old, (i, i))
    others = [tmp_path / "jdp_flight_1.rank0.json", tmp_path / "notes.json"]
    for path in others:
        path.write_text("{}")
        os.utime(path, (0, 0))
    flight_recorder.FlightRecorder(rank=1, size=2).dump_into(str(tmp_path), "a test")
    left = {path.name for path in tmp_path.glob("jdp_flight_*.rank1.json")}
    new = f"jdp_flight_{os.getpid()}.rank1.json"
    assert left == {new} | {f"jdp_flight_{i}.rank1.json" for i in range(5, 14)}
    assert all(path.exists() for path in others)


def test_a_name_that_is_taken_does_not_keep_the_record(tmp_path, caplog):
    """As a file of another account is in a folder such as /tmp."""
    taken = tmp_path / f"jdp_flight_{os.getpid()}.rank1.json"
    (taken / "file").mkdir(parents=True)
    recorder = flight_recorder.FlightRecorder(rank=1, size=2)
    recorder.dump_into(str(tmp_path), "a test")
    (written,) = tmp_path.glob("jdp_flight_*-*.rank1.json")
    assert flight_recorder.read_dump(written).reason == "a test"
    assert str(written) in caplog.text
    assert taken.is_dir()
    assert not list(tmp_path.glob(".jdp_flight_*"))


def test_what_was_left_half_written_is_dropped(tmp_path):
    old, new = (tmp_path / f".jdp_flight_1.rank{i}.json.ab" for i in range(2))
    for path in (old, new):
        path.write_text("{")
    os.utime(old, (0, 0))
    flight_recorder.FlightRecorder(rank=1, size=2).dump_into(str(tmp_path), "a test")
    assert (old.exists(), new.exists()) == (False, True)
