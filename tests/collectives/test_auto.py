"""Fitted links, `choose`, and `all_reduce="auto"`."""

import dataclasses
import functools
import re
import time

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jdp
from jdp import collectives, types
from jdp.collectives import Curve, Links, auto, choose, measurement, pallas, predict
from jdp.collectives.cost_model import num_chunks_here
from jdp.collectives.pallas import Topology
from jdp.collectives.shared_memory import shared_segment
from jdp.replicas import mesh
from tests import harness
from tests.collectives import contract


def _seconds(links, n, sizes, *, psum_s=None):
    """What a mesh with exactly these links would have measured."""
    found = []
    for num_bytes in sizes:
        for name in ("ring", "halving_doubling", "butterfly"):
            chunks = num_chunks_here(name, num_bytes, n)
            total_s = predict(name, num_bytes, n, links, num_chunks=chunks).total_s
            found.append(measurement.Seconds(name, num_bytes, [total_s]))
        if psum_s is not None:
            found.append(measurement.Seconds("psum", num_bytes, [psum_s(num_bytes)]))
    return found


@pytest.mark.parametrize("n", [2, 3, 8])
def test_links_are_found_from_times(n):
    links = Links(2e-5, 3e9, 1.5e-10)
    sizes = [1 << 10, 1 << 15, 1 << 20, 1 << 24]
    found = measurement.make_links(_seconds(links, n, sizes), n)
    assert found.latency_s == pytest.approx(links.latency_s, rel=1e-3)
    for num_bytes in (1 << 12, 1 << 18, 1 << 26):
        for name in ("ring", "halving_doubling", "butterfly"):
            before = predict(name, num_bytes, n, links).total_s
            assert predict(name, num_bytes, n, found).total_s == pytest.approx(before)


def test_without_measurements_the_model_decides():
    links = Links(1e-5, 1e9)
    # Few rounds while latency counts, few bytes while bandwidth does.
    assert choose(1 << 10, 16, links) == "butterfly"
    assert choose(1 << 18, 16, links) == "halving_doubling"
    assert choose(1 << 26, 3, links) == "ring"  # No folding.
    for num_bytes in (1, 1 << 13, 1 << 20, 1 << 30):
        for n in (2, 5, 64, 1000):
            names = ("ring", "halving_doubling", "butterfly")
            best = min(predict(a, num_bytes, n, links).total_s for a in names)
            chosen = choose(num_bytes, n, links)
            assert predict(chosen, num_bytes, n, links).total_s == best


def test_measurements_decide_where_there_are_any():
    curves = (
        Curve("psum", 4, ((1 << 10, 1e-4), (1 << 20, 1e-3))),
        Curve("ring", 4, ((1 << 10, 5e-4), (1 << 20, 0.95e-3))),
        Curve("shared_memory", 4, ((1 << 10, 2e-4), (1 << 20, 0.5e-3))),
    )
    links = Links(1e-5, 1e9, measured=curves)
    assert choose(1 << 10, 4, links) == "psum"
    assert choose(1 << 20, 4, links) == "shared_memory"
    assert choose(1 << 24, 4, links) == "shared_memory"
    assert choose(1, 4, links) == "psum"
    assert choose(1 << 20, 8, links) == choose(1 << 20, 8, Links(1e-5, 1e9))
    # Nobody leaves `psum` for what may be noise.
    assert choose(1 << 20, 4, Links(1e-5, 1e9, measured=curves[:2])) == "psum"


def test_a_curve_is_straight_on_logarithmic_axes():
    curve = Curve("ring", 2, ((1 << 10, 1e-4), (1 << 20, 1e-2)))
    assert curve.at(1) == pytest.approx(1e-4)
    assert curve.at(1 << 15) == pytest.approx(1e-3)
    assert curve.at(1 << 22) == pytest.approx(4e-2)


def test_the_mesh_that_is_here():
    world = harness.local_world(2)
    links = collectives.fit_links(world, sizes=(1 << 10, 1 << 18), rounds=3)
    assert links.latency_s > 0 and links.bandwidth_bytes_per_s > 0
    names = {curve.algorithm for curve in links.measured}
    assert names == {"psum", "ring", "halving_doubling", "butterfly"}
    for curve in links.measured:
        assert [size for size, _ in curve.points] == [1 << 10, 1 << 18]
        assert all(1e-9 <= seconds < 1.0 for _, seconds in curve.points)
    assert choose(1 << 12, 2, links) in names
    alone = collectives.fit_links(harness.local_world(1))
    assert predict("ring", 1 << 30, 1, alone).total_s == 0


@pytest.mark.parametrize("budget_s,sizes", [(0.0, [2048]), (600.0, [1024, 2048])])
def test_beyond_its_time_it_measures_the_first_size_alone(budget_s, sizes):
    links = collectives.fit_links(
        harness.local_world(2),
        {"psum": collectives.psum_all_reduce, "ring": collectives.ring_all_reduce},
        sizes=(2048, 1024),
        rounds=1,
        budget_s=budget_s,
    )
    found = {c.algorithm: [size for size, _ in c.points] for c in links.measured}
    assert found == {"psum": sizes, "ring": sizes}


def test_what_is_timed_is_the_all_reduce():
    def slow(x, axis_name):
        def wait(x):
            time.sleep(0.02)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    found = measurement.time_all_reduces(
        harness.local_world(1),
        {"slow": slow, "no": lambda x, _: x},
        [4 << 20],
        rounds=3,
    )
    by_name = {each.algorithm: each.median for each in found}
    assert 0.018 < by_name["slow"] < 0.2 and by_name["no"] < 0.01
    assert [len(each.rounds) for each in found] == [3, 3]


# --- "auto" -------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch):
    """A world whose links were measured: the ring is fast for large buffers."""
    world = harness.local_world(4)
    curves = (
        Curve("psum", 4, ((1 << 10, 1e-4), (1 << 20, 1e-2))),
        Curve("ring", 4, ((1 << 10, 1e-3), (1 << 20, 2e-3))),
    )
    candidates = {
        "psum": collectives.psum_all_reduce,
        "ring": collectives.ring_all_reduce,
    }
    links = Links(1e-5, 1e9, measured=curves)
    found = auto._Found(world, Topology("cpu"), None, candidates, links)
    monkeypatch.setattr(mesh._CurrentWorld, "world", world)
    monkeypatch.setattr(auto._LastSearch, "found", found)
    return world


def _sync(world, grads, **options):
    run = jax.shard_map(
        harness.as_body(
            lambda g: jdp.sync_gradients(
                jax.tree.map(lambda x: x[0], g), all_reduce="auto", **options
            )
        ),
        mesh=world.mesh,
        in_specs=P(world.axis_names),
        out_specs=P(),
    )
    return run, jax.tree.map(lambda x: np.stack([x] * world.num_replicas), grads)


def test_each_bucket_gets_its_own(world):
    grads = {"a": np.ones(10, np.float32), "b": np.ones(1 << 20, np.float32)}
    plan = jdp.plan_buckets(grads, bucket_bytes=64, first_bucket_bytes=64)
    run, stacked = _sync(world, grads, plan=plan)
    text = str(jax.make_jaxpr(run)(stacked))
    assert "psum" in text and "ppermute" in text
    for k, x in jax.jit(run)(stacked).items():
        np.testing.assert_array_equal(x, grads[k])
    run, stacked = _sync(world, {"a": grads["a"]})
    assert "ppermute" not in str(jax.make_jaxpr(run)(stacked))


@pytest.mark.parametrize("op", contract.OPS)
def test_auto_keeps_the_contract(world, op):
    for size in (37, 1 << 20):
        case = contract.Case(op, "float32", size)
        values = case.values(4)
        run = jax.shard_map(
            lambda x: collectives.auto_all_reduce(x, "data", op=op),
            mesh=world.mesh,
            in_specs=P("data"),
            out_specs=P(),
        )
        contract.check(case, values, np.asarray(jax.jit(run)(values.reshape(-1)))[None])


def test_where_nothing_was_measured_it_is_psum(world):
    def traced(axis_name, size, num_nodes=1):
        names = types.as_axis_names(axis_name)
        other = harness.local_world(size, axis_name, num_nodes=num_nodes)
        run = jax.shard_map(
            lambda x: collectives.auto_all_reduce(x, axis_name),
            mesh=other.mesh,
            in_specs=P(names),
            out_specs=P(),
        )
        return str(jax.make_jaxpr(run)(np.ones(size << 20, np.float32)))

    assert "ppermute" in traced("data", 4)
    assert "ppermute" not in traced("data", 3)
    assert "ppermute" not in traced("batch", 4)
    assert "ppermute" not in traced(("node", "data"), 4, 2)
    fn = jax.vmap(lambda x: collectives.auto_all_reduce(x, "data"), axis_name="data")
    assert "ppermute" not in str(jax.make_jaxpr(fn)(np.ones((4, 1 << 20), np.float32)))


def test_without_a_world_it_is_psum(monkeypatch):
    monkeypatch.setattr(mesh._CurrentWorld, "world", None)
    run, stacked = _sync(harness.local_world(2), {"a": np.ones(3, np.float32)})
    np.testing.assert_array_equal(jax.jit(run)(stacked)["a"], np.ones(3))


def test_describe_measures_nothing(monkeypatch):
    world = harness.local_world(2)
    monkeypatch.setattr(mesh._CurrentWorld, "world", world)
    monkeypatch.setattr(auto._LastSearch, "found", None)
    monkeypatch.setattr(measurement, "candidates", None)  # would be called.

    @jdp.data_parallel
    def step(params, batch):
        grad_fn = jdp.value_and_grad(harness.oracle_loss, all_reduce="auto")
        loss, grads = grad_fn(params, batch)
        return params, loss

    batch = harness.oracle_batches(1)[0]
    found = jdp.describe(step, harness.oracle_params(), batch)
    assert found.synchronizations[0].algorithm == "psum"  # of one process.


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="`all_reduce` must be .*'auto'.*'ring'"):
        jdp.value_and_grad(harness.oracle_loss, all_reduce="ring")
    with pytest.raises(ValueError, match="`packing='tuple'`"):
        jdp.value_and_grad(
            harness.oracle_loss, all_reduce=collectives.ring_all_reduce, packing="tuple"
        )


# --- The custom kernel, on devices taken for GPUs ------------------------------------

NVLINK = Topology("gpu", 1, 9.0, is_fully_connected=True, has_multicast=True)


def _buffer(size, dtype=np.float32):
    return jax.ShapeDtypeStruct((size,), dtype)


def _on_gpus(monkeypatch, kernel_fails=None):
    found = dataclasses.replace(
        auto._LastSearch.found, topology=NVLINK, kernel_fails=kernel_fails
    )
    monkeypatch.setattr(auto._LastSearch, "found", found)


def _choose(world, choose, *args, **options):
    """Chooses where a program of the world's mesh is traced; returns `reduce`."""
    chosen = []

    def run(x):
        chosen.append(choose(*args, "data", **options).reduce)
        return x

    jax.make_jaxpr(
        jax.shard_map(run, mesh=world.mesh, in_specs=P("data"), out_specs=P("data"))
    )(np.ones(4))
    return chosen[0]


@pytest.mark.parametrize(
    ("buffer", "op", "algorithm", "reason"),
    [
        (_buffer(1000), "sum", "one_stage", None),
        (_buffer(1000), "mean", "one_stage", None),
        (_buffer(1 << 18, np.float16), "sum", "two_stage", None),
        (_buffer(1000), "max", None, "it sums, and `op` is 'max'"),
        (_buffer(1000, np.int32), "sum", None, "the buffer is int32"),
        (_buffer(1 << 22), "sum", None, "takes at most 8388608 bytes"),
    ],
)
def test_gpus_take_the_custom_kernel(monkeypatch, world, buffer, op, algorithm, reason):
    _on_gpus(monkeypatch)
    said = []
    all_reduce = collectives.AutoAllReduce(explain=said.append)
    chosen = _choose(world, all_reduce.choose, buffer, op=op)
    if algorithm is not None:
        assert chosen == collectives.PallasAllReduce(algorithm) and not said
    else:
        assert chosen in (jax.lax.psum, collectives.ring_all_reduce)
        (text,) = said
        assert str(buffer) in text and reason in text


def test_thresholds_are_those_of_the_user(monkeypatch, world):
    _on_gpus(monkeypatch)
    limits = pallas.Limits(
        num_replicas=4, one_stage_below=8, multimem_from=100, max_bytes=200
    )
    thresholds = pallas.Thresholds(limits=(limits,), source="here")
    all_reduce = collectives.AutoAllReduce(thresholds)
    for buffer, algorithm in (
        (_buffer(1), "one_stage"),
        (_buffer(24), "two_stage"),
        (_buffer(25), "multimem"),
        (_buffer(50, np.float16), "two_stage"),  # The switch adds float32 alone.
    ):
        expected = collectives.PallasAllReduce(algorithm, thresholds)
        assert _choose(world, all_reduce.choose, buffer) == expected
    assert _choose(world, all_reduce.choose, _buffer(51)) == jax.lax.psum


def test_a_kernel_that_was_tried_in_vain_is_not_taken(monkeypatch, world):
    _on_gpus(monkeypatch, kernel_fails="it does not compile")
    said = []
    all_reduce = collectives.AutoAllReduce(explain=said.append)
    assert _choose(world, all_reduce.choose, _buffer(10)) == jax.lax.psum
    assert "it does not compile" in said[0]


def test_auto_trains_where_the_kernel_cannot_run(monkeypatch, caplog):
    """CPU devices that are taken for GPUs: the kernel is tried, and left alone."""
    world = harness.local_world(2)
    monkeypatch.setattr(mesh._CurrentWorld, "world", world)
    monkeypatch.setattr(auto._LastSearch, "found", None)
    monkeypatch.setattr(auto.gpu_topology, "find_topology", lambda world: NVLINK)
    fit = functools.partial(measurement.fit_links, sizes=(1 << 10,), rounds=1)
    monkeypatch.setattr(measurement, "fit_links", fit)
    said = []
    caplog.set_level("INFO", "jdp")
    all_reduce = collectives.AutoAllReduce(explain=said.append)
    run = jax.shard_map(
        lambda g: jdp.sync_gradients({"a": g[0]}, all_reduce=all_reduce),
        mesh=world.mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(jax.jit(run)(x)["a"], x.mean(0))
    assert "one_stage does not compile here: NotImplementedError" in said[0]
    assert "compiled for cpu" in said[0]
    assert re.search(r"`all_reduce=\"auto\"` takes .* for 32 KiB, ", caplog.text)


def test_a_wrong_sum_is_noticed_when_it_is_tried():
    world = harness.local_world(2)
    good = {"psum": collectives.psum_all_reduce, "ring": collectives.ring_all_reduce}
    assert measurement.find_failure(world, good) is None

    def wrong(x, axis_name):
        return jax.lax.psum(x, axis_name) + (jax.lax.axis_index(axis_name) == 1)

    found = measurement.find_failure(world, good | {"wrong": wrong})
    assert found == "wrong gave a wrong sum when it was tried"


def test_one_that_does_not_come_back_is_named():
    world = dataclasses.replace(harness.local_world(2), timeout_s=0.3)

    def stuck(x, axis_name):
        def wait(x):
            time.sleep(1.5)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(RuntimeError, match="'stuck' did not come back within 0.3 s"):
        measurement.find_failure(world, {"stuck": stuck})


# --- Real processes -----------------------------------------------------------------


def _run_in_two():
    """All that two processes of one host find."""
    world = jdp.init()
    return {
        "alone": _trace_in_process_1(world),
        "picked": _pick_shared_memory(world),
        "trained": _train(world),
        "failure": _fail_in_process_1(world),
        "ends": _end_early_in_process_1(world),
    }


@pytest.fixture(scope="module")
def in_two():
    return harness.run_checked(_run_in_two, 2)


def _train(world, names=None):
    """A step with "auto", and one with each of what it can pick, or of `names`."""
    measurement.fit_links = functools.partial(
        measurement.fit_links, sizes=(1 << 10,), rounds=2
    )
    params = jdp.replicate(world, harness.oracle_params())
    batch = harness.oracle_batches(1)[0]
    mine = jax.tree.map(
        lambda x: np.array_split(x, world.process_count)[world.process_index], batch
    )

    def train(all_reduce):
        @jdp.data_parallel(donate_state=False)
        def step(params, batch):
            grad_fn = jdp.value_and_grad(
                harness.oracle_loss, axis_name=world.axis_name, all_reduce=all_reduce
            )
            loss, grads = grad_fn(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        trained, _ = step(params, mine)
        jdp.check_replicas(trained, world=world)
        return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), trained)

    trained = {"auto": train("auto")}
    found = auto._LastSearch.found
    for name, fn in found.candidates.items():
        if names is None or name in names:
            trained[name] = train(fn)
    return trained, found.links


def _check_trained(found, names):
    expected, _ = harness.train_alone(
        harness.oracle_params(), harness.oracle_batches(1), optax.sgd(0.1)
    )
    for trained, links in found:
        assert set(names) <= set(trained)
        assert links == found[0][1]  # process 0 decides.
        for params in trained.values():
            for k, x in expected.items():
                np.testing.assert_allclose(params[k], x, atol=2e-6)


@pytest.mark.multiprocess
def test_processes_of_one_host_take_shared_memory(in_two):
    found = [each["trained"] for each in in_two]
    _check_trained(found, ["psum", "shared_memory"])
    assert [links for _, links in found] == [None, None]  # nothing is measured.


@pytest.mark.multiprocess
@pytest.mark.slow
def test_nodes_take_shared_memory_within():
    # Two "nodes" whose processes cannot all share memory, as on two hosts.
    found = harness.run_checked(_train_on_separate_nodes, 4)
    _check_trained(found, ["psum", "hierarchical"])
    for _, links in found:
        measured = {curve.algorithm for curve in links.measured}
        assert "hierarchical" in measured and "shared_memory" not in measured


def _train_on_separate_nodes():
    """As on two hosts: a process cannot open the memory of one of the other node."""
    opened = shared_segment._open

    def open_within_node(size, offer, first):
        if jax.process_index() // 2 != first // 2:
            offer = shared_segment.SegmentOffer(offer.peer, "/proc/0/fd/0", offer.token)
        return opened(size, offer, first)

    shared_segment._open = open_within_node
    measurement.fit_links = functools.partial(
        measurement.fit_links, sizes=(1 << 10, 1 << 20), rounds=2
    )
    world = jdp.init(axis_name=("node", "data"), num_nodes=2)
    return _train(world, ["psum", "hierarchical"])


def _trace_in_process_1(world):
    """The first trace of the job, in one process while the other does not trace."""
    picked = _pick_shared_memory(world) if world.process_index == 1 else ""
    jdp.check_replicas(jdp.replicate(world, {"w": 1.0}), world=world)
    return picked


@pytest.mark.multiprocess
def test_a_process_traces_alone(in_two):
    assert "jdp_host_collective" in in_two[1]["alone"]


def _pick_shared_memory(world):
    run, stacked = _sync(world, {"a": np.ones((), np.float32)})
    x = jax.ShapeDtypeStruct((world.num_replicas,), np.float32)
    return str(jax.make_jaxpr(run)({"a": x}))


@pytest.mark.multiprocess
def test_auto_is_shared_memory_on_one_host(in_two):
    for text in (found["picked"] for found in in_two):
        assert "jdp_host_collective" in text
        assert "psum" not in text and "ppermute" not in text


def _end_early_in_process_1(world):
    """Time that is over in one process alone ends the measuring of all."""
    found = measurement.time_all_reduces(
        world,
        {"psum": collectives.psum_all_reduce},
        (2048, 1024),
        rounds=1,
        budget_s=0.0 if world.process_index == 1 else 600.0,
    )
    return [each.num_bytes for each in found]


@pytest.mark.multiprocess
def test_all_processes_end_their_measuring_at_once(in_two):
    assert [found["ends"] for found in in_two] == [[2048], [2048]]


def _fail_in_process_1(world):
    """A kernel that compiles in one process alone must not be run there."""

    def fails_in_1(x, axis_name):
        if world.process_index == 1:
            raise RuntimeError("no compiler here")
        return jax.lax.psum(x, axis_name)

    first = measurement.find_failure(world, {"broken": fails_in_1})
    return first, measurement.find_failure(world, {"psum": jax.lax.psum})


@pytest.mark.multiprocess
def test_all_processes_leave_a_kernel_that_one_cannot_compile(in_two):
    for first, second in (found["failure"] for found in in_two):
        assert first == "broken does not compile here: RuntimeError: no compiler here"
        assert second is None
