"""Plots of `jdp bench train`: how fast is each system, and does it learn the same?"""

import importlib.util
import pathlib
from typing import Any

import rich.console


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
    """Writes tokens per second by round, and losses by step, to a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    systems, config = result["systems"], result["config"]
    figure, (speed, loss) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for i, (name, row) in enumerate(systems.items()):
        (bar,) = speed.barh(i, row["tokens_per_s"], alpha=0.5)
        rounds = row["rounds_tokens_per_s"]
        speed.plot(rounds, [i] * len(rounds), "|", color="black")
        style = "--" if "no communication" in name else "-"
        color = bar.get_facecolor()[:3]
        loss.plot(result["steps"], row["losses"], style, label=name, color=color)
    speed.set_yticks(range(len(systems)), list(systems))
    speed.invert_yaxis()
    speed.set_xlabel("tokens per second; lines: the rounds")
    speed.set_title(f"{config['num_processes']} processes")
    loss.set_xlabel("steps")
    loss.set_ylabel("loss on held-out text")
    loss.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
