"""Drawing: boxes, labels and arrows of an SVG that is readable on any background.

A drawing has a light panel of its own, so that a dark page does not change it. Colours
mean the same in all drawings, see `COLOURS`.
"""

from typing import NamedTuple
from xml.sax import saxutils

WIDTH = 720
SIZE = 13  # of letters; never below 12.
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
CODE = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
INK = "#1e293b"
LINE_HEIGHT = 1.3


class Colour(NamedTuple):
    """Colours of a box, and of arrows of its kind."""

    fill: str
    stroke: str


COLOURS = {
    "own": Colour("#dbeafe", "#1d4ed8"),  # computed from a replica's own samples.
    "sent": Colour("#ffedd5", "#c2410c"),  # communication.
    "same": Colour("#dcfce7", "#15803d"),  # parameters and state.
    "host": Colour("#ede9fe", "#6d28d9"),  # work of the host, or of a hook.
    "idle": Colour("#f1f5f9", "#64748b"),  # nothing, zeros, waiting.
    "wrong": Colour("#fee2e2", "#b91c1c"),
    "frame": Colour("none", "#94a3b8"),
}


class Drawing:
    """An SVG that grows by one element per call."""

    def __init__(self, title: str, description: str, height: int):
        self.title = title
        self.description = description
        self.height = height
        self._elements: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *lines: str,
        kind: str = "own",
        size: int = SIZE,
        is_code: bool = False,
    ) -> None:
        """Adds a box with lines of text in its middle; an idle box is dashed."""
        middle = y + height / 2 - (len(lines) - 1) / 2 * size * LINE_HEIGHT
        texts = [
            _text(
                x + width / 2,
                middle + i * size * LINE_HEIGHT,
                line,
                anchor="middle",
                size=size,
                is_code=is_code,
            )
            for i, line in enumerate(lines)
            if line
        ]
        self._group("box", _rect(x, y, width, height, kind), *texts)

    def frame(self, x: float, y: float, width: float, height: float, label: str):
        """Adds a box without a fill, with a label in its upper left corner."""
        text = _text(x + 10, y + 15, label, size=SIZE, is_bold=True)
        self._group("box", _rect(x, y, width, height, "frame"), text)

    def text(
        self,
        x: float,
        y: float,
        *lines: str,
        anchor: str = "start",
        size: int = SIZE,
        is_bold: bool = False,
        is_code: bool = False,
    ) -> None:
        """Adds lines of text, the first with its middle at `y`."""
        for i, line in enumerate(lines):
            self._elements.append(
                _text(
                    x,
                    y + i * size * LINE_HEIGHT,
                    line,
                    anchor=anchor,
                    size=size,
                    is_bold=is_bold,
                    is_code=is_code,
                )
            )

    def arrow(self, *points: tuple[float, float], kind: str = "idle") -> None:
        """Adds an arrow through the points, with its head at the last."""
        self._path(points, kind, f' marker-end="url(#{kind})"')

    def line(
        self,
        *points: tuple[float, float],
        kind: str = "idle",
        is_dashed: bool = False,
    ) -> None:
        """Adds a line through the points."""
        self._path(points, kind, ' stroke-dasharray="4 4"' if is_dashed else "")

    def legend(self, y: float, **meanings: str) -> None:
        """Adds a row that says which colour means what, by kind."""
        step = (WIDTH - 32) / len(meanings)
        for i, (kind, meaning) in enumerate(meanings.items()):
            x = 16 + i * step
            self._elements.append(_rect(x, y - 7, 14, 14, kind))
            self.text(x + 22, y, meaning, size=12)

    def to_svg(self) -> str:
        """Returns the file, the same for the same calls."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
            f'height="{self.height}" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            'aria-labelledby="title desc">'
        )
        markers = [
            f'    <marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" '
            'markerWidth="8" markerHeight="8" orient="auto" '
            'markerUnits="userSpaceOnUse">'
            f'<path d="M0 0 8 4 0 8Z" fill="{colour.stroke}"/></marker>'
            for kind, colour in COLOURS.items()
        ]
        panel = (
            f'  <rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" '
            f'height="{self.height - 1}" rx="8" fill="#ffffff" stroke="#cbd5e1"/>'
        )
        lines = [
            head,
            f'  <title id="title">{saxutils.escape(self.title)}</title>',
            f'  <desc id="desc">{saxutils.escape(self.description)}</desc>',
            "  <defs>",
            *markers,
            "  </defs>",
            panel,
            *(f"  {element}" for element in self._elements),
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _group(self, name: str, *elements: str) -> None:
        self._elements.append(f'<g class="{name}">{"".join(elements)}</g>')

    def _path(self, points: tuple, kind: str, more: str) -> None:
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._elements.append(
            f'<polyline points="{way}" fill="none" '
            f'stroke="{COLOURS[kind].stroke}" stroke-width="1.5"{more}/>'
        )


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    fill, stroke = COLOURS[kind]
    dashes = ' stroke-dasharray="4 3"' if kind == "idle" else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="1.5"{dashes}/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = SIZE,
    is_bold: bool = False,
    is_code: bool = False,
) -> str:
    assert size >= 12, text
    # A third of the size below the middle: `dominant-baseline` is not known everywhere.
    baseline = y + round(size * 0.35, 1)
    weight = ' font-weight="600"' if is_bold else ""
    return (
        f'<text x="{x:g}" y="{baseline:g}" text-anchor="{anchor}" '
        f'font-family="{CODE if is_code else FONT}" font-size="{size}"{weight} '
        f'fill="{INK}">{saxutils.escape(text)}</text>'
    )
