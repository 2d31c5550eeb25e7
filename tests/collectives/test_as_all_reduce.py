"""Every algorithm as `all_reduce=`: replicas train as one device does."""

import functools

import jax
import numpy as np
import optax
import pytest

import jdp
from jdp import collectives
from jdp.collectives import measurement
from tests import harness, rarely
from tests.collectives.test_contract import HIERARCHICAL, NODES, ON_ONE_AXIS
from tests.transforms import AXIS

EVERYWHERE = {
    **{name: (fn, AXIS) for name, fn in ON_ONE_AXIS.items()},
    **{name: (fn, NODES) for name, fn in HIERARCHICAL.items()},
}
# That all keep the contract is found by `test_contract`.
A_FEW = ("psum", "ring in chunks", "tree", "halving doubling", "hierarchical")


def _value_and_grad(options):
    grad_fn = jdp.value_and_grad(harness.oracle_loss, **options)
    return lambda params, state, batch, tx: (*grad_fn(params, batch), tx)


def _in_backward(options):
    def loss_fn(params, batch):
        return harness.oracle_loss(jdp.sync_in_backward(params, **options), batch)

    grad_fn = jdp.value_and_grad(loss_fn, axis_name=options["axis_name"])
    return lambda params, state, batch, tx: (*grad_fn(params, batch), tx)


def _accumulated(options):
    grad_fn = jdp.accumulate_gradients(harness.oracle_loss, 2, **options)
    return lambda params, state, batch, tx: (*grad_fn(params, batch), tx)


def _in_the_optimizer(options):
    grad_fn = jdp.local_gradients(harness.oracle_loss, axis_name=options["axis_name"])

    def run(params, state, batch, tx):
        loss, grads = grad_fn(params, batch)
        return loss, grads, jdp.distributed_optimizer(tx, **options)

    return run


WAYS = {
    "value_and_grad": _value_and_grad,
    "sync_in_backward": _in_backward,
    "accumulate_gradients": _accumulated,
    "distributed_optimizer": _in_the_optimizer,
}


def _train(way, all_reduce, axis_name, n, num_nodes=2):
    """Two steps on n replicas; returns what is wrong with them, in the worst leaf."""
    tx = optax.sgd(0.1)
    num_samples = {3: 12}.get(n, 16)
    batches = harness.oracle_batches(2, num_samples)
    world = harness.local_world(n, axis_name, num_nodes=num_nodes)
    local = WAYS[way]({"axis_name": axis_name, "all_reduce": all_reduce})

    @jdp.data_parallel(world=world)
    def step(carry, batch):
        params, state = carry
        loss, grads, optimizer = local(params, state, batch, tx)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), {"loss": loss}

    params = harness.oracle_params()
    carry, losses = (params, tx.init(params)), []
    for batch in batches:
        carry, metrics = step(carry, batch)
        losses.append(float(metrics["loss"]))
    expected, expected_losses = harness.train_alone(params, batches, tx)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(carry[0][name], value, atol=2e-6)
    jdp.check_replicas(carry, world=world)


@pytest.mark.parametrize("name", rarely.cases(EVERYWHERE, often=A_FEW))
def test_replicas_train_as_one_device(name):
    _train("value_and_grad", *EVERYWHERE[name], 4)
    _train("value_and_grad", *EVERYWHERE[name], 3, num_nodes=3)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "value_and_grad"])
@pytest.mark.parametrize(
    "name",
    rarely.cases(
        ["ring", "halving doubling in chunks", "hierarchical"], often=["hierarchical"]
    ),
)
def test_every_way_takes_an_all_reduce(way, name):
    _train(way, *EVERYWHERE[name], 4)


@pytest.mark.parametrize("way", rarely.cases(WAYS, often=("value_and_grad",)))
def test_auto(monkeypatch, way):
    world = harness.local_world(4)
    fit_links = functools.partial(measurement.fit_links, sizes=(1 << 10,), rounds=2)
    monkeypatch.setattr(measurement, "fit_links", fit_links)
    monkeypatch.setattr(jdp.replicas.mesh._CurrentWorld, "world", world)
    _train(way, "auto", AXIS, 4)


def test_adasum_of_local_gradients_trains():
    """Replicas with the same samples have parallel gradients: Adasum is their mean."""
    tx, batches = optax.sgd(0.1), harness.oracle_batches(3)

    @jdp.data_parallel(world=harness.local_world(4))
    def step(carry, batch):
        params, state = carry
        _, grads = jdp.local_gradients(harness.oracle_loss)(params, batch)
        updates, state = tx.update(collectives.adasum(grads), state, params)
        return (optax.apply_updates(params, updates), state), {}

    params = harness.oracle_params()
    carry = (params, tx.init(params))
    for batch in batches:
        four = jax.tree.map(lambda x: np.concatenate([x] * 4), batch)
        carry, _ = step(carry, four)
    expected, _ = harness.train_alone(params, batches, tx)
    for name, value in expected.items():
        np.testing.assert_allclose(carry[0][name], value, atol=5e-6)
