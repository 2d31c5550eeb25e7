"""Processes of `jdp bench step` with mpi4jax: which step do they time?"""

import sys
from typing import Any

import jax
import mpi4jax
from jax.flatten_util import ravel_pytree
from mpi4py import MPI

from jdp.bench import channel, jax_step
from jdp.bench.channel import StepConfig


def main(port: int, config: StepConfig) -> None:
    """Runs one process; `mpirun` starts it."""
    comm = MPI.COMM_WORLD

    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(jax_step.loss_fn)(params, batch)
        buffer, unravel = ravel_pytree(grads)
        total = mpi4jax.allreduce(buffer, op=MPI.SUM, comm=comm)
        grads = unravel(total / comm.size)
        return jax_step.sgd(params, grads, config), loss

    batch = jax_step.make_batch(config, comm.rank)
    state = [jax_step.init_params(config)]

    def once() -> None:
        state[0], loss = step(state[0], batch)
        jax.block_until_ready((state[0], loss))

    once()  # compiles

    def run(num_steps: int) -> list[float]:
        return channel.time_steps(once, num_steps)

    channel.serve(port, "mpi4jax", comm.rank, {"mpi4jax flat": run})


if __name__ == "__main__":
    main(int(sys.argv[1]), StepConfig(*map(int, sys.argv[2:5])))
