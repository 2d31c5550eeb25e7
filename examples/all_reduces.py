"""Trains one network with several all-reduces, which give the same numbers.

jdp launch -n 2 examples/all_reduces.py
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from jdp import collectives

ALL_REDUCES = {
    "psum": None,
    "auto": "auto",
    "ring": collectives.ring_all_reduce,
    "halving-doubling": collectives.halving_doubling_all_reduce,
    "butterfly": collectives.butterfly_all_reduce,
    "tree": functools.partial(collectives.reduce_broadcast_all_reduce, pattern="tree"),
}


def init_params(width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w0": rng.normal(size=(16, width)).astype(np.float32) / 4,
        "w1": rng.normal(size=(width, 1)).astype(np.float32) / np.sqrt(width),
    }


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w0"]) @ params["w1"] - y) ** 2)


def main(num_steps: int, width: int, explain: bool) -> None:
    world = jdp.init()
    all_reduces = dict(ALL_REDUCES)
    if explain and world.is_main_process:
        # For each bucket, why it does not take the custom kernel of GPUs.
        all_reduces["auto"] = collectives.AutoAllReduce(explain=print)
    rng = np.random.default_rng([1, world.process_index])  # its own samples.
    x = rng.normal(size=(64 * world.num_local_replicas, 16)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))
    tx = optax.adam(0.01)

    def train(name: str, get_grads) -> None:
        @jdp.data_parallel
        def step(state, x, y):
            params, opt_state = state
            loss, grads = get_grads(params, x, y)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

        params = init_params(width)
        state, metrics = step((params, tx.init(params)), x, y)  # compiles.
        jax.block_until_ready(state)
        start_s = time.perf_counter()
        for _ in range(num_steps):
            state, metrics = step(state, x, y)
        loss = float(metrics["loss"])
        step_ms = 1e3 * (time.perf_counter() - start_s) / num_steps
        jdp.check_replicas(state, world=world)
        if world.is_main_process:
            print(f"{name:18} loss {loss:.5f}  {step_ms:7.2f} ms per step", flush=True)

    for name, all_reduce in all_reduces.items():
        train(name, jdp.value_and_grad(loss_fn, all_reduce=all_reduce))
    if world.num_replicas & (world.num_replicas - 1) == 0:
        # Adasum is between a sum and a mean, as in Horovod: the loss differs.
        def get_adasum(params, x, y):
            loss, grads = jdp.local_gradients(loss_fn)(params, x, y)
            return loss, collectives.adasum(grads)

        train("adasum", get_adasum)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--explain", action="store_true", help="what 'auto' decides")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.width < 1:
        parser.error("--steps and --width must be at least 1")
    main(arguments.steps, arguments.width, arguments.explain)
