"""The all-reduce of CPU processes of any hosts, over TCP."""

import functools
import os
import random
import signal
import socket
import threading
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdp
from jdp.collectives import open_tcp_links, tcp_all_reduce
from jdp.collectives.host import algorithms, links, members
from jdp.collectives.host.placed_links import PlacedLinks
from jdp.collectives.host.strip import Packed, Strip
from jdp.collectives.host.tcp_links import TcpLinks
from jdp.collectives.shared_memory.shared_buffer import SharedBuffer
from tests import harness, two_hosts
from tests.collectives import contract

# --- Threads with a store in memory, and real sockets --------------------------------


def _links(world, **options):
    return TcpLinks(world, range(world.process_count), key="here", **options)


def _wrong(medium, rank, cases, n):
    """The cases of the contract that reductions in place break."""
    wrong = []
    for case in cases:
        values = case.values(n)
        own = values[rank].copy()
        medium.reduce_in_place([own], case.op, 7)
        text, _ = harness.error_text(
            lambda case=case, values=values, own=own: contract.check(
                case, values, own[None]
            )
        )
        wrong += [(case, text)] if text else []
    return wrong


SIZES = (1, 2, 15, 16, 17, 37, 1000, 8193)
CASES = [
    *(case for case in contract.EVERY_KIND),
    *(contract.Case("sum", "float32", size) for size in SIZES),
    *(contract.Case("mean", "bfloat16", size) for size in SIZES),
]


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8])
def test_every_op_dtype_and_size(n, algorithm, monkeypatch):
    is_ring = algorithm == "ring"
    monkeypatch.setattr(algorithms, "PIECE_BYTES", 512)  # Several are under way.
    monkeypatch.setattr(algorithms, "_MOST_HALVED_BYTES", 0 if is_ring else 1 << 30)

    def run(world):
        return _wrong(_links(world), world.process_index, CASES, n)

    with jax.enable_x64(True):
        assert harness.run_threads(run, n, timeout_s=20.0) == [[]] * n


def test_the_algorithm_is_chosen_by_size_and_place(monkeypatch):
    taken = []
    for name in ("go_round", "halve_and_double"):
        inner = getattr(algorithms, name)

        def note(*arguments, name=name, inner=inner):
            taken.append(name)
            inner(*arguments)

        monkeypatch.setattr(algorithms, name, note)

    def run(world):
        medium = _links(world)
        for size in (1000, 200_000):
            medium.reduce_in_place([np.ones(size, np.float32)], "sum", size)

    for n, small in ((2, "go_round"), (3, "halve_and_double")):
        taken.clear()
        harness.run_threads(run, n)
        assert sorted(taken) == sorted([small] * n + ["go_round"] * n)


def test_several_arrays_are_reduced_in_place_at_once():
    sizes = (3, 20_000, 0, 5, 70_001, 1)

    def run(world):
        arrays = [np.full(n, i + world.process_index, np.float32) for i, n in sizes_of]
        _links(world).reduce_in_place(arrays, "mean", 1)
        return [np.unique(x).tolist() for x in arrays]

    sizes_of = list(enumerate(sizes))
    expected = [[] if n == 0 else [i + 1.0] for i, n in sizes_of]
    assert harness.run_threads(run, 3) == [expected] * 3


def test_the_halves_and_a_broadcast():
    n = 4

    def run(world):
        medium, rank = _links(world), world.process_index
        rows = [np.arange(n * k, dtype=np.float32).reshape(n, k) + rank for k in (5, 1)]
        outs = [np.empty(k, np.float32) for k in (5, 1)]
        medium.reduce_scatter(rows, "sum", 1, outs)
        for row, out in zip(rows, outs, strict=True):
            np.testing.assert_array_equal(out, n * (row[rank] - rank) + 6)
        parts = [np.full(k, rank, np.int32) for k in (3, 70_000)]
        gathered = [np.empty((n, k), np.int32) for k in (3, 70_000)]
        medium.all_gather(parts, 2, gathered)
        for root in range(n):
            x = np.arange(200_000, dtype=np.float32) * (rank == root) + (rank != root)
            medium.broadcast(x, root, 3)
            np.testing.assert_array_equal(x, np.arange(200_000))
        return [np.unique(x, axis=1).ravel().tolist() for x in gathered]

    assert harness.run_threads(run, n) == [[[0, 1, 2, 3]] * 2] * n


def _placed(world, num_local):
    first = world.process_index // num_local * num_local
    within = SharedBuffer(
        world, range(first, first + num_local), 1 << 16, key=f"within/{first}"
    )
    return PlacedLinks(_links(world), within, num_local)


@pytest.mark.parametrize(("num_hosts", "num_local"), [(2, 2), (3, 2), (2, 3)])
def test_shared_memory_within_hosts_and_tcp_among_them(num_hosts, num_local):
    n = num_hosts * num_local
    cases = [
        *CASES,
        contract.Case("sum", "float32", 300_001),
        contract.Case("mean", "bfloat16", 40_003),
        contract.Case("mean", "int32", 40_003),
    ]

    def run(world):
        medium = _placed(world, num_local)
        small = [np.full(k, world.process_index, np.float32) for k in (5000, 3)]
        medium.reduce_in_place(small, "sum", 1)
        assert [np.unique(x).tolist() for x in small] == [[n * (n - 1) / 2]] * 2
        return _wrong(medium, world.process_index, cases, n)

    with jax.enable_x64(True):
        assert harness.run_threads(run, n, timeout_s=20.0) == [[]] * n


def test_sums_have_the_same_bits_on_all_processes():
    n = 5

    def run(world):
        rng = np.random.default_rng(world.process_index)
        medium, found = _links(world), []
        for size in (100, 100_000):
            x = rng.standard_normal(size).astype(np.float32)
            medium.reduce_in_place([x], "sum", size)
            found.append(x.tobytes())
        return found

    first, *others = harness.run_threads(run, n)
    assert others == [first] * (n - 1)


def test_processes_that_pause_at_random_are_waited_for():
    n = 4

    def run(world):
        rng, medium = random.Random(world.process_index), _links(world)
        for k in range(60):
            time.sleep(rng.expovariate(1e3))
            x = np.full(1 + 977 * k, 1.0)
            medium.reduce_in_place([x], "sum", k)
            assert (x == n).all()
        return "done"

    assert harness.run_threads(run, n, timeout_s=20.0) == ["done"] * n


# --- What goes wrong -----------------------------------------------------------------


def test_other_buffers_are_not_summed():
    def run(world):
        medium = _links(world)
        x = np.ones(10, np.float32)
        texts = []
        for call in (3 + world.process_index, 5):
            reduce = functools.partial(medium.reduce_in_place, [x], "sum", call)
            texts.append(harness.error_text(reduce)[0])
        return texts

    for texts in harness.run_threads(run, 2):
        assert any(part in texts[0] for part in ("reduces another buffer", "broke in"))
        assert texts[1] == texts[0]  # It is over once and for all.
    all_texts = "".join(text for texts in harness.run_threads(run, 2) for text in texts)
    assert "reduces another buffer than process" in all_texts


def test_a_silent_process_is_named():
    release = threading.Event()

    def run(world):
        medium = _links(world)
        if world.process_index == 1:
            release.wait(10.0)
            return "", 0.0
        x = np.ones(300_000, np.float32)
        found = harness.error_text(lambda: medium.reduce_in_place([x], "sum", 1))
        release.set()
        return found

    (text, seconds), _ = harness.run_threads(run, 2, timeout_s=1.0)
    assert "Process 1 sent nothing in a TCP all-reduce for 1 s" in text
    assert 0.9 < seconds < 3.0


def test_who_hangs_up_is_named_at_once_and_by_all():
    def run(world):
        medium = _links(world)
        if world.process_index == 2:
            medium.close()
            return "", 0.0
        x = np.ones(300_000, np.float32)
        return harness.error_text(lambda: medium.reduce_in_place([x], "sum", 1))

    for text, seconds in harness.run_threads(run, 3, timeout_s=20.0)[:2]:
        assert "The link to process" in text and "broke in a TCP all-reduce" in text
        assert seconds < 3.0


def test_closing_ends_a_reduction_under_way():
    def run(world):
        medium = _links(world)
        x = np.ones(10, np.float32)
        if world.process_index == 1:
            time.sleep(2.0)
            return "", 0.0
        threading.Timer(0.3, medium.close).start()
        return harness.error_text(lambda: medium.reduce_in_place([x], "sum", 1))

    (text, seconds), _ = harness.run_threads(run, 2, timeout_s=20.0)
    assert "The TCP links have been closed." in text
    assert seconds < 1.5


def test_a_process_that_does_not_come_is_named_by_all():
    def run(world):
        if world.process_index == 2:
            return "elsewhere"
        return harness.error_text(lambda: _links(world))[0]

    for text in harness.run_threads(run, 3, timeout_s=0.5)[:2]:
        assert "Process 2 did not come to the opening of links within 0.5 s" in text


def test_strangers_are_hung_up_on(monkeypatch):
    ports, listen = [], links._listen

    def listen_and_tell(host):
        listener, place = listen(host)
        ports.append(place.port)
        return listener, place

    monkeypatch.setattr(links, "_listen", listen_and_tell)
    monkeypatch.setattr(links, "_HANDSHAKE_S", 1.0)
    rng = np.random.default_rng(0)
    greeting = links._GREETING.pack(links._MAGIC, 1, bytes(32))
    openings = [b"", greeting, greeting + bytes(32), greeting[:20], rng.bytes(200)]
    held = []

    def disturb():
        while not stop.is_set():
            for port in list(ports):
                for opening in openings:
                    try:
                        stranger = socket.create_connection(("127.0.0.1", port), 1.0)
                        stranger.sendall(opening)
                        held.append(stranger)
                    except OSError:
                        pass
            time.sleep(0.02)

    def run(world):
        time.sleep(0.3 * world.process_index)
        medium = _links(world)
        x = np.full(1000, world.process_index, np.float32)
        medium.reduce_in_place([x], "sum", 1)
        return x[0]

    stop = threading.Event()
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        assert harness.run_threads(run, 3, timeout_s=20.0) == [3.0] * 3
    finally:
        stop.set()
        thread.join()
        for stranger in held:
            stranger.close()
    assert len(held) > 3


def test_another_key_is_refused():
    def run(world):
        store = world.store
        if world.process_index == 1:
            store.derive_secret = lambda context: bytes(32)
        return harness.error_text(lambda: _links(world))[0]

    for text in harness.run_threads(run, 2, timeout_s=2.0):
        assert "In the opening of links, process 1 was not linked: at " in text
        assert "answers another program than rank 0 of this job" in text


def test_no_descriptor_is_left(monkeypatch):
    def run(world):
        medium = _links(world)
        medium.reduce_in_place([np.ones(5, np.float32)], "sum", 1)
        medium.close()

    harness.run_threads(run, 2)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        harness.run_threads(run, 3)
    assert len(os.listdir("/proc/self/fd")) <= before


# --- Strips --------------------------------------------------------------------------


def test_ranges_of_a_strip_are_views_of_its_arrays():
    arrays = [np.arange(n) + 100 * i for i, n in enumerate((3, 0, 4, 1))]
    whole, strip = np.concatenate(arrays), Strip(arrays)
    for start in range(9):
        for stop in range(start, 9):
            views = strip.views(start, stop)
            found = np.concatenate([*views, whole[:0]])
            np.testing.assert_array_equal(found, whole[start:stop])
            assert all(any(v.base is x for x in arrays) for v in views)


@pytest.mark.parametrize("size", [1, 15, 16, 100, 1000, 12_345])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_of_a_strip_are_nearly_equal(size, count):
    parts = Strip([np.zeros(size)]).cut(count)
    assert [parts[0][0], parts[-1][1]] == [0, size]
    assert all(a[1] == b[0] for a, b in zip(parts, parts[1:], strict=False))
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) <= 32


def test_small_arrays_are_packed_and_unpacked():
    arrays = [np.full(n, i) for i, n in enumerate((2, 100_000, 3))]
    packed = Packed(arrays)
    assert [x.size for x in packed.arrays] == [100_000, 5]
    for x in packed.arrays:
        x += 1
    packed.unpack()
    assert [np.unique(x).tolist() for x in arrays] == [[1], [2], [3]]


# --- Real processes ------------------------------------------------------------------


def _train(world, all_reduce, **options):
    tx = optax.adam(0.05)
    plan = jdp.plan_buckets(harness.oracle_params(), bucket_bytes=200)

    @jdp.data_parallel
    def step(carry, batch, weight):
        params, state = carry
        loss, grads = jdp.value_and_grad(
            harness.oracle_loss,
            plan=plan,
            all_reduce=all_reduce,
            weight=weight.sum(),
            **options,
        )(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), {"loss": loss}

    params = harness.oracle_params()
    carry = jdp.replicate(world, (params, tx.init(params)))
    for batch in harness.oracle_batches(8):
        cut = functools.partial(np.array_split, indices_or_sections=world.process_count)
        mine = jax.tree.map(lambda x, cut=cut: cut(x)[world.process_index], batch)
        carry, _ = step(carry, mine, np.ones(len(mine["x"]), np.float32))
    jdp.check_replicas(carry, world=world)
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), carry[0])


def _keep_the_contract(world):
    jax.config.update("jax_enable_x64", True)
    n, wrong = world.num_replicas, []
    local, first = world.num_local_replicas, world.process_index
    cases = [*contract.SIZES, *contract.EACH_KIND]

    def all_reduce(*xs):
        pairs = zip(cases, xs, strict=True)
        return [tcp_all_reduce(x, "data", op=case.op) for case, x in pairs]

    body = harness.as_body(all_reduce)
    mapped = jax.shard_map(body, mesh=world.mesh, in_specs=P("data"), out_specs=P())
    own = [
        np.concatenate(case.values(n)[first * local : (first + 1) * local])
        for case in cases
    ]
    split = [
        jax.make_array_from_process_local_data(world.split, x, (n // local * x.size,))
        for x in own
    ]
    for case, x in zip(cases, jax.jit(mapped)(*split), strict=True):
        text, _ = harness.error_text(
            lambda case=case, x=x: contract.check(
                case, case.values(n), np.asarray(x.addressable_data(0))[None]
            )
        )
        wrong += [(case, text)] if text else []
    jax.config.update("jax_enable_x64", False)
    return wrong


def _run_everything(num_devices):
    world = jdp.init(num_cpu_devices=num_devices, timeout_s=20.0)
    hook = jdp.hooks.cast(jnp.bfloat16)
    return {
        "wrong": _keep_the_contract(world),
        "trained": _train(world, tcp_all_reduce),
        "hook": _train(world, tcp_all_reduce, hook=hook),
        "hook by psum": _train(world, jax.lax.psum, hook=hook),
        "own links": _train(world, jdp.collectives.TcpAllReduce(open_tcp_links(world))),
    }


@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_processes", "num_devices"), [(2, 1), (4, 1), (2, 2)])
def test_processes_train_as_one_device_does(num_processes, num_devices):
    expected, _ = harness.train_alone(
        harness.oracle_params(), harness.oracle_batches(8), optax.adam(0.05)
    )
    for found in harness.run_checked(_run_everything, num_processes, num_devices):
        assert found["wrong"] == []
        for name, x in expected.items():
            # Adam divides by the root of squares: rounding is amplified at first.
            np.testing.assert_allclose(found["trained"][name], x, atol=1e-4)
            np.testing.assert_array_equal(
                found["own links"][name], found["trained"][name]
            )
            np.testing.assert_allclose(
                found["hook"][name], found["hook by psum"][name], atol=1e-2
            )


def _lose_a_peer():
    world = jdp.init(timeout_s=20.0)
    fn = jax.shard_map(
        harness.as_body(lambda x: tcp_all_reduce(x, "data")),
        mesh=world.mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    batch = jdp.global_batch(world, np.ones(100_000, np.float32))
    jitted = jax.jit(fn)

    def run():
        jax.block_until_ready(jitted(batch))

    run()
    if world.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    text, seconds = harness.error_text(lambda: [run() for _ in range(10**6)])
    again, _ = harness.error_text(run)
    print(f"SURVIVED {seconds:.1f} s: {text} AGAIN {again}", flush=True)


@pytest.mark.multiprocess
def test_a_survivor_raises_at_once_and_names_the_dead():
    outcome = harness.run_processes(_lose_a_peer, 2, grace_s=5.0)
    survived = outcome.output.replace("\n[0] ", " ").partition("SURVIVED")[2]
    assert survived and float(survived.split()[0]) < 5.0, outcome.output
    for part in survived.split("AGAIN"):
        assert "The link to process 1 broke in a TCP all-reduce" in part


@pytest.mark.slow
def test_two_hosts_of_two_processes_reduce_and_choose_it_by_themselves():
    if why := two_hosts.why_not():
        pytest.skip(why)
    with two_hosts.make("debian") as hosts:
        arguments = ["-n", "2", "-m", "tests.collectives.tcp_program"]
        environ = {"JDP_JOB_KEY": "cd" * 32, "JAX_PLATFORMS": "cpu"}
        outcomes = hosts.launch(arguments, environ=environ, timeout_s=200.0)
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.output
        assert outcome.output.count("TCP RIGHT placed") == 2, outcome.output
    assert '`all_reduce="auto"` takes' in outcomes[0].output
    assert "tcp_all_reduce for" in outcomes[0].output


def test_ranks_follow_the_mesh_where_processes_alternate_between_hosts():
    devices = [types.SimpleNamespace(process_index=i, platform="cpu") for i in range(4)]
    order = [devices[i] for i in (0, 2, 1, 3)]
    for names, expected in ((("data",), (0, 2, 1, 3)), (("node", "data"), (1, 3))):
        grid = np.array(order, object).reshape((2, 2) if len(names) == 2 else 4)
        world: Any = types.SimpleNamespace(
            local_devices=[devices[1]],
            is_plain=True,
            axis_names=names,
            mesh=types.SimpleNamespace(devices=grid),
            process_count=4,
            num_replicas=4,
            process_index=1,
        )
        found = members.find_processes(world, names[-1], "TCP all-reduce")
        assert found == expected


def test_links_of_one_process_are_none():
    world = harness.local_world(1)
    medium = open_tcp_links(world)
    x = np.full(5, 2.0, np.float32)
    medium.reduce_in_place([x], "mean", 1)
    assert x.tolist() == [2.0] * 5
    medium.close()
