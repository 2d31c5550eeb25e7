"""Stall file: what is written about a stall, and how does it read?"""

import os
import pathlib
from collections.abc import Mapping, Sequence

from jdp.replicas import stamps
from jdp.watch.process_report import ProcessReport
from jdp.watch.record import Entry

_MOST_ENTRIES = 200  # of each process.
_NAMES = {
    value: name.lower().replace("_", " ")
    for name, value in vars(stamps).items()
    if name.isupper() and isinstance(value, int)
}


def compose(
    texts: Sequence[str],
    reports: Sequence[ProcessReport],
    stacks: Mapping[int, str],
    entries: Mapping[int, Sequence[Entry]],
) -> str:
    """Returns the text of the file.

    Args:
      texts: descriptions of the stalls.
      reports: reports about all processes.
      stacks: Python stacks by process.
      entries: entries of the records by process, on the clock of this host.
    """
    parts = ["# Stalls", *texts, "", "# Processes"]
    parts += [_describe(report) for report in reports]
    for process, text in sorted(stacks.items()):
        parts += ["", f"# Python stacks of process {process}"]
        parts.append(
            text.rstrip() or "None: it is stopped, gone, or before `jdp.init`."
        )
    parts += ["", "# Last entries of all records: seconds before the last, process"]
    merged = sorted(
        (entry, process)
        for process, each in entries.items()
        for entry in each[-_MOST_ENTRIES:]
    )
    last_ns = merged[-1][0].at_ns if merged else 0
    parts += [_format(entry, process, last_ns) for entry, process in merged]
    return "\n".join(parts) + "\n"


def write(path: str, text: str) -> None:
    """Writes a new file, readable by this user alone: stacks may reveal the program.

    Raises:
      OSError: it cannot be written, or exists.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(pathlib.Path(path), flags, 0o600), "w") as file:
        file.write(text)


def _describe(report: ProcessReport) -> str:
    text = (
        f"process {report.process}, host {report.host}: {report.state}, in "
        f"{report.place} for {report.place_s:.2f} s; steps begun {report.begun}, "
        f"reached {report.reached}, finished {report.finished}"
    )
    if report.wait is not None:
        wait = report.wait
        text += f"; waits for {wait.kind} {wait.number} {wait.name!r}"
        text += f" since {wait.waited_s:.2f} s"
    return f"{text}; {report.end}" if report.end else text


def _format(entry: Entry, process: int, last_ns: int) -> str:
    at_s = (entry.at_ns - last_ns) * 1e-9
    kind = _NAMES.get(entry.kind, str(entry.kind))
    return f"{at_s:12.6f} {process:4} {kind} {entry.number} {entry.name}".rstrip()
