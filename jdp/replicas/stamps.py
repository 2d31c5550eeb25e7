"""Stamps: which moments of this process go into its record?

Steps, meetings and loaders call `stamp` where they begin and end something. Without a
record, which only a job of several processes has, a stamp costs one comparison.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

# Kinds of stamps. `number` is the step (1 is the first, of all steps together), the
# meeting or the iteration; `name` is the step, the topic or the program.
INIT_BEGUN, INIT_ENDED = 1, 2
STEP_BEGUN, STEP_PLACED, STEP_DISPATCHED, STEP_FINISHED, STEP_FAILED = 3, 4, 5, 6, 7
COMPILE_BEGUN, COMPILE_ENDED = 8, 9
READ_BEGUN, READ_ENDED = 10, 11  # by the thread of `jdp.join_batches`.
LOAD_BEGUN, LOAD_ENDED = 12, 13  # by the program, from `world.shard`.
MEETING_BEGUN, MEETING_ENDED = 14, 15
ITERATION_BEGUN, ITERATION_ENDED = 16, 17  # waits of `jdp.join_batches`.
EAGER_BEGUN, EAGER_ENDED = 18, 19
TRACE_BEGUN, TRACE_ENDED = 20, 21
PROGRAM_ENDED = 22
# All time, in nanoseconds, that the main thread was held up by reductions on the host
# which waited for other processes, and that these took without waits.
REDUCTIONS_WAITED, REDUCTIONS_WORKED = 23, 24

Write = Callable[[int, int, str], None]


class _Record:
    """The record of this process."""

    write: Write | None = None
    held_up_ns: int = 0  # of the main thread, by waits of reductions on the host.
    waited_ns: int = 0  # by these, whatever the main thread did.
    reduced_ns: int = 0  # in these, with the waits.
    stamped_ns: int = 0  # of it, what the record has.


def set_record(write: Write | None) -> None:
    """Sends all stamps to `write(kind, number, name)`, from any thread; None: drops."""
    _Record.write = write


def has_record() -> bool:
    """Returns whether stamps are kept."""
    return _Record.write is not None


def stamp(kind: int, number: int = 0, name: str = "") -> None:
    """Takes down that something begins or ends now."""
    if _Record.write is not None:
        _Record.write(kind, number, name)


def add_wait(num_ns: int, *, holds_up: bool) -> None:
    """Adds time in which a reduction on the host has waited for other processes.

    Args:
      num_ns: the time, in nanoseconds.
      holds_up: whether the main thread has waited with it.
    """
    _Record.waited_ns += num_ns
    if holds_up:
        _Record.held_up_ns += num_ns


def add_reduction(num_ns: int) -> None:
    """Adds the time that a reduction has taken, with its waits, in nanoseconds."""
    _Record.reduced_ns += num_ns


def stamp_reductions() -> None:
    """Takes down how long reductions have waited and worked, if that has changed."""
    write = _Record.write
    if write is not None and _Record.reduced_ns != _Record.stamped_ns:
        waited_ns, _Record.stamped_ns = _Record.waited_ns, _Record.reduced_ns
        write(REDUCTIONS_WAITED, _Record.held_up_ns, "")
        write(REDUCTIONS_WORKED, max(0, _Record.stamped_ns - waited_ns), "")


@contextlib.contextmanager
def during(begun: int, number: int = 0, name: str = "") -> Iterator[None]:
    """Takes down the begin and the end of a block; the kind of the end follows."""
    stamp(begun, number, name)
    try:
        yield
    finally:
        stamp(begun + 1, number, name)


@contextlib.contextmanager
def during_main(begun: int, number: int = 0, name: str = "") -> Iterator[None]:
    """Is `during` in the main thread; other threads take nothing down."""
    is_main = threading.current_thread() is threading.main_thread()
    if _Record.write is None or not is_main:
        yield
        return
    with during(begun, number, name):
        yield


def loading() -> contextlib.AbstractContextManager[None]:
    """Takes down that the main thread makes a batch."""
    return during_main(LOAD_BEGUN)
