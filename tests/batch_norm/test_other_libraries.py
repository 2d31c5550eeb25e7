"""Batch norm of Equinox and Haiku: does it count the samples of all replicas?"""

import chex
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import jdp
from tests import harness

N = 4
WORLD = harness.local_world(N)
X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = np.sin(X.sum(1))


def _haiku_net(x):
    axis = None if hk.running_init() else WORLD.axis_name
    return hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis)(x, True).sum(1)


def test_haiku_counts_the_samples_of_all_replicas():
    network = hk.without_apply_rng(hk.transform_with_state(_haiku_net))
    state = network.init(jax.random.key(0), X)

    def loss_fn(params, stats, x, y):
        prediction, stats = network.apply(params, stats, x)
        return jnp.mean((prediction - y) ** 2), stats

    @jdp.data_parallel(world=WORLD, donate_state=False, num_states=2)
    def step(params, stats, x, y):
        grad_fn = jdp.value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = grad_fn(params, stats, x, y)
        return grads, stats, loss

    one = jax.vmap(  # One replica with all samples.
        jax.value_and_grad(loss_fn, has_aux=True),
        in_axes=(None, None, 0, 0),
        axis_name=WORLD.axis_name,
    )
    (loss, stats), grads = jax.tree.map(lambda x: x[0], one(*state, X[None], Y[None]))
    chex.assert_trees_all_close(step(*state, X, Y), (grads, stats, loss), atol=1e-5)


class _Net(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self, axes):
        self.norm = eqx.nn.BatchNorm(3, axes, mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return x.sum(), state


def _equinox_loss(model, state, x, y):
    prediction, state = jax.vmap(
        model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
    )(x, state)
    return jnp.mean((prediction - y) ** 2), state


def test_equinox_counts_the_samples_of_all_replicas():
    model, state = eqx.nn.make_with_state(_Net)(("batch", WORLD.axis_name))
    params, static = eqx.partition(model, eqx.is_array)

    @jdp.data_parallel(world=WORLD, donate_state=False, num_states=2)
    def step(params, state, x, y):
        def loss_fn(params):
            return _equinox_loss(eqx.combine(params, static), state, x, y)

        (loss, state), grads = jdp.value_and_grad(loss_fn, has_aux=True)(params)
        return grads, state, loss

    grads, after, loss = step(params, state, X, Y)
    alone, state = eqx.nn.make_with_state(_Net)("batch")
    grad_fn = eqx.filter_value_and_grad(_equinox_loss, has_aux=True)
    (expected_loss, expected), expected_grads = grad_fn(alone, state, X, Y)
    for got, want in [
        (grads, expected_grads),
        (after, expected),
        (loss, expected_loss),
    ]:
        chex.assert_trees_all_close(
            jax.tree.leaves(got), jax.tree.leaves(want), atol=1e-5
        )
