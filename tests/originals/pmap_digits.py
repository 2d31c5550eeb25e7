"""Trains a residual network of Flax with `pmap` on handwritten digits."""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax import linen as nn
from flax.training import train_state
from jax import lax
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()


class ResNet(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x, train=True):
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(
            nn.BatchNorm, not train, momentum=0.9, axis_name="batch"
        )
        x = nn.relu(norm()(conv(self.width, (3, 3))(x)))
        for strides in (1, 2):
            y = nn.relu(norm()(conv(self.width, (3, 3), strides)(x)))
            y = norm(scale_init=nn.initializers.zeros)(conv(self.width, (3, 3))(y))
            x = nn.relu(y + conv(self.width, (1, 1), strides)(x))
        return nn.Dense(10)(jnp.mean(x, axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def compute_metrics(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    metrics = {"loss": losses.mean(), "accuracy": jnp.mean(logits.argmax(-1) == labels)}
    return lax.pmean(metrics, axis_name="batch")


def train_step(state, batch, learning_rate_fn):
    def loss_fn(params):
        logits, new_model_state = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return losses.mean() + 1e-4 * 0.5 * penalty, (new_model_state, logits)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (_, (new_model_state, logits)), grads = grad_fn(state.params)
    grads = lax.pmean(grads, axis_name="batch")
    metrics = compute_metrics(logits, batch["label"])
    metrics["learning_rate"] = learning_rate_fn(state.step)
    state = state.apply_gradients(
        grads=grads, batch_stats=new_model_state["batch_stats"]
    )
    return state, metrics


def shard(batch):
    """Splits a batch over the devices: (n, ...) -> (devices, n / devices, ...)."""
    shape = (jax.local_device_count(), -1)
    return jax.tree.map(lambda x: x.reshape(shape + x.shape[1:]), batch)


digits = load_digits()
images = (digits.images[..., None] / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
model = ResNet()
variables = model.init(jax.random.key(0), images[:1], train=False)
schedule = optax.cosine_decay_schedule(0.05, args.epochs * (1500 // args.batch_size))
state = TrainState.create(
    apply_fn=model.apply,
    params=variables["params"],
    batch_stats=variables["batch_stats"],
    tx=optax.sgd(schedule, momentum=0.9, nesterov=True),
)
state = jax_utils.replicate(state)
train_step = functools.partial(train_step, learning_rate_fn=schedule)
p_train_step = jax.pmap(train_step, axis_name="batch")

history = []
for epoch in range(args.epochs):
    order = np.random.default_rng(epoch).permutation(1500)
    for start in range(0, 1500 - args.batch_size + 1, args.batch_size):
        rows = order[start : start + args.batch_size]
        batch = {"image": images[rows], "label": labels[rows]}
        batch = shard(batch)
        state, metrics = p_train_step(state, batch)
    metrics = jax_utils.unreplicate(metrics)
    history.append((float(metrics["loss"]), float(metrics["accuracy"])))
    print("epoch {}: loss {:.4f}, accuracy {:.2%}".format(epoch, *history[-1]))
