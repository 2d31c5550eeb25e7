"""Processes of `jdp bench shards`: which steps do they time?"""

import sys
from typing import Any

import jdp
from jdp.bench import jax_step
from jdp.bench.channel import StepConfig

_MICRO_BATCHES = 4


def make_steps(world: jdp.World, config: StepConfig) -> dict[str, Any]:
    """Returns the steps by name, each `(params, batch) -> (params, loss)`."""

    def plain(params: Any, batch: Any) -> Any:
        loss, grads = jdp.value_and_grad(jax_step.loss_fn)(params, batch)
        return jax_step.sgd(params, grads, config), loss

    def accumulated(params: Any, batch: Any) -> Any:
        grad_fn = jdp.accumulate_gradients(jax_step.loss_fn, _MICRO_BATCHES)
        loss, grads = grad_fn(params, batch)
        return jax_step.sgd(params, grads, config), loss

    def of_shards(count: int) -> Any:
        return jdp.data_parallel(plain, world=world, num_shards=count)

    n = world.num_replicas
    return {
        "plain": jdp.data_parallel(plain, world=world),
        "one shard per replica": of_shards(n),
        "micro-batches": jdp.data_parallel(accumulated, world=world),
        "four shards per replica": of_shards(_MICRO_BATCHES * n),
    }


def main(port: int, config: StepConfig) -> None:
    """Runs one process."""
    world = jdp.init()
    steps = {
        name: (step, jdp.replicate(world, jax_step.init_params(config)))
        for name, step in make_steps(world, config).items()
    }
    jax_step.serve(port, world, config, steps)


if __name__ == "__main__":
    main(int(sys.argv[1]), StepConfig(*map(int, sys.argv[2:5])))
