"""Watching: what does a launcher do about a process that the others wait for?

It has the memory of the records, and looks at them and at /proc a few times per second.
`jdp.watch.rules` judges. At an alarm all processes write their Python stacks, and a
file gets these and the last entries of all records.
"""

import contextlib
import dataclasses
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from jdp.launch import endings
from jdp.launch.endings import Exit
from jdp.launch.launcher_link import LauncherLink
from jdp.replicas import control_groups, sealed_memory, wire
from jdp.runtime import environment
from jdp.watch import (
    machine,
    position,
    record,
    report,
    rules,
    stacks,
    stall_file,
    words,
)
from jdp.watch.machine import ProcessPulse
from jdp.watch.position import Position
from jdp.watch.report import ProcessReport
from jdp.watch.rules import Stall

OnStall = Literal["log", "raise"]
STALLED_CODE = 79  # exit code of a job that a stall has ended.
_PERIOD_S = 0.25
_STACKS_S = 0.75  # for all processes to write their stacks.
_MOST_STACK_BYTES = 1 << 20
_REPORTS_PER_MESSAGE = 40  # of about 150 bytes.
_MOST_LINE, _MOST_NAME = 2000, 100  # characters from another host.
# A job ends only when an alarm has lasted: a process may come back, such as from a
# checkpoint that it alone writes. By default, it is `timeout_s` of `jdp.init`.
_LIMITS_TO_END = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Limits of the watch of a job.

    Raises:
      ValueError: an option is out of its range.
    """

    stall_s: float = 10.0  # beyond the median step; 0.0: no alarms.
    on_stall: OnStall = "raise"
    folder: str = ""  # for files about stalls; "": the system's for temporary files.

    def __post_init__(self) -> None:
        if not 0.0 <= self.stall_s < float("inf"):
            raise ValueError(
                f"`stall_s` must be a number of seconds, 0 or more, got {self.stall_s}."
            )
        if self.on_stall not in ("log", "raise"):
            raise ValueError(
                f"`on_stall` must be 'log' or 'raise', got {self.on_stall!r}."
            )


class _Reports(msgspec.Struct, frozen=True, tag="reports"):
    """Reports of one host, to host 0."""

    host_name: str
    reports: tuple[ProcessReport, ...]


class _Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Request of host 0: all processes write their stacks."""


class _Lines(msgspec.Struct, frozen=True, tag="lines"):
    """Lines of host 0 that all hosts show."""

    lines: tuple[str, ...]
    is_alarm: bool  # whether the hosts then write the file about it.


_Message = _Reports | _Ask | _Lines
_DECODER = msgspec.msgpack.Decoder(_Message)


class Watched(NamedTuple):
    """Memory of one process."""

    reader: record.RecordReader
    record_fd: int
    stacks_fd: int
    environ: str


class Watch:
    """Watch of the processes of this host."""

    def __init__(
        self,
        options: WatchOptions,
        *,
        num_processes: int,
        show: Callable[[str], None],
        host: int = 0,
        link: LauncherLink | None = None,
    ) -> None:
        """Makes nothing yet.

        Args:
          options: limits.
          num_processes: number of processes of the job, on all hosts.
          show: shows a line in the output and in the log of every process.
          host: index of this host.
          link: link to the launchers of other hosts, to which host 0 reports.
        """
        self._options, self._host, self._link = options, host, link
        self._show = show
        self._host_names = {host: socket.gethostname()}
        self._num_processes = num_processes
        self._watched: dict[int, Watched] = {}
        self._pulses: dict[int, ProcessPulse] = {}
        self._pids: dict[int, int] = {}
        self._positions: dict[int, Position] = {}
        self._ends: dict[int, str] = {}
        self._look_at_s = 0.0
        self._state = rules.start(self._as_rules(), now_s=time.monotonic())
        self._alarms: list[Stall] = []  # that wait for the stacks.
        self._alarm_at_s: float | None = None
        self._num_files = 0
        self._groups = tuple(
            str(folder)
            for folder in control_groups.find_folders(
                control_groups.read_own(), "memory"
            )
        )
        self._num_oom_kills = machine.count_oom_kills(self._groups)

    def environ(self, process_id: int) -> dict[str, str]:
        """Makes the memory of a process; returns what tells the process about it."""
        if self._num_processes == 1:
            return {}
        if process_id not in self._watched:
            try:
                self._watched[process_id] = _make_memory(process_id)
            except OSError:  # There is no memory: the job runs without a watch.
                return {}
        return {environment.RECORD: self._watched[process_id].environ}

    def add(self, process_id: int, pid: int) -> None:
        """Begins to watch a process that was started."""
        now_ns = time.monotonic_ns()
        self._pids[process_id] = pid
        self._pulses[process_id] = ProcessPulse(pid, now_ns=now_ns)
        self._positions[process_id] = Position()
        self._ends.pop(process_id, None)

    def note_end(self, process_id: int, returncode: int) -> None:
        """Notes that a process has ended."""
        end = endings.describe_exit(Exit(process_id, returncode))
        self._ends[process_id] = end.removeprefix(f"process {process_id} ")
        if returncode != -9:
            return
        count = machine.count_oom_kills(self._groups)
        if count > self._num_oom_kills:
            self._num_oom_kills = count
            self._show(
                f"process {process_id} was killed by SIGKILL when this host ran out of "
                "memory: the kernel has killed a process for it. Use smaller batches, "
                "fewer processes, or a host with more memory."
            )

    def look(self, *, keyboard: int | None = None) -> Exit | None:
        """Looks at all processes, at most once per period.

        Args:
          keyboard: the process that reads from the keyboard, if any.

        Returns:
          The end that a stall causes; None: the job goes on.
        """
        now_s = time.monotonic()
        if now_s < self._look_at_s or not self._watched or not self._options.stall_s:
            return None
        self._look_at_s = now_s + _PERIOD_S
        reports = self._make_reports(keyboard)
        self._state = rules.receive(self._state, reports, now_s=now_s)
        for message in self._take_messages():
            self._act_on(message, now_s)
        if self._link is not None and self._host != 0:
            name = self._host_names[self._host]
            for i in range(0, len(reports), _REPORTS_PER_MESSAGE):
                part = tuple(reports[i : i + _REPORTS_PER_MESSAGE])
                self._send(_Reports(name, part))
            return None
        return self._judge(now_s)

    def _judge(self, now_s: float) -> Exit | None:
        """Says what the reports of all hosts mean."""
        self._state, findings = rules.tick(self._state, now_s=now_s)
        texts = [words.describe_excused(stall) for stall in findings.excused]
        texts += [words.describe_resumed(resumed) for resumed in findings.resumed]
        if texts:
            self._show_everywhere(texts, is_alarm=False)
        if findings.begun:
            self._alarms += findings.begun
            if self._alarm_at_s is None:
                self._ask_for_stacks()
                self._send(_Ask())
                self._alarm_at_s = now_s + _STACKS_S
        if self._alarm_at_s is not None and now_s >= self._alarm_at_s:
            self._tell()
        return self._find_end(findings.lasting)

    def _take_messages(self) -> list[_Message]:
        """Returns the messages of other hosts."""
        found = []
        for body in [] if self._link is None else self._link.take_told():
            with contextlib.suppress(wire.DecodeError):
                found.append(wire.decode_with(_DECODER.decode, body))
        return found

    def _act_on(self, message: _Message, now_s: float) -> None:
        if isinstance(message, _Ask):
            self._ask_for_stacks()
        elif isinstance(message, _Lines):
            for line in message.lines:
                self._show(wire.printable(line, most=_MOST_LINE))
            if message.is_alarm:
                self._write_file(message.lines, self._read_stacks())
        elif self._host == 0:
            others = set(range(self._num_processes)) - self._watched.keys()
            reports = [each for each in message.reports if each.process in others]
            name = wire.printable(message.host_name, most=_MOST_NAME)
            self._host_names |= {each.host: name for each in reports}
            self._state = rules.receive(self._state, reports, now_s=now_s)

    def _send(self, message: _Message) -> None:
        if self._link is not None:
            self._link.tell(msgspec.msgpack.encode(message))

    def _show_everywhere(self, texts: Sequence[str], *, is_alarm: bool) -> None:
        lines = tuple(wire.printable(text, most=_MOST_LINE) for text in texts)
        for line in lines:
            self._show(line)
        self._send(_Lines(lines, is_alarm))

    def close(self) -> None:
        """Frees the memory."""
        while self._watched:
            _, watched = self._watched.popitem()
            os.close(watched.record_fd)
            os.close(watched.stacks_fd)

    def _as_rules(self) -> rules.WatchOptions:
        return rules.WatchOptions(self._options.stall_s, self._num_processes)

    def _make_reports(self, keyboard: int | None) -> list[ProcessReport]:
        reports = []
        for process_id, pulse in self._pulses.items():
            watched = self._watched.get(process_id)
            if watched is None:
                continue
            now_ns = time.monotonic_ns()
            facts = pulse.look(
                now_ns=now_ns,
                end=self._ends.get(process_id, ""),
                has_keyboard=process_id == keyboard,
            )
            followed = position.follow(
                self._positions[process_id], watched.reader.read()
            )
            self._positions[process_id] = followed
            beat_ns = watched.reader.beat_ns if watched.reader.pid else 0
            reports.append(
                report.make(
                    *(process_id, self._host, followed, facts),
                    now_ns=now_ns,
                    beat_ns=beat_ns,
                )
            )
        return reports

    def _ask_for_stacks(self) -> None:
        """Makes all processes that run write their Python stacks."""
        for process_id, watched in self._watched.items():
            signum, pid = watched.reader.dump_signal, self._pids.get(process_id)
            os.ftruncate(watched.stacks_fd, 0)
            if signum and pid and process_id not in self._ends:
                if machine.has_handler(pid, signum):
                    os.kill(pid, signum)

    def _read_stacks(self) -> dict[int, str]:
        found = {}
        for process_id, watched in self._watched.items():
            data = os.pread(watched.stacks_fd, _MOST_STACK_BYTES, 0)
            found[process_id] = data.decode(errors="replace")
        return found

    def _tell(self) -> None:
        """Shows the alarms, and writes the file about them."""
        alarms, self._alarms, self._alarm_at_s = self._alarms, [], None
        found = self._read_stacks()
        texts = []
        for stall in alarms:
            frame = stacks.find_frame(found.get(stall.process, ""))
            stall = words.with_frame(stall, frame)
            texts.append(words.describe(stall, self._host_names))
        self._show_everywhere(texts, is_alarm=True)
        self._write_file(texts, found)

    def _write_file(self, texts: Sequence[str], found: Mapping[int, str]) -> None:
        """Writes the file about alarms, with the stacks and records of this host."""
        self._num_files += 1
        folder = self._options.folder or tempfile.gettempdir()
        entries = {i: each.reader.read_all() for i, each in self._watched.items()}
        reports = [seen.report for seen in self._state.seen.values()]
        text = stall_file.compose(texts, reports, found, entries)
        path = os.path.join(folder, f"jdp_stall_{os.getpid()}_{self._num_files}.txt")
        try:
            stall_file.write(path, text)
        except OSError as error:
            self._show(f"the file about the stall cannot be written: {error}.")
        else:
            self._show(f"the stacks and the last steps of all processes are in {path}.")

    def _find_end(self, lasting: tuple[Stall, ...]) -> Exit | None:
        """Returns the end of the job by a stall that has lasted for too long."""
        if self._options.on_stall != "raise" or self._alarm_at_s is not None:
            return None
        limit_s = _LIMITS_TO_END * self._options.stall_s
        for stall in lasting:
            # `jdp.init` has a limit of its own, which the program chooses.
            is_init = all(q.place == "init" for q in stall.waiting)
            if stall.process >= 0 and stall.waited_s > limit_s and not is_init:
                text = words.describe(stall, self._host_names).split(";")[0]
                note = f"{text}; the others have waited {stall.waited_s:.0f} s for it"
                note = wire.printable(note, most=_MOST_LINE)
                return Exit(stall.process, STALLED_CODE, note=note)
        return None


class NoWatch:
    """Stands for a watch in jobs that have none."""

    def environ(self, process_id: int) -> dict[str, str]:
        """See `Watch`."""
        del process_id
        return {}

    def add(self, process_id: int, pid: int) -> None:
        """See `Watch`."""

    def note_end(self, process_id: int, returncode: int) -> None:
        """See `Watch`."""

    def look(self, *, keyboard: int | None = None) -> None:
        """See `Watch`."""

    def close(self) -> None:
        """See `Watch`."""


def _make_memory(process_id: int) -> Watched:
    """Makes the memory for the record of a process, and for its stacks."""
    label = f"jdp record {process_id}"
    memory, fd, offer = sealed_memory.make_memory(record.NUM_BYTES, label=label)
    try:
        stacks_fd = os.memfd_create(f"jdp stacks {process_id}", os.MFD_CLOEXEC)
        os.fchmod(stacks_fd, 0o600)
    except OSError:
        os.close(fd)
        raise
    text = record.describe_memory(offer, f"/proc/{os.getpid()}/fd/{stacks_fd}")
    return Watched(record.RecordReader(memory), fd, stacks_fd, text)
