"""Logs: which file keeps the output of one process?"""

import os
import re
from collections.abc import Iterable, Mapping

_MOST_UNFINISHED_BYTES = 1 << 16
_ESCAPE = re.compile(rb"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")


class LogFiles:
    """A file per process, with the lines of its stdout and stderr as they came.

    A line is as a terminal would show it in the end: without colors, and of a progress
    bar the last state. If the disk is full, the job goes on.
    """

    def __init__(self, folder: str, names: Mapping[int, str]) -> None:
        """Opens `<name>.log` in `folder` for each process, empty.

        Args:
          folder: made if there is no such folder.
          names: by process id.

        Raises:
          OSError: a file cannot be opened; the message names the folder.
        """
        self.error: OSError | None = None  # The first one since the files are open.
        self._fds: dict[int, int] = {}
        self._unfinished: dict[tuple[int, int], bytes] = {}  # lines, by process and fd.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            os.makedirs(folder, exist_ok=True)
            for process_id, name in names.items():
                path = os.path.join(folder, f"{name}.log")
                self._fds[process_id] = os.open(path, flags, 0o666)
        except OSError as error:
            self.close()
            raise OSError(
                error.errno, f"--log-dir {folder!r} cannot be written: {error.strerror}"
            ) from None

    def take(self, process_id: int, fd: int, chunk: bytes) -> None:
        """Writes the lines that `chunk`, read from `fd`, completes."""
        source = process_id, fd
        *lines, rest = (self._unfinished.pop(source, b"") + chunk).split(b"\n")
        text = b"".join(_as_shown(line) + b"\n" for line in lines)
        if len(rest) > _MOST_UNFINISHED_BYTES:  # Such as a progress bar.
            rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        if len(rest) > _MOST_UNFINISHED_BYTES:
            text, rest = text + _as_shown(rest), b""
        if rest:
            self._unfinished[source] = rest
        self._write(process_id, text)

    def end(self, process_id: int, fd: int) -> None:
        """Writes what `fd`, which has ended, has left unfinished."""
        rest = _as_shown(self._unfinished.pop((process_id, fd), b""))
        if rest:
            self._write(process_id, rest + b"\n")

    def take_line(self, text: str) -> None:
        """Writes a line of the launcher to the files of all processes."""
        for process_id in self._fds:
            self._write(process_id, text.encode(errors="replace") + b"\n")

    def close(self) -> None:
        """Closes all files."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _write(self, process_id: int, text: bytes) -> None:
        left = memoryview(text)
        try:
            while left:
                left = left[os.write(self._fds[process_id], left) :]
        except OSError as error:
            self.error = self.error or error


def name_processes(process_ids: Iterable[int], num_processes: int) -> dict[int, str]:
    """Returns a name for each process, in the order of numbers when sorted."""
    width = len(str(num_processes - 1))
    return {i: f"process_{i:0{width}}" for i in process_ids}


def _as_shown(line: bytes) -> bytes:
    """Returns a line without colors, and without what was written over."""
    line = line.rstrip(b"\r")
    return _ESCAPE.sub(b"", line[line.rfind(b"\r") + 1 :])
