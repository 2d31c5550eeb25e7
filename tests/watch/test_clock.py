"""Is the offset of a clock right, whatever the network does?"""

import random

from jdp.watch import clock
from jdp.watch.clock import ClockState

AHEAD_NS = 5 * 10**12


def ask(state, sent_ns, *, there_ns, back_ns, thinks_ns=1000):
    """A round trip with these times of travel."""
    received_there_ns = sent_ns + there_ns + AHEAD_NS
    received_ns = sent_ns + there_ns + thinks_ns + back_ns
    return clock.measure(
        state,
        sent_ns=sent_ns,
        received_there_ns=received_there_ns,
        sent_there_ns=received_there_ns + thinks_ns,
        received_ns=received_ns,
    )


def test_a_round_trip_of_equal_ways_tells_the_offset():
    state = ask(ClockState(), 10**9, there_ns=40_000, back_ns=40_000)
    assert state.offset_ns == AHEAD_NS
    assert state.error_ns == 40_000


def test_the_error_is_never_more_than_it_says():
    rng = random.Random(1)
    state, now_ns = ClockState(), 10**9
    for _ in range(1000):
        ways = (int(rng.expovariate(1e-5)) for _ in range(2))
        state = ask(state, now_ns, there_ns=next(ways), back_ns=next(ways))
        assert abs(state.offset_ns - AHEAD_NS) <= state.error_ns + 1
        now_ns += 10**9
    assert state.error_ns < 10**5


def test_the_time_in_which_the_answer_lies_there_does_not_matter():
    trip = {"there_ns": 5000, "back_ns": 5000, "thinks_ns": 3 * 10**8}
    assert ask(ClockState(), 10**9, **trip).offset_ns == AHEAD_NS


def test_a_slow_trip_does_not_replace_a_quick_one_until_that_is_old():
    quick = ask(ClockState(), 10**9, there_ns=1000, back_ns=1000)
    slow = {"there_ns": 300_000, "back_ns": 0}
    assert ask(quick, 2 * 10**9, **slow) == quick
    assert ask(quick, 20 * 10**9, **slow) != quick


def test_an_answer_before_its_question_is_not_believed():
    state = clock.measure(
        ClockState(),
        sent_ns=10,
        received_there_ns=5,
        sent_there_ns=90,
        received_ns=20,
    )
    assert state == ClockState()
