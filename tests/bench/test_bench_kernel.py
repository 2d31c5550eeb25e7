"""`jdp bench kernel`: what it counts and how it times, on the CPU."""

import time

import jax
import jax.numpy as jnp
import pytest
import rich.console
import typer.testing

from jdp.bench import kernel, kernel_times
from jdp.bench.channel import StepConfig
from jdp.bench.kernel_times import COPY, Chain, Kernel
from jdp.cli import main
from tests import harness


def test_a_call_of_a_chain_is_timed_without_its_program():
    def slow(x):
        def wait(x):
            time.sleep(0.01)
            return x

        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    x = jnp.zeros(4)
    chains = {"slow": Chain([slow, slow], [x], 2), "no": Chain([lambda x: x], [x], 2)}
    seconds = kernel_times.time_chains(chains, 3)
    assert [len(rounds) for rounds in seconds.values()] == [3, 3]
    assert all(0.009 < s < 0.05 for s in seconds["slow"])
    assert all(abs(s) < 0.005 for s in seconds["no"])


def test_every_call_of_a_chain_is_in_its_program():
    chain = Chain([lambda x, y: x + y, lambda x, y: x - y], [jnp.ones(3)] * 2, 2)
    results = kernel_times.make_program(chain, 3)(*chain.operands)
    assert [float(r[0]) for r in results] == [2, 0] * 3


@pytest.mark.parametrize("n", [2, 8])
def test_bytes_are_those_that_are_read_and_written(n):
    size = 1 << 20
    one = kernel_times.moved_bytes("one_stage", n, size, 4)
    assert one == 4 * size * (n + 1)
    two = kernel_times.moved_bytes("two_stage", n, size, 4)
    assert two == 4 * (3 * size + size // n)


def test_a_row_compares_with_the_bound_and_the_others():
    found = Kernel("two_stage", 8, 8 << 20, 36)
    copy_s = 1e-3  # of 2 GiB.
    seconds = {
        COPY: [copy_s, copy_s, 9.0],
        found.name: [2e-5, 2e-5, 9.0],
        f"empty, {found.name}": [5e-6],
        f"XLA, {found.name}": [1e-5],
    }
    (row,) = kernel_times.summarize([found], seconds)
    bound_s = found.moved_bytes / (2 << 30) * copy_s
    assert row["over_bound"] == pytest.approx(2e-5 / bound_s)
    assert row["over_empty"] == pytest.approx(4)
    assert row["over_xla"] == pytest.approx(2)
    step = kernel.summarize_step(
        {"decorated": [1.0, 2.0, 4.0], "plain": [1.0, 1.0, 2.0]}
    )
    assert (step["over_plain"], step["decorated_ms"]) == (2.0, 2000)
    machine = {"device": "NVIDIA H200", "driver": "1.2", "jax": "0.12"}
    console = rich.console.Console(width=200, no_color=True)
    with console.capture() as capture:
        replicas = [{"num_replicas": 2, "why_not": "because"}]
        rows = {"alone": [row], "step": step, "replicas": replicas, "machine": machine}
        kernel.show(rows, console)
    for text in (found.name, "NVIDIA H200, driver 1.2", "ratio 2.0000", "because"):
        assert text in capture.get()


def test_kernels_of_a_benchmark_trace_for_their_buffers():
    for algorithm in ("one_stage", "two_stage"):
        found = Kernel(algorithm, 4, 1 << 16, 36)
        chains = kernel_times.solo_chains(found)
        assert set(chains) == {found.name, f"empty, {found.name}", f"XLA, {found.name}"}
        for chain in chains.values():
            shapes = jax.eval_shape(
                kernel_times.make_program(chain, 1), *chain.operands
            )
            assert len(shapes) == len(chain.calls)


def test_a_decorated_step_is_timed_beside_the_plain_one():
    seconds = kernel_times.time_steps(
        harness.local_world(1), StepConfig(2, 8, 4), rounds=2, steps=2
    )
    assert {name: len(found) for name, found in seconds.items()} == {
        "decorated": 2,
        "plain": 2,
    }


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 1, "there is no GPU here, only cpu"),
        (["--replicas", "3,x"], 2, "numbers from 2 to 8"),
        (["--sizes", "8 MB"], 2, "a number with k or m"),
        (["--blocks", "0"], 2, "numbers from 1 to 256"),
    ],
)
def test_what_it_cannot_do_it_says(arguments, code, text):
    runner = typer.testing.CliRunner()
    found = runner.invoke(main.app, ["bench", "kernel", *arguments])
    assert found.exit_code == code
    assert text in " ".join(found.stderr.split())
