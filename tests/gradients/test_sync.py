"""Every function here gives the same numbers under shard_map, pmap and vmap."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jdp
from jdp import compat
from tests import harness
from tests.transforms import AXIS, TRANSFORMS, packings, sizes, transforms


def _local_values(n, dtype=np.float32):
    """Replica r holds r + 1 everywhere, so that the mean is (n + 1) / 2."""
    ranks = np.arange(1, n + 1).astype(dtype)
    return {
        "a": ranks[:, None, None] * np.ones((3, 2), dtype),
        "b": [ranks, ranks[:, None] * np.ones(0, dtype)],
        "half": ranks.astype(np.float16)[:, None] * np.ones(4, np.float16),
    }


@transforms
@packings
@sizes
def test_gradients_become_their_mean(run, packing, n):
    def fn(_, grads):
        return jdp.sync_gradients(grads, packing=packing)

    local = _local_values(n)
    synced = run(fn, n, 0.0, local)
    expected = jax.tree.map(lambda x: np.full_like(x[0], (n + 1) / 2), local)
    chex.assert_trees_all_equal(synced, expected)
    chex.assert_trees_all_equal_dtypes(synced, expected)


@transforms
@pytest.mark.parametrize("bucket_bytes", [0, 16, 1 << 20])
def test_any_plan_gives_the_same_mean(run, bucket_bytes):
    local = _local_values(4)
    plan = jdp.plan_buckets(
        jax.tree.map(lambda x: x[0], local),
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=bucket_bytes,
    )
    synced = run(lambda _, g: jdp.sync_gradients(g, plan=plan), 4, 0.0, local)
    chex.assert_trees_all_equal(synced["a"], np.full((3, 2), 2.5, np.float32))


@transforms
@packings
@sizes
def test_value_and_grad_is_that_of_the_whole_batch(run, packing, n):
    params, (batch,) = harness.oracle_params(), harness.oracle_batches(1)
    split = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), batch)
    fn = jdp.value_and_grad(harness.oracle_loss, packing=packing)
    loss, grads = run(fn, n, params, split)
    expected = jax.value_and_grad(harness.oracle_loss)(params, batch)
    # Sums of 16 terms of order 1 in another order.
    chex.assert_trees_all_close((loss, grads), expected, atol=16 * 1.2e-7, rtol=0)


@transforms
def test_aux_stays_local_and_the_loss_is_averaged(run):
    def loss_fn(params, x):
        return (params * x).sum(), {"x": x}

    def fn(params, x):
        (loss, aux), grads = jdp.value_and_grad(loss_fn, has_aux=True)(params, x)
        return loss, grads, jdp.average(aux["x"] * lax.axis_index(AXIS))

    x = np.array([[1.0], [3.0]], np.float32)
    loss, grads, weighted = run(fn, 2, jnp.ones(1), x)
    assert (float(loss), float(grads[0]), float(weighted[0])) == (2.0, 2.0, 1.5)


@transforms
def test_a_loss_that_is_averaged_already_has_the_gradient_of_the_mean(run):
    def loss_fn(params, x):
        return lax.pmean((params * x).sum(), AXIS)

    x = np.array([[1.0], [3.0]], np.float32)
    loss, grads = run(jdp.value_and_grad(loss_fn), 2, jnp.ones(1), x)
    assert (float(loss), float(grads[0])) == (2.0, 2.0)


@transforms
def test_local_gradients_are_those_of_one_replica(run):
    def fn(params, x):
        loss, grads = jdp.local_gradients(lambda p, x: (p * x).sum())(params, x)
        ranks = lax.axis_index(AXIS)
        return jdp.average((loss * ranks, grads * ranks))

    loss, grads = run(fn, 2, jnp.ones(1), np.array([[1.0], [3.0]], np.float32))
    assert (float(loss), float(grads[0])) == (1.5, 1.5)  # replica 1 alone, over 2.


@transforms
def test_metrics_are_averaged_as_floats(run):
    def fn(_, local):
        return jdp.average(local)

    local = {
        "count": np.array([1, 2], np.int32),
        "hit": np.array([True, False]),
        "loss": np.array([1.0, 4.0], np.float32),
        "z": np.array([1j, 3], np.complex64),
    }
    got = run(fn, 2, 0.0, local)
    expected = {"count": 1.5, "hit": 0.5, "loss": 2.5, "z": 1.5 + 0.5j}
    chex.assert_trees_all_equal(jax.tree.map(complex, got), expected)
    assert got["count"].dtype == jnp.float32


@transforms
def test_float0_gradients_of_integers_pass_through(run):
    def fn(params, x):
        loss, vjp = jax.vjp(lambda p: p["w"] * x * p["n"], params)
        grads = vjp(jnp.ones_like(loss))[0]
        assert grads["n"].dtype == jax.dtypes.float0
        varying = {"w": grads["w"] + 0 * x, "n": grads["n"]}
        synced = jdp.sync_gradients(varying)
        assert synced["n"].dtype == jax.dtypes.float0
        return synced["w"]

    params = {"w": np.float32(1.0), "n": 2}
    if run is TRANSFORMS["shard_map"]:
        # Autodiff has summed the gradient of `w` there, which is what is refused.
        with pytest.raises(ValueError, match="summed or averaged before"):
            run(
                lambda p, x: jdp.sync_gradients(jax.grad(_product)(p["w"], x)),
                2,
                params,
                np.array([1.0, 3.0], np.float32),
            )
        return
    assert float(run(fn, 2, params, np.array([1.0, 3.0], np.float32))) == 4.0


def _product(w, x):
    return w * x


@transforms
@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
def test_integer_gradients_are_refused_by_path(run, dtype):
    local = {"w": np.ones((2, 3), np.float32), "steps": np.ones((2, 1), dtype)}
    with pytest.raises(TypeError, match=r"`\['steps'\]` is (int32|bool)\[1\]"):
        run(lambda _, g: jdp.sync_gradients(g), 2, 0.0, local)


def test_gradients_summed_by_autodiff_are_refused_by_path():
    def fn(params, x):
        return jdp.sync_gradients(jax.grad(lambda p: (p["w"] * x).sum())(params))

    with pytest.raises(ValueError, match=r"`\['w'\]` is already the same .*local_grad"):
        TRANSFORMS["shard_map"](fn, 2, {"w": jnp.ones(3)}, np.ones((2, 3), np.float32))


def test_gradients_are_not_averaged_twice():
    tx = jdp.distributed_optimizer(optax.sgd(0.1))

    def fn(params, x):
        _, grads = jdp.value_and_grad(lambda p, x: (p * x).sum())(params, x)
        return tx.update(grads, tx.init(params), params)[0]

    with pytest.raises(ValueError, match="do not synchronise what"):
        TRANSFORMS["shard_map"](fn, 2, jnp.ones(3), np.ones((2, 3), np.float32))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jdp.sync_gradients({"w": x}),
        lambda x: jdp.value_and_grad(lambda p: p.sum())(x),
        lambda x: jdp.local_gradients(lambda p: p.sum())(x),
        lambda x: jdp.accumulate_gradients(lambda p, x: (p * x).sum(), 1)(x, x),
        lambda x: jdp.average(x),
    ],
)
def test_an_unbound_axis_is_named_with_those_that_are_bound(fn):
    with pytest.raises(ValueError, match="`axis_name='data'` is not bound.*none"):
        jax.jit(fn)(jnp.ones(3))
    with pytest.raises(ValueError, match=r"is not bound.*\('batch',\)"):
        jax.vmap(fn, axis_name="batch")(jnp.ones((2, 3)))


@pytest.mark.parametrize("axis_name", [("data", "data"), (), "", 0, ("a", 1)])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, name: jdp.sync_gradients(x, axis_name=name),
        lambda x, name: jdp.local_gradients(jnp.sum, axis_name=name)(x),
        lambda x, name: jdp.accumulate_gradients(jnp.dot, 1, axis_name=name)(x, x),
        lambda x, name: jdp.average(x, axis_name=name),
        lambda x, name: jdp.mean_loss(jnp.sum, axis_name=name)(x),
        lambda x, name: jdp.sync_in_backward(x, axis_name=name),
        lambda x, name: jdp.broadcast_from(x, 0, axis_name=name),
    ],
)
def test_what_is_no_axis_name_is_refused_by_name(fn, axis_name):
    with pytest.raises(ValueError, match="`axis_name` must be one name or a pair"):
        jax.vmap(lambda x: fn(x, axis_name), axis_name="data")(jnp.ones((2, 3)))


def test_a_tree_that_does_not_fit_its_plan_is_named():
    plan = jdp.plan_buckets({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"`\['w'\]` is float32\[4\]"):
        TRANSFORMS["vmap"](
            lambda _, g: jdp.sync_gradients(g, plan=plan),
            2,
            0.0,
            {"w": np.ones((2, 4))},
        )


def test_wrong_packing_is_refused():
    grads = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="'flat' or 'tuple', got 'zip'"):
        TRANSFORMS["vmap"](
            lambda _, g: jdp.sync_gradients(g, packing="zip"), 2, 0.0, grads
        )
    with pytest.raises(ValueError, match="`packing='tuple'`.*`all_reduce`"):
        TRANSFORMS["vmap"](
            lambda _, g: jdp.sync_gradients(g, packing="tuple", all_reduce=lax.psum),
            2,
            0.0,
            grads,
        )


@transforms
def test_an_all_reduce_gets_each_flat_bucket_and_the_axis(run):
    seen = []

    def all_reduce(x, axis_name):
        seen.append((x.shape, axis_name))
        return lax.psum(x, axis_name)

    grads = {"a": np.ones((2, 3, 2), np.float32), "b": np.ones((2, 5), np.float32)}
    fn = jdp.value_and_grad(
        lambda p, g: (p["a"] * g["a"]).sum() + (p["b"] * g["b"]).sum(),
        all_reduce=all_reduce,
    )
    params = jax.tree.map(lambda x: x[0], grads)
    run(fn, 2, params, grads)
    assert seen == [((6 + 5 + 1,), AXIS)]  # both leaves, and the loss.


@transforms
def test_float16_is_divided_before_it_is_summed(run):
    grads = np.full((8, 3), 32_768.0, np.float16)  # eight of them overflow.
    synced = run(lambda _, g: jdp.sync_gradients(g), 8, 0.0, grads)
    np.testing.assert_array_equal(synced, np.full(3, 32_768.0, np.float16))


def test_two_axes_are_averaged_together():
    world = harness.local_world(8, ("node", "data"), num_nodes=2)
    mapped = jax.shard_map(
        lambda x: jdp.sync_gradients(x[0], axis_name=("node", "data")),
        mesh=world.mesh,
        in_specs=PartitionSpec(("node", "data")),
        out_specs=PartitionSpec(),
    )
    assert float(jax.jit(mapped)(np.arange(8.0, dtype=np.float32)[:, None])[0]) == 3.5


def _all_reduces(fn, n, *args, **options):
    """The number of operands of each all-reduce of the compiled program."""
    world = harness.local_world(n)
    mapped = jax.shard_map(
        fn, mesh=world.mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec()
    )
    text = jax.jit(mapped, **options).lower(*args).compile().as_text()
    results = [
        line.split(" all-reduce(")[0].split("=", 1)[1]
        for line in text.splitlines()
        if " all-reduce(" in line
    ]
    return [line.count("f32[") for line in results]


@pytest.mark.parametrize(
    "packing,disabled_pass,expected",
    [
        ("flat", "cpu-all-reduce-combiner", [1, 1, 1]),
        ("tuple", "cse_barrier_expander", [1, 2, 2]),
    ],
)
def test_a_bucket_is_one_all_reduce_and_buckets_stay_apart(
    packing, disabled_pass, expected
):
    grads = [np.ones((4, 8), np.float32) for _ in range(5)]
    plan = jdp.plan_buckets(
        [g[0] for g in grads], bucket_bytes=64, first_bucket_bytes=64
    )

    def fn(grads):
        local = [g[0] * 3 for g in grads]
        return jdp.sync_gradients(local, plan=plan, packing=packing)

    options = {"xla_disable_hlo_passes": disabled_pass}
    assert sorted(_all_reduces(fn, 4, grads, compiler_options=options)) == expected


@pytest.mark.parametrize("packing", ["flat", "tuple"])
def test_the_loss_rides_in_a_bucket(packing):
    def fn(x):
        grad_fn = jdp.value_and_grad(lambda p, x: (p * x).sum(), packing=packing)
        return grad_fn(jnp.ones(3), x[0])

    disabled = "cpu-all-reduce-combiner" if packing == "flat" else ""
    options = {"xla_disable_hlo_passes": disabled}
    x = np.ones((4, 3), np.float32)
    num_operands = _all_reduces(fn, 4, x, compiler_options=options)
    assert num_operands == [1 if packing == "flat" else 2]


@pytest.mark.parametrize("packing", ["flat", "tuple"])
def test_synchronised_gradients_can_be_differentiated(packing):
    def outer(w, x):
        def inner(w):
            grads = jdp.sync_gradients(2 * w * x, packing=packing)
            return (grads**2).sum()

        return jdp.average(jax.grad(inner)(compat.cast_varying(w, (AXIS,))))

    x = np.array([[1.0], [3.0]], np.float32)
    slope = TRANSFORMS["shard_map"](outer, 2, jnp.ones(1), x)
    np.testing.assert_allclose(slope, [2 * 4 * 4 / 2])  # d/dw (4 w)^2, over 2 copies.


@sizes
def test_distributed_optimizer_steps_on_the_mean(n):
    params, batches = harness.oracle_params(), harness.oracle_batches(3)
    tx = jdp.distributed_optimizer(optax.adam(0.01))
    state = tx.init(params)

    @jdp.data_parallel(world=harness.local_world(n))
    def step(carry, batch):
        params, state = carry
        loss, grads = jdp.local_gradients(harness.oracle_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    carry = (params, state)
    for batch in batches:
        carry, _ = step(carry, batch)
    expected, _ = harness.train_alone(params, batches, optax.adam(0.01))
    chex.assert_trees_all_close(carry[0], expected, atol=1e-5, rtol=0)


def test_distributed_optimizer_passes_extra_arguments():
    def update(updates, state, params=None, *, factor, **extra):
        return jax.tree.map(lambda g: g * factor, updates), state

    tx = jdp.distributed_optimizer(
        optax.GradientTransformationExtraArgs(lambda p: (), update)
    )
    updates = TRANSFORMS["vmap"](
        lambda _, g: tx.update(g, (), factor=3.0)[0], 2, 0.0, np.array([1.0, 3.0])
    )
    assert float(updates) == 6.0
