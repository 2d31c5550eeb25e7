"""When the custom all-reduce is taken, which algorithm, and why not."""

import collections
import dataclasses
import json
import pathlib

import jax.numpy as jnp
import pytest

from jdp.collectives.pallas import Limits, Thresholds, Topology, should_use_custom
from jdp.collectives.pallas.choice import (
    MAX_BLOCKS,
    THRESHOLDS,
    Launch,
    choose_algorithm,
    default_launch,
    limit_blocks,
)

KIB, MIB = 1 << 10, 1 << 20
NVLINK = Topology("gpu", 1, 9.0, is_fully_connected=True)


@pytest.mark.parametrize("n", [2, 4, 6, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_gpus_of_a_host_take_it_up_to_8_mib(n, dtype):
    reasons = []
    for num_bytes, expected in ((4, True), (8 * MIB, True), (8 * MIB + 4, False)):
        taken = should_use_custom(num_bytes, n, dtype, NVLINK, explain=reasons.append)
        assert taken == expected
    assert reasons == [
        f"it takes at most {8 * MIB} bytes of {n} replicas, "
        f"and the buffer has {8 * MIB + 4}"
    ]


@pytest.mark.parametrize(
    ("reason", "changes", "arguments"),
    [
        ("the devices are of platform 'cpu'", {"platform": "cpu"}, {}),
        ("runs within a host, and the replicas lie on 2", {"num_hosts": 2}, {}),
        ("takes 2, 4, 6, 8 replicas, and there are 3", {}, {"num_replicas": 3}),
        ("takes 2, 4, 6, 8 replicas, and there are 16", {}, {"num_replicas": 16}),
        ("and the buffer is float64", {}, {"dtype": "float64"}),
        ("and the buffer is int32", {}, {"dtype": jnp.int32}),
        ("9.0 or more, and theirs is 8.0", {"compute_capability": 8.0}, {}),
        ("and theirs is unknown", {"compute_capability": None}, {}),
        ("connected by NVLink, and they are not", {"is_fully_connected": False}, {}),
        (
            "could not be found out: no driver",
            {"is_fully_connected": None, "unknown_because": "no driver"},
            {},
        ),
    ],
)
def test_anything_else_does_not_and_is_told_why(reason, changes, arguments):
    reasons = []
    arguments = {"num_bytes": KIB, "num_replicas": 4, "dtype": "float32"} | arguments
    topology = dataclasses.replace(NVLINK, **changes)
    assert not should_use_custom(**arguments, topology=topology, explain=reasons.append)
    (found,) = reasons
    assert reason in found


@pytest.mark.parametrize(
    ("n", "num_bytes", "algorithm"),
    [
        (2, 8 * MIB, "one_stage"),
        (4, 512 * KIB - 4, "one_stage"),
        (4, 512 * KIB, "two_stage"),
        (6, 256 * KIB - 4, "one_stage"),
        (6, 256 * KIB, "two_stage"),
        (8, 256 * KIB - 4, "one_stage"),
        (8, 256 * KIB, "two_stage"),
    ],
)
def test_one_stage_takes_the_small_buffers(n, num_bytes, algorithm):
    assert choose_algorithm(num_bytes, n) == algorithm
    # The switch is not taken before it was measured.
    assert choose_algorithm(num_bytes, n, can_multicast=True) == algorithm


def test_every_limit_can_be_overridden():
    limits = Limits(num_replicas=3, one_stage_below=10, multimem_from=30, max_bytes=40)
    thresholds = Thresholds(limits=(limits,), source="here")

    def choose(num_bytes, **options):
        return choose_algorithm(num_bytes, 3, thresholds=thresholds, **options)

    assert [choose(size) for size in (9, 10, 30)] == ["one_stage"] + ["two_stage"] * 2
    assert choose(30, can_multicast=True) == "multimem"
    assert choose(29, can_multicast=True) == "two_stage"
    for num_bytes, n, expected in ((40, 3, True), (41, 3, False), (40, 4, False)):
        taken = should_use_custom(
            num_bytes, n, "float32", NVLINK, thresholds=thresholds
        )
        assert taken == expected
    with pytest.raises(ValueError, match="takes 3 replicas, got 4"):
        choose_algorithm(1, 4, thresholds=thresholds)


def test_thresholds_are_kept_in_a_file(tmp_path):
    path = tmp_path / "thresholds.json"
    THRESHOLDS.save(path)
    assert Thresholds.load(path) == THRESHOLDS
    path.write_text('{"limits": [{"num_replicas": "two"}], "source": ""}')
    with pytest.raises(ValueError, match="does not hold thresholds.*limits"):
        Thresholds.load(path)


def test_the_table_names_its_source():
    assert "vLLM" in THRESHOLDS.source
    assert [limits.num_replicas for limits in THRESHOLDS.limits] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("num_bytes", "n", "algorithm", "launch"),
    [
        (4, 8, "one_stage", Launch(1, 4, 1)),
        (8 * KIB, 8, "one_stage", Launch(1, 4, 1)),  # a tile for each warpgroup.
        (10 * KIB, 8, "one_stage", Launch(2, 4, 1)),
        (64 * KIB, 8, "two_stage", Launch(1, 4, 1)),  # one of eight parts.
        (8 * MIB, 8, "two_stage", Launch(66, 4, 1)),
        (MIB, 2, "one_stage", Launch(66, 4, 2)),
        (8 * MIB, 2, "one_stage", Launch(66, 4, 4)),  # 8 loads under way.
        (8 * MIB, 4, "two_stage", Launch(66, 4, 2)),
        (8 * MIB, 4, "multimem", Launch(66, 4, 4)),
    ],
)
def test_a_launch_has_as_many_threads_as_there_is_work_for(
    num_bytes, n, algorithm, launch
):
    assert default_launch(num_bytes, n, algorithm, max_blocks=MAX_BLOCKS) == launch


ROWS = pathlib.Path(__file__).parents[2] / (
    "benchmarks/results/2026-11-22_kernel_launches_gpu.jsonl"
)


def _measured():
    """Microseconds on an H100 by kernel, and there by launch."""
    found = collections.defaultdict(dict)
    for row in map(json.loads, ROWS.read_text().splitlines()):
        kernel = (row["alg"], row["n"], row["kib"] * KIB)
        found[kernel][Launch(row["blocks"], row["wg"], row["unroll"])] = row["us"]
    return found


def test_the_default_launch_is_near_the_best_that_was_measured():
    """Of block counts that were not measured the next one that was is taken."""
    compared = 0
    for (algorithm, n, num_bytes), times in _measured().items():
        launch = default_launch(num_bytes, n, algorithm, max_blocks=MAX_BLOCKS)
        counts = {each.num_blocks for each in times}
        measured = min(count for count in counts if count >= launch.num_blocks)
        launch = dataclasses.replace(launch, num_blocks=measured)
        assert times[launch] <= 1.06 * min(times.values()), (algorithm, n, num_bytes)
        compared += 1
    assert compared == 10


@pytest.mark.parametrize(
    ("num_multiprocessors", "expected"),
    [(None, 66), (148, 66), (132, 66), (114, 57), (78, 39), (1, 1)],
)
def test_half_of_the_multiprocessors_are_left_to_others(num_multiprocessors, expected):
    assert limit_blocks(MAX_BLOCKS, num_multiprocessors) == expected
    assert limit_blocks(5, num_multiprocessors) == min(5, expected)
