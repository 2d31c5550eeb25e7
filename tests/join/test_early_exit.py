import dataclasses
import threading
import time

import jax
import msgspec
import pytest

import jdp
from jdp.join import early_exit
from jdp.join.early_exit import DepartureNotice, ExitWatch, LoopProgress, ReceivedNotice
from jdp.runtime import job_key, store
from tests import harness, wire_fuzz

LOOP = "the loop over `x`"


def _left(process, num_begun, arrived_s=0.0):
    return ReceivedNotice(DepartureNotice(process, num_begun), arrived_s)


@pytest.mark.parametrize(
    ("num_begun", "notices", "expected"),
    [
        (3, [], None),
        (3, [_left(1, 4)], None),
        (3, [_left(1, 3)], 1),
        (3, [_left(1, 4), _left(2, 0)], 2),
    ],
)
def test_who_begins_no_further_iteration_is_found(num_begun, notices, expected):
    notice = early_exit.find_departed(num_begun, notices)
    assert (notice and notice.process) == expected


@pytest.mark.parametrize(
    ("progress", "notices", "now_s", "expected"),
    [
        (LoopProgress(4, 0.0), [], 1e9, "wait"),
        (LoopProgress(4, 0.0), [_left(1, 3, 100.0)], 110.0, "wait"),
        (LoopProgress(4, 0.0), [_left(1, 3, 100.0)], 110.1, "exit"),
        # The same iteration: it may have left before its collective.
        (LoopProgress(3, 0.0), [_left(1, 3, 100.0)], 110.1, "exit"),
        (LoopProgress(2, 0.0), [_left(1, 3, 100.0)], 1e9, "wait"),
        # The iteration began after the notice came.
        (LoopProgress(3, 105.0), [_left(1, 3, 100.0)], 110.1, "wait"),
        (LoopProgress(3, 105.0), [_left(1, 3, 100.0)], 115.1, "exit"),
        # Not in an iteration yet.
        (LoopProgress(0, 0.0), [_left(1, 0, 100.0)], 1e9, "wait"),
        (LoopProgress(4, 0.0), [_left(2, 9), _left(1, 3, 100.0)], 110.1, "exit"),
    ],
)
def test_a_process_is_ended_when_it_may_hang(progress, notices, now_s, expected):
    verdict = early_exit.judge(progress, notices, now_s=now_s, timeout_s=10.0)
    assert verdict == expected


def _threads():
    return [t.name for t in threading.enumerate() if t.name == "jdp-departures"]


def test_a_process_that_leaves_alone_is_named_by_the_others():
    def fn(world):
        watch = ExitWatch(world, "d", loop=LOOP)
        if world.process_index == 1:
            watch.begin()
            watch.begin()
            watch.leave("ValueError: boom")
            return watch.num_begun
        watch.begin()
        watch.begin()
        deadline_s = time.monotonic() + 5.0
        while not watch._notices and time.monotonic() < deadline_s:
            time.sleep(0.01)
        text, _ = harness.error_text(watch.begin)
        watch.leave()
        return text, watch.num_begun, sorted(world.store.list_directory("d/left"))

    results = harness.run_threads(fn, 3)
    assert results[1] == 2
    for process in (0, 2):
        assert results[process] == (
            "RuntimeError: Process 1 left the loop over `x` after 2 iterations, "
            f"ValueError: boom, and process {process} is about to begin iteration 2 "
            "(counted from 0). Leave the loop on all processes at the same iteration, "
            "or look above for the reason why that process left.\n",
            2,
            ["1"],  # Who follows posts nothing.
        )
    assert not _threads()


def test_all_leave_at_the_same_iteration():
    def fn(world):
        watch = ExitWatch(world, "d", loop=LOOP)
        for _ in range(3):
            watch.begin()
        time.sleep(0.3 * world.process_index)
        watch.leave()

    assert harness.run_threads(fn, 3) == [None] * 3


def test_closing_is_quick_and_leaves_no_thread():
    def fn(world):
        watch = ExitWatch(world, "d", loop=LOOP)
        watch.begin()
        start_s = time.monotonic()
        watch.close()
        watch.close()
        watch.leave()
        return time.monotonic() - start_s, world.store.list_directory("d/left")

    for seconds, left in harness.run_threads(fn, 3):
        assert seconds < 1.0
        assert left == {}
    assert not _threads()


def test_a_process_that_is_alone_has_no_thread():
    watch = ExitWatch(harness.local_world(1), "d", loop=LOOP)
    assert not _threads()
    watch.begin()
    watch.leave()
    assert watch.num_begun == 1


def _wait_for(condition, timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.01)


@pytest.mark.parametrize("what", ["left", "wake", ""])
def test_a_notice_that_a_stranger_deletes_is_posted_again(what):
    directory = f"d/{what}".removesuffix("/")

    def fn(world):
        watch = ExitWatch(world, "d", loop=LOOP)
        watch.begin()
        if world.process_index == 1:
            # What wakes the others is deleted before they look, as after a forged one.
            set_key = world.store.set

            def set_and_lose(key, value, *, overwrite=False):
                set_key(key, value, overwrite=overwrite)
                is_own = key == "d/wake/1"  # It wakes its own thread at the end.
                if not has_lost.is_set() and key.startswith(directory) and not is_own:
                    world.store.delete(key)

            world.store.set = set_and_lose
            watch.leave("it had enough")
            has_lost.set()
            return None
        has_lost.wait(20.0)
        _wait_for(lambda: watch._notices)
        text, _ = harness.error_text(watch.begin)
        watch.leave()
        return text

    has_lost = threading.Event()
    results = harness.run_threads(fn, 3, timeout_s=4.0)
    for process in (0, 2):
        assert "Process 1 left the loop over `x` after 1 iteration" in results[process]
    _end_keepers()


def _end_keepers():
    for keeper in list(early_exit._NoticeKeeper._of_store.values()):
        keeper._end()
    assert "jdp-departures-keeper" not in [t.name for t in threading.enumerate()]


class _Client(wire_fuzz.Client):
    """A client of `jax.distributed` that waits for what is not there."""

    def blocking_key_value_get_bytes(self, key, timeout_ms):
        deadline_s = time.monotonic() + timeout_ms / 1000
        while (value := self.values.get(key)) is None:
            if time.monotonic() > deadline_s:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            time.sleep(0.001)
        return value

    def key_value_try_get_bytes(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.values[key]


def test_a_wait_with_a_forged_wake_key_ends_when_a_process_leaves():
    client = _Client()
    ours = store.DistributedStore(client, job_key.make())
    world = harness.local_world(1)
    first, second = (
        dataclasses.replace(
            world, process_index=i, process_count=2, store=ours, timeout_s=4.0
        )
        for i in range(2)
    )
    client.values["d/wake/0"] = b"forged" * 10
    client.values["d/left/1"] = b"forged" * 10
    waiting = ExitWatch(first, "d", loop=LOOP)
    waiting.begin()
    time.sleep(0.2)
    assert not waiting._notices
    leaving = ExitWatch(second, "d", loop=LOOP)
    leaving.leave("it had enough")
    for key in ("d/wake/0", "d/left/1"):
        client.values[key] = b"forged" * 10
    _wait_for(lambda: waiting._notices)
    assert waiting._notices[0].notice == DepartureNotice(1, 0, "it had enough")
    waiting.close()
    _end_keepers()


def test_what_wakes_is_a_notice_of_another_process():
    def fn(world):
        watch = ExitWatch(world, "d", loop=LOOP)
        if world.process_index == 0:
            for value in (b"x", msgspec.msgpack.encode(DepartureNotice(7, 0))):
                watch._take_first(value)
            found = watch._notices
            watch._take_first(
                msgspec.msgpack.encode(DepartureNotice(0, 1))
            )  # of itself
            watch._take_first(msgspec.msgpack.encode(DepartureNotice(1, -1)))
            num_begun = watch._notices[0].notice.num_begun
            watch._notices = ()
            watch.close()
            return found, num_begun
        watch.close()
        return (), 0

    assert harness.run_threads(fn, 2) == [((), 0)] * 2


def _hang_in_a_collective():
    world = jdp.init(timeout_s=2.0)
    total = jax.jit(lambda x: x.sum())
    watch = ExitWatch(world, "d", loop=LOOP)
    for i in range(4):
        watch.begin()
        if i == 2 and world.process_index == 1:
            watch.leave("it had enough")
            time.sleep(30.0)
        x = jdp.global_batch(world, jax.numpy.ones(1))
        total(x).block_until_ready()


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_process_that_hangs_in_a_collective_with_one_that_left_is_ended():
    outcome = harness.run_processes(_hang_in_a_collective, 2)
    assert outcome.exit_code == 1
    assert (
        "jdp: Process 1 left the loop over `x` after 3 iterations, it had enough, and "
        "process 0 has been in its iteration 2 (counted from 0) for more than 2 s"
    ) in outcome.output
    assert outcome.seconds < 25.0
