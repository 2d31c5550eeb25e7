"""Launch options: the types and help texts of the options of `jdp launch`."""

from typing import Annotated

import typer

NumProcesses = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--num-processes",
        help="Number of processes on this host, all alike.",
        show_default=False,
    ),
]
Hosts = Annotated[
    str,
    typer.Option(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS",
        help="Hosts to start the job on over ssh, and the processes of each, such as "
        "a:4,b:4; in place of -n. The folder and Python are the same as here.",
        show_default=False,
    ),
]
Ssh = Annotated[
    str, typer.Option(metavar="COMMAND", help="Command of ssh, with its options.")
]
Python = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="Python on the hosts of -H; by default the path of this one.",
        show_default=False,
    ),
]
Script = Annotated[
    str | None,
    typer.Argument(
        metavar="SCRIPT",
        help="Program, or a module with -m. All words after it are its arguments.",
        show_default=False,
    ),
]
# Hidden in the list of arguments, where typer would show the type `list[str]`.
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", hidden=True, show_default=False),
]
IsModule = Annotated[
    bool,
    typer.Option("-m", "--module", help="Run a module by its name, as `python -m`."),
]
DevicesPerProcess = Annotated[
    int | None,
    typer.Option(help="Number of devices per process.", show_default=False),
]
NumNodes = Annotated[int, typer.Option("--nodes", help="Number of hosts.")]
NodeRank = Annotated[int, typer.Option(help="Position of this host, counted from 0.")]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Free port on the host of rank 0; required with several hosts.",
        show_default=False,
    ),
]
GraceS = Annotated[float, typer.Option(help="Seconds from SIGTERM to SIGKILL.")]
IsUnpinned = Annotated[
    bool,
    typer.Option(
        "--no-pin",
        help="Let each process run on all cores. By default, processes that compute on "
        "the CPU share them out: each gets cores of its own, and as many threads.",
    ),
]
LogDir = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="Also write the output of each process to a file in this folder, such as "
        "process_0.log. Files of an earlier run are replaced.",
        show_default=False,
    ),
]
StallS = Annotated[
    float,
    typer.Option(
        envvar="JDP_STALL_S",
        help="Name a process for which others wait so many seconds beyond a usual "
        "step; 0: never.",
    ),
]
OnStall = Annotated[
    str,
    typer.Option(
        metavar="log|raise",
        envvar="JDP_ON_STALL",
        help="log: name it. raise: also end the job, once the others have waited "
        "thirty times --stall-s.",
    ),
]
Timeline = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="Keep what each process did, step by step, in this folder, for `jdp "
        "timeline merge`.",
        show_default=False,
    ),
]
PrometheusPort = Annotated[
    int | None,
    typer.Option(
        metavar="PORT",
        help="Port on 127.0.0.1, of the first host, where Prometheus finds the status "
        "of the job.",
        show_default=False,
    ),
]
NumServers = Annotated[
    int | None,
    typer.Option(
        "--servers",
        help="Number of parameter servers on this host.",
        show_default=False,
    ),
]
NumWorkers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        help="Number of workers on this host, which train.",
        show_default=False,
    ),
]
Addresses = Annotated[
    list[str] | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Address of a server; repeat the option for all servers of all hosts, in "
        "order. Required with several hosts.",
        show_default=False,
    ),
]
KeyFile = Annotated[
    str,
    typer.Option(
        help="File with the secret of the job, copied to all hosts; required for "
        "parameter servers on several hosts.",
        show_default=False,
    ),
]
First = Annotated[
    int,
    typer.Option(
        help="Number of the first server on this host, or of the first worker where "
        "the host has no server."
    ),
]
AllWorkers = Annotated[
    int | None,
    typer.Option(help="Number of workers on all hosts.", show_default=False),
]
Restarts = Annotated[
    int, typer.Option(help="Number of times a killed server is started again.")
]
IsTable = Annotated[
    bool | None,
    typer.Option(
        "--table/--no-table",
        help="Show the progress of the servers each second, as a live table on stderr; "
        "by default if that is a terminal.",
        show_default=False,
    ),
]
IsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the same progress as lines of JSON on stdout."),
]
