"""The all-reduce through memory that the processes of one host share."""

import errno
import functools
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdp
from jdp.collectives import shared_memory, shared_segment
from tests import harness

# --- The segment: threads with a store in memory ------------------------------------


def _segments(world):
    return shared_segment.SharedSegment(world, 1 << 12, key="here")


@pytest.mark.parametrize("num_processes", [2, 3, 8])
def test_what_was_written_before_is_read_after(num_processes):
    def run(world):
        segment = _segments(world)
        values = np.frombuffer(segment.memory, np.int64)[:num_processes]
        rng = np.random.default_rng(world.process_index)
        seen = []
        for k in range(50):
            time.sleep(rng.exponential(1e-4))
            values[world.process_index] = k * 10 + world.process_index
            segment.arrive_and_wait()
            seen.append(values.tolist())
            segment.arrive_and_wait()
        return seen

    expected = [[k * 10 + p for p in range(num_processes)] for k in range(50)]
    assert harness.run_threads(run, num_processes) == [expected] * num_processes


def test_a_process_that_does_not_arrive_is_named_once_and_for_all():
    def run(world):
        segment = _segments(world)
        if world.process_index == 1:
            time.sleep(1.5)  # past the deadline of the others.
        errors = []
        for _ in range(2):
            errors.append(harness.error_text(segment.arrive_and_wait)[0])
        return errors

    found = harness.run_threads(run, 3, timeout_s=0.5)
    for process in (0, 2):
        assert (
            "Process 1 did not come to a shared-memory all-reduce" in found[process][0]
        )
        assert "within 0.5 s" in found[process][0]
        assert found[process][1] != ""


def test_a_process_that_does_not_come_is_named_by_all():
    def run(world):
        if world.process_index == 2:
            return "elsewhere"
        return harness.error_text(lambda: _segments(world))[0]

    found = harness.run_threads(run, 3, timeout_s=0.5)
    for text in found[:2]:
        assert "Process 2 did not come to make a shared segment within 0.5 s" in text


def test_more_memory_than_there_is_is_refused_by_all():
    stat = os.statvfs("/dev/shm")
    size = stat.f_blocks * stat.f_frsize + (1 << 20)

    def run(world):
        make = functools.partial(shared_segment.SharedSegment, key="here")
        return harness.error_text(lambda: make(world, size))[0]

    for text in harness.run_threads(run, 2):
        assert "Process 0 cannot make" in text and os.strerror(errno.ENOSPC) in text
        assert "/dev/shm has" in text


def test_memory_of_another_is_refused_by_all(monkeypatch):
    opened = shared_segment._open

    def open_another(size, own, offer):
        return opened(size, own, shared_segment._Hello(own, offer.path, b"x" * 16))

    monkeypatch.setattr(shared_segment, "_open", open_another)
    found = harness.run_threads(
        lambda w: harness.error_text(lambda: _segments(w))[0], 2
    )
    for text in found:
        assert "Process 1 cannot open the shared memory of process 0" in text


def test_nothing_has_a_name():
    before = os.listdir("/dev/shm")

    def run(world):
        segment = _segments(world)
        segment.arrive_and_wait()
        return os.listdir("/dev/shm")

    assert harness.run_threads(run, 2) == [before] * 2


# --- Real processes -----------------------------------------------------------------

OPS = {
    "sum": lambda xs: sum(xs),
    "mean": lambda xs: sum(xs) / len(xs),
    "min": lambda xs: np.min(xs, axis=0),
    "max": lambda xs: np.max(xs, axis=0),
    "product": lambda xs: np.prod(xs, axis=0),
}
# One element, one stage, the edge to two stages, parts that do not divide, pieces.
SIZES = (1, 7, 1000, 8192, 8193, 100_003, 300_000)
DTYPES = ("float32", "float16", "bfloat16", "int32", "complex64")


def _values(process, size, dtype):
    """Small integers: exact in every dtype, as are sums and products of three."""
    values = (np.arange(size) * 7 + process * 3) % 5 + 1
    return values.astype(jnp.dtype(dtype))


def _reduce_everything():
    world = jdp.init()
    # Of which the largest buffers take several pieces.
    buffer = shared_memory.create_shared_buffer(world, 1 << 19)
    wrong, count = [], 0
    for dtype in DTYPES:
        for op in OPS:
            if (
                (op, dtype) == ("mean", "int32")
                or op in ("min", "max")
                and (dtype == "complex64")
            ):
                continue
            for reduce in (buffer.all_reduce, shared_memory.shared_memory_all_reduce):
                fn = jax.shard_map(
                    lambda *xs, f=reduce, op=op: [f(x, "data", op=op) for x in xs],
                    mesh=world.mesh,
                    in_specs=P("data"),
                    out_specs=P("data"),
                    check_vma=False,
                )
                own = [_values(world.process_index, n, dtype) for n in SIZES]
                found = jax.jit(fn)(*jdp.global_batch(world, own))
                for size, x in zip(SIZES, found, strict=True):
                    xs = [_values(p, size, dtype) for p in range(world.process_count)]
                    wide = np.complex128 if dtype == "complex64" else np.float64
                    expected = OPS[op]([x.astype(wide) for x in xs]).astype(xs[0].dtype)
                    value = np.asarray(x.addressable_data(0))
                    count += 1
                    same = np.array_equal(value, expected)
                    if op == "mean":  # the one that is rounded; in float32 at least.
                        eps = float(jnp.finfo(jnp.dtype(dtype)).eps)
                        same = np.allclose(
                            value.astype(wide), expected.astype(wide), rtol=eps, atol=0
                        )
                    if not same or value.dtype != expected.dtype:
                        wrong.append((dtype, op, size))
    return wrong, count


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes", [2, 3])
def test_every_size_dtype_and_op(num_processes):
    for wrong, count in harness.run_checked(_reduce_everything, num_processes):
        assert (wrong, count) == ([], 2 * len(SIZES) * (4 * 5 + 3 - 1))


def _train(bucket_bytes):
    world = jdp.init()
    tx = optax.adam(0.05)
    everything = harness.oracle_batches(8)
    params = harness.oracle_params()
    plan = jdp.plan_buckets(
        params, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes
    )

    @jdp.data_parallel(check_vma=False)
    def step(carry, batch, weight):
        params, state = carry
        grad_fn = jdp.value_and_grad(
            harness.oracle_loss,
            plan=plan,
            all_reduce=shared_memory.shared_memory_all_reduce,
            weight=weight.sum(),
        )
        loss, grads = grad_fn(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), {"loss": loss}

    # Asks nobody, so that one process may do it alone.
    if world.is_main_process:
        found = jdp.describe(
            step, (params, tx.init(params)), everything[0], np.ones(16)
        )
        assert found.synchronizations[0].algorithm == "shared_memory_all_reduce"
    carry = jdp.replicate(world, (params, tx.init(params)))
    losses = []
    for batch in everything:
        cut = functools.partial(np.array_split, indices_or_sections=world.process_count)
        mine = jax.tree.map(lambda x, cut=cut: cut(x)[world.process_index], batch)
        carry, metrics = step(carry, mine, np.ones(len(mine["x"]), np.float32))
        losses.append(float(metrics["loss"]))
    jdp.check_replicas(carry, world=world)
    return losses, jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), carry[0])


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes, bucket_bytes", [(2, 1 << 20), (2, 0), (4, 0)])
def test_processes_train_as_one_device_does(num_processes, bucket_bytes):
    params, losses = harness.train_alone(
        harness.oracle_params(), harness.oracle_batches(8), optax.adam(0.05)
    )
    for found_losses, found in harness.run_checked(_train, num_processes, bucket_bytes):
        np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
        for name, value in params.items():
            # Adam divides by the root of squares: rounding is amplified at first.
            np.testing.assert_allclose(found[name], value, atol=1e-4)


def _weigh():
    world = jdp.init()

    @jdp.data_parallel(check_vma=False, donate_state=False)
    def step(state, grads, weight):
        options = {"all_reduce": shared_memory.shared_memory_all_reduce}
        synced = jdp.sync_gradients(
            {k: x[0] for k, x in grads.items()}, weight=weight.sum(), **options
        )
        return state, synced

    found = []
    for amounts in ((3, 1), (3, 0), (0, 0)):
        amount = amounts[world.process_index]
        # Whatever a replica without data holds does not count.
        value = np.float32(world.process_index + 1 if amount else np.nan)
        grads = {"a": np.full((1, 5), value), "b": np.full((1, 20_000), value)}
        _, synced = step(np.zeros(1), grads, np.full(1, amount, np.float32))
        values = [np.unique(x.addressable_data(0)) for x in synced.values()]
        found.append([x.tolist() for x in values])
    return found


@pytest.mark.multiprocess
def test_a_replica_without_data_does_not_count():
    expected = [[[1.25]] * 2, [[1.0]] * 2, [[0.0]] * 2]
    assert harness.run_checked(_weigh, 2) == [expected] * 2


def _jitted(world, size):
    fn = jax.shard_map(
        lambda x: shared_memory.shared_memory_all_reduce(x, "data"),
        mesh=world.mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    batch = jdp.global_batch(world, np.ones(size, np.float32))
    jitted = jax.jit(fn)
    return lambda: jax.block_until_ready(jitted(batch))


def _lose_a_peer(delay_s):
    world = jdp.init(timeout_s=20.0)
    run = _jitted(world, 100_000)
    run()
    if world.process_index == 1:
        until_s = time.monotonic() + delay_s
        while time.monotonic() < until_s:
            run()
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on():
        while True:
            run()

    text, seconds = harness.error_text(go_on)
    again, _ = harness.error_text(run)
    print(f"SURVIVED {seconds:.1f} s: {text} AGAIN {again}", flush=True)


@pytest.mark.multiprocess
@pytest.mark.parametrize("delay_s", [0.01, 0.5])
def test_a_survivor_raises_at_once_and_names_the_dead(delay_s):
    before = os.listdir("/dev/shm")
    outcome = harness.run_processes(_lose_a_peer, 2, delay_s, grace_s=5.0)
    lines = outcome.output.replace("\n[0] ", " ")
    assert "SURVIVED" in lines, outcome.output
    survived = lines.split("SURVIVED", 1)[1]
    assert float(survived.split()[0]) < delay_s + 5.0
    text, again = survived.split("AGAIN", 1)
    for part in (text, again):
        assert "Process 1 has ended; the others cannot go on without it." in part
    assert os.listdir("/dev/shm") == before


def _reduce_different_sizes():
    world = jdp.init(timeout_s=5.0)
    run = _jitted(world, 1000 + world.process_index)
    return harness.error_text(run)


@pytest.mark.multiprocess
def test_different_buffers_are_not_summed():
    for text, seconds in harness.run_checked(_reduce_different_sizes, 2):
        assert "reduces another buffer than process" in text and seconds < 4.0


# --- What is refused ----------------------------------------------------------------


def _traced(world, fn, **options):
    names = world.axis_names
    mapped = jax.shard_map(
        fn, mesh=world.mesh, in_specs=P(names), out_specs=P(names), check_vma=False
    )
    return jax.make_jaxpr(mapped)(np.ones(8, options.get("dtype", np.float32)))


def test_what_cannot_be_reduced_is_refused():
    world = harness.local_world(1)
    buffer = shared_memory.create_shared_buffer(world, 1 << 10)
    reduce = buffer.all_reduce
    with pytest.raises(ValueError, match="`op` must be one of .*, got 'summ'"):
        _traced(world, lambda x: reduce(x, "data", op="summ"))
    with pytest.raises(ValueError, match="`axis_name='dat'` is not bound here"):
        _traced(world, lambda x: reduce(x, "dat"))
    with pytest.raises(TypeError, match="The mean of int32 is no int32"):
        _traced(world, lambda x: reduce(x, "data", op="mean"), dtype=np.int32)
    with pytest.raises(ValueError, match="has 2 replicas, .* over all 1 of the world"):
        _traced(harness.local_world(2), lambda x: reduce(x, "data"))
    with pytest.raises(ValueError, match="2 replicas on 1 processes"):
        shared_memory.create_shared_buffer(harness.local_world(2))
    with pytest.raises(ValueError, match="`num_bytes` must be at least 1, got 0"):
        shared_memory.create_shared_buffer(world, 0)


def test_one_replica_returns_what_it_has():
    world = harness.local_world(1)
    buffer = shared_memory.create_shared_buffer(world, 1 << 10)
    for op in OPS:
        traced = _traced(world, lambda x, op=op: buffer.all_reduce(x, "data", op=op))
        assert "callback" not in str(traced)
