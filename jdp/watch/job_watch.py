"""Job watch: what is said and done about a process that the others wait for?

Every host has one; the one of host 0 judges. At an alarm all processes write their
Python stacks, and a file gets these and the last entries of all records.
"""

import contextlib
import dataclasses
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from jdp.replicas import wire
from jdp.watch import clock, messages, rules, stacks, stall_file, status, words
from jdp.watch.clock import ClockState
from jdp.watch.local_processes import LocalProcesses
from jdp.watch.messages import Message, Told
from jdp.watch.record import Entry
from jdp.watch.rules import Stall
from jdp.watch.status import JobStatus, ProcessStatus
from jdp.watch.stragglers import Stragglers

OnStall = Literal["log", "raise"]
STALLED_CODE = 79  # exit code of a job that a stall has ended.
PERIOD_S = 0.25
_STATUS_S = 1.0  # between two.
_STACKS_S = 0.75  # for all processes to write their stacks.
_PARTS_S = 0.5  # after that, for the other hosts to send them.
_PING_S = 2.0
_MOST_LINE, _MOST_NAME = 2000, 100  # characters from another host.
_MOST_ALARMS = 5  # that the status has.
# Characters and entries of a process of another host.
_MOST_STACKS, _MOST_ENTRIES = 1 << 16, 1 << 10
_MOST_SAMPLES = 64  # of all processes, at a look.
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
        is_number = isinstance(self.stall_s, int | float)
        if not (is_number and 0.0 <= self.stall_s < float("inf")):
            raise ValueError(
                "`stall_s` must be a number of seconds, 0 or more, got "
                f"{self.stall_s!r}."
            )
        if self.on_stall not in ("log", "raise"):
            raise ValueError(
                f"`on_stall` must be 'log' or 'raise', got {self.on_stall!r}."
            )


class StallEnd(NamedTuple):
    """The end of a job that a stall causes."""

    process: int
    note: str


class Outlets(NamedTuple):
    """Where a watch speaks.

    Attributes:
      show: shows a line in the output and in the log of every process of this host.
      publish: takes the status of the job, about once per second.
      tell: sends a message to host 0, or from it to all; None: there is one host.
      has_launchers: whether launchers watch, not the processes themselves.
    """

    show: Callable[[str], None]
    publish: Callable[[JobStatus], None] = lambda _: None
    tell: Callable[[bytes], None] | None = None
    has_launchers: bool = True


class _Alarm:
    """Alarms that wait for stacks, and the stacks and records of other hosts."""

    def __init__(self) -> None:
        self.stalls: list[Stall] = []
        self.at_s: float | None = None
        self.stacks: dict[int, str] = {}
        self.entries: dict[int, list[Entry]] = {}


class JobWatch:
    """Watch of one host over the job."""

    def __init__(
        self,
        options: WatchOptions,
        local: LocalProcesses,
        outlets: Outlets,
        *,
        num_processes: int,
        host: int = 0,
    ):
        """Begins without a report.

        Args:
          options: limits.
          local: the processes of this host.
          outlets: where it speaks.
          num_processes: number of processes of the job, on all hosts.
          host: index of this host.
        """
        self._options, self._local, self._outlets = options, local, outlets
        self._num_processes, self._host = num_processes, host
        self._host_name = socket.gethostname()
        self._host_names = {host: self._host_name}
        limits = rules.WatchOptions(options.stall_s, num_processes)
        self._state = rules.start(limits, now_s=time.monotonic())
        self._stragglers = Stragglers(num_processes)
        self._alarm = _Alarm()
        self._alarms: list[str] = []
        self._num_files = 0
        self._clock, self._boot_id = ClockState(), clock.read_boot_id()
        self._ping_at_s = self._status_at_s = 0.0
        self._rows: dict[int, ProcessStatus] = {}
        self.heard_s: float | None = None  # when host 0 was heard last; None: not yet.
        self.has_ended = False  # Host 0 watches no longer.
        self._end: StallEnd | None = None

    @property
    def offset_ns(self) -> int:
        """Difference to add to a time here, for the clock of host 0, in nanoseconds."""
        return self._clock.offset_ns

    def look(
        self, told: Iterable[Told] = (), *, keyboard: int | None = None
    ) -> StallEnd | None:
        """Looks at all processes of this host; called every `PERIOD_S`.

        Args:
          told: messages of the other hosts since the last call.
          keyboard: the process that reads from the keyboard, if any.

        Returns:
          The end that a stall causes; None: the job goes on.
        """
        now_s = time.monotonic()
        reports = self._local.look(keyboard=keyboard)
        self._state = rules.receive(self._state, reports, now_s=now_s)
        samples = self._local.take_samples(max(2, _MOST_SAMPLES // self._num_processes))
        for each in told:
            with contextlib.suppress(wire.DecodeError):
                self._act_on(messages.decode(each.body), each.at_ns)
        if self._host != 0:
            self._tell_all(messages.split_reports(self._host, self._host_name, reports))
            self._tell_all(messages.split_samples(samples, self._clock.offset_ns))
            self._ask_for_time(now_s)
            if self._alarm.at_s is not None and now_s >= self._alarm.at_s:
                self._alarm.at_s = None
                self._tell_records()
            return self._end
        for process, each in samples.items():
            self._stragglers.add(process, each)
        return self._judge(now_s)

    def leave(self) -> None:
        """Says that the processes of this host have left, and host 0 its watch."""
        reports = [
            msgspec.structs.replace(report, place="end", wait=None)
            for report in self._local.look()
        ]
        self._tell_all(messages.split_reports(self._host, self._host_name, reports))
        if self._host == 0:
            self._tell(messages.Rows((), is_last=True))

    def _judge(self, now_s: float) -> StallEnd | None:
        """Says what the reports of all hosts mean."""
        self._state, findings = rules.tick(self._state, now_s=now_s)
        if not self._options.stall_s:
            findings = rules.Findings()
        texts = [words.describe_excused(stall) for stall in findings.excused]
        texts += [words.describe_resumed(resumed) for resumed in findings.resumed]
        texts += map(words.describe_straggler, self._stragglers.take_found())
        if texts:
            self._show_everywhere(texts, is_alarm=False)
        alarm = self._alarm
        if findings.begun:
            alarm.stalls += findings.begun
            if alarm.at_s is None:
                self._local.ask_for_stacks()
                self._tell(messages.Ask())
                alarm.at_s = now_s + _STACKS_S
                alarm.at_s += 0.0 if self._outlets.tell is None else _PARTS_S
        if alarm.at_s is not None and now_s >= alarm.at_s:
            self._show_alarm()
        if now_s >= self._status_at_s:
            self._status_at_s = now_s + _STATUS_S
            self._publish()
        return self._find_end(findings.lasting)

    def _act_on(self, message: Message, came_ns: int) -> None:
        now_s = time.monotonic()
        match message:
            case messages.Reports() | messages.Samples() | messages.Part():
                if self._host == 0:
                    self._take(message, now_s)
            case messages.Ping(host, sent_ns):
                if self._host == 0:
                    sent = came_ns, time.monotonic_ns(), self._boot_id
                    self._tell(messages.Pong(host, sent_ns, *sent))
            case messages.Ask():
                self._local.ask_for_stacks()
                self._alarm.at_s = now_s + _STACKS_S
            case messages.Pong() if message.host == self._host:
                self._take_time(message, came_ns)
            case messages.Lines(lines, is_alarm):
                for line in lines:
                    self._outlets.show(wire.printable(line, most=_MOST_LINE))
                if is_alarm and self._outlets.has_launchers:
                    stacks_found = self._local.read_stacks()
                    self._write_file(lines, stacks_found, self._local.read_entries())
            case messages.Rows(rows, is_last):
                self.heard_s, self.has_ended = now_s, is_last
                self._rows |= {row.process: _cleaned(row) for row in rows}
                self._publish_rows()
            case messages.Stop(process, note):
                self._end = StallEnd(process, wire.printable(note, most=_MOST_LINE))

    def _take_time(self, pong: messages.Pong, came_ns: int) -> None:
        if pong.boot_id and pong.boot_id == self._boot_id:
            return  # It is the same clock.
        self._clock = clock.measure(
            self._clock,
            sent_ns=pong.sent_ns,
            received_there_ns=pong.received_there_ns,
            sent_there_ns=pong.sent_there_ns,
            received_ns=came_ns,
        )

    def _take(
        self, message: messages.Reports | messages.Samples | messages.Part, now_s: float
    ) -> None:
        """Takes what another host says of its processes."""
        others = set(range(self._num_processes)) - set(self._local.processes)
        if isinstance(message, messages.Reports):
            reports = [each for each in message.reports if each.process in others]
            name = wire.printable(message.host_name, most=_MOST_NAME)
            self._host_names |= {each.host: name for each in reports}
            self._state = rules.receive(self._state, reports, now_s=now_s)
        elif message.process not in others:
            return
        elif isinstance(message, messages.Samples):
            self._stragglers.add(
                message.process, message.samples, offset_ns=message.offset_ns
            )
        elif self._alarm.at_s is not None:
            self._take_part(message)

    def _take_part(self, part: messages.Part) -> None:
        alarm, process = self._alarm, part.process
        text = alarm.stacks.get(process, "") + part.stacks
        alarm.stacks[process] = text[:_MOST_STACKS]
        entries = alarm.entries.setdefault(process, [])
        for entry in part.entries[: _MOST_ENTRIES - len(entries)]:
            at_ns, name = entry.at_ns + part.offset_ns, wire.printable(entry.name)
            entries.append(entry._replace(at_ns=at_ns, name=name))

    def _tell(self, message: Message) -> None:
        if self._outlets.tell is not None:
            self._outlets.tell(messages.encode(message))

    def _tell_all(self, some: Iterable[Message]) -> None:
        for message in some:
            self._tell(message)

    def _ask_for_time(self, now_s: float) -> None:
        if now_s >= self._ping_at_s:
            self._ping_at_s = now_s + _PING_S
            self._tell(messages.Ping(self._host, time.monotonic_ns()))

    def _tell_records(self) -> None:
        """Sends stacks and records to host 0."""
        found = self._local.read_stacks()
        for process, entries in self._local.read_entries().items():
            record = self._clock.offset_ns, found.get(process, ""), entries
            self._tell_all(messages.split_record(process, *record))

    def _show_everywhere(self, texts: Sequence[str], *, is_alarm: bool) -> None:
        lines = tuple(wire.printable(text, most=_MOST_LINE) for text in texts)
        for line in lines:
            self._outlets.show(line)
        self._alarms = [*self._alarms, *lines][-_MOST_ALARMS:]
        self._tell(messages.Lines(lines, is_alarm))

    def _show_alarm(self) -> None:
        """Shows the alarms, and writes the file about them."""
        alarm, self._alarm = self._alarm, _Alarm()
        found = {i: _clean_lines(text) for i, text in alarm.stacks.items()}
        found |= self._local.read_stacks()
        texts = []
        for stall in alarm.stalls:
            frame = stacks.find_frame(found.get(stall.process, ""))
            texts.append(self._describe(words.with_frame(stall, frame)))
        self._show_everywhere(texts, is_alarm=True)
        entries = alarm.entries | self._local.read_entries()
        self._write_file(texts, found, entries)

    def _describe(self, stall: Stall) -> str:
        has_launchers = self._outlets.has_launchers
        return words.describe(stall, self._label_hosts(), has_launchers=has_launchers)

    def _label_hosts(self) -> dict[int, str]:
        """Returns what to call each host, where there are several."""
        if self._outlets.has_launchers:
            return {i: f"{i} ({name})" for i, name in self._host_names.items()}
        return self._host_names if len(set(self._host_names.values())) > 1 else {}

    def _write_file(
        self,
        texts: Sequence[str],
        found: Mapping[int, str],
        entries: Mapping[int, Sequence[Entry]],
    ) -> None:
        self._num_files += 1
        folder = self._options.folder or tempfile.gettempdir()
        reports = [seen.report for seen in self._state.seen.values()]
        text = stall_file.compose(texts, reports, found, entries)
        path = os.path.join(folder, f"jdp_stall_{os.getpid()}_{self._num_files}.txt")
        try:
            stall_file.write(path, text)
        except OSError as error:
            self._outlets.show(f"the file about the stall cannot be written: {error}.")
            return
        whose = "all processes" if self._host == 0 else "the processes of this host"
        self._outlets.show(f"the stacks and the last steps of {whose} are in {path}.")

    def _publish(self) -> None:
        """Tells the status of the job to all hosts."""
        for seen in self._state.seen.values():
            name = self._host_names.get(seen.report.host, "")
            row = status.make_row(seen.report, name, self._stragglers)
            self._rows[row.process] = row
        rows = [self._rows[i] for i in sorted(self._rows)]
        self._tell_all(messages.split_rows(rows))
        self._publish_rows()

    def _publish_rows(self) -> None:
        rows = tuple(self._rows[i] for i in sorted(self._rows))
        self._outlets.publish(
            JobStatus(
                at_s=time.time(),
                pid=os.getpid(),
                processes=rows,
                alarms=tuple(self._alarms),
            )
        )

    def _find_end(self, lasting: tuple[Stall, ...]) -> StallEnd | None:
        """Returns the end of the job by a stall that has lasted for too long."""
        if self._options.on_stall != "raise" or self._alarm.at_s is not None:
            return None
        limit_s = _LIMITS_TO_END * self._options.stall_s
        for stall in lasting:
            # `jdp.init` has a limit of its own, which the program chooses.
            is_init = all(q.place == "init" for q in stall.waiting)
            if stall.process >= 0 and stall.waited_s > limit_s and not is_init:
                text = self._describe(stall).split(";")[0]
                note = f"{text}; the others have waited {stall.waited_s:.0f} s for it"
                note = wire.printable(note, most=_MOST_LINE)
                if not self._outlets.has_launchers:  # They tell each other.
                    self._tell(messages.Stop(stall.process, note))
                return StallEnd(stall.process, note)
        return None


def _cleaned(row: ProcessStatus) -> ProcessStatus:
    """Returns a row of another host, whose name can be printed."""
    return msgspec.structs.replace(row, host=wire.printable(row.host, most=_MOST_NAME))


def _clean_lines(text: str) -> str:
    return "\n".join(map(wire.printable, text.splitlines()))
