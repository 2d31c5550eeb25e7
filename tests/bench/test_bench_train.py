"""`jdp bench train`: every system trains the same GPT, and a wrong one is named."""

import importlib.util
import itertools
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jdp.bench import train, train_jax, train_setup
from jdp.bench.driver import Turn
from jdp.cli import main
from tests import harness

CONFIG = train_setup.TrainConfig(num_layers=2, width=64, context=8, batch_size=3)
SIZES = ("--layers", "1", "--width", "32", "--context", "8", "--batch", "2")
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [(), ("--no-pin",)], ids=["pinned", "unpinned"])
def test_bench_train_trains_one_model_in_every_system(tmp_path, options):
    plot, path = tmp_path / "plot.png", tmp_path / "train.json"
    files = ("--plot", plot, "--json", path)
    process = subprocess.run(
        [sys.executable, "-m", "jdp.cli.main", "bench", "train", *SIZES, *options]
        + ["--rounds", "2", "--steps", "4", *files],
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
    result = json.loads(path.read_text())
    systems = result["systems"]
    expected = ["jdp", "partitioned", "no communication"]
    expected += ["torch DDP", "torch, no communication"] * HAS_TORCH
    assert list(systems) == expected
    assert result["steps"] == [7, 11]
    for name, row in systems.items():
        assert name in process.stdout
        assert row["tokens_per_s"] == pytest.approx(32e3 / row["median_ms"])
        near = pytest.approx(systems["jdp"]["losses"], rel=1e-3)
        assert (row["losses"] == near) == (name in train.AVERAGING)
    assert plot.read_bytes().startswith(b"\x89PNG")


def _turns(seconds, losses):
    pairs = zip(seconds, losses, strict=True)
    return [Turn(second, 0.0, loss) for second, loss in pairs]


def test_speeds_are_medians_over_the_rounds():
    turns = {
        "jdp": _turns([1.0, 2.0, 9.0], [3.0, 2.0, 1.0]),
        "no communication": _turns([0.5, 2.0, 3.0], [3.0, 2.5, 2.0]),
    }
    result = train.summarize(turns, tokens_per_step=100, steps=5)
    row = result["systems"]["no communication"]
    assert (row["tokens_per_s"], row["over_jdp"]) == (50.0, 2.0)
    assert result["steps"] == [train_setup.WARM_UP_STEPS + n for n in (5, 10, 15)]
    assert result["disagreement"] == {}  # It does not average, and may differ.


@pytest.mark.parametrize(("loss", "agrees"), [(1.01, True), (1.03, False)])
def test_a_system_that_trains_another_model_is_named(loss, agrees):
    turns = {name: _turns([1.0], [1.0]) for name in ("jdp", "partitioned")}
    turns["torch DDP"] = _turns([1.0], [loss])
    found = train.summarize(turns, tokens_per_step=1, steps=1)["disagreement"]
    assert found == ({} if agrees else {"torch DDP": pytest.approx(0.03)})
    turns["torch DDP"] = _turns([1.0], [math.nan])
    found = train.summarize(turns, tokens_per_step=1, steps=1)["disagreement"]
    assert list(found) == ["torch DDP"]


def test_each_process_reads_its_own_batches_and_every_system_the_same():
    text = train_setup.make_data().training

    def draw(process):
        batches = train_setup.draw_batches(CONFIG, text, process)
        return np.stack(list(itertools.islice(batches, 3)))

    assert draw(0).shape == (3, CONFIG.batch_size, CONFIG.context + 1)
    assert np.array_equal(draw(0), draw(0)) and not np.array_equal(draw(0), draw(1))
    assert not np.array_equal(*draw(0)[:2])


def test_the_default_model_has_the_size_that_the_documents_tell():
    params = train_setup.init_params(train_setup.TrainConfig(3, 192, 128, 4))
    num_parameters = sum(x.size for x in jax.tree.leaves(params))
    assert num_parameters == pytest.approx(1.4e6, rel=0.02)


@pytest.mark.slow
def test_the_model_does_not_see_the_token_that_it_predicts():
    params = jax.tree.map(jnp.asarray, train_setup.init_params(CONFIG))
    text = train_setup.make_data().training
    tokens = next(train_setup.draw_batches(CONFIG, text, 0))

    # Probabilities of all last tokens add up to one: none is known beforehand.
    one = tokens[:1]
    every = np.arange(train_setup.VOCABULARY, dtype=np.int32)
    variants = np.repeat(one, len(every), axis=0)
    variants[:, -1] = every
    of_each = jax.vmap(lambda row: train_jax.loss_fn(params, row[None]))
    losses = harness.jit_fast(of_each)(variants)
    last = CONFIG.context * (losses - losses[0])
    first = _last_loss(params, variants[0])
    assert float(jnp.exp(-(last + first)).sum()) == pytest.approx(1.0, rel=1e-3)


def _last_loss(params, row):
    """Returns the loss of the last token, from a model with a shorter context."""
    whole = CONFIG.context * train_jax.loss_fn(params, row[None])
    short = {**params, "positions": params["positions"][:-1]}
    return whole - (CONFIG.context - 1) * train_jax.loss_fn(short, row[None, :-1])


def test_a_width_without_whole_heads_is_refused():
    result = CliRunner().invoke(main.app, ["bench", "train", "--width", "48"])
    assert result.exit_code == 2
    assert "--width: must be a multiple of 32" in result.output
