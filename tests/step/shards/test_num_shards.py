"""Shards: the same bits on any number of replicas, and what is refused."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import strategies
from jax import lax

import jdp
from jdp import flax_nnx
from jdp.replicas import virtual_replicas
from tests import harness
from tests.step.shards import training
from tests.step.shards.training import KINDS, NUM_SHARDS

STEPS = range(3)
QUICK = ("clipped adamw", "dropout", "zero1", "batch norm in a scan")


def _train(name, n, steps=STEPS, state=None):
    world = training.world_of(harness.local_world(n))
    options = harness.fast_options()
    return training.run(KINDS[name], world, steps, state, compiler_options=options)


@functools.cache
def _on_one(name):
    return _train(name, 1)[1]


@pytest.mark.parametrize("name", QUICK)
def test_two_devices_have_the_bits_of_one(name):
    assert _train(name, 2)[1] == _on_one(name)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("name", KINDS)
def test_devices_have_the_bits_of_one(name, n):
    assert _train(name, n)[1] == _on_one(name)


def _in_process(names, num_shards):
    world = jdp.init(num_shards=num_shards)
    return {name: training.run(KINDS[name], world, STEPS)[1] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (4, 1), (2, 2)])
def test_processes_have_the_bits_of_one(processes, devices):
    names = ["clipped adamw", "uneven", "everything"]
    found = harness.run_checked(
        _in_process, processes, names, NUM_SHARDS, devices_per_process=devices
    )
    # The machine code of tests in processes is another one.
    (alone,) = harness.run_checked(_in_process, 1, names, NUM_SHARDS)
    assert found == [alone] * processes


def _extremes_in_process(size):
    world = jdp.init(num_shards=4)

    @jdp.data_parallel(world=world)
    def step(state, x):
        return state, jdp.PerReplica([lax.pmax(x[0], "data"), lax.pmin(x[0], "data")])

    values = np.array([0.0, -0.0, 1e-39, -1e-39, np.nan, -np.nan, np.inf], np.float32)
    x = np.random.default_rng(0).choice(values, (4, size))
    part = np.split(x, world.process_count)[world.process_index]
    rows = step(0.0, part)[1].value
    return [np.asarray(x.addressable_shards[0].data)[0].tobytes() for x in rows]


def test_processes_have_the_extremes_of_one_in_large_arrays():
    found = harness.run_checked(_extremes_in_process, 2, 1 << 18)
    (alone,) = harness.run_checked(_extremes_in_process, 1, 1 << 18)
    assert found == [alone] * 2


def _sums_in_process(size):
    world = jdp.init(num_shards=4)

    @jdp.data_parallel(world=world)
    def step(state, x):
        return state, {"raw": lax.psum(x[0], "data"), "mean": jdp.average(x[0])}

    rng = np.random.default_rng(0)
    values = np.array([2e-38, -1.9e-38, 1e-39, -1e-39, 3e-39, 0.0, -0.0], np.float32)
    x = rng.choice(values, (4, size))
    part = np.split(x, world.process_count)[world.process_index]
    found = step(0.0, part)[1]
    return {k: np.asarray(v.addressable_shards[0].data) for k, v in found.items()}


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_have_the_sums_of_one_near_the_smallest_numbers(processes):
    found = harness.run_checked(_sums_in_process, processes, 1 << 17)
    (alone,) = harness.run_checked(_sums_in_process, 1, 1 << 17)
    for name, expected in alone.items():
        assert np.count_nonzero(expected)
        for each in found:
            np.testing.assert_array_equal(each[name], expected)


@pytest.mark.parametrize(("num_shards", "n"), [(6, 2), (6, 3), (10, 2)])
def test_shards_that_are_no_power_of_two_have_the_same_bits(num_shards, n):
    """With ten, one of two replicas has more terms of the tree than the other."""

    def run(n):
        world = training.world_of(harness.local_world(n), num_shards)

        @jdp.data_parallel(world=world)
        def step(w, x):
            loss, grad = jdp.value_and_grad(lambda w, x: jnp.tanh(x @ w).mean())(w, x)
            return w - grad, {"loss": loss, "norm": jnp.sqrt((grad**2).sum())}

        w, metrics = step(np.linspace(-1, 1, 5, dtype=np.float32), X)
        return np.asarray(w).tobytes(), [float(x) for x in metrics.values()]

    X = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
    assert run(n) == run(1)


@functools.cache
def _trained(num_shards, n, bucket_bytes):
    """Parameters after two steps, with buckets of some size."""
    world = training.world_of(harness.local_world(n), num_shards)
    params = {"a": np.ones((7, 5)), "b": np.linspace(0, 1, 5), "c": np.full(5, 0.3)}
    params = jax.tree.map(np.float32, params)
    plan = jdp.plan_buckets(params, bucket_bytes=bucket_bytes, first_bucket_bytes=20)

    def loss_fn(params, x):
        h = jnp.tanh(x @ params["a"] + params["b"])
        return (jnp.sin(h) * params["c"]).mean()

    @jdp.data_parallel(world=world, compiler_options=harness.fast_options())
    def step(params, x):
        loss, grads = jdp.value_and_grad(loss_fn, plan=plan)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), loss

    for seed in range(2):
        x = np.random.default_rng(seed).normal(size=(24, 7)).astype(np.float32)
        params, _ = step(params, x)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(params)]


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=15)
@hypothesis.given(
    strategies.sampled_from([2, 4, 6, 8, 12]),
    strategies.sampled_from([1, 2, 3, 4, 6, 8]),
    strategies.sampled_from([20, 100, 10_000]),
)
def test_neither_replicas_nor_buckets_change_bits(num_shards, n, bucket_bytes):
    hypothesis.assume(num_shards % n == 0)
    found = _trained(num_shards, n, bucket_bytes)
    assert found == _trained(num_shards, 1, 10_000)


@pytest.mark.parametrize(
    "name", ["zero1", pytest.param("everything", marks=pytest.mark.slow)]
)
def test_a_state_of_four_replicas_goes_on_on_two(name):
    undisturbed, _ = _train(name, 2, range(4))
    saved = jax.tree.map(np.asarray, _train(name, 4, range(2))[0])
    state, _ = _train(name, 2, range(2, 4), saved)
    for a, b in zip(*map(jax.tree.leaves, (state, undisturbed)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_shards_train_as_one_device_with_the_whole_batch():
    kind = KINDS["batch norm"]
    state, _ = _train("batch norm", 2)
    plain, _ = training.run(kind, harness.local_world(1), STEPS)
    for a, b in zip(*map(jax.tree.leaves, (state[0], plain[0])), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def _train_module(n):
    """Trains an nnx model with dropout and batch norm; returns its bits."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = flax_nnx.SyncBatchNorm(5, rngs=rngs)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)
            self.dense = nnx.Linear(5, 1, rngs=rngs)

        def __call__(self, x):
            return self.dense(self.dropout(self.norm(x)))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    @flax_nnx.data_parallel(
        world=harness.local_world(n),
        num_shards=4,
        compiler_options=harness.fast_options(),
    )
    def step(model, optimizer, x):
        def loss_fn(model):
            return ((model(x) - x[:, :1]) ** 2).mean()

        loss, grads = flax_nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    for seed in range(2):
        x = np.random.default_rng(seed).normal(size=(16, 5)).astype(np.float32)
        loss = step(model, optimizer, x)
    leaves = jax.tree.leaves(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    return [np.asarray(x).tobytes() for x in (*leaves, loss)]


def test_modules_of_nnx_have_the_bits_of_one_device():
    assert _train_module(2) == _train_module(1)


# --- Parts of a step -----------------------------------------------------------------


def _gather_all(x):
    ranks = jdp.shard_key(jax.random.key(0))
    rows = lax.all_gather(x, "data")
    swapped = lax.all_to_all(rows * x, "data", 0, 0)
    moved = lax.ppermute(x, "data", [(i, (i + 3) % 8) for i in range(7)])
    grouped = lax.psum(x, "data", axis_index_groups=[[0, 2, 5, 7], [1, 3, 4, 6]])
    part = lax.psum_scatter(rows, "data")
    tiled = lax.psum_scatter(rows.reshape(-1), "data", tiled=True)
    draw = jax.random.normal(ranks, x.shape)
    return {
        "all_gather": rows,
        "all_gather tiled": lax.all_gather(x, "data", tiled=True),
        "all_to_all": swapped,
        "all_to_all tiled": lax.all_to_all(rows, "data", 0, 1, tiled=True),
        "ppermute": moved,
        "groups": grouped,
        "psum_scatter": part,
        "psum_scatter tiled": tiled,
        "max": lax.pmax(x, "data") - lax.pmin(x, "data"),
        "draw": draw,
        "half": lax.psum(x.astype(jnp.bfloat16), "data"),
        "integer": lax.psum((10 * x).astype(jnp.int32), "data"),
        "number": lax.psum(1, "data") + 0 * x,
    }


def test_every_collective_of_jax_has_the_values_of_as_many_replicas():
    """The oracle is `lax` on eight devices, one shard on each."""
    x = np.random.default_rng(1).normal(size=(16,)).astype(np.float32)

    def run(n, num_shards):
        world = harness.local_world(n)

        @jdp.data_parallel(world=world, num_shards=num_shards)
        def step(state, x):
            return state, jdp.PerReplica(_gather_all(x))

        return step(np.zeros(2), x)[1].value

    oracle = run(8, None)
    for n in (1, 4):
        found = run(n, 8)
        for name, value in oracle.items():
            np.testing.assert_allclose(
                np.asarray(found[name], np.float32),
                np.asarray(value, np.float32),
                rtol=1e-2 if name == "half" else 1e-6,
                err_msg=f"{name} on {n}",
            )


def test_a_loop_reads_the_number_of_a_shard():
    """A draw in a loop takes this shard's part of the draw for the whole batch."""

    def layer(x, key):
        return x * jax.random.bernoulli(key, 0.7, x.shape), None

    def run(n, num_shards):
        @jdp.data_parallel(
            world=harness.local_world(n),
            num_shards=num_shards,
            replicated_argnames="key",
        )
        def step(state, x, key):
            x, _ = lax.scan(layer, x, jax.random.split(key, 3))
            return state, jdp.PerReplica(x)

        x = np.arange(1, 17, dtype=np.float32)
        return np.asarray(step(0.0, x, key=jax.random.key(2))[1].value).reshape(-1)

    whole = run(1, None)
    np.testing.assert_array_equal(run(1, 8), whole)
    np.testing.assert_array_equal(run(4, 8), whole)


def _both_kinds(state, x):
    """Equations of which some results differ between shards and others do not."""
    double, moved = jax.jit(lambda s, x: (2 * s, x + s))(state["double"], x)
    (count, total), _ = lax.scan(
        lambda c, r: ((c[0] + 1, c[1] + r), None), (state["count"], x.sum()), x[:2]
    )
    branch, chosen = lax.cond(
        state["count"] > 2, lambda b, x: (b + 1, 2 * x), lambda b, x: (b - 1, x), 0.0, x
    )
    new = {"double": double, "count": count}
    return new, {"mean": jdp.average(moved.sum() + total + chosen.sum()), "b": branch}


@pytest.mark.parametrize("n", [1, 2])
def test_an_equation_makes_values_of_each_shard_and_values_of_all(n):
    def run(world, **options):
        step = jdp.data_parallel(_both_kinds, world=world, **options)
        state, metrics = {"double": np.float32(1), "count": np.int32(0)}, None
        for _ in range(3):
            state, metrics = step(state, np.arange(8, dtype=np.float32))
        return jax.tree.map(float, (state, metrics))

    found = run(harness.local_world(n), num_shards=4)
    assert found == run(harness.local_world(4))


@pytest.mark.parametrize("n", [1, 2])
def test_booleans_are_reduced_and_gathered(n):
    @jdp.data_parallel(world=harness.local_world(n), num_shards=4)
    def step(state, x):
        first = x[0] > 0
        found = {
            "any": lax.pmax(first, "data"),
            "all": lax.pmin(first, "data"),
            "rows": lax.all_gather(first, "data"),
        }
        return state, jdp.PerReplica(found)

    found = step(0.0, np.array([0, 1, 1, 0], np.float32))[1].value
    assert found["any"].dtype == found["rows"].dtype == jnp.bool_
    assert np.all(found["any"]) and not np.any(found["all"])
    np.testing.assert_array_equal(found["rows"], [[False, True, True, False]] * 4)


def test_a_state_of_each_shard_has_one_row_per_shard():
    world = training.world_of(harness.local_world(2), 4)
    state = jdp.copy_per_replica(np.zeros(3, np.float32), world=world)

    @jdp.data_parallel(world=world)
    def step(state, x):
        return jdp.PerReplica(state.value + x.sum()), {}

    for _ in range(2):
        state, _ = step(state, np.arange(8, dtype=np.float32))
    np.testing.assert_array_equal(state.value, [[2] * 3, [10] * 3, [18] * 3, [26] * 3])


def test_a_donated_state_is_gone_and_a_kept_one_is_not():
    for donates in (False, True):
        world = harness.local_world(2)
        step = jdp.data_parallel(
            lambda s, x: (s + jdp.average(x.mean()), {}),
            world=world,
            num_shards=2,
            donate_state=donates,
        )
        first = jdp.replicate(world, np.ones(1000, np.float32))
        step(first, np.ones(4, np.float32))
        if donates:
            with pytest.raises(RuntimeError, match="donated to an earlier call"):
                step(first, np.ones(4, np.float32))
        else:
            np.testing.assert_array_equal(first, np.ones(1000))


def test_results_that_nothing_computes_are_returned():
    @jdp.data_parallel(world=harness.local_world(2), num_shards=4)
    def step(state, x):
        return state, {"constant": 3.0, "count": x.shape[0], "first": state["a"]}

    state = {"a": np.float32(1), "b": np.arange(3)}
    for _ in range(2):
        state, metrics = step(state, np.zeros((8, 2), np.float32))
    assert jax.tree.map(float, metrics) == {"constant": 3, "count": 2, "first": 1}
    np.testing.assert_array_equal(state["b"], np.arange(3))


def test_prints_of_every_shard_come_also_where_nothing_is_read(capfd):
    @jdp.data_parallel(world=harness.local_world(2), num_shards=4)
    def step(state, x):
        jax.debug.print("sum {}", x.sum())
        return state, {}

    step(0.0, np.repeat(np.arange(4.0, dtype=np.float32), 2))
    jax.effects_barrier()
    found = sorted(capfd.readouterr().out.split("sum ")[1:])
    assert [float(x) for x in found] == [0, 2, 4, 6]


def test_literals_and_captured_arrays_are_on_every_device():
    captured = jdp.replicate(harness.local_world(2), np.arange(3, dtype=np.float32))

    @jdp.data_parallel(world=harness.local_world(2), num_shards=4)
    def step(state, x):
        return {"a": jnp.float32(4), "b": captured + jdp.average(x.sum())}, {}

    state = {"a": np.float32(1), "b": np.zeros(3, np.float32)}
    for _ in range(2):
        state, _ = step(state, np.zeros(4, np.float32))
    assert float(state["a"]) == 4 and len(state["a"].sharding.device_set) == 2
    np.testing.assert_array_equal(state["b"], np.arange(3))


def test_other_shapes_are_traced_again():
    @jdp.data_parallel(world=harness.local_world(2), num_shards=4)
    def step(state, x):
        return state, x.sum()

    for size in (4, 8, 4):
        _, total = step(0.0, np.ones(size, np.float32))
        assert float(total) == size / 4


def test_shards_of_a_join_without_data_do_not_count():
    def train(world):
        step = jdp.data_parallel(
            lambda s, x: (s + jdp.average(x.mean()), {}), world=world, num_shards=4
        )
        state = 0.0
        with jdp.Join([step]):
            for _ in range(2):
                state, _ = step(state, np.full(4, 3, np.float32))
        return float(step.last_state)

    assert train(harness.local_world(2)) == 6


# --- Bad input -----------------------------------------------------------------------


def _axis_index(state, x):
    return state + lax.psum(x[0] * lax.axis_index("data"), "data"), {}


def _axis_index_in_a_loop(state, x):
    def body(c, x):
        return c + x * lax.axis_index("data"), None

    return state + lax.psum(lax.scan(body, 0.0, x)[0], "data"), {}


def _collective_in_while(state, x):
    return lax.while_loop(
        lambda s: s < 3, lambda s: s + lax.pmean(x[0], "data"), state
    ), {}


def _int8(state, x):
    grads = jdp.sync_gradients(x, hook=jdp.hooks.int8())
    return state + grads[0], {}


def _ring(state, x):
    ring = jdp.collectives.ring_all_reduce
    return state + jdp.sync_gradients(x, all_reduce=ring)[0], {}


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (_axis_index, r"`lax.axis_index` \(test_num_shards.py:\d+\) and has `num_sh"),
        (_axis_index_in_a_loop, r"`lax.axis_index` \(test_num.*`jdp.shard_key\(key\)`"),
        (_collective_in_while, r"A collective is inside of `while` \(test_num_shards"),
        (_int8, "`num_shards`, and the hook `int8` is not elementwise"),
        (_ring, "leave `all_reduce` at \"auto\", got 'ring_all_reduce'"),
    ],
)
def test_a_step_that_depends_on_replicas_is_refused(fn, text):
    step = jdp.data_parallel(fn, world=harness.local_world(2), num_shards=4)
    with pytest.raises(ValueError, match=text):
        step(0.0, np.ones(8, np.float32))


def test_power_sgd_and_top_k_are_refused():
    for hook in (jdp.hooks.power_sgd(1), jdp.hooks.top_k(0.5)):
        world = training.world_of(harness.local_world(2), 4)
        chained = jdp.hooks.chain(jdp.hooks.cast(jnp.bfloat16), jdp.hooks.int8())
        assert not hook.is_elementwise and not chained.is_elementwise
        tx = jdp.distributed_optimizer(optax.sgd(0.1), hook=hook, world=world)
        params = jdp.replicate(world, np.ones((4, 4), np.float32))

        @jdp.data_parallel(world=world)
        def step(state, x, tx=tx):
            params, opt_state = state
            grads = jax.grad(lambda p, x: (x @ p).mean())(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), {}

        with pytest.raises(ValueError, match="is not elementwise"):
            step((params, tx.init(params)), np.ones((8, 4), np.float32))


@pytest.mark.parametrize(
    ("num_shards", "error", "text"),
    [
        (3, ValueError, "`num_shards` must be a multiple of the 2 replicas, got 3"),
        (0, ValueError, "`num_shards` must be at least 1, got 0"),
        (2.0, TypeError, "`num_shards` must be an integer, got 2.0"),
    ],
)
def test_a_wrong_number_of_shards_is_named(num_shards, error, text):
    with pytest.raises(error, match=text):
        step = jdp.data_parallel(
            lambda s, x: (s, {}), world=harness.local_world(2), num_shards=num_shards
        )
        step(0.0, np.ones(4))


def test_a_batch_that_does_not_divide_is_named():
    step = jdp.data_parallel(
        lambda s, x: (s, {}), world=harness.local_world(2), num_shards=4
    )
    with pytest.raises(
        ValueError, match=r"`batch\[0\]\['x'\]` has 6 samples.*4 shards"
    ):
        step(0.0, {"x": np.ones(6)})


def test_a_mesh_of_two_axes_is_refused():
    worlds = harness.mesh_world((2, 2)), harness.local_world(4, ("node", "data"), 2)
    for world in worlds:
        with pytest.raises(ValueError, match="`num_shards` needs a mesh of one axis"):
            virtual_replicas.with_shards(world, 4)


def test_rows_for_replicas_do_not_fit_shards():
    world = harness.local_world(2)
    state = jdp.copy_per_replica(np.zeros(3, np.float32), world=world)
    step = jdp.data_parallel(lambda s, x: (s, {}), world=world, num_shards=4)
    with pytest.raises(ValueError, match="must be 4, one row per shard, got shape"):
        step(state, np.ones(4))


def test_several_programs_are_not_lowered():
    step = jdp.data_parallel(
        lambda s, x: (s, {}), world=harness.local_world(2), num_shards=4
    )
    with pytest.raises(ValueError, match="consists of several programs"):
        step.lower(0.0, np.ones(4))
    assert "data" in step.fingerprint(0.0, np.ones(4))


def test_shard_key_differs_by_shard_and_is_refused_outside_of_a_step():
    @jdp.data_parallel(world=harness.local_world(2), num_shards=4)
    def step(key, x):
        return key, jdp.PerReplica(jax.random.key_data(jdp.shard_key(key)))

    _, rows = step(jax.random.key(0), np.ones(4))
    assert len({tuple(row) for row in np.asarray(rows.value)}) == 4
    with pytest.raises(ValueError, match="is not bound here"):
        jdp.shard_key(jax.random.key(0))
