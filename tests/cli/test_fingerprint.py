"""`jdp fingerprint`: what it prints, its exit codes, and what it says to a typo."""

import json

import numpy as np
import pytest
import typer.testing

import jdp
from jdp.cli import main


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = typer.testing.CliRunner(env={"COLUMNS": "100"})

    def run(*arguments):
        result = runner.invoke(main.app, ["fingerprint", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code, result.stdout, " ".join(result.stderr.split())

    return run


def _write(path, changed_at=None, num_steps=3, num_replicas=2):
    """Writes a record in which the last bit of `w` changes at one step."""
    record = jdp.FingerprintRecord(path, every=10)
    state = {
        "b[0]": np.zeros(2),
        "own": jdp.PerReplica(np.zeros((num_replicas, 1))),
        "w": np.ones((2, 3), np.float32),
    }
    record.begin(state)
    for _ in range(10 * num_steps):
        if record.step + 1 == changed_at:
            state["w"] = np.nextafter(state["w"], np.float32(2))
        record.after_step(state)
    return jdp.fingerprint_state(state)


def _short(fingerprint):
    """The digits that a record has of `w`."""
    return fingerprint.leaves["['w']"][:16]


def test_runs_that_are_the_same(run):
    _write("a")
    _write("b", num_steps=2)
    code, out, err = run("diff", "a", "b")
    assert (code, err) == (0, "")
    assert out == "The runs are the same in 3 steps, up to 20.\n"


def test_runs_that_part(run):
    _write("a")
    b = _write("b", changed_at=12)
    code, out, err = run("diff", "a", "b")
    assert (code, err) == (1, "")
    first, second, leaf = out.splitlines()
    assert (
        first
        == "The runs differ in step 20, after step 10, in which they are the same."
    )
    assert second == "1 of 3 leaves differ:"
    assert leaf.startswith("  ['w']: ")
    assert leaf.endswith(f"{_short(b)} in B")


def test_runs_that_never_were_the_same(run):
    _write("a")
    record = jdp.FingerprintRecord("b")
    record.begin({str(i): i for i in range(20)})
    code, out, _ = run("diff", "a", "b")
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "The runs differ in step 0, the first that both have."
    assert lines[1] == "23 of 23 leaves differ:"
    assert lines[2] == "  ['b[0]']: only in A, float64[2]"
    assert lines[5] == "  ['0']: only in B, Python int"
    assert lines[-1] == "  and 13 more"


def test_runs_of_other_numbers_of_replicas(run):
    _write("a")
    _write("b", num_replicas=4)
    code, out, _ = run("diff", "a", "b")
    assert code == 0
    assert "Not compared: 1 leaf in a `jdp.PerReplica`" in out
    assert "such as ['own'].value" in out


def test_diff_as_json(run):
    _write("a")
    _write("b", changed_at=12)
    code, out, _ = run("diff", "a", "b", "--json")
    found = json.loads(out)
    (leaf,) = found.pop("leaves")
    assert code == 1 and leaf["path"] == "['w']" and leaf["a"] != leaf["b"]
    assert found == {
        "same": False,
        "num_steps": 3,
        "last_same_step": 10,
        "step": 20,
        "num_leaves": 3,
        "not_compared": [],
    }
    code, out, _ = run("diff", "a", "a", "--json")
    assert code == 0 and json.loads(out)["same"] and json.loads(out)["step"] is None


def test_show_lists_steps_and_leaves(run):
    last = _write("a")
    code, out, err = run("show", "a")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 4 and lines[3] == f"step 30  {last}  3 leaves"
    code, out, _ = run("show", "a", "--step", "30")
    assert code == 0
    digest = _short(last)
    assert out.splitlines()[-1] == f"  {digest}  ['w']  float32[2,3]"
    code, out, _ = run("show", "a", "--json")
    assert [json.loads(line)["step"] for line in out.splitlines()] == [0, 10, 20, 30]
    code, out, _ = run("show", "a", "--step", "30", "--json")
    assert json.loads(out)["leaves"][2] == {
        "path": "['w']",
        "type": "float32[2,3]",
        "digest": digest,
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["diff", "a", "none"], "No such file or directory: 'none'. Name a file that"),
        (["diff", "text", "a"], "'text' is not a record of fingerprints: line 1: "),
        (["diff", "a"], "Missing argument 'B'"),
        (["diff", "a", "late"], "The runs have no step in common: the first has steps"),
        (["show", "a", "--step", "5"], "'a' does not have step 5."),
        (["show", "text"], "'text' is not a record of fingerprints"),
    ],
)
def test_what_is_wrong_is_said(run, tmp_path, arguments, says):
    _write("a")
    (tmp_path / "text").write_text("text\n")
    jdp.FingerprintRecord("late", every=35, step=35).begin({"w": 1})
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert says in err
