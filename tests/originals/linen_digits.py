"""Trains a convolutional network of Flax linen on handwritten digits."""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, *, training: bool):
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(not training, momentum=0.9)(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Dropout(rate=0.025, deterministic=not training)(x)
        x = nn.Conv(32, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(not training, momentum=0.9)(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))  # flatten
        x = nn.relu(nn.Dense(64)(x))
        x = nn.Dropout(rate=0.1, deterministic=not training)(x)
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any
    dropout_key: jax.Array


def cross_entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


@jax.jit
def train_step(state, batch):
    dropout_key = jax.random.fold_in(state.dropout_key, state.step)

    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            training=True,
            mutable=["batch_stats"],
            rngs={"dropout": dropout_key},
        )
        return cross_entropy(logits, batch["label"]), (logits, updates)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (logits, updates)), grads = grad_fn(state.params)
    state = state.apply_gradients(grads=grads)
    state = state.replace(batch_stats=updates["batch_stats"])
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    return state, {"loss": loss, "accuracy": accuracy}


@jax.jit
def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["image"], training=False)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    return {"loss": cross_entropy(logits, batch["label"]), "accuracy": accuracy}


digits = load_digits()
images = (digits.images[..., None] / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
test_batch = {"image": images[1500:], "label": labels[1500:]}

model = CNN()
variables = model.init(jax.random.key(0), images[:1], training=False)
state = TrainState.create(
    apply_fn=model.apply,
    params=variables["params"],
    batch_stats=variables["batch_stats"],
    dropout_key=jax.random.key(1),
    tx=optax.sgd(0.1, momentum=0.9),
)
history = []
for epoch in range(args.epochs):
    order = np.random.default_rng(epoch).permutation(1500)
    for start in range(0, 1500 - args.batch_size + 1, args.batch_size):
        batch = order[start : start + args.batch_size]
        state, train = train_step(
            state, {"image": images[batch], "label": labels[batch]}
        )
    test = eval_step(state, test_batch)
    history.append((train, test))
    print(
        f"epoch {epoch}: loss {train['loss']:.4f}, accuracy {train['accuracy']:.2%}; "
        f"test loss {test['loss']:.4f}, accuracy {test['accuracy']:.2%}"
    )
