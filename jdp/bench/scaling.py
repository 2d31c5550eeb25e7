"""`jdp bench scaling`: how much longer is a step on more processes?"""

import pathlib
import statistics
from typing import Annotated, Any

import rich.console
import rich.table
import typer

from jdp.bench import channel, collectives, driver, plots, scaling_plot, step

_COPIES = "two copies alone"  # not a step.


def bench_scaling(
    processes: Annotated[
        str, typer.Option(help="How many processes, such as 1,2,4.")
    ] = "1,2,4",
    blocks: Annotated[int, typer.Option(min=1, help="Depth of the model.")] = 48,
    width: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Samples per process.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all systems.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Steps per system and round.")] = 10,
    plot: plots.PlotFile = None,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
) -> None:
    """Time a step on several numbers of processes.

    Systems and model are the same as in `jdp bench step`. Each process has a batch of
    its own, so that more processes train on more samples per step. The table has
    samples per second of all processes, from the medians over the rounds, and in
    brackets the speed over the speed of the same framework without communication.
    """
    counts = collectives.parse_numbers(processes, 1, 64, "--processes")
    channel.check_can_write(json_file)
    plots.check(plot)
    measured = {
        n: step.measure(n, (blocks, width, batch), rounds, steps)["systems"]
        for n in counts
    }
    result = summarize(measured, batch)
    config = {
        "num_blocks": blocks,
        "width": width,
        "batch_size": batch,
        "rounds": rounds,
        "steps": steps,
    }
    driver.write_result(result, config, json_file)
    rich.console.Console().print(_table(result))
    if plot is not None:
        scaling_plot.write(result, plot)


def summarize(
    measured: dict[int, dict[str, dict[str, Any]]], batch_size: int
) -> dict[str, Any]:
    """Turns the rows of each number of processes into one result.

    Args:
      measured: by number of processes, "systems" of `step.summarize`.
      batch_size: samples per process and step.

    Returns:
      A dict whose "processes" has one record per number of processes: the number, and
      by system the row, with `samples_per_s` of all processes, and `over_alone`: the
      median over the rounds of the time without communication over the time of the
      step.
    """
    records = []
    for n, systems in measured.items():
        rows = {}
        for name, row in systems.items():
            if name == _COPIES:
                continue
            ratios = [
                alone / mine
                for alone, mine in zip(
                    systems[alone_of(name)]["rounds_ms"], row["rounds_ms"], strict=True
                )
            ]
            rows[name] = row | {
                "samples_per_s": 1e3 * n * batch_size / row["median_ms"],
                "over_alone": statistics.median(ratios),
            }
        records.append({"num_processes": n, "systems": rows})
    return {"processes": records}


def alone_of(name: str) -> str:
    """Returns the step without communication of the framework of a system."""
    is_torch = name.startswith("torch")
    return "torch, no communication" if is_torch else "no communication"


def _table(result: dict[str, Any]) -> rich.table.Table:
    config, records = result["config"], result["processes"]
    table = rich.table.Table(
        title=f"samples per second, {config['num_blocks']} blocks, width "
        f"{config['width']}, batch {config['batch_size']} per process, "
        f"jax {config['jax']}"
    )
    table.add_column("processes")
    for record in records:
        table.add_column(str(record["num_processes"]), justify="right")
    for name in records[0]["systems"]:
        rows = [record["systems"].get(name) for record in records]
        table.add_row(name, *map(_cell, rows))
    return table


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:  # the system did not start.
        return ""
    return f"{row['samples_per_s']:,.0f} ({row['over_alone']:.2f})"
