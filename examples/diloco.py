"""Trains a character model that sends its parameters every 50 steps (DiLoCo).

The text is the source of Python's standard library. The same model is trained on the
same batches by plain data-parallel training first, and what both sent is counted where
it leaves the processes.

jdp launch -n 2 examples/diloco.py
"""

import argparse
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil

import jdp

CONTEXT = 16  # characters from which the next one is predicted.
WIDTHS = (CONTEXT * 32, 256, 256, 128)
NUM_HELD_OUT = 8192  # samples, at most.


def load_text() -> np.ndarray:
    """Returns ASCII codes, uint8 (n,)."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return np.minimum(np.frombuffer(text, np.uint8), 127)


def init_params(seed: int) -> dict:
    """Multi-layer perceptron on embedded characters (Bengio et al., 2003)."""
    rng = np.random.default_rng(seed)
    layers = [
        {
            "w": (rng.normal(size=(a, b)) * np.sqrt(2 / a)).astype(np.float32),
            "b": np.zeros(b, np.float32),
        }
        for a, b in zip(WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]
    characters = rng.normal(size=(128, WIDTHS[0] // CONTEXT)).astype(np.float32)
    return {"characters": characters, "layers": layers}


def loss_fn(params: dict, samples: jax.Array) -> jax.Array:
    """Returns the loss of samples (n, CONTEXT + 1), uint8, for the last character."""
    *hidden, last = params["layers"]
    h = params["characters"][samples[:, :-1]].reshape(len(samples), -1)
    for layer in hidden:
        h = jax.nn.relu(h @ layer["w"] + layer["b"])
    logits = h @ last["w"] + last["b"]
    targets = samples[:, -1].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def main(num_steps: int, period: int, batch_size: int, seed: int) -> None:
    world = jdp.init()
    if batch_size % world.num_replicas:
        raise SystemExit(
            "--batch-size must be a multiple of the number of replicas, "
            f"{world.num_replicas}, got {batch_size}."
        )
    text = load_text()
    split = len(text) * 9 // 10
    params = init_params(seed)
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, num_steps // 10, num_steps)
    tx = optax.adamw(schedule)

    @jdp.data_parallel
    def plain_step(state, samples):
        params, opt_state = state
        _, grads = jdp.value_and_grad(loss_fn)(params, samples)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    # The paper's momentum of 0.9 is for some hundred outer steps, more than these.
    outer = optax.sgd(0.9, momentum=0.5, nesterov=True)
    local = jdp.diloco(tx, period=period, outer=outer)

    # No metrics: averaging them would be a collective in each step.
    @jdp.data_parallel
    def diloco_step(state, samples):
        _, grads = jdp.local_gradients(loss_fn)(state.params.value, samples)
        return local.update(grads, state), {}

    @jdp.data_parallel(donate_state=False)
    def evaluate(params, samples):
        return params, {"loss": loss_fn(params, samples)}

    def draw(rng: np.random.Generator, begin: int, end: int, count: int) -> np.ndarray:
        """Returns this process' part of `count` samples, uint8 (n, CONTEXT + 1)."""
        starts = rng.integers(begin, end - CONTEXT, count)
        mine = np.split(starts, world.process_count)[world.process_index]
        return text[mine[:, None] + np.arange(CONTEXT + 1)]

    def train(name, step, state, params_of):
        rng = np.random.default_rng(seed)
        state, _ = step(state, draw(rng, 0, split, batch_size))  # compiles
        jax.block_until_ready(state)
        sent, start_s = psutil.net_io_counters().bytes_sent, time.perf_counter()
        for _ in range(1, num_steps):
            state, _ = step(state, draw(rng, 0, split, batch_size))
        jax.block_until_ready(state)
        seconds = time.perf_counter() - start_s
        sent = psutil.net_io_counters().bytes_sent - sent
        count = NUM_HELD_OUT - NUM_HELD_OUT % world.num_replicas
        held_out = draw(np.random.default_rng(0), split, len(text), count)
        loss = float(evaluate(params_of(state), held_out)[1]["loss"])
        jdp.check_replicas(params_of(state), world=world)
        if world.is_main_process:
            print(
                f"{name:6}  held-out loss {loss:.4f} after {num_steps} steps, "
                f"{seconds:.0f} s, {sent / 1e6:.1f} MB sent",
                flush=True,
            )
        return loss, sent

    state = jdp.replicate(world, (params, tx.init(params)))
    plain, plain_sent = train("plain", plain_step, state, lambda state: state[0])
    state = local.init(jdp.replicate(world, params))
    loss, sent = train("diloco", diloco_step, state, lambda state: state.outer_params)
    if world.is_main_process:
        print(
            f"done; replicas: {world.num_replicas}; DiLoCo's loss differs from plain "
            f"training's by {loss / plain - 1:+.2%}, with "
            f"{sent / max(plain_sent, 1):.3f} of its bytes"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--period", type=int, default=50, help="steps between sends")
    parser.add_argument("--batch-size", type=int, default=512, help="of all replicas")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for option in ("steps", "period", "batch_size"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1")
    if arguments.seed < 0:
        parser.error("--seed must be at least 0")
    main(arguments.steps, arguments.period, arguments.batch_size, arguments.seed)
