"""Endings: what does the end of a process mean for its job, and which one came first?

Pure: no clock and no process; see `supervisor` for what is done about it.
"""

import signal
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jdp.runtime import worker


class Exit(NamedTuple):
    """The end of one process."""

    process_id: int  # -1: it is no process of the job, see `note`.
    returncode: int  # As in `subprocess`: the negative signal where one killed it.
    failed_at_s: float | None = None  # When its program raised, where it could say so.
    culprit: int | None = None  # The process that it says is the reason, if another.
    node: int | None = None  # The host, where it is not this one.
    note: str = ""  # What happened, where the rest does not say it.


class StopState(NamedTuple):
    """How far the end of a job has come."""

    exit_code: int = 0
    cause: Exit | signal.Signals | None = None  # None: nothing went wrong so far.
    kill_at_s: float | None = None  # None: nobody was told to end.
    is_killed: bool = False


def exit_code(returncode: int) -> int:
    """Returns the exit code of a shell for a return code of `subprocess`."""
    return returncode if returncode >= 0 else 128 - returncode


def describe_exit(end: Exit) -> str:
    """Says how a process ended, such as `process 1 failed with exit code 3`."""
    who = f"process {end.process_id}"
    if end.node is not None:
        who += f" on node {end.node}"
    if end.note:
        return end.note
    if end.returncode == 0:
        return f"{who} ended"
    if end.returncode > 0:
        because = "" if end.culprit is None else f", because of process {end.culprit}"
        return f"{who} failed with exit code {end.returncode}{because}"
    return f"{who} was killed by {signal_name(-end.returncode)}"


def observe(
    state: StopState,
    exits: Sequence[Exit],
    signals: Sequence[int],
    *,
    now_s: float,
    grace_s: float,
) -> tuple[StopState, signal.Signals | None]:
    """Decides what the processes that still run are sent.

    The first signal, or the first process that fails, starts the end of the job with
    SIGTERM. SIGKILL follows after `grace_s`, or at the next signal. A process that ends
    with 0 changes nothing.

    Args:
      state: what was decided before.
      exits: processes that have ended since then.
      signals: what the launcher was sent since then; SIGPIPE for a lost reader.
      now_s: the time of a monotonic clock.
      grace_s: from SIGTERM to SIGKILL.

    Returns:
      The new state, and the signal to send now.
    """
    failures = find_failures(exits)
    pending = list(signals)
    send = None
    if state.cause is None and pending:
        signum = signal.Signals(pending.pop(0))
        state = StopState(128 + signum, signum, now_s + grace_s)
        send = signal.SIGTERM
    elif state.cause is None and failures:
        code = exit_code(failures[0].returncode)
        state = StopState(code, failures[0], now_s + grace_s)
        send = signal.SIGTERM
    if state.kill_at_s is None or state.is_killed:
        return state, send
    if pending or now_s >= state.kill_at_s:
        return state._replace(is_killed=True, kill_at_s=now_s), signal.SIGKILL
    return state, send


def find_failures(exits: Sequence[Exit]) -> list[Exit]:
    """Returns the failures among `exits`, the one that the others follow from first."""
    failures = sorted((end for end in exits if end.returncode != 0), key=_failing_order)
    if failures and failures[0].culprit is not None:
        blamed = [end for end in failures if end.process_id == failures[0].culprit]
        failures = blamed + [end for end in failures if end not in blamed]
    return failures


def as_it_said(end: Exit, failure: worker.Failure | None) -> Exit:
    """Completes `end`; a program that failed may be aborted on its way out."""
    if failure is None:
        return end
    return as_failed(end.process_id, failure)


def as_failed(process_id: int, failure: worker.Failure) -> Exit:
    """Returns the end that a process has told of before it came."""
    culprit = None if failure.culprit == process_id else failure.culprit
    return Exit(process_id, failure.code, failure.at_s, culprit)


def _failing_order(end: Exit) -> tuple[int, float]:
    # Peers raise because a process is gone, so whichever raised first comes before
    # them, and whichever was killed without a word before all. A process that names
    # another one is not the first. JAX aborts a process when the coordinator, process
    # 0, is gone, whatever ended that.
    if end.returncode == -signal.SIGABRT or end.process_id < 0:
        return 3, 0.0
    if end.culprit is not None:
        return 2, end.failed_at_s or 0.0
    return (0, 0.0) if end.failed_at_s is None else (1, end.failed_at_s)


def describe_absence(process_id: int, waiting: Collection[int]) -> str:
    """Says that a process ended before others met it in `jdp.init`."""
    return (
        f"process {process_id} ended with exit code 0 before it had joined the job in "
        f"`jdp.init`, where process {min(waiting)} waits for it"
    )


def signal_name(signum: int) -> str:
    """Returns the name of a signal, such as SIGTERM."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
