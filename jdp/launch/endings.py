"""Endings: what does the end of a process mean for its job, and which one came first?

Pure: no clock and no process; see `supervisor` for what is done about it.
"""

import signal
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jdp.launch import failure_pipe

_INTERRUPTED = 128 + signal.SIGINT


class Exit(NamedTuple):
    """The end of one process."""

    process_id: int  # -1: not a process of the job, see `note`.
    returncode: int  # As in `subprocess`: -s where signal s killed it.
    failed_at_s: float | None = None  # When its program raised, if reported.
    culprit: int | None = None  # The process that it blames, if another.
    node: int | None = None  # The host; None: this one.
    note: str = ""  # What happened, if other fields cannot express it.
    is_consequence: bool = False  # It only reports that another process is gone.


class StopState(NamedTuple):
    """How far the end of a job has come."""

    exit_code: int = 0
    cause: Exit | signal.Signals | None = None  # None: nothing has gone wrong.
    kill_at_s: float | None = None  # None: no process was told to end.
    is_killed: bool = False
    term_at_s: float | None = None  # SIGINT was sent, and SIGTERM follows.


def exit_code(returncode: int) -> int:
    """Returns the exit code of a shell for a return code of `subprocess`."""
    return returncode if returncode >= 0 else 128 - returncode


def describe_exit(end: Exit) -> str:
    """Describes how a process ended, such as `process 1 failed with exit code 3`."""
    who = f"process {end.process_id}"
    if end.node is not None:
        who += f" on node {end.node}"
    if end.note:
        return end.note
    if end.returncode == 0:
        return f"{who} ended"
    because = "" if end.culprit is None else f", because of process {end.culprit}"
    if end.returncode > 0:
        return f"{who} failed with exit code {end.returncode}{because}"
    return f"{who} was killed by {signal_name(-end.returncode)}{because}"


def observe(
    state: StopState,
    exits: Sequence[Exit],
    signals: Sequence[int],
    *,
    now_s: float,
    grace_s: float,
) -> tuple[StopState, signal.Signals | None]:
    """Decides which signal to send to the processes that still run.

    The first signal, or the first process that fails, starts the end of the job with
    SIGTERM. An interrupt, here or on another host, starts it with SIGINT, and SIGTERM
    follows after `grace_s`. SIGKILL follows after `grace_s`, or at the next signal. A
    process that ends with 0 changes nothing.

    Args:
      state: the decisions so far.
      exits: processes that have ended since then.
      signals: signals that the launcher received since then; SIGPIPE for a lost reader.
      now_s: the time of a monotonic clock.
      grace_s: seconds from SIGTERM to SIGKILL.

    Returns:
      The new state, and the signal to send now.
    """
    failures = find_failures(exits)
    pending = list(signals)
    send, is_interrupt = None, False
    if state.cause is None and pending:
        signum = signal.Signals(pending.pop(0))
        state = StopState(128 + signum, signum, now_s + grace_s)
        send = signal.SIGTERM
        is_interrupt = signum == signal.SIGINT
    elif state.cause is None and failures:
        code = exit_code(failures[0].returncode)
        state = StopState(code, failures[0], now_s + grace_s)
        send = signal.SIGTERM
        is_interrupt = failures[0].process_id < 0 and code == _INTERRUPTED
    if is_interrupt:
        state = state._replace(term_at_s=now_s + grace_s, kill_at_s=now_s + 2 * grace_s)
        send = signal.SIGINT
    if state.kill_at_s is None or state.is_killed:
        return state, send
    if pending or now_s >= state.kill_at_s:
        return state._replace(is_killed=True, kill_at_s=now_s), signal.SIGKILL
    if state.term_at_s is not None and now_s >= state.term_at_s:
        return state._replace(term_at_s=None), signal.SIGTERM
    return state, send


def find_failures(exits: Sequence[Exit]) -> list[Exit]:
    """Returns the failures among `exits`, the root cause first.

    The search starts at the first failure by `_failing_order` and follows the culprits
    that the failures name. It does not step from a failure with a reason of its own to
    a failure that only reports a broken link: a process that misses a meeting gets a
    broken link when the others leave. Among processes that name each other, the first
    to fail is the root cause.
    """
    failures = sorted((end for end in exits if end.returncode != 0), key=_failing_order)
    if not failures:
        return []
    of = {end.process_id: end for end in reversed(failures)}
    path = [failures[0]]
    while (culprit := path[-1].culprit) in of:
        assert culprit is not None
        named = of[culprit]
        if named.is_consequence and not path[-1].is_consequence:
            break
        if named in path:
            path.append(min(path[path.index(named) :], key=_failing_order))
            break
        path.append(named)
    return sorted(failures, key=lambda end: end != path[-1])


def find_blamed(
    exits: Sequence[Exit], failures: Mapping[int, failure_pipe.Failure]
) -> list[Exit]:
    """Returns the failures of processes that others blame and that still run.

    Such a process has reported its failure and is slow to end. If all ends so far only
    report broken links, it need not be blamed.

    Args:
      exits: the ends so far.
      failures: reports of the processes about their own programs.
    """
    known = {end.process_id for end in exits}
    named = {end.culprit for end in exits if end.culprit is not None} - known
    failed = [end for end in exits if end.returncode != 0]
    if failed and all(end.is_consequence for end in failed):
        named |= {i for i, said in failures.items() if not said.is_consequence} - known
    return [as_failed(i, failures[i]) for i in sorted(named & failures.keys())]


def find_silent(exits: Sequence[Exit], silent: Mapping[int, float]) -> Exit | None:
    """Returns the end of a process that skipped its exit handlers, if others failed.

    Such a process ends with 0 and without a report, as by `os._exit(0)`. The others
    fail in a collective with it, or JAX aborts them.

    Args:
      exits: the ends so far.
      silent: when each such process was seen to end.
    """
    failures = find_failures(exits)
    if not failures or not silent or failures[0].process_id < 0:
        return None
    first = failures[0]
    process = min(silent, key=silent.__getitem__)
    if first.culprit is not None:
        process = first.culprit
    elif first.returncode != -signal.SIGABRT:
        if first.failed_at_s is None or first.failed_at_s < silent[process]:
            return None
    if process not in silent:
        return None
    service = " JAX's coordination service ended with it." if process == 0 else ""
    note = (
        f"process {process} ended with exit code 0, but without its exit handlers, as "
        f"by `os._exit(0)`.{service} The others cannot go on: {describe_exit(first)}"
    )
    return Exit(process, max(1, first.returncode), note=note)


def as_it_heard(end: Exit, lost: Mapping[int, int]) -> Exit:
    """Completes `end`: JAX aborts a process that has lost the coordinator.

    Args:
      end: the end of a process without a report of its own.
      lost: for each process, the first process that it heard to be gone.
    """
    if end.returncode != -signal.SIGABRT or end.culprit is not None:
        return end
    return end._replace(culprit=lost.get(end.process_id))


def as_it_said(end: Exit, failure: failure_pipe.Failure | None) -> Exit:
    """Completes `end` from the process's report; it may be aborted on its way out."""
    if failure is None:
        return end
    said = as_failed(end.process_id, failure)
    if end.returncode > 0 and said.culprit is None and not said.is_consequence:
        return said._replace(returncode=end.returncode)  # By `os._exit` in a hook.
    return said


def as_failed(process_id: int, failure: failure_pipe.Failure) -> Exit:
    """Returns the end that a process has reported before it ended."""
    culprit = None if failure.culprit == process_id else failure.culprit
    follows = failure.is_consequence
    return Exit(process_id, failure.code, failure.at_s, culprit, is_consequence=follows)


def _failing_order(end: Exit) -> tuple[int, float]:
    # A process that was killed without a report comes first, then the first to raise:
    # peers raise because a process is gone. The loss of a host's launcher explains the
    # missing reports of its processes. JAX aborts a process when process 0 is gone, for
    # any reason. A process that blames another is not the first, and a report of a
    # broken link follows from any other failure.
    if end.process_id < 0:
        return 2, 0.0
    if end.returncode == -signal.SIGABRT:
        return (3 if end.culprit is None else 6), 0.0
    if end.is_consequence:
        return 5, end.failed_at_s or 0.0
    if end.culprit is not None:
        return 4, end.failed_at_s or 0.0
    return (0, 0.0) if end.failed_at_s is None else (1, end.failed_at_s)


def as_launcher_ended(signum: signal.Signals, node_rank: int) -> Exit:
    """Returns the end that a launcher reports which a signal has ended."""
    note = f"the launcher of node {node_rank} was ended by {signal_name(signum)}"
    return Exit(-1, 128 + signum, note=note)


def describe_absence(process_id: int, waiting: Collection[int]) -> str:
    """Describes a process that ended before others met it in `jdp.init`."""
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
