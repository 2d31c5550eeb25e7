"""`jdp bench kernel`: how fast is the custom all-reduce on the GPUs of this host?"""

import datetime
import json
import pathlib
import statistics
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import rich.console
import rich.table
import typer

import jdp
from jdp.bench import channel, kernel_times, tune
from jdp.bench.channel import StepConfig
from jdp.bench.collectives import parse_numbers, parse_size
from jdp.bench.kernel_times import COPY, Kernel
from jdp.bench.rows import Rows
from jdp.collectives import measurement
from jdp.collectives.pallas import choice, gpu_topology, tuning


def bench_kernel(
    replicas: Annotated[
        str,
        typer.Option(help="Numbers of replicas; the share of one of them is timed."),
    ] = "2,8",
    sizes: Annotated[
        str, typer.Option(help="Buffers, such as 64k,8m (KiB and MiB).")
    ] = "64k,1m,8m,64m",
    blocks: Annotated[
        str, typer.Option(help="Thread blocks at most, such as 66,132.")
    ] = "66,132",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over everything.")] = 11,
    width: Annotated[
        int, typer.Option(min=1, help="Width of the step's 24 layers.")
    ] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Samples of the step.")] = 1024,
    limit_s: Annotated[
        float, typer.Option(min=1, help="Seconds after which no kernel is begun.")
    ] = 420.0,
    json_file: Annotated[
        pathlib.Path | None,
        typer.Option("--json", help="Write results here, one per line, as they come."),
    ] = None,
) -> None:
    """Time the kernels of the custom all-reduce.

    On one GPU: one replica's share of the work, with its peers' buffers in the same
    memory. This is a lower bound of an all-reduce, without NVLink and without waiting.
    Beside it are the time to move the bytes at the bandwidth of a copy, an empty
    kernel, and a reduction by XLA that moves the same bytes. The decorated step of one
    replica is compared to the plain jitted step. With several GPUs, the all-reduces
    themselves are timed beside NCCL.
    """
    counts = parse_numbers(replicas, 2, 8, "--replicas")
    limits = parse_numbers(blocks, 1, 256, "--blocks")
    num_bytes = [parse_size(text) for text in sizes.split(",")]
    if jax.default_backend() != "gpu":
        text = f"jdp bench: there is no GPU here, only {jax.default_backend()}."
        typer.echo(text, err=True)
        raise typer.Exit(1)
    channel.check_can_write(json_file)
    world = jdp.init()
    kernels = _make_kernels(num_bytes, counts, limits)
    rows = Rows(json_file, limit_s)
    config = StepConfig(24, width, batch)
    machine = describe_machine() | {"rounds": rounds, "step_config": list(config)}
    rows.add({"machine": machine})
    one = tune.take(world, 1)
    seconds = kernel_times.time_steps(one, config, rounds=rounds, steps=20)
    step = summarize_step(seconds)
    rows.add({"step": step})
    alone = _time_alone(kernels, rounds, rows)
    together = _time_replicas(world, rounds) if world.num_replicas > 1 else []
    for row in together:
        rows.add({"replicas": row})
    result = {"alone": alone, "step": step, "replicas": together, "machine": machine}
    show(result, rich.console.Console())
    if len(alone) < len(kernels):
        typer.echo(f"After {limit_s:.0f} s {len(alone)} of {len(kernels)} were timed.")


def _make_kernels(
    num_bytes: list[int], counts: list[int], limits: list[int]
) -> list[Kernel]:
    kernels = [
        Kernel(algorithm, n, size, max_blocks)
        for size in sorted(num_bytes)  # Slow kernels last: they are cut off first.
        for n in counts
        for algorithm in ("one_stage", "two_stage")
        for max_blocks in limits
    ]
    # A small buffer has no work for many blocks.
    return list({kernel.name: kernel for kernel in kernels}.values())


def _time_alone(kernels: list[Kernel], rounds: int, rows: Rows) -> list[dict[str, Any]]:
    alone = []
    copied = kernel_times.time_chains({COPY: kernel_times.copy_chain()}, rounds)
    for kernel in kernels:  # One at a time, since each has its own buffers.
        if rows.is_late:
            break
        kernel_times.check_share(kernel)
        chains = kernel_times.solo_chains(kernel)
        seconds = copied | kernel_times.time_chains(chains, rounds)
        (row,) = kernel_times.summarize([kernel], seconds)
        alone.append(row)
        rows.add({"alone": row})
    return alone


def _time_replicas(world: jdp.World, rounds: int) -> list[dict[str, Any]]:
    """Times the all-reduces on the GPUs of this host."""
    topology = gpu_topology.find_topology(world)
    rows = []
    for n in [n for n in (2, 4, 6, 8) if n <= world.num_replicas]:
        reason = choice.why_not_custom(0, n, jnp.float32, topology)
        if reason is not None:
            rows.append({"num_replicas": n, "why_not": reason})
            continue
        few = tune.take(world, n)
        all_reduces = tuning.candidates(n, topology)
        failure = measurement.find_failure(few, all_reduces)
        if failure is not None:
            rows.append({"num_replicas": n, "why_not": failure})
            continue
        times = measurement.time_all_reduces(
            few, all_reduces, tuning.SIZES, rounds=rounds
        )
        for each in times:
            row = {"algorithm": each.algorithm, "num_bytes": each.num_bytes}
            rows.append({"num_replicas": n, **row, "us": 1e6 * each.median})
    return rows


def summarize_step(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Returns medians in milliseconds, and the median of the rounds' ratios."""
    ratios = [
        a / b for a, b in zip(seconds["decorated"], seconds["plain"], strict=True)
    ]
    return {
        "decorated_ms": 1e3 * statistics.median(seconds["decorated"]),
        "plain_ms": 1e3 * statistics.median(seconds["plain"]),
        "over_plain": statistics.median(ratios),
        "rounds_ms": {k: [1e3 * s for s in v] for k, v in seconds.items()},
    }


def describe_machine() -> dict[str, Any]:
    """Returns the facts that figures of a GPU depend on."""
    return {
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "driver": gpu_topology.find_driver_version(),
        "jax": jax.__version__,
        "date": str(datetime.date.today()),
    }


def show(result: dict[str, Any], console: rich.console.Console) -> None:
    """Prints the tables."""
    machine = result["machine"]
    what = f"{machine['device']}, driver {machine['driver']}, jax {machine['jax']}"
    table = rich.table.Table(title=f"{what}: one replica alone, microseconds")
    columns = ("us", "bound_us", "over_bound", "empty_us", "over_empty")
    columns += ("xla_us", "over_xla")
    table.add_column("kernel")
    for name in columns:
        table.add_column(name, justify="right")
    for row in result["alone"]:
        table.add_row(row["kernel"], *(f"{row[name]:.3g}" for name in columns))
    console.print(table)
    step = result["step"]
    console.print(
        f"step of one replica: {step['decorated_ms']:.3f} ms decorated, "
        f"{step['plain_ms']:.3f} ms plain, ratio {step['over_plain']:.4f}",
        highlight=False,
    )
    for row in result["replicas"]:
        console.print(json.dumps(row), markup=False, highlight=False, soft_wrap=True)
