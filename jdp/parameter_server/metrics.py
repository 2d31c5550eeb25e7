"""Metrics: which events do servers count, and how are they shown?"""

import contextlib
import dataclasses
import io
import json
import os
import sys
from collections import Counter
from typing import Annotated, Any, Literal, Protocol, TypedDict

import msgspec
from msgspec import Meta

from jdp.parameter_server import keys
from jdp.replicas import wire

Report = Literal["", "table", "json"]
_Count = Annotated[int, Meta(ge=0, le=1 << 60)]
_Word = Annotated[str, Meta(pattern=r"^[a-z0-9]{1,20}\Z")]
_RATE_WINDOW_S = 5.0  # window of the mean of updates per second.


@dataclasses.dataclass
class Metrics:
    """Counters of one server.

    Attributes:
      num_pushed_bytes, num_pulled_bytes: bytes of arrays, by socket or shared memory.
      staleness: number of updates by staleness.
    """

    num_pushed_bytes: int = 0
    num_pulled_bytes: int = 0
    num_pulls: int = 0
    staleness: Counter[int] = dataclasses.field(default_factory=Counter)
    _times_s: list[float] = dataclasses.field(default_factory=list)

    def note_update(self, staleness: int, *, now_s: float) -> None:
        """Counts an update."""
        self.staleness[staleness] += 1
        self._times_s.append(now_s)
        while self._times_s[0] < now_s - _RATE_WINDOW_S:
            self._times_s.pop(0)

    def find_rate(self, *, now_s: float) -> float:
        """Returns updates per second, over the last seconds."""
        times = [t for t in self._times_s if t >= now_s - _RATE_WINDOW_S]
        if not times:
            return 0.0
        return len(times) / min(_RATE_WINDOW_S, max(now_s - times[0], 1e-3))

    def summarize(
        self,
        *,
        version: str,
        counts: dict[Any, int],
        num_workers: int,
        num_waiting: int,
        num_refused: int,
        now_s: float,
    ) -> "ReportLine":
        """Returns one line of the report.

        Args:
          version: version of the parameters, as "epoch.count".
          counts: number of pushes by outcome.
          num_workers: number of workers that take part.
          num_waiting: number of unsettled pushes.
          num_refused: number of refused messages and workers.
          now_s: the time of a monotonic clock.
        """
        return {
            "version": version,
            "updates": sum(self.staleness.values()),
            "updates_per_s": round(self.find_rate(now_s=now_s), 2),
            "workers": num_workers,
            "queue": num_waiting,
            "pushes": dict(counts),
            "refused": num_refused,
            "pulls": self.num_pulls,
            "pushed_bytes": self.num_pushed_bytes,
            "pulled_bytes": self.num_pulled_bytes,
            "staleness": {str(k): n for k, n in sorted(self.staleness.items())},
        }


class ReportLine(TypedDict):
    """One line of the report, as `Metrics.summarize` makes it."""

    version: Annotated[str, Meta(pattern=r"^[0-9]{1,20}\.[0-9]{1,20}\Z")]
    updates: _Count
    updates_per_s: Annotated[float, Meta(ge=0, le=1e12)]
    workers: _Count
    queue: _Count
    pushes: dict[_Word, _Count]
    refused: _Count
    pulls: _Count
    pushed_bytes: _Count
    pulled_bytes: _Count
    staleness: dict[_Word, _Count]


_decode_line = msgspec.json.Decoder(ReportLine).decode


def decode_line(data: bytes) -> ReportLine:
    """Returns the line that a server has sent to the launcher.

    Raises:
      wire.DecodeError: the data is not a line of a report.
    """
    return wire.decode_with(_decode_line, data)


class Reporter(Protocol):
    """Output of a report."""

    def show(self, line: ReportLine) -> None:
        """Shows a line."""
        ...

    def close(self) -> None:
        """Closes the output."""
        ...


def open_reporter(kind: Report) -> Reporter | None:
    """Opens a live table, or JSON on stdout; returns None for neither.

    The launcher draws the table if it has a terminal.
    """
    if kind == "json":
        return _JsonReporter()
    if kind == "table":
        display_fd = os.environ.get(keys.DISPLAY_FD)
        return _TableReporter() if display_fd is None else _Sender(int(display_fd))
    return None


class _JsonReporter:
    def show(self, line: ReportLine) -> None:
        print(json.dumps(line), flush=True)

    def close(self) -> None:
        pass


class _Sender:
    """Sends lines to the launcher; a slow terminal misses some."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def show(self, line: ReportLine) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, json.dumps(line).encode())

    def close(self) -> None:
        pass


class _TableReporter:
    """A table that is redrawn in place; without a terminal, drawn once at the end."""

    def __init__(self) -> None:
        import rich.console
        import rich.live

        console = rich.console.Console(file=sys.stderr)
        self._live = rich.live.Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, line: ReportLine) -> None:
        self._live.update(make_table(line), refresh=True)

    def close(self) -> None:
        self._live.stop()


def render_table(line: ReportLine, *, num_columns: int) -> list[bytes]:
    """Returns the rows of the table, with the escape codes of a terminal."""
    import rich.console

    file = io.StringIO()
    console = rich.console.Console(file=file, force_terminal=True, width=num_columns)
    console.print(make_table(line))
    return file.getvalue().encode().splitlines()


def make_table(line: ReportLine) -> Any:
    """Returns a line of the report as a table of rich."""
    import rich.table

    table = rich.table.Table(title=f"parameter server, version {line['version']}")
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in (
        ("updates", line["updates"]),
        ("updates per second", line["updates_per_s"]),
        ("workers", line["workers"]),
        ("queue", line["queue"]),
        ("pulls", line["pulls"]),
    ):
        table.add_row(name, f"{value:,}")
    table.add_row("messages refused", f"{line['refused']:,}")
    for outcome, count in line["pushes"].items():
        table.add_row(f"pushes {outcome}", f"{count:,}")
    for name, value in (
        ("pushed MB", line["pushed_bytes"]),
        ("pulled MB", line["pulled_bytes"]),
    ):
        table.add_row(name, f"{value / 1e6:,.1f}")
    total = max(1, sum(line["staleness"].values()))
    for staleness, count in line["staleness"].items():
        bar = "█" * round(20 * count / total)
        table.add_row(f"staleness {staleness}", f"{bar} {count:,}")
    return table
