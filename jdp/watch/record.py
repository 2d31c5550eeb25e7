"""Record: the last moments of one process, in memory that another process can read.

The memory is a header, a table of names and a ring of entries. The process writes
without a lock. A reader in another process never waits for it, and finds the record
whole after SIGKILL, or while the process is stopped. Both use the clock of their host.
"""

import itertools
import mmap
import os
import struct
import time
from typing import NamedTuple

from jdp.replicas import sealed_memory
from jdp.replicas.sealed_memory import MemoryOffer

NUM_ENTRIES = 8192
_NUM_NAMES, _NAME_BYTES = 256, 64
# Format, process id of the system, signal that makes it write its Python stacks.
_HEADER = struct.Struct("<8sII")
_FORMAT = b"jdp rec1"
# Places of numbers that change, among numbers of 8 bytes. They are written through a
# memoryview, in one piece, while `struct` first writes zeros.
_COUNT, _BEAT = 8, 9
# Nanoseconds, number, kind, name, position in the sequence of entries plus one.
_ENTRY = struct.Struct("<QqHH4xQ")
_NAMES_AT = sealed_memory.HEADER_BYTES
_RING_AT = _NAMES_AT + _NUM_NAMES * _NAME_BYTES
NUM_BYTES = _RING_AT + NUM_ENTRIES * _ENTRY.size
# An entry that a thread has begun and not written is given up after so many others.
_MOST_UNWRITTEN = 64


class Entry(NamedTuple):
    """One moment of a process."""

    at_ns: int  # on the monotonic clock of its host.
    kind: int  # see `jdp.replicas.stamps`.
    number: int
    name: str


class RecordWriter:
    """Record of this process; any thread may write.

    Attributes:
      pid: the process whose record it is; forked children have none.
    """

    def __init__(self, memory: mmap.mmap, *, dump_signal: int = 0):
        """Begins a record.

        Args:
          memory: memory of `NUM_BYTES`, of `sealed_memory`.
          dump_signal: signal upon which the process writes its Python stacks; 0: none.
        """
        self.pid = os.getpid()
        self._memory = memory
        self._numbers = _as_numbers(memory)
        self._places = itertools.count()
        self._names: dict[str, int] = {"": 0}
        self._numbers[_COUNT] = 0
        _HEADER.pack_into(memory, 0, _FORMAT, self.pid, dump_signal)
        self.beat()

    def write(self, kind: int, number: int = 0, name: str = "") -> None:
        """Adds an entry: about 1 us."""
        memory, place = self._memory, next(self._places)
        known = self._names.get(name)
        index = self._add_name(name) if known is None else known
        offset = _RING_AT + place % NUM_ENTRIES * _ENTRY.size
        now_ns = time.monotonic_ns()
        _ENTRY.pack_into(memory, offset, now_ns, number, kind, index, place + 1)
        self._numbers[_COUNT] = place + 1

    def beat(self) -> None:
        """Notes that Python code of this process runs."""
        self._numbers[_BEAT] = time.monotonic_ns()

    def _add_name(self, name: str) -> int:
        index = len(self._names)
        if index >= _NUM_NAMES:
            return 0
        text = name.encode(errors="replace")[:_NAME_BYTES]
        start = _NAMES_AT + index * _NAME_BYTES
        self._memory[start : start + _NAME_BYTES] = text.ljust(_NAME_BYTES, b"\0")
        self._names[name] = index
        return index


class RecordReader:
    """Reader of the record of another process."""

    def __init__(self, memory: mmap.mmap):
        """Begins at the oldest entry that is kept.

        Args:
          memory: the same memory as the writer's.
        """
        self._memory = memory
        self._numbers = _as_numbers(memory)
        self._num_read = 0
        self._pid = 0
        self._names: dict[int, str] = {}  # that were read.
        self.num_lost = 0  # entries that were overwritten before they were read.

    @property
    def pid(self) -> int:
        """The process that writes; 0 before it has begun."""
        label, pid, _ = _HEADER.unpack_from(self._memory)
        return pid if label == _FORMAT else 0

    @property
    def dump_signal(self) -> int:
        """The signal upon which the process writes its Python stacks; 0: none."""
        return _HEADER.unpack_from(self._memory)[2] if self.pid else 0

    @property
    def beat_ns(self) -> int:
        """When Python code of the process ran last, as far as it has noted."""
        return self._numbers[_BEAT]

    def read(self) -> list[Entry]:
        """Returns the entries since the last call, in order."""
        if self.pid != self._pid:
            self._pid, self._num_read, self._names = self.pid, 0, {0: ""}
        count = self._numbers[_COUNT]
        first = max(self._num_read, count - NUM_ENTRIES)
        self.num_lost += first - self._num_read
        found = [(i, self._copy(i)) for i in range(first, count)]
        # Entries that were overwritten meanwhile may be half old and half new.
        newest = self._numbers[_COUNT]
        whole_from = newest - NUM_ENTRIES + _MOST_UNWRITTEN
        entries = []
        self._num_read = count
        for i, (at_ns, number, kind, name, place) in found:
            if place == i + 1 and (i >= whole_from or newest == count):
                text = self._names.get(name)
                text = self._read_name(name) if text is None else text
                entries.append(Entry(at_ns, kind, number, text))
            elif place <= i and count - i < _MOST_UNWRITTEN:
                self._num_read = i  # A thread is about to write it.
                break
            else:
                self.num_lost += 1
        return entries

    def read_all(self) -> list[Entry]:
        """Returns all entries that are kept, in order; `read` goes on as before."""
        reader = RecordReader(self._memory)
        return reader.read()

    def _copy(self, place: int) -> tuple[int, ...]:
        offset = _RING_AT + place % NUM_ENTRIES * _ENTRY.size
        return _ENTRY.unpack_from(self._memory, offset)

    def _read_name(self, index: int) -> str:
        if index >= _NUM_NAMES:
            return ""
        start = _NAMES_AT + index * _NAME_BYTES
        text = self._memory[start : start + _NAME_BYTES].rstrip(b"\0")
        self._names[index] = text.decode(errors="replace")
        return self._names[index]


def describe_memory(offer: MemoryOffer, stacks: str) -> str:
    """Returns a text from which a process finds the memory of its record.

    Args:
      offer: offer of memory of `NUM_BYTES`.
      stacks: path of a file to which it writes its Python stacks.
    """
    return f"{offer.token.hex()} {offer.path} {stacks}"


def _as_numbers(memory: mmap.mmap) -> "memoryview[int]":
    return memoryview(memory)[: sealed_memory.HEADER_BYTES].cast("Q")
