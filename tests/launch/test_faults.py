import pytest

from tests import rarely
from tests.launch import fault_table


# The whole table takes long: `make faults`. Each of these was once blamed wrongly, or
# left the others waiting.
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "when", "process", "is_joined"),
    rarely.cases(
        [
            ("exit0", "in_init", 0, False),
            ("raise", "loader", 1, True),
            ("kill", "step", 0, False),
            ("exit0", "step", 1, True),
        ],
        often=[("raise", "loader", 1, True)],
    ),
)
def test_the_process_that_met_the_fault_is_blamed_soon(fault, when, process, is_joined):
    found = fault_table.check(
        fault, when, process, num_processes=2, is_joined=is_joined
    )
    assert found.wrong is None, found.wrong
