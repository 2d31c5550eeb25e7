"""Progress: which step of the program is this process in, and does it wait for others?

The main thread records here what it begins. The thread of `jdp.runtime.lifeline` reads
it, to tell a process that waits for another process from a busy one.
"""

import collections
import contextlib
import functools
import linecache
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jdp.replicas import forked, stamps

Run = Callable[..., tuple[Any, Any]]
_CULPRIT = "jdp_culprit"
_JAX_FOLDER = os.path.dirname(jax.__file__) + os.sep
_MOST_CALLS_UNDER_WAY = 8
_CONTAINERS = (dict, list, tuple)
# With a record, a result with no more elements is kept until it is ready.
_SMALL = 1024
_MOST_UNFINISHED = 64  # steps; above, the oldest are not seen to end.


class Snapshot(NamedTuple):
    """Position of the main thread of this process.

    Attributes:
      steps: number of calls begun of each decorated step, by name.
      step: the current step, or the last step if its result is not ready. None: the
        thread is outside of all steps, or in a part of a step that does not need other
        processes.
      waits_since_s: start of the current wait on the host for other processes, on the
        monotonic clock. None: the thread does not wait.
      since_s: start of that step or wait, or the end of the last part of the step that
        did not need other processes.
    """

    steps: Mapping[str, int]
    step: str | None
    waits_since_s: float | None
    since_s: float


class _MainThread:
    """Progress of the main thread of this process."""

    steps: dict[str, int] = {}
    last: str | None = None  # the step that was begun last.
    is_inside: bool = False  # whether the thread is still in that call.
    begun_s: float = 0.0  # or when it came to need others.
    result: "weakref.ref[Any] | None" = None  # one array of the result of that call.
    num_waits: int = 0
    waits_since_s: float = 0.0
    needs_others: bool = True  # False: the current work ends without them.
    number: int = 0  # of the last call, of all steps together.
    # With a record, the number of each call that is not known to have ended, and
    # returns its result or None.
    unfinished: "collections.deque[tuple[int, Callable[[], Any]]]" = collections.deque(
        maxlen=_MOST_UNFINISHED
    )
    looking: threading.Lock = threading.Lock()  # of a thread that takes from these.


class CallLimit:
    """Limits the calls of all steps that are in flight, for steps that need it.

    XLA's CPU client allows 32 programs in flight per device and then blocks the thread
    that starts them. With several devices in each of several processes, a collective of
    another process may wait for that thread: plain JAX hangs too.
    """

    _num_calls = 0
    _result: Any = None  # one array of the last call of eight.

    @classmethod
    def wait_for_earlier(cls) -> None:
        """Waits, every few calls, until the call before is done."""
        result, cls._result = cls._result, None
        if result is not None and not result.is_deleted():
            jax.block_until_ready(result)

    @classmethod
    def note(cls, results: Any) -> None:
        """Notes what a call has returned; its arrays are ready together."""
        cls._num_calls += 1
        if cls._num_calls % _MOST_CALLS_UNDER_WAY == 0:
            arrays = jax.tree.leaves(results)
            cls._result = min(arrays, key=lambda x: x.size, default=None)


def blame(error: RuntimeError, process: int | None) -> RuntimeError:
    """Notes in `error` which process caused it, and returns `error`.

    Launchers use it to find the process that failed first.
    """
    if process is not None:
        vars(error)[_CULPRIT] = process
    return error


def culprit_of(error: BaseException) -> int | None:
    """Returns the process that `blame` has noted in `error`, or None."""
    return vars(error).get(_CULPRIT)


def counted(run: Run) -> Run:
    """Counts the calls of a method that runs a step of all processes.

    A call that raises does not count: the other processes wait for this one in a
    program that it has not begun, or in which it has failed. In a child that was forked
    from a process of a job a call is refused with RuntimeError.

    Args:
      run: method of an object with a `name` and a `world`. It returns a pair of
        pytrees; the caller is more likely to keep the second.
    """

    @functools.wraps(run)
    def call(self: Any, *arguments: Any) -> tuple[Any, Any]:
        if self.world.process_count == 1:
            return run(self, *arguments)
        forked.check_is_not_child()
        _begin_step(self.name)
        out, has_run = None, False
        try:
            out = run(self, *arguments)
            has_run = True
            return out
        except FloatingPointError:  # Raised after the program, for its results.
            has_run = True
            _follow_result(None)
            raise
        finally:
            if not has_run:
                _take_back(self.name)
            _end_step(out)

    return call


def in_one_thread(run: Run) -> Run:
    """Refuses a call of a step while another thread is in a call of the same step.

    Every step has collectives. If two threads start steps in a different order on each
    device, no device finishes. The check costs 0.5 us per call. It finds calls at the
    same time, not every use of two threads.

    Args:
      run: method of an object with a `name`, a `world` and a `calling_thread`, which is
        0 between calls.
    """

    @functools.wraps(run)
    def call(self: Any, *arguments: Any) -> Any:
        own, other = threading.get_ident(), self.calling_thread
        if other not in (0, own) and self.world.num_replicas > 1:
            raise RuntimeError(
                f"The step `{self.name}` was called while another thread was in a call "
                "of it. Call steps of several replicas from one thread at a time: with "
                "two, devices may wait for each other forever."
            )
        self.calling_thread = own
        try:
            return run(self, *arguments)
        finally:
            self.calling_thread = other

    return call


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Marks a wait of the main thread for other processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _MainThread.num_waits == 0:
        _MainThread.waits_since_s = time.monotonic()
    _MainThread.num_waits += 1
    try:
        yield
    finally:
        _MainThread.num_waits -= 1


@contextlib.contextmanager
def working(*, needs_others: bool) -> Iterator[None]:
    """Notes whether the work of the main thread can wait for other processes.

    Work that cannot, such as tracing a step, continues after another process has ended:
    its own error, or the next meeting of the processes, says more.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _MainThread.needs_others = _MainThread.needs_others, needs_others
    try:
        yield
    finally:
        _MainThread.needs_others = before
        if before and not needs_others:
            _MainThread.begun_s = time.monotonic()


def snapshot() -> Snapshot:
    """Returns the position of the main thread; any thread may call it."""
    waits_since_s = _MainThread.waits_since_s if _MainThread.num_waits else None
    is_in_step = _MainThread.last is not None and (
        _MainThread.is_inside or not _is_done()
    )
    return Snapshot(
        steps=dict(_MainThread.steps),
        step=_MainThread.last if is_in_step and _MainThread.needs_others else None,
        waits_since_s=waits_since_s,
        since_s=_MainThread.begun_s if waits_since_s is None else waits_since_s,
    )


def has_result() -> bool:
    """Returns whether the last call of a step is known to have succeeded.

    JAX raises the error of a step when its result is read; this function reads it.
    """
    result = None if _MainThread.result is None else _MainThread.result()
    if _MainThread.is_inside or not isinstance(result, jax.Array) or not _is_done():
        return False
    try:
        result.block_until_ready()
    except Exception:  # The step failed, or the result was donated.
        return False
    return True


def is_held_up() -> bool:
    """Whether the main thread waits for a program: in JAX, or in the call of a step.

    While it runs Python, a wait of a program for other processes costs it nothing. Any
    thread may ask; it takes some microseconds.
    """
    if _MainThread.num_waits:
        return False  # The record has this wait already.
    main = threading.main_thread().ident or 0
    if _MainThread.is_inside or threading.get_ident() == main:
        return True
    frame = sys._current_frames().get(main)
    if frame is None:
        return False
    path = frame.f_code.co_filename
    # A method of arrays in C has no frame.
    line = linecache.getline(path, frame.f_lineno or 0)
    return path.startswith(_JAX_FOLDER) or "block_until_ready" in line


def note_finished() -> None:
    """Takes down the last step that is seen to have ended; any thread.

    A step whose result was donated or dropped counts as ended once no later step is
    known.
    """
    unfinished, finished = _MainThread.unfinished, 0
    if not unfinished or not _MainThread.looking.acquire(blocking=False):
        return  # Another thread looks.
    try:
        while unfinished:
            number, find = unfinished[0]
            result: Any = find()
            is_known = False
            with contextlib.suppress(RuntimeError):  # Donated meanwhile, or failed.
                if result is not None and not result.is_deleted():
                    if not result.is_ready():
                        break
                    is_known = True
            if is_known or len(unfinished) == 1:
                finished = number
            unfinished.popleft()
        if finished:
            stamps.stamp(stamps.STEP_FINISHED, finished)
    finally:
        _MainThread.looking.release()


def _begin_step(name: str) -> None:
    _MainThread.steps[name] = _MainThread.steps.get(name, 0) + 1
    _MainThread.last = name
    _MainThread.result = None
    _MainThread.begun_s = time.monotonic()
    _MainThread.is_inside = True
    note_finished()
    _MainThread.number += 1
    stamps.stamp_reductions()
    stamps.stamp(stamps.STEP_BEGUN, _MainThread.number, name)


def _take_back(name: str) -> None:
    stamps.stamp(stamps.STEP_FAILED, _MainThread.number, name)
    _MainThread.number -= 1
    _MainThread.steps[name] -= 1
    if not _MainThread.steps[name]:
        del _MainThread.steps[name]


def _end_step(out: tuple[Any, Any] | None) -> None:
    _MainThread.is_inside = False
    if out is None:
        return
    # Weak, so that a result that the caller drops is freed; the state may be donated.
    for node in reversed(out):
        while type(node) in _CONTAINERS and node:
            node = next(iter(node.values() if type(node) is dict else node))
        if type(node) not in _CONTAINERS:
            with contextlib.suppress(TypeError):
                _MainThread.result = weakref.ref(node)
                break
    if stamps.has_record():
        _follow_result(_MainThread.result)


def _follow_result(result: "weakref.ref[Any] | None") -> None:
    """Notes that the call of a step has returned, and by what its end is seen."""
    number = _MainThread.number
    array = None if result is None else result()
    if isinstance(array, jax.Array):
        is_small = array.size <= _SMALL
        find = (lambda: array) if is_small else result
        assert find is not None
        _MainThread.unfinished.append((number, find))
    stamps.stamp(stamps.STEP_DISPATCHED, number)
    if not isinstance(array, jax.Array):
        stamps.stamp(stamps.STEP_FINISHED, number)


def _is_done() -> bool:
    """Returns whether the result of the last call is ready, as far as JAX tells."""
    result = None if _MainThread.result is None else _MainThread.result()
    if not isinstance(result, jax.Array):
        return True
    try:
        return result.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # It was donated, or the step failed.
        return True
