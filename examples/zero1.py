"""Trains with an optimizer state that is spread over the replicas.

With --checkpoint it goes on from where it ended, also on another number of replicas.

jdp launch -n 2 examples/zero1.py --checkpoint /tmp/digits
jdp launch -n 3 examples/zero1.py --checkpoint /tmp/digits
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import jdp

WIDTHS = (64, 512, 512, 10)


def init_params(seed: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "w": (rng.normal(size=(a, b)) / np.sqrt(a)).astype(np.float32),
            "b": np.zeros(b, np.float32),
        }
        for a, b in zip(WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]


def logits_of(params: list[dict[str, jax.Array]], images: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ last["w"] + last["b"]


def loss_fn(params, images, labels) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits_of(params, images), labels
    )
    return losses.mean()


def local_bytes(tree) -> int:
    """Returns the number of bytes that one device of this process holds."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)


def restore(folder: pathlib.Path, new: dict) -> dict:
    """Returns the state of a checkpoint, on the replicas of this job."""
    num_replicas = int((folder / "num_replicas").read_text())
    with ocp.StandardCheckpointer() as checkpointer:
        like = jdp.checkpoint_template(new, num_replicas=num_replicas)
        saved = checkpointer.restore(folder / "state", like)
    return jdp.reshard(saved, like=new)


def save(folder: pathlib.Path, state: dict, world: jdp.World) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state, force=True)
    if world.is_main_process:
        (folder / "num_replicas").write_text(str(world.num_replicas))


def main(num_steps: int, batch_size: int, checkpoint: pathlib.Path | None) -> None:
    world = jdp.init()
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    # Weights decay, biases do not; the norm is the global norm of all gradients.
    decayed = jax.tree.map(lambda x: x.ndim == 2, init_params(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=decayed))
    zero = jdp.zero1(tx)

    @jdp.data_parallel
    def step(state, images, labels):
        loss, grads = jdp.local_gradients(loss_fn)(state["params"], images, labels)
        updates, opt = zero.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "step": state["step"] + 1}, {"loss": loss}

    params = jdp.replicate(world, init_params(0))
    state = {"params": params, "opt": zero.init(params), "step": jnp.zeros((), int)}
    state = jdp.replicate(world, state)
    whole, part = local_bytes(tx.init(params)), local_bytes(state["opt"])
    if checkpoint is not None and (checkpoint / "num_replicas").exists():
        state = restore(checkpoint, state)
    begin = int(state["step"])
    if world.is_main_process:
        print(
            f"step {begin}: a replica holds {part:,} bytes of the optimizer state, "
            f"of {whole:,}"
        )
    loss = np.nan
    for k in range(begin, begin + num_steps):
        batch = np.random.default_rng(k).integers(
            0, 1500, (world.num_replicas, batch_size)
        )
        mine = np.split(batch, world.process_count)[world.process_index].ravel()
        state, metrics = step(state, images[mine], labels[mine])
        loss = float(metrics["loss"])
    jdp.check_replicas(state, world=world)
    if checkpoint is not None:
        save(checkpoint, state, world)
    predicted = logits_of(jax.device_get(state["params"]), images[1500:]).argmax(-1)
    if world.is_main_process:
        accuracy = np.mean(predicted == labels[1500:])
        print(
            f"done: step {begin + num_steps}, replicas: {world.num_replicas}, "
            f"loss {loss:.4f}, test accuracy {accuracy:.2%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="of a replica")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="a folder")
    arguments = parser.parse_args()
    for option in ("steps", "batch_size"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1")
    folder = arguments.checkpoint
    if folder is not None:
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
    main(arguments.steps, arguments.batch_size, folder)
