"""Progress: how far did a killed server come?"""

import contextlib
import os
import pathlib
import struct
import weakref
import zlib
from typing import NamedTuple

from jdp.parameter_server.messages import Version

_RECORD = struct.Struct("<qqq")  # epoch, count, common.
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 64
_MOST = 1 << 60


class ServerProgress(NamedTuple):
    """Progress of a server."""

    version: Version
    common: int  # count of the newest checkpoint that all servers had; 0: none.


class ProgressFile:
    """A file with the newest progress, written at each update.

    It has two slots, written in turn, each with a checksum. If the process is killed
    while it writes one, the other is whole.
    """

    def __init__(self, path: pathlib.Path):
        """Opens the file, or creates it.

        Raises:
          OSError: the file cannot be opened.
        """
        self.damage = ""  # why the file is damaged; "" if it is not.
        # A link made by another account could lead to a file of this account.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o644)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        data = os.pread(self._descriptor, 2 * _SLOT_BYTES + 1, 0)
        slots = [_decode(data[i * _SLOT_BYTES :][:_SLOT_BYTES]) for i in range(2)]
        whole = [slot for slot in slots if slot is not None]
        self.found = max(whole, default=ServerProgress(Version(), 0))
        self._next = 1 if slots[0] == self.found else 0
        if data and not whole:
            self.damage = f"its {len(data)} bytes do not have their checksum"
        if not whole:
            self.write(self.found)

    def close(self) -> None:
        """Closes the file."""
        self._close()

    def write(self, progress: ServerProgress) -> None:
        """Writes the progress; on a full disk, the file stays as it is."""
        self.found = progress
        record = _RECORD.pack(*_fields(progress))
        data = record + _CHECKSUM.pack(zlib.crc32(record))
        with contextlib.suppress(OSError):
            os.pwrite(
                self._descriptor,
                data.ljust(_SLOT_BYTES, b"\0"),
                self._next * _SLOT_BYTES,
            )
            self._next ^= 1


def _fields(progress: ServerProgress) -> tuple[int, int, int]:
    return progress.version.epoch, progress.version.count, progress.common


def _decode(slot: bytes) -> ServerProgress | None:
    end = _RECORD.size + _CHECKSUM.size
    if len(slot) != _SLOT_BYTES or any(slot[end:]):
        return None
    record = slot[: _RECORD.size]
    if _CHECKSUM.unpack(slot[_RECORD.size : end]) != (zlib.crc32(record),):
        return None
    epoch, count, common = _RECORD.unpack(record)
    if not all(0 <= x <= _MOST for x in (epoch, count, common)):
        return None
    return ServerProgress(Version(epoch, count), common)
