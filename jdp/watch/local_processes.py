"""Local processes: what does the watcher of a host know of the processes there?

It has the memory of their records, and asks /proc.
"""

import faulthandler
import os
import time
from typing import NamedTuple

from jdp.replicas import sealed_memory
from jdp.watch import machine, position, process_report, record, shares
from jdp.watch.machine import ProcessPulse
from jdp.watch.position import Position
from jdp.watch.process_report import ProcessReport
from jdp.watch.record import Entry
from jdp.watch.shares import SharesState, StepSample

_MOST_STACK_BYTES = 1 << 20
_MOST_ENTRIES_KEPT = 1 << 16  # of a process, for a reader that comes later.


class RecordMemory(NamedTuple):
    """Memory of the record of one process, and of its stacks."""

    reader: record.RecordReader
    record_fd: int
    stacks_fd: int
    text: str  # see `record.describe_memory`.


class _Watched:
    """State of one process."""

    def __init__(self, pid: int, now_ns: int):
        self.pid = pid
        self.pulse = ProcessPulse(pid, now_ns=now_ns)
        self.position = Position()
        self.shares = SharesState()
        self.end = ""


class LocalProcesses:
    """The processes of this host."""

    def __init__(self, host: int, *, keeps_entries: bool = False):
        """Begins without a process.

        Args:
          host: index of this host.
          keeps_entries: whether `take_entries` returns the entries that were read.
        """
        self._host, self._keeps_entries = host, keeps_entries
        self._memories: dict[int, RecordMemory] = {}
        self._watched: dict[int, _Watched] = {}
        self._samples: dict[int, list[StepSample]] = {}
        self._entries: dict[int, list[Entry]] = {}

    @property
    def processes(self) -> list[int]:
        """Indices of the processes that have a record."""
        return list(self._memories)

    def make_memory(self, process: int) -> str:
        """Makes the memory of a process; returns what tells the process about it.

        Raises:
          OSError: there is no memory.
        """
        if process not in self._memories:
            self._memories[process] = _make_memory(process)
        return self._memories[process].text

    def add(self, process: int, pid: int) -> None:
        """Begins to watch a process that was started."""
        self._watched[process] = _Watched(pid, time.monotonic_ns())

    def note_end(self, process: int, end: str) -> None:
        """Notes how a process has ended, in words."""
        if process in self._watched:
            self._watched[process].end = end

    def look(self, *, keyboard: int | None = None) -> list[ProcessReport]:
        """Looks at all processes; returns the reports about them.

        Args:
          keyboard: the process that reads from the keyboard, if any.
        """
        reports = []
        for process, watched in self._watched.items():
            memory = self._memories.get(process)
            if memory is None:
                continue
            now_ns = time.monotonic_ns()
            facts = watched.pulse.look(
                now_ns=now_ns, end=watched.end, has_keyboard=process == keyboard
            )
            entries = memory.reader.read()
            watched.position = position.follow(watched.position, entries)
            watched.shares, samples = shares.follow(watched.shares, entries)
            self._samples.setdefault(process, []).extend(samples)
            if self._keeps_entries:
                kept = self._entries.setdefault(process, [])
                kept.extend(entries)
                del kept[:-_MOST_ENTRIES_KEPT]
            beat_ns = memory.reader.beat_ns if memory.reader.pid else 0
            place = process, self._host, watched.position, facts
            reports.append(process_report.make(*place, now_ns=now_ns, beat_ns=beat_ns))
        return reports

    def take_samples(self, most: int) -> dict[int, list[StepSample]]:
        """Returns samples of steps since the last call, by process.

        Args:
          most: most samples of a process.
        """
        samples, self._samples = self._samples, {}
        return {i: shares.thin(each, most) for i, each in samples.items() if each}

    def take_entries(self) -> dict[int, list[Entry]]:
        """Returns the entries that were read since the last call, by process."""
        entries, self._entries = self._entries, {}
        return entries

    def ask_for_stacks(self) -> None:
        """Makes all processes that run write their Python stacks."""
        for process, memory in self._memories.items():
            watched = self._watched.get(process)
            os.ftruncate(memory.stacks_fd, 0)
            signum = memory.reader.dump_signal
            if watched is None or watched.end:
                continue
            if watched.pid == os.getpid():
                # Not by the signal: its handler in the main thread would read frames
                # of this thread while that runs, and may crash.
                faulthandler.dump_traceback(memory.stacks_fd, all_threads=True)
            elif signum and machine.has_handler(watched.pid, signum):
                os.kill(watched.pid, signum)

    def read_stacks(self) -> dict[int, str]:
        """Returns the Python stacks that were written, by process."""
        found = {}
        for process, memory in self._memories.items():
            data = os.pread(memory.stacks_fd, _MOST_STACK_BYTES, 0)
            found[process] = data.decode(errors="replace")
        return found

    def read_entries(self) -> dict[int, list[Entry]]:
        """Returns all entries that the records have, by process."""
        return {i: each.reader.read_all() for i, each in self._memories.items()}

    def close(self) -> None:
        """Frees the memory."""
        while self._memories:
            _, memory = self._memories.popitem()
            os.close(memory.record_fd)
            os.close(memory.stacks_fd)


def _make_memory(process: int) -> RecordMemory:
    """Makes the memory for the record of a process, and for its stacks."""
    label = f"jdp record {process}"
    memory, fd, offer = sealed_memory.make_memory(record.NUM_BYTES, label=label)
    try:
        stacks_fd = os.memfd_create(f"jdp stacks {process}", os.MFD_CLOEXEC)
        os.fchmod(stacks_fd, 0o600)
    except OSError:
        os.close(fd)
        raise
    text = record.describe_memory(offer, f"/proc/{os.getpid()}/fd/{stacks_fd}")
    return RecordMemory(record.RecordReader(memory), fd, stacks_fd, text)
