"""Guard: who ends the workers when their launcher can no longer do it?

The launcher runs this file by its path, in a session of its own, and holds the other
end of its stdin. Over it the guard hears the id of the launch and the folder to remove,
since every account of a host can read a command line. The pipe closes when the launcher
ends, however it ends: without the byte `DONE` before it, the launcher was killed, and
the guard ends the job. The file imports neither jdp nor jax, so that it starts in a few
hundredths of a second.
"""

import os
import signal
import time

import psutil

READY = b"ready\n"
DONE = b"d"
_LAUNCH_ID = "JDP_LAUNCH_ID"  # `environment.LAUNCH_ID`; a test holds them equal.
_SCAN_PERIOD_S = 0.1
# A process between fork and exec still shows the environment of the launcher. It gets
# this many scans to appear under the launch id.
_NUM_EMPTY_SCANS = 3


def find_processes(launch_id: str) -> list[psutil.Process]:
    """Lists the live processes that carry `launch_id` in their environment.

    Children inherit the environment, so grandchildren and processes that left the
    session of their worker are found too. Processes of other users are passed over.
    """
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except (psutil.Error, OSError):
            continue  # Ended, a zombie, or not ours to read.
        if environ.get(_LAUNCH_ID) == launch_id and process.pid != os.getpid():
            found.append(process)
    return found


def signal_processes(processes: list[psutil.Process], signum: int) -> None:
    """Sends `signum` to each process that is still the one that was found."""
    for process in processes:
        try:
            process.send_signal(signum)
        except (psutil.Error, OSError):
            continue  # Ended in between.


def kill_all(launch_id: str, *, timeout_s: float) -> list[psutil.Process]:
    """Kills every process that carries `launch_id`, until no scan finds one.

    Returns:
      What was still there after `timeout_s`; empty when all have ended.
    """
    deadline_s = time.monotonic() + timeout_s
    num_empty = 0
    while True:
        left = find_processes(launch_id)
        signal_processes(left, signal.SIGKILL)
        num_empty = 0 if left else num_empty + 1
        if num_empty == _NUM_EMPTY_SCANS or time.monotonic() > deadline_s:
            return left
        time.sleep(_SCAN_PERIOD_S)


def encode_charge(launch_id: str, folder: str) -> bytes:
    """Returns what a launcher writes to its guard first; `folder` may be ""."""
    return launch_id.encode() + b"\0" + os.fsencode(folder) + b"\0"


def _read_charge() -> tuple[str, str] | None:
    """Inverts `encode_charge`, on stdin; None where the launcher ended before it."""
    said = b""
    while said.count(b"\0") < 2:
        chunk = os.read(0, 4096)
        if not chunk:
            return None
        said += chunk
    launch_id, folder, _ = said.split(b"\0")
    return launch_id.decode(), os.fsdecode(folder)


def remove_folder(path: str) -> None:
    """Removes a folder of this user and the files in it, if there is one.

    It follows no link: another user may have made one of that name.
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
        pass  # Another process of the job has been faster, or may not be refused.
    finally:
        os.close(fd)


def main() -> None:
    """Waits for the end of the launcher; see the module docstring."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    charge = _read_charge()
    if charge is None:
        return
    launch_id, folder = charge
    os.write(1, READY)
    if os.read(0, 1) != DONE:
        kill_all(launch_id, timeout_s=30.0)
        if folder:
            remove_folder(folder)


if __name__ == "__main__":
    main()
