"""Plots of `jdp bench collectives`: how does time grow with size?"""

import importlib.util
import pathlib
from typing import Any

import rich.console

from jdp.bench import plots

_SHOWN = (
    "psum",
    "ring",
    "halving_doubling",
    "butterfly",
    "shared_memory",
    "tcp",
    "tree",
)


def show(result: dict[str, Any], console: rich.console.Console) -> None:
    """Draws the measured times into the terminal, if plotext is installed."""
    if importlib.util.find_spec("plotext") is None:
        return
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(console.width, 100), 22)
    plotext.title(f"{result['num_replicas']} replicas: seconds by bytes")
    plotext.xscale("log")
    plotext.yscale("log")
    for name, (sizes, measured, _) in _curves(result).items():
        if name in _SHOWN:
            plotext.plot(sizes, measured, label=name, marker="braille")
    console.print(plotext.build(), markup=False, highlight=False)


def write(
    results: list[dict[str, Any]], config: dict[str, Any], path: pathlib.Path
) -> None:
    """Draws measured times, as points, and predicted ones, as lines."""
    with plots.saved(path, columns=len(results), size=(6.0, 5.0), share_y=True) as axes:
        for axis, result in zip(axes, results, strict=True):
            for name, (sizes, measured, model) in _curves(result).items():
                (points,) = axis.loglog(sizes, measured, "o", label=name, markersize=4)
                color = points.get_color()
                if None not in model:
                    axis.loglog(sizes, model, "-", color=color, linewidth=1)
            axis.set_title(f"{result['num_replicas']} {config['kind']}")
            axis.set_xlabel("bytes")
            axis.grid(True, which="major", alpha=0.3)
        axes[0].set_ylabel("seconds; lines: the model")
        axes[-1].legend(fontsize="small")


def _curves(result: dict[str, Any]) -> dict[str, tuple[list, list, list]]:
    """Returns sizes, measured and predicted seconds, by all-reduce."""
    found: dict[str, tuple[list, list, list]] = {}
    for time in sorted(result["times"], key=lambda time: time["num_bytes"]):
        sizes, measured, model = found.setdefault(time["algorithm"], ([], [], []))
        sizes.append(time["num_bytes"])
        measured.append(time["measured_s"])
        model.append(time["model_s"])
    return found
