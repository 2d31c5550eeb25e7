"""Guard: how do the processes of a job end when their launcher was killed?

The launcher runs this file by its path, in a session of its own, and holds the other
end of its stdin. Over this pipe the launcher sends the id of the launch and the folder
to remove (every account of a host can read a command line), then each process as it
starts. The pipe closes when the launcher ends. If the byte `DONE` did not come before,
the launcher was killed, and the guard ends the job. The file imports neither jdp nor
jax, so that it starts in a few hundredths of a second.

A process belongs to the job if at least one of these holds:

* it was started by a process of the job (`Census.look` sees it within `_LOOK_PERIOD_S`,
  and `Census.find` sees what is still there);
* it lost its parent, and the launcher, as "child subreaper", became its parent;
* it is in a session that a process of the job began;
* it carries the id of the launch in its environment.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

import psutil

READY = b"ready\n"
DONE = b"d"
_LAUNCH_ID = "JDP_LAUNCH_ID"  # `environment.LAUNCH_ID`; a test holds them equal.
# The guard of an inner job is left alone: it ends once it has ended that job.
IS_GUARD = "JDP_IS_GUARD"
_SCAN_PERIOD_S = 0.1
_LOOK_PERIOD_S = 0.2
# A process between fork and exec still shows the environment of the launcher. It gets
# this many scans to appear under the launch id.
_NUM_EMPTY_SCANS = 3
# A tracker of `multiprocessing` removes shared memory and semaphores of its clients
# once they are dead, as soon as its pipe closes.
_TRACKER = b"resource_tracker import main"  # in its command line.
_TRACKING_S = 1.0


class Process(NamedTuple):
    """One process; its pid may be reused, by a process with another start."""

    pid: int
    start: str  # when it began, in units of the system.
    is_of_inner_job: bool = False  # of a job that a process of this job launched.


class _Stat(NamedTuple):
    parent: int
    session: int
    start: str
    has_ended: bool


class Census:
    """The processes of a job on this host, found by parent, session and environment."""

    def __init__(self, launch_id: str, *, launcher: int, adopts: bool) -> None:
        """Lists the processes that run already, which are not of the job.

        Args:
          launch_id: the id that processes of the job carry in their environment.
          launcher: process id of the launcher.
          adopts: whether every child of the launcher from now on is of the job.

        Raises:
          RuntimeError: this system does not show its processes.
        """
        self._launch_id = launch_id
        outside = read_stats()
        if launcher not in outside or not _is_own_proc():
            raise RuntimeError(
                "the processes of this host cannot be listed, so the processes of a "
                "job could not be ended: `/proc` must be mounted, belong to this "
                "process namespace, and show this user's processes"
            )
        self._launcher = Process(launcher, outside[launcher].start)
        self._outside = {pid: stat.start for pid, stat in outside.items()}
        self._seen = set(outside)
        self._known: dict[int, str] = {}
        self._sessions: set[int] = set()
        self._adopts = adopts

    def add(self, process: Process) -> None:
        """Adds a process that the launcher has started."""
        self._known[process.pid] = process.start

    def look(self) -> None:
        """Finds new processes of the job by their parents; cheap."""
        now = set(_list_pids())
        new, self._seen = now - self._seen, now
        for pid in self._known.keys() - now:
            del self._known[pid]
        self._forget_sessions()
        # A child may have a lower pid than its parent, once pids wrap around.
        stats = {pid: stat for pid in new if (stat := _read_stat(pid)) is not None}
        is_grown = True
        while is_grown:
            is_grown = False
            for pid, stat in list(stats.items()):
                if self._is_child(stat) and self._has_parent(stat):
                    self._known[pid] = stats.pop(pid).start
                    is_grown = True

    def _forget_sessions(self) -> None:
        """Forgets sessions without a process of the job: their ids are reused."""
        led = self._sessions & self._known.keys()
        if led != self._sessions:
            for pid in self._known:
                with contextlib.suppress(OSError):
                    led.add(os.getsid(pid))
            self._sessions &= led

    def find(self) -> list[Process]:
        """Lists the live processes of the job that this user may signal.

        It does not list the launcher and guards.
        """
        stats = read_stats()
        found = {p for p, start in self._known.items() if _has(stats, p, start)}
        self._known = {pid: stats[pid].start for pid in found}
        self._sessions &= {stat.session for stat in stats.values()}
        self._adopts &= _has(stats, *self._launcher[:2])
        environs = {pid: _read_environ(pid) for pid in stats}
        found |= {p for p in stats if environs[p].get(_LAUNCH_ID) == self._launch_id}
        size = -1
        while len(found) != size:
            size = len(found)
            self._sessions |= {pid for pid in found if stats[pid].session == pid}
            # A pid is not reused while its session lives.
            sessions = {s for s in self._sessions if s not in stats or s in found}
            self._known |= {pid: stats[pid].start for pid in found}
            for pid in stats.keys() - found:
                stat = stats[pid]
                if self._outside.get(pid) == stat.start:
                    continue
                if stat.session in sessions or self._is_child(stat):
                    found.add(pid)
        return [
            Process(pid, stats[pid].start, self._is_of_inner_job(environs[pid]))
            for pid in sorted(found - {os.getpid(), self._launcher.pid})
            if not stats[pid].has_ended
            and IS_GUARD not in environs[pid]
            and _is_ours(pid)
        ]

    def _is_child(self, stat: _Stat) -> bool:
        if stat.parent == self._launcher.pid:
            return self._adopts
        return stat.parent in self._known

    def _has_parent(self, stat: _Stat) -> bool:
        """Whether its parent is the known process, not another with the same pid."""
        start = self._known.get(stat.parent, self._launcher.start)
        return _is_still(Process(stat.parent, start))

    def _is_of_inner_job(self, environ: dict[str, str]) -> bool:
        return environ.get(_LAUNCH_ID, self._launch_id) != self._launch_id


def describe(pid: int) -> Process | None:
    """Returns the process that has this pid now; None if there is none."""
    stat = _read_stat(pid)
    return None if stat is None else Process(pid, stat.start)


def signal_processes(processes: Iterable[Process], signum: int) -> None:
    """Sends `signum` to each process whose pid was not reused since it was found."""
    for process in processes:
        with contextlib.suppress(OSError):  # Ended in between, or not ours.
            _signal(process, signum)


def _signal(process: Process, signum: int) -> None:
    pidfd = None
    with contextlib.suppress(AttributeError, OSError):  # Linux before 5.3, macOS.
        pidfd = os.pidfd_open(process.pid)
    try:
        # While the descriptor is open, the pid is not reused after this check.
        if not _is_still(process):
            return
        if pidfd is None:
            os.kill(process.pid, signum)
        else:
            signal.pidfd_send_signal(pidfd, signum)
    finally:
        if pidfd is not None:
            os.close(pidfd)


def kill(processes: Iterable[Process], *, since_s: float) -> None:
    """Kills processes; a tracker of `multiprocessing` gets a moment to clean up.

    Args:
      processes: the processes to kill.
      since_s: when processes of the job were killed first, on the monotonic clock.
    """
    spares = time.monotonic() - since_s < _TRACKING_S
    killed = [each for each in processes if not (spares and is_tracker(each.pid))]
    signal_processes(killed, signal.SIGKILL)


def is_tracker(pid: int) -> bool:
    """Returns whether a process is a resource tracker; see `_TRACKER`."""
    try:
        return any(_TRACKER in os.fsencode(a) for a in psutil.Process(pid).cmdline())
    except (psutil.Error, OSError):
        return False


def kill_all(census: Census, *, timeout_s: float) -> list[Process]:
    """Kills every process of the job, until no scan finds one.

    Returns:
      The processes that are left after `timeout_s`; empty when all have ended.
    """
    start_s = time.monotonic()
    deadline_s = start_s + timeout_s
    num_empty = 0
    while True:
        left = census.find()
        kill(left, since_s=start_s)
        num_empty = 0 if left else num_empty + 1
        if num_empty == _NUM_EMPTY_SCANS or time.monotonic() > deadline_s:
            return left
        time.sleep(_SCAN_PERIOD_S)


def encode_charge(launch_id: str, folder: str, *, adopts: bool) -> bytes:
    """Returns the first message of a launcher to its guard; `folder` may be ""."""
    said = (launch_id.encode(), os.fsencode(folder), b"a" if adopts else b"")
    return b"".join(part + b"\0" for part in said)


def encode_process(process: Process) -> bytes:
    """Returns the line that a launcher writes per process of the job."""
    return f"{process.pid} {process.start}\n".encode()


def _read_charge() -> tuple[str, str, bool, bytes] | None:
    """Inverts `encode_charge`, on stdin; None where the launcher ended before it.

    Returns:
      Its three values, and the bytes after them.
    """
    said = b""
    while said.count(b"\0") < 3:
        chunk = os.read(0, 4096)
        if not chunk:
            return None
        said += chunk
    launch_id, folder, adopts, rest = said.split(b"\0", 3)
    return launch_id.decode(), os.fsdecode(folder), bool(adopts), rest


def _watch(census: Census, said: bytes) -> bool:
    """Follows the job until the launcher ends; returns whether it sent `DONE` before.

    Args:
      census: the processes of the job.
      said: the bytes from the launcher so far.
    """
    while True:
        *lines, said = said.split(b"\n")
        for line in lines:
            pid, _, start = line.decode().partition(" ")
            census.add(Process(int(pid), start))
        if said == DONE:
            return True
        if not select.select([0], [], [], _LOOK_PERIOD_S)[0]:
            census.look()
            continue
        chunk = os.read(0, 4096)
        if not chunk:
            return False
        said += chunk


def remove_folder(path: str) -> None:
    """Removes a folder of this user and the files in it, if there is one.

    It does not follow a link: another user may have made one of that name.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            for name in os.listdir(fd):
                os.unlink(name, dir_fd=fd)
            os.rmdir(path)
    except OSError:
        pass  # Another process of the job has been faster, or it cannot be removed.
    finally:
        os.close(fd)


def _is_own_proc() -> bool:
    """Whether `/proc` shows this process under its own pid."""
    if sys.platform != "linux":
        return True
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def read_stats() -> dict[int, _Stat]:
    """Returns the stat of each process of this host, by its id."""
    return {p: stat for p in _list_pids() if (stat := _read_stat(p)) is not None}


def _list_pids() -> list[int]:
    if sys.platform != "linux":
        return psutil.pids()
    try:  # psutil has no error of its own for a `/proc` without processes.
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _read_stat(pid: int) -> _Stat | None:
    """Reads the stat of a process; None if it cannot be read."""
    if sys.platform != "linux":
        try:
            one = psutil.Process(pid)
            has_ended = one.status() == psutil.STATUS_ZOMBIE
            start = repr(one.create_time())
            return _Stat(one.ppid(), os.getsid(pid), start, has_ended)
        except (psutil.Error, OSError):
            return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in brackets, may have any characters: proc(5).
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 20:
        return None
    start = fields[19].decode()
    return _Stat(int(fields[1]), int(fields[3]), start, fields[0] in (b"Z", b"X"))


def _read_environ(pid: int) -> dict[str, str]:
    """Returns the environment of a process; empty where it cannot be read."""
    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return {}  # Ended, or not ours to read.


def _has(stats: dict[int, _Stat], pid: int, start: str) -> bool:
    return pid in stats and stats[pid].start == start


def _is_still(process: Process) -> bool:
    stat = _read_stat(process.pid)
    return stat is not None and stat.start == process.start


def _is_ours(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def main() -> None:
    """Waits for the end of the launcher; see the module docstring."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    charge = _read_charge()
    if charge is None:
        return
    launch_id, folder, adopts, rest = charge
    try:
        census = Census(launch_id, launcher=os.getppid(), adopts=adopts)
    except RuntimeError as error:
        os.write(1, str(error).encode())
        return
    os.write(1, READY)
    if not _watch(census, rest):
        kill_all(census, timeout_s=30.0)
        if folder:
            remove_folder(folder)


if __name__ == "__main__":
    main()
