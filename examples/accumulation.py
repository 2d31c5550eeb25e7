"""Trains with batches that are cut into micro-batches, reduced once per step.

Shows that the step equals the step of the whole batch, and how much memory it saves.

jdp launch -n 2 examples/accumulation.py --micro-batches 10
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jdp

WIDTHS = (64, 128, 128, 128, 10)


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Returns images (1797, 64) in [0, 1] and labels (1797,), in random order."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(np.float32)
    return images, digits.target[order].astype(np.int32)


def init_params(seed: int) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [
        {
            "w": (rng.normal(size=(i, o)) / np.sqrt(i)).astype(np.float32),
            "b": np.zeros(o, np.float32),
        }
        for i, o in zip(WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]


def logits_of(params: list[dict], images: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params: list[dict], images: jax.Array, labels: jax.Array) -> tuple:
    logits = logits_of(params, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), {"accuracy": jnp.mean(logits.argmax(-1) == labels)}


def make_step(grad_fn, tx: optax.GradientTransformation):
    @jdp.data_parallel(donate_state=False)
    def train_step(state: tuple, images: jax.Array, labels: jax.Array) -> tuple:
        params, opt_state = state
        (loss, metrics), grads = grad_fn(params, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), {"loss": loss, **metrics}

    return train_step


def main(epochs: int, batch_size: int, micro_batches: int, seed: int) -> None:
    world = jdp.init()
    images, labels = load_data()
    part = batch_size // world.process_count
    if batch_size % world.num_replicas or not 0 < batch_size <= 1500:
        raise SystemExit(
            "--batch-size must be a multiple of the number of replicas, "
            f"{world.num_replicas}, from 1 to 1500; got {batch_size}."
        )
    if not 1 <= micro_batches <= batch_size // world.num_replicas:
        raise SystemExit(
            "--micro-batches must be from 1 to the samples of a replica, "
            f"{batch_size // world.num_replicas}; got {micro_batches}."
        )
    tx = optax.adam(3e-3)
    accumulated = jdp.accumulate_gradients(loss_fn, micro_batches, has_aux=True)
    step = make_step(accumulated, tx)
    whole = make_step(jdp.value_and_grad(loss_fn, has_aux=True), tx)

    params = init_params(seed)
    state = jdp.replicate(world, (params, tx.init(params)))
    mine = slice(world.process_index * part, (world.process_index + 1) * part)
    first = images[:batch_size][mine], labels[:batch_size][mine]
    for name, candidate in {"micro-batches": step, "whole batch": whole}.items():
        compiled = candidate.lower(state, *first).compile()
        num_bytes = compiled.memory_analysis().temp_size_in_bytes
        if world.is_main_process:
            print(f"{name}: {num_bytes / 1e6:.1f} MB of temporary memory a replica")
    one, other = step(state, *first)[0], whole(state, *first)[0]
    differences = jax.tree.map(lambda a, b: float(abs(a - b).max()), one[0], other[0])
    if world.is_main_process:
        print(f"one step differs by {max(jax.tree.leaves(differences)):.1e} at most")

    metrics = {}
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(1500)
        for k in range(1500 // batch_size):
            chosen = order[k * batch_size : (k + 1) * batch_size][mine]
            state, metrics = step(state, images[chosen], labels[chosen])
    jdp.check_replicas(state, world=world)
    if world.is_main_process:
        params = jax.tree.map(lambda x: x.addressable_data(0), state[0])
        right = logits_of(params, images[1500:]).argmax(-1) == labels[1500:]
        print(
            f"done: loss {float(metrics['loss']):.4f}, test accuracy "
            f"{float(right.mean()):.1%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=1500, help="of all replicas")
    parser.add_argument("--micro-batches", type=int, default=10, help="of a replica")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    if arguments.seed < 0:
        parser.error("--seed must be at least 0")
    main(
        arguments.epochs, arguments.batch_size, arguments.micro_batches, arguments.seed
    )
