"""Trains a multi-layer perceptron of Haiku on handwritten digits."""

import argparse
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()


class Batch(NamedTuple):
    image: np.ndarray  # (n, 64)
    label: np.ndarray  # (n,)


class TrainingState(NamedTuple):
    params: hk.Params
    avg_params: hk.Params
    opt_state: optax.OptState


def net_fn(images):
    mlp = hk.Sequential(
        [
            hk.Linear(128),
            jax.nn.relu,
            hk.Linear(64),
            jax.nn.relu,
            hk.Linear(10),
        ]
    )
    return mlp(images)


network = hk.without_apply_rng(hk.transform(net_fn))
optimiser = optax.adam(1e-3)


def loss(params, batch):
    """Cross-entropy classification loss, regularised by L2 weight decay."""
    logits = network.apply(params, batch.image)
    labels = jax.nn.one_hot(batch.label, 10)
    squares = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
    log_likelihood = jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1))
    return -log_likelihood + 1e-4 * 0.5 * squares


@jax.jit
def evaluate(params, batch):
    predictions = network.apply(params, batch.image).argmax(axis=-1)
    return jnp.mean(predictions == batch.label)


@jax.jit
def update(state, batch):
    """Learning rule (stochastic gradient descent)."""
    grads = jax.grad(loss)(state.params, batch)
    updates, opt_state = optimiser.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    # The average of the parameters over the steps is what is evaluated.
    avg_params = optax.incremental_update(params, state.avg_params, step_size=0.01)
    return TrainingState(params, avg_params, opt_state)


digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
initial_params = network.init(jax.random.key(0), images[:1])
state = TrainingState(initial_params, initial_params, optimiser.init(initial_params))

history = []
for epoch in range(args.epochs):
    order = np.random.default_rng(epoch).permutation(1500)
    for start in range(0, 1500 - args.batch_size + 1, args.batch_size):
        rows = order[start : start + args.batch_size]
        state = update(state, Batch(images[rows], labels[rows]))
    accuracy = evaluate(state.avg_params, Batch(images[1500:], labels[1500:]))
    history.append(float(accuracy))
    print(f"epoch {epoch}: accuracy {history[-1]:.2%}")
