"""Where has the time of steps gone, by the record?"""

from jdp.replicas import stamps
from jdp.watch import shares
from jdp.watch.record import Entry
from jdp.watch.shares import SharesState, StepSample

MS = 1_000_000


def follow(*moments):
    """The samples after (milliseconds, kind, number) each."""
    entries = [
        Entry(int(at * MS), kind, *rest, *((0, "")[len(rest) :]))
        for at, kind, *rest in moments
    ]
    return shares.follow(SharesState(), entries)[1]


def test_a_sample_is_taken_when_a_process_comes_to_the_program_of_a_step():
    found = follow(
        (1, stamps.STEP_BEGUN, 1),
        (2, stamps.STEP_PLACED),
        (3, stamps.STEP_DISPATCHED, 1),
        (9, stamps.STEP_BEGUN, 2),
        (10, stamps.STEP_PLACED),
    )
    assert [(each.step, each.at_ns) for each in found] == [(1, 2 * MS), (2, 10 * MS)]


def test_it_tells_whether_the_devices_have_nothing_else_to_do():
    moments = [(2, stamps.STEP_BEGUN, 1), (2, stamps.STEP_PLACED)]
    finished = (4, stamps.STEP_FINISHED, 1)
    later = [(5, stamps.STEP_BEGUN, 2), (5, stamps.STEP_PLACED)]
    assert [each.is_idle for each in follow(*moments, finished, *later)] == [True, True]
    assert [each.is_idle for each in follow(*moments, *later)] == [True, False]


def test_waits_loads_reductions_and_compilations_are_added_up():
    (found,) = follow(
        (0, stamps.MEETING_BEGUN, 1),
        (4, stamps.MEETING_ENDED, 1),
        (5, stamps.LOAD_BEGUN),
        (8, stamps.LOAD_ENDED),
        (9, stamps.EAGER_BEGUN),
        (11, stamps.EAGER_ENDED),
        (12, stamps.COMPILE_BEGUN),
        (14, stamps.COMPILE_ENDED),
        (15, stamps.REDUCTIONS_WAITED, 7),
        (15, stamps.REDUCTIONS_WORKED, 9),
        (16, stamps.STEP_BEGUN, 3),
        (17, stamps.STEP_PLACED),
    )
    assert found == StepSample(3, 17 * MS, 6 * MS, 7, 9, 3 * MS, 0, 1, False)


def test_a_wait_within_a_wait_counts_once():
    (found,) = follow(
        (0, stamps.ITERATION_BEGUN, 1),
        (1, stamps.MEETING_BEGUN, 1),
        (3, stamps.MEETING_ENDED, 1),
        (4, stamps.ITERATION_ENDED, 1),
        (5, stamps.STEP_BEGUN, 1),
        (5, stamps.STEP_PLACED),
    )
    assert found.waited_ns == 4 * MS


def test_a_wait_for_the_own_reader_is_loading():
    (found,) = follow(
        (1, stamps.READ_BEGUN),
        (2, stamps.ITERATION_BEGUN, 1),
        (7, stamps.READ_ENDED),
        (10, stamps.ITERATION_ENDED, 1),
        (11, stamps.STEP_BEGUN, 1),
        (11, stamps.STEP_PLACED),
    )
    assert (found.loaded_ns, found.waited_ns) == (5 * MS, 3 * MS)
    assert found.read_ns == 6 * MS


def test_a_reader_that_is_ahead_costs_nothing():
    (found,) = follow(
        (0, stamps.READ_BEGUN),
        (7, stamps.READ_ENDED),
        (8, stamps.STEP_BEGUN, 1),
        (8, stamps.STEP_PLACED),
    )
    assert (found.loaded_ns, found.waited_ns) == (0, 0)


def test_samples_that_are_left_out_leave_common_steps():
    all_steps = [StepSample(step, step) for step in range(1, 101)]
    one = shares.thin(all_steps, 30)
    other = shares.thin(all_steps[37:], 30)
    assert [each.step for each in one] == list(range(4, 101, 4))
    steps = {each.step for each in other}
    assert {step for step in steps if step % 4 == 0} <= {each.step for each in one}
    assert shares.thin(all_steps[:7], 30) == all_steps[:7]
