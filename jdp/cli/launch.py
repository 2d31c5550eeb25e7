"""`jdp launch`: the processes of a job, from one command line."""

import errno
import os
import re
from collections.abc import Callable
from typing import Annotated

import typer

from jdp.launch import guarding, output
from jdp.launch import launch as launching
from jdp.runtime import job_key

# What follows the script belongs to the script, also what looks like our options.
_COUNTS = re.compile(r"-n\d*$|--(num-processes|servers|workers)(=|$)")
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


# By the parameters of `launch`. What is of no use is refused, lest it be taken for
# another one, such as --address for --coordinator.
_OF_SERVERS = {
    "addresses": "--address",
    "first": "--first",
    "all_workers": "--all-workers",
    "restarts": "--restarts",
    "is_table": "--table",
    "is_json": "--json",
}
_OF_PROCESSES = {
    "devices_per_process": "--devices-per-process",
    "num_nodes": "--nodes",
    "node_rank": "--node-rank",
    "coordinator": "--coordinator",
}


def launch(
    context: typer.Context,
    num_processes: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--num-processes",
            help="Processes on this host, all alike.",
            show_default=False,
        ),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]...",
            help="The program and its arguments.",
            show_default=False,
        ),
    ] = None,
    is_module: Annotated[
        bool,
        typer.Option(
            "-m", "--module", help="Run a module by its name, as `python -m`."
        ),
    ] = False,
    devices_per_process: Annotated[
        int | None,
        typer.Option(help="Devices of each process.", show_default=False),
    ] = None,
    num_nodes: Annotated[int, typer.Option("--nodes", help="Hosts of the job.")] = 1,
    node_rank: Annotated[
        int, typer.Option(help="Number of this host, counted from 0.")
    ] = 0,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="A free port on the host of node 0; needed for several hosts.",
            show_default=False,
        ),
    ] = None,
    grace_s: Annotated[
        float, typer.Option(help="Seconds from SIGTERM to SIGKILL.")
    ] = 5.0,
    num_servers: Annotated[
        int | None,
        typer.Option("--servers", help="Parameter servers.", show_default=False),
    ] = None,
    num_workers: Annotated[
        int | None,
        typer.Option("--workers", help="Workers of these.", show_default=False),
    ] = None,
    addresses: Annotated[
        list[str] | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Of each server in turn, of all hosts; needed for several hosts.",
            show_default=False,
        ),
    ] = None,
    key_file: Annotated[
        str,
        typer.Option(
            help="A secret file that all hosts of the job have a copy of; parameter "
            "servers on several hosts need one.",
            show_default=False,
        ),
    ] = "",
    first: Annotated[
        int,
        typer.Option(
            help="Number of the first server, or without servers worker, here."
        ),
    ] = 0,
    all_workers: Annotated[
        int | None,
        typer.Option(help="Workers of all hosts.", show_default=False),
    ] = None,
    restarts: Annotated[
        int, typer.Option(help="How often a server that is killed is started again.")
    ] = 3,
    is_table: Annotated[
        bool | None,
        typer.Option(
            "--table/--no-table",
            help="Show each second what the servers do, as a live table on stderr; "
            "by default if that is a terminal.",
            show_default=False,
        ),
    ] = None,
    is_json: Annotated[
        bool, typer.Option("--json", help="The same as lines of JSON on stdout.")
    ] = False,
) -> None:
    """Run a program in several processes on this host.

    The first process that fails ends the others, and its exit code is ours. With
    --servers and --workers, a worker that is killed does not, a server that is killed
    is started again, and the servers end when all workers have.
    """
    output.open_missing()
    if not command:
        raise typer.BadParameter(
            "say what to run: `jdp launch -n 2 train.py` or "
            "`jdp launch -n 2 -m package.train`."
        )
    target, *arguments = command
    has_roles = num_servers is not None or num_workers is not None
    if has_roles == (num_processes is not None):
        late = [text for text in arguments if _COUNTS.match(text)]
        hint = f" {late[0]!r} comes after {target!r}, which gets it." if late else ""
        raise typer.BadParameter(
            "say how many: '-n' 2, or for parameter servers '--servers' 1 '--workers' "
            f"2, and not both.{hint} Options of `jdp launch` go before the script."
        )
    for name, option in (_OF_PROCESSES if has_roles else _OF_SERVERS).items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                "goes with '-n'."
                if has_roles
                else "goes with '--servers' and '--workers'.",
                param_hint=option,
            )
    if is_json and is_table:
        raise typer.BadParameter("goes without '--table'.", param_hint="--json")
    if is_table is None:
        is_table = os.isatty(2)
    try:
        if has_roles:
            program = _command(is_module, target, arguments)
            # Here, for it takes its time.
            from jdp.parameter_server import launching as role_launching

            roles = role_launching.RoleOptions(
                num_servers=num_servers or 0,
                num_workers=num_workers or 0,
                addresses=tuple(addresses or ()),
                key_file=key_file,
                first=first,
                all_workers=all_workers,
                restarts=restarts,
                report="json" if is_json else "table" if is_table else "",
                grace_s=grace_s,
            )
            raise typer.Exit(
                _run(
                    lambda: role_launching.launch_roles(
                        program, roles, adopts_orphans=True
                    )
                )
            )
        assert num_processes is not None
        options = launching.LaunchOptions(
            num_processes=num_processes,
            devices_per_process=devices_per_process,
            num_nodes=num_nodes,
            node_rank=node_rank,
            coordinator_address=coordinator,
            grace_s=grace_s,
            key=job_key.read_file(key_file) if key_file else None,
        )
        try:
            program = _command(is_module, target, arguments)
        except ValueError as error:
            if num_nodes == 1:
                raise
            # Other hosts may have it: they hear how the processes here end.
            typer.echo(f"jdp launch: {error}", err=True)
            program = _command(is_module, target, arguments, is_checked=False)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(
        _run(lambda: launching.launch(program, options, adopts_orphans=True))
    )


def _run(job: Callable[[], int]) -> int:
    """Runs a job; what the machine denies the launcher is one line, not a traceback."""
    try:
        return job()
    except OSError as error:
        text = error.strerror or str(error)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            text += ". Raise `ulimit -n`: each process takes three to six descriptors"
        elif error.errno == errno.EAGAIN:
            text += ". Raise `ulimit -u`, or start fewer processes"
        text = f"the job could not be started or kept up: {text}"
    except guarding.GuardError as error:
        text = str(error)
    typer.echo(f"jdp launch: {text.rstrip().removesuffix('.')}.", err=True)
    return 1


def _command(
    is_module: bool, target: str, arguments: list[str], *, is_checked: bool = True
) -> launching.Command:
    return launching.Command(
        kind="module" if is_module else "script",
        target=target,
        arguments=tuple(arguments),
        is_checked=is_checked,
    )
