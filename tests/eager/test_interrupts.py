"""Interrupts: a signal or a shutdown comes in the middle of a call."""

import contextlib
import linecache
import sys
import threading
import time

import numpy as np
import pytest

from jdp import eager
from jdp.eager import engine, entries, session, submission
from jdp.runtime.transport import transport, zmq_link
from tests import harness

_FILES = {
    str(each.__file__) for each in (engine, entries, session, submission, zmq_link)
}


@pytest.fixture(autouse=True)
def alone():
    eager.init(harness.local_world(1))
    yield
    eager.shutdown()


def _raise():
    raise KeyboardInterrupt


def _interrupt(fn, count, handler=_raise):
    """Calls `fn`; `handler` is called before the `count`-th line of the engine.

    Returns:
      Whether `fn` has that many lines.
    """
    left = count

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in _FILES:
            return None
        # As it leaves such a block Python checks for signals only behind it.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        is_with = line.lstrip().startswith("with ")
        if event in ("call", "line") and not is_with:
            left -= 1
            if left == -1:
                handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left < 0


@pytest.mark.parametrize(
    "begin", [eager.all_reduce_async, eager.grouped_all_reduce_async]
)
def test_an_interrupted_submission_leaves_all_or_nothing(begin):
    trees = {"x": np.ones(2), "y": np.ones(3)}
    count = 0
    while _interrupt(lambda: begin(trees, name="interrupted"), count):
        count += 1
        entries = list(session.current_engine().intake.pending.entries.values())
        assert session.current_engine().wait(entries, 5.0), count
        eager.synchronize(begin(trees, name="interrupted"), timeout_s=5.0)
    assert count > 20


def test_an_interrupted_join_goes_on():
    count = 0
    while _interrupt(eager.join_async, count):
        count += 1
        entry = session.current_engine().intake.join_entry
        if entry is not None:
            assert session.current_engine().wait([entry], 5.0), count
        eager.barrier(timeout_s=5.0)
    assert count > 5


_SUBMISSIONS = {
    "one": lambda: eager.all_reduce_async(np.ones(2), name="outer"),
    "unnamed": lambda: eager.all_reduce_async(np.ones(2)),
    "tree": lambda: eager.all_reduce_async([np.ones(2), np.ones(3)], name="outer"),
    "group": lambda: eager.grouped_all_reduce_async([1.0, np.ones(3)], name="outer"),
    "result": lambda: eager.broadcast_async(eager.all_gather(np.ones(2)), name="outer"),
}


@pytest.mark.parametrize("submit", _SUBMISSIONS.values(), ids=_SUBMISSIONS)
def test_a_signal_handler_may_begin_an_operation(submit):
    count, handles, nested = 0, [], []

    def handle():
        nested.append(eager.all_reduce_async(np.array(count), name=f"nested {count}"))

    while _interrupt(lambda: handles.append(submit()), count, handle):
        assert eager.synchronize(nested.pop(), timeout_s=5.0) == count
        eager.synchronize(handles.pop(), timeout_s=5.0)
        count += 1
    assert count > 10


@pytest.mark.parametrize("submit", _SUBMISSIONS.values(), ids=_SUBMISSIONS)
def test_a_signal_handler_that_waits_gets_a_result_or_an_error(submit):
    count, handles, outcomes = 0, [], []

    def handle():
        handle = eager.all_reduce_async(np.array(count), name=f"nested {count}")
        try:
            outcomes.append(eager.synchronize(handle, timeout_s=5.0))
        except RuntimeError as error:
            assert "Do not wait in signal handlers" in str(error)
            outcomes.append(handle)

    while _interrupt(lambda: handles.append(submit()), count, handle):
        outcome = outcomes.pop()
        if isinstance(outcome, eager.Handle):
            outcome = eager.synchronize(outcome, timeout_s=5.0)
        assert outcome == count
        eager.synchronize(handles.pop(), timeout_s=5.0)
        count += 1
    assert count > 10


def test_a_signal_handler_may_shut_the_engine_down():
    count, submit = 0, _SUBMISSIONS["group"]

    def run():
        with contextlib.suppress(RuntimeError):  # The engine has ended.
            eager.synchronize(submit(), timeout_s=5.0)

    while _interrupt(run, count, eager.shutdown):
        eager.init(harness.local_world(1))
        eager.barrier(timeout_s=5.0)
        count += 1
    assert count > 10


def test_a_signal_handler_may_wake_a_link_in_the_middle_of_a_wake():
    link = zmq_link.ZmqLink(0, 2, transport.LinkOptions())
    count = 0
    while _interrupt(link.wake, count, link.wake):
        assert link.wait(5.0) == [] and link.is_woken
        count += 1
    link.close()
    assert count > 2


def test_a_signal_handler_may_shut_the_engine_down_in_the_middle_of_a_wake(monkeypatch):
    link, lock, seconds = session.current_engine()._link, threading.RLock(), []
    wake, close = link.wake, link.close

    def wake_and_shut_down():  # As a link over sockets, whose `close` has to wait.
        with lock:
            wake()
            if not seconds:
                start_s = time.monotonic()
                seconds.append(0.0)
                eager.shutdown()
                seconds[0] = time.monotonic() - start_s

    def close_locked():
        with lock:
            close()

    monkeypatch.setattr(link, "wake", wake_and_shut_down)
    monkeypatch.setattr(link, "close", close_locked)
    with contextlib.suppress(RuntimeError):  # The engine has ended.
        while not seconds:  # A call that finds the engine awake does not wake it.
            eager.all_reduce(1.0, name="x")
            time.sleep(0.01)
    assert seconds[0] < 20.0  # It does not wait for `timeout_s`, 30 s.


def test_what_another_thread_calls_during_a_shutdown_hears_of_it(monkeypatch):
    running, found = session.current_engine(), []

    def shutdown(*, timeout_s):
        found.append(harness.error_text(eager.barrier)[0])

    with monkeypatch.context() as patch:
        patch.setattr(running, "shutdown", shutdown)
        eager.shutdown()
    running.shutdown(timeout_s=5.0)
    eager.init(harness.local_world(1))
    assert "rank 0 has shut the engine down" in found[0]
