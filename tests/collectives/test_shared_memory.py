"""The all-reduce through memory that the processes of one host share."""

import contextlib
import errno
import fcntl
import functools
import os
import pathlib
import resource
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from jax.sharding import PartitionSpec as P

import jdp
from jdp.collectives.shared_memory import shared_segment
from jdp.collectives.shared_memory.all_reduce import (
    SharedMemoryAllReduce,
    create_shared_buffer,
    shared_memory_all_reduce,
)
from jdp.replicas import cores, sealed_memory
from tests import harness, rarely
from tests.collectives import contract

# --- The segment: threads with a store in memory ------------------------------------


def _segments(world):
    processes = range(world.process_count)
    return shared_segment.SharedSegment(
        world, [1 << 12], key="here", processes=processes
    )


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
        assert (
            "Process 2 did not come to the making of a shared segment within 0.5 s"
            in text
        )


def test_more_memory_than_there_is_is_refused_by_all():
    size = psutil.virtual_memory().total + (1 << 20)

    def run(world):
        make = functools.partial(
            shared_segment.SharedSegment, key="here", processes=range(2)
        )
        return harness.error_text(lambda: make(world, [size]))[0]

    for text in harness.run_threads(run, 2):
        assert "process 0 cannot make" in text and os.strerror(errno.ENOSPC) in text
        assert "more memory" in text


def test_memory_of_another_is_refused_by_all(monkeypatch):
    opened = shared_segment._open

    def open_another(size, offer, first):
        other = shared_segment.SegmentOffer(offer.peer, offer.path, b"x" * 16)
        return opened(size, other, first)

    monkeypatch.setattr(shared_segment, "_open", open_another)
    found = harness.run_threads(
        lambda w: harness.error_text(lambda: _segments(w))[0], 2
    )
    for text in found:
        assert "process 1 cannot open the shared memory of process 0" in text


def _foreign(kind, size, folder):
    """Returns a path that a stranger could offer, and what keeps it open."""
    if kind == "path":
        return "/etc/passwd", None
    if kind == "traversal":
        return f"/proc/{os.getpid()}/fd/../../self/mem", None
    if kind == "pipe":
        fd, other = os.pipe()
        return f"/proc/{os.getpid()}/fd/{fd}", (fd, other)
    if kind == "device":
        fd = os.open("/dev/zero", os.O_RDWR)
    elif kind == "file with a name":
        fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT, 0o600)
    elif kind in ("without seals", "open to others", "longer"):
        size += kind == "longer"
        fd = os.memfd_create("strange", os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o666 if kind == "open to others" else 0o600)
        os.ftruncate(fd, size)
        if kind != "without seals":
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return f"/proc/{os.getpid()}/fd/{fd}", (fd,)
    elif kind == "file of another file system":
        fd = os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
    else:
        assert kind == "file without a name"
        fd = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE, 0o600)
    if kind != "device":
        os.ftruncate(fd, size)
    return f"/proc/{os.getpid()}/fd/{fd}", (fd,)


FOREIGN = ["path", "traversal", "pipe", "device", "file with a name"]
FOREIGN += ["file of another file system", "file without a name"]
FOREIGN += ["without seals", "open to others", "longer"]


@pytest.mark.parametrize("kind", FOREIGN)
def test_nothing_but_own_memory_is_mapped(kind, tmp_path):
    if kind == "file of another file system":
        tmp_path = pathlib.Path.home()  # /tmp may be of the same kind as /dev/shm.
    path, held = _foreign(kind, 8192, tmp_path)
    peer = shared_segment.Peer(os.getpid(), "1", cores.UsableCores(()))
    offer = shared_segment.SegmentOffer(peer, path, bytes(16), 8192)
    try:
        mapped, error = shared_segment._open([8192], offer, 0)
    finally:
        for fd in held or ():
            os.close(fd)
    assert mapped is None
    assert "cannot open the shared memory of process 0" in error


def test_the_path_of_another_process_than_the_sender_is_not_opened():
    _, fd, made = sealed_memory.make_memory(8192, label="test")
    no_cores = cores.UsableCores(())
    own = shared_segment.Peer(os.getpid(), "1", no_cores)
    other = shared_segment.Peer(1, "1", no_cores)
    for peer, is_mapped in ((own, True), (other, False)):
        offer = shared_segment.SegmentOffer(peer, *made, 8192)
        mapped, error = shared_segment._open([8192], offer, 0)
        assert (mapped is not None) == (error is None) == is_mapped
    os.close(fd)


def test_nothing_has_a_name():
    before = os.listdir("/dev/shm")

    def run(world):
        segment = _segments(world)
        segment.arrive_and_wait()
        return os.listdir("/dev/shm")

    assert harness.run_threads(run, 2) == [before] * 2


# --- Real processes -----------------------------------------------------------------

# The edge to two stages, parts that do not divide, pieces of the buffer below.
LARGE = (8192, 8193, 100_003, 300_000)


def _cases(num_processes):
    # So many as 8 compile for long.
    kinds = contract.EVERY_KIND if num_processes < 8 else contract.EACH_KIND
    large = [
        contract.Case(op, dtype, size)
        for size in LARGE
        for op, dtype in [("sum", "float32"), ("mean", "bfloat16"), ("max", "int32")]
    ]
    return [*contract.SIZES, *kinds, *large]


def _keep_the_contract():
    jax.config.update("jax_enable_x64", True)
    world = jdp.init()
    buffer = create_shared_buffer(world, 1 << 19)
    n, wrong = world.process_count, []
    reduces = [(SharedMemoryAllReduce(buffer), _cases(n))]
    # The same, but for who makes the buffer.
    reduces.append((shared_memory_all_reduce, contract.A_FEW))
    for reduce, cases in reduces:

        def all_reduce(*xs, reduce=reduce, cases=cases):
            pairs = zip(cases, xs, strict=True)
            return [reduce(x, "data", op=case.op) for case, x in pairs]

        def both_halves(*xs, reduce=reduce, cases=cases):
            found = []
            for case, x in zip(cases, xs, strict=True):
                part = reduce.reduce_scatter(x, "data", op=case.op)
                found.append(reduce.all_gather(part, "data")[: case.size])
            return found

        for fn in (all_reduce, both_halves):
            body = harness.as_body(fn)
            mapped = jax.shard_map(
                body, mesh=world.mesh, in_specs=P("data"), out_specs=P()
            )
            own = [case.values(n)[world.process_index] for case in cases]
            split = [
                jax.make_array_from_process_local_data(world.split, x, (n * x.size,))
                for x in own
            ]
            found = jax.jit(mapped)(*split)
            for case, x in zip(cases, found, strict=True):
                text, _ = harness.error_text(
                    lambda case=case, x=x: contract.check(
                        case, case.values(n), np.asarray(x.addressable_data(0))[None]
                    )
                )
                wrong += [(fn.__name__, case, text)] if text else []
    return wrong


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes", [2, 3, 8])
@pytest.mark.slow
def test_the_contract(num_processes):
    for wrong in harness.run_checked(_keep_the_contract, num_processes):
        assert wrong == []


SIZES = (1 << 20, 0)  # of buckets, in bytes.


def _run_in_two():
    """All that asks for no world of its own; what fails comes last."""
    world = jdp.init(timeout_s=20.0)
    return {
        "freed": _free(world),
        "trained": {
            bucket_bytes: _train(world, bucket_bytes) for bucket_bytes in SIZES
        },
        "weighed": _weigh(world),
        "two programs": _call_two_programs(world, 100),
        "narrow": {dtype: _reduce_narrow(world, dtype) for dtype in NARROW},
        "kept tracers": [_find_kept_tracers(world, fn) for fn in REDUCED],
        "different sizes": _reduce_different_sizes(world),
    }


@pytest.fixture(scope="module")
def in_two():
    return harness.run_checked(_run_in_two, 2)


def _train_in_four():
    return {"trained": {0: _train(jdp.init(), 0)}}


def _train(world, bucket_bytes):
    tx = optax.adam(0.05)
    everything = harness.oracle_batches(8)
    params = harness.oracle_params()
    plan = jdp.plan_buckets(
        params, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes
    )

    @jdp.data_parallel
    def step(carry, batch, weight):
        params, state = carry
        grad_fn = jdp.value_and_grad(
            harness.oracle_loss,
            plan=plan,
            all_reduce=shared_memory_all_reduce,
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


def _check_trained(values, bucket_bytes):
    params, losses = harness.train_alone(
        harness.oracle_params(), harness.oracle_batches(8), optax.adam(0.05)
    )
    for value in values:
        found_losses, found = value["trained"][bucket_bytes]
        np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
        for name, param in params.items():
            # Adam divides by the root of squares: rounding is amplified at first.
            np.testing.assert_allclose(found[name], param, atol=1e-4)


@pytest.mark.multiprocess
@pytest.mark.parametrize("bucket_bytes", SIZES)
def test_two_processes_train_as_one_device_does(in_two, bucket_bytes):
    _check_trained(in_two, bucket_bytes)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_four_processes_train_as_one_device_does():
    _check_trained(harness.run_checked(_train_in_four, 4), 0)


def _weigh(world):

    @jdp.data_parallel(donate_state=False)
    def step(state, grads, weight):
        options = {"all_reduce": shared_memory_all_reduce}
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
def test_a_replica_without_data_does_not_count(in_two):
    expected = [[[1.25]] * 2, [[1.0]] * 2, [[0.0]] * 2]
    assert [found["weighed"] for found in in_two] == [expected] * 2


def _jitted(world, size):
    fn = jax.shard_map(
        harness.as_body(lambda x: shared_memory_all_reduce(x, "data")),
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
@pytest.mark.parametrize("delay_s", rarely.cases([0.01, 0.5], often=(0.01,)))
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


def _wait_without_descriptors():
    world = jdp.init(num_cpu_devices=1)
    run = _jitted(world, 1000)
    run()
    taken = []
    if world.process_index == 0:
        soft = len(os.listdir("/proc/self/fd")) + 20
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(3):
        time.sleep(0.3 * world.process_index)  # process 0 looks whether 1 is alive.
        run()
    if world.process_index == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    text, seconds = harness.error_text(run)
    for fd in taken:
        os.close(fd)
    print(f"SURVIVED {seconds:.1f} s: {text}", flush=True)


@pytest.mark.multiprocess
def test_a_process_without_descriptors_takes_no_living_process_for_dead():
    outcome = harness.run_processes(_wait_without_descriptors, 2, grace_s=5.0)
    survived = outcome.output.replace("\n[0] ", " ").partition("SURVIVED")[2]
    assert survived and float(survived.split()[0]) < 5.0, outcome.output
    assert "Process 1 has ended; the others cannot go on without it." in survived


def _reduce_different_sizes(world):
    run = _jitted(world, 1000 + world.process_index)
    return harness.error_text(run)


@pytest.mark.multiprocess
def test_different_buffers_are_not_summed(in_two):
    for text, seconds in (found["different sizes"] for found in in_two):
        assert "reduces another buffer than process" in text and seconds < 4.0


def _call_two_programs(world, num_rounds):
    """Independent programs, of which each process is slow in another one."""
    rank = world.process_index

    def make(slow_rank, value):
        def reduce(x):
            work = jnp.eye(200) if rank == slow_rank else jnp.eye(2)
            for _ in range(30):
                work = work @ work
            zero = (work.sum() - work.shape[0]).astype(x.dtype)
            return shared_memory_all_reduce(x * value + zero, "data")

        body = harness.as_body(reduce)
        return jax.jit(
            jax.shard_map(body, mesh=world.mesh, in_specs=P("data"), out_specs=P())
        )

    x = jdp.global_batch(world, np.ones(1000, np.float32))
    first, second = make(0, 1.0), make(1, 100.0)
    results = [(first(x), second(x)) for _ in range(num_rounds)]
    return [
        [np.unique(y.addressable_data(0)).tolist() for y in pair] for pair in results
    ]


@pytest.mark.multiprocess
def test_programs_of_one_thread_run_in_the_order_of_their_calls(in_two):
    for found in in_two:
        assert found["two programs"] == [[[2.0], [200.0]]] * 100


# XLA packs all but the last into bytes; numpy gives each number a byte.
NARROW = ("int4", "uint4", "float4_e2m1fn", "float8_e4m3fn")


def _reduce_narrow(world, dtype):
    """Sums, and what goes through both halves, of numbers of few bits."""
    reduce, rank = shared_memory_all_reduce, world.process_index

    def run(x):
        part = reduce.reduce_scatter(x, "data")
        (rows,) = reduce.gather_rows([x], "data")
        found = reduce(x, "data"), reduce.all_gather(part, "data"), rows.reshape(-1)
        return [y.astype(jnp.float32) for y in found]

    mapped = jax.shard_map(
        harness.as_body(run), mesh=world.mesh, in_specs=P("data"), out_specs=P()
    )
    own = (np.arange(5000) % 2 + rank).astype(jnp.dtype(dtype))
    found = jax.jit(mapped)(jdp.global_batch(world, own))
    return [np.asarray(x.addressable_data(0)) for x in found]


@pytest.mark.multiprocess
@pytest.mark.parametrize("dtype", NARROW)
def test_numbers_of_few_bits_are_reduced(in_two, dtype):
    one = np.arange(5000, dtype=np.float32) % 2
    for value in in_two:
        total, of_halves, rows = value["narrow"][dtype]
        np.testing.assert_array_equal(total, 2 * one + 1)
        np.testing.assert_array_equal(of_halves, 2 * one + 1)
        np.testing.assert_array_equal(rows, np.concatenate([one, one + 1]))


def _reduce_with_data(x):
    reducer = SharedMemoryAllReduce()
    return reducer.reduce_group([x], "data", has_data=x[0] > 0)[0]


def _scatter_and_gather(x):
    halves = SharedMemoryAllReduce().halves
    part = halves.reduce_scatter(x, "data")
    return halves.all_gather(part, "data")


def _reduce(x):
    return shared_memory_all_reduce(x, "data")


REDUCED = (_reduce, _reduce_with_data, _scatter_and_gather)


def _find_kept_tracers(world, fn):
    with jax.checking_leaks():
        return harness.error_text(lambda: _traced(world, fn))[0]


@pytest.mark.multiprocess
def test_a_program_keeps_no_tracer(in_two):
    for value in in_two:
        assert value["kept tracers"] == [""] * len(REDUCED)


# --- What is refused ----------------------------------------------------------------


def _traced(world, fn, **options):
    names = world.axis_names
    body = harness.as_body(fn)
    mapped = jax.shard_map(
        body, mesh=world.mesh, in_specs=P(names), out_specs=P(names), check_vma=False
    )
    return jax.make_jaxpr(mapped)(np.ones(8, options.get("dtype", np.float32)))


def test_what_cannot_be_reduced_is_refused():
    world = harness.local_world(1)
    buffer = create_shared_buffer(world, 1 << 10)
    reduce = SharedMemoryAllReduce(buffer)
    with pytest.raises(ValueError, match="`op` must be one of .*, got 'summ'"):
        _traced(world, lambda x: reduce(x, "data", op="summ"))
    with pytest.raises(ValueError, match="`axis_name='dat'` is not bound here"):
        _traced(world, lambda x: reduce(x, "dat"))
    with pytest.raises(ValueError, match="has 2 replicas here, but 1 in the world"):
        _traced(harness.local_world(2), lambda x: reduce(x, "data"))
    with pytest.raises(
        ValueError, match="2 replicas on 1 processes: the shared-memory all-reduce"
    ):
        create_shared_buffer(harness.local_world(2))
    with pytest.raises(ValueError, match="`num_bytes` must be at least 1, got 0"):
        create_shared_buffer(world, 0)


def test_one_replica_returns_what_it_has():
    world = harness.local_world(1)
    buffer = create_shared_buffer(world, 1 << 10)
    reduce = SharedMemoryAllReduce(buffer)
    for op in contract.OPS:
        traced = _traced(world, lambda x, op=op: reduce(x, "data", op=op))
        assert "callback" not in str(traced)


def _free(world):
    before = _mapped_bytes()
    buffer = create_shared_buffer(world, 1 << 26)
    x = np.ones(100, np.float32)
    buffer.reduce_in_place([x], "sum", 0)
    held = _mapped_bytes() - before
    buffer.free()
    left = _mapped_bytes() - before
    text, _ = harness.error_text(lambda: buffer.reduce_in_place([x], "sum", 0))
    return x[0], held, left, text


@pytest.mark.multiprocess
def test_a_buffer_can_be_freed(in_two):
    for value, held, left, text in (found["freed"] for found in in_two):
        assert value == 2.0 and held >= 3 << 26 and left < 1 << 24
        assert "The shared buffer has been freed." in text


def _mapped_bytes():
    with open("/proc/self/smaps_rollup") as file:
        (line,) = [line for line in file if line.startswith("Rss:")]
    return int(line.split()[1]) << 10
