"""Processes of `jdp bench step` that run JAX: what do they time?"""

import mmap
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

import jdp
from jdp.bench import channel
from jdp.bench.channel import StepConfig


def init_params(config: StepConfig) -> list[dict[str, np.ndarray]]:
    """Returns three leaves per block: w (d, d), b (d,), s (d,); float32."""
    rng = np.random.default_rng(0)
    d = config.width
    return [
        {
            "w": (rng.normal(size=(d, d)) / np.sqrt(d)).astype(np.float32),
            "b": np.zeros(d, np.float32),
            "s": np.ones(d, np.float32),
        }
        for _ in range(config.num_blocks)
    ]


def make_batch(config: StepConfig, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets of one process, (batch_size, d) each, float32."""
    rng = np.random.default_rng(1 + rank)
    shape = (config.batch_size, config.width)
    x, y = rng.normal(size=(2, *shape)).astype(np.float32)
    return x, y


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Mean squared error of the stack of blocks."""
    h, y = batch
    for p in params:
        h = h + jnp.tanh(h @ p["w"] + p["b"]) * p["s"] * 0.1
    return jnp.mean((h - y) ** 2)


def sgd(params: Any, grads: Any, config: StepConfig) -> Any:
    """Returns the parameters after one step of plain gradient descent."""
    return jax.tree.map(lambda p, g: p - config.learning_rate * g, params, grads)


def make_steps(world: jdp.World, config: StepConfig) -> dict[str, Any]:
    """Returns the compiled steps by name, each `(params, batch) -> (params, loss)`."""
    steps = _make_jdp_steps(world, config) | _make_other_steps(world, config)
    if jax.default_backend() == "cpu":
        steps["two copies alone"] = _make_copies(config)
    return steps


def _make_jdp_steps(world: jdp.World, config: StepConfig) -> dict[str, Any]:
    def plain(params: Any, batch: Any) -> Any:
        loss, grads = jdp.value_and_grad(loss_fn)(params, batch)
        return sgd(params, grads, config), loss

    def find_unused(params: Any, batch: Any) -> Any:
        grad_fn = jdp.value_and_grad(loss_fn, find_unused=True)
        (loss, grads), _ = grad_fn(params, batch)
        return sgd(params, grads, config), loss

    def psum(params: Any, batch: Any) -> Any:
        loss, grads = jdp.value_and_grad(loss_fn, all_reduce=None)(params, batch)
        return sgd(params, grads, config), loss

    steps = {"jdp": plain, "jdp, find_unused": find_unused, "jdp, psum": psum}
    return {k: jdp.data_parallel(step, world=world) for k, step in steps.items()}


def _make_copies(config: StepConfig) -> Any:
    """Returns no step, but copies: of the gradients into shared memory, and back."""
    own = np.concatenate([x.ravel() for x in jax.tree.leaves(init_params(config))])
    shared = np.frombuffer(mmap.mmap(-1, own.nbytes), own.dtype)

    def copy(params: Any, batch: Any) -> Any:
        np.copyto(shared, own)
        np.copyto(own, shared)
        return params, np.float32(0)

    return copy


def _make_other_steps(world: jdp.World, config: StepConfig) -> dict[str, Any]:
    axis = world.axis_name

    def partitioned(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return sgd(params, grads, config), loss

    def psum_leaf(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        loss, grads = lax.pmean((loss, grads), axis)
        return sgd(params, grads, config), loss

    def flat(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        buffer, unravel = ravel_pytree(grads)
        grads = unravel(lax.pmean(buffer, axis))
        return sgd(params, grads, config), lax.pmean(loss, axis)

    def none(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return sgd(params, grads, config), loss

    def sharded(fn: Callable[..., Any]) -> Any:
        return jax.jit(
            jax.shard_map(
                fn,
                mesh=world.mesh,
                in_specs=(PartitionSpec(), PartitionSpec(axis)),
                out_specs=PartitionSpec(),
                check_vma=False,
            ),
            donate_argnums=0,
        )

    return {
        "partitioned": jax.jit(
            partitioned,
            in_shardings=(world.replicated, world.split),
            out_shardings=world.replicated,
            donate_argnums=0,
        ),
        "psum a leaf": sharded(psum_leaf),
        "flat shard_map": sharded(flat),
        "no communication": sharded(none),
    }


def main(port: int, config: StepConfig) -> None:
    """Runs one process."""
    world = jdp.init()
    steps = {
        name: (step, jdp.replicate(world, init_params(config)))
        for name, step in make_steps(world, config).items()
    }
    serve(port, world, config, steps)


def serve(
    port: int,
    world: jdp.World,
    config: StepConfig,
    steps: Mapping[str, tuple[Any, Any]],
) -> None:
    """Compiles steps, and times them for the driver at `port` until it hangs up.

    Args:
      port: the port of the driver on this host.
      world: the job.
      config: the model, which also defines the batch of all steps.
      steps: by name, a step `(state, batch) -> (state, loss)` and its first state.
    """
    batch = jdp.global_batch(world, make_batch(config, world.process_index))

    def runner(step: Any, first: Any) -> channel.RunSteps:
        state = [first]

        def once() -> None:
            state[0], loss = step(state[0], batch)
            jax.block_until_ready((state[0], loss))

        once()  # compiles
        return lambda num_steps: channel.time_steps(once, num_steps)

    variants = {name: runner(*made) for name, made in steps.items()}
    channel.serve(port, "jax", world.process_index, variants)


if __name__ == "__main__":
    main(int(sys.argv[1]), StepConfig(*map(int, sys.argv[2:5])))
