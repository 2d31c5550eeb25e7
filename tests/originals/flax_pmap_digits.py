"""Trains a network with batch norm and dropout on handwritten digits."""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, serialization
from flax import linen as nn
from flax.training import common_utils, train_state
from jax import lax
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64, help="of all devices")
parser.add_argument("--checkpoint", default="checkpoint.msgpack")
args = parser.parse_args()


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for width in (128, 64):
            x = nn.Dense(width, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.Dropout(0.2, deterministic=not train)(nn.relu(x))
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any


def create_train_state(key):
    net = Net()
    variables = net.init(key, jnp.zeros((1, 64)), train=False)
    return TrainState.create(
        apply_fn=net.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.05, momentum=0.9),
    )


def train_step(state, batch, dropout_rng):
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            mutable=["batch_stats"],
            rngs={"dropout": dropout_rng},
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), (logits, updates)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (logits, updates)), grads = grad_fn(state.params)
    grads = lax.pmean(grads, axis_name="batch")
    accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
    metrics = lax.pmean({"loss": loss, "accuracy": accuracy}, axis_name="batch")
    state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
    return state, metrics


def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["image"], train=False)
    return {"accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}


cross_replica_mean = jax.pmap(lambda x: lax.pmean(x, "batch"), axis_name="batch")


def sync_batch_stats(state):
    return state.replace(batch_stats=cross_replica_mean(state.batch_stats))


def batches(epoch):
    order = np.random.default_rng(epoch).permutation(1500)
    for start in range(0, 1500 - args.batch_size + 1, args.batch_size):
        rows = order[start : start + args.batch_size]
        yield common_utils.shard({"image": images[rows], "label": labels[rows]})


digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
test = {"image": images[1500:], "label": labels[1500:]}
state = jax_utils.replicate(create_train_state(jax.random.key(0)))
dropout_rngs = common_utils.shard_prng_key(jax.random.key(1))
p_train_step = jax.pmap(train_step, axis_name="batch", donate_argnums=(0,))
eval_step = jax.jit(eval_step)

for epoch in range(args.epochs):
    losses = []
    for batch in jax_utils.prefetch_to_device(batches(epoch), 2):
        state, metrics = p_train_step(state, batch, dropout_rngs)
        losses.append(float(jax_utils.unreplicate(metrics)["loss"]))
    state = sync_batch_stats(state)
    accuracy = eval_step(jax_utils.unreplicate(state), test)["accuracy"]
    print(f"epoch {epoch} | loss {np.mean(losses):.6f} | accuracy {accuracy:.4f}")
with open(args.checkpoint, "wb") as file:
    file.write(serialization.to_bytes(jax_utils.unreplicate(state)))
