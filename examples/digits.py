"""Trains a small network on handwritten digits, data-parallel.

jdp launch -n 2 examples/digits.py
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import Progress
from sklearn.datasets import load_digits

import jdp


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.dense = nnx.Linear(2 * 2 * 32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.conv1(images)), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        return self.dense(x.reshape(x.shape[0], -1))


def load_data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns images (n, 8, 8, 1) in [0, 1] and labels (n,), for training and test."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, ..., None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def main(epochs: int, batch_size: int, seed: int) -> None:
    world = jdp.init()
    train_x, train_y, test_x, test_y = load_data()
    if not 0 < batch_size <= len(train_y) or batch_size % world.num_replicas:
        raise SystemExit(
            f"--batch-size must be a multiple of the {world.num_replicas} replicas, "
            f"from 1 to {len(train_y)}; got {batch_size}."
        )
    graph, params = nnx.split(Net(nnx.Rngs(seed)))
    num_steps = len(train_y) // batch_size  # of an epoch; the rest is left out.
    tx = optax.adam(optax.cosine_decay_schedule(4e-3, epochs * num_steps))

    def loss_fn(params, images, labels):
        logits = nnx.merge(graph, params)(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    @jdp.data_parallel
    def train_step(state, images, labels):
        params, opt_state = state
        loss, grads = jdp.value_and_grad(loss_fn)(params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    @jdp.data_parallel(donate_state=False)
    def count_correct(params, images, labels, is_real):
        right = nnx.merge(graph, params)(images).argmax(-1) == labels
        return params, {"correct": jnp.sum(right * is_real)}

    def test_accuracy(params) -> float:
        # Padded so that it divides among the replicas; padding does not count.
        padding = -len(test_y) % world.num_replicas
        arrays = (test_x, test_y, np.ones(len(test_y), np.float32))
        padded = [np.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1)) for a in arrays]
        _, metrics = count_correct(params, *[my_part(a) for a in padded])
        return float(metrics["correct"]) * world.num_replicas / len(test_y)

    def my_part(array: np.ndarray) -> np.ndarray:
        return np.split(array, world.process_count)[world.process_index]

    # The values of process 0, everywhere.
    state = jdp.replicate(world, (params, tx.init(params)))
    accuracy = 0.0
    with Progress(disable=not world.is_main_process) as progress:
        bar = progress.add_task("training", total=epochs * num_steps)
        for epoch in range(1, epochs + 1):
            order = np.random.default_rng([seed, epoch]).permutation(len(train_y))
            start_s = time.perf_counter()
            losses = []
            for k in range(num_steps):
                batch = my_part(order[k * batch_size : (k + 1) * batch_size])
                state, metrics = train_step(state, train_x[batch], train_y[batch])
                losses.append(metrics["loss"])
                progress.advance(bar)
            loss = np.mean(jax.device_get(losses))
            speed = num_steps * batch_size / (time.perf_counter() - start_s)
            accuracy = test_accuracy(state[0])
            if world.is_main_process:
                progress.console.print(
                    f"epoch {epoch:2d}  loss {loss:.4f}  {speed:6.0f} images/s  "
                    f"test accuracy {accuracy:.2%}",
                    highlight=False,
                )
    jdp.check_replicas(state, world=world)  # raises if a bit differs
    if world.is_main_process:
        print(
            f"done: {world.num_replicas} replicas, bitwise equal; "
            f"test accuracy {accuracy:.2%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=64, help="of all replicas")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    if arguments.seed < 0:
        parser.error("--seed must be at least 0")
    main(arguments.epochs, arguments.batch_size, arguments.seed)
