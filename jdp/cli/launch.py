"""`jdp launch`: how does one command line start the processes of a job?"""

import contextlib
import errno
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import typer

from jdp.cli import launch_options
from jdp.launch import guarding, launcher_link, output
from jdp.launch import launch as launching
from jdp.runtime import job_key

# Options that come after the script, to which they then belong.
_COUNTS = re.compile(r"-n\d*$|--(num-processes|servers|workers)(=|$)")

# The first word of a program, where other launchers want the interpreter.
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")

# Parameters of `launch`. An option without effect is refused, because it may have been
# confused with another one, such as --address with --coordinator.
_OF_SERVERS = "addresses first all_workers restarts is_table is_json".split()
_OF_NODES = ("num_nodes", "node_rank")
_OF_WATCH = ("stall_s", "on_stall", "timeline", "prometheus_port")
_PASSED_ON = ("devices_per_process", *_OF_WATCH)
_OF_PROCESSES = ("devices_per_process", *_OF_NODES, "coordinator", *_OF_WATCH)
_OF_HOSTS = ("ssh", "python")

# By field of the options that a `launch` checks, as its messages name it.
_BY_FIELD = {
    "hosts": "-H",
    "ssh": "--ssh",
    "python": "--python",
    "num_processes": "-n",
    "devices_per_process": "--devices-per-process",
    "num_nodes": "--nodes",
    "node_rank": "--node-rank",
    "coordinator": "--coordinator",
    "grace_s": "--grace-s",
    "log_dir": "--log-dir",
    "stall_s": "--stall-s",
    "on_stall": "--on-stall",
    "timeline": "--timeline",
    "prometheus_port": "--prometheus-port",
    "num_servers": "--servers",
    "num_workers": "--workers",
    "addresses": "--address",
    "key_file": "--key-file",
    "first": "--first",
    "all_workers": "--all-workers",
    "restarts": "--restarts",
    "is_table": "--table",
    "is_json": "--json",
}


def launch(
    context: typer.Context,
    num_processes: launch_options.NumProcesses = None,
    hosts: launch_options.Hosts = "",
    script: launch_options.Script = None,
    arguments: launch_options.Arguments = None,
    is_module: launch_options.IsModule = False,
    devices_per_process: launch_options.DevicesPerProcess = None,
    num_nodes: launch_options.NumNodes = 1,
    node_rank: launch_options.NodeRank = 0,
    coordinator: launch_options.Coordinator = None,
    grace_s: launch_options.GraceS = 5.0,
    is_unpinned: launch_options.IsUnpinned = False,
    log_dir: launch_options.LogDir = "",
    stall_s: launch_options.StallS = 10.0,
    on_stall: launch_options.OnStall = "raise",
    timeline: launch_options.Timeline = "",
    prometheus_port: launch_options.PrometheusPort = None,
    num_servers: launch_options.NumServers = None,
    num_workers: launch_options.NumWorkers = None,
    addresses: launch_options.Addresses = None,
    key_file: launch_options.KeyFile = "",
    ssh: launch_options.Ssh = "ssh",
    python: launch_options.Python = "",
    first: launch_options.First = 0,
    all_workers: launch_options.AllWorkers = None,
    restarts: launch_options.Restarts = 3,
    is_table: launch_options.IsTable = None,
    is_json: launch_options.IsJson = False,
) -> None:
    """Run a program in several processes, here or on the hosts of -H.

    When a process fails, the others are ended, and jdp exits with the code of the first
    that failed. With --servers and --workers, a killed worker does not end the others,
    a killed server is started again, and the servers end after all workers.
    """
    output.open_missing()
    words = _check(context, script, arguments or [])
    shared: Any = dict(key_file=key_file, grace_s=grace_s, log_dir=log_dir)
    shared["has_shares"] = not is_unpinned
    if not (num_servers or num_workers):
        shared["coordinator_address"] = coordinator
        shared |= {name: context.params[name] for name in _PASSED_ON}
    if hosts:
        _launch_hosts(is_module, words, hosts=hosts, ssh=ssh, python=python, **shared)
    if num_processes is not None:
        shared.update(num_nodes=num_nodes, node_rank=node_rank)
        _launch_processes(is_module, words, num_processes=num_processes, **shared)
    shared.update(first=first, all_workers=all_workers, restarts=restarts)
    shared.update(num_servers=num_servers or 0, num_workers=num_workers or 0)
    shared["addresses"] = tuple(addresses or ())
    shared["report"] = _choose_report(is_json, is_table)
    _launch_roles(is_module, words, **shared)


def _check(
    context: typer.Context, script: str | None, arguments: list[str]
) -> list[str]:
    """Returns the words of the program.

    Raises:
      typer.BadParameter: there is no program, or no number of processes, or an option
        that goes with the other way to give that number.
    """
    if not script:
        raise typer.BadParameter(
            "name a program: `jdp launch -n 2 train.py` or "
            "`jdp launch -n 2 -m package.train`."
        )
    given = context.params
    has_roles = given["num_servers"] is not None or given["num_workers"] is not None
    ways = has_roles, given["num_processes"] is not None, bool(given["hosts"])
    if sum(ways) != 1:
        late = [text for text in arguments if _COUNTS.match(text)]
        hint = ""
        if late:
            hint = f" {late[0]!r} comes after {script!r}, which gets it."
        raise typer.BadParameter(
            "give the number of processes with '-n' 2, or with '-H' a:2,b:2 for hosts "
            "over ssh, or for parameter servers '--servers' 1 '--workers' 2, and only "
            f"one of them.{hint} Options of `jdp launch` come before the script."
        )
    _refuse_useless(context, has_roles, bool(given["hosts"]))
    if given["is_json"] and given["is_table"]:
        raise typer.BadParameter("goes without '--table'.", param_hint="--json")
    return [script, *arguments]


def _refuse_useless(context: typer.Context, has_roles: bool, has_hosts: bool) -> None:
    """Refuses options of the other kinds of job."""
    useless = dict.fromkeys(_OF_SERVERS, "goes with '--servers' and '--workers'.")
    if has_roles:
        useless = dict.fromkeys(_OF_PROCESSES, "goes with '-n'.")
    if has_hosts:
        useless |= dict.fromkeys(_OF_NODES, "goes without '-H'.")
    else:
        useless |= dict.fromkeys(_OF_HOSTS, "goes with '-H'.")
    for name, text in useless.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(text, param_hint=_BY_FIELD[name])


def _choose_report(is_json: bool, is_table: bool | None) -> str:
    if is_json:
        return "json"
    return "table" if is_table or (is_table is None and os.isatty(2)) else ""


def _launch_roles(is_module: bool, words: list[str], **options: Any) -> NoReturn:
    """Runs servers and workers by `RoleOptions(**options)`, and exits."""
    try:
        program = _command(is_module, words)
        # Imported late: it takes a while.
        from jdp.parameter_server import launching as role_launching

        roles = role_launching.RoleOptions(**options)
        start = role_launching.launch_roles
        _run(lambda: start(program, roles, stdin_fd=0, adopts_orphans=True))
    except ValueError as error:
        raise typer.BadParameter(_name_options(str(error))) from None


def _launch_processes(
    is_module: bool, words: list[str], *, key_file: str, **options: Any
) -> NoReturn:
    """Runs processes by `LaunchOptions(**options)`, and exits."""
    key = None
    try:
        key = job_key.read_file(key_file) if key_file else None
        checked = launching.LaunchOptions(**options, key=key)
        try:
            program = _command(is_module, words)
        except ValueError as error:
            if checked.num_nodes == 1:
                raise
            # Other hosts may have it: they hear how the processes here end.
            typer.echo(f"jdp launch: {error}", err=True)
            program = _command(is_module, words, is_checked=False)
    except ValueError as error:
        text = _name_options(str(error))
        _tell_hosts(text, key, options)
        raise typer.BadParameter(text) from None
    start = launching.launch
    _run(lambda: start(program, checked, stdin_fd=0, adopts_orphans=True))


def _tell_hosts(text: str, key: bytes | None, options: Mapping[str, Any]) -> None:
    """Tells the other hosts that this one refuses its options, if it can."""
    num_nodes, node_rank = options["num_nodes"], options["node_rank"]
    address = options["coordinator_address"]
    if not 0 <= node_rank < num_nodes or num_nodes == 1 or address is None:
        return
    with contextlib.suppress(OSError, ValueError):
        key = key or job_key.from_environ(os.environ)
        if key is not None:
            job = job_key.name_job(address, os.environ)
            launcher_link.say_refused(
                text, node_rank, num_nodes, address=address, key=key, job=job
            )


def _launch_hosts(is_module: bool, words: list[str], **options: Any) -> NoReturn:
    """Runs the processes of all hosts over ssh, and exits."""
    from jdp.cli import launch_hosts

    try:
        if not is_module and _PYTHON.fullmatch(words[0]) is not None:
            raise ValueError(_explain_python(words))
        command = _command(is_module, words, is_checked=False)
        starter = launch_hosts.make_starter(command, **options)
    except ValueError as error:
        raise typer.BadParameter(_name_options(str(error))) from None
    _run(starter.run)


def _name_options(text: str) -> str:
    """Returns the message of an error with options in place of fields."""
    return re.sub(r"`(\w+)`", lambda match: _BY_FIELD.get(match[1], match[0]), text)


def _run(job: Callable[[], int]) -> NoReturn:
    """Exits as a job does. An error of the operating system is one line of text."""
    try:
        raise typer.Exit(job())
    except OSError as error:
        text = _name_options(error.strerror or str(error))
        if error.errno in (errno.EMFILE, errno.ENFILE):
            text += ". Raise `ulimit -n`: each process takes three to six descriptors"
        elif error.errno == errno.EAGAIN:
            text += ". Raise `ulimit -u`, or start fewer processes"
        text = f"the job could not be started or kept up: {text}"
    except guarding.GuardError as error:
        text = str(error)
    typer.echo(f"jdp launch: {text.rstrip().removesuffix('.')}.", err=True)
    raise typer.Exit(1)


def _command(
    is_module: bool, words: list[str], *, is_checked: bool = True
) -> launching.Command:
    is_python = not is_module and _PYTHON.fullmatch(words[0]) is not None
    if (
        is_checked
        and is_python
        and os.path.isfile(words[0])
        and os.access(words[0], os.X_OK)
    ):
        raise ValueError(_explain_python(words))
    try:
        return launching.Command(
            kind="module" if is_module else "script",
            target=words[0],
            arguments=tuple(words[1:]),
            is_checked=is_checked,
        )
    except ValueError:
        if not is_python:
            raise
        raise ValueError(_explain_python(words)) from None


def _explain_python(words: list[str]) -> str:
    """Explains that `jdp launch` starts Python, as other launchers do not."""
    rest = words[1:]
    while rest and re.fullmatch("-[uBEIOsSv]+", rest[0]):
        rest = rest[1:]
    options = "Set its options by variables, such as PYTHONOPTIMIZE. "
    return (
        f"{words[0]!r} is not a script: `jdp launch` starts Python, this one: "
        f"{sys.executable}. {options if len(rest) < len(words) - 1 else ''}Leave it "
        f"out: `jdp launch ... {shlex.join(rest or ['train.py'])}`."
    )
