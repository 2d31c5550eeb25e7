"""Program end: how does a process end without a launcher to end it?

At exit, JAX waits until all processes have come to the end. If one has failed, the
others never do: they wait for it in a collective. So they are told of the failure
before Python waits for threads. Threads and other exit handlers get a moment; JAX's own
handler is skipped. A process that ends without failing keeps its exit code, even if JAX
would wait in vain.
"""

import atexit
import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jdp.replicas import world_end
from jdp.runtime import forks, last_handler, user_program
from jdp.runtime.lifeline import lifeline

_FAILED_ENDS_S = 1.5  # For threads and exit handlers; then the others begin to end.


class _ProgramEnd:
    """The end of this process."""

    is_prepared: bool = False
    pid: int = 0
    exit_code: int = 1  # after an uncaught exception.
    has_exited: bool = False  # Whether `sys.excepthook` exited, with that code.
    is_at_exit: bool = False  # Threads and exit handlers have ended in time.
    closers: list[Callable[[], None]] = []
    # For a thread that exists already: at its end, Python cannot start another.
    tasks: "queue.SimpleQueue[Callable[[], None]]" = queue.SimpleQueue()


def prepare() -> None:
    """Makes this process end soon after an uncaught exception, with its exit code."""

    def run() -> None:
        while True:
            _ProgramEnd.tasks.get()()

    if _ProgramEnd.is_prepared:
        return
    threading.Thread(target=run, name="jdp-end", daemon=True).start()
    _ProgramEnd.pid = os.getpid()
    sys.addaudithook(_show_uncaught)
    # It runs before JAX's, which was registered earlier.
    atexit.register(forks.only_here(_end_at_exit))
    # Its own exit handler must not be registered here: it would run after jdp's.
    if "multiprocessing.util" in sys.modules:
        _prepare_child(sys.modules["multiprocessing.util"])
    _ProgramEnd.is_prepared = True


def _prepare_child(util: Any) -> None:
    """Ends a child that `multiprocessing` has forked, which it does by `os._exit`."""
    is_child = sys.modules["multiprocessing"].parent_process() is not None
    if is_child and not any("spawn_main" in text for text in sys.orig_argv):
        # It runs after all finalizers of `multiprocessing` and of the program.
        util.Finalize(None, _end_child, exitpriority=-1000)


def _end_child() -> None:
    """Ends a child of `multiprocessing` together with the others, as exit handlers do.

    An error is on its way to `multiprocessing`, which shows it.
    """
    if os.getpid() != _ProgramEnd.pid:
        return
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit):
        culprit = user_program.find_culprit(error)
        lifeline.leave(user_program.describe_error(error), culprit=culprit)
        _wait_for_others()
        return
    with contextlib.suppress(Exception):  # As Python does at its end.
        vars(threading)["_shutdown"]()
    world_end.close_all()
    lifeline.leave(None)
    lifeline.wait_at_end(_ProgramEnd.tasks.put)


def _show_uncaught(event: str, arguments: tuple[object, ...]) -> None:
    """Shows an uncaught error in place of Python, to learn the hook's exit code."""
    if event != "sys.excepthook" or os.getpid() != _ProgramEnd.pid:
        return
    error = _find_uncaught()
    if error is None or arguments[2] is not error:
        return
    # Functions registered last run first: before `concurrent.futures` waits for its
    # threads, which a program may import after `jdp.init`. To tell of it here would be
    # too early: the hook may be a debugger, and `python -i` goes on.
    vars(threading)["_register_atexit"](forks.only_here(_tell_of_failure))
    code = user_program.show_error(error)
    if code is not None:
        _ProgramEnd.exit_code, _ProgramEnd.has_exited = code or 1, True
    raise RuntimeError("The error has been shown.")  # Else Python shows it again.


def _tell_of_failure() -> None:
    error = _find_uncaught()
    if error is not None:
        _ProgramEnd.tasks.put(_end_late)
        lifeline.leave(
            user_program.describe_error(error), culprit=user_program.find_culprit(error)
        )


def _end_late() -> None:
    time.sleep(_FAILED_ENDS_S)
    if not _ProgramEnd.is_at_exit:
        _end_if_failed()


def _end_at_exit() -> None:
    _ProgramEnd.is_at_exit = True
    _end_if_failed()


def _end_if_failed() -> None:
    error = _find_uncaught()
    if error is None:
        return
    try:
        _wait_for_others()
        logging.shutdown()
        user_program.flush()
    finally:  # Also if a handler of a signal raises.
        if isinstance(error, KeyboardInterrupt) and not _ProgramEnd.has_exited:
            _end_by_interrupt()
        os._exit(_ProgramEnd.exit_code)


def stay_while_needed(tell_launcher: Callable[[], None]) -> None:
    """Keeps a process that failed under a launcher, if its end would abort others.

    The launcher ends all processes after its grace time, and this one with them.

    Args:
      tell_launcher: called first, if the process stays.
    """
    if not lifeline.is_needed_by_others(0.0):
        return
    _ignore_signals()
    tell_launcher()
    for close in _ProgramEnd.closers:
        with contextlib.suppress(Exception):
            close()
    _wait_for_others()


def close_before_staying(close: Callable[[], None]) -> None:
    """Registers a function that ends what others wait for, for `stay_while_needed`."""
    if close not in _ProgramEnd.closers:
        _ProgramEnd.closers.append(close)


def _wait_for_others() -> None:
    since_s = time.monotonic()
    if not lifeline.is_needed_by_others(0.0):
        return
    _ignore_signals()
    while lifeline.is_needed_by_others(time.monotonic() - since_s):
        time.sleep(0.02)


def _ignore_signals() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):  # They are for the others.
        with contextlib.suppress(ValueError):  # This is not the main thread.
            signal.signal(signum, signal.SIG_IGN)


def _end_by_interrupt() -> None:
    """Ends this process by SIGINT, as Python does; on any thread."""
    # `signal.signal` is for the main thread, which may wait for other threads.
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes = (ctypes.c_int, ctypes.c_void_p)
    set_handler(signal.SIGINT, None)  # SIG_DFL
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(130)  # SIGINT is blocked.


def _find_uncaught() -> BaseException | None:
    """Returns the error that has ended the program, at its end."""
    if hasattr(sys, "ps1"):  # At a prompt an error ends nothing.
        return None
    return getattr(sys, "last_value", None)


@last_handler.run_last
def _wait_at_end() -> None:
    if not _ProgramEnd.is_prepared:
        lifeline.say_at_end()  # A process in `jdp.shutdown` waits for it.
        return
    try:
        lifeline.wait_at_end(_ProgramEnd.tasks.put)
    except KeyboardInterrupt:
        user_program.flush()
        _end_by_interrupt()
