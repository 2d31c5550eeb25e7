"""Plots of variants of a step: how long does each take, and how much does it send?"""

import pathlib
from typing import Any

from jdp.bench import plots, step_plot

MOST_METRICS_BYTES = 1000  # sent by a process per step besides gradients.


def write(result: dict[str, Any], path: pathlib.Path) -> None:
    """Draws milliseconds per step, and megabytes sent if gradients are sent."""
    variants = result["variants"]
    sends = any(row["sent_bytes"] > MOST_METRICS_BYTES for row in variants.values())
    size = (6.0, 1.2 + 0.3 * len(variants))
    with plots.saved(path, columns=1 + sends, size=size) as axes:
        times = {
            name: (row["median_ms"], row["rounds_ms"]) for name, row in variants.items()
        }
        color = {True: plots.OTHERS, False: plots.OURS}
        plots.draw_bars(
            axes[0],
            times,
            label=lambda value: f"{value:.1f}",
            color=lambda name: color[name == result["reference"]],
        )
        axes[0].set_title(step_plot.describe(result["config"]), fontsize="medium")
        axes[0].set_xlabel("ms per step; lines: the rounds")
        if sends:
            sent = {
                name: (row["sent_bytes"] / 1e6, ()) for name, row in variants.items()
            }
            plots.draw_bars(
                axes[1],
                sent,
                label=lambda value: f"{value:.3g}",
                color=lambda name: color[name == result["reference"]],
            )
            axes[1].set_xlabel("MB sent per process and step")
