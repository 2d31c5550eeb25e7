"""Trains with optax, evaluates, saves checkpoints, and goes on where it was stopped.

jdp launch -n 2 examples/optax_loop.py --folder run1
"""

import argparse
import hashlib
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import jdp


def init_params(seed: int, widths: tuple[int, ...] = (64, 128, 64, 10)) -> list:
    keys = jax.random.split(jax.random.key(seed), len(widths) - 1)
    init = jax.nn.initializers.he_normal()
    pairs = zip(keys, widths[:-1], widths[1:], strict=True)
    return [{"w": init(k, (a, b)), "b": jnp.zeros(b)} for k, a, b in pairs]


def predict(params: list, images: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params: list, batch: dict) -> jax.Array:
    logits, labels = predict(params, batch["image"]), batch["label"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jdp.replicated
def evaluate(params, batch):
    mistakes = predict(params, batch["image"]).argmax(-1) != batch["label"]
    metrics = {"loss": loss_fn(params, batch), "accuracy": 1 - mistakes.mean()}
    return metrics | {"mistakes": jdp.sum_over_replicas(mistakes.sum())}


def load_data() -> tuple[dict, dict]:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    train = {"image": images[:1500], "label": labels[:1500]}
    return train, {"image": images[1500:], "label": labels[1500:]}


def open_log(folder: pathlib.Path, world: jdp.World):
    """Returns a writer for TensorBoard, if tensorboardX is installed."""
    if not world.is_main_process or importlib.util.find_spec("tensorboardX") is None:
        return None
    import tensorboardX

    return tensorboardX.SummaryWriter(str(folder / "logs"))


def main(args: argparse.Namespace) -> None:
    world = jdp.init()
    train, test = load_data()
    shard = world.shard(train, seed=args.seed, drop_last=True)
    num_batches = shard.num_batches(args.batch_size)  # of an epoch.
    rate = optax.cosine_decay_schedule(4e-3, args.epochs * num_batches)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    @jdp.data_parallel
    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], step_size=0.02)
        return {"params": params, "average": average, "opt": opt}, {"loss": loss}

    params = init_params(args.seed)
    state = {"params": params, "average": params, "opt": tx.init(params)}
    state = jdp.replicate(world, state)
    log = open_log(args.folder, world)
    folder = args.folder.absolute() / "checkpoints"
    keep = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(folder, options=keep) as manager:
        done = manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
            print(f"goes on after step {done}", flush=True)
        for epoch in range(done // num_batches, args.epochs):
            shard.set_epoch(epoch, position=done % num_batches * args.batch_size)
            for batch in shard.batches(args.batch_size):
                state, metrics = step(state, batch)
                done += 1
                if log is not None:
                    log.add_scalar("train/loss", float(metrics["loss"]), done)
                if done % args.save_every == 0:
                    manager.save(done, args=ocp.args.StandardSave(state))
            batches = world.shard(test, shuffle=False).batches(args.batch_size)
            found = evaluate.over(state["average"], batches)
            if log is not None:
                log.add_scalar("test/accuracy", float(found["accuracy"]), done)
            text = f"accuracy {found['accuracy']:.2%}, {found['mistakes']} mistakes"
            if world.is_main_process:
                print(f"step {done}: test loss {found['loss']:.4f}, {text}", flush=True)
    jdp.check_replicas(state, world=world)
    bits = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state))
    print("done: state", hashlib.sha256(bits).hexdigest()[:16])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes")
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
