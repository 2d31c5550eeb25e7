"""Processes of `jdp bench join`: which loops do they time?"""

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import jax

import jdp
from jdp.bench import channel
from jdp.bench.channel import StepConfig
from jdp.bench.jax_step import init_params, loss_fn, make_batch, sgd

PLAIN = "plain loop"


def weighted_loss_fn(params: Any, batch: Any, weight: jax.Array) -> jax.Array:
    """Returns the loss of `jdp bench step`, averaged with the weights of samples."""
    errors = jax.vmap(lambda *sample: loss_fn(params, sample))(*batch)
    return (errors * weight).sum() / weight.sum()


def make_steps(world: jdp.World, config: StepConfig) -> dict[str, Any]:
    """Returns steps by name, each `(params, *batches) -> (params, loss)`."""

    def plain(params: Any, batch: Any) -> Any:
        loss, grads = jdp.value_and_grad(loss_fn)(params, batch)
        return sgd(params, grads, config), loss

    def weighted(params: Any, batch: Any, weight: jax.Array) -> Any:
        grad_fn = jdp.value_and_grad(weighted_loss_fn, weight=weight.sum())
        loss, grads = grad_fn(params, batch, weight)
        return sgd(params, grads, config), loss

    return {
        PLAIN: jdp.data_parallel(plain, world=world),
        "join_batches": jdp.data_parallel(weighted, world=world),
        "Join": jdp.data_parallel(plain, world=world),
    }


def main(port: int, config: StepConfig) -> None:
    """Runs one process."""
    world = jdp.init()
    batches = itertools.repeat(make_batch(config, world.process_index))
    steps = make_steps(world, config)
    loops: dict[str, Iterator[tuple[Any, ...]]] = {
        PLAIN: zip(batches),
        "join_batches": jdp.join_batches(batches, world=world),
        "Join": zip(batches),
    }

    def runner(name: str) -> channel.RunSteps:
        state = [jdp.replicate(world, init_params(config))]

        def once() -> None:
            state[0], loss = steps[name](state[0], *next(loops[name]))
            jax.block_until_ready((state[0], loss))

        once()  # compiles
        return lambda num_steps: channel.time_steps(once, num_steps)

    with jdp.Join([steps["Join"]]):
        variants = {name: runner(name) for name in steps}
        channel.serve(port, "jax", world.process_index, variants)


if __name__ == "__main__":
    main(int(sys.argv[1]), StepConfig(*map(int, sys.argv[2:5])))
