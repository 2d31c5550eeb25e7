"""Meetings of many processes, in threads that share an in-memory store."""

import time

import msgspec
import pytest

from jdp.replicas import agreement, meeting
from tests import harness, rarely


def _collect(bodies):
    return b",".join(bodies)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_everybody_gets_the_decision_on_all_records(n):
    def fn(world):
        mine = str(world.process_index).encode()
        return [agreement.meet(world, "test", mine, _collect) for _ in range(3)]

    expected = [b",".join(str(p).encode() for p in range(n))] * 3
    assert harness.run_threads(fn, n) == [expected] * n


def test_different_topics_are_an_error_for_all():
    def fn(world):
        topic = "first call of the step" if world.process_index else "check of replicas"
        return agreement.meet(world, topic, b"", _collect)

    for error in harness.run_threads(fn, 3):
        assert isinstance(error, RuntimeError)
        assert "process 0 is in the check of replicas" in str(error)
        assert "process 1 in the first call of the step" in str(error)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_of_one_reaches_all_at_once(failing):
    def fn(world):
        if world.process_index == failing:
            agreement.report_failure(world, "test", KeyError("no such weight"))
            return "reported"
        return agreement.meet(world, "test", b"", _collect)

    start_s = time.monotonic()
    results = harness.run_threads(fn, 3, timeout_s=30.0)
    assert time.monotonic() - start_s < 5.0
    assert results.pop(failing) == "reported"
    for error in results:
        assert f"process {failing} failed: KeyError: 'no such weight'" in str(error)


@pytest.mark.parametrize("missing", [0, 1])
def test_who_does_not_come_is_named_within_the_deadline(missing):
    def fn(world):
        if world.process_index == missing:
            return "elsewhere"
        return agreement.meet(world, "test", b"", _collect)

    start_s = time.monotonic()
    results = harness.run_threads(fn, 3, timeout_s=0.2)
    # Process 0 waits 0.2 s; the others wait 1.2 times that and 5 s for process 0.
    assert time.monotonic() - start_s < 7.0
    assert results.pop(missing) == "elsewhere"
    for error in results:
        assert isinstance(error, RuntimeError)
        assert f"Process {missing} did not come to the test within" in str(error)


def test_late_processes_share_one_deadline():
    def fn(world):
        # Each comes within the deadline of the one before it, but not of the meeting.
        time.sleep(0.6 * world.process_index)
        return agreement.meet(world, "test", b"", _collect)

    for error in harness.run_threads(fn, 4, timeout_s=1.0):
        assert "did not come to the test within 1 s" in str(error)


def test_finished_rounds_leave_nothing_but_the_last_outcome():
    stores = []

    def fn(world):
        stores.append(world.store)
        for _ in range(5):
            agreement.meet(world, "test", b"x", _collect)
            world.store.next_round()  # For something else, such as a loop.

    harness.run_threads(fn, 3)
    assert list(stores[0]._shared.values) == ["jdp/meet/8/outcome"]


def test_a_meeting_that_failed_leaves_nothing_once_the_next_is_over():
    stores = []

    def fn(world):
        stores.append(world.store)
        agreement.meet(world, "test", b"x", _collect)
        with pytest.raises(RuntimeError, match="no such weight"):
            if world.process_index == 1:
                _fail(world)
                raise RuntimeError("no such weight")
            _meet(world)
        agreement.meet(world, "test", b"x", _collect)

    assert harness.run_threads(fn, 3) == [None] * 3
    assert list(stores[0]._shared.values) == ["jdp/meet/2/outcome"]


@pytest.mark.parametrize(
    "kind", rarely.cases(["topics", "failure of 0", "decision"], often=("topics",))
)
def test_process_0_stays_until_the_others_know_the_error(kind, monkeypatch):
    ended_s = {}

    def fn(world):
        index, get = world.process_index, world.store.get

        def slow_get(key, *, timeout_s):
            if index and key.endswith("outcome"):
                time.sleep(1.0)  # A busy machine.
            return get(key, timeout_s=timeout_s)

        monkeypatch.setattr(world.store, "get", slow_get)
        try:
            if kind == "failure of 0" and index == 0:
                agreement.report_failure(world, "test", ValueError("no"))
            else:
                topic = f"test {index if kind == 'topics' else ''}"
                agreement.meet(world, topic, b"", _collect, then_raises=True)
        finally:
            ended_s[index] = time.monotonic()

    start_s = time.monotonic()
    harness.run_threads(fn, 3, timeout_s=30.0)
    assert max(ended_s.values()) - start_s < 8.0
    assert ended_s[0] > max(ended_s[1], ended_s[2])


@pytest.mark.parametrize("error", [ValueError("zip"), IndexError("9"), KeyError("k")])
def test_a_decision_that_fails_is_an_error_for_all(error):
    def decide(bodies):
        raise error

    start_s = time.monotonic()
    found = harness.run_threads(lambda w: agreement.meet(w, "test", b"", decide), 3)
    assert time.monotonic() - start_s < 4.0  # Without waiting for `timeout_s`.
    for each in found:
        assert isinstance(each, RuntimeError)
        assert f"could not decide: {type(error).__name__}" in str(each)


@pytest.mark.parametrize("culprit", [-1, 2, 10**12])
def test_a_culprit_that_is_no_process_is_refused(culprit):
    def fn(world):
        if world.process_index:
            return agreement.meet(world, "test", b"", _collect)
        outcome = meeting.MeetingOutcome(error="no", culprit=culprit)
        key = f"jdp/meet/{world.store.next_round()}/outcome"
        world.store.set(key, msgspec.msgpack.encode(outcome))

    assert "blames no process" in str(harness.run_threads(fn, 2)[1])


def _timed(fn):
    start_s = time.monotonic()
    text = harness.error_text(fn)[0]
    return text, time.monotonic() - start_s


def _fail(world, text="no such weight"):
    return agreement.report_failure(world, "test", KeyError(text))


def _meet(world, topic="test"):
    return agreement.meet(world, topic, b"", _collect)


def test_processes_that_all_fail_do_not_wait_for_each_other():
    def fn(world):
        return _timed(lambda: _fail(world))[1]

    assert max(harness.run_threads(fn, 3, timeout_s=30.0)) < 2.0


def test_a_failure_ends_the_wait_though_process_0_is_not_there_yet():
    def fn(world):
        if world.process_index == 1:
            return _fail(world)
        if world.process_index == 0:
            time.sleep(1.5)
        return _timed(lambda: _meet(world))

    results = harness.run_threads(fn, 4, timeout_s=30.0)
    for process in (0, 2, 3):
        text, seconds = results[process]
        assert "In the test, process 1 failed: KeyError: 'no such weight'" in text
        assert seconds < 1.4


def test_a_process_that_comes_late_hears_of_the_failure_and_may_meet_again(
    monkeypatch,
):
    monkeypatch.setattr(meeting, "_READ_TIMEOUT_S", 0.5)

    def fn(world):
        if world.process_index == 0:
            _fail(world)
        else:
            time.sleep(1.5 * (world.process_index == 2))  # Process 0 has gone on.
            text, seconds = _timed(lambda: _meet(world))
            assert "process 0 failed: KeyError" in text and seconds < 1.0
        return _meet(world, "next")

    assert harness.run_threads(fn, 3, timeout_s=30.0) == [b",,"] * 3


@pytest.mark.parametrize(
    "failing", rarely.cases([{0, 1}, {0, 1, 2}, {1, 2}], often=({0, 1},))
)
def test_where_some_fail_and_some_meet_all_others_hear_of_one_failure(failing):
    ended_s = {}

    def fn(world):
        index = world.process_index
        time.sleep(0.3 * index)
        if index in failing:
            text = _fail(world, f"of {index}")
        else:
            text = _timed(lambda: _meet(world))[0]
        ended_s[index] = time.monotonic()
        return text

    start_s = time.monotonic()
    results = harness.run_threads(fn, 4, timeout_s=30.0)
    heard = {results[p] for p in range(4) if p not in failing}
    assert len(heard) == 1
    assert (
        f"process {min(failing)} failed: KeyError: 'of {min(failing)}'" in heard.pop()
    )
    assert max(ended_s.values()) - start_s < 3.0
    assert ended_s[0] > max(ended_s[p] for p in range(4) if p not in failing and p)
