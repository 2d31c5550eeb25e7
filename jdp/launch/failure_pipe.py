"""Failure pipe: how do a launcher and its processes tell each other of failures?

Processes write records. The launcher only closes a second pipe, and all of them see
its end: it has begun to end the job, and SIGKILL follows after its grace time.
"""

import contextlib
import os
from typing import NamedTuple

from jdp.runtime import user_program


class Failure(NamedTuple):
    """A process's report of the end of its program.

    Attributes:
      at_s: when, on the monotonic clock of this host.
      code: its exit code.
      culprit: the process that is the reason; may be the reporting process.
      is_consequence: whether it only reports that another process is gone.
    """

    at_s: float
    code: int
    culprit: int
    is_consequence: bool = False


class FailurePipe:
    """Pipes between the processes of a job and their launcher.

    Attributes:
      fds: descriptors that each process inherits; `environ` has their numbers.
      in_init: processes that are in `jdp.init` now.
      joined: processes that have been in it and have come out.
      ended: when the program of a process ended without a failure; JAX may keep the
        process itself alive.
      lost: for each process, the first process that it heard to be gone.
      staying: processes that have failed and stay until the others have ended.
    """

    def __init__(self) -> None:
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        ending_fd, going_on_fd = os.pipe()
        self._going_on_fd: int | None = going_on_fd
        self.fds = write_fd, ending_fd
        names = user_program.FAILURE_FD, user_program.ENDING_FD
        self.environ = dict(zip(names, map(str, self.fds), strict=True))
        self._failures: dict[int, Failure] = {}
        self.in_init: set[int] = set()
        self.joined: set[int] = set()
        self.ended: dict[int, float] = {}
        self.lost: dict[int, int] = {}
        self.staying: set[int] = set()
        self._taken: set[int] = set()  # of these.

    def read(self) -> dict[int, Failure]:
        """Returns the failures reported so far, by process id."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._read_fd, user_program.RECORD.size * 1000):
                data += chunk
        # A record is less than `PIPE_BUF`: it is written whole or not at all.
        for record in user_program.RECORD.iter_unpack(data):
            kind, process_id, at_s, code, culprit, follows = record
            if kind == user_program.FAILED:
                failure = Failure(at_s, code, culprit, follows)
                first = self._failures.setdefault(process_id, failure)
                self._failures[process_id] = first._replace(code=code)
            elif kind == user_program.BEGAN:
                self.in_init.add(process_id)
            elif kind == user_program.JOINED:
                self.in_init.discard(process_id)
                self.joined.add(process_id)
            elif kind == user_program.LOST:
                self.lost.setdefault(process_id, culprit)
            elif kind == user_program.ENDED:
                self.ended[process_id] = at_s
            elif kind == user_program.STAYS and process_id in self._failures:
                self.staying.add(process_id)
        return self._failures

    def take_staying(self) -> dict[int, Failure]:
        """Returns the failures of processes that stay, once each."""
        failures = self.read()
        new, self._taken = self.staying - self._taken, set(self.staying)
        return {process_id: failures[process_id] for process_id in new}

    def tell_ending(self) -> None:
        """Tells all processes that SIGKILL follows after the grace time."""
        going_on_fd, self._going_on_fd = self._going_on_fd, None
        if going_on_fd is not None:
            os.close(going_on_fd)

    def forget(self, process_id: int) -> None:
        """Forgets a process that is started again."""
        self._failures.pop(process_id, None)

    def close(self) -> None:
        """Closes all ends."""
        self.tell_ending()
        for fd in (self._read_fd, *self.fds):
            os.close(fd)
