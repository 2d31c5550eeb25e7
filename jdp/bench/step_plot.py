"""Plots of `jdp bench step`: how long is a step in each system?"""

import pathlib
from collections.abc import Sequence
from typing import Any

from jdp.bench import plots


def write(results: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws milliseconds per step by system, one picture per result side by side."""
    num_rows = max(len(result["systems"]) for result in results)
    size = (6.0, 1.2 + 0.3 * num_rows)
    with plots.saved(path, columns=len(results), size=size) as axes:
        for axis, result in zip(axes, results, strict=True):
            bars = {
                name: (row["median_ms"], row["rounds_ms"])
                for name, row in result["systems"].items()
            }
            plots.draw_bars(axis, bars, label=lambda value: f"{value:.1f}")
            axis.set_title(describe(result["config"]), fontsize="medium")
            axis.set_xlabel("ms per step; lines: the rounds")


def describe(config: dict[str, Any]) -> str:
    """Returns the sizes of a job and its model, in words."""
    count = config["num_processes"]
    return (
        f"{count} process{'es' * (count != 1)}, {config['num_blocks']} blocks, "
        f"width {config['width']}, batch {config['batch_size']}"
    )
