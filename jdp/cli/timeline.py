"""`jdp timeline`: what did the ranks do, and where did two ranks diverge?"""

import datetime
import pathlib
from typing import Annotated

import rich.console
import rich.table
import rich.text
import typer

from jdp.cli import timeline_merge
from jdp.eager.diagnosis import divergence, flight_recorder
from jdp.eager.diagnosis.flight_recorder import Dump


def diff(
    a: Annotated[
        pathlib.Path,
        typer.Argument(metavar="A", help="The flight record of one rank."),
    ],
    b: Annotated[
        pathlib.Path,
        typer.Argument(metavar="B", help="The flight record of another rank."),
    ],
) -> None:
    """Show where two ranks of the eager engine diverged.

    The exit code is 0 if nothing differs, 1 if something differs, and 2 if a file is
    not a flight record. The order in which ranks submit may differ.
    """
    try:
        one, other = flight_recorder.read_dump(a), flight_recorder.read_dump(b)
        found = divergence.find_divergence(one, other)
    except (OSError, ValueError) as error:
        raise _bad_file(error, "the flight records that the log names") from None
    console = rich.console.Console()
    console.print(_make_table([one, other]))
    # Names may hold brackets that are not markup, and lines are for grep: not wrapped.
    console.print(
        divergence.explain(one, other, found),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    raise typer.Exit(1 if found else 0)


def merge(
    out: Annotated[
        pathlib.Path, typer.Argument(metavar="OUT", help="The file to write.")
    ],
    files: Annotated[
        list[pathlib.Path],
        # Hidden in the list of arguments, where typer would show `list[Path]`.
        typer.Argument(metavar="FILES", hidden=True),
    ],
) -> None:
    """Merge what the processes of a job did into one file.

    FILES are the folder of `jdp launch --timeline`, its files, and timelines of the
    eager engine. All come onto one clock. A name that ends with .html is a page with a
    summary, to zoom and search; any other file is opened by ui.perfetto.dev and
    chrome://tracing.
    """
    # `jdp timeline merge trace.rank*.json`, with OUT left out, must not lose a file.
    if out.exists():
        raise typer.BadParameter(
            f"{out} exists already. Name a new file, before the timelines.",
            param_hint="OUT",
        )
    try:
        count = timeline_merge.merge(files, out)
    except (OSError, ValueError) as error:
        wanted = "the files of `jdp launch --timeline`, or timelines that ranks wrote"
        raise _bad_file(error, wanted) from None
    typer.echo(f"{out}: {count}")


def _bad_file(error: OSError | ValueError, wanted: str) -> typer.BadParameter:
    if not isinstance(error, OSError):
        return typer.BadParameter(str(error))
    return typer.BadParameter(f"{error.strerror}: '{error.filename}'. Name {wanted}.")


def _make_table(dumps: list[Dump]) -> rich.table.Table:
    table = rich.table.Table()
    table.add_column("rank", justify="right")
    for name in ("dumped at", "because"):
        table.add_column(name)
    for name in ("requests", "recorded", "waiting"):
        table.add_column(name, justify="right")
    for dump in dumps:
        at = datetime.datetime.fromtimestamp(dump.time)
        table.add_row(
            f"{dump.rank} of {dump.size}",
            at.isoformat(" ", timespec="milliseconds"),
            rich.text.Text(dump.reason),
            f"{dump.num_dropped + len(dump.records):,}",
            f"{len(dump.records):,}",
            f"{sum(record.is_waiting for record in dump.records):,}",
        )
    return table
