import threading
import time

import pytest

import jdp
from jdp import mesh
from jdp.runtime import store
from tests import harness


def test_a_value_set_by_one_member_is_read_by_the_others():
    first, second = store.make_memory_stores(2)
    first.set("k", b"v")
    assert second.get("k", timeout_s=1.0) == b"v"
    second.delete("k")
    with pytest.raises(TimeoutError, match="`k` was not set in 0.0 s"):
        first.get("k", timeout_s=0.0)


def test_get_waits_for_the_value():
    first, second = store.make_memory_stores(2)
    thread = threading.Timer(0.1, lambda: first.set("k", b"v"))
    thread.start()
    assert second.get("k", timeout_s=5.0) == b"v"
    thread.join()


def test_a_key_is_set_once():
    (alone,) = store.make_memory_stores(1)
    alone.set("k", b"v")
    with pytest.raises(RuntimeError, match="`k` is set already"):
        alone.set("k", b"w")


def test_rounds_count_up():
    (alone,) = store.make_memory_stores(1)
    assert [alone.next_round() for _ in range(3)] == [0, 1, 2]


def _use_directories(first, second):
    """The same on both stores; `first` and `second` are of two members, or one."""
    first.set("d/a/1", b"1")
    first.set("d/a/2", b"2")
    first.set("d/ab", b"3")
    listed = second.list_directory("d/a")
    nothing = second.list_directory("none"), second.try_get("d/a"), second.try_get("d")
    found = second.try_get("d/ab")
    refused = harness.error_text(lambda: first.set("d/ab", b"4"))[0] != ""
    first.set("d/ab", b"5", overwrite=True)
    overwritten = second.get("d/ab", timeout_s=1.0)
    first.delete("d/a")
    left = second.list_directory("d")
    first.delete("d")
    first.delete("never")
    first.retire("d/a")
    first.retire("d/b")
    retired = first.take_retired(), first.take_retired()
    return listed, nothing, found, refused, overwritten, left, retired


_OF_DIRECTORIES = (
    {"1": b"1", "2": b"2"},
    ({}, None, None),
    b"3",
    True,
    b"5",
    {"ab": b"5"},
    (["d/a", "d/b"], []),
)


def test_directories_are_listed_and_deleted():
    assert _use_directories(*store.make_memory_stores(2)) == _OF_DIRECTORIES


def _use_store():
    jdp.init()
    shared = mesh.current_world().store
    if mesh.current_world().process_index == 0:
        assert _use_directories(shared, shared) == _OF_DIRECTORIES
    rank = mesh.current_world().process_index
    shared.set(f"value/{rank}", bytes([rank, 0, 255]))
    got = shared.get(f"value/{1 - rank}", timeout_s=10.0)
    start_s = time.monotonic()
    text, _ = harness.error_text(lambda: shared.get("nobody", timeout_s=0.3))
    waited_s = time.monotonic() - start_s
    shared.set(f"done/{rank}", b"")
    shared.get(f"done/{1 - rank}", timeout_s=10.0)
    if rank == 0:
        shared.delete("value/0")
    again, _ = harness.error_text(lambda: shared.get("value/0", timeout_s=0.5))
    return got, text, waited_s, shared.next_round(), again if rank == 0 else ""


@pytest.mark.multiprocess
def test_the_store_of_a_job_behaves_as_its_twin():
    for rank, value in enumerate(harness.run_checked(_use_store, 2)):
        got, text, waited_s, round_index, again = value
        assert got == bytes([1 - rank, 0, 255])
        assert text == "TimeoutError: `nobody` was not set in 0.3 s.\n"
        assert 0.2 < waited_s < 5.0
        assert round_index == 0
        if rank == 0:
            assert again.startswith("TimeoutError")
