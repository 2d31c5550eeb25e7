"""The drawings of the pages: made by their script, readable, and shown with a text.

How wide a text is follows from its number of characters, since fonts differ.
"""

import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from typing import NamedTuple

import pytest

from tests import harness

FOLDER = harness.ROOT / "docs/drawings"
NAMES = sorted(path.stem for path in FOLDER.glob("*.svg"))
PAGE = {"step": "steps"}  # where the page has another name.
# The mean width of a character, in letter sizes: Arial's is about 0.5, the widest
# common font, DejaVu Sans, has 0.6.
WIDTH = 0.58
_SVG = "{http://www.w3.org/2000/svg}"


class Area(NamedTuple):
    """A rectangle, with the text or the class that it belongs to."""

    name: str
    left: float
    top: float
    right: float
    bottom: float

    def contains(self, other) -> bool:
        """Whether the other area is inside of this one."""
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )

    def overlaps(self, other) -> bool:
        """Whether the areas have a part in common."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def _parse(name):
    return ET.parse(FOLDER / f"{name}.svg").getroot()


def _numbers(element, *names):
    return [float(element.get(name)) for name in names]


def _area_of_rect(rect):
    x, y, width, height = _numbers(rect, "x", "y", "width", "height")
    return Area(rect.get("class", "box"), x, y, x + width, y + height)


def _area_of_text(text):
    x, baseline, size = _numbers(text, "x", "y", "font-size")
    width = WIDTH * size * len(text.text)
    left = {"start": x, "middle": x - width / 2, "end": x - width}
    start = left[text.get("text-anchor")]
    # Capitals are about 0.7 of the size high, and descenders 0.2 deep.
    return Area(
        text.text, start, baseline - 0.7 * size, start + width, baseline + 0.2 * size
    )


def _texts(root):
    return [_area_of_text(text) for text in root.iter(f"{_SVG}text")]


def _texts_and_later_elements(root):
    """Each text with the elements that are drawn over it; a box hides what is below."""
    elements = list(root)
    for i, element in enumerate(elements):
        is_free = element.tag == f"{_SVG}text"
        rect = element.find(f"{_SVG}rect")
        is_free |= rect is not None and rect.get("fill") == "none"
        for text in element.iter(f"{_SVG}text"):
            yield _area_of_text(text), elements if is_free else elements[i:]


def _segments(elements):
    for way in elements:
        if way.tag != f"{_SVG}polyline":
            continue
        points = [tuple(map(float, p.split(","))) for p in way.get("points").split()]
        yield from itertools.pairwise(points)


def _crosses(segment, area):
    """Whether a line is inside of the area somewhere; looks at 200 of its points."""
    (x0, y0), (x1, y1) = segment
    for i in range(201):
        x, y = x0 + (x1 - x0) * i / 200, y0 + (y1 - y0) * i / 200
        if area.left < x < area.right and area.top < y < area.bottom:
            return True
    return False


def test_the_script_makes_the_drawings_that_are_here(tmp_path):
    script = harness.ROOT / "tools/draw_concepts.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, timeout=60)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert len(made) == 13


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_its_drawing_with_its_description(name):
    root = _parse(name)
    description = root.find(f"{_SVG}desc").text
    assert root.find(f"{_SVG}title").text and len(description) > 100
    page = (harness.ROOT / f"docs/{PAGE.get(name, name)}.md").read_text()
    (shown,) = re.findall(r"^!\[(.*)\]\(drawings/(\w+)\.svg\)$", page, re.M)
    assert shown == (description, name)
    # Above it are the title and one paragraph.
    before = page[: page.index("![")].strip().splitlines()
    assert before[0].startswith("# ") and len(before) == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_text_is_inside_of_its_box_and_of_the_panel(name):
    root = _parse(name)
    (panel,) = (
        _area_of_rect(r) for r in root.iter(f"{_SVG}rect") if r.get("class") == "panel"
    )
    assert panel.right == 719.5
    for group in root.iter(f"{_SVG}g"):
        box = _area_of_rect(group.find(f"{_SVG}rect"))
        assert panel.contains(box)
        for text in group.iter(f"{_SVG}text"):
            assert box.contains(_area_of_text(text)), text.text
    assert all(panel.contains(text) for text in _texts(root))


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_crossed_by_a_line_or_by_another_text(name):
    root = _parse(name)
    texts = _texts(root)
    assert texts
    for first, second in itertools.combinations(texts, 2):
        assert not first.overlaps(second), (first.name, second.name)
    for text, later in _texts_and_later_elements(root):
        for segment in _segments(later):
            assert not _crosses(segment, text), (text.name, segment)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_under_the_edge_of_a_box_that_is_not_its_own(name):
    root = _parse(name)
    boxes = [_area_of_rect(rect) for rect in root.iter(f"{_SVG}rect")]
    for text, box in itertools.product(_texts(root), boxes):
        assert box.contains(text) or not box.overlaps(text), (text.name, box)


@pytest.mark.parametrize("name", NAMES)
def test_letters_are_large_enough_and_dark_on_light(name):
    root = _parse(name)
    for text in root.iter(f"{_SVG}text"):
        assert float(text.get("font-size")) >= 12
        assert _luminance(text.get("fill")) < 0.05
    for rect in root.iter(f"{_SVG}rect"):
        if rect.get("fill") != "none":
            assert _luminance(rect.get("fill")) > 0.7


def _luminance(colour):
    """Relative luminance of an sRGB colour (WCAG 2.1)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
    ]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
