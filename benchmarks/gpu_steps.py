"""Steps of one replica on a GPU, decorated beside plain: `make gpu-steps`.

What jdp adds to a step is all that one GPU can show. Each pair starts from the same
state and takes the same batches, in turns; results are compared as well as times.

    python -m benchmarks.gpu_steps --json rows.jsonl
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jdp
from jdp import eager
from jdp.bench import jax_step, kernel
from jdp.bench.channel import StepConfig
from jdp.bench.rows import Rows


class Pair(NamedTuple):
    """A decorated step, and the equivalent plain step."""

    name: str
    decorated: Callable[..., Any]
    plain: Callable[..., Any]
    states: tuple[Any, Any]  # of the two.
    batch: Any
    is_same: bool = True  # whether both do the same arithmetic.


def gpt2_params(dtype, *, layers=12, width=768, vocabulary=50257, context=1024):
    """Returns the parameters of GPT-2 124M; parameters of blocks are stacked."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(0.02 * rng.standard_normal(shape, np.float32), dtype)

    def ones(*shape):
        return jnp.ones(shape, dtype)

    blocks = {
        "norm1": ones(layers, width),
        "qkv": normal(layers, width, 3 * width),
        "out": normal(layers, width, width),
        "norm2": ones(layers, width),
        "up": normal(layers, width, 4 * width),
        "down": normal(layers, 4 * width, width),
    }
    return {
        "tokens": normal(vocabulary, width),
        "positions": normal(context, width),
        "blocks": blocks,
        "norm": ones(width),
    }


def gpt2_loss(params, tokens):
    """Mean cross entropy of the next token; tokens (batch, length + 1), int32."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["tokens"][inputs] + params["positions"][: inputs.shape[1]]

    def norm(x, scale):
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
        return wide.astype(x.dtype) * scale

    def block(x, p):
        batch, length, width = x.shape
        heads = (norm(x, p["norm1"]) @ p["qkv"]).reshape(batch, length, 3, 12, -1)
        q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.reshape(batch, length, width) @ p["out"]
        return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"], None

    x, _ = lax.scan(jax.checkpoint(block), x, params["blocks"])
    logits = (norm(x, params["norm"]) @ params["tokens"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_step(grad_fn, tx):
    """Returns (state, batch) -> (state, loss), the state being (params, opt_state)."""

    def step(state, batch):
        params, opt_state = state
        loss, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def accumulated(loss_fn, count):
    """Returns value_and_grad over `count` micro-batches, by `lax.scan`."""

    def grad_fn(params, batch):
        def one(total, micro):
            found = jax.value_and_grad(loss_fn)(params, micro)
            return jax.tree.map(jnp.add, total, found), None

        split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        total, _ = lax.scan(one, zero, split)
        return jax.tree.map(lambda x: x / count, total)

    return grad_fn


def make_pairs(world, *, is_small=False, has_gpt2=True):
    """Yields the pairs, one at a time; what one holds is freed before the next."""
    if has_gpt2:
        yield _make_gpt2(world, is_small)
    config = StepConfig(2, 8, 8) if is_small else StepConfig(48, 512, 256)
    batch = jdp.global_batch(world, jax_step.make_batch(config, 0))
    loss_fn = jax_step.loss_fn
    sgd, adam = optax.sgd(1e-3), optax.adam(1e-3)

    def pair(name, grad_fn, tx, *, plain_fn=None, plain_tx=None, **options):
        plain_fn = jax.value_and_grad(loss_fn) if plain_fn is None else plain_fn
        plain_tx = tx if plain_tx is None else plain_tx
        return _pair(
            world,
            name,
            (make_step(grad_fn, tx), tx),
            (make_step(plain_fn, plain_tx), plain_tx),
            jax_step.init_params(config),
            batch,
            **options,
        )

    yield pair("48 blocks, sgd", jdp.value_and_grad(loss_fn), sgd)
    yield pair("48 blocks, adam", jdp.value_and_grad(loss_fn), adam)
    cast = jdp.value_and_grad(loss_fn, hook=jdp.hooks.cast(jnp.bfloat16))
    yield pair("48 blocks, cast hook", cast, sgd, is_same=False)
    local = jdp.local_gradients(loss_fn)
    yield pair("48 blocks, zero1(adam)", local, jdp.zero1(adam), plain_tx=adam)
    yield pair(
        "48 blocks, 4 micro-batches",
        jdp.accumulate_gradients(loss_fn, 4),
        sgd,
        plain_fn=accumulated(loss_fn, 4),
    )
    yield pair(
        "48 blocks, 4 shards",
        jdp.value_and_grad(loss_fn),
        sgd,
        plain_fn=accumulated(loss_fn, 4),
        is_same=False,
        num_shards=4,
    )


def _make_gpt2(world, is_small):
    sizes = dict(layers=2, width=48, vocabulary=99, context=16) if is_small else {}
    params = gpt2_params(jnp.bfloat16, **sizes)
    context, vocabulary = params["positions"].shape[0], params["tokens"].shape[0]
    tokens = np.random.default_rng(1).integers(
        0, vocabulary, (2 if is_small else 16, context + 1), np.int32
    )
    adam = optax.adam(1e-3)
    return _pair(
        world,
        "GPT-2, small" if is_small else "GPT-2 124M, bfloat16, adam",
        (make_step(jdp.value_and_grad(gpt2_loss), adam), adam),
        (make_step(jax.value_and_grad(gpt2_loss), adam), adam),
        params,
        jdp.global_batch(world, tokens),
    )


def _pair(world, name, decorated, plain, params, batch, *, is_same=True, **options):
    def make_state(tx):
        placed = jdp.replicate(world, params)
        return jdp.replicate(world, (placed, tx.init(placed)))

    (step, tx), (plain_step, plain_tx) = decorated, plain
    return Pair(
        name,
        jdp.data_parallel(step, world=world, **options),
        jax.jit(plain_step, donate_argnums=0),
        (make_state(tx), make_state(plain_tx)),
        batch,
        is_same,
    )


def measure(pair, *, rounds, steps):
    """Runs both steps in turns; returns a row.

    Steps are started one after another; what is timed is until the last is done.
    """
    run = {"decorated": pair.decorated, "plain": pair.plain}
    states = dict(zip(run, pair.states, strict=True))
    seconds = {name: [] for name in run}
    losses = {}
    for round_index in range(rounds + 1):
        for name in list(run)[:: 1 if round_index % 2 == 0 else -1]:
            start_s = time.perf_counter()
            for _ in range(steps):
                states[name], losses[name] = run[name](states[name], pair.batch)
            jax.block_until_ready((states[name], losses[name]))
            if round_index > 0:
                seconds[name].append((time.perf_counter() - start_s) / steps)
    pairs = zip(seconds["decorated"], seconds["plain"], strict=True)
    return {
        "step": pair.name,
        **{f"{name}_ms": 1e3 * statistics.median(s) for name, s in seconds.items()},
        "over_plain": statistics.median(a / b for a, b in pairs),
        "losses": {name: float(loss) for name, loss in losses.items()},
        "largest_difference": _largest_difference(
            states["decorated"][0], states["plain"][0]
        ),
        "is_same_arithmetic": pair.is_same,
        "rounds_ms": {k: [1e3 * each for each in s] for k, s in seconds.items()},
        "steps": steps,
    }


def _largest_difference(a, b):
    """Returns the largest difference of parameters, relative to a leaf's maximum."""

    def of_leaf(x, y):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return float(np.abs(x - y).max() / np.abs(y).max())

    return max(jax.tree.leaves(jax.tree.map(of_leaf, a, b)))


def measure_eager(rounds):
    """Reduces arrays of the GPU through the eager engine, alone; yields rows."""
    eager.init(jdp.init())
    for size in (1, 1 << 10, 1 << 20, 1 << 24):
        x = jnp.arange(size, dtype=jnp.float32) % 1000
        seconds = []
        for i in range(rounds + 1):
            start_s = time.perf_counter()
            y = jax.block_until_ready(eager.all_reduce(x, name=f"x{size}"))
            if i > 0:
                seconds.append(time.perf_counter() - start_s)
        assert bool(jnp.array_equal(x, y)), size
        place = ", ".join(str(d) for d in getattr(y, "devices", set)())
        us = 1e6 * statistics.median(seconds)
        yield {"eager": size, "us": us, "devices": place, "rounds": rounds}
    eager.shutdown()


def measure_fingerprint(rounds, is_small):
    """Times the digest of the parameters of 48 blocks; returns a row."""
    config = StepConfig(2, 8, 8) if is_small else StepConfig(48, 512, 256)
    params = jax.device_put(jax_step.init_params(config))
    seconds = []
    digests = set()
    for i in range(rounds + 1):
        start_s = time.perf_counter()
        digests.add(str(jdp.fingerprint_state(params)))
        if i > 0:
            seconds.append(time.perf_counter() - start_s)
    assert len(digests) == 1, digests
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    ms = 1e3 * statistics.median(seconds)
    return {"fingerprint_ms": ms, "num_bytes": num_bytes, "rounds": rounds}


def measure_run_ahead(world, is_small):
    """Times until calls return, with a learning rate of as many bytes as a leaf.

    Returns a row: 8 calls return long before their steps are done.
    """
    width, num_calls = 32 if is_small else 4096, 8
    params = {f"w{i}": jnp.eye(width) * 0.5 for i in range(6)} | {"s": jnp.float32(1)}

    def loss_fn(params, x):
        for i in range(6):
            x = jnp.tanh(x @ params[f"w{i}"])
        return (x * params["s"]).sum()

    @jdp.data_parallel(world=world, replicated_argnames="rate")
    def step(params, x, *, rate):
        loss, grads = jdp.value_and_grad(loss_fn)(params, x)
        params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
        return params, jdp.average(loss)

    state, x = jdp.replicate(world, params), jnp.ones((width, width))
    rates = [jdp.replicate(world, np.float32(1e-6)) for _ in range(num_calls)]
    for rate in rates[:3]:
        state, loss = step(state, x, rate=rate)
    jax.block_until_ready(state)
    start_s = time.perf_counter()
    for rate in rates:
        state, loss = step(state, x, rate=rate)
    returned_s = time.perf_counter() - start_s
    jax.block_until_ready((state, loss))
    done_s = time.perf_counter() - start_s
    return {"run_ahead_ms": 1e3 * returned_s, "done_ms": 1e3 * done_s}


def main():
    """Measures all pairs until the limit is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="tiny models, anywhere")
    parser.add_argument("--skip-gpt2", action="store_true")
    parser.add_argument("--limit-s", type=float, default=400.0)
    parser.add_argument("--json", type=pathlib.Path, help="one object a line")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu" and not arguments.small:
        sys.exit(f"There is no GPU here, only {jax.default_backend()}.")
    rows = Rows(arguments.json, arguments.limit_s)
    rows.add(kernel.describe_machine())
    world = jdp.init()
    for row in measure_eager(10 * arguments.rounds):
        rows.add(row)
        print(f"eager all-reduce of {row['eager']} floats: {row['us']:.0f} us")
    row = measure_fingerprint(arguments.rounds, arguments.small)
    rows.add(row)
    print(f"fingerprint of {row['num_bytes']} bytes: {row['fingerprint_ms']:.2f} ms")
    row = measure_run_ahead(world, arguments.small)
    rows.add(row)
    print(f"8 calls return after {row['run_ahead_ms']:.1f} of {row['done_ms']:.1f} ms")
    for pair in make_pairs(
        world, is_small=arguments.small, has_gpt2=not arguments.skip_gpt2
    ):
        row = measure(pair, rounds=arguments.rounds, steps=arguments.steps)
        rows.add(row)
        print(
            f"{row['step']}: {row['decorated_ms']:.3f} ms decorated, "
            f"{row['plain_ms']:.3f} plain, {row['over_plain']:.4f}; parameters differ "
            f"by {row['largest_difference']:.2g}"
        )
        if rows.is_late:
            sys.exit("The limit is over.")


if __name__ == "__main__":
    main()
