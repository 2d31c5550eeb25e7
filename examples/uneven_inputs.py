"""Trains although every process has another number of samples, and loses none.

    jdp launch -n 2 examples/uneven_inputs.py

The training digits are distributed unevenly. `jdp.join_batches` continues while any
process has data, and every sample has the same weight, as on one process with all
samples. Two other ways are shown: dropping the samples that are left when the first
process has ended, and padding, where processes with fewer samples start over.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jdp

NUM_TRAIN = 1500
TX = optax.sgd(0.2, momentum=0.9)


def load_data() -> tuple[tuple, tuple]:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16.0).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    train, test = slice(NUM_TRAIN), slice(NUM_TRAIN, None)
    return (images[train], labels[train]), (images[test], labels[test])


def deal_out(num_processes: int, skew: float) -> list[np.ndarray]:
    """Splits samples: each process has `skew` times as many as the one before."""
    shares = skew ** np.arange(num_processes)
    ends = np.rint(NUM_TRAIN * np.cumsum(shares) / shares.sum()).astype(int)
    pairs = itertools.pairwise([0, *ends])
    return [np.arange(first, end) for first, end in pairs]


def batches_of(part: np.ndarray, batch_size: int, seed: list[int]) -> list[np.ndarray]:
    """Returns the samples of one process in batches; the last batch may be smaller."""
    part = np.random.default_rng(seed).permutation(part)
    return [part[k : k + batch_size] for k in range(0, len(part), batch_size)]


def init_params() -> dict[str, np.ndarray]:
    w = np.random.default_rng(0).normal(size=(64, 10)) * 0.1
    return {"w": w.astype(np.float32), "b": np.zeros(10, np.float32)}


def loss_fn(params: dict, batch: tuple, weight: jax.Array) -> jax.Array:
    images, labels = batch
    logits = images @ params["w"] + params["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (losses * weight).sum() / weight.sum()


def update(state: tuple, grads: dict) -> tuple:
    params, opt_state = state
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@jdp.data_parallel
def train_step(state: tuple, batch: tuple, weight: jax.Array) -> tuple:
    grad_fn = jdp.value_and_grad(loss_fn, weight=weight.sum())
    loss, grads = grad_fn(state[0], batch, weight)
    return update(state, grads), {"loss": loss}


@jax.jit
def train_alone(state: tuple, batch: tuple) -> tuple:
    grads = jax.grad(loss_fn)(state[0], batch, jnp.ones(len(batch[1])))
    return update(state, grads)


def join(own: list, others: list[list], world: jdp.World):
    """Continues while any process has data."""
    return jdp.join_batches(own, world=world)


def drop(own: list, others: list[list], world: jdp.World):
    """Takes the full batches that every process has."""
    size = len(own[0][1])
    count = min(sum(len(b) == size for b in batches) for batches in others)
    return ((batch, np.ones(size, np.float32)) for batch in own[:count])


def pad(own: list, others: list[list], world: jdp.World):
    """Starts over until every process has as many full batches as the longest."""
    size = len(own[0][1])
    count = max(map(len, others))
    images, labels = (np.concatenate(x) for x in zip(*own, strict=True))
    for k in range(count):
        again = np.arange(k * size, (k + 1) * size) % len(labels)
        yield (images[again], labels[again]), np.ones(size, np.float32)


def main(epochs: int, batch_size: int, skew: float, seed: int) -> None:
    world = jdp.init()
    train, test = load_data()
    parts = deal_out(world.process_count, skew)
    if batch_size % world.num_local_replicas or not 0 < batch_size <= len(parts[0]):
        raise SystemExit(
            f"--batch-size must be a multiple of {world.num_local_replicas}, from 1 to "
            f"the {len(parts[0])} samples of process 0; got {batch_size}."
        )

    def batches(epoch: int) -> list[list[np.ndarray]]:
        return [
            batches_of(part, batch_size, [seed, epoch, p])
            for p, part in enumerate(parts)
        ]

    params = init_params()
    alone = params, TX.init(params)
    for epoch in range(epochs if world.is_main_process else 0):
        for cuts in itertools.zip_longest(*batches(epoch), fillvalue=np.arange(0)):
            everything = np.concatenate(cuts)
            alone = train_alone(alone, tuple(x[everything] for x in train))

    if world.is_main_process:
        print(f"samples of each process: {', '.join(str(len(p)) for p in parts)}")
        report("one process", alone[0], alone[0], NUM_TRAIN, test)
    for way in (join, drop, pad):
        state = jdp.replicate(world, (params, TX.init(params)))
        num_samples = 0.0
        for epoch in range(epochs):
            everyone = batches(epoch)
            own = [tuple(x[c] for x in train) for c in everyone[world.process_index]]
            for batch, weight in way(own, everyone, world):
                state, _ = train_step(state, batch, weight)
                num_samples += weight.sum()
        total = jdp.global_batch(
            world, np.full(world.num_local_replicas, num_samples / epochs)
        )
        per_epoch = jax.jit(jnp.sum, out_shardings=world.replicated)(total)
        jdp.check_replicas(state, world=world)
        if world.is_main_process:
            mine = jax.tree.map(lambda x: x.addressable_data(0), state[0])
            count = float(per_epoch) / world.num_local_replicas
            report(way.__name__, mine, alone[0], count, test)


def report(name: str, params: dict, alone: dict, count: float, test: tuple) -> None:
    images, labels = test
    right = (images @ params["w"] + params["b"]).argmax(-1) == labels
    off = max(float(abs(params[k] - alone[k]).max()) for k in alone)
    print(
        f"{name:12s}: {count:6.0f} samples an epoch, test accuracy "
        f"{float(right.mean()):.1%}, parameters off by {off:.1e}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of a process")
    parser.add_argument("--skew", type=float, default=3.0, help="of neighbours")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    if not arguments.skew > 0:
        parser.error("--skew must be above 0")
    if arguments.seed < 0:
        parser.error("--seed must be at least 0")
    main(arguments.epochs, arguments.batch_size, arguments.skew, arguments.seed)
