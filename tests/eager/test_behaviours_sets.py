"""Process sets, gradients and objects, on 4 ranks."""

import functools

import pytest

import jdp
from tests import harness
from tests.eager import (
    checks,
    checks_of_gradients,
    checks_of_objects,
    checks_of_sets,
)

pytestmark = pytest.mark.multiprocess

SETS, OBJECTS = checks_of_sets.CHECKS, checks_of_objects.CHECKS
GRADIENTS = checks_of_gradients.CHECKS
# By configuration the checks, how often each is run, and options.
CONFIGURATIONS = {
    "shared_memory": (SETS + GRADIENTS + OBJECTS, 2, {}),
    "uncached": (SETS + OBJECTS, 1, {"cache_capacity": 0, "fusion_bytes": 0}),
    "gloo": (SETS, 1, {"shared_memory_bytes": 0}),
}
CASES = [
    (name, check.__name__)
    for name, (tests, _, _) in CONFIGURATIONS.items()
    for check in tests
]


def _run():
    world = jdp.init()
    return {
        name: checks.run(tests, world, repeats=repeats, **options)
        for name, (tests, repeats, options) in CONFIGURATIONS.items()
    }


@pytest.fixture(scope="module")
def find_job():
    return functools.cache(lambda: harness.run_processes(_run, 4))


@pytest.mark.parametrize(
    ("configuration", "name"),
    CASES,
)
@pytest.mark.slow
def test_sets_gradients_and_objects(find_job, configuration, name):
    checks.verify(find_job(), configuration, name)
