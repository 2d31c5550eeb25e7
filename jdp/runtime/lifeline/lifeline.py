"""Lifeline: does this process wait for a process that is gone?

From `jdp.init` to the end, every process holds a line to the others. A process that
ends tells how many steps it has begun, and whether it failed. A process that dies
breaks its line. A process can wait for ever in a step that another will never begin, or
on the host for a process that is gone. The lifeline ends it soon, with a message on all
processes that names the process that ended first.

The end of another process alone is not a reason: after equal numbers of steps, each
process may run as long as it needs.
"""

import atexit
import functools
import logging
import os
import time
from collections.abc import Callable

from jdp.replicas.mesh import World
from jdp.runtime import forks
from jdp.runtime.lifeline.process_lines import ProcessLines
from jdp.runtime.lifeline.rules import LifelineVerdict
from jdp.watch.messages import Told

_logger = logging.getLogger("jdp")


class _Current:
    """The lifeline of this process."""

    lifeline: ProcessLines | None = None


def start(world: World, key: bytes) -> None:
    """Opens the lines of a job of several processes; each process calls it once.

    Args:
      world: the job; its store is used once.
      key: key of this run, shape (32,).
    """
    try:
        _Current.lifeline = ProcessLines(world, key)
    except OSError as error:
        _logger.warning(
            "The link between processes cannot be opened at %s (%s): a process that "
            "waits for an ended process is found later, by JAX.",
            *(world.host, error),
        )
        return
    atexit.register(forks.only_here(_leave_at_exit))
    os.register_at_fork(after_in_child=_abandon)


def leave(error: str | None, *, culprit: int | None = None) -> None:
    """Tells the others that this process has ended its program, or that it failed.

    Args:
      error: the reason of the failure; None: it succeeded.
      culprit: the process that is the reason, if it is another one.
    """
    if _Current.lifeline is not None:
        _Current.lifeline.leave(error, culprit)


def find_culprit(*, timeout_s: float = 0.0, is_consequence: bool = False) -> int | None:
    """Returns the first process that failed or died.

    Args:
      timeout_s: how long to wait until this process hears of one, in seconds.
      is_consequence: whether the error of this process only tells that a link broke.

    Returns:
      Its index, or None if this process has not heard of any.
    """
    if _Current.lifeline is None:
        return None
    deadline_s = time.monotonic() + timeout_s
    find = functools.partial(
        _Current.lifeline.find_culprit, is_consequence=is_consequence
    )
    while (found := find()) is None:
        if time.monotonic() >= deadline_s:
            return None
        time.sleep(0.02)
    return found


def wait_at_end(run_beside: Callable[[Callable[[], None]], None]) -> None:
    """Ends JAX, and waits for it unless that is in vain; for exit handlers.

    Args:
      run_beside: runs a function in another thread.
    """
    if _Current.lifeline is not None:
        _Current.lifeline.wait_at_end(run_beside)


def say_at_end() -> None:
    """Tells the others that this process has come to its end; for exit handlers."""
    if _Current.lifeline is not None:
        _Current.lifeline.say_at_end()


def close() -> LifelineVerdict | None:
    """Closes the lines of this process after `wait_at_end`; `start` may open others.

    Returns:
      The reason why JAX's end was given up; None if it was not.
    """
    current, _Current.lifeline = _Current.lifeline, None
    return None if current is None else current.close()


def is_needed_by_others(waited_s: float) -> bool:
    """Returns whether the end of this process, now, would abort another one."""
    current = _Current.lifeline
    return current is not None and current.is_needed_by_others(waited_s)


def tell(body: bytes) -> None:
    """Sends a message of the watch to process 0, or from it to all others."""
    if _Current.lifeline is not None:
        _Current.lifeline.tell(body)


def take_told() -> list[Told]:
    """Returns the messages of other watches since the last call."""
    return [] if _Current.lifeline is None else _Current.lifeline.take_told()


def _leave_at_exit() -> None:
    leave(None)


def _abandon() -> None:
    if _Current.lifeline is not None:
        _Current.lifeline.abandon_in_child()
        _Current.lifeline = None
