"""Processes of `jdp bench collectives`: which all-reduces do they time?"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

import jax
import numpy as np

import jdp
from jdp import collectives
from jdp.bench import channel
from jdp.collectives import measurement
from jdp.collectives.cost_model import ALGORITHMS
from jdp.replicas import mesh

FIT = "fit_links: "
NONE = "no all-reduce"
ALONE = "shared_memory, alone"
CHAIN_CHUNKS = 8


def make_all_reduces(
    world: jdp.World,
) -> dict[str, tuple[jdp.World, Callable[..., jax.Array]]]:
    """Returns the all-reduces that can run on the replicas, each with its world."""
    n = world.num_replicas
    found = {name: algorithm.all_reduce for name, algorithm in ALGORITHMS.items()}
    found["chain"] = functools.partial(found["chain"], num_chunks=CHAIN_CHUNKS)
    if n & (n - 1):
        del found["adasum"]
    del found["hierarchical"]
    by_name = {name: (world, fn) for name, fn in found.items()}
    by_name["psum"] = (world, collectives.psum_all_reduce)
    if world.num_local_replicas == 1 and jax.default_backend() == "cpu":
        by_name["shared_memory"] = (world, collectives.shared_memory_all_reduce)
        by_name["tcp"] = (world, collectives.tcp_all_reduce)
    if n % 2 == 0 and n > 2:
        names = ("node", "data")
        on_nodes = dataclasses.replace(
            world,
            mesh=mesh.make_mesh(list(world.mesh.devices.flat), names, num_nodes=2),
            axis_name=names,
        )
        by_name["hierarchical"] = (on_nodes, collectives.hierarchical_all_reduce)
    return by_name


def main(port: int, num_devices: int, sizes: Sequence[int]) -> None:
    """Runs one process."""
    world = jdp.init(num_cpu_devices=num_devices)
    all_reduces = make_all_reduces(world)
    all_reduces[NONE] = (world, lambda x, _: x)
    buffers: dict[tuple[int, jdp.World], jax.Array] = {}

    def find_buffer(num_bytes: int, on: jdp.World) -> jax.Array:
        if (num_bytes, on) not in buffers:
            size = num_bytes // 4
            local = np.zeros(size * on.num_local_replicas, np.float32)
            buffers[num_bytes, on] = jax.make_array_from_process_local_data(
                on.split, local, (size * on.num_replicas,)
            )
        return buffers[num_bytes, on]

    def runner(
        on: jdp.World, num_bytes: int, make: Callable[[], Callable], count: int
    ) -> channel.RunSteps:
        program: list[Callable] = []

        def once() -> None:
            x = program[0](find_buffer(num_bytes, on))
            buffers[num_bytes, on] = jax.block_until_ready(x)

        def run(num_steps: int) -> list[float]:
            if not program:
                program.append(make())
                once()  # compiles
                once()
            return [s / count for s in channel.time_steps(once, num_steps)]

        return run

    variants: dict[str, channel.RunSteps] = {}
    # A job with `all_reduce="auto"` has the same measurements before its first step.
    fitted = [size for size in measurement.SIZES if size <= max(sizes)]
    links = collectives.fit_links(world, sizes=fitted or measurement.SIZES[-1:])
    for curve in links.measured:
        for num_bytes, seconds in curve.points:
            name = f"{FIT}{curve.algorithm} {num_bytes}"
            variants[name] = functools.partial(_repeat, seconds)
    for num_bytes in sizes:
        count = measurement.num_repeats(num_bytes)
        for name, (on, all_reduce) in all_reduces.items():
            make = functools.partial(measurement.make_program, on, all_reduce, count)
            variants[f"{name} {num_bytes}"] = runner(on, num_bytes, make, count)
        if "shared_memory" in all_reduces:
            make = functools.partial(_alone, world)
            variants[f"{ALONE} {num_bytes}"] = runner(world, num_bytes, make, 1)
    channel.serve(port, "jax", world.process_index, variants)


def _repeat(seconds: float, num_steps: int) -> list[float]:
    return [seconds] * num_steps


def _alone(world: jdp.World) -> Callable[[jax.Array], jax.Array]:
    """Returns a compiled call that only reduces its argument, in place."""
    spec = jax.sharding.PartitionSpec(world.axis_names)
    mapped = jax.shard_map(
        lambda x: collectives.shared_memory_all_reduce(x, world.axis_name),
        mesh=world.mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [int(size) for size in sys.argv[3:]])
