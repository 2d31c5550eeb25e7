"""docs/performance.md and README show the figures of result files, and no others."""

import importlib.util
import json
import re
import shutil
import sys

import pytest
import typer.main

from jdp.cli import main
from tests import harness

_SPEC = importlib.util.spec_from_file_location(
    "write_performance", harness.ROOT / "tools/write_performance.py"
)
writer = importlib.util.module_from_spec(_SPEC)
sys.modules["write_performance"] = writer  # dataclasses look their module up.
_SPEC.loader.exec_module(writer)

RESULTS = writer.Results()
SOURCE = (writer.TEMPLATES / "performance.md.jinja").read_text()
MARKED_SOURCE = (writer.TEMPLATES / "marked.md.jinja").read_text()

# Units that only a measured figure has; sizes of models and buffers are none.
_UNITS = r"ms|µs|us|ns|s|seconds|minutes|%|/s|per second|points|times|tokens"
# A limit is text in the templates. "At most 0.3" is one, "0.3 of torch's" is not.
_LIMIT = r"\bat (most|least) [\d.,]+( (of|ms|µs|s|points)\b)?"
_TAGS = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.S)


def hand_written(text):
    """Returns the figures with a unit, and the ratios, that no expression writes."""
    text = re.sub(r"(?ms)^```.*?^```$", "", text)
    text = _TAGS.sub("", text)
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", "", text)
    text = re.sub(rf"{_LIMIT}|\b(JAX|jax|Python|torch) [\d.]+", "", text)
    measured = rf"-?\d[\d,.]*\s?(?:{_UNITS})(?![\w/])"
    ratio = r"(?<![\d.])\d+\.\d{2,}(?![\d.])(?! ?[KMG]i?B)"
    return re.findall(f"{measured}|{ratio}", text)


def hand_written_cells(text):
    """Returns the cells with a digit that no expression writes, but labels and limits.

    The first column has labels. A column whose header has "must be" has limits.
    """
    found, header = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            header = header if line.startswith("{%") else None
            continue
        cells = [c.strip() for c in _TAGS.sub("", line).strip("|").split("|")]
        if header is None:
            header = cells
            continue
        for i, cell in enumerate(cells[1:], 1):
            is_limit = i < len(header) and "must be" in header[i]
            if re.search(r"\d", cell) and not is_limit:
                found.append(cell)
    return found


def test_the_page_is_as_the_results_are():
    expected = writer.render_page(RESULTS)
    assert writer.PAGE.read_text() == expected, "Run: make performance."


def test_the_figures_that_other_pages_quote_are_as_the_results_are():
    names = []
    for page in writer.find_marked():
        text = page.read_text()
        here = re.findall(r"<!-- figures: (\w+) -->", text)
        assert text.count("<!-- end of figures -->") == len(here), page
        assert text == writer.render_marked(RESULTS, text), "Run: make performance."
        names += here
    blocks = writer.make_environment(RESULTS).get_template("marked.md.jinja").blocks
    assert names[:2] == ["first", "figures"]  # of README.
    assert sorted(names) == sorted(blocks)


def test_another_figure_in_readme_is_replaced():
    text = writer.README.read_text()
    before = re.search(r"a step takes ([\d.]+) of", text)
    wrong = text.replace(before[0], "a step takes 0.01 of")
    assert writer.render_marked(RESULTS, wrong) == text


def test_no_figure_is_written_by_hand():
    assert hand_written(SOURCE) == hand_written(MARKED_SOURCE) == []
    assert hand_written_cells(SOURCE) == hand_written_cells(MARKED_SOURCE) == []
    marked = re.sub(
        r"(?s)<!-- figures: .*?<!-- end of figures -->", "", writer.README.read_text()
    )
    assert hand_written(marked) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("takes 14.7 ms here", ["14.7 ms"]),
        ("takes {{ step | f(1) }} ms here", []),
        ("jdp takes 0.35 of its time", ["0.35"]),
        ("costs jdp 6 % of the speed", ["6 %"]),
        ("must be at most 0.35 of it, and at most 30 µs", []),
        ("12.7 MB in 48 blocks of width 256, `jdp bench --x 1.25`", []),
        ("182,339/s and 2.3 times as long", ["182,339/s", "2.3 times"]),
    ],
)
def test_the_rule_for_text_finds_measured_figures(text, found):
    assert hand_written(text) == found


def test_the_rule_for_tables_finds_measured_cells():
    table = """| 2 processes | ms | must be |
|---|---|---|
{% for row in rows %}
| torch 2 | {{ row.x }} | at most 0.5 |
{% endfor %}
| jdp | 9.3 | 0.5 |

| another | measured |
|---|---|
| a | {{ x }} and 7 |"""
    assert hand_written_cells(table) == ["9.3", "and 7"]


def _stored():
    """Returns from the Makefile the words after `jdp bench`, by kind of result."""
    makefile = (harness.ROOT / "Makefile").read_text()
    return {
        kind: words.split()
        for kind, words in re.findall(r"(?m)^BENCH_(\w+) := (.*)$", makefile)
    }


def test_make_results_stores_every_kind_that_the_page_shows():
    calls = re.findall(r'(?:newest|find)\("(\w+)"', SOURCE + MARKED_SOURCE)
    other_python = {"reducer_overhead_py313"}
    assert _stored().keys() == set(calls) - other_python


@pytest.mark.parametrize("kind", _stored())
def test_the_commands_of_make_results_are_valid(kind):
    command = typer.main.get_command(main.app)
    for name in ("bench", _stored()[kind][0]):
        command = command.commands[name]
    words = [*_stored()[kind][1:], "--json", "x.json"]
    command.make_context("bench", words)  # An option that does not exist raises.


def _needed():
    """Returns the patterns of the files of each call of the templates."""
    calls = re.findall(r'newest\(((?:"\w+"(?:, )?)+)', SOURCE + MARKED_SOURCE)
    json_files = {
        tuple(f"{kind}_cpu*.json" for kind in re.findall(r'"(\w+)"', call))
        for call in calls
    }
    lines = {(f"{name}.jsonl",) for name in re.findall(r'lines\("(\w+)"\)', SOURCE)}
    return sorted(json_files | lines)


def test_the_templates_name_the_files_that_they_need():
    assert len(_needed()) > 15
    assert {("step_cpu*.json",), ("steps_gpu.jsonl",)} <= set(_needed())


@pytest.mark.parametrize(
    "patterns",
    [
        pytest.param(patterns, marks=[pytest.mark.slow] * (k % 2))
        for k, patterns in enumerate(_needed())
    ],
    ids=" ".join,
)
def test_a_missing_result_is_named(patterns, tmp_path):
    shutil.copytree(writer.RESULTS, tmp_path / "results")
    for pattern in patterns:
        for path in (tmp_path / "results").glob(f"????-??-??_{pattern}"):
            path.unlink()
    with pytest.raises(writer.MissingResultError, match=patterns[0].split("_cpu")[0]):
        writer.render_page(writer.Results(tmp_path / "results"))


def _rerun(folder, name, date, **changes):
    """Writes the newest run of a kind again, as of another day."""
    result = RESULTS.newest(name)
    config = result.data.get("config", {}) | {"jax": "9.9", "python": "3.99"}
    config |= {"peers": {"torch": "8.8", "mpi4jax": "7.7"}, "rounds": 5}
    config |= {"cpu": "CPU 5", "num_cpus": 16}
    data = result.data | changes | {"config": config}
    path = folder / f"{date}_{name}_cpu2.json"
    path.write_text(json.dumps(data))


def test_new_runs_take_the_place_of_old_ones_and_of_notes(tmp_path):
    folder, date = tmp_path / "results", "2031-02-03"
    shutil.copytree(writer.RESULTS, folder)
    systems = RESULTS.newest("step").data["systems"]
    flat = {"mpi4jax flat": systems["jdp"] | {"median_ms": 4321.0}}
    _rerun(folder, "step", date, systems=systems | flat)
    call_us = {"bare": 100.0, "decorated": 125.0}
    times = dict.fromkeys(("by hand", "without", "with", "both"), 1234.0)
    _rerun(folder, "overhead", date, call_us=call_us, tracing_ms=times)
    for name in ("train", "train_no_pin", "hooks", "zero1", "local", "join", "eager"):
        hooks = RESULTS.newest("hooks", rows=("int8",)).data
        _rerun(folder, name, date, **(hooks if name == "hooks" else {}))
    for name in ("collectives_processes", "parameter_server", "step_4_processes"):
        _rerun(folder, name, date)
    row = {"samples_per_s": 5678.0, "over_alone": 0.5}
    scaled = [{"num_processes": n, "systems": {"jdp": row}} for n in (1, 2)]
    config = {"config": {"rounds": 3}}
    data = {
        "scaling": {"processes": scaled} | config,
        "leaves": {
            "num_leaves": 1000,
            "rounds": 3,
            "cpu_s": {
                "adam": {"init_s": 1.0, "lower_s": 1.0},
                "skip_unused": {"init_s": 1.0, "lower_s": 1.5},
            },
        },
    }
    for name, found in data.items():
        (folder / f"{date}_{name}_cpu2.json").write_text(json.dumps(found))
    page = writer.render_page(writer.Results(folder))
    assert "a virtual machine with 16 cores (CPU 5, no GPU)" in page
    assert "jax 9.9, torch 8.8 (CPU), mpi4jax 7.7." in page
    assert "| mpi4jax, one flat buffer | 4,321.0 | 1.000 |" in page
    assert "over one flat buffer of mpi4jax | 1.000 | at most 0.75 | no |" in page
    assert "µs | 25.0 | at most 30 | yes |" in page
    assert "| jax 9.9, Python 3.99, ms |" in page and "| 1,234 |" in page
    assert "| processes | 1 | 2 |\n|---|---|---|\n| jdp | 5,678 (0.50) |" in page
    assert "| `skip_unused` | 2.50 | 1.250 | at most 1.5 | yes |" in page
    assert page.count(date) >= 14
    for old in ("not installed", "instead of sorting", "three runs", "other load"):
        assert old not in page


def test_every_table_has_as_many_cells_in_each_row():
    width = 0
    for line in writer.PAGE.read_text().splitlines():
        cells = line.count("|") if line.startswith("|") else 0
        assert not width or not cells or cells == width, line
        width = cells


def _write(folder, name, systems):
    rows = {system: {"rounds_ms": rounds} for system, rounds in systems.items()}
    data = {"systems": rows, "config": {"rounds": 2}}
    (folder / name).write_text(json.dumps(data))


def test_the_newest_file_counts_and_ratios_are_medians_of_the_rounds(tmp_path):
    newest = {"a": [1.0, 4.0, 9.0], "b": [2.0, 4.0, 3.0]}
    _write(tmp_path, "2026-01-02_step_cpu2.json", newest)
    _write(tmp_path, "2026-01-01_step_cpu2.json", {"a": [1.0], "b": [1.0], "c": [1.0]})
    _write(tmp_path, "2026-01-03_step_4_processes_cpu2.json", {"a": [1.0]})
    results = writer.Results(tmp_path)
    step = results.newest("step")
    assert (step.date, step.over("a", "b"), step.over("a", "c")) == (
        "2026-01-02",
        1.0,
        None,
    )
    assert step.added("a", "b", "b") == 0.0
    assert results.newest("step", rows=("c",)).date == "2026-01-01"
    with pytest.raises(writer.MissingResultError, match="_train_cpu"):
        results.newest("train")


def test_runs_of_one_day_are_all_found_and_the_last_counts(tmp_path):
    for day, run in ((1, 1), (2, 1), (2, 2)):
        _write(tmp_path, f"2026-01-0{day}_join_cpu2_run{run}.json", {"a": [run]})
    results = writer.Results(tmp_path)
    assert [r.rounds("a") for r in results.all_newest("join")] == [[1], [2]]
    assert results.newest("join").rounds("a") == [2]


def test_a_limit_is_judged_by_the_figure_itself():
    assert writer.judge(0.5047, 2, most=0.5) == "0.50 | at most 0.5 | no"
    assert writer.judge(1.15, 2, least=1.15) == "1.15 | at least 1.15 | yes"
    assert writer.judge(None, most=0.75) == "not measured | at most 0.75 | "


def test_each_picture_was_drawn_from_the_results_that_the_page_shows():
    shown = set(re.findall(r"!\[[^]]*\]\(figures/(.*?)\)", writer.PAGE.read_text()))
    pictures = writer.find_pictures(RESULTS)
    assert shown == pictures.keys()
    for name, (sources, _) in pictures.items():
        text = (writer.FIGURES / name).read_text()
        assert text.startswith("<?xml") and text.endswith(writer.name_sources(sources))
    assert {path.name for path in writer.FIGURES.iterdir()} == shown


@pytest.mark.slow
def test_a_picture_is_drawn_anew_only_if_its_results_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "FIGURES", tmp_path)
    drawn = dict(writer.draw(RESULTS))
    assert {path.name for path in drawn} == writer.find_pictures(RESULTS).keys()
    for path, text in drawn.items():
        path.write_text(text)
    assert list(writer.draw(RESULTS)) == []
    (tmp_path / "step.svg").write_text("other")
    assert [path.name for path, _ in writer.draw(RESULTS)] == ["step.svg"]
