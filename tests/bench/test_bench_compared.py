"""`jdp bench hooks` and `jdp bench zero1`: times and bytes beside a reference."""

import json
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jdp.bench import channel, compared
from jdp.bench.driver import Turn
from jdp.cli import main
from tests import harness

pytestmark = pytest.mark.slow

SMALL = ("--blocks", "2", "--width", "64", "--batch", "4")


def _bench(path, *arguments, num_rounds=2):
    """Returns the variants; each sends as many bytes as in its best round."""
    process = subprocess.run(
        [sys.executable, "-m", "jdp.cli.main", "bench", *arguments]
        + [*SMALL, "--rounds", str(num_rounds), "--steps", "3", "--json", path],
        env={
            **harness.compile_fast_environ(),
            "PYTHONPATH": harness.python_path(),
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert process.returncode == 0, process.stderr
    variants = json.loads(path.read_text())["variants"]
    assert all(name in process.stdout for name in variants)
    return variants


@pytest.mark.multiprocess
def test_bench_hooks_counts_what_leaves_the_processes(tmp_path):
    plot = tmp_path / "hooks.png"
    hooks = ("--hook", "cast:bfloat16", "--hook", "int8", "--plot", plot)
    # On a busy machine heartbeats are a part of what a slow round sends.
    found = _bench(tmp_path / "hooks.json", "hooks", *hooks, num_rounds=8)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list(found) == ["no hook", "cast:bfloat16", "int8"]
    # The loss and the frames of the sockets come on top of 33 KB.
    assert found["no hook"]["sent_bytes"] == pytest.approx(33_792, rel=0.1)
    assert found["cast:bfloat16"]["sent_over_reference"] == pytest.approx(0.5, rel=0.1)
    assert found["int8"]["sent_over_reference"] == pytest.approx(0.254, rel=0.2)


@pytest.mark.multiprocess
def test_bench_zero1_sends_nothing_through_shared_memory(tmp_path):
    found = _bench(tmp_path / "zero1.json", "zero1")
    assert list(found) == [
        "Adam, shared memory",
        "zero1, shared memory",
        "Adam",
        "zero1",
    ]
    for name, row in found.items():
        assert len(row["rounds_ms"]) == 2 and row["median_ms"] > 0
        assert (row["sent_bytes"] < 5_000) == name.endswith("shared memory")


@pytest.mark.multiprocess
def test_bench_local_sends_as_much_with_a_delay_as_without(tmp_path):
    found = _bench(tmp_path / "local.json", "local")
    plain, *senders = (row["sent_bytes"] for row in found.values())
    assert list(found)[1:] == ["diloco", "diloco, delay=1", "data-parallel"]
    assert plain < 1_000
    for num_bytes in senders:
        assert num_bytes == pytest.approx(33_792, rel=0.1)


def test_bytes_are_those_of_the_connections_of_this_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        before = channel.sent_bytes()
        sender.setblocking(False)
        num_bytes = sender.send(bytes(50_000_000))  # More than the other end takes.
        assert channel.sent_bytes() - before == num_bytes
        assert len(receiver.recv(num_bytes, socket.MSG_WAITALL)) == num_bytes
        assert channel.sent_bytes() - before == num_bytes


def test_times_are_medians_over_the_rounds_and_bytes_the_fewest():
    turns = {
        "a": [Turn(2.0, 10_000), Turn(4.0, 12_000), Turn(9.0, 10_000)],
        "b": [Turn(1.0, 5_000), Turn(4.0, 7_500), Turn(3.0, 10_000)],
    }
    found = compared.summarize(turns, "a")["variants"]
    assert found["b"]["over_reference"] == 0.5
    assert found["b"]["sent_over_reference"] == 0.5
    assert found["b"]["median_ms"] == 3000 and found["b"]["sent_bytes"] == 5_000
    # The loss alone.
    silent = {"a": [Turn(1.0, 148)], "b": [Turn(1.0, 10_000)]}
    found = compared.summarize(silent, "a")["variants"]
    assert found["b"]["sent_over_reference"] is None


def test_a_hook_that_is_none_is_named():
    result = CliRunner().invoke(main.app, ["bench", "hooks", "--hook", "int9"])
    assert result.exit_code == 2
    assert "there is no hook 'int9'; known are none, cast, int8" in result.output
