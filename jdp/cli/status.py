"""`jdp status`: what do the processes of the jobs on this host do now?"""

import itertools
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
import rich.console
import rich.live
import rich.table
import rich.text
import typer

from jdp.runtime import private_folder
from jdp.watch import status
from jdp.watch.status import JobStatus, ProcessStatus

_PERIOD_S = 1.0
_OLD_S = 5.0


def show(
    job: Annotated[
        int | None,
        typer.Argument(
            metavar="PID",
            help="The `jdp launch` of the job; without it, all jobs of this user.",
            show_default=False,
        ),
    ] = None,
    is_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON per job and second.")
    ] = False,
    is_once: Annotated[
        bool, typer.Option("--once", help="Print it once, and exit.")
    ] = False,
) -> None:
    """Show what the processes of the jobs on this host do, as it changes.

    For each process: its step, where it is, the time of a step, and which part of the
    last 100 steps it has computed, waited for other processes, and waited for its
    loader. The exit code is 1 if there is no job.
    """
    found = _find(job)
    if not found:
        which = "No job of this user runs here"
        if job is not None:
            which = f"The process {job} has no job that runs here"
        typer.echo(
            f"{which}, or it has not taken a second yet. `jdp launch` begins one.",
            err=True,
        )
        raise typer.Exit(1)
    if is_json:
        _print_lines(job, is_once=is_once)
    elif is_once or not sys.stdout.isatty():
        console = rich.console.Console()
        for each in found:
            console.print(make_table(each))
    else:
        _show_live(job)


def make_table(job: JobStatus) -> rich.table.Table:
    """Draws the status of one job."""
    age_s = time.time() - job.at_s
    old = f", {age_s:.0f} s ago" if age_s > _OLD_S else ""
    table = rich.table.Table(title=f"job {job.pid}{old}", title_justify="left")
    has_hosts = len({row.host for row in job.processes}) > 1
    for name in ["process", *(["host"] if has_hosts else []), "where"]:
        table.add_column(name, justify="right" if name == "process" else "left")
    for name in ("step", "ms per step", "computes", "reduces", "waits", "loads"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in job.processes:
        cells = [str(row.process), *([row.host] if has_hosts else [])]
        cells += [_describe_place(row), f"{row.step:,}", *_describe_shares(row)]
        note = f"slower since step {row.slow_since:,}" if row.slow_since else ""
        table.add_row(*map(rich.text.Text, [*cells, note]))
    # Paths in alarms may have brackets that are not markup.
    table.caption = rich.text.Text("\n".join(job.alarms), justify="left")
    return table


def _describe_place(row: ProcessStatus) -> str:
    place = row.place if row.state == "well" else f"{row.state}, {row.place}"
    return f"{place} for {row.place_s:.0f} s" if row.place_s >= 1.0 else place


def _describe_shares(row: ProcessStatus) -> list[str]:
    recent, last = row.recent, row.last_100
    if not recent.total_s:
        return [""] * 5
    times = last.compute_s, last.reducing_s, last.waiting_s, last.loading_s
    return [f"{recent.total_s * 1e3:.3g}", *(f"{last.share(s):.0%}" for s in times)]


def _find(job: int | None) -> list[JobStatus]:
    found = status.find_all(private_folder.find_all())
    return [each for each in found if job is None or each.pid == job]


def _print_lines(job: int | None, *, is_once: bool) -> None:
    for _ in _seconds():
        for each in _find(job):
            sys.stdout.buffer.write(msgspec.json.encode(each) + b"\n")
        sys.stdout.buffer.flush()
        if is_once or not _find(job):
            return


def _show_live(job: int | None) -> None:
    with rich.live.Live(auto_refresh=False) as live:
        for _ in _seconds():
            found = _find(job)
            if not found:
                return
            group = rich.console.Group(*map(make_table, found))
            live.update(group, refresh=True)


def _seconds() -> Iterator[int]:
    for i in itertools.count():
        if i:
            time.sleep(_PERIOD_S)
        yield i
