"""n replicas on shards of a batch train as one device does on the whole batch."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from tests import harness, rarely

NUM_STEPS = 4
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
}


@pytest.mark.parametrize("n", rarely.cases([1, 2, 4, 8], often=(4,)))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_replicas_train_as_one_device(n, optimizer, dtype):
    tx = OPTIMIZERS[optimizer]()
    params = harness.oracle_params(dtype)
    batches = harness.oracle_batches(NUM_STEPS, dtype=dtype)

    @jdp.data_parallel(world=harness.local_world(n))
    def step(carry, batch):
        params, state = carry
        loss, grads = jdp.value_and_grad(harness.oracle_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p + u, params, updates)
        return (params, state), {"loss": loss}

    carry, losses = (params, tx.init(params)), []
    for batch in batches:
        carry, metrics = step(carry, batch)
        losses.append(float(metrics["loss"]))
    expected, expected_losses = harness.train_alone(params, batches, tx)
    # A step rounds a parameter of order 1 once, and its gradient, of order 1, as often
    # as a sum over 16 samples in another order can differ.
    tolerance = NUM_STEPS * 4 * float(jnp.finfo(dtype).eps)
    chex.assert_trees_all_close(
        jax.tree.map(np.float32, carry[0]),
        jax.tree.map(np.float32, expected),
        atol=tolerance,
        rtol=0,
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=tolerance)
