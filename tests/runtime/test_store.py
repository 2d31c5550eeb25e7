import threading
import time

import pytest

import jdp
from jdp import compat
from jdp.replicas import agreement, mesh
from jdp.runtime import job_key, store
from tests import harness, wire_fuzz


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
    for directory in ("d/a", "e/a", "d/b"):
        first.retire(directory)
    retired = [first.take_retired(under) for under in ("d", "d", "e/")]
    return listed, nothing, found, refused, overwritten, left, retired


_OF_DIRECTORIES = (
    {"1": b"1", "2": b"2"},
    ({}, None, None),
    b"3",
    True,
    b"5",
    {"ab": b"5"},
    [["d/a", "d/b"], [], ["e/a"]],
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
    # `jdp.init` has used some rounds, the same number on all processes.
    rounds = [shared.next_round() for _ in range(3)]
    return got, text, waited_s, rounds, again if rank == 0 else ""


@pytest.mark.multiprocess
def test_the_store_of_a_job_behaves_as_its_twin():
    values = harness.run_checked(_use_store, 2)
    first = values[0][3][0]
    for rank, value in enumerate(values):
        got, text, waited_s, rounds, again = value
        assert got == bytes([1 - rank, 0, 255])
        assert text == "TimeoutError: `nobody` was not set in 0.3 s.\n"
        assert 0.2 < waited_s < 5.0
        assert rounds == [first, first + 1, first + 2]
        if rank == 0:
            assert again.startswith("TimeoutError")


# --- Strangers, who can reach the store of JAX -----------------------------------


def _signed_store():
    client = wire_fuzz.Client()
    return store.DistributedStore(client, job_key.make()), client.values


def test_what_a_stranger_wrote_counts_as_not_there_and_is_named(caplog):
    ours, values = _signed_store()
    ours.set("d/a", b"1")
    values["d/b"] = b"forged"
    values["d/c"] = values["d/a"]  # signed, but for another key.
    assert ours.list_directory("d") == {"a": b"1"}
    assert ours.try_get("d/b") is None and ours.try_get("d/c") is None
    for key in ("d/b", "d/c"):
        start_s = time.monotonic()
        with pytest.raises(TimeoutError, match=f"`{key}` was not set by a process of"):
            ours.get(key, timeout_s=0.2)
        assert time.monotonic() - start_s < 5.0
    said = [m for m in caplog.messages if "is not signed with the key" in m]
    assert len(said) == 2  # once a key.


def test_a_process_that_comes_later_than_a_stranger_is_heard():
    ours, values = _signed_store()
    values["k"] = b"forged"
    thread = threading.Timer(0.2, lambda: ours.set("k", b"v", overwrite=True))
    thread.start()
    assert ours.get("k", timeout_s=10.0) == b"v"
    thread.join()


def _write_as_a_stranger():
    """A process of the job whose store the others do not believe; it is no other key.

    The first meeting is spoiled before anybody comes, the second goes on.
    """
    world = jdp.init(timeout_s=3.0)
    client = compat.distributed_client()
    last = world.store.next_round()  # `jdp.init` has used some.
    if world.process_index == 1:
        forged = f"{last + 1}/outcome", f"{last + 2}/1"
        for key in forged:
            client.key_value_set_bytes(f"jdp/meet/{key}", b"forged", False)
        world.store.set("ready", b"")
    world.store.get("ready", timeout_s=30.0)
    met = agreement.meet(world, "first", b"x", b"".join)
    if world.process_index == 1:
        world.store.next_round()  # It stays away; only the forged value is there.
        world.store.get("done", timeout_s=30.0)
        return met, "", 0.0
    start_s = time.monotonic()
    text, _ = harness.error_text(lambda: agreement.meet(world, "second", b"", b"".join))
    seconds = time.monotonic() - start_s
    world.store.set("done", b"")
    return met, text, seconds


@pytest.mark.multiprocess
def test_strangers_in_the_store_of_a_job_are_written_over_or_named():
    first, second = harness.run_checked(_write_as_a_stranger, 2)
    assert first[0] == second[0] == b"xx"
    assert "Process 1 did not come to the second within 3 s" in first[1]
    assert "was not set by a process of this job" in first[1] and first[2] < 20.0
