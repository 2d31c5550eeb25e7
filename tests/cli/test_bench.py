"""`jdp bench`: the table and the file it writes, and how it fails."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from jdp.cli.bench import channel, overlap, step
from tests import harness

pytestmark = pytest.mark.multiprocess
JAX_SYSTEMS = {
    "jdp",
    "jdp, find_unused",
    "jdp, shared memory",
    "partitioned",
    "psum a leaf",
    "flat shard_map",
    "no communication",
}
SMALL = ("--blocks", "2", "--width", "8", "--batch", "4", "--rounds", "2")


def _jdp(*arguments, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-m", "jdp.cli.main", *arguments],
        env={**os.environ, "PYTHONPATH": str(harness.ROOT), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_bench_step_times_every_system_and_writes_a_file(tmp_path):
    path = tmp_path / "step.json"
    process = _jdp("bench", "step", "-n", "2", *SMALL, "--steps", "2", "--json", path)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    result = json.loads(path.read_text())
    systems = result["systems"]
    assert systems.keys() >= JAX_SYSTEMS
    assert result["config"]["num_blocks"] == 2
    if importlib.util.find_spec("torch") is not None:
        assert "torch DDP" in systems
    for name, row in systems.items():
        assert name in out
        assert len(row["rounds_ms"]) == 2
        assert 0 < row["min_ms"] <= row["median_ms"]
    assert systems["jdp"]["jdp_over"] == 1.0


def test_the_ratio_is_the_median_of_the_rounds():
    seconds = {"jdp": [1.0, 2.0, 9.0], "other": [2.0, 2.0, 3.0]}
    row = step.summarize(seconds)["systems"]["other"]
    assert (row["median_ms"], row["min_ms"], row["jdp_over"]) == (2000, 2000, 1.0)


MODELS = {"blocks", "loop, reduced after it", "loop, reduced in it"}


def test_bench_step_overlap_shows_the_hidden_share_of_every_model(tmp_path):
    path = tmp_path / "overlap.json"
    options = ("--overlap", "--layers", "2", "--steps", "2", "--json", path)
    process = _jdp("bench", "step", *SMALL, *options)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    result = json.loads(path.read_text())
    assert result["config"]["num_layers"] == 2
    assert set(result["models"]) == MODELS
    for model, row in result["models"].items():
        assert model in out
        times = row["rounds_ms"]
        assert set(times) == {"step", "no communication", "communication alone"}
        fractions = [
            overlap.hidden_fraction(*(times[name][k] for name in times))
            for k in range(2)
        ]
        assert row["hidden"] == pytest.approx(sum(fractions) / 2)


@pytest.mark.parametrize("step_s,hidden", [(10, 1.0), (14, 0.0), (12, 0.5), (16, -0.5)])
def test_hidden_is_what_does_not_make_the_step_longer(step_s, hidden):
    assert overlap.hidden_fraction(step_s, 10, 4) == hidden


def test_steps_are_timed_one_by_one():
    seconds = channel.time_steps(lambda: time.sleep(0.01), 3)
    assert len(seconds) == 3 and min(seconds) >= 0.01


def test_bench_overhead_shows_its_figures(tmp_path):
    path = tmp_path / "overhead.json"
    rounds = ("--rounds", "5", "--tracing-rounds", "1")
    process = _jdp("bench", "overhead", *rounds, "--json", path)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    result = json.loads(path.read_text())
    assert set(result["call_us"]) == {"bare", "decorated"}
    assert result["plan_10000_leaves_ms"] > 0
    assert "decorated over bare" in out
    assert set(result["tracing_ms"]) == {"by hand", "without", "with", "both"}
    assert "reading over not reading" in out


def test_bench_join_compares_with_a_plain_loop(tmp_path):
    path = tmp_path / "join.json"
    process = _jdp("bench", "join", *SMALL, "--steps", "2", "--json", path)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    loops = json.loads(path.read_text())["loops"]
    assert set(loops) == {"plain loop", "join_batches", "Join"}
    for name, row in loops.items():
        assert name in out
        pairs = zip(row["rounds_ms"], loops["plain loop"]["rounds_ms"], strict=True)
        ratios = [a / b for a, b in pairs]
        assert row["over_plain"] == pytest.approx(sum(ratios) / 2)


@pytest.mark.parametrize(
    "arguments,expected",
    [
        (("bench", "join", "--rouns", "1"), "No such option: --rouns"),
        (("bench", "join", "-n", "0"), "Invalid value for '-n': "),
        (("bench", "step", "--blocks", "0"), "Invalid value for '--blocks': "),
        (("bench", "step", "--bloks", "1"), "No such option: --bloks"),
        (
            ("bench", "step", "--json", "/no/such/folder/x.json"),
            "'/no/such/folder/x.json' cannot be written: No such file or directory",
        ),
        (("bench", "stepp"), "No such command 'stepp'"),
        (("bench", "step", "--overlapp"), "No such option: --overlapp"),
        (
            ("bench", "step", "--layers", "2"),
            "Invalid value for --layers: is for --overlap alone.",
        ),
        (
            ("bench", "step", "--overlap", "--layers", "0"),
            "Invalid value for '--layers': ",
        ),
        (
            ("bench", "overhead", "--tracing-rounds", "0"),
            "Invalid value for '--tracing-rounds': ",
        ),
        (("bench", "overhead", "--rounds", "x"), "Invalid value for '--rounds': "),
    ],
)
def test_a_typo_is_named(arguments, expected):
    process = _jdp(*arguments)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert expected in " ".join(err.split())


def test_a_worker_that_dies_ends_the_benchmark_with_its_last_words():
    process = _jdp("bench", "step", *SMALL, "--steps", "100000")
    try:
        worker = _wait_for_workers(process)[0]
        worker.send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert "jdp bench: " in err and "Traceback" not in err


def _wait_for_workers(process):
    deadline_s = time.monotonic() + 60.0
    workers = []
    while len(workers) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.2)
        workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    return workers


def test_workers_end_when_the_driver_is_killed():
    process = _jdp("bench", "step", *SMALL, "--steps", "100000")
    workers = _wait_for_workers(process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, alive = psutil.wait_procs(workers, timeout=60.0)
    for worker in alive:
        worker.kill()
    assert not alive
