"""Status: what does a job do now, in a form that can be shown and sent?"""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator

import msgspec

from jdp.watch.process_report import Place, ProcessReport, State
from jdp.watch.stragglers import StepShares, Stragglers

FILE_NAME = "status.json"
_MOST_BYTES = 1 << 24


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one process.

    Attributes:
      process: index of the process.
      host: name of its host.
      place: where its main thread is; see docs/when_it_hangs.md.
      place_s: for how long, in seconds.
      state: "well", "stopped", "traced", "deaf", "prompt", "gone" or "unheard".
      step: number of steps that it has begun, of all steps together.
      recent: mean of the last steps, which count less the longer ago they are.
      last_100: mean of the last 100 steps.
      slow_since: the step since which it is slower than the others; 0: it is not.
    """

    process: int
    host: str
    place: Place
    place_s: float
    state: State
    step: int
    recent: StepShares
    last_100: StepShares
    slow_since: int


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a job.

    Attributes:
      at_s: when this was so, in seconds since the epoch.
      pid: the process that knows it: the launcher, or process 0 without a launcher.
      processes: all processes of the job that were heard of, by index.
      alarms: the last alarms, as printed.
    """

    at_s: float
    pid: int
    processes: tuple[ProcessStatus, ...]
    alarms: tuple[str, ...] = ()


def make_row(
    report: ProcessReport, host_name: str, stragglers: Stragglers
) -> ProcessStatus:
    """Makes the status of a process.

    Args:
      report: report about it.
      host_name: name of its host.
      stragglers: the comparison of the processes.
    """
    process = report.process
    return ProcessStatus(
        process=process,
        host=host_name,
        place=report.place,
        place_s=report.place_s,
        state=report.state,
        step=report.begun,
        recent=stragglers.ewma(process),
        last_100=stragglers.mean(process),
        slow_since=stragglers.slow_since(process),
    )


def write(folder: str, status: JobStatus) -> None:
    """Replaces the status in a folder; a full disk, or no folder, changes nothing."""
    if not folder:
        return
    path = pathlib.Path(folder, FILE_NAME)
    with contextlib.suppress(OSError):
        fd, name = tempfile.mkstemp(dir=folder)
        try:
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(status))
            os.replace(name, path)
        except OSError:
            os.unlink(name)


def read(folder: str | os.PathLike[str]) -> JobStatus:
    """Reads the status in a folder.

    Raises:
      OSError: there is none.
      ValueError: the file is not a status.
    """
    with open(pathlib.Path(folder, FILE_NAME), "rb") as file:
        return msgspec.json.decode(file.read(_MOST_BYTES), type=JobStatus)


def find_all(folders: Iterator[str]) -> list[JobStatus]:
    """Returns the statuses of jobs that run, the newest last.

    Args:
      folders: folders that may have a status.
    """
    found = []
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            status = read(folder)
            os.kill(status.pid, 0)
            found.append(status)
    return sorted(found, key=lambda status: status.pid)
