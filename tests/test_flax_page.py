"""The diffs of docs/flax.md, applied to scripts in the way of Flax's tutorials."""

import functools
import pathlib
import re
import runpy
import sys
from unittest import mock

import chex
import jax
import numpy as np
import pytest
from flax import nnx

import jdp
from jdp.replicas import mesh
from tests import harness, page_blocks, rarely

ORIGINALS = harness.ROOT / "tests/originals"
SCRIPTS = ("nnx", "linen")
MAX_LINES = 6


def _diff(name):
    """The lines of the diff that changes the original `name`."""
    blocks = page_blocks.find("diff")
    (text,) = (b.text for b in blocks if f"+import jdp.flax_{name}\n" in b.text)
    return text.splitlines()


def _apply(lines, text):
    """Applies the lines of a unified diff, as `patch` does."""
    old, new, place = text.splitlines(), [], 0
    for line in lines:
        if line.startswith("@@"):
            start = int(re.match(r"@@ -(\d+)", line)[1]) - 1
            new += old[place:start]
            place = start
            continue
        mark, content = line[:1] or " ", line[1:]
        if mark in " -":
            assert old[place] == content, f"line {place + 1} is another one"
            place += 1
        if mark in " +":
            new.append(content)
    return "\n".join([*new, *old[place:]]) + "\n"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_diff_changes_six_lines_at_most_and_makes_the_example(name):
    lines = _diff(name)
    for mark in "+-":
        assert 0 < sum(line.startswith(mark) for line in lines) <= MAX_LINES
    original = (ORIGINALS / f"{name}_digits.py").read_text()
    assert "jdp" not in original
    example = (harness.ROOT / f"examples/flax_{name}_digits.py").read_text()
    assert _apply(lines, original) == example
    assert len(example.splitlines()) < 120


def _run(path):
    """Runs a script for an epoch; returns what it has trained, and its metrics."""
    with mock.patch.object(sys, "argv", [str(path), "--epochs", "1"]):
        made = runpy.run_path(str(path), run_name="__main__")
    if "optimizer" in made:
        graph = made["model"], made["optimizer"]
        state = nnx.to_pure_dict(nnx.state(graph, nnx.Not(nnx.RngKey)))
    else:
        state = made["state"].replace(dropout_key=None)
        state = {k: getattr(state, k) for k in ("params", "opt_state", "batch_stats")}
    return jax.tree.map(np.asarray, (jax.tree.leaves(state), made["history"]))


@functools.cache
def _alone(name):
    """What the original makes on one device."""
    return _run(ORIGINALS / f"{name}_digits.py")


def _assert_equal(found, expected):
    assert len(found[0]) == len(expected[0]) > 10
    chex.assert_trees_all_close(found, expected, atol=1e-5)


def _changed(name, folder):
    path = pathlib.Path(folder, f"{name}.py")
    original = (ORIGINALS / f"{name}_digits.py").read_text()
    path.write_text(_apply(_diff(name), original))
    return path


@pytest.mark.parametrize("name", rarely.cases(SCRIPTS, often=("linen",)))
@pytest.mark.slow
def test_a_process_with_four_replicas_trains_as_one_device(name, tmp_path, monkeypatch):
    world = harness.local_world(4)
    monkeypatch.setattr(jdp, "init", lambda: world)
    before = mesh.find_current_world()
    mesh.set_current_world(world)
    try:
        found = _run(_changed(name, tmp_path))
    finally:
        mesh.set_current_world(before)
    _assert_equal(found, _alone(name))


def run_changed(folder):
    """In a process: runs the changed scripts one after the other."""
    return [_run(pathlib.Path(folder, f"{name}.py")) for name in SCRIPTS]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_train_as_one_device(tmp_path):
    for name in SCRIPTS:
        _changed(name, tmp_path)
    for process in harness.run_checked(run_changed, 2, str(tmp_path)):
        for name, found in zip(SCRIPTS, process, strict=True):
            _assert_equal(found, _alone(name))
