"""The loop: in threads that share an in-memory store, then in real processes."""

import collections
import dataclasses
import gc
import re
import threading
import time
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import jdp
from jdp.join.uneven_batches import join_batches
from tests import harness

_NAMES = ("jdp-join-reader", "jdp-join-agent", "jdp-departures")


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    x: np.ndarray


def _batches(process, count, num_samples=4):
    """Each value tells the process, the batch and the sample."""
    return [
        {"x": (100 * process + k + np.arange(n) / 100).astype(np.float32)[:, None]}
        for k in range(count)
        for n in [num_samples(k) if callable(num_samples) else num_samples]
    ]


def _values(iterator):
    return [(b["x"][:, 0].tolist(), w.tolist()) for b, w in iterator]


def _check_uneven(results, inputs, devices=1):
    """Holds what each process saw against what it put in."""
    last = max(map(len, inputs))
    sizes, mark = [], 1
    for k in range(last):
        n = [len(own[k]["x"]) for own in inputs if k < len(own)]
        mark = max(mark, *(-(-m // devices) for m in n), 0)
        sizes.append(mark * devices)
    for seen, own in zip(results, inputs, strict=True):
        assert len(seen) == last
        for k, (values, weight) in enumerate(seen):
            true = own[k]["x"][:, 0].tolist() if k < len(own) else []
            padding = sizes[k] - len(true)
            assert values == true + [0.0] * padding
            assert weight == [1.0] * len(true) + [0.0] * padding


def _run_threads(fn, n, **kwargs):
    """`harness.run_threads`, where each member has the device that all share."""

    def run(world):
        world.__dict__["local_devices"] = tuple(world.mesh.devices.flat)
        world.__dict__["local_replicas"] = (0,)
        return fn(world)

    return harness.run_threads(run, n, **kwargs)


def _wait_for_threads(timeout_s):
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        names = [t.name for t in threading.enumerate() if t.name in _NAMES]
        if not names:
            return []
        time.sleep(0.01)
    return names


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    if _wait_for_threads(0.2):  # Of a loop in a cycle, which only this finds.
        gc.collect()  # Seconds where thousands of tests have left what JAX keeps.
        assert _wait_for_threads(5.0) == []


@pytest.mark.parametrize("counts", [(5, 8, 0), (0, 0), (1,), (0, 1, 40), (3, 3, 3, 3)])
@pytest.mark.parametrize("prefetch", [1, 2, 4, 100])
def test_the_loop_goes_on_while_any_process_has_data(counts, prefetch):
    inputs = [_batches(p, count) for p, count in enumerate(counts)]

    def fn(world):
        own = inputs[world.process_index]
        return _values(join_batches(own, world=world, prefetch=prefetch))

    _check_uneven(_run_threads(fn, len(counts)), inputs)


def test_batches_differ_in_size_between_processes_and_steps():
    inputs = [
        _batches(0, 9, lambda k: 1 + k % 3),
        _batches(1, 7, lambda k: 5 * (k == 2)),  # Most of them are empty.
        _batches(2, 2, 7),
    ]

    def fn(world):
        own = iter(inputs[world.process_index])  # A generator.
        return _values(join_batches((batch for batch in own), world=world))

    _check_uneven(_run_threads(fn, 3), inputs)


def test_one_process_pads_to_the_largest_batch_so_far():
    inputs = [_batches(0, 5, lambda k: [2, 5, 3, 0, 8][k])]
    world = harness.local_world(4)
    _check_uneven([_values(join_batches(inputs[0], world=world))], inputs, devices=4)


def test_loops_follow_each_other_and_can_be_nested():
    def fn(world):
        seen = []
        for count in (3, 0, 2):
            outer = join_batches(_batches(0, count), world=world)
            for _ in outer:
                inner = join_batches(_batches(0, world.process_index), world=world)
                seen.append(len(list(inner)))
        return seen

    assert _run_threads(fn, 3) == [[2] * 5] * 3


def test_the_store_is_left_with_the_last_loop_only():
    stores = []

    def fn(world):
        stores.append(world.store)
        for _ in range(3):
            list(join_batches(_batches(0, 200), world=world, prefetch=1))
        return 0

    _run_threads(fn, 2)
    left = stores[0]._shared.values
    assert {key.split("/")[2] for key in left} == {"2"}
    assert len(left) < 100  # Of some 400; rounds that are over go in folders.


class _Tensor:
    """A leaf of another library, which shows its memory as those of torch do."""

    def __init__(self, memory):
        self.memory = memory

    def __array__(self, dtype=None, copy=None):
        return self.memory


@pytest.mark.parametrize("as_leaf", [lambda x: x, lambda x: x[:, :1], memoryview,
                                     _Tensor])  # fmt: skip
@pytest.mark.parametrize("prefetch", [1, 8])
def test_a_loader_may_write_all_batches_to_the_same_memory(prefetch, as_leaf):
    def load():
        memory = np.zeros((4, 2), np.float32)
        for i in range(6):
            memory[:] = i
            yield {"x": as_leaf(memory)}

    world = harness.local_world(1)
    found = []
    for batch, _ in join_batches(load(), world=world, prefetch=prefetch):
        time.sleep(0.01)  # The reader goes on meanwhile.
        found.append(batch["x"].tolist())
    columns = len(found[0][0])
    assert found == [[[float(i)] * columns] * 4 for i in range(6)]


def test_full_batches_of_jax_are_yielded_as_they_are():
    first, second = {"x": jnp.ones((4, 2))}, {"x": np.ones((2, 2))}
    world = harness.local_world(1)
    (a, w), (b, v), (c, u) = join_batches(
        [first, {"x": jnp.ones((2, 2))}, first], world=world
    )
    assert a is first and c is first
    assert w is u and not w.flags.writeable
    assert isinstance(b["x"], np.ndarray) and v.tolist() == [1, 1, 0, 0]
    assert w.dtype == v.dtype == np.float32
    assert second["x"].shape == (2, 2)


@pytest.mark.parametrize("value", [0, -1])
def test_prefetch_must_be_positive(value):
    with pytest.raises(ValueError, match=f"`prefetch` must be at least 1, got {value}"):
        join_batches([], world=harness.local_world(1), prefetch=value)


def test_batches_must_be_iterable_and_no_batch():
    with pytest.raises(TypeError, match="`batches` must be iterable, got int"):
        join_batches(3, world=harness.local_world(1))  # type: ignore
    with pytest.raises(
        TypeError, match=r"`batches` is a dict, .* one batch, `\[batch\]`"
    ):
        join_batches({"x": np.ones(2)}, world=harness.local_world(1))


@pytest.mark.parametrize("prefetch", [1, 3])
def test_no_more_than_prefetch_is_read_ahead(prefetch):
    num_read = 0

    def generate():
        nonlocal num_read
        for batch in _batches(0, 20):
            num_read += 1
            yield batch

    for i, _ in enumerate(
        join_batches(generate(), world=harness.local_world(1), prefetch=prefetch)
    ):
        time.sleep(0.01)
        assert num_read <= i + 1 + prefetch


def _collect(iterator):
    """Returns the number of iterations and the error after them."""
    count = 0
    try:
        for _ in iterator:
            count += 1
    except Exception as error:
        return count, error
    return count, None


@pytest.mark.parametrize("place", [0, 1, 6])
def test_a_reading_error_reaches_all_at_the_same_iteration(place):
    boom = KeyError("no such file")

    def generate(process):
        for k, batch in enumerate(_batches(process, 9)):
            if process == 1 and k == place:
                raise boom
            yield batch

    def fn(world):
        return _collect(join_batches(generate(world.process_index), world=world))

    results = _run_threads(fn, 3)
    assert [count for count, _ in results] == [place] * 3
    assert results[1][1] is boom
    for p in (0, 2):
        assert isinstance(results[p][1], RuntimeError)
        assert str(results[p][1]) == (
            f"Process 1 could not read its batch {place} (counted from 0): KeyError: "
            "'no such file'"
        )


def test_a_batch_that_cannot_be_padded_is_an_error_for_all():
    def fn(world):
        own = _batches(0, 3)
        if world.process_index == 0:
            own[2]["x"] = np.float32(1)
        return _collect(join_batches(own, world=world))

    (n, own), (m, other) = _run_threads(fn, 2)
    assert n == m == 2
    assert isinstance(own, ValueError) and isinstance(other, RuntimeError)
    assert "The leaf `['x']` of batch 2 (counted from 0) is a scalar" in str(own)
    assert str(own) in str(other) and "Process 0" in str(other)


@pytest.mark.parametrize("place", [0, 2])
def test_specs_that_differ_are_an_error_for_all(place):
    def fn(world):
        own = _batches(0, 4)
        if world.process_index == 1:
            own[place]["x"] = own[place]["x"].astype(np.float16)
        return _collect(join_batches(own, world=world))

    for count, error in _run_threads(fn, 3):
        assert count == place
        assert isinstance(error, RuntimeError)
        assert (
            f"The batches of iteration {place} (counted from 0) differ: the leaf "
            "`['x']` is float32(samples, 1) on process 0 and float16(samples, 1) on "
            "process 1."
        ) in str(error)


def test_a_spec_may_change_on_all_at_once():
    def fn(world):
        own = [
            np.ones((2 + k, 1 + k // 2), np.float32)
            for k in range(6 - 3 * world.process_index)
        ]
        return [batch.shape for batch, _ in join_batches(own, world=world)]

    first, second = _run_threads(fn, 2)
    assert first == second == [(2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (7, 3)]


def _one_has_none(make, like=None):
    def fn(world):
        own = [make(np.ones((2, 3), jnp.bfloat16))] * 2 if world.process_index else []
        return list(join_batches(own, world=world, like=like))

    return fn


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Pair(x, {"a": [x, None]}),
        lambda x: (x, [x]),
        lambda x: x,
    ],
)
def test_a_process_without_a_batch_makes_zeros_of_the_structure(make):
    for batch, weight in _run_threads(_one_has_none(make), 2)[0]:
        expected = make(np.zeros((2, 3), jnp.bfloat16))
        assert jax.tree.structure(batch) == jax.tree.structure(expected)
        for leaf in jax.tree.leaves(batch):
            assert leaf.dtype == jnp.bfloat16 and leaf.shape == (2, 3)
            assert not leaf.astype(np.float32).any()
        assert weight.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("make", [Node, lambda x: collections.OrderedDict(x=x)])
def test_nodes_of_other_types_need_like(make):
    like = make(jax.ShapeDtypeStruct((7, 3), jnp.bfloat16))
    zeros, ones = _run_threads(_one_has_none(make, like), 2)
    assert len(zeros) == len(ones) == 2
    assert type(zeros[0][0]) is type(ones[0][0])
    for error in _run_threads(_one_has_none(make), 2):
        assert isinstance(error, RuntimeError)
        assert "Process 0 has no batch of its own" in str(error)
        assert "Pass `like=`, an example batch" in str(error)
    for error in _run_threads(_one_has_none(make, like={"a": 1}), 2):
        assert "which `like` does not have" in str(error)


def test_a_process_that_had_a_batch_needs_no_like():
    def fn(world):
        own = [Node(np.ones((2, 3)))] * (1 + 2 * world.process_index)
        return [type(b) for b, _ in join_batches(own, world=world)]

    assert _run_threads(fn, 2) == [[Node] * 3] * 2


def test_a_slow_reader_is_waited_for():
    def generate(process):
        for batch in _batches(process, 4):
            time.sleep(0.15 * process)
            yield batch

    def fn(world):
        own = generate(world.process_index)
        return len(_values(join_batches(own, world=world)))

    assert _run_threads(fn, 3, timeout_s=0.9) == [4] * 3


def test_a_reader_that_is_stuck_is_named_on_all():
    release = threading.Event()

    def generate(process):
        for k, batch in enumerate(_batches(process, 4)):
            if process == 1 and k == 2:
                release.wait(10.0)
            yield batch

    def fn(world):
        result = _collect(join_batches(generate(world.process_index), world=world))
        return result, time.monotonic()

    start_s = time.monotonic()
    results = _run_threads(fn, 3, timeout_s=1.0)
    release.set()
    for (count, error), end_s in results:
        assert count == 2
        assert str(error).startswith(
            "Process 1 has not read its batch 2 (counted from 0) within 1 s."
        )
        assert end_s - start_s < 4.0


def test_a_long_pause_of_a_loop_is_no_error():
    def fn(world):
        count = 0
        for _ in join_batches(_batches(0, 12), world=world, prefetch=2):
            count += 1
            if count == 3 and world.process_index == 1:
                time.sleep(2.5)
        return count

    assert _run_threads(fn, 2, timeout_s=0.6) == [12, 12]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_process_that_does_not_come_is_named(missing):
    def fn(world):
        if world.process_index == missing:
            return None
        return _collect(join_batches(_batches(0, 2), world=world))

    results = _run_threads(fn, 3, timeout_s=0.4)
    for p, result in enumerate(results):
        if p != missing:
            assert result[0] == 0
            # Or that process 2 left because of that.
            assert f"Process {missing} has " in str(result[1])


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_break_on_one_process_is_an_error_on_the_others(leaving):
    def fn(world):
        for i, _ in enumerate(join_batches(_batches(0, 1000), world=world)):
            if world.process_index == leaving and i == 3:
                break
            time.sleep(0.01)

    start_s = time.monotonic()
    results = _run_threads(fn, 3)
    assert time.monotonic() - start_s < 4.0
    assert results.pop(leaving) is None
    for error in results:
        assert isinstance(error, RuntimeError)
        assert (
            f"Process {leaving} left the loop over `jdp.join_batches` after 4 "
            "iterations, by `break` or an exception, and process"
        ) in str(error)


def test_leaving_in_the_last_iteration_is_told_too():
    """The others may be in a collective of that iteration."""

    def fn(world):
        iterator = join_batches(_batches(0, 3), world=world)
        for i, _ in enumerate(iterator):
            if i == 2 and world.process_index == 1:
                time.sleep(0.3)  # By now the end is known.
                iterator.close()
                return None
            if i == 2:
                time.sleep(0.8)
        (notice, _), *_ = iterator._watch._notices
        return notice

    notice, nothing = _run_threads(fn, 2)
    assert nothing is None
    assert (notice.process, notice.num_begun) == (1, 3)


def test_a_break_on_all_processes_is_no_error():
    def fn(world):
        counts = []
        for _ in range(3):
            for i, _ in enumerate(join_batches(_batches(0, 50), world=world)):
                if i == 4:
                    break
            counts.append(i)
        return counts

    assert _run_threads(fn, 3) == [[4] * 3] * 3


def test_dropping_or_closing_the_iterator_stops_its_threads():
    closed = threading.Event()

    def generate():
        try:
            yield from _batches(0, 50)
        finally:
            closed.set()

    world = harness.local_world(1)
    iterator = join_batches(generate(), world=world)
    next(iterator)
    dropped = weakref.ref(iterator)
    del iterator
    assert dropped() is None
    assert closed.wait(5.0)
    iterator = join_batches(generate(), world=world)
    iterator.close()
    iterator.close()
    assert list(iterator) == []


def test_a_reader_in_the_users_code_does_not_hold_up_closing():
    release = threading.Event()

    def generate():
        yield from _batches(0, 1)
        release.wait(10.0)

    iterator = join_batches(generate(), world=harness.local_world(1))
    next(iterator)
    start_s = time.monotonic()
    iterator.close()
    assert time.monotonic() - start_s < 1.5
    release.set()


# Real processes.


def _train(counts, fault=None):
    world = jdp.init(timeout_s=3.0)
    rank = world.process_index
    step = jax.jit(lambda x, w: (x[:, 0] * w).sum())
    total, count = 0.0, 0
    try:
        for batch, weight in join_batches(_batches(rank, counts[rank]), world=world):
            if fault in ("raise", "catch") and rank == 1 and count == 2:
                raise ValueError("boom")
            if fault == "die" and count == 4:
                harness.die(1)
            x, w = jdp.global_batch(world, (batch["x"], weight))
            total += float(step(x, w))
            count += 1
    except ValueError:
        if fault == "raise":
            raise
        time.sleep(30.0)
    _, error = _collect(
        join_batches([jdp.global_batch(world, np.ones((1, 1)))], world=world)
    )
    return total, count, _wait_for_threads(5.0), _keys(world), str(error)


def _keys(world):
    """Runs one more loop; returns its number, and the numbers of loops with keys."""
    store = world.store
    number = store.next_round() + 1
    list(join_batches([], world=world))
    left = {key.split("/")[0] for key in store.list_directory("jdp/join")}
    return number, sorted(map(int, left))


@pytest.mark.multiprocess
def test_processes_with_uneven_data_run_one_step_together():
    counts = (5, 8, 0)
    results = harness.run_checked(_train, 3, counts)
    total = sum(b["x"].sum() for p, n in enumerate(counts) for b in _batches(p, n))
    last, left = results[0][3]
    assert left == [last]  # Process 0 has deleted the loops before.
    for value, count, threads, _, error in results:
        assert "The leaf `(root)` of batch 0 (counted from 0) is a global" in error
        assert value == pytest.approx(total, rel=1e-5)
        assert count == 8
        assert threads == []


@pytest.mark.multiprocess
@pytest.mark.slow
def test_an_exception_in_the_loop_body_ends_the_job_with_a_name():
    outcome = harness.run_processes(_train, 2, (9, 9), "raise")
    assert outcome.exit_code != 0
    assert "ValueError: boom" in outcome.output
    assert outcome.seconds < 15.0
    # Where nothing ends the others, they end themselves.
    outcome = harness.run_processes(_train, 2, (9, 9), "catch")
    assert outcome.exit_code != 0
    assert (
        "Process 1 left the loop over `jdp.join_batches` after 3 iterations, by "
        "`break` or an exception, and process 0 has been in its iteration 2"
    ) in outcome.output
    assert outcome.seconds < 20.0


@pytest.mark.multiprocess
def test_a_process_that_has_run_out_and_dies_ends_the_job():
    outcome = harness.run_processes(_train, 2, (30, 2), "die")
    assert outcome.exit_code != 0
    assert outcome.seconds < 25.0


def _leave_the_program_inside_the_loop():
    world = jdp.init(timeout_s=3.0)
    kept = join_batches(_batches(0, 50), world=world)
    for _ in kept:
        break
    return world.process_index


@pytest.mark.multiprocess
def test_a_program_may_end_inside_the_loop():
    outcome = harness.run_processes(
        _leave_the_program_inside_the_loop, 2, ends_as_usual=True
    )
    assert outcome.exit_code == 0, outcome.output
    assert "Traceback" not in outcome.output
    assert outcome.values == [0, 1]


def _train_with_grain():
    world = jdp.init()
    # Imported here: it touches the processes' devices no earlier than they may be.
    import grain

    rows = [{"x": np.full(3, k, np.float32)} for k in range(10 + world.process_index)]
    loader = (
        grain.MapDataset.source(rows)
        .shuffle(seed=0)
        .batch(4)
        .to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    )
    found = [], []
    for batch, weight in join_batches(loader, world=world):
        found[0].append(weight.tolist())
        found[1].extend(batch["x"][weight > 0, 0].tolist())
    return found


@pytest.mark.multiprocess
def test_a_grain_data_set_is_an_iterable_like_any_other():
    values = harness.run_checked(_train_with_grain, 2)
    for process, (weights, seen) in enumerate(values):
        last = [1.0] * (2 + process) + [0.0] * (2 - process)
        assert weights == [[1.0] * 4, [1.0] * 4, last]
        assert sorted(seen) == list(range(10 + process))


def test_an_error_of_a_later_batch_leaves_those_before_it_to_who_has_none():
    def fn(world):
        own = [] if world.process_index == 2 else _batches(0, 4)
        if world.process_index == 1:
            own[2]["x"] = own[2]["x"].astype(np.float16)
        return _collect(join_batches(own, world=world))

    for count, error in _run_threads(fn, 3):
        assert count == 2 and "The batches of iteration 2" in str(error), error


def test_batches_have_keys_of_random_numbers_and_a_step_takes_them():
    keys = jax.random.split(jax.random.key(0), (3, 4))
    world = harness.local_world(2)
    batches = [{"key": k, "x": np.ones((len(k), 2), np.float32)} for k in keys]
    batches[-1] = jax.tree.map(lambda leaf: leaf[:3], batches[-1])

    @jdp.data_parallel(world=world)
    def step(state, batch):
        noise = jax.vmap(jax.random.normal)(batch["key"])
        return state, noise.mean()

    seen = []
    for batch, _weight in join_batches(batches, world=world):
        assert batch["key"].shape == (4,) and batch["x"].shape == (4, 2)
        _, mean = step(jnp.zeros(()), batch)
        seen.append(float(mean))
    padding = jax.random.wrap_key_data(np.zeros((1, 2), np.uint32))
    last = jnp.concatenate([keys[2][:3], padding])
    expected = [
        float(jax.vmap(jax.random.normal)(k).mean()) for k in (keys[0], keys[1], last)
    ]
    np.testing.assert_allclose(seen, expected, rtol=1e-5)


def test_a_process_without_batches_gets_keys():
    keys = jax.random.split(jax.random.key(0), 2)

    def fn(world):
        batches = [keys] if world.process_index == 0 else []
        return [batch for batch, _ in join_batches(batches, world=world)]

    (first,), (second,) = _run_threads(fn, 2)
    assert (first == keys).all()
    assert second.dtype == keys.dtype and second.shape == (2,)


@pytest.mark.parametrize(
    "said,message",
    [
        ([[4], []], "Process 1 announces batches without their structure"),
        ([[-4], []], "Process 1 announces a batch with a number of samples that none"),
        ([[], [], False, "error"], "Process 1 announces an error and no end"),
        ([[], [], False, None, None, float("nan")], "Process 1 announces a time that"),
        ([[4], [[0, ["x", None, [["a", "O", []]]]]]], "with a leaf `a` of dtype 'O'"),
        ([[4], [[7, ["x", None, []]]]], "announces the structure of a batch|batches w"),
        ([b"\xff"], "The announcement of process 1 is malformed"),
    ],
)
def test_an_announcement_that_makes_no_sense_is_named_on_all_processes(said, message):
    def fn(world):
        if world.process_index == 1:
            world.store.set("jdp/join/0/0/0/1", msgspec.msgpack.encode(said))
            decision = world.store.get("jdp/join/0/0/0/outcome", timeout_s=5.0)
            raise RuntimeError(str(msgspec.msgpack.decode(decision)))
        list(join_batches(_batches(0, 3), world=world))

    for error in _run_threads(fn, 2):
        assert re.search(message, str(error)), error


@pytest.mark.parametrize(
    "said,message",
    [
        ([[4]], "Process 0 decided on batches without their structure"),
        ([[4], [[0, 3]]], "Process 0 decided on a structure that was not agreed on"),
        ([[0], [[0, 0]]], "decided on a number of samples that no batch can have"),
        ([[], [], ["x", None, [["a", "O", []]]]], "decided on a batch with a leaf `a`"),
        ([[], [], None, False, "why", False, 7], "process 7 as the culprit"),
        ([b"\xff"], "The decision of process 0 is malformed"),
    ],
)
def test_a_decision_that_makes_no_sense_is_named(said, message):
    def fn(world):
        if world.process_index == 0:
            world.store.get("jdp/join/0/0/0/1", timeout_s=5.0)
            data = msgspec.msgpack.encode(said)
            world.store.set("jdp/join/0/0/0/outcome", data)
            return None
        list(join_batches(_batches(0, 3), world=world))

    _, error = _run_threads(fn, 2)
    assert re.search(message, str(error)), error
