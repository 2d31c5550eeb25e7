"""Trains one trunk with two heads; each replica uses one head per step.

Every replica draws the task of a step, digit or parity, on its own. A head that no
replica used in a step keeps its parameters and its Adam state bit for bit.

jdp launch -n 2 examples/unused_branch.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jdp

TASKS = {"digit": 10, "parity": 2}  # classes of each head.
HIDDEN = 64


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Returns images (1797, 64) in [0, 1] and digits (1797,), in random order."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(np.float32)
    return images, digits.target[order].astype(np.int32)


def init_params(seed: int) -> dict:
    rng = np.random.default_rng(seed)

    def dense(num_in: int, num_out: int) -> dict:
        w = rng.normal(size=(num_in, num_out)) / np.sqrt(num_in)
        return {"w": w.astype(np.float32), "b": np.zeros(num_out, np.float32)}

    heads = {task: dense(HIDDEN, size) for task, size in TASKS.items()}
    return {"trunk": dense(64, HIDDEN), "heads": heads}


def logits_of(params: dict, task: str, images: jax.Array) -> jax.Array:
    h = jnp.tanh(images @ params["trunk"]["w"] + params["trunk"]["b"])
    head = params["heads"][task]
    return h @ head["w"] + head["b"]


def loss_fn(params: dict, batch: dict) -> jax.Array:
    def task_loss(task: str, labels: jax.Array) -> jax.Array:
        logits = logits_of(params, task, batch["images"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    return jax.lax.cond(  # runs one of them; which one differs by replica.
        batch["is_parity"][0],
        lambda: task_loss("parity", batch["digits"] % 2),
        lambda: task_loss("digit", batch["digits"]),
    )


def accuracies(params: dict, images: np.ndarray, digits: np.ndarray) -> dict:
    labels = {"digit": digits, "parity": digits % 2}
    return {
        task: float((logits_of(params, task, images).argmax(-1) == labels[task]).mean())
        for task in TASKS
    }


def main(steps: int, seed: int, share_of_parity: float) -> None:
    world = jdp.init()
    images, digits = load_data()
    train, test = slice(0, 1500), slice(1500, None)
    tx = jdp.skip_unused(optax.adamw(5e-3, weight_decay=1e-3))

    @jdp.data_parallel
    def train_step(state: tuple, batch: dict) -> tuple:
        params, opt_state = state
        grad_fn = jdp.value_and_grad(loss_fn, find_unused=True)
        (loss, grads), used = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, used=used)
        metrics = {
            "loss": loss,
            "used": {task: used["heads"][task]["w"] for task in TASKS},
        }
        return (optax.apply_updates(params, updates), opt_state), metrics

    rng = np.random.default_rng([seed, world.process_index])  # its own samples.
    params = init_params(seed)
    state = jdp.replicate(world, (params, tx.init(params)))
    num_local = world.num_local_replicas
    num_used = dict.fromkeys(TASKS, 0)
    for _ in range(steps):
        chosen = rng.integers(0, 1500, size=32 * num_local)
        is_parity = rng.random(num_local) < share_of_parity
        batch = {
            "images": images[train][chosen],
            "digits": digits[train][chosen],
            "is_parity": np.repeat(is_parity, 32),  # 32 samples per replica.
        }
        state, metrics = train_step(state, batch)
        for task in TASKS:
            num_used[task] += int(metrics["used"][task])
    jdp.check_replicas(state, world=world)
    if not world.is_main_process:
        return
    params, opt_state = jax.tree.map(lambda x: x.addressable_data(0), state)
    found = accuracies(params, images[test], digits[test])
    for task in TASKS:
        adam = opt_state.leaf_states[f"['heads']['{task}']['w']"][0]
        print(
            f"{task}: used in {num_used[task]} of {steps} steps, Adam counts "
            f"{int(adam.count)}; test accuracy {found[task]:.1%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--share-of-parity", type=float, default=0.25, help="0 to 1 (default 0.25)"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    if arguments.seed < 0:
        parser.error("--seed must be at least 0")
    if not 0 <= arguments.share_of_parity <= 1:
        parser.error("--share-of-parity must be from 0 to 1")
    main(arguments.steps, arguments.seed, arguments.share_of_parity)
