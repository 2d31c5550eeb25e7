"""`jdp launch`: the processes of a job, from one command line."""

from typing import Annotated

import typer

from jdp.runtime import launch as launching

# What follows the script belongs to the script, also what looks like our options.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def launch(
    num_processes: Annotated[
        int, typer.Option("-n", "--num-processes", help="Processes on this host.")
    ],
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
) -> None:
    """Run a program in several processes on this host.

    The first process that fails ends the others, and its exit code is ours.
    """
    if not command:
        raise typer.BadParameter(
            "say what to run: `jdp launch -n 2 train.py` or "
            "`jdp launch -n 2 -m package.train`."
        )
    target, *arguments = command
    try:
        options = launching.LaunchOptions(
            num_processes=num_processes,
            devices_per_process=devices_per_process,
            num_nodes=num_nodes,
            node_rank=node_rank,
            coordinator_address=coordinator,
            grace_s=grace_s,
        )
        program = launching.Command(
            kind="module" if is_module else "script",
            target=target,
            arguments=tuple(arguments),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(launching.launch(program, options))
