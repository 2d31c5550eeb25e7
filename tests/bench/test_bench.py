"""`jdp bench`: the table and the file it writes, and how it fails."""

import importlib.util
import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from jdp.bench import channel, collectives, overlap, step
from jdp.cli import main
from jdp.collectives import Links, predict
from tests import harness

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
JAX_SYSTEMS = {
    "jdp",
    "jdp, find_unused",
    "jdp, psum",
    "two copies alone",
    "partitioned",
    "psum a leaf",
    "flat shard_map",
    "no communication",
}
SMALL = ("--blocks", "2", "--width", "8", "--batch", "4", "--rounds", "2")


def _jdp(*arguments, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-m", "jdp.cli.main", *arguments],
        env={
            **harness.compile_fast_environ(),
            "PYTHONPATH": harness.python_path(),
            "COLUMNS": "200",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_bench_step_times_every_system_and_writes_a_file(tmp_path):
    path, plot = tmp_path / "step.json", tmp_path / "step.png"
    options = ("--steps", "2", "--json", path, "--plot", plot)
    process = _jdp("bench", "step", "-n", "2", *SMALL, *options)
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
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bench_scaling_times_each_number_of_processes(tmp_path):
    path, plot = tmp_path / "scaling.json", tmp_path / "scaling.png"
    options = ("--processes", "1,2", "--steps", "2", "--json", path, "--plot", plot)
    process = _jdp("bench", "scaling", *SMALL, *options)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    result = json.loads(path.read_text())
    assert result["config"]["cpu"]
    assert [each["num_processes"] for each in result["processes"]] == [1, 2]
    for each in result["processes"]:
        systems = each["systems"]
        assert systems.keys() >= JAX_SYSTEMS - {"two copies alone"}
        for name, row in systems.items():
            assert name in out and row["samples_per_s"] > 0
        assert systems["no communication"]["over_alone"] == 1.0
    assert plot.read_bytes().startswith(b"\x89PNG")


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
    assert result["config"]["rounds"] == 5
    assert result["plan_10000_leaves_ms"] > 0
    assert "decorated over bare" in out
    assert set(result["tracing_ms"]) == {"by hand", "without", "with", "both"}
    assert "reading, added" in out


def test_bench_leaves_compares_with_adam(tmp_path):
    path = tmp_path / "leaves.json"
    options = ("--leaves", "5", "--rounds", "1", "--json", path)
    process = _jdp("bench", "leaves", *options)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    found = json.loads(path.read_text())
    assert found["num_leaves"] == 5
    ways = {"adam", "skip_unused", "zero1", "distributed_optimizer"}
    assert set(found["cpu_s"]) == ways | {"accumulate_gradients", "hooks.cast"}
    for name, times in found["cpu_s"].items():
        assert name in out
        assert times["lower_s"] > 0


def test_bench_join_compares_with_a_plain_loop(tmp_path):
    path = tmp_path / "join.json"
    process = _jdp("bench", "join", *SMALL, "--steps", "2", "--json", path)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    loops = json.loads(path.read_text())["variants"]
    assert set(loops) == {"plain loop", "join_batches", "Join"}
    for name, row in loops.items():
        assert name in out
        pairs = zip(row["rounds_ms"], loops["plain loop"]["rounds_ms"], strict=True)
        ratios = [a / b for a, b in pairs]
        assert row["over_reference"] == pytest.approx(sum(ratios) / 2)


ALL_REDUCES = {
    "psum",
    "ring",
    "bidirectional_ring",
    "halving_doubling",
    "butterfly",
    "star",
    "tree",
    "chain",
}


@pytest.mark.parametrize("kind", ["devices", "processes"])
def test_bench_collectives_times_everything_beside_the_model(tmp_path, kind):
    path, plot = tmp_path / "collectives.json", tmp_path / "plot.png"
    options = ("--rounds", "2", "--steps", "2", "--json", path, "--plot", plot)
    # Each all-reduce is compiled at each size, and once more to fit the links.
    replicas, sizes = {"devices": ("3,4", (1, 2)), "processes": ("2", (1,))}[kind]
    options += ("--sizes", ",".join(f"{kib}k" for kib in sizes))
    options += ("--replicas", replicas, "--kind", kind)
    process = _jdp("bench", "collectives", *options)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    results = json.loads(path.read_text())["replicas"]
    assert [str(each["num_replicas"]) for each in results] == replicas.split(",")
    more = {
        3: set(),
        4: {"adasum", "hierarchical"},
        2: {"adasum", "tcp", "shared_memory", "shared_memory, alone"},
    }
    for each in results:
        by_size = {}
        for time_ in each["times"]:
            by_size.setdefault(time_["num_bytes"], {})[time_["algorithm"]] = time_
        assert set(by_size) == {kib << 10 for kib in sizes}
        for row in by_size.values():
            torch = {"torch gloo"} & set(row)
            assert set(row) == ALL_REDUCES | more[each["num_replicas"]] | torch
            for name, time_ in row.items():
                assert name in out and time_["measured_s"] > 0
                assert len(time_["rounds_s"]) == 2
                is_measured_alone = name.startswith(("psum", "shared", "tcp", "torch"))
                assert (time_["model_s"] is None) == is_measured_alone
        assert [choice["num_bytes"] for choice in each["choices"]] == sorted(by_size)
        assert all(choice["over_best"] >= 1 for choice in each["choices"])
        assert each["latency_s"] >= 0
    assert "choose at its worst: " in out and "seconds by bytes" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_where_the_model_is_off_is_said():
    seconds = {}
    for size in (1 << 10, 1 << 20):
        seconds[f"no all-reduce {size}"] = [1e-5] * 3
        for name in ("ring", "halving_doubling", "butterfly", "tree"):
            one_s = predict(name, size, 4, Links(1e-4, 1e9)).total_s
            slow = 3 if (name, size) == ("tree", 1 << 20) else 1
            seconds[f"{name} {size}"] = [1e-5 + slow * one_s] * 3
            seconds[f"fit_links: {name} {size}"] = [one_s] * 3
    result = collectives.summarize(seconds, 4)
    assert result["latency_s"] == pytest.approx(1e-4)
    assert result["bandwidth_bytes_per_s"] == pytest.approx(1e9, rel=1e-3)
    (line,) = [x for x in collectives._remarks(result).splitlines() if "off by" in x]
    assert "the model is off by 3.0x: tree, 1 MiB" in line
    assert {choice["over_best"] for choice in result["choices"]} == {1.0}


@pytest.mark.parametrize(
    "arguments,expected",
    [
        (
            ("bench", "collectives", "--replicas", "2,1"),
            "Invalid value for --replicas: '2,1' must be numbers from 2 to 64",
        ),
        (
            ("bench", "collectives", "--sizes", "1k,5"),
            "Invalid value for --sizes: '5' must be a number with k or m",
        ),
        (("bench", "collectives", "--kind", "threads"), "'threads' is not one of"),
        (("bench", "collectives", "--plots", "x"), "No such option: --plots"),
        (
            ("bench", "collectives", "--plot", "/no/such/x.png"),
            "'/no/such/x.png' cannot be written",
        ),
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
def test_a_typo_is_named(arguments, expected, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main.app(arguments)
    assert caught.value.code == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def test_a_process_ends_with_2_after_a_typo():
    process = _jdp("bench", "stepp")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "No such command 'stepp'" in err


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


def test_tune_says_that_there_is_no_gpu(tmp_path):
    path = tmp_path / "thresholds.json"
    process = _jdp("bench", "collectives", "--tune", path)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no custom all-reduce to tune" in err and "platform 'cpu'" in err
    assert not path.exists()
