"""Sigterm: what does SIGTERM do in a process of a job, and in children it forks?

`jax.distributed` installs a handler in C for SIGTERM, which only records the signal.
Python does not show that handler, and children inherit it: they would outlive
`Process.terminate`.
"""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator

_MOST_BYTES = 512  # `struct sigaction` takes 152 on Linux, 16 on macOS.


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restores the handler of SIGTERM after JAX has set its own.

    A handler of before applies again afterwards, in this process and in its children.
    If there was none, JAX's handler stays, and children that this process forks end at
    SIGTERM, unless the program sets a handler later.
    """
    before = _read()
    yield
    after = _read()
    if _address(after) == _address(before):
        return
    if _address(before) != 0:  # SIG_DFL is 0.
        _write(before)
        return
    _Kept.before, _Kept.of_jax = before, _address(after)
    # SIGTERM would be lost in a child until its handler is reset.
    os.register_at_fork(
        before=_block, after_in_parent=_unblock, after_in_child=_reset_in_child
    )


class _Kept:
    """The state of SIGTERM; there is one per process."""

    before: bytes = b""
    of_jax: int = 0
    thread = threading.local()  # The signal mask of a thread that forks.


def _block() -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _Kept.thread.was_blocked = signal.SIGTERM in mask


def _unblock() -> None:
    if not _Kept.thread.was_blocked:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _reset_in_child() -> None:
    try:
        if _address(_read()) == _Kept.of_jax:
            _write(_Kept.before)
    finally:
        _unblock()


def _read() -> bytes:
    """Returns the `struct sigaction` of SIGTERM; Python shows no handlers in C."""
    action = ctypes.create_string_buffer(_MOST_BYTES)
    ctypes.CDLL(None).sigaction(int(signal.SIGTERM), None, action)
    return action.raw


def _write(action: bytes) -> None:
    ctypes.CDLL(None).sigaction(int(signal.SIGTERM), action, None)


def _address(action: bytes) -> int:
    """Returns the address of the handler, the first field of the struct."""
    return ctypes.c_size_t.from_buffer_copy(action).value
