"""What runs on a GPU: `make gpu`. Its checks themselves are checked on the CPU."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu_launches
from jdp.collectives.pallas import kernel_launch
from tests import harness, rarely
from tests.collectives import kernels_on_gpu
from tests.collectives.kernels_on_gpu import Case

CASES = [
    Case("one_stage", 2, "float32", 1024, 3),
    Case("two_stage", 8, "bfloat16", 4096, 0),
]


def _exact(case, xs):
    return jnp.tile(xs.astype(jnp.float32).sum(0).astype(xs.dtype), (len(xs), 1))


def test_a_right_sum_is_found_right():
    said = []
    rows = kernels_on_gpu.check(CASES, 3, reduce=_exact, report=said.append)
    assert [row["wrong"] for row in rows] == [0, 0] and not said


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ys: ys.at[-1, -1].add(1),
        lambda ys: ys.at[0, 7].set(jnp.nan),
        lambda ys: jnp.roll(ys, 1, axis=1),
    ],
)
def test_a_wrong_element_is_found(spoil):
    said = []
    rows = kernels_on_gpu.check(
        CASES[1:], 3, reduce=lambda c, xs: spoil(_exact(c, xs)), report=said.append
    )
    assert rows[0]["wrong"] >= 3 and "WRONG" in said[0]


def test_the_whole_set_is_what_was_promised():
    cases = kernels_on_gpu.make_cases()
    assert {case.num_replicas for case in cases} == {2, 4, 6, 8}
    assert {case.dtype for case in cases} == {"float32", "bfloat16", "float16"}
    sizes = {case.num_bytes for case in cases}
    assert min(sizes) == 1 << 10 and max(sizes) == 64 << 20


def test_every_launch_that_is_timed_is_one_of_a_kernel():
    """Buffers are not padded, threads have work, and the defaults come first."""
    cases = gpu_launches.make_cases()
    kernels = {case[:3] for case in cases}
    assert [case.is_default for case in cases[: len(kernels)]] == [True] * len(kernels)
    assert len(kernels) == 3 * len(gpu_launches.KERNELS)
    assert len(set(cases)) == len(cases)
    for algorithm, n, num_bytes, launch in cases:
        kernel_launch.all_reduce_alone(n, num_bytes // 4, "float32", algorithm, launch)
        assert launch.num_blocks <= 132


def test_the_default_launch_is_shown_beside_the_best():
    kernel = {"algorithm": "one_stage", "num_replicas": 2, "num_bytes": 65536}
    rows = [
        kernel
        | {"num_blocks": blocks, "unroll": 1, "us": us, "bound_us": 1.0}
        | {"is_default": blocks == 8}
        for blocks, us in ((8, 4.0), (4, 3.0), (16, 5.0))
    ]
    assert gpu_launches.summarize(rows) == [
        "one_stage n=2 64 KiB: 4.0 us with 8 blocks, unroll 1, 3.0 with 4 blocks, "
        "unroll 1, the best of 3; bound 1.0"
    ]


@pytest.mark.parametrize(
    "module",
    rarely.cases(
        ["tests.collectives.kernels_on_gpu", "benchmarks.gpu_launches"],
        often=("benchmarks.gpu_launches",),
    ),
)
def test_without_a_gpu_it_says_so(module):
    command = [sys.executable, "-m", module]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": harness.python_path()}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1 and "There is no GPU here, only cpu" in done.stderr


_IN_A_GRAPH = """
import jax, jax.numpy as jnp
from tests.collectives.kernels_on_gpu import Case

for algorithm in ("one_stage", "two_stage"):
    case = Case(algorithm, 4, "float32", 1 << 16, 0)
    step = jax.jit(lambda xs: 0.25 * case.reduce(2 * xs) - 1)
    xs = jnp.arange(4 * (1 << 14), dtype=jnp.float32).reshape(4, -1) % 8
    # What it gave is what it takes next: other buffers, other numbers.
    for _ in range(50):
        expected = jnp.tile(0.5 * xs.sum(0) - 1, (4, 1))
        xs = step(xs)
        assert jnp.array_equal(xs, expected), algorithm
        xs = xs % 8
print("right", jax.default_backend())
"""


@pytest.mark.gpu
def test_the_kernel_runs_under_command_buffers():
    flags = "--xla_gpu_graph_min_graph_size=1"
    flags += " --xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": harness.python_path()}
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_GRAPH],
        capture_output=True,
        text=True,
        env=env,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "right gpu"


@pytest.mark.gpu
def test_a_small_set_is_right_on_the_gpu():
    assert jax.default_backend() == "gpu"
    cases = [case for case in kernels_on_gpu.make_cases() if case.num_bytes == 1 << 16]
    rows = kernels_on_gpu.check(cases, 10)
    assert all(row["wrong"] == 0 for row in rows)
