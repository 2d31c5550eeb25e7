"""Overlap: how much of a step's communication is hidden behind its computation?"""

import functools
import statistics
from typing import Any

import rich.table

from jdp.bench import driver

# Names of the variants of a model, as the processes make them.
STEP = "step"
NO_COMMUNICATION = "no communication"
COMMUNICATION = "communication alone"


def measure(
    num_processes: int, sizes: tuple[int, ...], rounds: int, steps: int
) -> dict[str, Any]:
    """Times each model's variants in turn; see `summarize`."""
    start = functools.partial(driver.start_jax, "jdp.bench.overlap_step")
    seconds = driver.time_systems(
        (start,), num_processes, sizes, rounds=rounds, steps=steps
    )
    return summarize(seconds)


def summarize(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Turns the medians of the rounds into one row per model.

    Args:
      seconds: for each "model: variant", the median of each round, in seconds.

    Returns:
      A dict whose "models" maps each model to the median milliseconds of its variants
      and to `hidden`, the median over the rounds of `hidden_fraction`.
    """
    models: dict[str, dict[str, list[float]]] = {}
    for name, values in seconds.items():
        model, variant = name.split(": ")
        models.setdefault(model, {})[variant] = values
    rows = {}
    for model, variants in models.items():
        columns = (variants[STEP], variants[NO_COMMUNICATION], variants[COMMUNICATION])
        fractions = [hidden_fraction(*row) for row in zip(*columns, strict=True)]
        rows[model] = {
            "median_ms": {
                name: 1e3 * statistics.median(values)
                for name, values in variants.items()
            },
            "hidden": statistics.median(fractions),
            "rounds_ms": {
                name: [1e3 * value for value in values]
                for name, values in variants.items()
            },
        }
    return {"models": rows}


def hidden_fraction(step: float, alone: float, communication: float) -> float:
    """Returns the share of the communication that does not make the step longer.

    1 if the step takes no longer than without communication, 0 if it takes as long as
    computation and communication in sequence, and negative if it takes longer.

    Args:
      step: time of the step.
      alone: time of the step without communication.
      communication: time of the communication alone.
    """
    return (alone + communication - step) / communication


def make_table(result: dict[str, Any]) -> rich.table.Table:
    """Returns a table with one row per model."""
    config = result["config"]
    table = rich.table.Table(
        title=f"{config['num_processes']} processes, {config['num_blocks']} blocks, "
        f"{config['num_layers']} layers in a loop, width {config['width']}, batch "
        f"{config['batch_size']}, jax {config['jax']}",
        caption="hidden: 100% if the step takes no longer than without communication, "
        "0% if as long as both in sequence, negative if longer",
        caption_justify="left",
    )
    table.add_column("model")
    for name in (STEP, NO_COMMUNICATION, COMMUNICATION):
        table.add_column(f"{name}, ms", justify="right")
    table.add_column("hidden", justify="right")
    for model, row in result["models"].items():
        times = row["median_ms"]
        cells = [
            f"{times[name]:.2f}" for name in (STEP, NO_COMMUNICATION, COMMUNICATION)
        ]
        table.add_row(model, *cells, f"{row['hidden']:.0%}")
    return table
