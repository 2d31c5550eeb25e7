"""Trains on handwritten digits with collectives that have names, as with Horovod.

    jdp launch -n 3 examples/eager.py

Each process has another number of samples and makes its gradients on its own. They
are averaged one by one, each under its name, in another order on every process.
"""

import argparse
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jdp
from jdp import eager

NUM_TRAIN = 1500


def load_data() -> tuple[tuple, tuple]:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    train, test = slice(NUM_TRAIN), slice(NUM_TRAIN, None)
    return (images[train], labels[train]), (images[test], labels[test])


def init_params(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {"w0": (64, 32), "b0": (32,), "w1": (32, 10), "b1": (10,)}
    return {k: jnp.asarray(0.2 * rng.normal(size=s)) for k, s in shapes.items()}


def logits_of(params: dict, images: jax.Array) -> jax.Array:
    h = jnp.tanh(images @ params["w0"] + params["b0"])
    return h @ params["w1"] + params["b1"]


@jax.jit
def local_gradients(params: dict, images: jax.Array, labels: jax.Array) -> tuple:
    def loss_fn(params: dict) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits_of(params, images), labels).mean()

    return jax.value_and_grad(loss_fn)(params)


def average(grads: dict, rng: random.Random) -> dict:
    """Averages gradients by name, in any order."""
    names = rng.sample(list(grads), len(grads))
    handles = {n: eager.all_reduce_async(grads[n], name=f"grad/{n}") for n in names}
    return {name: eager.synchronize(handles[name]) for name in grads}


def own_batches(rank: int, size: int, batch_size: int, rng: random.Random) -> list:
    """Full batches of a process: rank 1 has twice as many as rank 0, and so on."""
    ends = NUM_TRAIN * np.cumsum(np.arange(size + 1)) // (size * (size + 1) // 2)
    mine = list(range(ends[rank], ends[rank + 1]))
    rng.shuffle(mine)
    starts = range(0, len(mine) - batch_size + 1, batch_size)
    return [mine[k : k + batch_size] for k in starts]


def main(epochs: int, batch_size: int, seed: int) -> None:
    eager.init(jdp.init())
    rank, size = eager.rank(), eager.size()
    rng = random.Random(f"{seed} {rank}")
    (images, labels), (test_images, test_labels) = load_data()

    # A Python value that only rank 0 has, here the settings.
    settings = {"learning_rate": 5e-3, "epochs": epochs} if rank == 0 else None
    settings = eager.broadcast_object(settings)
    tx = optax.adam(settings["learning_rate"])

    @jax.jit
    def update(params: dict, opt_state: tuple, grads: dict) -> tuple:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = init_params(seed + rank)  # different on every process ...
    params = eager.broadcast_parameters(params)  # ... and now as on rank 0.
    opt_state, loss = tx.init(params), jnp.zeros(())
    for epoch in range(settings["epochs"]):
        for batch in own_batches(rank, size, batch_size, rng):
            loss, grads = local_gradients(params, images[batch], labels[batch])
            params, opt_state = update(params, opt_state, average(grads, rng))
        # A process without batches contributes zeros, until all processes are here. The
        # last process has made all steps.
        last = eager.join()
        params = eager.broadcast_parameters(params, root=last)
        opt_state = eager.broadcast_optimizer_state(opt_state, root=last)
        loss = eager.all_reduce(loss, name="loss")
        if rank == 0:
            print(f"epoch {epoch}: loss {float(loss):.3f}, the last was rank {last}")

    # Each tests a part; one process set has the even ranks, another the odd ranks.
    right = logits_of(params, test_images[rank::size]).argmax(-1)
    right = (right == test_labels[rank::size]).sum()
    total = eager.all_reduce(right, op="sum", name="right")
    if rank == 0:
        print(f"test accuracy {int(total) / len(test_labels):.1%}")
    if size == 1:
        return
    sets = [eager.add_process_set(range(first, size, 2)) for first in (0, 1)]
    mine = sets[rank % 2]
    total = eager.all_reduce(right, op="sum", name="right", process_set=mine)
    if mine.rank() == 0:
        print(f"ranks {list(mine.ranks)} have {int(total)} right")

    # A mistake raises on all processes, and all can continue.
    try:
        eager.all_reduce(np.zeros(2 + rank), name="mistake")
    except RuntimeError as error:
        print(f"rank {rank} heard: {error}")
    eager.barrier()
    eager.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="of a process")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error("--epochs must be at least 1")
    if not 1 <= arguments.batch_size <= 100:
        parser.error("--batch-size must be from 1 to 100")
    if arguments.seed < 0:
        parser.error("--seed must be at least 0")
    main(arguments.epochs, arguments.batch_size, arguments.seed)
