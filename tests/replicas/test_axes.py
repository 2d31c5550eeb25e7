"""Every function that reduces follows the axis of the world."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jdp
from jdp.batch_norm import layer
from jdp.replicas import axes, mesh
from tests import harness

N = 2
WORLDS = {
    "one axis": lambda: harness.local_world(N, "replica"),
    "a pair": lambda: harness.local_world(4, ("host", "device"), num_nodes=2),
}
PARAMS = harness.oracle_params()
(BATCH,) = harness.oracle_batches(1)
_loss = harness.oracle_loss


def _step(world):
    options = harness.fast_options()
    return jdp.data_parallel(world=world, donate_state=False, compiler_options=options)


def _take_step(tx, params, batch):
    _, grads = jdp.local_gradients(_loss)(params, batch)
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)


def _train_apart(training, params, batch):
    state = training.init(params)
    _, grads = jdp.local_gradients(_loss)(state.params.value, batch)
    return training.update(grads, state).step


SGD = optax.sgd(0.1)
OPTIMIZERS = ("distributed_optimizer", "zero1", "top_k")
CALLS = {
    "value_and_grad": lambda p, b: jdp.value_and_grad(_loss)(p, b)[1],
    "accumulate_gradients": lambda p, b: jdp.accumulate_gradients(_loss, 2)(p, b)[1],
    "sync_gradients": lambda p, b: jdp.sync_gradients(
        jdp.local_gradients(_loss)(p, b)[1]
    ),
    "sync_in_backward": lambda p, b: jdp.value_and_grad(
        lambda p, b: _loss(jdp.sync_in_backward(p), b)
    )(p, b)[1],
    "mean_loss": lambda p, b: jax.grad(jdp.mean_loss(_loss))(p, b),
    "average": lambda p, b: jdp.average(jax.grad(_loss)(p, b)),
    "sync_buffers": lambda p, b: jdp.sync_buffers(jax.grad(_loss)(p, b), policy="mean"),
    "distributed_optimizer": lambda p, b: _take_step(
        jdp.distributed_optimizer(SGD), p, b
    ),
    "zero1": lambda p, b: _take_step(jdp.zero1(SGD), p, b),
    "top_k": lambda p, b: _take_step(
        jdp.distributed_optimizer(SGD, hook=jdp.hooks.top_k(1.0)), p, b
    ),
}


@pytest.mark.parametrize("world", WORLDS)
def test_every_function_reduces_over_the_axes_of_the_step(world):
    world = WORLDS[world]()

    @_step(world)
    def step(params, batch):
        found = {name: call(params, batch) for name, call in CALLS.items()}
        x = batch["x"].sum()
        copies = jdp.broadcast_from(x, 1), jdp.collectives.adasum(x)
        trained = [
            _train_apart(make(SGD, period=2), params, batch)
            for make in (jdp.local_sgd, jdp.diloco)
        ]
        return params, {"found": found, "copies": copies, "trained": trained}

    _, metrics = step(PARAMS, BATCH)
    grads = jax.grad(_loss)(PARAMS, BATCH)
    stepped = jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, grads)
    for name, found in metrics["found"].items():
        expected = stepped if name in OPTIMIZERS else grads
        chex.assert_trees_all_close(found, expected, rtol=2e-5, atol=1e-6)
    second = np.split(BATCH["x"], world.num_replicas)[1].sum()
    np.testing.assert_allclose(metrics["copies"][0], second, rtol=1e-5)
    assert metrics["trained"] == [1, 1]


STATES = {
    "zero1": lambda world: jdp.zero1(optax.adam(0.1), world=world).init(PARAMS),
    "local_sgd": lambda world: jdp.local_sgd(SGD, period=2, world=world).init(PARAMS),
    "diloco": lambda world: jdp.diloco(SGD, period=2, world=world).init(PARAMS),
    "hooks": lambda world: jdp.hooks.init_state(
        jdp.hooks.top_k(0.5), PARAMS, world=world
    ),
    "distributed_optimizer": lambda world: jdp.distributed_optimizer(
        SGD, hook=jdp.hooks.top_k(0.5), world=world
    ).init(PARAMS),
    "copies": lambda world: jdp.copy_per_replica(PARAMS, world=world),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", STATES)
def test_a_state_made_outside_of_a_step_follows_its_world(name, world):
    world = WORLDS[world]()
    state = STATES[name](world)
    rows = [x.shape[0] for x in jax.tree.leaves(state) if x.sharding == world.split]
    assert rows and set(rows) == {world.num_replicas}


def test_a_state_made_outside_of_a_step_follows_the_current_world(monkeypatch):
    world = harness.local_world(N, "replica")
    monkeypatch.setattr(mesh._CurrentWorld, "world", world)
    assert jax.tree.leaves(jdp.copy_per_replica(PARAMS))[0].sharding == world.split


def test_two_periods_need_a_pair_of_axes_once_the_world_is_known():
    training = jdp.local_sgd(
        SGD, period=(2, 4), world=harness.local_world(N, "replica")
    )
    with pytest.raises(
        ValueError, match="is for a pair of axes.*`axis_name='replica'`"
    ):
        training.init(PARAMS)
    pair = jdp.local_sgd(SGD, period=(2, 4), world=WORLDS["a pair"]())
    assert pair.init(PARAMS).seen.value.shape == (4, 2)


def test_without_a_world_the_axis_is_data():
    found = jax.vmap(lambda x: jdp.average(x), axis_name="data")(jnp.arange(4.0))
    np.testing.assert_array_equal(found, np.full(4, 1.5))
    with pytest.raises(ValueError, match="`axis_name='data'` is not bound here"):
        jax.vmap(lambda x: jdp.average(x), axis_name="replica")(jnp.arange(4.0))


def test_outside_of_a_step_the_axis_of_the_world_counts_where_it_is_bound(monkeypatch):
    world = harness.local_world(N, "replica")
    monkeypatch.setattr(mesh._CurrentWorld, "world", world)
    for name in ("replica", "data"):
        found = jax.vmap(lambda x: jdp.average(x), axis_name=name)(jnp.arange(4.0))
        np.testing.assert_array_equal(found, np.full(4, 1.5))


def test_a_named_axis_is_the_axis():
    @_step(WORLDS["a pair"]())
    def step(state, x):
        here = jdp.average(x.sum(), axis_name="device")
        return state, {"x": jdp.PerReplica(here), "y": lax.pmax(here, "host")}

    _, metrics = step(np.zeros(()), np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(metrics["x"].value, [0.5, 0.5, 2.5, 2.5])
    assert metrics["y"] == 2.5


def test_a_name_that_is_none_is_refused():
    for wrong in ((), "", 3, ("data", "data")):
        with pytest.raises(ValueError, match="`axis_name` must be one name or a pair"):
            jdp.value_and_grad(_loss, axis_name=wrong)


def test_a_batch_norm_takes_the_axis_of_the_step_or_none():
    assert layer.find_axis(layer.DEFAULT_AXIS) is None
    with axes.inside_step("replica"):
        jax.vmap(lambda x: _check_axis(x), axis_name="replica")(jnp.ones(3))
    jax.vmap(lambda x: _check_axis(x, "data"), axis_name="data")(jnp.ones(3))


def _check_axis(x, expected="replica"):
    assert layer.find_axis(layer.DEFAULT_AXIS) == expected
    return x
