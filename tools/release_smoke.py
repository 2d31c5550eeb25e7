"""Smoke test of an installed jdp: two processes train, and get what one would get."""

import platform

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

world = jdp.init()
assert world.process_count == 2
tx = jdp.distributed_optimizer(optax.sgd(0.1), axis_name=world.axis_name)


@jdp.data_parallel
def step(state, x, y):
    """Takes a step of linear regression."""
    params, opt_state = state
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


rng = np.random.default_rng(0)
xs = rng.normal(size=(16, 4)).astype(np.float32)
ys = xs @ np.arange(4, dtype=np.float32)
own = slice(8 * world.process_index, 8 * world.process_index + 8)
params = jnp.zeros(4)
state, expected = (params, tx.init(params)), np.zeros(4)
for _ in range(5):
    state, metrics = step(state, xs[own], ys[own])
    expected -= 0.1 * 2 / 16 * xs.T @ (xs @ expected - ys)
np.testing.assert_allclose(np.asarray(state[0]), expected, rtol=1e-4)
jdp.check_replicas(state, world=world)
print(
    f"trained with jdp {jdp.__version__}, jax {jax.__version__}, Python "
    f"{platform.python_version()}, loss {float(metrics['loss']):.3f}",
    flush=True,
)
