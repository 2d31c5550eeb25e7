"""Failure pipe: how does a launcher hear at once when and how a program failed?"""

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
    """Pipe on which processes report the ends of their programs to their launcher.

    Attributes:
      in_init: processes that are in `jdp.init` now.
      joined: processes that have been in it and have come out.
      ended: when the program of a process ended without a failure; JAX may keep the
        process itself alive.
      lost: for each process, the first process that it heard to be gone.
      staying: processes that have failed and stay until the others have ended.
    """

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self.environ = {user_program.FAILURE_FD: str(self.write_fd)}
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

    def forget(self, process_id: int) -> None:
        """Forgets a process that is started again."""
        self._failures.pop(process_id, None)

    def close(self) -> None:
        """Closes both ends."""
        os.close(self._read_fd)
        os.close(self.write_fd)
