"""Process sets, gradients and objects, on 4 ranks."""

import functools

import pytest

import jdp
from tests import harness, rarely
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
OFTEN = "shared_memory"
JOBS = ((OFTEN,), tuple(name for name in CONFIGURATIONS if name != OFTEN))


def _run(names):
    world, found = jdp.init(), {}
    for name in names:
        tests, repeats, options = CONFIGURATIONS[name]
        found[name] = checks.run(tests, world, repeats=repeats, **options)
    return found


@pytest.fixture(scope="module")
def find_job():
    return functools.cache(lambda names: harness.run_processes(_run, 4, names))


@pytest.mark.parametrize(
    ("configuration", "name"),
    rarely.cases(CASES, often=[case for case in CASES if case[0] == OFTEN]),
)
def test_sets_gradients_and_objects(find_job, configuration, name):
    (names,) = (names for names in JOBS if configuration in names)
    checks.verify(find_job(names), configuration, name)
