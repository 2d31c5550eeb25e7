"""A slow process of a real job is named, and no other one."""

import re

import pytest

from tests.watch import straggler_jobs


@pytest.mark.slow
def test_loops_that_run_ahead_are_compared_by_their_own_work():
    alike = straggler_jobs.run("ahead", factor=1.0, num_steps=150)
    assert alike.lines == [], alike.output
    slow = straggler_jobs.run("ahead", factor=1.4, num_steps=150)
    assert len(slow.lines) == 1, slow.output
    found = re.search(
        r"process 1 .*: (\S+) ms of work per step, and theirs takes (\S+) ms",
        slow.lines[0],
    )
    assert float(found[1]) == pytest.approx(71, rel=0.1)
    assert float(found[2]) == pytest.approx(51, rel=0.1)
