"""JAX's end: how does a process wait for it, and give up if it never comes?

`jax.distributed` ends at a barrier of all processes, which waits in C++. A thread must
not be in that call when Python finalizes: it would abort the process as soon as it asks
for the GIL. So a process calls it only when all others are at their end.
"""

import logging
import os
import threading
from collections.abc import Callable

from jdp.compat import jax_distributed
from jdp.runtime import user_program

_RETURN_TIMEOUT_S = 2.0
# Far longer than a live process takes to leave; then it has no line to this one.
_LEAVE_TIMEOUT_S = 5.0


class JaxEnd:
    """JAX's end in one process: the main thread waits, another may give up."""

    def __init__(self, own: int, count: int):
        """Starts with all processes still running.

        Args:
          own: index of this process.
          count: number of processes.
        """
        self._running = set(range(count)) - {own}
        self._running_own = {own}  # until its own exit handlers have run.
        self._clients = set(self._running)  # of JAX's service, in process 0.
        self._may_begin = threading.Event()
        self._is_decided = threading.Event()  # JAX has ended, or never will.
        self._has_returned = threading.Event()
        self._have_left = threading.Event()  # All clients have left the service.
        if not self._clients:
            self._have_left.set()
        self._has_begun = False
        self._is_awaited = False
        self._is_in_vain = False

    def note(self, process: int, *, may_begin: bool) -> None:
        """Notes that the exit handlers of a process have run.

        Args:
          process: index of the process.
          may_begin: whether JAX may end, whatever the other processes have sent.
        """
        self._running.discard(process)
        self._running_own.discard(process)
        if may_begin or not self._running:
            self._may_begin.set()

    def note_left(self, process: int) -> None:
        """Notes that a process has left JAX's coordination service, or is gone."""
        self._clients.discard(process)
        if not self._clients:
            self._have_left.set()

    def wait_for_clients(self) -> None:
        """Waits until all other processes have left JAX's coordination service."""
        self._have_left.wait(_LEAVE_TIMEOUT_S)

    @property
    def running(self) -> frozenset[int]:
        """Processes whose exit handlers have not all run."""
        return frozenset(self._running | self._running_own)

    @property
    def is_in_vain(self) -> bool:
        """Whether JAX's end was given up."""
        return self._is_in_vain

    def give_up(self) -> bool:
        """Releases the main thread without JAX's end; returns whether it waited."""
        if not self._is_awaited or self._is_decided.is_set():
            return False
        self._is_in_vain = True
        self._is_decided.set()
        self._may_begin.set()
        self._have_left.set()
        return True

    def wait(self, run_beside: Callable[[Callable[[], None]], None]) -> None:
        """Ends JAX in another thread; returns then, or after `give_up`.

        A wait of JAX in the main thread could only be ended with the whole process,
        which would lose its exit code.

        Args:
          run_beside: runs a function in another thread.
        """
        self._is_awaited = True
        try:
            if jax_distributed.is_connected():
                self._may_begin.wait()
            if not self._is_in_vain:
                self._has_begun = True
                run_beside(self._end_jax)
                self._is_decided.wait()
        except BaseException:  # Raised by a signal handler.
            jax_distributed.abandon_at_end()
            raise
        if self._is_in_vain:
            jax_distributed.abandon_at_end()
            self._leave_no_call()

    def _end_jax(self) -> None:
        try:
            if not self._is_in_vain:
                jax_distributed.end()
        finally:
            self._has_returned.set()
            self._is_decided.set()

    def _leave_no_call(self) -> None:
        """Ends the process here if JAX's call does not return."""
        if self._has_begun and not self._has_returned.wait(_RETURN_TIMEOUT_S):
            logging.shutdown()
            user_program.flush()
            os._exit(1)
