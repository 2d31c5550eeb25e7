"""`--plot` of `jdp bench`: what the pictures show, and which files are refused."""

import re

import pytest
from typer.testing import CliRunner

from jdp.bench import (
    compared,
    compared_plot,
    plots,
    scaling,
    scaling_plot,
    step,
    step_plot,
    train_plot,
)
from jdp.bench.driver import Turn
from jdp.cli import main

CONFIG = {
    "num_processes": 2,
    "num_blocks": 3,
    "width": 8,
    "batch_size": 4,
    "jax": "0",
}
SECONDS = {
    "jdp": [0.25, 0.5],
    "no communication": [0.125, 0.125],
    "two copies alone": [0.01, 0.02],
    "torch DDP": [0.5, 0.5],
    "torch, no communication": [0.25, 0.5],
}
MEASURED = step.summarize(SECONDS)


def _compared():
    turns = {"no hook": [Turn(0.5, 4e6)], "int8": [Turn(0.25, 1e6)]}
    return compared.summarize(turns, "no hook") | {"config": CONFIG}


def _trained():
    row = {"tokens_per_s": 1234.0, "rounds_tokens_per_s": [1200.0], "losses": [2.0]}
    systems = {"jdp": row, "no communication": row}
    return {"systems": systems, "steps": [13], "config": CONFIG}


def _scaled():
    return scaling.summarize({1: MEASURED["systems"], 2: MEASURED["systems"]}, 4)


PICTURES = {
    "step": (lambda path: step_plot.write([MEASURED | {"config": CONFIG}], path)),
    "hooks": (lambda path: compared_plot.write(_compared(), path)),
    "train": (lambda path: train_plot.write(_trained(), path)),
    "scaling": (lambda path: scaling_plot.write(_scaled(), path)),
}
# Bars' texts and axes, as a reader sees them.
TEXTS = {
    "step": {"jdp", "375.0", "torch DDP", "2 processes, 3 blocks, width 8, batch 4"},
    "hooks": {"no hook", "int8", "250.0", "MB sent per process and step", "4", "1"},
    "train": {"jdp", "1,234", "loss on held-out text"},
    "scaling": {"jdp", "torch DDP", "processes", "samples per second, all processes"},
}


def _texts(path):
    """Returns the texts of an SVG, which matplotlib keeps in comments."""
    return set(re.findall(r"<!-- (.*?) -->", path.read_text()))


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_names_and_figures_in_both_formats(name, tmp_path):
    svg, png = tmp_path / "plot.svg", tmp_path / "plot.png"
    PICTURES[name](svg)
    PICTURES[name](png)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert TEXTS[name] <= _texts(svg)


def test_the_same_results_make_the_same_svg(tmp_path):
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    PICTURES["step"](first)
    PICTURES["step"](second)
    assert first.read_bytes() == second.read_bytes()


def test_variants_that_send_nothing_have_a_picture_of_times_alone(tmp_path):
    turns = {"Adam": [Turn(0.5, 100.0)], "zero1": [Turn(0.25, 100.0)]}
    result = compared.summarize(turns, "Adam") | {"config": CONFIG}
    compared_plot.write(result, tmp_path / "plot.svg")
    found = _texts(tmp_path / "plot.svg")
    assert "500.0" in found and "MB sent per process and step" not in found


def test_speed_is_of_all_processes_and_compared_within_a_framework():
    one, two = _scaled()["processes"]
    assert (one["num_processes"], two["num_processes"]) == (1, 2)
    assert "two copies alone" not in one["systems"]
    assert one["systems"]["jdp"]["samples_per_s"] == pytest.approx(4 / 0.375)
    assert two["systems"]["jdp"]["samples_per_s"] == pytest.approx(8 / 0.375)
    assert two["systems"]["jdp"]["over_alone"] == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert two["systems"]["torch DDP"]["over_alone"] == pytest.approx((1 / 2 + 1) / 2)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("step", "--plot", "x.pdf"), "--plot: 'x.pdf' must end with .png or .svg."),
        (("hooks", "--plot", "/no/such/x.png"), "'/no/such/x.png' cannot be written"),
        (("step", "--overlap", "--plot", "x.png"), "--plot: cannot draw --overlap."),
        (("scaling", "--processes", "0"), "'0' must be numbers from 1 to 64"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(words, expected):
    result = CliRunner().invoke(main.app, ["bench", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())


def test_a_missing_matplotlib_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Exception, match="needs matplotlib: pip install matplotlib"):
        plots.check(tmp_path / "x.png")
