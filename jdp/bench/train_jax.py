"""Processes of `jdp bench train` that run JAX: what do they time?"""

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from jdp.bench import channel, train_setup
from jdp.bench.train_setup import Params, TrainConfig

# (state, batch of this process) -> (state, loss); the state is donated.
Step = Callable[[Any, np.ndarray], tuple[Any, jax.Array]]


def loss_fn(params: Params, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the next token.

    Args:
      params: as `train_setup.init_params` makes them.
      tokens: (n, context + 1) int32.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["tokens"][inputs] + params["positions"]
    for block in params["blocks"]:
        x = x + _attention(block, _layer_norm(block["norm_1"], x))
        hidden = _linear(block["widen"], _layer_norm(block["norm_2"], x))
        x = x + _linear(block["narrow"], jax.nn.gelu(hidden))
    logits = _layer_norm(params["norm"], x) @ params["tokens"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()


def _attention(block: Params, x: jax.Array) -> jax.Array:
    n, context, _ = x.shape

    # One batch dimension of sequences and heads: on CPU, XLA computes these products
    # faster than the products of `jax.nn.dot_product_attention`, which has two.
    def split_heads(y: jax.Array) -> jax.Array:
        y = y.reshape(n, context, -1, train_setup.HEAD_WIDTH).swapaxes(1, 2)
        return y.reshape(-1, context, train_setup.HEAD_WIDTH)

    parts = jnp.split(_linear(block["attend"], x), 3, axis=-1)
    q, k, v = map(split_heads, parts)
    scores = q @ k.mT / math.sqrt(train_setup.HEAD_WIDTH)
    is_past = jnp.tril(jnp.ones((context, context), bool))
    weights = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf))
    heads = (weights @ v).reshape(n, -1, context, train_setup.HEAD_WIDTH)
    return _linear(block["project"], heads.swapaxes(1, 2).reshape(x.shape))


def _linear(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def _layer_norm(p: Params, x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5) * p["scale"] + p["bias"]


def make_steps(world: jdp.World, params: Params) -> dict[str, tuple[Step, Any]]:
    """Returns the compiled steps by name, each with its first state."""
    tx = optax.adam(train_setup.LEARNING_RATE)

    def make_step(value_and_grad: Any) -> Step:
        def step(state: Any, tokens: Any) -> Any:
            params, opt_state = state
            loss, grads = value_and_grad(loss_fn)(params, tokens)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return step

    plain = make_step(jax.value_and_grad)
    partitioned = jax.jit(
        plain,
        in_shardings=(world.replicated, world.split),
        out_shardings=world.replicated,
        donate_argnums=0,
    )

    def run_partitioned(state: Any, tokens: np.ndarray) -> Any:
        batch = jax.make_array_from_process_local_data(world.split, tokens)
        return partitioned(state, batch)

    def copy_first() -> Any:
        return jdp.replicate(world, (params, tx.init(params)))

    # In one process per replica, each on its device, as if it trained alone.
    alone = jax.tree.map(jnp.array, (params, tx.init(params)))
    return {
        "jdp": (
            jdp.data_parallel(make_step(jdp.value_and_grad), world=world),
            copy_first(),
        ),
        "partitioned": (run_partitioned, copy_first()),
        "no communication": (jax.jit(plain, donate_argnums=0), alone),
    }


class Trainer:
    """One system in training."""

    def __init__(self, step: Step, state: Any, config: TrainConfig, process: int):
        """Trains for `train_setup.WARM_UP_STEPS` steps."""
        data = train_setup.make_data()
        self._step, self._state = step, state
        self._batches = train_setup.draw_batches(config, data.training, process)
        self._held_out = train_setup.held_out_batch(config, data.held_out)
        self._loss = jax.jit(loss_fn)
        self.train(train_setup.WARM_UP_STEPS)

    def train(self, num_steps: int) -> list[float]:
        """Trains; returns the seconds of the mean step.

        As in a training loop, Python runs ahead of the computations.
        """
        start_s = time.perf_counter()
        for _ in range(num_steps):
            self._state, _ = self._step(self._state, next(self._batches))
        jax.block_until_ready(self._state)
        return [(time.perf_counter() - start_s) / num_steps]

    def find_loss(self) -> float:
        """Returns the loss on the held-out text, of this process alone."""
        own = jax.tree.map(lambda x: x.addressable_data(0), self._state[0])
        return float(self._loss(own, self._held_out))


def main(port: int, config: TrainConfig) -> None:
    """Runs one process."""
    world = jdp.init()
    steps = make_steps(world, train_setup.init_params(config))
    trainers = {
        name: Trainer(step, state, config, world.process_index)
        for name, (step, state) in steps.items()
    }
    channel.serve(
        port,
        "jax",
        world.process_index,
        {name: trainer.train for name, trainer in trainers.items()},
        losses={name: trainer.find_loss for name, trainer in trainers.items()},
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), TrainConfig(*map(int, sys.argv[2:6])))
