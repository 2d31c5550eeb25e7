"""Performance page: writes docs/performance.md, its pictures, and figures of others.

Every figure comes from a file of benchmarks/results/. `make performance` runs it; with
--check it writes nothing and fails if a file differs from what it would write. A
picture is drawn anew if its results have changed, or if its file was deleted.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jinja2

from jdp.bench import (
    collectives_plot,
    compared_plot,
    scaling_plot,
    step_plot,
    train_plot,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/performance.md"
README = ROOT / "README.md"
FIGURES = ROOT / "docs/figures"
TEMPLATES = ROOT / "tools/templates"
NOT_MEASURED = "not measured"
# A name is a date, a kind, the machine, and the number of the run if there are several.
_NAME = re.compile(r"(\d{4}-\d\d-\d\d)_(.+?)_cpu\d+(?:_run\d+)?\.json")
# `<!-- figures: NAME -->` ... `<!-- end of figures -->` in README and the other pages.
_MARKED = re.compile(
    r"(<!-- figures: (\w+) -->\n?)(.*?)(<!-- end of figures -->)", re.S
)


class MissingResultError(RuntimeError):
    """No result file has the figures that the page shows."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Result file of a benchmark."""

    path: pathlib.Path
    data: dict[str, Any]

    @property
    def date(self) -> str:
        """Day of the run, such as 2026-11-24."""
        return self.path.name[:10]

    @property
    def place(self) -> str:
        """Path of the file in the repository."""
        return f"benchmarks/results/{self.path.name}"

    @property
    def rows(self) -> dict[str, Any]:
        """Everything that was timed in turns, by name."""
        for key in ("systems", "variants", "loops"):
            if key in self.data:
                return self.data[key]
        return {}

    def rounds(self, name: str) -> list[float]:
        """Returns the times of a row, or their reciprocals if it has speeds."""
        row = self.rows[name]
        if "rounds_ms" in row:
            return row["rounds_ms"]
        return [1 / speed for speed in row["rounds_tokens_per_s"]]

    def median(self, name: str) -> float | None:
        """Returns the median milliseconds of a row; None if it was not measured."""
        return self.rows[name]["median_ms"] if name in self.rows else None

    def over(self, name: str, other: str) -> float | None:
        """Returns the median over the rounds of a time over another time."""
        if not {name, other} <= self.rows.keys():
            return None
        pairs = zip(self.rounds(name), self.rounds(other), strict=True)
        return statistics.median(a / b for a, b in pairs)

    def added(self, name: str, alone: str, other: str) -> float | None:
        """Returns the median over the rounds of (name - alone) / other, of times."""
        if not {name, alone, other} <= self.rows.keys():
            return None
        rounds = zip(*map(self.rounds, (name, alone, other)), strict=True)
        return statistics.median((a - b) / c for a, b, c in rounds)


class Results:
    """Result files of a folder: the newest of each kind."""

    def __init__(self, folder: pathlib.Path = RESULTS):
        self._folder = folder

    def all_newest(
        self, *kinds: str, having: str | None = None, rows: tuple[str, ...] = ()
    ) -> list[Result]:
        """Returns the files of the newest day that has one, by name.

        Args:
          kinds: names between date and machine, such as "step" or "step_101mb".
          having: a key that the files must have.
          rows: names that must have been timed.

        Raises:
          MissingResultError: there is no such file.
        """
        found: dict[str, list[Result]] = {}
        for path in sorted(self._folder.glob("*.json")):
            match = _NAME.fullmatch(path.name)
            if match is None or match[2] not in kinds:
                continue
            result = Result(path, json.loads(path.read_text()))
            has_key = having is None or having in result.data
            if has_key and set(rows) <= result.rows.keys():
                found.setdefault(result.date, []).append(result)
        if not found:
            names = " or ".join(f"<date>_{kind}_cpu<cores>.json" for kind in kinds)
            needs = f" with {having or rows}" if having or rows else ""
            raise MissingResultError(f"There is no {names}{needs} in {self._folder}.")
        return found[max(found)]

    def newest(self, *kinds: str, **needs: Any) -> Result:
        """Returns the newest file, the last of its day; see `all_newest`."""
        return self.all_newest(*kinds, **needs)[-1]

    def find(self, *kinds: str, **needs: Any) -> Result | None:
        """Returns the newest file, or None if there is no such file."""
        try:
            return self.newest(*kinds, **needs)
        except MissingResultError:
            return None

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Returns the newest file `<date>_<name>.jsonl`, line by line."""
        paths = sorted(self._folder.glob(f"????-??-??_{name}.jsonl"))
        if not paths:
            raise MissingResultError(f"There is no {self._folder}/<date>_{name}.jsonl.")
        return [json.loads(line) for line in paths[-1].read_text().splitlines()]

    @property
    def notes(self) -> dict[str, Any]:
        """Figures without a stored run, by name, the newest of each."""
        found: dict[str, Any] = {}
        for path in sorted(self._folder.glob("*_notes.json")):
            found |= json.loads(path.read_text())["figures"]
        return found


def format_number(value: float | None, digits: int = 0) -> str:
    """Returns a number with so many decimals, or that it was not measured."""
    return NOT_MEASURED if value is None else f"{value:,.{digits}f}"


def format_percent(value: float | None, digits: int = 0) -> str:
    """Returns a fraction in percent."""
    return NOT_MEASURED if value is None else f"{100 * value:.{digits}f} %"


def format_unit(value: float, unit: str) -> str:
    """Returns a value with three or more digits and its unit."""
    if unit == "/s":
        return f"{value:,.0f}/s"
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f} {unit}"


def judge(
    value: float | None,
    digits: int = 3,
    *,
    most: float | None = None,
    least: float | None = None,
) -> str:
    """Returns three cells: the value, its limit, and whether the limit is met."""
    limit = f"at most {most:,}" if most is not None else f"at least {least:,}"
    if value is None:
        return f"{NOT_MEASURED} | {limit} | "
    is_met = value <= most if most is not None else value >= (least or 0)
    return f"{value:,.{digits}f} | {limit} | {'yes' if is_met else 'no'}"


def make_environment(results: Results) -> jinja2.Environment:
    """Returns the environment of the templates: results, and how numbers look."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"f": format_number, "percent": format_percent}
    environment.filters |= {"median": statistics.median}
    environment.globals |= {
        "newest": results.newest,
        "find": results.find,
        "all_newest": results.all_newest,
        "lines": results.lines,
        "notes": results.notes,
        "judge": judge,
        "unit": format_unit,
    }
    return environment


def render_page(results: Results) -> str:
    """Returns the text of docs/performance.md."""
    template = make_environment(results).get_template("performance.md.jinja")
    return template.render()


def find_marked() -> list[pathlib.Path]:
    """Returns README and the pages that quote figures."""
    pages = [README, *sorted(PAGE.parent.glob("*.md"))]
    return [page for page in pages if _MARKED.search(page.read_text())]


def render_marked(results: Results, text: str) -> str:
    """Returns the text of a page, with the newest figures between its markers."""
    template = make_environment(results).get_template("marked.md.jinja")

    def replace(match: re.Match[str]) -> str:
        block = template.blocks[match[2]]
        return match[1] + "".join(block(template.new_context())) + match[4]

    return _MARKED.sub(replace, text)


Draw = Callable[[pathlib.Path], None]


def find_pictures(results: Results) -> dict[str, tuple[list[Result], Draw]]:
    """Returns by file name the results that a picture shows, and how it is drawn."""
    steps = [results.newest(f"step{kind}") for kind in ("", "_101mb", "_4_processes")]
    hooks = results.newest("hooks", rows=("int8", "top_k:0.01"))
    train = results.newest("train")
    reduce = results.newest("collectives_devices")
    found: dict[str, tuple[list[Result], Draw]] = {
        "step.svg": (
            steps,
            functools.partial(step_plot.write, [step.data for step in steps]),
        ),
        "train.svg": ([train], functools.partial(train_plot.write, train.data)),
        "hooks.svg": ([hooks], functools.partial(compared_plot.write, hooks.data)),
        "collectives.svg": (
            [reduce],
            functools.partial(
                collectives_plot.write, reduce.data["replicas"], reduce.data["config"]
            ),
        ),
    }
    if scaling := results.find("scaling"):
        draw = functools.partial(scaling_plot.write, scaling.data)
        found["scaling.svg"] = ([scaling], draw)
    return found


def name_sources(sources: list[Result]) -> str:
    """Returns a comment that names what a picture was drawn from, with its hash."""
    names = (
        f"{each.path.name} {hashlib.sha256(each.path.read_bytes()).hexdigest()[:16]}"
        for each in sources
    )
    return f"<!-- drawn from {', '.join(names)} -->\n"


def draw(results: Results) -> Iterator[tuple[pathlib.Path, str]]:
    """Yields path and text of each picture whose results have changed."""
    for name, (sources, write) in find_pictures(results).items():
        path, comment = FIGURES / name, name_sources(sources)
        if path.exists() and path.read_text().endswith(comment):
            continue
        with tempfile.TemporaryDirectory() as folder:
            drawn = pathlib.Path(folder) / name
            write(drawn)
            yield path, drawn.read_text() + comment


def main() -> None:
    """Writes the files, or names those that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args().check
    results = Results()
    texts = {
        PAGE: render_page(results),
        **{page: render_marked(results, page.read_text()) for page in find_marked()},
        **dict(draw(results)),
    }
    for path, text in texts.items():
        if path.exists() and path.read_text() == text:
            continue
        place = path.relative_to(ROOT)
        if is_check:
            sys.exit(f"{place} is not as the results are: make performance.")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(f"wrote {place}")


if __name__ == "__main__":
    main()
