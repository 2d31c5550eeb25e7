"""`jdp plan`: the table, the JSON, and what it says to a typo."""

import json
import os
import subprocess
import sys

import pytest

from jdp.cli import main
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


CLUSTER = ("--nodes", "2", "--latency-us", "5", "--bandwidth-gbps", "100")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The command, in this process."""
    (tmp_path / "mymodel.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            main.app(["plan", *arguments])
        out, err = capsys.readouterr()
        return caught.value.code, out, " ".join(err.split())

    return run


@pytest.fixture
def run_process(tmp_path):
    """The command as a user starts it."""
    (tmp_path / "mymodel.py").write_text(MODULE)

    def run(*arguments):
        result = subprocess.run(
            [sys.executable, "-m", "jdp.cli.main", "plan", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": harness.python_path(), "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return result.returncode, result.stdout, " ".join(result.stderr.split())

    return run


def test_the_table_shows_buckets_in_the_order_sent(run_process):
    code, out, err = run_process(
        "mymodel:loss_fn", "--replicas", "4", "--bucket-mib", "0.02"
    )
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
        ((), "name one of MODULE:LOSS_FN and --gradient-mib"),
        (("m:f", "--gradient-mib", "1"), "name one of MODULE:LOSS_FN and --grad"),
        (("mymodel:loss_fn", "--hook", "int9"), "there is no hook 'int9'"),
        (("mymodel:loss_fn", "--hook", "cast:bf16"), "a dtype such as bfloat16, got"),
        (("mymodel:loss_fn", "--hook", "int8+none"), "not the last does not sum"),
        (("mymodel:loss_fn", "--hook", "power_sgd:x"), "takes a whole number, got 'x'"),
        (
            ("--gradient-mib", "1", *CLUSTER, "--hook", "int9"),
            "there is no hook 'int9'",
        ),
        (("--gradient-mib", "1", *CLUSTER, "--hook", "int8"), "needs MODULE:LOSS_FN"),
        (
            ("--gradient-mib", "1", *CLUSTER, "--params", "init_params"),
            "Invalid value for --params: needs MODULE:LOSS_FN",
        ),
        (
            ("--gradient-mib", "1", *CLUSTER, "--args", "no_module:batch"),
            "Invalid value for --args: needs MODULE:LOSS_FN",
        ),
        (("--gradient-mib", "inf", *CLUSTER), "'--gradient-mib': inf is not finite."),
        (("--gradient-mib", "nan", *CLUSTER), "Invalid value for '--gradient-mib'"),
        (("mymodel:loss_fn", "--bucket-mib", "inf"), "inf is not finite."),
        (
            ("mymodel:loss_fn", *CLUSTER[:4], "--bandwidth-gbps", "inf"),
            "'--bandwidth-gbps': inf is not finite.",
        ),
        (
            ("--gradient-mib", "1", *CLUSTER, "--bucket-mib", "0"),
            "Invalid value for --bucket-mib: must be at least one byte",
        ),
        (
            ("--gradient-mib", "1", *CLUSTER, "--first-bucket-mib", "0"),
            "Invalid value for --first-bucket-mib: must be at least one byte",
        ),
        (
            ("--gradient-mib", "1e300", *CLUSTER),
            "Invalid value for --gradient-mib: makes more than 100,000 buckets.",
        ),
        (("--gradient-mib", "1"), "is for a cluster: name --nodes, --latency-us"),
        (
            ("--gradient-mib", "1", "--nodes", "2"),
            "A cluster also needs --latency-us, --bandwidth-gbps.",
        ),
        (
            ("--gradient-mib", "1", *CLUSTER[:4], "--bandwidth-gbps", "0"),
            "Invalid value for --bandwidth-gbps: 0 must be positive.",
        ),
        (
            ("--gradient-mib", "1", *CLUSTER, "--devices-per-node", "50001"),
            "2 x 50001 is more than 100,000 replicas.",
        ),
        (
            ("mymodel:loss_fn", *CLUSTER, "--replicas", "2"),
            "Invalid value for --replicas: follow from --nodes",
        ),
        (("--gradient-mib", "1", "--node", "2"), "No such option: --node"),
    ],
)
def test_a_typo_is_named(arguments, message, run):
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err


@pytest.mark.slow
def test_an_import_that_runs_a_script_is_announced_and_its_end_is_named(
    run_process, tmp_path
):
    code, out, err = run_process("mymodel:loss_fn", "--json")
    assert code == 0 and json.loads(out)
    assert err == "jdp plan: imports 'mymodel', whose top level runs."
    (tmp_path / "ends.py").write_text("import sys\nprint('trains')\nsys.exit(3)\n")
    code, out, err = run_process("ends:loss_fn")
    assert (code, out) == (2, "trains\n")
    assert err.startswith("jdp plan: imports 'ends', whose top level runs. ")
    assert "'ends' ended the program when it was imported, with exit code 3" in err
    code, out, _ = run_process("--gradient-mib", "1", *CLUSTER, "--json")
    assert code == 0 and json.loads(out)


@pytest.mark.parametrize(
    "target,message",
    [
        ("mymodel:los_fn", "Module 'mymodel' has no 'los_fn'."),
        pytest.param(
            "mymodel:not_scalar",
            "must return a scalar loss, got shape (16, 64)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_process_ends_with_2_and_no_traceback_after_a_typo(
    run_process, target, message
):
    code, _, err = run_process(target)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_a_cluster_that_is_not_here(run):
    code, out, err = run(
        *("--gradient-mib", "100", "--nodes", "64", "--devices-per-node", "8"),
        *("--latency-us", "5", "--bandwidth-gbps", "100"),
        *("--node-latency-us", "2", "--node-bandwidth-gbps", "3600"),
        *("--compute-ns-per-byte", "0.001", "--json"),
    )
    assert code == 0, err
    predicted = json.loads(out)
    assert predicted["num_replicas"] == 512
    assert predicted["num_bytes"] == 100 << 20 and predicted["num_buckets"] == 4
    rows = {row["algorithm"]: row for row in predicted["algorithms"]}
    assert predicted["algorithms"][0] == rows["hierarchical"]  # the fastest is first.
    size, count = (100 << 20), 4
    ring = rows["ring"]
    assert ring["num_rounds"] == 2 * 511 * count
    sending_s = 2 * 511 * count * 5e-6 + 2 * 511 / 512 * size / 12.5e9
    assert ring["communication_s"] == pytest.approx(sending_s, rel=1e-3)
    assert ring["computation_s"] == pytest.approx(511 / 512 * size * 1e-12, rel=1e-3)
    assert ring["total_s"] == ring["communication_s"] + ring["computation_s"]
    within_s = 2 * 7 * count * 2e-6 + 2 * 7 / 8 * size / 450e9
    across_s = 2 * 6 * count * 5e-6 + 2 * 63 / 64 * size / 8 / 12.5e9
    hierarchical = rows["hierarchical"]
    assert hierarchical["communication_s"] == pytest.approx(
        within_s + across_s, rel=1e-3
    )


@pytest.mark.parametrize(
    "sizes,expected",
    [
        ((), 4),
        (("--bucket-mib", "10"), 11),  # the first one has 1 MiB, as for a loss.
        (("--first-bucket-mib", "90"), 2),
        (("--bucket-mib", "4", "--first-bucket-mib", "80"), 6),
        (("--first-bucket-mib", "200"), 1),
    ],
)
def test_gradients_of_a_size_are_cut_into_the_buckets_asked_for(sizes, expected, run):
    options = ("--gradient-mib", "100", *CLUSTER, *sizes)
    code, out, err = run(*options, "--json")
    assert code == 0, err
    predicted = json.loads(out)
    assert predicted["num_buckets"] == expected
    assert predicted["num_bytes"] == 100 << 20
    rows = {row["algorithm"]: row for row in predicted["algorithms"]}
    assert rows["ring"]["num_rounds"] == 2 * expected
    code, out, err = run(*options)
    noun = "bucket" if expected == 1 else "buckets"
    assert code == 0 and f"{expected} {noun}," in out


def test_a_cluster_for_a_loss(run):
    options = ("mymodel:loss_fn", *CLUSTER, "--bucket-mib", "0.02")
    code, out, err = run(*options)
    assert code == 0, err
    assert "mymodel:loss_fn on 2 replicas" in out
    assert "A step on 2 nodes of 1, " in out and "hierarchical" not in out
    code, out, err = run(*options, "--json")
    found = json.loads(out)
    assert found["cluster"]["num_bytes"] == (3 * (64 * 64 + 64) + 64 * 10) * 4
    assert len(found["synchronizations"]) == 1


def test_a_hundred_thousand_replicas(run):
    code, out, err = run(
        *("--gradient-mib", "1", "--nodes", "12500", "--devices-per-node", "8"),
        *("--latency-us", "1", "--bandwidth-gbps", "400", "--json"),
    )
    assert code == 0, err
    for row in json.loads(out)["algorithms"]:
        assert 0 < row["total_s"] < 1e6
