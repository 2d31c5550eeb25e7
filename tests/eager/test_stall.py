"""What is said of ranks that are late."""

from jdp.eager.coordinator.coordinator import Stall
from jdp.eager.coordinator.stall import StallState, observe

A = Stall(0, "grad/a", (1, 3), 61.0)
B = Stall(0, "grad/b", (3,), 200.0)
PART = Stall(0, "group 'g', of which only x came", (), 70.0)


def _observe(stalls, *, warned_s=0.0, now_s=100.0, stop_after_s=None):
    return observe(
        StallState(warned_s),
        stalls,
        now_s=now_s,
        warn_after_s=60.0,
        stop_after_s=stop_after_s,
    )


def test_missing_ranks_and_names_are_in_the_warning():
    state, report = _observe([A, B, PART])
    assert state.warned_s == 100.0 and report.stop is None
    lines = report.warning.splitlines()
    assert "more than 60 s" in lines[0]
    assert lines[1:] == [
        "Missing ranks:",
        "1: [grad/a]",
        "3: [grad/a, grad/b]",
        "Waiting: group 'g', of which only x came",
    ]


def test_it_is_said_once_an_interval():
    state, report = _observe([A], warned_s=50.0)
    assert state.warned_s == 50.0 and report.warning is None
    assert _observe([], warned_s=0.0)[1].warning is None


def test_many_names_are_cut():
    stalls = [Stall(0, f"t{i}", (2,), 61.0) for i in range(9)]
    _, report = _observe(stalls)
    assert "2: [t0, t1, t2, t3, t4, t5 ...]" in report.warning


def test_after_the_limit_the_engine_ends_and_says_for_whom():
    _, report = _observe([A, B], stop_after_s=120.0)
    assert "1: [grad/a]\n3!: [grad/a, grad/b]" in report.warning
    assert report.stop == (
        "'grad/b' has waited for rank 3 for 200 s, longer than 120 s; shutting down"
    )
    assert _observe([A], stop_after_s=120.0)[1].stop is None
    # Also right after a warning.
    assert _observe([B], warned_s=99.0, stop_after_s=120.0)[1].stop is not None


def test_a_part_of_a_group_waits_for_the_rest_and_for_no_rank():
    _, report = _observe([PART], stop_after_s=65.0)
    assert "Missing" not in report.warning and "No rank" not in report.warning
    assert report.stop == (
        "group 'g', of which only x came, has waited for the rest of the group for "
        "70 s, longer than 65 s; shutting down"
    )
