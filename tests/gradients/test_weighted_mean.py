"""Replicas count by how much data they have, and not at all without any."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jdp
from jdp.gradients import weighted_mean
from tests import harness, rarely
from tests.transforms import (
    AXIS,
    COMPILED_FAST,
    TRANSFORMS,
    packings,
    sizes,
    transforms,
    transforms_compiled_fast,
)

# Samples of each replica, of at most 6; the mean must count samples.
COUNTS = {1: [4], 2: [6, 1], 4: [3, 0, 6, 2], 8: [1, 6, 0, 2, 0, 5, 3, 4]}
# Sums of up to 21 terms of order 1, in another order.
ATOL = 21 * 1.2e-7


def _uneven(n, size=6):
    """Batches of `size` samples a replica, of which COUNTS are true; and the truth."""
    (batch,) = harness.oracle_batches(1, n * size)
    split = jax.tree.map(lambda x: x.reshape(n, size, -1), batch)
    weight = np.array([[k < c for k in range(size)] for c in COUNTS[n]], np.float32)
    # What is in the padding must not matter.
    split = jax.tree.map(lambda x: np.where(weight[..., None] > 0, x, 7.0), split)
    return split, weight, jax.tree.map(lambda x: x[weight > 0], split)


def _loss(params, batch, weight):
    """Divides by zero where there is no data, as most would write it."""
    h = jnp.tanh(batch["x"] @ params["w0"] + params["b0"])
    errors = ((h @ params["w1"] + params["b1"] - batch["y"]) ** 2).mean(-1)
    return (errors * weight).sum() / weight.sum()


_grad_alone = jax.jit(jax.value_and_grad(_loss))
_grad_of_truth = jax.jit(jax.value_and_grad(harness.oracle_loss))


def _step(params, local, **options):
    batch, weight = local
    grad_fn = jdp.value_and_grad(_loss, weight=weight.sum(), **options)
    return grad_fn(params, batch, weight)


@transforms_compiled_fast
@packings
@sizes
def test_each_sample_counts_the_same(run, packing, n):
    params, (split, weight, truth) = harness.oracle_params(), _uneven(n)
    fn = functools.partial(_step, packing=packing)
    found = run(fn, n, params, (split, weight))
    expected = _grad_of_truth(params, truth)
    chex.assert_trees_all_close(found, expected, atol=ATOL, rtol=0)


def _means_of_replicas(params, split, weight):
    """Loss and gradients of each replica with data, alone."""
    replicas = [
        jax.tree.map(lambda x, r=r: x[r], (split, weight)) for r in range(len(weight))
    ]
    return [_grad_alone(params, *local) for local in replicas if local[1].sum() > 0]


@transforms_compiled_fast
@packings
@sizes
@pytest.mark.parametrize("divide_by", ["active", "world"])
def test_each_replica_counts_the_same(run, packing, n, divide_by):
    params, (split, weight, _) = harness.oracle_params(), _uneven(n)
    fn = functools.partial(_step, packing=packing, divide_by=divide_by)
    loss, grads = run(fn, n, params, (split, weight))
    means = _means_of_replicas(params, split, weight)
    sums = jax.tree.map(lambda *xs: sum(xs), *means)
    divisor = len(means) if divide_by == "active" else n
    expected = sums[0] / len(means), jax.tree.map(lambda x: x / divisor, sums[1])
    chex.assert_trees_all_close((loss, grads), expected, atol=ATOL, rtol=0)


@transforms_compiled_fast
@packings
@pytest.mark.parametrize("divide_by", ["weight", "active", "world"])
@pytest.mark.parametrize("n", [1, 4])
def test_without_any_data_all_is_zero(run, packing, divide_by, n):
    split, weight, _ = _uneven(n)
    fn = functools.partial(_step, packing=packing, divide_by=divide_by)
    params = harness.oracle_params()
    found = run(fn, n, params, (split, np.zeros_like(weight)))
    assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(found))


@transforms_compiled_fast
@packings
@sizes
def test_gradients_made_elsewhere_are_weighted(run, packing, n):
    def fn(_, local):
        grads, weight = local
        # Whatever a replica without data holds does not count.
        grads = jax.tree.map(lambda g: jnp.where(weight > 0, g, jnp.nan), grads)
        return jdp.sync_gradients(grads, weight=weight, packing=packing)

    counts = np.array(COUNTS[n], np.float32)
    ranks = np.arange(1, n + 1)
    local = {
        dtype.__name__: ranks.astype(dtype)[:, None] * np.ones(3, dtype)
        for dtype in (np.float32, np.float16, np.complex64, jnp.bfloat16)
    }
    synced = run(fn, n, 0.0, (local, counts))
    mean = (ranks * counts).sum() / counts.sum()
    expected = {k: np.full(3, mean).astype(x.dtype) for k, x in local.items()}
    chex.assert_trees_all_equal_dtypes(synced, expected)
    for name, dtype in (("bfloat16", jnp.bfloat16), ("float16", jnp.float16)):
        found, wanted = (np.asarray(x.pop(name), float) for x in (synced, expected))
        # Products and sums of n terms up to 6 times the mean, each rounded.
        error = n * 6 * float(jnp.finfo(dtype).eps) * mean
        np.testing.assert_allclose(found, wanted, atol=error)
    chex.assert_trees_all_close(synced, expected, rtol=n * 1.2e-7)


@packings
def test_float16_overflows_where_the_mean_does_and_no_earlier(packing):
    def fn(params, local):
        grads, weight = local
        loss_fn = lambda p, g: (p * g).sum()  # noqa: E731
        synced = jdp.sync_gradients(grads, weight=weight, packing=packing)
        grad_fn = jdp.value_and_grad(loss_fn, weight=weight, packing=packing)
        return synced, grad_fn(params, grads)[1]

    grads = np.full((4, 3), 3e4, np.float16)
    counts = np.array([512, 0, 300, 1], np.float32)
    found = TRANSFORMS["shard_map"](fn, 4, np.zeros(3, np.float16), (grads, counts))
    for synced in found:
        np.testing.assert_array_equal(synced, grads[0])


@transforms_compiled_fast
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.complex64])
def test_the_total_loses_no_digit_on_its_way(run, dtype):
    # bfloat16 has neither 257 nor 1.001; their sum has 21 bits.
    amounts = np.array([257, 0, 2**20 + 1, 1.0009765625], np.float32)

    def fn(_, amount):
        return weighted_mean.decode(
            lax.psum(weighted_mean.encode(amount, dtype, AXIS), AXIS)
        )

    total = run(fn, 4, 0.0, amounts)
    assert (float(total), total.dtype) == (float(amounts.sum()), np.float32)


@transforms
def test_bfloat16_gradients_are_rounded_once_when_they_are_weighted(run):
    def fn(params, local):
        x, weight = local
        loss_fn = lambda p, x: (p * x).sum().astype(jnp.bfloat16)  # noqa: E731
        return jdp.value_and_grad(loss_fn, weight=weight)(params, x)[1]

    # 3 * 257 = 771 becomes 772 in bfloat16; were 257 rounded first, 768.
    x = np.array([3, 9], jnp.bfloat16)
    counts = np.array([257, 0], np.float32)
    grad = run(fn, 2, np.ones((), jnp.bfloat16), (x, counts))
    assert float(grad) == float(jnp.bfloat16(772 / 257)) and grad.dtype == jnp.bfloat16


def _compiled(fn, n, *args):
    world = harness.local_world(n)

    def body(params, local):
        return fn(params, jax.tree.map(lambda x: x[0], local))

    step = jax.shard_map(body, mesh=world.mesh, in_specs=(P(), P(AXIS)), out_specs=P())
    jitted = jax.jit(
        step,
        compiler_options={"xla_disable_hlo_passes": "cpu-all-reduce-combiner"},
    )
    return jitted.lower(*args).compile().as_text()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_no_collective_is_added(dtype):
    split, weight, _ = _uneven(4)
    params = harness.oracle_params(np.float32)
    params, split = jax.tree.map(lambda x: x.astype(dtype), (params, split))
    plain = jdp.value_and_grad(_loss)
    texts = [
        _compiled(lambda p, x: plain(p, *x), 4, params, (split, weight)),
        _compiled(_step, 4, params, (split, weight)),
    ]
    # Weighted float16 travels as float32, like the loss, so that one is saved.
    counts = [text.count(" all-reduce(") for text in texts]
    assert counts == (
        [2, 1] if dtype == np.float16 else [1 + (dtype != np.float32)] * 2
    )


def _weighted_step(divide_by="weight", **options):
    def step(params, local):
        batch, weight = local
        grad_fn = jdp.value_and_grad(
            _loss, weight=weight.sum(), divide_by=divide_by, **options
        )
        loss, grads = grad_fn(params, batch, weight)
        mine = weight.sum() / (weight.sum() > 0)  # NaN without data.
        return params, {"loss": loss, "samples": mine, "step": 3}

    return step


def _flat(n):
    """The batches of all replicas, one after the other, as a step takes them."""
    split, weight, _ = _uneven(n)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (split, weight))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("divide_by", ["weight", "active", "world"])
def test_metrics_are_averaged_with_the_same_weights(check_vma, divide_by):
    world, counts = harness.local_world(4), np.array(COUNTS[4])
    step = jdp.data_parallel(
        _weighted_step(divide_by), world=world, check_vma=check_vma
    )
    _, metrics = step(harness.oracle_params(), _flat(4))
    shares = counts if divide_by == "weight" else counts > 0
    expected = (counts * shares).sum() / shares.sum()
    np.testing.assert_allclose(float(metrics["samples"]), expected, rtol=1e-6)
    assert float(metrics["step"]) == 3
    split, weight, truth = _uneven(4)
    loss = harness.oracle_loss(harness.oracle_params(), truth)
    if divide_by != "weight":
        means = _means_of_replicas(harness.oracle_params(), split, weight)
        loss = np.mean([loss for loss, _ in means])
    np.testing.assert_allclose(float(metrics["loss"]), float(loss), rtol=1e-6)


def test_metrics_of_a_step_without_weights_count_each_replica_the_same():
    world = harness.local_world(4)

    @jdp.data_parallel(world=world)
    def step(state, local):
        return state, {"samples": local[1].sum()}

    found = step(np.zeros(1), _flat(4))[1]["samples"]
    assert float(found) == np.mean(COUNTS[4])


def _looped_step(average):
    def step(params, local):
        def turn(params, _):
            params, metrics = _weighted_step()(params, local)
            weight = local[1].sum()
            return params, average(metrics, weight)

        params, metrics = lax.scan(turn, params, None, length=2)
        return params, metrics

    return jdp.data_parallel(step, world=harness.local_world(4))


def test_metrics_that_leave_a_loop_without_their_weights_are_refused():
    step = _looped_step(lambda metrics, weight: metrics)
    with pytest.raises(ValueError, match=r"jdp.average\(metrics, weight=\.\.\.\)"):
        step(harness.oracle_params(), _flat(4))


def test_metrics_are_averaged_by_hand_inside_of_a_loop():
    step = _looped_step(lambda metrics, weight: jdp.average(metrics, weight=weight))
    _, metrics = step(harness.oracle_params(), _flat(4))
    counts = np.array(COUNTS[4])
    expected = (counts**2).sum() / counts.sum()
    np.testing.assert_allclose(metrics["samples"], [expected] * 2, rtol=1e-6)


@transforms_compiled_fast
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_micro_batches_count_by_their_samples(run, num_micro_batches):
    # With 6 samples in 4 micro-batches there are two sizes; some are padding alone.
    params, (split, weight, truth) = harness.oracle_params(), _uneven(4)

    def fn(params, local):
        batch, weight = local
        grad_fn = jdp.accumulate_gradients(
            lambda p, both: _loss(p, *both), num_micro_batches, weight=weight
        )
        return grad_fn(params, (batch, weight))

    found = run(fn, 4, params, (split, weight))
    expected = _grad_of_truth(params, truth)
    chex.assert_trees_all_close(found, expected, atol=ATOL, rtol=0)


@transforms_compiled_fast
def test_micro_batches_without_data_use_nothing(run):
    # Both samples of the second micro-batch, which take the other branch, are padding.
    def loss_fn(params, batch, weight):
        return lax.cond(
            batch[0] > 0,
            lambda p: p["a"] * (batch * weight).sum() / weight.sum(),
            lambda p: p["b"] * (batch * weight).sum() / weight.sum(),
            params,
        )

    def fn(params, local):
        batch, weight = local
        grad_fn = jdp.accumulate_gradients(loss_fn, 2, weight=weight, find_unused=True)
        (_, grads), used = grad_fn(params, batch, weight)
        return grads, used

    batch = np.array([[1, 2, -1, -2]] * 2, np.float32)
    weight = np.array([[1, 1, 0, 0]] * 2, np.float32)
    grads, used = run(fn, 2, {"a": jnp.ones(()), "b": jnp.ones(())}, (batch, weight))
    assert jax.tree.map(bool, used) == {"a": True, "b": False}
    assert jax.tree.map(float, grads) == {"a": 1.5, "b": 0.0}


def test_a_weight_of_zero_is_no_data():
    amounts = np.array([2, 0, 1], np.float32)

    def fn(_, local):
        x, weight = local
        return [
            jdp.sync_gradients(x, weight=weight, divide_by=divide_by)
            for divide_by in ("weight", "active", "world")
        ]

    found = COMPILED_FAST["vmap"](fn, 3, 0.0, (np.array([3.0, 5.0, 9.0]), amounts))
    assert [float(x) for x in found] == [5.0, 6.0, 4.0]


def test_accumulation_takes_one_weight_a_sample():
    split, weight, _ = _uneven(2)

    def fn(params, local):
        batch, weight = local
        grad_fn = jdp.accumulate_gradients(_loss, 2, weight=weight.sum())
        return grad_fn(params, batch, weight)

    with pytest.raises(ValueError, match=r"shape \(\); .* each of the 6 samples"):
        TRANSFORMS["vmap"](fn, 2, harness.oracle_params(), (split, weight))


@transforms_compiled_fast
@pytest.mark.parametrize("has_data", [True, False])
def test_without_any_data_the_optimizer_does_nothing(run, has_data):
    tx = jdp.distributed_optimizer(optax.adamw(0.1, weight_decay=0.5))
    params = {"w": jnp.array([1.0, -0.0, 2.0]), "b": jnp.ones(())}
    state = tx.init(params)
    # A state that has seen steps, with all its digits.
    state = jax.tree.map(lambda x: x + jnp.asarray(0.7, x.dtype), state)

    def fn(shared, local):
        params, state = shared
        x, weight = local
        _, grads = jdp.local_gradients(lambda p: (p["w"].sum() + p["b"]) * x)(params)
        updates, state = tx.update(grads, state, params, weight=weight)
        return optax.apply_updates(params, updates), state, updates

    counts = np.array([0, 2 if has_data else 0], np.int32)
    found = run(fn, 2, (params, state), (np.array([np.nan, 1.0], np.float32), counts))
    if has_data:
        alone = optax.adamw(0.1, weight_decay=0.5)
        grads = jax.tree.map(jnp.ones_like, params)
        updates, after = alone.update(grads, state, params)
        expected = optax.apply_updates(params, updates), after, updates
        chex.assert_trees_all_close(found, expected, rtol=1e-6)
    else:
        as_bytes = functools.partial(jax.tree.map, lambda x: np.asarray(x).tobytes())
        nothing = jax.tree.map(lambda x: np.full_like(x, -0.0), params)
        assert as_bytes(found) == as_bytes((params, state, nothing))


@transforms_compiled_fast
def test_a_replica_without_data_uses_nothing(run):
    # Replica r takes branch r; replica 1 has no data.
    def loss_fn(params, rank):
        take = [lambda p: p["a"].sum(), lambda p: p["b"].sum(), lambda p: p["c"].sum()]
        return lax.switch(rank, take, params)

    def fn(params, local):
        rank, weight = local
        grad_fn = jdp.value_and_grad(loss_fn, find_unused=True, weight=weight)
        (_, grads), used = grad_fn(params, rank)
        return grads, used

    params = {name: np.ones(2, np.float32) for name in "abc"}
    local = np.arange(3), np.array([3, 0, 1], np.float32)
    grads, used = run(fn, 3, params, local)
    assert jax.tree.map(bool, used) == {"a": True, "b": False, "c": True}
    assert jax.tree.map(lambda g: float(g[0]), grads) == {"a": 0.75, "b": 0, "c": 0.25}


def _layers(sync, params, x):
    def layer(h, p):
        return jnp.tanh(h @ sync(p)), None

    h, _ = lax.scan(layer, x, params["layers"])
    return (h @ params["head"]).mean(-1)


@pytest.mark.parametrize("divide_by", ["weight", "active", "world"])
@pytest.mark.parametrize(
    "name",
    rarely.cases(["shard_map", "shard_map unchecked", "pmap"], often=["shard_map"]),
)
def test_gradients_are_weighed_in_the_backward_pass(name, divide_by):
    def fn(is_inside, params, local):
        x, weight = local
        options = {"weight": weight.sum(), "divide_by": divide_by}
        sync = functools.partial(jdp.sync_in_backward, **options)

        def loss_fn(params):
            losses = _layers(sync if is_inside else lambda p: p, params, x)
            return (losses * weight).sum() / weight.sum()

        return jdp.value_and_grad(loss_fn, **options)(params)

    rng = np.random.default_rng(0)
    params = {
        "layers": rng.normal(size=(3, 5, 5)).astype(np.float32),
        "head": rng.normal(size=(5, 2)).astype(np.float32),
    }
    split, weight, _ = _uneven(4)
    found, expected = (
        COMPILED_FAST[name](functools.partial(fn, b), 4, params, (split["x"], weight))
        for b in (True, False)
    )
    assert float(found[0]) != 0
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner, outer", [({}, {"weight": 1}), ({"weight": 1}, {})])
def test_a_layer_weighed_otherwise_than_the_rest_is_refused(inner, outer):
    def fn(params, x):
        loss_fn = lambda p: (jdp.sync_in_backward(p, **inner) * x).sum()  # noqa: E731
        return jdp.value_and_grad(loss_fn, **outer)(params)

    with pytest.raises(ValueError, match="`axis_name`, `weight` and `divide_by`"):
        TRANSFORMS["shard_map"](fn, 2, np.ones(2), np.ones((2, 2)))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"weight": np.ones(3)}, ValueError, r"shape \(3,\). Pass `weight.sum\(\)`"),
        ({"weight": True}, TypeError, "must be a real number, got bool"),
        ({"weight": 1j}, TypeError, "must be a real number, got complex64"),
        ({"divide_by": "wieght"}, ValueError, "or 'world', got 'wieght'"),
    ],
)
def test_a_weight_that_is_none_is_refused(options, error, message):
    def sync(_, x):
        return jdp.sync_gradients(x, **options)

    def differentiate(params, x):
        return jdp.value_and_grad(lambda p: (p * x).sum(), **options)(params)

    for fn in (sync, differentiate):
        with pytest.raises(error, match=message):
            TRANSFORMS["vmap"](fn, 2, np.ones(2), np.ones((2, 2)))


def test_a_description_says_how_replicas_are_weighted():
    step = jdp.data_parallel(_weighted_step("active"), world=harness.local_world(4))
    found = jdp.describe(step, harness.oracle_params(), _flat(4))
    assert found.synchronizations[0].divide_by == "active"
    text = " ".join(str(found).split())
    assert "the sum is divided by the number of replicas with data" in text
