"""The limits of the custom all-reduce, from times."""

import pytest
import rich.console

from jdp.bench import tune
from jdp.collectives import psum_all_reduce, ring_all_reduce
from jdp.collectives.measurement import Seconds
from jdp.collectives.pallas import Limits, Topology, tuning
from jdp.collectives.pallas.choice import THRESHOLDS
from tests import harness

KIB = 1 << 10
SIZES = tuple(4**k * KIB for k in range(7))  # 1 KiB to 4 MiB


def _times(**seconds):
    """Times of each all-reduce: its latency, and seconds a byte."""
    return [
        Seconds(name, size, [latency_s + size * s_per_byte])
        for name, (latency_s, s_per_byte) in seconds.items()
        for size in SIZES
    ]


# One stage is first, two stages from 64 KiB, NCCL beyond 1 MiB.
PLAIN = dict(one_stage=(5e-6, 8e-11), two_stage=(8e-6, 2e-11), psum=(2.5e-5, 1e-11))


def test_each_takes_the_sizes_it_is_best_at():
    assert tuning.find_limits(_times(**PLAIN), 8) == Limits(
        num_replicas=8, one_stage_below=64 * KIB, max_bytes=1024 * KIB
    )


def test_one_stage_may_be_best_everywhere():
    found = tuning.find_limits(_times(**PLAIN | {"two_stage": (1.0, 0.0)}), 2)
    assert found == Limits(num_replicas=2, one_stage_below=None, max_bytes=256 * KIB)


def test_where_nccl_is_best_nothing_else_is_taken():
    found = tuning.find_limits(_times(**PLAIN | {"psum": (1e-6, 1e-12)}), 4)
    assert found.max_bytes == 0


def test_the_switch_gets_what_it_is_best_at():
    found = tuning.find_limits(_times(**PLAIN, multimem=(9e-6, 1e-11)), 8)
    assert found == Limits(
        num_replicas=8,
        one_stage_below=64 * KIB,
        multimem_from=256 * KIB,
        max_bytes=4096 * KIB,
    )


def test_one_measurement_out_of_line_moves_no_limit():
    times = _times(**PLAIN)
    for i, each in enumerate(times):
        if each.algorithm == "psum" and each.num_bytes == 4 * KIB:
            times[i] = Seconds("psum", 4 * KIB, [each.median / 10])
    assert tuning.find_limits(times, 8) == tuning.find_limits(_times(**PLAIN), 8)


def test_what_is_timed_are_the_kernels_up_to_the_largest_size():
    found = tuning.candidates(4, Topology("gpu", 1, 9.0, True))
    assert set(found) == {"psum", "one_stage", "two_stage"}
    for name in ("one_stage", "two_stage"):
        assert found[name].algorithm == name
        assert found[name].thresholds.get(4).max_bytes == max(tuning.SIZES)
    with_switch = tuning.candidates(4, Topology("gpu", 1, 9.0, True, True))
    assert set(with_switch) == {*found, "multimem"}


def test_times_of_the_mesh_that_is_here_make_limits():
    all_reduces = {
        "psum": psum_all_reduce,
        "one_stage": ring_all_reduce,
        "two_stage": ring_all_reduce,
    }
    limits, times = tuning.measure_limits(
        harness.local_world(2), all_reduces, sizes=(KIB, 64 * KIB), rounds=3
    )
    assert limits.num_replicas == 2 and limits.max_bytes in (0, KIB, 64 * KIB)
    assert len(times) == 6
    console = rich.console.Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(tune.table(2, times))
    for name in ("65,536", "psum", "one_stage", "2 GPUs"):
        assert name in capture.get()


@pytest.mark.parametrize(
    "measured", [{}, {4: Limits(num_replicas=4, one_stage_below=1)}]
)
def test_what_was_not_measured_stays(measured):
    found = tune.merge(measured, "NVIDIA H200")
    for limits in THRESHOLDS.limits:
        expected = measured.get(limits.num_replicas, limits)
        assert found.get(limits.num_replicas) == expected
    assert "H200" in found.source and THRESHOLDS.source in found.source
