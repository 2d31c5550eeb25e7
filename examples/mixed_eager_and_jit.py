"""Runs a compiled step among collectives that have names, in any order.

    jdp launch -n 2 examples/mixed_eager_and_jit.py

A compiled step communicates, and so do metrics of the batches, on the host. Each
process asks for them in another order; all run them in one.
"""

import argparse
import random

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jdp
from jdp import eager

TX = optax.sgd(0.2, momentum=0.9)


def loss_fn(params: dict, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = images @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jdp.data_parallel
def train_step(state: tuple, images: jax.Array, labels: jax.Array) -> tuple:
    params, opt_state = state
    loss, grads = jdp.value_and_grad(loss_fn)(params, images, labels)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


METRICS = {
    "seen": (lambda images, labels: np.bincount(labels, minlength=10), "sum"),
    "mean": (lambda images, labels: images.mean(), "average"),
    "max": (lambda images, labels: images.max(), "max"),
}


def begin(name: str, state: tuple, batch: tuple) -> eager.Handle:
    if name == "step":
        return eager.submit_async(train_step, state, *batch)
    metric, op = METRICS[name]
    return eager.all_reduce_async(metric(*batch), name=name, op=op)


def main(steps: int, batch_size: int, seed: int) -> None:
    world = jdp.init()
    eager.init(world)
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    rng = np.random.default_rng([seed, world.process_index])  # its own samples,
    orders = random.Random(world.process_index)  # and its own orders.

    params = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    state = jdp.replicate(world, (params, TX.init(params)))
    num_seen = np.zeros(10, int)
    metrics, found = {}, {}
    for _ in range(steps):
        chosen = rng.integers(0, len(labels), size=batch_size)
        batch = images[chosen], labels[chosen]
        names = orders.sample(["step", *METRICS], 4)
        handles = {name: begin(name, state, batch) for name in names}
        found = {name: eager.synchronize(handles[name]) for name in names}
        state, metrics = found["step"]
        num_seen += found["seen"]
    jdp.check_replicas(state, world=world)
    if world.is_main_process:
        print(f"labels of {num_seen.sum()} samples: {num_seen.tolist()}")
        print(f"brightness {found['mean']:.3f} on average, {found['max']:.3f} at most")
        print(f"replicas: {world.num_replicas}, loss: {float(metrics['loss']):.3f}")
    eager.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="of a process")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    if arguments.batch_size < 1:
        parser.error("--batch-size must be at least 1")
    if arguments.seed < 0:
        parser.error("--seed must be at least 0")
    main(arguments.steps, arguments.batch_size, arguments.seed)
