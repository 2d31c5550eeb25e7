"""Interrupts: a signal or a shutdown comes in the middle of a call."""

import linecache
import sys

import numpy as np
import pytest

from jdp import eager
from jdp.eager import engine, entries, session
from tests import harness

_FILES = {each.__file__ for each in (engine, entries, session)}


@pytest.fixture(scope="module", autouse=True)
def alone():
    eager.init(harness.local_world(1))
    yield
    eager.shutdown()


def _interrupt(fn, count):
    """Calls `fn`; the `count`-th line of the engine raises. Returns whether it did."""
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
            if left < 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


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
