"""`jdp bench overhead`: how much does a decorated step cost beside the bare step?"""

import mmap
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import numpy as np
import rich.console
import rich.table
import typer
from jax.sharding import PartitionSpec

import jdp
from jdp.bench import channel, driver, jax_step, tracing
from jdp.bench.channel import StepConfig
from jdp.replicas import stamps
from jdp.watch import record


def bench_overhead(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of calls.")] = 500,
    tracing_rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of tracing a step.")
    ] = 15,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
) -> None:
    """Measure Python's time per call, and tracing and memory.

    Call: a decorated step with a state of 144 small leaves beside the bare `jax.jit` of
    the same step, on the same arrays, in turns. Memory: the temporary memory that XLA
    reports for the 48-block step on 2 CPU devices, beside the hand-written step with
    one flat buffer. Tracing: the step of a transformer of 24 layers, with and without
    reading the program of the loss for the order of gradients and the use of
    parameters. Record: the entries that a step writes under `jdp launch`.
    """
    channel.check_can_write(json_file)
    world = jdp.init(num_cpu_devices=2)
    result: dict[str, Any] = {
        "call_us": measure_call(world, rounds),
        "plan_10000_leaves_ms": measure_plan(),
        "memory": measure_memory(world),
        "tracing_ms": tracing.measure(world, tracing_rounds),
        "record_us": measure_record(),
    }
    table = rich.table.Table(title=f"jax {jax.__version__}")
    table.add_column("what")
    table.add_column("value", justify="right")
    call, memory = result["call_us"], result["memory"]
    table.add_row("bare call", f"{call['bare']:.1f} µs")
    table.add_row("decorated call", f"{call['decorated']:.1f} µs")
    table.add_row("decorated over bare", f"{call['decorated'] - call['bare']:.1f} µs")
    table.add_row(
        "plan_buckets, 10,000 leaves", f"{result['plan_10000_leaves_ms']:.1f} ms"
    )
    for name in ("flat shard_map", "jdp"):
        table.add_row(f"temporary memory, {name}", f"{memory[name]:,} bytes")
    over = memory["jdp"] - memory["flat shard_map"]
    table.add_row("jdp over flat shard_map", f"{over:,} bytes")
    table.add_row("buffers of one bucket plan", f"{memory['bucket_plan']:,} bytes")
    table.add_row("record of a step", f"{result['record_us']:.2f} µs")
    for what, value in _tracing_rows(result["tracing_ms"]).items():
        table.add_row(what, value)
    rich.console.Console().print(table)
    config = {"rounds": rounds, "tracing_rounds": tracing_rounds}
    driver.write_result(result, config, json_file)


def _tracing_rows(times_ms: dict[str, float]) -> dict[str, str]:
    base = times_ms["without"]
    return {
        "tracing a step of 24 layers, by hand": f"{times_ms['by hand']:.0f} ms",
        "with jdp, not reading the program": f"{base:.0f} ms",
        "with jdp, reading the program": f"{times_ms['with']:.0f} ms",
        "reading, added": f"{times_ms['with'] / base - 1:+.2f} of not reading",
        "gradient_order and used_parameters alone": f"{times_ms['both']:.0f} ms",
        "these two": f"{times_ms['both'] / base:.2f} of not reading",
    }


def measure_call(world: jdp.World, rounds: int) -> dict[str, float]:
    """Returns the median time until a call returns, by step, in microseconds."""
    state = {f"leaf{i}": np.zeros(8, np.float32) for i in range(144)}

    def step(state: Any, batch: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, state), {"n": jdp.average(batch.sum())}

    bare = jax.jit(
        jax.shard_map(
            step,
            mesh=world.mesh,
            in_specs=(PartitionSpec(), PartitionSpec(world.axis_name)),
            out_specs=PartitionSpec(),
        ),
        donate_argnums=0,
    )
    batch = jdp.global_batch(world, np.ones((16, 4), np.float32))
    calls: dict[str, Callable[..., Any]] = {
        "bare": bare,
        "decorated": jdp.data_parallel(step, world=world),
    }
    states = {name: jdp.replicate(world, state) for name in calls}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for name in [*calls] * (rounds + 10):
        start_s = time.perf_counter()
        states[name], metrics = calls[name](states[name], batch)
        seconds[name].append(time.perf_counter() - start_s)
        jax.block_until_ready((states[name], metrics))
    return {name: 1e6 * statistics.median(s[10:]) for name, s in seconds.items()}


def measure_record(num_steps: int = 1000, repeats: int = 20) -> float:
    """Returns the median time for the record's entries of a step, in microseconds."""
    kinds = (
        stamps.STEP_BEGUN,
        stamps.STEP_PLACED,
        stamps.STEP_DISPATCHED,
        stamps.STEP_FINISHED,
    )
    seconds = []
    stamps.set_record(record.RecordWriter(mmap.mmap(-1, record.NUM_BYTES)).write)
    for _ in range(repeats):
        start_s = time.perf_counter()
        for number in range(num_steps):
            for kind in kinds:
                stamps.stamp(kind, number, "train_step")
        seconds.append((time.perf_counter() - start_s) / num_steps)
    stamps.set_record(None)
    return 1e6 * statistics.median(seconds)


def measure_plan(num_leaves: int = 10_000, repeats: int = 9) -> float:
    """Returns the median time of `plan_buckets`, in milliseconds."""
    tree = {
        f"layer{i}": jax.ShapeDtypeStruct((1 + i % 7, 100), np.float32)
        for i in range(num_leaves)
    }
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        jdp.plan_buckets(tree)
        seconds.append(time.perf_counter() - start_s)
    return 1e3 * statistics.median(seconds)


def measure_memory(world: jdp.World) -> dict[str, int]:
    """Returns the temporary memory of each step on one device, in bytes."""
    config = StepConfig(48, 256, 16)
    params = jdp.replicate(world, jax_step.init_params(config))
    batch = jdp.global_batch(world, jax_step.make_batch(config, 0))
    steps = jax_step.make_steps(world, config)
    sizes = {}
    for name in ("jdp", "flat shard_map"):
        memory = steps[name].lower(params, batch).compile().memory_analysis()
        sizes[name] = int(memory.temp_size_in_bytes)
    plan = jdp.plan_buckets(params)
    return {**sizes, "bucket_plan": plan.num_bytes}
