"""Is the position of a process right, by the entries of its record?"""

from jdp.replicas import stamps
from jdp.watch import position
from jdp.watch.position import Position, Wait
from jdp.watch.record import Entry

S = 1_000_000_000


def follow(*moments):
    """The position after (seconds, kind, number, name) each."""
    entries = [
        Entry(int(at_s * S), kind, *rest, *((0, "")[len(rest) :]))
        for at_s, kind, *rest in moments
    ]
    return position.follow(Position(), entries)


def test_a_process_waits_for_a_step_from_its_dispatch_to_its_end():
    begun = [
        (1, stamps.STEP_BEGUN, 1, "train"),
        (2, stamps.STEP_PLACED),
        (3, stamps.STEP_DISPATCHED, 1),
    ]
    found = follow(*begun)
    assert (found.begun, found.reached, found.finished) == (1, 1, 0)
    assert found.wait == Wait("step", 1, "train", 2 * S)
    found = follow(*begun, (5, stamps.STEP_FINISHED, 1))
    assert found.wait is None
    assert (found.reached, found.finished) == (1, 1)


def test_with_steps_in_flight_it_waits_for_the_first_since_the_last_end():
    found = follow(
        (1, stamps.STEP_BEGUN, 1, "train"),
        (2, stamps.STEP_PLACED),
        (3, stamps.STEP_DISPATCHED, 1),
        (4, stamps.STEP_BEGUN, 2, "train"),
        (4, stamps.STEP_PLACED),
        (4, stamps.STEP_DISPATCHED, 2),
        (7, stamps.STEP_FINISHED, 1),
    )
    assert found.wait == Wait("step", 2, "train", 7 * S)


def test_a_call_that_blocks_is_in_its_program_once_it_is_traced_and_compiled():
    moments = [
        (1, stamps.STEP_BEGUN, 1, "train"),
        (2, stamps.STEP_PLACED),
        (3, stamps.TRACE_BEGUN, 0, "train"),
    ]
    assert follow(*moments).reached == 0
    moments.append((4, stamps.MEETING_BEGUN, 9, "first call"))
    found = follow(*moments)
    assert found.wait == Wait("meeting", 9, "first call", 4 * S)
    assert (found.meeting, found.reached) == (9, 0)
    moments += [(5, stamps.MEETING_ENDED, 9), (6, stamps.TRACE_ENDED)]
    moments.append((6, stamps.COMPILE_BEGUN, 0, "jit_train"))
    found = follow(*moments)
    assert (found.num_compiling, found.compiled) == (1, "jit_train")
    assert (found.reached, found.wait) == (0, None)
    found = follow(*moments, (8, stamps.COMPILE_ENDED))
    assert found.reached == 1
    assert found.wait == Wait("step", 1, "train", 8 * S)


def test_a_call_that_raised_does_not_count():
    found = follow(
        (1, stamps.STEP_BEGUN, 1, "train"),
        (2, stamps.STEP_FAILED, 1, "train"),
    )
    assert (found.begun, found.reached, found.failed) == (0, 0, 1)
    assert found.wait is None


def test_lost_entries_of_waits_do_not_last_longer_than_the_next_step():
    found = follow(
        (1, stamps.MEETING_BEGUN, 3, "comparison"),
        (2, stamps.STEP_BEGUN, 5, "train"),
    )
    assert found.waits == ()


def test_meetings_are_counted_anew_in_the_next_world():
    found = follow(
        (1, stamps.INIT_BEGUN, 1),
        (2, stamps.INIT_ENDED, 1),
        (3, stamps.MEETING_BEGUN, 12, "comparison"),
        (4, stamps.MEETING_ENDED, 12),
        (5, stamps.INIT_BEGUN, 1),
    )
    assert found.meeting == -1


def test_a_program_that_has_ended_waits_for_nothing():
    found = follow(
        (1, stamps.STEP_BEGUN, 1, "train"),
        (2, stamps.STEP_PLACED),
        (3, stamps.STEP_DISPATCHED, 1),
        (4, stamps.PROGRAM_ENDED),
    )
    assert found.wait is None and found.has_ended


def test_the_time_per_step_is_the_median_between_ends():
    moments = []
    for number, end_s in enumerate([1.0, 2.0, 3.0, 14.0, 15.0], start=1):
        moments += [
            (end_s - 0.5, stamps.STEP_BEGUN, number, "train"),
            (end_s - 0.5, stamps.STEP_DISPATCHED, number),
            (end_s, stamps.STEP_FINISHED, number),
        ]
    assert follow(*moments).step_s == 1.0
    assert follow(*moments[:5]).step_s == 0.0  # Of one interval, nothing is known.
