"""`jdp bench parameter-server`: its rows and limits."""

import io

import pytest
import rich.console

from jdp import parameter_server
from jdp.bench import driver, parameter_server_step
from jdp.bench import parameter_server as bench


def _seconds():
    return {
        bench.SYNC_STEP: [0.03, 0.05, 0.04],
        bench.ALL_REDUCE_STEP: [0.03, 0.025, 0.02],
        bench.EXCHANGE: [0.012, 0.013, 0.011],
        bench.RAW: [0.010, 0.010, 0.010],
        bench.SYNC_SLOW: [0.1, 0.1, 0.1],
        bench.ASYNC_SLOW: [0.05, 0.1, 0.04],
    }


def test_limits_are_of_the_median_ratio_and_of_lost_points():
    accuracy = {"sync": 97.0, "async": 95.5, "bounded(4)": 96.5}
    result = bench.summarize(_seconds(), accuracy)
    found = {r["what"]: (round(r["value"], 3), r["is_met"]) for r in result["rows"]}
    assert found == {
        "sync step / all-reduce step": (2.0, False),
        "push + pull / raw loopback": (1.2, True),
        "updates/s, async / sync": (2.0, True),
        "points below sync, async": (1.5, False),
        "points below sync, bounded(4)": (0.5, True),
    }
    result["config"] = dict.fromkeys(("num_workers", "num_blocks", "width", "jax"), 2)
    console = rich.console.Console(width=80, file=io.StringIO())
    console.print(bench._table(result))
    text = console.file.getvalue()
    assert "≥ 1.6" in text and max(map(len, text.splitlines())) <= 80


def test_without_data_nothing_is_said_of_accuracy():
    assert len(bench.summarize(_seconds(), {})["rows"]) == 3


@pytest.mark.slow
def test_digits_are_learnt(tmp_path):
    mode, port = parameter_server.asynchronous(), driver.free_port()
    found = parameter_server_step.train_digits(mode, str(tmp_path), port, seed=0)
    assert found > 0.94
