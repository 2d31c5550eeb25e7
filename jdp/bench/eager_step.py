"""Processes of `jdp bench eager`: what do they time with the engine?"""

import functools
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import msgspec
import numpy as np

import jdp
from jdp import eager
from jdp.bench import channel, jax_step, named_calls
from jdp.bench import eager as bench
from jdp.bench.channel import StepConfig
from jdp.eager.coordinator.coordinator import Coordinator
from jdp.eager.messages import FromRank, Request, Spec, encode_spec
from jdp.eager.options import CoordinatorOptions
from jdp.trees import tree_paths

_SETTLE_S = 0.2  # until threads of the previous variant sleep.


def make_step_by_name(config: StepConfig, rank: int) -> Callable[[Any, Any], Any]:
    """Returns a step `(params, batch) -> (params, loss)` with an eager average.

    Args:
      config: the model.
      rank: the rank of this process, which has its own order in each step.
    """
    local = jax.jit(jax.value_and_grad(jax_step.loss_fn))
    update = jax.jit(lambda p, g: jax_step.sgd(p, g, config), donate_argnums=0)
    names = tree_paths.leaf_paths(jax_step.init_params(config))
    orders = random.Random(rank)

    def step(params: Any, batch: Any) -> Any:
        loss, grads = local(params, batch)
        leaves, treedef = jax.tree.flatten(grads)
        order = orders.sample(range(len(leaves)), len(leaves))
        handles = {i: eager.all_reduce_async(leaves[i], name=names[i]) for i in order}
        averaged = [eager.synchronize(handles[i]) for i in range(len(leaves))]
        return update(params, jax.tree.unflatten(treedef, averaged)), loss

    return step


def make_steps(world: jdp.World, config: StepConfig) -> dict[str, channel.RunSteps]:
    """Returns the steps by variant; each has run once."""
    compiled = jax_step.make_steps(world, config)
    on_host = jax_step.make_batch(config, world.process_index)
    everywhere = jdp.global_batch(world, on_host)
    here = functools.partial(jax.device_put, device=world.local_devices[0])

    def runner(step: Any, place: Callable[[Any], Any], batch: Any) -> channel.RunSteps:
        state = [place(jax_step.init_params(config))]

        def once() -> None:
            state[0], loss = step(state[0], batch)
            jax.block_until_ready((state[0], loss))

        return named_calls.repeating(once)

    replicate = functools.partial(jdp.replicate, world)
    by_name = make_step_by_name(config, world.process_index)
    return {
        bench.STEP: runner(by_name, here, here(on_host)),
        bench.FLAT: runner(compiled["flat shard_map"], replicate, everywhere),
        bench.DECORATED: runner(compiled["jdp"], replicate, everywhere),
    }


def make_calls() -> dict[str, channel.RunSteps]:
    """Returns calls with numpy arrays, by variant; each has been made before."""

    def call_of(num_bytes: int) -> Callable[[], Any]:
        x = np.zeros(num_bytes // 4, np.float32)
        return lambda: eager.all_reduce(x, name=f"{num_bytes} bytes")

    many, new = named_calls.make_runners(
        lambda x, name: eager.all_reduce_async(x, name=name),
        eager.synchronize,
        [np.zeros(1, np.float32) for _ in range(bench.NUM_NAMES)],
    )
    variants = {
        f"{bench.ALL_REDUCE} {num_bytes}": named_calls.repeating(call_of(num_bytes))
        for num_bytes in bench.NUM_BYTES
    }
    return variants | {bench.MANY: many, bench.MANY_NEW: new}


def time_coordinator(num_ranks: int, num_names: int) -> float:
    """Returns the CPU seconds of one negotiation in which nothing is cached.

    Every rank sends all names to the coordinator, in its own order. The coordinator
    decodes the messages and decides.
    """
    names = [f"layers.{i}.weight" for i in range(num_names)]
    spec = encode_spec(Spec("all_reduce", "float32", (1024,), op="average"))
    requests = [Request(name, spec) for name in names]
    orders = random.Random(0)
    encode = msgspec.msgpack.Encoder().encode
    messages = [
        encode(FromRank(0, tuple(orders.sample(requests, num_names))))
        for _ in range(num_ranks)
    ]
    coordinator = Coordinator(num_ranks, CoordinatorOptions())
    decode = msgspec.msgpack.Decoder(FromRank).decode
    start_s = time.process_time()
    for rank, message in enumerate(messages):
        coordinator.receive(rank, decode(message), now_s=0.0)
    batch = coordinator.decide(now_s=0.0)
    seconds = time.process_time() - start_s
    assert batch is not None
    assert sum(len(response.names) for response in batch.responses) == num_names
    return seconds


def _idle(world: jdp.World, idle_s: float, num_steps: int) -> list[float]:
    """Returns the CPU seconds per second that an engine without work takes.

    The load of the process with an engine, minus the load of the same process without:
    JAX's own threads are never quite idle.
    """
    with_engine = _idle_load(idle_s)
    eager.shutdown()
    without = _idle_load(idle_s)
    eager.init(world)
    return [with_engine - without]


def _idle_load(idle_s: float) -> float:
    """Sleeps; returns the CPU seconds per second of all threads of the process."""
    time.sleep(_SETTLE_S)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    time.sleep(idle_s)
    cpu_s = time.process_time() - start_cpu_s
    return cpu_s / (time.perf_counter() - start_s)


def _coordinate(rank: int, num_steps: int) -> list[float]:
    if rank > 0:  # The others leave a core to rank 0.
        return [0.0]
    return [time_coordinator(bench.NUM_RANKS, bench.NUM_NAMES)]


def main(port: int, config: StepConfig, idle_s: float) -> None:
    """Runs one process."""
    world = jdp.init()
    eager.init(world)
    variants = {
        **make_calls(),
        **make_steps(world, config),
        bench.IDLE: functools.partial(_idle, world, idle_s),
        bench.COORDINATOR: functools.partial(_coordinate, world.process_index),
    }
    channel.serve(port, "jax", world.process_index, variants)
    eager.shutdown()


if __name__ == "__main__":
    driver_port, num_blocks, width, batch_size, idle_ms = map(int, sys.argv[1:])
    main(driver_port, StepConfig(num_blocks, width, batch_size), 1e-3 * idle_ms)
