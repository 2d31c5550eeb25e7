"""Start and end, late ranks, and timelines, on 3 ranks."""

import pytest

import jdp
from tests import harness
from tests.eager import checks, checks_of_faults

pytestmark = pytest.mark.multiprocess

NAMES = [check.__name__ for check in checks_of_faults.CHECKS]


def _run(folder):
    return {"": checks_of_faults.run(jdp.init(), folder)}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return harness.run_processes(_run, 3, str(tmp_path_factory.mktemp("timelines")))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_faults(job, name):
    checks.verify(job, "", name)
