"""Types: what type checkers know about a user's program, and the package says so."""

import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

from jdp.replicas import mesh
from tests import harness, page_blocks, rarely
from tests.types import training_script

_HERE = harness.ROOT / "tests/types"
_SCRIPT = (_HERE / "training_script.py").read_text()
_KEPT = (_HERE / "kept_types.py").read_text()


class Mistake(NamedTuple):
    """A line of the training script that a user gets wrong."""

    name: str
    right: str
    wrong: str
    seen_at: str = ""  # part of the line that is reported; "": the wrong one.


# All six are in one script.
SIX = (
    Mistake(
        "a batch of another type",
        "jdp.global_batch(world, batch)",
        "jdp.global_batch(world, batch.x)",
    ),
    Mistake("metrics of another type", "float(metrics.loss)", 'float(metrics["loss"])'),
    Mistake(
        "a misspelt field of the state",
        "check_replicas(state.params",
        "check_replicas(state.param",
    ),
    Mistake("a wrong value of an option", 'divide_by="weight"', 'divide_by="weights"'),
    Mistake(
        "results unpacked in a wrong way",
        "((loss, accuracy), grads), used = grad_fn",
        "(loss, accuracy), grads, used = grad_fn",
    ),
    Mistake(
        "another tree than the gradients",
        "tx.update(grads,",
        "tx.update((loss, grads),",
        seen_at="params = add(state.params, updates, rate)",
    ),
)
# Each of these has a script of its own.
FURTHER = (
    Mistake("a misspelt option", "replicated_argnames=", "replicated_argname="),
    Mistake("an unknown all-reduce", "hook=hook)", 'all_reduce="rign")'),
    Mistake("an argument left out", ", rate=1.0)", ")", "metrics = step(state"),
    Mistake("a wrong argument by name", ", rate=1.0)", ', rate="fast")'),
    Mistake("an option left out", "has_aux=True, ", "", "jdp.value_and_grad("),
    Mistake(
        "weights in place of batches",
        "for batch, weight in jdp.join_batches",
        "for weight, batch in jdp.join_batches",
        seen_at="evaluate(state, batch, weight)",
    ),
    Mistake(
        "swapped arguments", "replicate(world, params)", "replicate(params, world)"
    ),
    Mistake("a misspelt metric", "metrics.loss.item", "metrics.los.item"),
    Mistake(
        "parameters of another type",
        "measure(state.params, batch)",
        "measure(state, batch)",
    ),
    Mistake(
        "a batch of another type in an evaluation",
        "measure(state.params, batch)",
        "measure(state.params, batch.x)",
    ),
    Mistake(
        "parameters of another type for many batches",
        "measure.over(state.params, ",
        "measure.over(state, ",
    ),
    Mistake("a misspelt result of an evaluation", "batch).loss", "batch).los"),
    Mistake(
        "a step without metrics",
        "return state, jdp.average(metrics,",
        "return jdp.average(metrics,",
    ),
)
# Each of these is in a copy of `kept_types.py`, with steps of nnx objects.
OF_MODULES = (
    Mistake(
        "swapped objects",
        "(module_step(model, optimizer, batch),",
        "(module_step(optimizer, model, batch),",
    ),
    Mistake(
        "an argument of a step of modules left out",
        "(module_step(model, optimizer, batch),",
        "(module_step(model, batch),",
    ),
    Mistake(
        "a wrong batch of a step of modules",
        'model, {"x": batch.x}, rate=0.1)',
        'model, {"x": batch}, rate=0.1)',
    ),
    Mistake(
        "a misspelt option of a step of modules",
        "@jdp.flax_nnx.data_parallel(split_batches=",
        "@jdp.flax_nnx.data_parallel(split_batch=",
    ),
)

# mypy does not read what jax and jdp import for themselves; it would take as long as
# all the rest. optax has no marker of types: mypy takes its names for `Any`.
_MYPY = """
[mypy]
strict = True
[mypy-jaxlib.*,ml_dtypes.*,zmq.*,scipy.*,flax.*,rich.*,typer.*,IPython.*,matplotlib.*]
follow_imports = skip
[mypy-optax.*]
ignore_missing_imports = True
"""
# Strict, but for what jax and optax leave open.
_PYRIGHT = """{
  "typeCheckingMode": "strict",
  "reportMissingTypeStubs": false,
  "reportUnknownArgumentType": false,
  "reportUnknownLambdaType": false,
  "reportUnknownMemberType": false,
  "reportUnknownVariableType": false
}"""
_COMMANDS = {
    # The cache stays: all but the first run take a second.
    "mypy": ["mypy", "--cache-dir", str(harness.ROOT / ".mypy_cache"), "."],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


def _plant(*mistakes):
    """The script with mistakes, and the line at which each should be seen."""
    text = _KEPT if set(mistakes) <= set(OF_MODULES) else _SCRIPT
    for mistake in mistakes:
        assert text.count(mistake.right) == 1, mistake
        text = text.replace(mistake.right, mistake.wrong)
    lines = text.split("\n")
    return text, [
        next(i for i, line in enumerate(lines, 1) if (m.seen_at or m.wrong) in line)
        for m in mistakes
    ]


def _name_of(mistake):
    return re.sub(r"\W", "_", mistake.name)


def _scripts():
    scripts = {path.stem: path.read_text() for path in _HERE.glob("*_*.py")}
    scripts = {k: v for k, v in scripts.items() if not k.startswith("test_")}
    scripts["page"] = page_blocks.python("docs/types.md", 0)
    scripts["six"] = _plant(*SIX)[0]
    for mistake in FURTHER + OF_MODULES:
        scripts[_name_of(mistake)] = _plant(mistake)[0]
    return scripts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All scripts, and how they are checked."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in _scripts().items():
        (folder / f"{name}.py").write_text(text)
    (folder / "mypy.ini").write_text(_MYPY)
    (folder / "pyrightconfig.json").write_text(_PYRIGHT)
    return folder


@pytest.fixture(scope="module", params=rarely.cases(_COMMANDS, often=("pyright",)))
def found(request, folder):
    """By script, the lines with an error, and what a checker says there."""
    # As an installed package, where types count only if it says that it has some.
    environ = {**os.environ, "PYTHONPATH": harness.python_path()}
    process = subprocess.run(
        [sys.executable, "-m", *_COMMANDS[request.param]],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
    )
    assert re.search(r"\d+ errors?\b|^Success", process.stdout, re.M), process.stdout
    lines = re.findall(r"(\w+)\.py:(\d+):(?:\d+ -)? error: (.*)", process.stdout)
    errors = {}
    for script, line, text in lines:
        errors.setdefault(script, {}).setdefault(int(line), []).append(text)
    return errors


@pytest.mark.parametrize("script", ["training_script", "kept_types", "page"])
def test_correct_programs_have_no_error(found, script):
    assert found.get(script) is None


def test_six_mistakes_in_one_script_are_all_seen(found):
    lines = dict(zip([m.name for m in SIX], _plant(*SIX)[1], strict=True))
    assert [name for name, n in lines.items() if n not in found["six"]] == []


@pytest.mark.parametrize(
    "mistake", FURTHER + OF_MODULES, ids=lambda mistake: mistake.name
)
def test_further_mistakes_are_seen(found, mistake):
    (line,) = _plant(mistake)[1]
    assert line in found[_name_of(mistake)]


def test_the_correct_script_runs():
    before = mesh.find_current_world()
    world = harness.local_world(3)
    mesh.set_current_world(world)
    try:
        losses = training_script.main(world)
    finally:
        mesh.set_current_world(before)
    assert len(losses) == 24 and losses[19] < 0.9 * losses[0]
