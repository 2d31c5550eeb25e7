"""Guarding: how does a launcher start its `guard`?"""

import contextlib
import os
import select
import subprocess
import sys
import time

import psutil

from jdp.runtime import environment, guard

TIMEOUT_S = 30.0


def start(launch_id: str, folder: str) -> "subprocess.Popen[bytes]":
    """Starts a guard and waits until it can do its work.

    Args:
      launch_id: of the processes that it ends if this one is killed.
      folder: that it removes then; or "".

    Raises:
      RuntimeError: it ended or kept silent instead.
    """
    environ = dict(os.environ)
    # The guard of a job inside a job must outlive the processes of the outer one.
    environ.pop(environment.LAUNCH_ID, None)
    environ["PYTHONPATH"] = os.path.dirname(os.path.dirname(psutil.__file__))
    process = subprocess.Popen(
        # -S: `site` may import anything. -P: no module of this folder is meant.
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
            process.stdin.write(guard.encode_charge(launch_id, folder))
        _wait_until_ready(process.stdout.fileno())
    except BaseException:
        process.stdin.close()
        process.kill()
        process.wait()
        raise
    finally:
        process.stdout.close()
    return process


def _wait_until_ready(fd: int) -> None:
    """Waits for the first words of the guard.

    Raises:
      RuntimeError: it ended or kept silent instead.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    said = b""
    while not said.endswith(guard.READY):
        wait_s = max(deadline_s - time.monotonic(), 0.0)
        chunk = os.read(fd, 4096) if select.select([fd], [], [], wait_s)[0] else b""
        if not chunk:
            raise RuntimeError(
                f"The guard process did not start within {TIMEOUT_S:g} s; "
                "no worker was started. It wrote:\n"
                f"{said.decode(errors='replace') or 'nothing'}"
            )
        said += chunk
