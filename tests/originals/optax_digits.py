"""Trains a multi-layer perceptron with optax on handwritten digits."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()


def init_params(key, widths=(64, 128, 64, 10)):
    init = jax.nn.initializers.glorot_normal()
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {"w": init(k, (a, b)), "b": jnp.zeros(b)}
        for k, a, b in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def predict(params, images):
    x = images
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params, batch):
    logits = predict(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
    ).mean()


optimizer = optax.adam(optax.exponential_decay(2e-3, 100, 0.9))


@jax.jit
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, loss


@jax.jit
def evaluate(params, batch):
    return jnp.mean(predict(params, batch["image"]).argmax(-1) == batch["label"])


digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
train = {"image": images[:1500], "label": labels[:1500]}
test = {"image": images[1500:], "label": labels[1500:]}
params = init_params(jax.random.key(0))
opt_state = optimizer.init(params)

history = []
for epoch in range(args.epochs):
    order = np.random.default_rng(epoch).permutation(1500)
    losses = []
    for start in range(0, 1500 - args.batch_size + 1, args.batch_size):
        rows = order[start : start + args.batch_size]
        batch = jax.tree.map(lambda x, rows=rows: x[rows], train)
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(loss)
    history.append((np.mean(losses), float(evaluate(params, test))))
    print("epoch {}: loss {:.4f}, accuracy {:.2%}".format(epoch, *history[-1]))
