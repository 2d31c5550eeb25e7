"""Processes of `jdp bench zero1`: which steps do they time?"""

import sys
from typing import Any

import optax

import jdp
from jdp import collectives
from jdp.bench import jax_step
from jdp.bench.channel import StepConfig


def make_step(
    world: jdp.World, config: StepConfig, tx: optax.GradientTransformation
) -> Any:
    """Returns the step `(state, batch) -> (state, loss)`, and its first state."""

    def step(state: Any, batch: Any) -> Any:
        params, opt = state
        loss, grads = jdp.local_gradients(jax_step.loss_fn)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    params = jdp.replicate(world, jax_step.init_params(config))
    state = jdp.replicate(world, (params, tx.init(params)))
    return jdp.data_parallel(step, world=world), state


def main(port: int, config: StepConfig) -> None:
    """Runs one process."""
    world = jdp.init()
    adam = optax.adam(1e-3)
    all_reduce, halves = (
        collectives.shared_memory_all_reduce,
        collectives.SHARED_MEMORY,
    )
    optimizers = {
        "Adam, shared memory": jdp.distributed_optimizer(adam, all_reduce=all_reduce),
        "zero1, shared memory": jdp.zero1(adam, halves=halves, world=world),
        "Adam": jdp.distributed_optimizer(adam, all_reduce=None),
        "zero1": jdp.zero1(adam, halves=collectives.PSUM, world=world),
    }
    steps = {name: make_step(world, config, tx) for name, tx in optimizers.items()}
    jax_step.serve(port, world, config, steps)


if __name__ == "__main__":
    main(int(sys.argv[1]), StepConfig(*map(int, sys.argv[2:5])))
