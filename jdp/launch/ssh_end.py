"""SSH end: how does one host run its part of a job that another host has started?

It gets its charge and then orders as lines on stdin. If stdin ends, the starter or the
connection is gone, and the job ends here.
"""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

import jdp
from jdp.launch import guarding, launch, launcher_link, ports
from jdp.launch.endings import Exit
from jdp.runtime import addresses


class _Orders:
    """Reads orders in a thread of its own, and passes them to the launcher."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._link: launcher_link.LauncherLink | None = None

    def start(self) -> None:
        """Begins to read."""
        threading.Thread(target=self._read, name="jdp-ssh-orders", daemon=True).start()

    def link_to(self, link: launcher_link.LauncherLink) -> None:
        """From now on, the launcher hears of the first order through `link`."""
        with self._lock:
            self._link = link

    def _read(self) -> None:
        with open(0, "rb", buffering=0, closefd=False) as stdin:
            while line := stdin.readline():
                self._obey(json.loads(line))
        os.kill(os.getpid(), signal.SIGTERM)

    def _obey(self, order: Mapping[str, Any]) -> None:
        end = Exit(-1, order["code"], note=order["note"])
        with self._lock:
            # The launchers also tell each other, and a signal that comes second kills.
            if self._link is not None and order["is_first"]:
                self._link.tell_end(end)
            else:  # It has not begun, or it has no link to the others.
                os.kill(os.getpid(), order["signal"])


def main(charge: Mapping[str, Any]) -> None:
    """Runs the processes of this host and exits as the job does.

    Args:
      charge: the first line that `ssh_starter` sends, decoded.
    """
    mark = charge["mark"].encode()
    _say(mark, b"ready")
    code = 1
    try:
        code = _run(charge, mark)
        _say(mark, b"ended %d" % code)
    except (OSError, ValueError, guarding.GuardError) as error:
        text = error.strerror if isinstance(error, OSError) else None
        line = " ".join((text or str(error)).split())
        _say(mark, b"failed " + line.encode(errors="replace"))
    os._exit(code)  # The thread that reads orders waits for more.


def _run(charge: Mapping[str, Any], mark: bytes) -> int:
    if charge["version"] != jdp.__version__:
        raise ValueError(
            f"this host has jdp {jdp.__version__}, and the starter {charge['version']}."
            " Install the same version on all hosts."
        )
    try:
        os.chdir(charge["folder"])
    except OSError as error:
        raise OSError(
            error.errno,
            f"the folder {charge['folder']!r} of the starter cannot be entered here: "
            f"{error.strerror}. Jobs run in the same folder on all hosts.",
        ) from None
    given = dict(charge["options"])
    with contextlib.ExitStack() as stack:
        if given["node_rank"] == 0:
            if not given["coordinator_address"]:
                # For the processes, and for the link of the launchers above it.
                port = stack.enter_context(ports.held("", count=2))
                given["coordinator_address"] = addresses.join(charge["address"], port)
            _say(mark, b"meet " + given["coordinator_address"].encode())
        key = bytes.fromhex(charge["key"])
        options = launch.LaunchOptions(**given, key=key)
        # Unchecked: the processes fail where it is missing, and all hosts hear of it.
        command = launch.Command(**charge["command"], is_checked=False)
        orders = _Orders()
        orders.start()
        return launch.launch(
            command, options, adopts_orphans=True, on_link=orders.link_to
        )


def _say(mark: bytes, text: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(1, mark + b" " + text + b"\n")
