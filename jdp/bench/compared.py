"""Compared: how do the variants of one step compare to a reference variant?"""

import functools
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import rich.console
import rich.table
import typer

from jdp.bench import channel, compared_plot, driver, plots
from jdp.bench.driver import Turn

NumProcesses = Annotated[int, typer.Option("-n", min=1, help="Processes.")]
Blocks = Annotated[int, typer.Option(min=1, help="Depth of the model.")]
Width = Annotated[int, typer.Option(min=1, help="Width of the model.")]
Batch = Annotated[int, typer.Option(min=1, help="Samples per process.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds over all variants.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps per variant and round.")]
JsonFile = Annotated[
    pathlib.Path | None, typer.Option("--json", help="Write the results here.")
]


class CompareOptions(NamedTuple):
    """Options that all of these commands share."""

    num_processes: int
    blocks: int
    width: int
    batch: int
    rounds: int
    steps: int
    plot: pathlib.Path | None
    json_file: pathlib.Path | None


def make_command(
    module: str, reference: str, text: str, *, default_rounds: int = 11
) -> Callable[..., None]:
    """Returns the command that runs `bench`, with `text` as its help."""

    def command(
        num_processes: NumProcesses = 2,
        blocks: Blocks = 48,
        width: Width = 256,
        batch: Batch = 16,
        rounds: Rounds = default_rounds,
        steps: Steps = 10,
        plot: plots.PlotFile = None,
        json_file: JsonFile = None,
    ) -> None:
        options = CompareOptions(
            num_processes, blocks, width, batch, rounds, steps, plot, json_file
        )
        bench(module, reference, options)

    command.__doc__ = text
    return command


def bench(
    module: str,
    reference: str,
    options: CompareOptions,
    *,
    arguments: Sequence[str] = (),
) -> None:
    """Times the variants of a module in turn; prints a table and writes the files.

    Args:
      module: the module that runs the variants.
      reference: name of the variant that the others are compared to.
      options: the options of the command line.
      arguments: further arguments of the module.
    """
    channel.check_can_write(options.json_file)
    plots.check(options.plot)
    start = functools.partial(driver.start_jax, module, arguments=arguments)
    turns = driver.measure_systems(
        (start,),
        options.num_processes,
        (options.blocks, options.width, options.batch),
        rounds=options.rounds,
        steps=options.steps,
    )
    result = summarize(turns, reference)
    config = {
        "num_processes": options.num_processes,
        "num_blocks": options.blocks,
        "width": options.width,
        "batch_size": options.batch,
        "rounds": options.rounds,
        "steps": options.steps,
    }
    driver.write_result(result, config, options.json_file)
    rich.console.Console().print(_table(result))
    if options.plot is not None:
        compared_plot.write(result, options.plot)


def summarize(turns: dict[str, list[Turn]], reference: str) -> dict[str, Any]:
    """Turns the rounds into one row per variant.

    Args:
      turns: by variant, its turn in each round.
      reference: the name of one variant.

    Returns:
      A dict with `reference`, and `variants`, which maps each name to its median time
      in milliseconds, the median over the rounds of its time over the reference's time,
      and the fewest bytes that a process sent over TCP per step, alone and over those
      of the reference: in other rounds JAX's heartbeats come on top. The ratio of bytes
      is None if the reference sends no gradients.
    """
    variants = {}
    num_bytes = {name: min(t.sent_bytes for t in turns[name]) for name in turns}
    for name, rounds in turns.items():
        pairs = list(zip(rounds, turns[reference], strict=True))
        sends = num_bytes[reference] > compared_plot.MOST_METRICS_BYTES
        variants[name] = {
            "median_ms": 1e3 * statistics.median(turn.seconds for turn in rounds),
            "over_reference": statistics.median(
                here.seconds / there.seconds for here, there in pairs
            ),
            "sent_bytes": num_bytes[name],
            "sent_over_reference": num_bytes[name] / num_bytes[reference]
            if sends
            else None,
            "rounds_ms": [1e3 * turn.seconds for turn in rounds],
        }
    return {"reference": reference, "variants": variants}


def _table(result: dict[str, Any]) -> rich.table.Table:
    config, reference = result["config"], result["reference"]
    table = rich.table.Table(
        title=f"{config['num_processes']} processes, {config['num_blocks']} blocks, "
        f"width {config['width']}, batch {config['batch_size']}, jax {config['jax']}"
    )
    table.add_column("variant")
    for name in ("median ms", f"it / {reference}", "MB sent", f"it / {reference}"):
        table.add_column(name, justify="right")
    for name, row in result["variants"].items():
        sent = row["sent_over_reference"]
        table.add_row(
            name,
            f"{row['median_ms']:.2f}",
            f"{row['over_reference']:.3f}",
            f"{row['sent_bytes'] / 1e6:.3f}",
            "" if sent is None else f"{sent:.3f}",
        )
    return table
