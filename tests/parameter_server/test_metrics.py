"""What servers count, and how it is shown."""

import io
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console

from jdp import parameter_server
from jdp.parameter_server import metrics, shards
from jdp.parameter_server.metrics import Metrics
from jdp.replicas import wire


def _line():
    found = Metrics(num_pushed_bytes=3_000_000, num_pulls=7)
    for i in range(30):
        found.note_update(i % 3, now_s=100 + 0.5 * i)
    return found.summarize(
        version="1.30",
        counts={"applied": 30, "late": 2},
        num_workers=2,
        num_waiting=1,
        num_refused=5,
        now_s=115.0,
    )


def test_the_rate_is_that_of_the_last_seconds():
    assert _line()["updates_per_s"] == 2.0
    assert _line()["updates"] == 30
    assert Metrics().find_rate(now_s=1.0) == 0.0
    few = Metrics()
    few.note_update(0, now_s=9.0)
    assert few.find_rate(now_s=9.5) == 2.0
    assert few.find_rate(now_s=20.0) == 0.0


def test_a_report_is_a_line_of_json_or_a_table(capsys):
    metrics.open_reporter("json").show(_line())
    assert json.loads(capsys.readouterr().out) == _line()
    console = rich.console.Console(width=80, file=io.StringIO())
    console.print(metrics.make_table(_line()))
    text = console.file.getvalue()
    assert "updates per second" in text and "staleness 2" in text and "3.0" in text
    reporter = metrics.open_reporter("table")
    reporter.show(_line())
    reporter.close()
    assert "pushes late" in capsys.readouterr().err
    assert metrics.open_reporter("") is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": "[/bold]"},
        {"version": "1.\u0661"},
        {"updates": -1},
        {"updates_per_s": "fast"},
        {"pushes": {"[red]": 1}},
        {"staleness": {"0": 1 << 63}},
        {"refused": None},
    ],
    ids=str,
)
def test_what_is_no_line_of_a_report_is_not_drawn(change):
    line = metrics.decode_line(json.dumps(_line()).encode())
    assert line == _line() and metrics.render_table(line, num_columns=60)
    with pytest.raises(wire.DecodeError):
        metrics.decode_line(json.dumps({**_line(), **change}).encode())
    with pytest.raises(wire.DecodeError):
        metrics.decode_line(b'"\xff')


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_updates_are_divided_by_a_power_of_the_staleness(power):
    tx = parameter_server.scale_by_staleness(optax.sgd(1.0), power=power)
    params = {"w": jnp.ones(3)}
    for staleness, divisor in ((0, 1), (1, 1), (4, 4**power)):
        found, _ = tx.update(params, tx.init(params), params, staleness=staleness)
        np.testing.assert_allclose(found["w"], -1 / divisor, rtol=1e-6)
    with pytest.raises(TypeError, match="needs `update\\(..., staleness=\\)`"):
        tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match="`power` must be"):
        parameter_server.scale_by_staleness(tx, power=-1)


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5])
def test_servers_have_about_the_same_bytes_and_each_leaf_once(num_servers):
    rng = np.random.default_rng(0)
    params = [np.zeros(n, np.float32) for n in rng.integers(1, 2000, 60)]
    params.append(np.zeros(3, np.float16))
    plan = shards.plan_shards(params, num_servers)
    owned = sorted(i for shard in plan.of_server for i in shard.leaves)
    assert owned == list(range(61))
    loads = [sum(params[i].nbytes for i in shard.leaves) for shard in plan.of_server]
    assert max(loads) <= 4 / 3 * sum(loads) / num_servers
    assert plan == shards.plan_shards(params, num_servers)


def test_arrays_lie_in_memory_that_is_aligned():
    layout = shards.make_layout([np.zeros(3, np.float16), np.zeros((2, 5), np.float32)])
    assert layout.offsets == (0, 64) and layout.num_bytes == 128
    memory = shards.make_memory(layout.num_bytes)
    assert memory.ctypes.data % 64 == 0 and memory.size == 128
    first, second = layout.views(memory)
    second[...] = 7
    first[...] = 1
    assert layout.views(memory)[1].sum() == 70
