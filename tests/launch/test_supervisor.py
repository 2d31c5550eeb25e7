import itertools
import signal

import pytest

from jdp.launch import endings, failure_pipe
from jdp.launch.endings import Exit, StopState

RUNNING = StopState()


def observe(state, exits=(), signals=(), *, now_s=0.0):
    return endings.observe(state, exits, signals, now_s=now_s, grace_s=5.0)


@pytest.mark.parametrize("returncode, code", [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_exit_code_is_that_of_a_shell(returncode, code):
    assert endings.exit_code(returncode) == code


@pytest.mark.parametrize(
    "returncode, text",
    [
        (0, "process 1 ended"),
        (3, "process 1 failed with exit code 3"),
        (-9, "process 1 was killed by SIGKILL"),
        (-40, "process 1 was killed by signal 40"),
    ],
)
def test_describe_exit_says_who_and_why(returncode, text):
    assert endings.describe_exit(Exit(1, returncode)) == text


def test_a_process_that_ends_with_0_changes_nothing():
    assert observe(RUNNING, [Exit(0, 0)]) == (RUNNING, None)


def test_the_first_failure_counts():
    state, send = observe(RUNNING, [Exit(2, 0), Exit(1, 3), Exit(0, 4)])
    assert send == signal.SIGTERM
    assert (state.exit_code, state.cause) == (3, Exit(1, 3))
    state, send = observe(state, [Exit(3, -9)], now_s=1.0)
    assert send is None
    assert (state.exit_code, state.cause) == (3, Exit(1, 3))


def test_who_raised_first_counts_and_who_was_killed_comes_before():
    late, early = Exit(0, 1, failed_at_s=7.0), Exit(1, 3, failed_at_s=6.9)
    assert observe(RUNNING, [late, early])[0].cause == early
    killed, aborted = Exit(2, -signal.SIGKILL), Exit(3, -signal.SIGABRT)
    assert observe(RUNNING, [late, early, killed])[0].cause == killed
    assert observe(RUNNING, [aborted, late])[0].cause == late
    assert observe(RUNNING, [aborted])[0].cause == aborted


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_the_job(signum, code):
    state, send = observe(RUNNING, signals=[signum])
    first = signum if signum == signal.SIGINT else signal.SIGTERM
    assert (send, state.exit_code, state.cause) == (first, code, signum)


@pytest.mark.parametrize(
    ("exits", "signals"),
    [((), [signal.SIGINT]), ([Exit(-1, 130, note="ended by SIGINT")], ())],
)
def test_an_interrupt_is_handed_on_before_sigterm_and_sigkill(exits, signals):
    state, send = observe(RUNNING, exits, signals, now_s=10.0)
    sent = [send]
    for now_s in (14.9, 15.0, 15.1, 19.9, 20.0, 20.1):
        state, send = observe(state, now_s=now_s)
        sent.append(send)
    term, kill = signal.SIGTERM, signal.SIGKILL
    assert sent == [signal.SIGINT, None, term, None, None, kill, None]
    assert state.exit_code == 130


def test_a_signal_is_the_cause_of_the_failures_beside_it():
    state, send = observe(RUNNING, [Exit(0, -2)], [signal.SIGINT])
    assert (send, state.exit_code) == (signal.SIGINT, 130)


def test_kill_follows_after_the_grace_and_once():
    state, _ = observe(RUNNING, [Exit(0, 1)], now_s=10.0)
    state, send = observe(state, now_s=14.9)
    assert send is None
    state, send = observe(state, now_s=15.0)
    assert (send, state.is_killed) == (signal.SIGKILL, True)
    state, send = observe(state, now_s=16.0)
    assert send is None
    assert state.kill_at_s == 15.0


@pytest.mark.parametrize("exits, signals", [([], [2]), ([Exit(0, 1)], [])])
def test_a_signal_during_the_grace_kills_at_once(exits, signals):
    state, _ = observe(RUNNING, exits, signals, now_s=10.0)
    state, send = observe(state, signals=[signal.SIGINT], now_s=10.1)
    assert (send, state.kill_at_s) == (signal.SIGKILL, 10.1)


def test_two_signals_at_once_kill_at_once():
    state, send = observe(RUNNING, signals=[signal.SIGINT, signal.SIGINT])
    assert (send, state.exit_code) == (signal.SIGKILL, 130)


ABORTED = Exit(1, -signal.SIGABRT)
LAUNCHER = Exit(-1, 1, node=1, note="the launcher of node 1 is gone")


@pytest.mark.parametrize(
    ("exits", "cause"),
    [
        # It aborted by itself, and the other one names it.
        ([Exit(0, 1, 6.0, culprit=1), ABORTED], ABORTED),
        # JAX aborted it, since the other one is gone.
        ([ABORTED._replace(culprit=0), Exit(0, 1, 6.0)], Exit(0, 1, 6.0)),
        # A chain is followed to its end, and a circle is no trap.
        (
            [Exit(0, 1, 6.0, 1), Exit(1, 1, 7.0, 2), Exit(2, 1, 8.0, 3)],
            Exit(2, 1, 8, 3),
        ),
        ([Exit(0, 1, 6.0, 1), Exit(1, 1, 7.0, 0)], Exit(0, 1, 6.0, 1)),
        ([ABORTED._replace(culprit=0), Exit(0, 1, 6.0, 1)], Exit(0, 1, 6.0, 1)),
        # A host that is gone explains what its processes did not say.
        ([Exit(0, 1, 6.0, culprit=1), LAUNCHER], LAUNCHER),
        ([ABORTED, LAUNCHER], LAUNCHER),
        ([Exit(0, 3, 6.0), LAUNCHER], Exit(0, 3, 6.0)),
    ],
)
def test_what_the_others_follow_from_comes_first(exits, cause):
    assert endings.find_failures(exits)[0] == cause
    assert endings.find_failures(exits[::-1])[0] == cause


def test_jax_aborts_a_process_for_the_one_that_it_lost():
    end = endings.as_it_heard(ABORTED, {1: 0})
    text = "process 1 was killed by SIGABRT, because of process 0"
    assert endings.describe_exit(end) == text
    assert endings.as_it_heard(Exit(1, -9), {1: 0}) == Exit(1, -9)


def test_a_failure_that_others_name_counts_before_its_process_has_ended():
    blaming = Exit(1, 1, 6.0, culprit=0)
    said = {0: failure_pipe.Failure(7.0, 3, 0), 2: failure_pipe.Failure(1.0, 1, 2)}
    found = endings.find_blamed([blaming], said)
    assert found == [Exit(0, 3, 7.0)]
    assert endings.find_failures([blaming, *found])[0] == found[0]
    assert endings.find_blamed([blaming, Exit(0, 3, 7.0)], said) == []
    assert endings.find_blamed([blaming], {}) == []


@pytest.mark.parametrize(
    ("failure", "is_found"),
    [
        (Exit(0, 1, 9.0, culprit=1), True),
        (Exit(0, 1, 9.0, culprit=2), False),
        (Exit(0, -6), True),
        (Exit(0, 1, 6.0), True),
        (Exit(0, 1, 4.0), False),
        (Exit(0, -9), False),
    ],
)
def test_a_process_that_skips_its_exit_handlers_is_the_culprit(failure, is_found):
    found = endings.find_silent([Exit(1, 0), failure], {1: 5.0})
    assert (found is not None) == is_found
    assert endings.find_silent([Exit(1, 0)], {1: 5.0}) is None
    if found is not None:
        assert endings.find_failures([failure, found])[0] == found
        assert "process 1 ended with exit code 0, but without" in found.note


def _gloo(process, at_s, culprit=None):
    return Exit(process, 1, at_s, culprit, is_consequence=True)


KILLED = Exit(2, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("exits", "cause"),
    [
        # Process 1 waited for 0, said so and left; process 0 hears that the link broke,
        # and blames 1, or has not heard of it, or blames a third one.
        ([Exit(1, 1, 6.0, culprit=0), _gloo(0, 7.0, 1)], 1),
        ([Exit(1, 1, 6.0, culprit=0), _gloo(0, 7.0)], 1),
        ([Exit(1, 1, 6.0, culprit=0), _gloo(0, 5.0)], 1),
        ([Exit(1, 1, 6.0, culprit=0), _gloo(0, 7.0, 2), _gloo(2, 6.5, 0)], 1),
        ([Exit(1, 1, 6.0, culprit=0), _gloo(0, 7.0, 1), _gloo(2, 5.0, 0)], 1),
        # Process 0 has more to say than that.
        ([Exit(1, 1, 6.0, culprit=0), Exit(0, 1, 7.0)], 0),
        ([Exit(1, 1, 6.0, culprit=0), Exit(0, 1, 7.0, culprit=2), KILLED], 2),
        # One was killed: nothing that is raised comes before.
        ([Exit(1, 1, 6.0, culprit=0), _gloo(0, 7.0, 2), KILLED], 2),
        ([_gloo(0, 5.0), KILLED], 2),
        # One raised, and the links of the others broke, whomever they name.
        ([_gloo(0, 5.0), Exit(1, 3, 6.0)], 1),
        ([_gloo(0, 5.0, 2), _gloo(2, 5.5, 0), Exit(1, 3, 6.0)], 1),
        ([ABORTED, _gloo(0, 6.0)], 1),
        ([ABORTED._replace(culprit=0), _gloo(0, 6.0)], 0),
        # There is nothing but broken links.
        ([_gloo(1, 6.0), _gloo(0, 7.0)], 1),
        ([_gloo(1, 6.0, 0), _gloo(0, 7.0)], 0),
        # Processes name each other, and a third one.
        ([Exit(0, 1, 6.0, 1), Exit(1, 1, 7.0, 0), Exit(2, 1, 5.0, 1)], 0),
    ],
)
def test_a_broken_link_is_no_cause_where_another_process_says_more(exits, cause):
    for order in itertools.permutations(exits):
        assert endings.find_failures(order)[0].process_id == cause


def test_where_links_broke_a_process_that_said_more_need_not_be_named():
    said = {
        1: failure_pipe.Failure(7.0, 3, 1),
        2: failure_pipe.Failure(1.0, 1, 2, True),
    }
    assert endings.find_blamed([_gloo(0, 5.0)], said) == [Exit(1, 3, 7.0)]
    assert endings.find_blamed([Exit(0, 1, 5.0)], said) == []
    assert endings.find_blamed([Exit(0, 0)], said) == []


@pytest.mark.parametrize(
    ("returncode", "culprit", "expected"),
    [(9, 2, 9), (-signal.SIGABRT, 2, 1), (0, 2, 1), (9, 0, 1)],
)
def test_a_process_that_leaves_with_another_code_than_it_said_has_that_code(
    returncode, culprit, expected
):
    said = failure_pipe.Failure(at_s=1.0, code=1, culprit=culprit)
    end = endings.as_it_said(endings.Exit(2, returncode), said)
    assert end.returncode == expected
