"""Cores: whether processes have a core each, and how many the host grants."""

import math
import os
import sys

import pytest

from jdp.replicas import cores
from jdp.replicas.cores import UsableCores
from tests import harness, rarely

INF = math.inf


@pytest.mark.parametrize(
    ("masks", "is_enough"),
    [
        ([(0, 1), (0, 1)], True),
        ([(0,), (1,)], True),
        ([(0,), (0,)], False),
        ([(0, 1)] * 3, False),
        # As many cores as processes, and yet two share one.
        ([(0,), (0,), (1, 2)], False),
        # The first gives way to the second, and the third to the first.
        ([(0, 1), (0,), (1, 2)], True),
        ([(0, 1, 2), (0, 1), (0,)], True),
        ([(0, 1, 2), (0, 1), (0, 1)], True),
        ([(0, 1, 2, 3), (0, 1), (0, 1), (0, 1)], False),
        ([tuple(range(600))] * 600, True),
        ([tuple(range(600))] * 601, False),
    ],
)
def test_each_process_needs_a_core_of_its_own(masks, is_enough):
    assert cores.are_enough([UsableCores(mask) for mask in masks]) == is_enough


@pytest.mark.parametrize(("quota", "is_enough"), [(1.5, False), (2.0, True)])
def test_cores_without_time_are_not_enough(quota, is_enough):
    processes = [UsableCores((0, 1)), UsableCores((2, 3), quota)]
    assert cores.are_enough(processes) == is_enough


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/a/b\n", {}, INF),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, INF),
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        # A limit further up holds too; so does the limit of a container.
        (
            "0::/a/b\n",
            {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "200000 100000\n"},
            2.0,
        ),
        ("0::/of/the/host\n", {"cpu.max": "50000 100000\n"}, 0.5),
        (
            "5:devices:/x\n3:cpu,cpuacct:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n"}
            | {"cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            3.0,
        ),
        (
            "1:cpu:/\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            INF,
        ),
        ("1:cpu:/\n0::/\n", {"cpu.max": "broken\n"}, INF),
        ("", {}, INF),
    ],
)
def test_the_quota_is_the_least_of_all_groups(tmp_path, groups, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.find_quota(groups, tmp_path) == quota


def _have_cores():
    import jdp
    from jdp import eager
    from jdp.collectives.shared_memory import shared_segment
    from jdp.eager import session

    world = jdp.init()
    segment = shared_segment.SharedSegment(
        world, [64], key="cores", processes=range(world.process_count)
    )
    eager.init(world, eager.EagerOptions(spin_s=1e-4))
    found = session.current_engine()._spin_s > 0
    eager.shutdown()
    return segment._num_spins == shared_segment._NUM_SPINS, found


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) != 2,
    reason="needs two cores",
)
@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes", rarely.cases([2, 3], often=(2,)))
def test_processes_spin_while_each_has_a_core(num_processes, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = harness.run_checked(_have_cores, num_processes)
    assert found == [(num_processes == 2,) * 2] * num_processes
