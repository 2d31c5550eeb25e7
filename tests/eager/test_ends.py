"""Programs that end without `eager.shutdown`."""

import re
import time

import numpy as np
import pytest

import jdp
from jdp import eager
from tests import harness, rarely
from tests.eager import checks_of_ends

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("num_processes", rarely.cases([2, 3], often=(3,)))
def test_one_that_ends_lets_run_what_all_submit_and_the_rest_is_named(num_processes):
    outcome = harness.run_processes(
        checks_of_ends.run, num_processes, "ends", 0, ends_as_usual=True
    )
    assert outcome.exit_code == 0, outcome.output
    last = num_processes - 1
    heard = re.findall(r"RANK (\d) HEARD (.*)", outcome.output)
    assert sorted(int(rank) for rank, _ in heard) == list(range(last)), outcome.output
    for _, text in heard:
        assert f"rank {last} has shut the engine down" in text


def test_one_that_raises_is_named_at_once():
    outcome = harness.run_processes(
        checks_of_ends.run, 3, "raises", -1, ends_as_usual=True, grace_s=5.0
    )
    assert outcome.exit_code == 1 and "KeyError: 'from the program'" in outcome.output
    heard = dict(re.findall(r"RANK (\d) HEARD (.*)", outcome.output))
    # JAX may end process 1 when its coordinator, process 0, has ended.
    assert "0" in heard, outcome.output
    for text in heard.values():
        words = (
            "rank 2 has shut the engine down|process 2 (has ended|failed or is gone)"
        )
        assert re.search(words, text, re.IGNORECASE)


def _fail_in_process_0():
    world = jdp.init(timeout_s=30.0)
    eager.init(world)
    eager.all_reduce(np.ones(3), name="a")
    if world.process_index == 0:
        raise KeyError("from the program")
    start_s = time.monotonic()
    try:
        eager.all_reduce(np.ones(3), name="b")
    except RuntimeError as error:
        return str(error), time.monotonic() - start_s


@pytest.mark.slow
def test_the_others_hear_at_once_that_process_0_has_failed():
    """It stays until they have ended, but its engine does not."""
    outcome = harness.run_processes(_fail_in_process_0, 2, grace_s=20.0)
    assert outcome.exit_code == 1
    text, seconds = outcome.values[1]
    assert "rank 0 has shut the engine down" in text and seconds < 5.0
