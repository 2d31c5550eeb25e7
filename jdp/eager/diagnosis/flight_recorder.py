"""Flight recorder: the last requests of a process, written when a job hangs or fails.

Each process keeps its requests and their outcomes. `jdp.eager.diagnosis.divergence`
compares the dumps of two processes.
"""

import collections
import contextlib
import logging
import os
import pathlib
import secrets
import tempfile
import time
from typing import SupportsIndex

import msgspec

_logger = logging.getLogger("jdp")
_FORMAT = "jdp flight record"
VERSION = 1  # of dumps.
_MOST_WRITING_S = 60.0  # longest time to write a file; older parts are abandoned.
_MOST_FILES = 10  # per rank, that `dump_into` leaves in a folder.


class Record(msgspec.Struct, omit_defaults=True, gc=False):
    """Request of this process; the engine fills in the fields as it proceeds.

    Times are seconds of `time.perf_counter`; 0.0: not yet.

    Attributes:
      name: name of the tensor.
      kind: the operation, such as "all_reduce"; "join" for a rank without more data.
      dtype: dtype of the tensor, such as "float32"; "" without a tensor.
      shape: shape of the tensor on this rank.
      process_set: the processes that take part.
      op: the reduction; "" without one.
      num_bytes: size of the tensor on this rank.
      number: 0, 1, ... by submission in this process; `FlightRecorder.add` sets it.
      submitted_s: when this process submitted it.
      agreed_s: when all ranks of the process set had submitted it.
      started_s: when it started to run.
      finished_s: when it had run or failed.
      order: position in the order of execution, the same on all ranks; refused
        operations have one too. -1: not yet.
      error: why it failed; "" if it did not.
    """

    name: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    process_set: int = 0
    op: str = ""
    num_bytes: int = 0
    number: int = -1
    submitted_s: float = 0.0
    agreed_s: float = 0.0
    started_s: float = 0.0
    finished_s: float = 0.0
    order: int = -1
    error: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether the ranks have not agreed on it, even if the engine has ended."""
        return self.order < 0 and not self.agreed_s


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """Records of one process.

    Attributes:
      format: identifies the type of the file.
      version: version of the format.
      rank: rank of the process.
      size: number of ranks of the job.
      reason: why the dump was written.
      time: when it was written, in seconds since the epoch.
      clock_s: the same on the clock of the records.
      capacity: number of records kept; more only if older ones still wait.
      num_dropped: number of requests that are no longer in `records`.
      dropped_order: every request executed after this position is in `records`.
      records: by `number`, ascending.
    """

    format: str = _FORMAT
    version: int = VERSION
    rank: int
    size: int
    reason: str
    time: float
    clock_s: float
    capacity: int
    num_dropped: int
    dropped_order: int
    records: tuple[Record, ...]


class _Header(msgspec.Struct):
    """Fields that every version of the file has."""

    format: str
    version: int


class FlightRecorder:
    """Recorder of the last requests of this process.

    One thread at a time may add; any thread may dump. Requests that the ranks have not
    agreed on are never dropped: a job that hangs waits for one of them.

    Args:
      rank: rank of this process.
      size: number of ranks of the job.
      capacity: number of records to keep.

    Raises:
      ValueError: `capacity` is less than 1.
    """

    def __init__(self, *, rank: int, size: int, capacity: int = 2000):
        if capacity < 1:
            raise ValueError(f"`capacity` must be at least 1, got {capacity}.")
        self._rank = rank
        self._size = size
        self._capacity = capacity
        self._records: collections.deque[Record] = collections.deque()
        self._late: list[Record] = []  # older records that still waited.
        self._most_late = capacity
        self._num_added = 0
        self._dropped_order = -1

    def add(self, record: Record) -> None:
        """Numbers and keeps a record; the caller may go on to update it."""
        record.number = self._num_added
        self._num_added += 1
        if len(self._records) == self._capacity:
            oldest = self._records[0]
            if oldest.order < 0 and not oldest.finished_s:
                self._keep_late(oldest)
            else:
                self._dropped_order = max(self._dropped_order, oldest.order)
            # Only now, so that a dump on another thread does not miss it.
            self._records.popleft()
        self._records.append(record)

    def _keep_late(self, record: Record) -> None:
        if len(self._late) >= self._most_late:
            waiting = [each for each in self._late if each.order < 0]
            waiting = [each for each in waiting if not each.finished_s]
            orders = [each.order for each in self._late]
            self._dropped_order = max(self._dropped_order, *orders)
            # Doubling keeps the cost per record constant, however many wait.
            self._most_late = max(self._capacity, 2 * len(waiting))
            self._late = waiting
        self._late.append(record)

    def dump_into(self, folder: str, reason: str) -> None:
        """Writes the records to a file of this process, and logs its path.

        The ten newest files of this rank stay in the folder. Older files are removed,
        and so are partial files of killed processes.

        Args:
          folder: folder for the file; "": the system's folder for temporary files.
          reason: why the records are written.
        """
        parent = pathlib.Path(folder or tempfile.gettempdir())
        end = f".rank{self._rank}.json"
        path = parent / f"jdp_flight_{os.getpid()}{end}"
        try:
            try:
                self.dump(path, reason)
            except OSError:
                # In a folder such as /tmp another account may own a file of this name,
                # which this account cannot replace.
                path = parent / f"jdp_flight_{os.getpid()}-{secrets.token_hex(8)}{end}"
                self.dump(path, reason)
        except OSError as error:
            _logger.warning("The flight recorder cannot be written: %s", error)
        else:
            self._drop_oldest(parent)
            _logger.warning(
                "Rank %d wrote its last requests to %s; compare two ranks with "
                "`jdp timeline diff`.",
                self._rank,
                path,
            )

    def _drop_oldest(self, folder: pathlib.Path) -> None:
        """Removes all but the newest files of this rank and user, and partial files."""
        for _, path in _find_own(folder, f"jdp_flight_*.rank{self._rank}.json")[
            :-_MOST_FILES
        ]:
            with contextlib.suppress(OSError):  # Another job removes its own.
                path.unlink()
        for written_s, path in _find_own(folder, ".jdp_flight_*"):
            if time.time() - written_s > _MOST_WRITING_S:  # Its process was killed.
                with contextlib.suppress(OSError):
                    path.unlink()

    def dump(self, path: str | os.PathLike[str], reason: str) -> None:
        """Writes the records to a file, completely or not at all.

        Args:
          path: path of the file, which is replaced; must differ between ranks.
          reason: why the records are written, such as "stalled for 60 s".

        Raises:
          OSError: the file cannot be written; the error has the path.
        """
        kept = {record.number: record for record in [*self._late, *self._records]}
        dump = Dump(
            rank=self._rank,
            size=self._size,
            reason=reason,
            time=time.time(),
            clock_s=time.perf_counter(),
            capacity=self._capacity,
            num_dropped=self._num_added - len(kept),
            dropped_order=self._dropped_order,
            records=tuple(kept.values()),
        )
        data = _encode(dump)
        path = pathlib.Path(path)
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            # Readable by this user only: names and shapes reveal the model. O_EXCL: an
            # existing file may belong to another account.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(beside, flags, 0o600), "wb") as file:
                file.write(data)
            os.replace(beside, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _find_own(folder: pathlib.Path, pattern: str) -> list[tuple[float, pathlib.Path]]:
    """Lists the files of this user and when they were last written, oldest first."""
    found = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # Another job removes its own.
            status = path.lstat()
            if status.st_uid == os.geteuid():
                found.append((status.st_mtime, path))
    return sorted(found)


def read_dump(path: str | os.PathLike[str]) -> Dump:
    """Reads a file that `FlightRecorder.dump` wrote.

    Raises:
      OSError: the file cannot be read; the error has the path.
      ValueError: the file is not a dump, or has another version.
    """
    return decode_dump(pathlib.Path(path).read_bytes(), os.fspath(path))


def decode_dump(data: bytes, path: str) -> Dump:
    """Decodes a dump; `path` is for errors.

    Raises:
      ValueError: see `read_dump`.
    """
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.format != _FORMAT:
            raise ValueError(f"its `format` is {header.format!r}")
        if header.version == VERSION:
            return msgspec.json.decode(data, type=Dump)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a flight record: {error}.") from None
    raise ValueError(
        f"{path} is a flight record of version {header.version}, and this jdp reads "
        f"version {VERSION}."
    )


def _encode(dump: Dump) -> bytes:
    try:
        return msgspec.json.encode(dump, enc_hook=_plain)
    except UnicodeEncodeError:
        # The caller gave names that are not valid text; the rest must not be lost.
        records = []
        for record in dump.records:
            name = record.name.encode(errors="backslashreplace").decode()
            records.append(msgspec.structs.replace(record, name=name))
        return msgspec.json.encode(
            msgspec.structs.replace(dump, records=tuple(records)), enc_hook=_plain
        )


def _plain(value: object) -> object:
    """Converts numpy integers, as in shapes, to `int`, and other values to text."""
    return value.__index__() if isinstance(value, SupportsIndex) else str(value)
