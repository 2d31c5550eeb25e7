"""`jdp bench join`: what it costs that processes may have uneven inputs."""

import functools
import pathlib
import statistics
from typing import Annotated, Any

import rich.console
import rich.table
import typer

from jdp.cli.bench import channel, driver

_REFERENCE = "plain loop"


def bench_join(
    num_processes: Annotated[int, typer.Option("-n", min=1, help="Processes.")] = 2,
    blocks: Annotated[int, typer.Option(min=1, help="Depth of the model.")] = 48,
    width: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a process.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all loops.")] = 21,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a loop a round.")] = 10,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
) -> None:
    """Times a loop over `jdp.join_batches`, and one in a `jdp.Join`, with a plain one.

    The model is that of `jdp bench step`. Batches come from the host, and all processes
    have as many; every round times each loop in turn, and the table holds medians over
    the rounds.
    """
    channel.check_can_write(json_file)
    start = functools.partial(driver.start_jax, "jdp.cli.bench.join_step")
    seconds = driver.time_systems(
        (start,), num_processes, (blocks, width, batch), rounds=rounds, steps=steps
    )
    result = summarize(seconds)
    config = {
        "num_processes": num_processes,
        "num_blocks": blocks,
        "width": width,
        "batch_size": batch,
        "rounds": rounds,
        "steps": steps,
    }
    driver.write_result(result, config, json_file)
    rich.console.Console().print(_table(result))


def summarize(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Turns the medians of the rounds into one row a loop.

    Args:
      seconds: for each loop, the median step of each round, in seconds.

    Returns:
      A dict whose "loops" maps each name to its median time in milliseconds, and
      `over_plain`: the median over the rounds of its time over that of the plain loop.
    """
    loops = {}
    for name, values in seconds.items():
        pairs = zip(values, seconds[_REFERENCE], strict=True)
        loops[name] = {
            "median_ms": 1e3 * statistics.median(values),
            "over_plain": statistics.median(a / b for a, b in pairs),
            "rounds_ms": [1e3 * value for value in values],
        }
    return {"loops": loops}


def _table(result: dict[str, Any]) -> rich.table.Table:
    config = result["config"]
    table = rich.table.Table(
        title=f"{config['num_processes']} processes, {config['num_blocks']} blocks, "
        f"width {config['width']}, batch {config['batch_size']}, jax {config['jax']}"
    )
    table.add_column("loop")
    for name in ("median ms", "it / plain"):
        table.add_column(name, justify="right")
    for name, row in result["loops"].items():
        table.add_row(name, f"{row['median_ms']:.2f}", f"{row['over_plain']:.3f}")
    return table
