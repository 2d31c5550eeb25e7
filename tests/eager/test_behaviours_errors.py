"""Errors: on every rank, with both values and the ranks; the engine goes on."""

import functools

import pytest

import jdp
from jdp.eager.coordinator.mismatch import explain
from jdp.eager.messages import Spec
from tests import harness, rarely
from tests.eager import checks, checks_of_errors, simulation
from tests.eager.simulation import all_reduce

CHECKS = checks_of_errors.CHECKS
CONFIGURATIONS = {
    "cached": (3, {}),
    "uncached": (1, {"cache_capacity": 0}),
    "gloo": (1, {"shared_memory_bytes": 0}),
}
NAMES = [check.__name__ for check in CHECKS]


def _run(configuration):
    repeats, options = CONFIGURATIONS[configuration]
    world = jdp.init()
    return {configuration: checks.run(CHECKS, world, repeats=repeats, **options)}


@pytest.fixture(scope="module")
def find_job():
    return functools.cache(lambda name: harness.run_processes(_run, 3, name))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "configuration", rarely.cases(CONFIGURATIONS, often=("cached",))
)
@pytest.mark.parametrize("name", NAMES)
def test_errors(find_job, configuration, name):
    checks.verify(find_job(configuration), configuration, name)


# What no machine of these tests has.


@pytest.mark.parametrize("late", range(3))
def test_devices_that_differ_are_an_error_on_every_rank(late):
    job = simulation.Job(3)
    for _ in range(2):  # The second time with names that have failed before.
        for rank in range(3):
            device = "gpu" if rank == late else "cpu"
            job.submit(rank, all_reduce("a", device=device), all_reduce("b"))
        job.settle()
    for executed in job.executed:
        errors = [error for _, names, error in executed if names == ("a",)]
        assert len(errors) == 2 and len(set(errors)) == 1
        assert errors[0].startswith("Mismatched devices of 'a': rank 0 has ")
        assert f"rank {late or 1} has {'gpu' if late else 'cpu'}." in errors[0]
        assert [names for _, names, error in executed if not error] == [("b",)] * 2


def test_devices_that_differ_in_a_group_are_an_error_of_all_of_it():
    job = simulation.Job(2)
    for rank, device in enumerate(("cpu", "gpu")):
        facts = {"group": "g", "group_size": 2}
        job.submit(
            rank, all_reduce("a", **facts), all_reduce("b", device=device, **facts)
        )
    job.settle()
    for executed in job.executed:
        assert {names for _, names, _ in executed} == {("a",), ("b",)}
        assert all("Mismatched devices of 'b'" in error for _, _, error in executed)


# The first difference wins, in Horovod's order.
_STEPS = (
    ({"dtype": "int32"}, "data types"),
    ({"kind": "broadcast"}, "operations"),
    ({"shape": (5,)}, "all_reduce shapes"),
    ({"postscale": 2.0}, "prescale and postscale factors"),
    ({"op": "min"}, "reduction operations"),
    ({"root": 1}, "broadcast root ranks"),
    ({"device": "gpu"}, "devices"),
    ({"group": "g", "group_size": 2}, "groups"),
    ({"fingerprint": "f"}, "programs"),
)


@pytest.mark.parametrize("first", range(len(_STEPS)))
def test_the_first_difference_is_said(first):
    facts = {"kind": "all_reduce", "dtype": "float32", "shape": (4,), "op": "sum"}
    other = dict(facts)
    for changes, _ in _STEPS[first:]:
        other |= changes
    text = explain("a", {0: Spec(**facts), 2: Spec(**other)})
    assert text is not None and text.startswith(f"Mismatched {_STEPS[first][1]} of 'a'")
    assert "rank 0 has" in text and "but rank 2 has" in text
