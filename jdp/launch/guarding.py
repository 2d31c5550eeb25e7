"""Guarding: which processes are of a job, and how do they end without its launcher?"""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

import psutil

from jdp.launch import endings, guard, orphans
from jdp.runtime import environment

_TIMEOUT_S = 30.0
_DONE_TIMEOUT_S = 1.0  # For a guard with nothing left to guard.
_MOST_GUARDS = 5
_LOOK_PERIOD_S = 0.2


class GuardError(RuntimeError):
    """The guard cannot be started, so the job is not started either."""


class Kin:
    """The processes of a job on this host, and the guard that outlives the launcher."""

    def __init__(self, launch_id: str, folder: str, *, adopts_orphans: bool) -> None:
        """Starts nothing yet.

        Args:
          launch_id: the id that processes of the job carry in their environment.
          folder: the folder that the guard removes; or "".
          adopts_orphans: see `supervisor.Supervisor`.
        """
        self._launch_id, self._folder = launch_id, folder
        self._adopts = adopts_orphans
        # Process 1 of a namespace becomes the parent of all its orphans.
        self._reaps = adopts_orphans and os.getpid() == 1
        self._census: guard.Census | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._num_guards = 1
        self._is_done = False
        self._look_at_s = 0.0

    def open(self) -> None:
        """Starts the guard; called before the first process starts.

        Raises:
          OSError: the guard could not be started.
          GuardError: the guard ended at once, or this system hides its processes.
        """
        self._adopts = self._adopts and orphans.adopt_orphans()
        self._reaps |= self._adopts
        try:
            self._census = guard.Census(
                self._launch_id, launcher=os.getpid(), adopts=self._adopts
            )
        except RuntimeError as error:
            raise GuardError(str(error)) from None
        self._guard = self._start()

    def add(self, pid: int) -> None:
        """Adds a process of the job; called before its end is reaped."""
        found = guard.describe(pid)
        assert found is not None and self._census is not None
        self._census.add(found)
        if self._guard is not None:
            assert self._guard.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # The next guard is told of all.
                self._guard.stdin.write(guard.encode_process(found))

    def look(self, own_children: Iterable[int]) -> None:
        """Finds new processes and reaps orphans, at most once per `_LOOK_PERIOD_S`.

        Args:
          own_children: process ids that the caller reaps.
        """
        now_s = time.monotonic()
        if self._census is None or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_PERIOD_S
        self._census.look()
        if self._reaps:
            own = set(own_children) | ({self._guard.pid} if self._guard else set())
            orphans.reap_adopted(own)

    def find(self) -> list[guard.Process]:
        """Lists the live processes of the job."""
        return [] if self._census is None else self._census.find()

    def check(self) -> str | None:
        """Starts the guard again if it was killed; returns a description of that.

        If no process of the job is left, there is nothing to guard.
        """
        if self._guard is None or self._guard.poll() is None or not self.find():
            return None
        code = endings.describe_exit(endings.Exit(0, self._guard.returncode))
        what = code.removeprefix("process 0 ")
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._num_guards += 1
        self._guard = None
        then = "there is none any more; kill -9 of this launcher would leave processes"
        if self._num_guards < _MOST_GUARDS:
            with contextlib.suppress(OSError, RuntimeError):
                self._guard = self._start()
                then = "another one was started"
        return f"the guard {what}; {then}"

    def say_done(self) -> None:
        """Tells the guard that the job has ended."""
        self._is_done = True
        if self._guard is not None:
            assert self._guard.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(guard.DONE)

    def close(self) -> None:
        """Lets the guard end; without `say_done`, it ends the job first."""
        ended, self._guard = self._guard, None
        if ended is None:
            return
        assert ended.stdin is not None
        ended.stdin.close()
        try:
            ended.wait(_DONE_TIMEOUT_S if self._is_done else _TIMEOUT_S)
        except subprocess.TimeoutExpired:
            ended.kill()
            ended.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        return start(
            self._launch_id, self._folder, adopts=self._adopts, known=self.find()
        )


def start(
    launch_id: str, folder: str, *, adopts: bool, known: Sequence[guard.Process] = ()
) -> "subprocess.Popen[bytes]":
    """Starts a guard and waits until it is ready.

    Args:
      launch_id: the id of the processes that it ends if this process is killed.
      folder: the folder that it removes then; or "".
      adopts: whether every child of this process from now on is of the job.
      known: processes of the job that run already.

    Raises:
      GuardError: it ended or kept silent instead.
    """
    environ = dict(os.environ)
    # The guard of a job inside a job must outlive the processes of the outer one.
    environ.pop(environment.LAUNCH_ID, None)
    environ[guard.IS_GUARD] = "1"
    environ["PYTHONPATH"] = os.path.dirname(os.path.dirname(psutil.__file__))
    process = subprocess.Popen(
        # -S: `site` may import anything. -P: modules of this folder are not for it.
        [sys.executable, "-S", "-P", guard.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env=environ,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # Its last words say why.
            process.stdin.write(guard.encode_charge(launch_id, folder, adopts=adopts))
            for each in known:
                process.stdin.write(guard.encode_process(each))
        _wait_until_ready(process.stdout.fileno())
    except BaseException:
        process.stdin.close()
        process.kill()
        process.wait()
        raise
    finally:
        process.stdout.close()
    return process


def group_of(process: guard.Process) -> int | None:
    """Returns the process group of a process; None if it has ended."""
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None


def _wait_until_ready(fd: int) -> None:
    """Waits for the first words of the guard.

    Raises:
      GuardError: it ended or kept silent instead.
    """
    deadline_s = time.monotonic() + _TIMEOUT_S
    said = b""
    while not said.endswith(guard.READY):
        wait_s = max(deadline_s - time.monotonic(), 0.0)
        chunk = os.read(fd, 4096) if select.select([fd], [], [], wait_s)[0] else b""
        if not chunk:
            raise GuardError(
                f"The guard process did not start within {_TIMEOUT_S:g} s; "
                "no process was started. It wrote:\n"
                f"{said.decode(errors='replace') or 'nothing'}"
            )
        said += chunk
