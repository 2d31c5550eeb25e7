"""Trains on handwritten digits with parameter servers.

    jdp launch --servers 1 --workers 2 examples/parameter_server.py --mode bounded

The same script runs in servers and workers. Servers hold the parameters and update them
with what workers push; worker 0 shows the accuracy at the end.
"""

import argparse
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from jdp import parameter_server

NUM_TRAIN = 1500
MODES = {
    "sync": parameter_server.sync(),
    "backup": parameter_server.sync(backup=1),
    "async": parameter_server.asynchronous(),
    "bounded": parameter_server.bounded(staleness=4),
}


def load_data() -> tuple[tuple, tuple]:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    train, test = slice(NUM_TRAIN), slice(NUM_TRAIN, None)
    return (images[train], labels[train]), (images[test], labels[test])


def init_params(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"w0": (64, 32), "b0": (32,), "w1": (32, 10), "b1": (10,)}
    return {k: (0.2 * rng.normal(size=s)).astype("f4") for k, s in shapes.items()}


def logits_of(params: dict, images: jax.Array) -> jax.Array:
    h = jnp.tanh(images @ params["w0"] + params["b0"])
    return h @ params["w1"] + params["b1"]


@jax.jit
def gradients(params: dict, batch: tuple) -> tuple:
    def loss_fn(params: dict) -> jax.Array:
        images, labels = batch
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits_of(params, images), labels).mean()

    return jax.value_and_grad(loss_fn)(params)


def own_batches(data: tuple, index: int, size: int, epochs: int, batch_size: int):
    """Batches of a worker: its share of the samples, in an order of its own."""
    images, labels = (x[index::size] for x in data)
    rng = np.random.default_rng(index)
    for _ in range(epochs):
        order = rng.permutation(len(labels))
        for k in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[k : k + batch_size]
            yield images[chosen], labels[chosen]


def main(mode: str, epochs: int, batch_size: int, slow_s: float) -> None:
    place = parameter_server.Place.from_environ()
    params = init_params(seed=0)
    if place.role == "server":
        # Updates made from old parameters count for less.
        tx = parameter_server.scale_by_staleness(optax.adam(5e-3), power=0.5)
        parameter_server.Server(params, tx, mode=MODES[mode]).serve()
        return
    train, (images, labels) = load_data()
    num_workers = place.num_workers or 1
    batches = own_batches(train, place.index, num_workers, epochs, batch_size)
    with parameter_server.Worker(params) as worker:
        start_s, losses = time.perf_counter(), []
        for loss in worker.steps(gradients, batches):
            losses.append(loss)
            if place.index == num_workers - 1:
                time.sleep(slow_s)
        worker.flush()
        params = worker.pull()
        seconds = time.perf_counter() - start_s
        print(
            f"worker {place.index}: {len(losses)} steps in {seconds:.1f} s, "
            f"loss {float(losses[-1]):.3f}, {worker.counts}"
        )
        if place.index == 0:
            right = (logits_of(params, images).argmax(-1) == labels).mean()
            print(f"{worker.mode}: test accuracy {float(right):.1%}")


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="of a worker")
    parser.add_argument(
        "--slow-s", type=float, default=0.0, help="seconds that the last worker sleeps"
    )
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    if not 1 <= arguments.batch_size <= 100:
        parser.error("--batch-size must be from 1 to 100")
    if not 0 <= arguments.slow_s <= 10:
        parser.error("--slow-s must be from 0 to 10")
    main(arguments.mode, arguments.epochs, arguments.batch_size, arguments.slow_s)
