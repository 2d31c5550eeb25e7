"""`jdp bench eager`: its rows, its limits, and how it fails."""

import importlib.util
import io
import json
import subprocess
import sys

import pytest
import rich.console

from jdp.bench import eager
from jdp.cli import main
from tests import harness

pytestmark = pytest.mark.slow

TORCH = "torch gloo"


def _seconds(*, has_torch, has_horovod=False):
    """Three rounds of every variant."""
    seconds = {f"{eager.ALL_REDUCE} {n}": [1.0, 2.0, 3.0] for n in eager.NUM_BYTES}
    seconds |= {
        eager.MANY: [0.01, 0.02, 0.03],
        eager.MANY_NEW: [0.01, 0.02, 0.03],
        eager.STEP: [0.03, 0.05, 0.04],
        eager.FLAT: [0.02, 0.02, 0.04],
        eager.DECORATED: [0.03, 0.05, 0.04],
        eager.IDLE: [0.001, 0.002, 0.006],
        eager.COORDINATOR: [0.5, 2.0, 1.5],
    }
    if has_torch:
        seconds |= {f"{TORCH} {n}": [1.0, 1.0, 3.0] for n in eager.NUM_BYTES}
    if has_horovod:
        seconds |= {
            eager.HOROVOD_ONE: [1e-3, 2e-3, 2e-3],
            eager.HOROVOD_MANY: [0.01, 0.02, 0.03],
            eager.HOROVOD_MANY_NEW: [0.02, 0.04, 0.06],
        }
    return seconds


def test_names_are_compared_with_horovod_where_it_runs():
    rows = eager.summarize(_seconds(has_torch=False, has_horovod=True))["rows"]
    found = {row["what"]: row for row in rows if "Horovod" in row["what"]}
    assert [row["over"] for row in found.values()] == pytest.approx([1000, 1.0, 0.5])
    new = found["1,000 new names / Horovod"]
    assert new["is_met"] and new["beside_median"] == pytest.approx(25_000)
    assert "over" not in eager.summarize(_seconds(has_torch=True))["rows"][3]


def test_limits_are_of_the_median_of_the_rounds():
    rows = eager.summarize(_seconds(has_torch=True))["rows"]
    judged = {row["what"]: row for row in rows if "must_be" in row}
    assert {name: (row["must_be"], row["is_met"]) for name, row in judged.items()} == {
        "1 element / torch gloo": ("at most 1.2", True),
        "1,000 names at once": ("at least 50,000", True),
        "1,000 new names at once": ("at least 60,000", False),
        "1,000 new names / Horovod": ("at most 1", None),
        "step / flat shard_map": ("at most 1.5", True),
        "idle engine": ("at most 0.5", True),
        "coordinator, 256 ranks": ("at most 1", False),
    }
    assert judged["1 element / torch gloo"]["over"] == 1.0
    assert judged["1,000 names at once"]["median"] == pytest.approx(50_000)
    assert judged["step / flat shard_map"]["over"] == pytest.approx(1.5)
    assert judged["idle engine"]["median"] == pytest.approx(0.2)


def test_without_torch_nothing_is_said_of_what_needs_it():
    result = eager.summarize(_seconds(has_torch=False))
    rows = {row["what"]: row for row in result["rows"]}
    assert rows["1 element / torch gloo"]["is_met"] is None
    assert "over" not in rows["64 KiB / torch gloo"]
    assert rows["step / flat shard_map"]["is_met"]
    names = ("num_processes", "num_blocks", "width", "batch_size", "jax")
    result["config"] = dict.fromkeys(names, 2)
    console = rich.console.Console(width=80, file=io.StringIO())
    console.print(eager._table(result))
    text = console.file.getvalue()
    assert "torch did not run" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.multiprocess
def test_bench_eager_measures_every_row_and_writes_a_file(tmp_path):
    path = tmp_path / "eager.json"
    small = ("--blocks", "2", "--width", "8", "--batch", "4")
    few = ("--rounds", "1", "--steps", "2", "--idle-s", "0.1")
    process = subprocess.run(
        [sys.executable, "-m", "jdp.cli.main", "bench", "eager", *small, *few]
        + ["--json", path],
        env={
            **harness.compile_fast_environ(),
            "PYTHONPATH": harness.python_path(),
            "COLUMNS": "100",
        },
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(path.read_text())
    assert result["config"]["num_blocks"] == 2 and result["config"]["idle_s"] == 0.1
    assert len(result["rows"]) == 13
    has_torch = importlib.util.find_spec("torch") is not None
    for row in result["rows"]:
        assert row["what"] in process.stdout
        # What the engine adds is a difference, in a tenth of a second of noise.
        assert row["median"] > 0 or row["what"] == "idle engine"
        assert len(row["rounds_s"]) == 1
        if "beside" in row:
            (value,), (other,) = row["rounds_s"], row["beside_rounds_s"]
            assert row["over"] == pytest.approx(value / other)
        is_compared = "/ torch" in row["what"] if has_torch else False
        assert ("beside" in row) == (is_compared or "step" in row["what"])
    assert ("torch did not run" in process.stdout) == (not has_torch)


@pytest.mark.parametrize(
    "arguments,expected",
    [
        (("--rouns", "1"), "No such option: --rouns"),
        (("--rounds", "0"), "Invalid value for '--rounds': "),
        (("--idle-s", "0"), "Invalid value for '--idle-s': "),
        (("-n", "0"), "Invalid value for '-n': "),
        (("--steps", "x"), "Invalid value for '--steps': "),
        (
            ("--json", "/no/such/folder/x.json"),
            "'/no/such/folder/x.json' cannot be written: No such file or directory",
        ),
    ],
)
def test_a_typo_is_named(arguments, expected, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main.app(("bench", "eager", *arguments))
    assert caught.value.code == 2
    assert expected in " ".join(capsys.readouterr().err.split())
