"""Processes of `jdp bench local`: which steps do they time?"""

import sys
from typing import Any

import optax

import jdp
from jdp.bench import jax_step
from jdp.bench.channel import StepConfig
from jdp.optimizers.local_training import LocalTraining


def make_local_step(world: jdp.World, config: StepConfig, local: LocalTraining) -> Any:
    """Returns the step `(state, batch) -> (state, {})`, and its first state."""

    def step(state: Any, batch: Any) -> Any:
        _, grads = jdp.local_gradients(jax_step.loss_fn)(state.params.value, batch)
        return local.update(grads, state), {}

    params = jdp.replicate(world, jax_step.init_params(config))
    return jdp.data_parallel(step, world=world), local.init(params)


def make_plain_step(world: jdp.World, config: StepConfig) -> Any:
    """Returns a step that averages gradients, and its first state."""

    def step(params: Any, batch: Any) -> Any:
        # Over gloo, as in the other variants, so that the bytes can be counted.
        grad_fn = jdp.value_and_grad(jax_step.loss_fn, all_reduce=None)
        _, grads = grad_fn(params, batch)
        return jax_step.sgd(params, grads, config), {}

    params = jdp.replicate(world, jax_step.init_params(config))
    return jdp.data_parallel(step, world=world), params


def main(port: int, config: StepConfig) -> None:
    """Runs one process."""
    world = jdp.init()
    sgd = optax.sgd(config.learning_rate)
    ways = {
        "no communication": jdp.local_sgd(sgd, period=1_000_000, world=world),
        "diloco": jdp.diloco(sgd, period=1, world=world),
        "diloco, delay=1": jdp.diloco(sgd, period=1, delay=1, world=world),
    }
    steps = {name: make_local_step(world, config, way) for name, way in ways.items()}
    steps["data-parallel"] = make_plain_step(world, config)
    jax_step.serve(port, world, config, steps)


if __name__ == "__main__":
    main(int(sys.argv[1]), StepConfig(*map(int, sys.argv[2:5])))
