"""Plots of `jdp bench train`: how fast is each system, and does it learn the same?"""

import importlib.util
import pathlib
from typing import Any

import rich.console

from jdp.bench import plots


def show(result: dict[str, Any], console: rich.console.Console) -> None:
    """Draws tokens per second into the terminal, if plotext is installed."""
    if importlib.util.find_spec("plotext") is None:
        return
    import plotext

    systems = result["systems"]
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(console.width, 100), 2 * len(systems) + 4)
    plotext.title("tokens per second")
    # The first bar is at the bottom.
    names = list(systems)[::-1]
    speeds = [systems[name]["tokens_per_s"] for name in names]
    plotext.bar(names, speeds, orientation="horizontal", width=0.4)
    text = plotext.uncolorize(plotext.build())
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def write(result: dict[str, Any], path: pathlib.Path) -> None:
    """Draws tokens per second by round, and losses by step, to a PNG or SVG file."""
    systems, config = result["systems"], result["config"]
    colors = {name: f"C{i}" for i, name in enumerate(systems)}
    with plots.saved(path, columns=2) as (speed, loss):
        speeds = {
            name: (row["tokens_per_s"], row["rounds_tokens_per_s"])
            for name, row in systems.items()
        }
        plots.draw_bars(
            speed,
            speeds,
            label=lambda value: f"{value:,.0f}",
            color=lambda name: (colors[name], 0.5),
        )
        speed.set_xlabel("tokens per second; lines: the rounds")
        speed.set_title(f"{config['num_processes']} processes")
        for i, (name, row) in enumerate(systems.items()):
            loss.plot(
                result["steps"],
                row["losses"],
                "--" if "no communication" in name else "-",
                label=name,
                color=colors[name],
                linewidth=1.5 * (len(systems) - i),  # Equal curves show as stripes.
            )
        loss.set_xlabel("steps")
        loss.set_ylabel("loss on held-out text")
        loss.legend(fontsize="small")
