"""What is found out about the devices, and what is made of it."""

import dataclasses
import itertools
import pathlib
import types

import msgspec
import pytest

from jdp.collectives.pallas import Topology, gpu_topology
from jdp.collectives.pallas.gpu_topology import GpuFacts, combine
from tests import harness

HOPPER = GpuFacts(
    platform="gpu",
    host="a",
    compute_capability=9.0,
    is_fully_connected=True,
    has_multicast=True,
)
TOPOLOGY = Topology("gpu", 1, 9.0, is_fully_connected=True, has_multicast=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"host": "b"}, {"num_hosts": 2}),
        ({"compute_capability": 8.0}, {"compute_capability": 8.0}),
        ({"compute_capability": None}, {"compute_capability": None}),
        ({"is_fully_connected": False}, {"is_fully_connected": False}),
        ({"has_multicast": False}, {"has_multicast": False}),
        ({"platform": "cpu"}, {"platform": "cpu and gpu"}),
        (
            {"is_fully_connected": None, "unknown_because": "no driver"},
            {"is_fully_connected": None, "unknown_because": "no driver"},
        ),
    ],
)
def test_the_least_of_all_processes_holds(changes, expected):
    other = msgspec.structs.replace(HOPPER, **changes)
    expected = dataclasses.replace(TOPOLOGY, **expected)
    assert combine([HOPPER, other]) == combine([other, HOPPER]) == expected


@pytest.mark.parametrize("missing", [None, (0, 3), (2, 1)])
def test_every_pair_must_be_connected_in_both_directions(missing):
    """With a driver that answers from a list of links."""
    links = set(itertools.permutations(range(4), 2)) - {missing}
    driver = types.SimpleNamespace(
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetP2PStatus=lambda a, b, what: (
            0 if (a, b) in links and what == 2 else 5
        ),
    )
    assert gpu_topology.are_all_connected(driver) == (missing is None)


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["9.0"], 9.0), (["10.3", "9.0"], 9.0), (["gfx90a"], None), (["9.0", "x"], None)],
)
def test_the_least_capability_counts(names, expected):
    assert gpu_topology.min_capability(names) == expected


def test_cpu_devices_lie_on_this_host():
    world = harness.local_world(4)
    assert gpu_topology.find_topology(world) == Topology("cpu", 1)


@pytest.mark.skipif(
    pathlib.Path("/dev/nvidiactl").exists(), reason="there is a driver here"
)
def test_without_a_driver_nothing_is_claimed():
    is_connected, because = gpu_topology._ask_nvml()
    assert is_connected is None and "the driver does not answer" in because
    assert not gpu_topology._has_multicast(0)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    is_connected, because = gpu_topology._ask_nvml()
    assert is_connected is None and "nvidia-ml-py" in because
