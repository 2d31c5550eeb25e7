"""The diffs of docs/training_scripts.md, applied to scripts as tutorials have them."""

import contextlib
import functools
import pathlib
import runpy
import sys
from unittest import mock

import chex
import equinox as eqx
import jax
import numpy as np
import pytest

import jdp
from jdp.replicas import mesh
from tests import diffs, harness, rarely

PAGE = "docs/training_scripts.md"
# The order on the page, and the most lines that may change.
MOST = {"optax": 4, "equinox": 6, "haiku": 4, "pmap": 6}
# What a script has trained, by the names of its variables.
TRAINED = {
    "optax": ("params", "opt_state"),
    "equinox": ("model", "opt_state"),
    "haiku": ("state",),
    "pmap": ("state",),
}


def _original(name):
    return harness.ROOT / f"tests/originals/{name}_digits.py"


def _diff(name):
    return dict(zip(MOST, diffs.of_page(PAGE), strict=True))[name]


def _change(name, folder):
    path = pathlib.Path(folder, f"{name}_digits.py")
    path.write_text(diffs.apply(_diff(name), _original(name).read_text()))
    return path


@pytest.mark.parametrize("name", MOST)
def test_a_diff_changes_few_lines_of_a_script_that_does_not_know_jdp(name):
    assert 0 < diffs.count_changed(_diff(name)) <= MOST[name]
    assert "jdp" not in _original(name).read_text()


@pytest.mark.parametrize("name", ["equinox", "haiku"])
def test_a_diff_makes_the_example(name, tmp_path):
    example = (harness.ROOT / f"examples/{name}_digits.py").read_text()
    assert _change(name, tmp_path).read_text() == example
    assert len(example.splitlines()) < 120


def test_the_lines_of_a_diff_are_counted():
    text = "@@ -1 +1 @@\n a\n-b\n+c\n+d\n e\n-f\n g\n+h\n+i\n"
    assert diffs.count_changed(text) == 2 + 1 + 2
    assert diffs.apply(text, "a\nb\ne\nf\ng\n") == "a\nc\nd\ne\ng\nh\ni\n"


def _run(path, name):
    """Runs a script for an epoch; returns what it has trained, and its history."""
    with mock.patch.object(sys, "argv", [str(path), "--epochs", "1"]):
        made = runpy.run_path(str(path), run_name="__main__")
    trained = [eqx.filter(made[key], eqx.is_array) for key in TRAINED[name]]
    return jax.tree.map(np.asarray, (jax.tree.leaves(trained), made["history"]))


@functools.cache
def _alone(name):
    """What the original makes on one device."""
    first = jax.local_devices()[:1]
    with (
        mock.patch.object(jax, "local_devices", lambda: first),
        mock.patch.object(jax, "local_device_count", lambda: 1),
    ):
        leaves, history = _run(_original(name), name)
    if name == "pmap":
        leaves = [x[0] for x in leaves]
    return leaves, history


def _assert_equal(found, expected):
    assert len(found[0]) == len(expected[0]) > 10
    chex.assert_trees_all_close(found, expected, atol=1e-5)


@contextlib.contextmanager
def _initialized(monkeypatch, num_replicas):
    """Lets `jdp.init` return some devices of this process."""
    before = mesh.find_current_world()

    def init(*, axis_name="data"):
        world = harness.local_world(num_replicas, axis_name)
        mesh.set_current_world(world)
        return world

    monkeypatch.setattr(jdp, "init", init)
    try:
        yield
    finally:
        mesh.set_current_world(before)


@pytest.mark.parametrize("name", rarely.cases(MOST, often=("optax",)))
def test_a_process_with_four_replicas_trains_as_one_device(name, tmp_path, monkeypatch):
    with _initialized(monkeypatch, 4):
        found = _run(_change(name, tmp_path), name)
    _assert_equal(found, _alone(name))


def run_changed(folder, names):
    """In a process: runs changed scripts, which share a world, one after the other."""
    paths = [pathlib.Path(folder, f"{name}_digits.py") for name in names]
    return [_run(path, name) for path, name in zip(paths, names, strict=True)]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("optax", "equinox", "haiku"), marks=pytest.mark.slow),
        pytest.param(("pmap",), marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one_device(names, tmp_path):
    for name in names:
        _change(name, tmp_path)
    for process in harness.run_checked(run_changed, 2, str(tmp_path), names):
        for name, found in zip(names, process, strict=True):
            _assert_equal(found, _alone(name))


def test_a_model_of_equinox_as_a_state_is_refused_with_the_remedy():
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    step = jdp.data_parallel(lambda m, x: m, world=harness.local_world(2))
    message = r"activation` is a .*eqx.partition\(model, eqx.is_array\).*eqx.combine"
    with pytest.raises(TypeError, match=message):
        step(model, np.ones((4, 2)))
    evaluate = jdp.replicated(
        lambda m, x: jax.vmap(m)(x).mean(), world=harness.local_world(2)
    )
    with pytest.raises(TypeError, match=message):
        evaluate(model, np.ones((4, 2)))
