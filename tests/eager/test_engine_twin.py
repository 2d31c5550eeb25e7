"""The engine over the in-memory twin of a link: ranks are threads of one process."""

import threading
import time

import numpy as np
import pytest

from jdp import eager
from jdp.eager import engine as engine_module
from jdp.eager import lost_entries, submission
from jdp.eager.coordinator.coordinator import Coordinator
from jdp.eager.diagnosis.flight_recorder import Record
from jdp.eager.engine import Engine
from jdp.eager.entries import Completion, Entry
from jdp.eager.messages import Request, Response, Spec, encode_spec
from jdp.eager.response_cache import ResponseCache
from jdp.replicas import agreement, progress
from jdp.runtime.transport import transport
from tests import harness, rarely

_SIZE = 3


@pytest.fixture
def links(monkeypatch):
    links = transport.make_memory_links(_SIZE)

    def open_link(world, *, key, options):
        return links[world.process_index]

    monkeypatch.setattr(transport, "open_link", open_link)
    return links


def _reduce(engine, name):
    facts = ("all_reduce", eager.global_process_set, "sum")
    options = submission.find_options(engine, *facts)
    entry = submission.make_entry(options, name, np.full(3, engine.rank, np.float32))
    try:
        engine.submit([entry])
    except RuntimeError as error:  # It has ended already.
        return str(error)
    assert engine.wait([entry], 20.0)
    return str(entry.error) if entry.error else entry.value.tolist()


def _run(fn, **options):
    """Runs `fn(engine)` on all ranks, and shuts down."""

    def run(world):
        engine = Engine(world, eager.EagerOptions(timeout_s=5.0, **options))
        try:
            return fn(engine)
        finally:
            engine.shutdown(timeout_s=10.0)

    return harness.run_threads(run, _SIZE, timeout_s=10.0)


def test_ranks_reduce(links):
    assert _run(lambda engine: _reduce(engine, "x")) == [[3.0] * 3] * _SIZE


@pytest.mark.parametrize("lost", range(_SIZE))
def test_the_loss_of_a_rank_is_raised_on_all_others(links, lost):
    begun = threading.Barrier(_SIZE)

    def run(engine):
        before = _reduce(engine, "x")
        begun.wait()
        if engine.rank == lost:
            links[0].lose(lost)
            return before
        return _reduce(engine, "y")

    results = _run(run)
    assert results.pop(lost) == [3.0] * 3
    for text in results:
        assert f"process {lost} has ended" in text


@pytest.mark.parametrize("culprit", [None, 2])
def test_a_failure_names_the_process_that_caused_it_not_the_one_that_says_so(
    links, culprit
):
    begun = threading.Barrier(_SIZE)

    def run(engine):
        _reduce(engine, "x")
        begun.wait()
        if engine.rank == 1:
            error = RuntimeError("Connection reset by peer")
            engine.executor.failure = progress.blame(error, culprit)
            links[1].wake()
        return _reduce(engine, "y")

    begin = "rank 1: " if culprit is None else "process 2 failed or is gone, as rank 1"
    for text in _run(run):
        assert text.startswith(begin) and text.endswith("Connection reset by peer")


@pytest.mark.parametrize("sender", [0, 2])
def test_who_sends_what_no_engine_sends_is_named_on_all(links, sender):
    begun = threading.Barrier(_SIZE)

    def run(engine):
        _reduce(engine, "x")
        begun.wait()
        if engine.rank == sender:
            for peer in [1, 2] if sender == 0 else [0]:
                links[sender].send(peer, b"\xc1 garbage")
            time.sleep(0.5)
        return _reduce(engine, "y")

    for rank, text in enumerate(_run(run)):
        if sender == 0 and rank == 0:
            continue  # It hears that the others have gone.
        assert f"process {sender} sent a message that no engine sends" in text


def test_a_process_that_does_not_start_is_named_on_all(links):
    def run(world):
        if world.process_index != 2:
            Engine(world, eager.EagerOptions())

    *others, _ = harness.run_threads(run, _SIZE, timeout_s=1.0)
    for error in others:
        assert "Process 2 did not come to the start of the eager engine" in str(error)


@pytest.mark.parametrize("peer", range(_SIZE))
def test_options_that_nothing_sends_are_refused_on_all(links, monkeypatch, peer):
    def meet(world, topic, body, *rest, **options):
        body = b"\xc1" if world.process_index == peer else body
        return agreement_meet(world, topic, body, *rest, **options)

    agreement_meet = agreement.meet
    monkeypatch.setattr(agreement, "meet", meet)

    def run(world):
        Engine(world, eager.EagerOptions())

    for error in harness.run_threads(run, _SIZE, timeout_s=10.0):
        assert f"process {peer} sent a message that no engine sends" in str(error)


def test_options_that_differ_are_named_on_all(links):
    def run(world):
        spin_s = 0.0 if world.process_index == 1 else 1.0
        Engine(world, eager.EagerOptions(spin_s=spin_s))

    for error in harness.run_threads(run, _SIZE, timeout_s=10.0):
        assert "`spin_s` is 1.0 on process 0 and 0.0 on process 1" in str(error)


@pytest.mark.parametrize("is_group", [True, False])
def test_a_tree_is_submitted_again_as_soon_as_one_of_its_leaves_has_failed(
    links, monkeypatch, is_group
):
    fail = Completion.fail

    def fail_slowly(self, entries, error):
        fail(self, entries, error)
        time.sleep(0.02)  # Callers run on before the rest of the batch is done.

    monkeypatch.setattr(Completion, "fail", fail_slowly)

    def reduce(engine, keys, size):
        group = ("g", len(keys)) if is_group else ("", 0)
        facts = submission.CollectiveArguments(
            "all_reduce", eager.global_process_set, "sum"
        )
        facts = facts._replace(group=group[0], group_size=group[1])
        options = submission.find_options(engine, *facts)
        entries = [
            submission.make_entry(options, f"g[{key}]", np.ones(size)) for key in keys
        ]
        engine.submit(entries)
        assert engine.wait(entries, 20.0)
        return [str(each.error)[:10] if each.error else "" for each in entries]

    def run(engine):
        found = []
        for ours, theirs in (("abc", "abcd"), ("abc", "ab"), ("abc", "abd")):
            is_odd = engine.rank == 1
            keys = (theirs if is_odd else ours) if is_group else "abc"
            first = reduce(engine, keys, 3 if is_odd and not is_group else 2)
            assert "Mismatched" in first, first
            found.append(reduce(engine, "abc", 2))
        return found

    assert _run(run) == [[[""] * 3] * 3] * _SIZE


def test_what_nobody_waits_for_is_held_back_and_fused(links):
    # The first that waits hurries all: where one is slow, not all of its own are there.
    have_submitted = threading.Barrier(_SIZE)

    def run(engine):
        facts = ("all_reduce", eager.global_process_set, "sum")
        options = submission.find_options(engine, *facts)
        _reduce(engine, "x")
        assert engine.wait([], 1.0)  # For what is over: nothing is hurried by it.
        values = [np.ones(4, np.float32)] * 20
        entries = [
            submission.make_entry(options, f"n{i}", x) for i, x in enumerate(values)
        ]
        for entry in entries:
            engine.submit([entry])
            time.sleep(0.001)
        time.sleep(0.2)
        assert not any(entry.is_done for entry in entries)
        have_submitted.wait(10.0)
        started_s = time.monotonic()
        assert engine.wait(entries, 20.0)
        assert time.monotonic() - started_s < 2.0
        return len({entry.record.order for entry in entries})

    # Held back for longer than it takes to submit all; then they run as one.
    assert _run(run, cycle_time_s=5.0) == [1] * _SIZE


@pytest.mark.parametrize("num_cycles", rarely.cases([10, 1], often=(10,)))
def test_a_loop_of_submissions_is_held_back_until_it_ends(
    links, monkeypatch, num_cycles
):
    monkeypatch.setattr(engine_module, "_BURST_PERIOD_S", 0.1)
    monkeypatch.setattr(engine_module, "_MAX_HELD_CYCLES", num_cycles)

    def run(engine):
        facts = ("all_reduce", eager.global_process_set, "sum")
        options = submission.find_options(engine, *facts)
        _reduce(engine, "x")
        entries = [
            submission.make_entry(options, f"n{i}", np.ones(4, np.float32))
            for i in range(100)
        ]
        for entry in entries:  # For longer than three cycles.
            engine.submit([entry])
            time.sleep(0.01)
        until_s = time.monotonic() + 10.0
        while not entries[-1].is_done and time.monotonic() < until_s:
            time.sleep(0.01)  # Nobody waits for them.
        return len({entry.record.order for entry in entries})

    num_jobs = _run(run, cycle_time_s=0.3)
    if num_cycles == 10:
        assert num_jobs == [1] * _SIZE
    else:  # One that never stops is heard as well.
        assert min(num_jobs) > 1


_NOTHING = Response(("nothing",), (b"",), 99, error="in place of what is lost")


def _lose_response(monkeypatch):
    """Rank 1 drops what it hears of "y", which comes with the result."""
    apply = ResponseCache.apply

    def drop(cache, batch):
        responses = apply(cache, batch)
        is_right = not batch.data or threading.current_thread() not in engine_threads
        return responses if is_right else [_NOTHING] * len(responses)

    engine_threads = set()
    monkeypatch.setattr(ResponseCache, "apply", drop)
    return engine_threads


def _lose_request(monkeypatch):
    """The coordinator forgets that rank 1 has submitted "y"."""
    add = Coordinator._add

    def forget(coordinator, rank, request, now_s):
        if (rank, request.name) != (1, "y"):
            add(coordinator, rank, request, now_s)

    monkeypatch.setattr(Coordinator, "_add", forget)
    return set()


@pytest.mark.parametrize("lose", [_lose_response, _lose_request])
def test_a_name_that_is_lost_is_found_and_raised_on_all(links, monkeypatch, lose):
    monkeypatch.setattr(lost_entries, "PERIOD_S", 0.3)
    engine_threads = lose(monkeypatch)
    begun = threading.Barrier(_SIZE)

    def run(engine):
        if engine.rank == 1:
            engine_threads.add(engine._thread)
        begun.wait()  # "y" gets a slot, so that its tensor travels with the bit.
        x = _reduce(engine, "y" if lose is _lose_response else "x")
        started_s = time.monotonic()
        found = [_reduce(engine, "y"), _reduce(engine, "z")]
        return x, found, time.monotonic() - started_s

    for rank, (x, found, seconds) in enumerate(_run(run)):
        assert x == [3.0] * 3 and seconds < 10.0
        texts = [text for text in found if isinstance(text, str)]
        assert texts, rank  # Others may have done "y".
        for text in texts:
            assert "rank 1: 'y' was submitted" in text and "It is lost" in text


def test_names_that_wait_for_long_are_not_taken_for_lost(links, monkeypatch):
    monkeypatch.setattr(lost_entries, "PERIOD_S", 0.05)

    def run(engine):
        for number in range(3):
            if engine.rank == number:
                time.sleep(0.4)
            assert _reduce(engine, f"new {number}") == [3.0] * 3
            assert _reduce(engine, "x") == [3.0] * 3  # from the cache.
        return ""

    assert _run(run) == [""] * _SIZE


def test_what_still_waits_behind_a_program_hears_that_the_engine_ends(links):
    is_over, has_begun = threading.Event(), threading.Barrier(_SIZE + 1)

    def hang():
        has_begun.wait(20.0)
        is_over.wait(20.0)

    def run(engine):
        entries = []
        for name in ("hangs", "is behind it"):
            request = Request(name, encode_spec(Spec("submit", fingerprint="same")))
            entries.append(Entry(request, Record(name, "submit"), None, hang))
        options = submission.find_options(
            engine, "all_reduce", eager.global_process_set, "sum"
        )
        entries.append(submission.make_entry(options, "x", np.ones(3, np.float32)))
        for entry in entries:
            engine.submit([entry])
        if engine.rank == 0:
            has_begun.wait(20.0)
            time.sleep(0.2)
            links[2].close()
        found = []
        for entry in entries:
            engine.wait([entry], 10.0)
            found.append(str(entry.error))
        is_over.wait(5.0)
        return found

    results = _run(run)
    is_over.set()
    for rank in (0, 1):
        assert ["process 2 has closed its link" in text for text in results[rank]] == [
            True
        ] * 3


def test_after_join_nothing_can_be_submitted(links):
    has_tried = threading.Barrier(_SIZE)

    def run(engine):
        _reduce(engine, "x")
        entry = Entry(Request("join", b""), Record("join", "join"))
        if engine.rank != 0:
            has_tried.wait(20.0)
        engine.submit_join(entry)
        if engine.rank == 0:
            assert "has called `join`" in _reduce(engine, "y")
            with pytest.raises(RuntimeError, match="before all processes had joined"):
                engine.submit_join(entry)
            assert not engine.wait([entry], 0.05)
            has_tried.wait(20.0)
        assert engine.wait([entry], 20.0) and entry.value in range(_SIZE)
        return _reduce(engine, "y")

    assert _run(run) == [[3.0] * 3] * _SIZE


def test_what_was_submitted_before_another_one_leaves_runs(links):
    def run(engine):
        _reduce(engine, "x")
        facts = ("all_reduce", eager.global_process_set, "sum")
        options = submission.find_options(engine, *facts)
        entry = submission.make_entry(options, "y", np.full(3, 1, np.float32))
        both_have.wait()
        if engine.rank == 1:  # Its message may be the last.
            engine.submit([entry])
            engine.shutdown(timeout_s=10.0)
        else:
            engine.submit([entry])
        engine.wait([entry], 10.0)
        return str(entry.error) if entry.error else entry.value.tolist()

    both_have = threading.Barrier(_SIZE)
    for value in _run(run):
        # All have, or one was later than the end, also with `submit`; never a part.
        ended = "rank 1 has shut the engine down" in str(value)
        assert value == [3.0] * 3 or ended


def _sets_entry(name, kind, shape):
    request = Request(name, encode_spec(Spec(kind, shape=shape)))
    return Entry(request, Record(name, kind))


def _done(engine, entry):
    assert engine.wait([entry], 10.0)
    if entry.error:
        return str(entry.error)
    return entry.value


def _add_set(engine, ranks):
    """Adds a set that requests name by its number."""
    entry = _sets_entry("add", "add_process_set", ranks)
    engine.submit([entry])
    return _done(engine, entry)


def _entry_of_set(engine, set_id, name):
    spec = Spec("all_reduce", "float32", (3,), op="sum")
    request = Request(name, encode_spec(spec), set_id)
    record = Record(name, "all_reduce", process_set=set_id)
    return Entry(request, record, np.full(3, engine.rank, np.float32))


def test_a_name_of_a_removed_set_fails_where_it_has_not_been_said_yet(
    links, monkeypatch
):
    """Rank 2 says "x" before it hears of the removal, and rank 1 has not said its own.

    So rank 1 hears first that "x" fails, and then finds that the set is gone.
    """
    is_deaf, is_stuck = threading.Event(), threading.Event()
    is_removed, is_refused = threading.Event(), threading.Event()
    are_ready = threading.Barrier(_SIZE)
    waits, receive = [link.wait for link in links], Coordinator.receive

    def wait_1(timeout_s):
        events = waits[1](timeout_s)
        while is_stuck.is_set():
            time.sleep(0.01)
        return events + waits[1](0.0)

    def wait_2(timeout_s):
        return [] if is_deaf.is_set() and not time.sleep(0.01) else waits[2](timeout_s)

    def note(coordinator, rank, message, *, now_s):
        receive(coordinator, rank, message, now_s=now_s)
        if rank == 2 and any(each.process_set for each in message.requests):
            is_refused.set()

    monkeypatch.setattr(links[1], "wait", wait_1)
    monkeypatch.setattr(links[2], "wait", wait_2)
    monkeypatch.setattr(Coordinator, "receive", note)

    def run(engine):
        set_id = _add_set(engine, (1, 2))
        removal = _sets_entry("remove", "remove_process_set", (set_id,))
        entry = _entry_of_set(engine, set_id, "x")
        if engine.rank:
            engine.submit([removal])
            assert not engine.wait([removal], 0.2)
            (is_stuck if engine.rank == 1 else is_deaf).set()
            links[engine.rank].wake()
            time.sleep(0.1)
        are_ready.wait()
        if engine.rank == 0:
            engine.submit([removal])
        elif engine.rank == 1:
            engine.submit([entry])
        else:
            assert is_removed.wait(10.0)
            engine.submit([entry])
            assert is_refused.wait(10.0)
            time.sleep(0.3)
            is_stuck.clear()
            is_deaf.clear()
        found = [_done(engine, removal)]
        if engine.rank:
            found.append(_done(engine, entry))
        else:
            is_removed.set()
        return found, _reduce(engine, "y")

    results = _run(run)
    assert [value for _, value in results] == [[3.0] * 3] * _SIZE
    (_, first), (_, last) = results[1][0], results[2][0]
    assert "process set 1 has been removed" in first
    assert "'x' was not ready on all ranks of process set 1" in last


def test_a_set_is_gone_at_once_although_a_program_still_runs(links):
    is_over = threading.Event()

    def run(engine):
        set_id = _add_set(engine, (0, 1))
        spec = encode_spec(Spec("submit", fingerprint="same"))
        program = Entry(
            Request("p", spec), Record("p", "submit"), None, lambda: is_over.wait(20.0)
        )
        removal = _sets_entry("remove", "remove_process_set", (set_id,))
        engine.submit([program, removal])
        assert not engine.wait([removal], 0.5)  # It was heard of, and is behind.
        found = ""
        if engine.rank == 1:
            entry = _entry_of_set(engine, set_id, "x")
            engine.submit([entry])
            found = _done(engine, entry)
            is_over.set()
        assert _done(engine, removal) == set_id
        return found, _reduce(engine, "y")

    results = _run(run)
    assert "process set 1 has been removed" in results[1][0]
    assert [value for _, value in results] == [[3.0] * 3] * _SIZE
