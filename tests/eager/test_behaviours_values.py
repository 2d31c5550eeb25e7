"""Values: what every collective gives, on 2, 3 and 4 ranks, whatever carries it."""

import functools
from typing import Any, NamedTuple

import pytest

import jdp
from tests import harness, rarely
from tests.eager import checks, checks_of_join, checks_of_moves, checks_of_reductions

# The first test of each job waits for all of it.
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

EXACT_CHECKS = checks_of_reductions.EXACT_CHECKS
CHECKS = checks_of_reductions.CHECKS + checks_of_moves.CHECKS + checks_of_join.CHECKS
CHECKS += EXACT_CHECKS
ODD_CHECKS = (
    checks_of_reductions.an_average_is_the_sum_divided_and_of_integers_cut_off,
    checks_of_reductions.factors_multiply_with_that_of_the_average,
    checks_of_moves.arrays_of_different_lengths_are_concatenated,
    checks_of_moves.a_rank_may_have_no_rows,
    checks_of_moves.rows_go_where_the_splits_say,
    checks_of_moves.splits_may_be_zero_and_rows_may_stay,
    checks_of_moves.each_rank_gets_its_rows_of_the_sum,
    checks_of_moves.the_first_ranks_get_one_row_more,
)
ADASUM_CHECKS = checks_of_reductions.ADASUM_CHECKS


class Configuration(NamedTuple):
    """How checks are run, and on how many processes."""

    options: dict[str, Any]
    sizes: tuple[int, ...]
    repeats: int  # names that come again are cached.
    # XLA compiles programs for each; on two ranks all go through it too.
    dtypes_of_more: tuple[str, ...] = checks.DTYPES


CONFIGURATIONS = {
    "shared_memory": Configuration({}, (2, 3, 4), 2),
    "uncached_unfused_in_pieces": Configuration(
        {"cache_capacity": 0, "fusion_bytes": 0, "shared_memory_bytes": 4096}, (2, 3), 1
    ),
    "gloo": Configuration({"shared_memory_bytes": 0}, (2, 3), 1, checks.FEW),
    "hierarchical": Configuration(
        {
            "shared_memory_bytes": 0,
            "hierarchical_all_reduce": True,
            "hierarchical_all_gather": True,
        },
        (4,),
        1,
        checks.FEW,
    ),
}


def _checks(size: int, configuration: str):
    if configuration == "hierarchical":  # It takes nothing else.
        return checks_of_reductions.CHECKS + checks_of_moves.GATHERS
    if configuration == "gloo" and size == 3:  # What depends on the number of ranks.
        return ODD_CHECKS + EXACT_CHECKS + checks_of_join.CHECKS
    # Adasum is XLA's in every configuration.
    has_adasum = size != 3 and configuration == "shared_memory"
    return CHECKS + (ADASUM_CHECKS if has_adasum else ())


def _run(num_processes: int):
    if num_processes == 4:
        world = jdp.init(axis_name=("node", "data"), num_nodes=2)
    else:
        world = jdp.init()
    return {
        name: checks.run(
            _checks(num_processes, name),
            world,
            repeats=each.repeats,
            dtypes=checks.DTYPES if num_processes == 2 else each.dtypes_of_more,
            **each.options,
        )
        for name, each in CONFIGURATIONS.items()
        if num_processes in each.sizes
    }


CASES = [
    (size, name, check.__name__)
    for size in (2, 3, 4)
    for name, configuration in CONFIGURATIONS.items()
    if size in configuration.sizes
    for check in _checks(size, name)
]
ON_TWO = [case for case in CASES if case[0] == 2]


@pytest.fixture(scope="module")
def find_job():
    return functools.cache(lambda size: harness.run_processes(_run, size, size))


@pytest.mark.parametrize(
    ("num_processes", "configuration", "name"), rarely.cases(CASES, often=ON_TWO)
)
def test_values(find_job, num_processes, configuration, name):
    checks.verify(find_job(num_processes), configuration, name)
