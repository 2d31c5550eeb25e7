"""Trains a small network on handwritten digits, data-parallel.

jdp launch -n 2 examples/digits.py
"""

import argparse
import time

import jax
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


def main(epochs: int, batch_size: int, seed: int, plot: str | None) -> None:
    world = jdp.init()
    train_x, train_y, test_x, test_y = load_data()
    if not 0 < batch_size <= len(train_y) or batch_size % world.num_replicas:
        raise SystemExit(
            "--batch-size must be a multiple of the number of replicas, "
            f"{world.num_replicas}, from 1 to {len(train_y)}; got {batch_size}."
        )
    graph, params = nnx.split(Net(nnx.Rngs(seed)))
    train = world.shard((train_x, train_y), seed=seed, drop_last=True)
    test = world.shard((test_x, test_y), shuffle=False)
    num_steps = train.num_batches(batch_size)  # of an epoch.
    tx = optax.adam(optax.cosine_decay_schedule(4e-3, epochs * num_steps))

    def loss_fn(params, images, labels):
        logits = nnx.merge(graph, params)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jdp.data_parallel
    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jdp.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    @jdp.replicated
    def evaluate(params, batch):
        images, labels = batch
        right = nnx.merge(graph, params)(images).argmax(-1) == labels
        return {"accuracy": right.mean()}

    # The values of process 0, everywhere.
    state = jdp.replicate(world, (params, tx.init(params)))
    losses = []
    with Progress(disable=not world.is_main_process) as progress:
        bar = progress.add_task("training", total=epochs * num_steps)
        for epoch in range(1, epochs + 1):
            train.set_epoch(epoch)
            start_s = time.perf_counter()
            for batch in train.batches(batch_size):
                state, metrics = train_step(state, batch)
                losses.append(metrics["loss"])
                progress.advance(bar)
            loss = np.mean(jax.device_get(losses[-num_steps:]))
            speed = num_steps * batch_size / (time.perf_counter() - start_s)
            accuracy = float(
                evaluate.over(state[0], test.batches(batch_size))["accuracy"]
            )
            if world.is_main_process:
                progress.console.print(
                    f"epoch {epoch:2d}  loss {loss:.4f}  {speed:6.0f} images/s  "
                    f"test accuracy {accuracy:.2%}",
                    highlight=False,
                )
    jdp.check_replicas(state, world=world)  # raises if a bit differs
    if world.is_main_process:
        equal = f"replicas: {world.num_replicas}, bitwise equal"
        print(f"done; {equal}; test accuracy: {accuracy:.2%}")
        if plot is not None:
            draw(jax.device_get(losses), plot)


def draw(losses: list, path: str) -> None:
    from matplotlib import pyplot

    pyplot.semilogy(range(1, len(losses) + 1), losses)
    pyplot.gca().set(xlabel="step", ylabel="loss of all replicas")
    pyplot.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=64, help="of all replicas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", help="draw the loss of each step into this file")
    arguments = parser.parse_args()
    if arguments.epochs < 1 or arguments.seed < 0:
        parser.error("--epochs must be at least 1, and --seed at least 0")
    main(**vars(arguments))
