"""`jdp bench collectives --tune`: which thresholds fit the custom all-reduce here?"""

import dataclasses
import datetime
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import rich.console
import rich.table
import typer

import jdp
from jdp.bench import channel
from jdp.collectives.measurement import Seconds
from jdp.collectives.pallas import choice, gpu_topology, tuning
from jdp.collectives.pallas.choice import THRESHOLDS, Limits, Thresholds
from jdp.replicas import mesh


def tune(path: pathlib.Path, counts: Sequence[int], *, rounds: int) -> None:
    """Measures the limits for each number of GPUs, and writes them to a file.

    Limits for other numbers of GPUs are kept.
    """
    world = jdp.init()
    topology = gpu_topology.find_topology(world)
    console = rich.console.Console()
    here = [n for n in counts if n <= world.num_replicas]
    if not here or world.process_count > 1:
        here = [world.num_replicas]  # of several processes all take part.
    for n in here:
        reason = choice.why_not_custom(0, n, jnp.float32, topology)
        if reason is not None:
            text = f"jdp bench: there is no custom all-reduce to tune: {reason}."
            typer.echo(text, err=True)
            raise typer.Exit(1)
    if world.is_main_process:
        channel.check_can_write(path, "--tune")
    measured: dict[int, Limits] = {}
    for n in here:
        few = take(world, n)
        all_reduces = tuning.candidates(n, topology)
        measured[n], times = tuning.measure_limits(few, all_reduces, rounds=rounds)
        if world.is_main_process:
            console.print(table(n, times))
    if not world.is_main_process:
        return
    device = world.local_devices[0].device_kind
    thresholds = merge(measured, device)
    thresholds.save(path)
    for each in thresholds.limits:
        console.print(each, markup=False, highlight=False)
    console.print(f"written to {path}", markup=False, highlight=False)


def take(world: jdp.World, num_replicas: int) -> jdp.World:
    """Returns a world of the first `num_replicas` replicas."""
    devices = list(world.mesh.devices.flat)[:num_replicas]
    few = mesh.make_mesh(devices, world.axis_name, num_nodes=1)
    return dataclasses.replace(world, mesh=few)


def merge(measured: dict[int, Limits], device: str) -> Thresholds:
    """Returns the default thresholds, with the measured limits in place of theirs."""
    limits = {each.num_replicas: each for each in THRESHOLDS.limits} | measured
    what = ", ".join(map(str, sorted(measured)))
    source = (
        f"jdp bench collectives --tune, {datetime.date.today()}, {what} of {device}, "
        f"jax {jax.__version__}; others: {THRESHOLDS.source}"
    )
    return Thresholds(limits=tuple(limits[n] for n in sorted(limits)), source=source)


def table(num_replicas: int, times: Sequence[Seconds]) -> rich.table.Table:
    """Returns the times as a table, in microseconds."""
    names = list(dict.fromkeys(each.algorithm for each in times))
    found = rich.table.Table(title=f"{num_replicas} GPUs: microseconds")
    found.add_column("bytes", justify="right")
    for name in names:
        found.add_column(name, justify="right")
    by_size: dict[int, dict[str, float]] = {}
    for each in times:
        by_size.setdefault(each.num_bytes, {})[each.algorithm] = each.median
    for size, row in by_size.items():
        found.add_row(f"{size:,}", *(f"{1e6 * row[name]:.1f}" for name in names))
    return found
