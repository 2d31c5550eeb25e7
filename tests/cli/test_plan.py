"""`jdp plan`: the table, the JSON, and what it says to a typo."""

import json
import os
import subprocess
import sys

import pytest

from tests import harness

MODULE = """
import jax
import jax.numpy as jnp

def init_params():
    key = jax.random.key(0)
    layers = [{"w": jax.random.normal(key, (64, 64)), "b": jnp.zeros(64)}] * 3
    return {"layers": layers, "head": jnp.zeros((64, 10)), "spare": jnp.zeros(3)}

def huge_params():
    return {"layers": [], "head": jnp.zeros((64, 10)), "table": jnp.zeros((1 << 40,))}

example_batch = jax.ShapeDtypeStruct((16, 64), jnp.float32)

class data:
    batch = (jnp.ones((16, 64)), "name")

def loss_fn(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ params["head"]).mean()

def of_two(params, x, scale):
    return loss_fn(params, x) * scale

def one():
    return jnp.ones(())

def not_scalar(params, x):
    return x
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "mymodel.py").write_text(MODULE)

    def run(*arguments):
        result = subprocess.run(
            [sys.executable, "-m", "jdp.cli.main", "plan", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(harness.ROOT), "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return result.returncode, result.stdout, " ".join(result.stderr.split())

    return run


def test_the_table_shows_buckets_in_the_order_sent(run):
    code, out, err = run("mymodel:loss_fn", "--replicas", "4", "--bucket-mib", "0.02")
    assert code == 0, err
    assert "mymodel:loss_fn on 4 replicas" in out
    paths = ["['head']", "[2]['b']", "[2]['w']", "[1]['b']", "[0]['b']", "[0]['w']"]
    positions = [out.index(path) for path in paths]
    assert positions == sorted(positions)
    num_bytes = 3 * (64 * 64 + 64) * 4 + 64 * 10 * 4 + 4
    assert f"{round(2 * 3 / 4 * num_bytes):,} bytes" in " ".join(out.split())
    assert "Never used, and not sent: ['spare']." in out


def test_json(run):
    code, out, err = run("mymodel:loss_fn", "--json", "--first-bucket-mib", "0")
    assert code == 0, err
    (made,) = json.loads(out)["synchronizations"]
    first = made["buckets"][0]
    assert [leaf["path"] for leaf in first["leaves"]] == ["['head']"]
    shares = [bucket["ready_after"] for bucket in made["buckets"]]
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_parameters_and_arguments_may_be_named(run):
    code, out, err = run(
        "mymodel:of_two",
        *("--params", "mymodel:init_params"),
        *("--args", "example_batch", "--args", "one"),
    )
    assert code == 0, err
    assert "mymodel:of_two" in out


def test_no_array_is_made(run):
    code, out, err = run("mymodel:loss_fn", "--params", "huge_params", "--json")
    assert code == 0, err  # 4 TiB of zeros.
    assert json.loads(out)["synchronizations"][0]["never_used"] == ["['table']"]


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("mymodel",), "'mymodel' must be module:function"),
        (("mymodel:los_fn",), "Module 'mymodel' has no 'los_fn'."),
        (("mymodl:loss_fn",), "No module named 'mymodl'"),
        (("mymodel.py:loss_fn",), "Write 'mymodel', without .py."),
        (("mymodel:loss_fn", "--params", "init"), "has no 'init'. The parameters are"),
        (("mymodel:loss_fn", "--params", "data"), "data"),
        (("mymodel:not_scalar",), "must return a scalar loss, got shape (16, 64)"),
        (("mymodel:loss_fn", "--replicas", "0"), "Invalid value for '--replicas'"),
        (("mymodel:loss_fn", "--bucket-mib", "-1"), "Invalid value for '--bucket-mib'"),
        (("mymodel:loss_fn", "--jsn"), "No such option: --jsn"),
        ((), "Missing argument 'MODULE:LOSS_FN'"),
    ],
)
def test_a_typo_is_named(run, arguments, message):
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
