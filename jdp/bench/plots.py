"""Plots: how are the pictures of `jdp bench` made, and where are they written?"""

import contextlib
import importlib.util
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from jdp.bench import channel

PlotFile = Annotated[
    pathlib.Path | None,
    typer.Option("--plot", help="Write a plot here, a PNG or an SVG file."),
]
_FORMATS = (".png", ".svg")
# jdp stands out from the systems beside it.
OURS, OTHERS = "C0", "0.7"


def check(path: pathlib.Path | None) -> None:
    """Raises typer.BadParameter for a file that cannot be drawn."""
    if path is None:
        return
    if path.suffix not in _FORMATS:
        raise typer.BadParameter(
            f"{str(path)!r} must end with .png or .svg.", param_hint="--plot"
        )
    channel.check_can_write(path, "--plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "needs matplotlib: pip install matplotlib.", param_hint="--plot"
        )


@contextlib.contextmanager
def saved(
    path: pathlib.Path,
    *,
    columns: int = 1,
    size: tuple[float, float] = (6.0, 4.5),
    share_y: bool = False,
) -> Iterator[Sequence[Any]]:
    """Yields the axes of a picture in one row, and writes it to a PNG or SVG file.

    The same data make the same SVG: it has no date, and its names are not random.

    Args:
      path: the file; its ending tells the format.
      columns: number of axes.
      size: width of one of the axes, and height, in inches.
      share_y: whether the axes have the same vertical scale.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "jdp"}):
        figure, axes = pyplot.subplots(
            1,
            columns,
            figsize=(columns * size[0], size[1]),
            squeeze=False,
            sharey=share_y,
        )
        try:
            yield list(axes[0])
            figure.tight_layout()
            kind = path.suffix.removeprefix(".")
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(path, dpi=120, format=kind, metadata=metadata)
        finally:
            pyplot.close(figure)


def draw_bars(
    axis: Any,
    bars: Mapping[str, tuple[float, Sequence[float]]],
    *,
    label: Callable[[float], str],
    color: Callable[[str], Any] | None = None,
) -> None:
    """Draws one bar per name, from the top, with a line per round and its value.

    Args:
      axis: axes of matplotlib.
      bars: by name, the length of the bar, and the values of the rounds.
      label: makes the text beside a bar, of its length.
      color: returns the color of a name. By default, jdp stands out.
    """
    for i, (name, (value, rounds)) in enumerate(bars.items()):
        shade = color(name) if color else (OURS if _is_ours(name) else OTHERS)
        axis.barh(i, value, color=shade)
        axis.plot(rounds, [i] * len(rounds), "|", color="black", markersize=4)
        axis.annotate(
            label(value),
            (max(value, *rounds) if rounds else value, i),
            xytext=(4, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize="small",
        )
    axis.set_yticks(range(len(bars)), list(bars))
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.set_xlim(left=0)


def _is_ours(name: str) -> bool:
    return name == "jdp" or name.startswith("jdp, ")
