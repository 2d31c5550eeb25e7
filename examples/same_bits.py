"""Trains with shards, and prints a digest of the parameters.

The digest is the same on any number of replicas that divides the number of shards, as
one process with several devices or as several processes:

python examples/same_bits.py
python examples/same_bits.py --devices 4
jdp launch -n 2 examples/same_bits.py
"""

import argparse
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jdp

WIDTHS = (64, 128, 128, 10)


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Returns images (1797, 64) in [0, 1] and labels (1797,)."""
    digits = load_digits()
    return (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)


def init_params() -> list[dict]:
    rng = np.random.default_rng(0)
    return [
        {
            "w": (rng.normal(size=(i, o)) / np.sqrt(i)).astype(np.float32),
            "b": np.zeros(o, np.float32),
        }
        for i, o in zip(WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]


def loss_fn(params: list[dict], x: jax.Array, labels: jax.Array, key: jax.Array):
    for i, layer in enumerate(params[:-1]):
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
        keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
        x = jnp.where(keep, x / 0.9, 0)
    logits = x @ params[-1]["w"] + params[-1]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=1, help="devices per process")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    world = jdp.init(num_cpu_devices=args.devices, num_shards=args.shards)
    tx = jdp.zero1(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))

    @jdp.data_parallel(replicated_argnames="key")
    def train_step(state: tuple, x: jax.Array, labels: jax.Array, *, key: jax.Array):
        params, opt_state = state
        loss, grads = jdp.local_gradients(loss_fn)(params, x, labels, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), {"loss": jdp.average(loss)}

    params = jdp.replicate(world, init_params())
    state = params, tx.init(params)
    shard = world.shard(load_data(), seed=1, drop_last=True)
    number = 0
    for epoch in range(args.epochs):
        shard.set_epoch(epoch)
        for x, labels in shard.batches(16 * args.shards):
            key = jax.random.fold_in(jax.random.key(2), number)
            state, metrics = train_step(state, x, labels, key=key)
            number += 1
        if world.is_main_process:
            print(f"epoch {epoch}: loss {float(metrics['loss'])!r}")
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state[0]):
        digest.update(np.asarray(leaf).tobytes())
    if world.is_main_process:
        replicas = f"{world.num_replicas} replica{'s' * (world.num_replicas > 1)}"
        print(f"parameters on {replicas}: {digest.hexdigest()[:32]}")


if __name__ == "__main__":
    main()
