"""Record file: how do all entries of the record of a process come into a file?

The file has one JSON value per line: first a header, then entries as lists, and an
object with the offset of the clock whenever that was measured better. A file whose
writer was killed ends with a partial line.
"""

import os
import pathlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from jdp.watch.record import Entry

_VERSION = 1


class _Header(msgspec.Struct, frozen=True):
    """First line of a file."""

    jdp_record: int  # version of the format.
    process: int
    host: int
    host_name: str
    epoch_ns: int  # what the monotonic clock of the host lacks to the epoch.


class _Offset(msgspec.Struct, frozen=True):
    """Difference from the clock of the host to the clock of host 0, from here on."""

    offset_ns: int


class Recorded(NamedTuple):
    """Content of a file.

    Attributes:
      process: index of the process.
      host: index of its host.
      host_name: name of its host.
      epoch_ns: difference from the times to the epoch, by the clock of its host.
      entries: its entries, on the monotonic clock of host 0.
    """

    process: int
    host: int
    host_name: str
    epoch_ns: int
    entries: list[Entry]


class RecordFiles:
    """Files of the processes of one host; replaces earlier ones."""

    def __init__(self, folder: str, host: int):
        """Makes the folder.

        Args:
          folder: where the files lie.
          host: index of this host.

        Raises:
          OSError: it cannot be made.
        """
        os.makedirs(folder, exist_ok=True)
        self._folder, self._host = folder, host
        self._fds: dict[int, int] = {}
        self._offset_ns = 0

    def write(self, entries: Mapping[int, Sequence[Entry]], *, offset_ns: int) -> None:
        """Adds entries.

        Args:
          entries: new entries by process.
          offset_ns: see `JobWatch.offset_ns`.

        Raises:
          OSError: a file cannot be written; the error has its path.
        """
        if offset_ns != self._offset_ns:
            self._offset_ns = offset_ns
            for process in self._fds:
                self._write(process, [_Offset(offset_ns)])
        for process, some in entries.items():
            lines: list[object] = []
            if process not in self._fds:
                self._open(process)
                lines += [_make_header(process, self._host), _Offset(offset_ns)]
            self._write(process, [*lines, *some])

    def close(self) -> None:
        """Closes the files."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _open(self, process: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._fds[process] = os.open(self._path(process), flags, 0o600)

    def _write(self, process: int, values: Sequence[object]) -> None:
        data = b"".join(msgspec.json.encode(value) + b"\n" for value in values)
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fds[process], left) :]
        except OSError as error:
            path = self._path(process)
            raise OSError(error.errno, error.strerror, path) from None

    def _path(self, process: int) -> str:
        return os.path.join(self._folder, f"record_{process}.jsonl")


def read(path: str | os.PathLike[str]) -> Recorded:
    """Reads a file up to its last whole line.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not a record.
    """
    first, *lines = pathlib.Path(path).read_bytes().split(b"\n")
    try:
        header = msgspec.json.decode(first, type=_Header)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a record of jdp: {error}.") from None
    if header.jdp_record != _VERSION:
        raise ValueError(f"{path} is a record of another version of jdp.")
    decoder = msgspec.json.Decoder(Entry | _Offset)
    entries, offset_ns = [], 0
    for number, line in enumerate(lines[:-1], start=2):
        try:
            found = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}.") from None
        if isinstance(found, _Offset):
            offset_ns = found.offset_ns
        else:
            entries.append(found._replace(at_ns=found.at_ns + offset_ns))
    return Recorded(
        header.process,
        header.host,
        header.host_name,
        header.epoch_ns - offset_ns,
        entries,
    )


def _make_header(process: int, host: int) -> _Header:
    epoch_ns = time.time_ns() - time.monotonic_ns()
    return _Header(_VERSION, process, host, socket.gethostname(), epoch_ns)
