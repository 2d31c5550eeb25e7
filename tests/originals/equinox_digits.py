"""Trains a convolutional network of Equinox on handwritten digits."""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 16, kernel_size=3, padding=1, key=keys[0]),
            jax.nn.relu,
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            eqx.nn.Conv2d(16, 32, kernel_size=3, padding=1, key=keys[1]),
            jax.nn.relu,
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            jnp.ravel,
            eqx.nn.Linear(2 * 2 * 32, 10, key=keys[2]),
        ]

    def __call__(self, image):
        x = image
        for layer in self.layers:
            x = layer(x)
        return x


def predict(model, images):
    return jax.vmap(model)(images)


def loss_fn(model, images, labels):
    logits = predict(model, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
def make_step(model, opt_state, images, labels):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, images, labels)
    updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    model = eqx.apply_updates(model, updates)
    return model, opt_state, loss


@eqx.filter_jit
def evaluate(model, images, labels):
    return jnp.mean(predict(model, images).argmax(-1) == labels)


digits = load_digits()
images = (digits.images[:, None] / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
model = CNN(jax.random.key(0))
optim = optax.adamw(3e-3)
opt_state = optim.init(eqx.filter(model, eqx.is_array))

history = []
for epoch in range(args.epochs):
    order = np.random.default_rng(epoch).permutation(1500)
    losses = []
    for start in range(0, 1500 - args.batch_size + 1, args.batch_size):
        batch = order[start : start + args.batch_size]
        model, opt_state, loss = make_step(
            model, opt_state, images[batch], labels[batch]
        )
        losses.append(loss)
    accuracy = evaluate(model, images[1500:], labels[1500:])
    history.append((np.mean(losses), float(accuracy)))
    print("epoch {}: loss {:.4f}, accuracy {:.2%}".format(epoch, *history[-1]))
