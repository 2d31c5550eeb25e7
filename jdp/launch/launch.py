"""Launch: how does one command line become the processes of a job?"""

import contextlib
import dataclasses
import functools
import os
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from jdp.launch import (
    core_shares,
    launcher_link,
    logs,
    output,
    ports,
    prometheus,
    reports,
    supervisor,
    user_target,
    watching,
)
from jdp.runtime import addresses, environment, job_key, private_folder, user_program
from jdp.watch import job_watch

_LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Program that every process runs.

    Raises:
      ValueError: there is no such script or module. Modules are looked up without
        importing anything.
    """

    kind: Literal["script", "module"]
    target: str  # A path, or a dotted name.
    arguments: tuple[str, ...] = ()
    is_checked: bool = True  # False: if there is no target, the processes fail.

    def __post_init__(self) -> None:
        if not self.is_checked:
            return
        if self.kind == "script":
            user_target.check_script(self.target)
        else:
            user_target.check_module(self.target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Number and place of the processes, and the time they get to end.

    Raises:
      ValueError: an option is out of its range, or several hosts lack a coordinator.
    """

    num_processes: int  # On this host.
    devices_per_process: int | None = None
    num_nodes: int = 1
    node_rank: int = 0
    coordinator_address: str | None = None  # "host:port" on the host of node 0.
    grace_s: float = 5.0  # From SIGTERM to SIGKILL.
    has_shares: bool = True  # of the cores; see `core_shares.find_shares`.
    log_dir: str = ""  # A folder for the output of each process; see `logs`.
    stall_s: float = 10.0  # see `job_watch.WatchOptions`.
    on_stall: job_watch.OnStall = "raise"
    timeline: str = ""  # A folder for all entries of the records; "": none.
    prometheus_port: int | None = None  # of loopback, on host 0; None: none.
    # The secret of the job, the same on every host; None: see `find_key`.
    key: bytes | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_processes", "devices_per_process", "num_nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        environment.check_num_devices("devices_per_process", self.devices_per_process)
        if not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(
                f"`node_rank` must be at least 0 and less than `num_nodes`, which is "
                f"{self.num_nodes}, got {self.node_rank}. Hosts are counted from 0."
            )
        if not 0 <= self.grace_s < float("inf"):
            raise ValueError(
                f"`grace_s` must be a number of seconds, 0 or more, got {self.grace_s}."
            )
        self.as_watch()
        prometheus.check_port(self.prometheus_port)
        if self.coordinator_address is not None:
            _check_address(self.coordinator_address)
        elif self.num_nodes > 1:
            raise ValueError(
                f"`coordinator` is needed when `num_nodes` is {self.num_nodes}: give "
                "every host the same host:port, a free port on the host of node 0."
            )

    def as_watch(self) -> job_watch.WatchOptions:
        """Returns the options of the watch."""
        return job_watch.WatchOptions(
            stall_s=self.stall_s, on_stall=self.on_stall, folder=self.log_dir
        )


def launch(
    command: Command,
    options: LaunchOptions,
    *,
    environ: Mapping[str, str] | None = None,
    stdout_fd: int = 1,
    stderr_fd: int = 2,
    stdin_fd: int | None = None,
    adopts_orphans: bool = False,
    on_link: Callable[[launcher_link.LauncherLink], None] | None = None,
) -> int:
    """Runs the processes of this host, and returns when the last one has ended.

    The first process that fails ends the others. None of their descendants is left
    behind, even if the caller is killed. In the main thread, it handles SIGINT, SIGTERM
    and SIGHUP meanwhile.

    Args:
      command: command of every process.
      options: number of processes, and where they meet.
      environ: the environment of the processes; by default the caller's.
      stdout_fd: descriptor for their stdout; each line gets the process id in front.
      stderr_fd: the same for their stderr and for messages of the launcher.
      stdin_fd: descriptor for their stdin: a terminal, whose keys go to one process
        after another, see `keyboard`, or a pipe or file for the first process. None:
        stdin is empty.
      adopts_orphans: see `supervisor.Supervisor`; for a process that does nothing else,
        such as `jdp launch`.
      on_link: called with the link to the launchers of other hosts, if there is one.

    Returns:
      0, or the exit code of the process that failed first; 128 + s where signal s ended
      that process or was sent to the launcher.

    Raises:
      RuntimeError: the guard process could not be started.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(private_folder.for_launch())
        if options.coordinator_address is None:
            port = stack.enter_context(ports.held(_LOOPBACK))
            address = addresses.join(_LOOPBACK, port)
            options = dataclasses.replace(options, coordinator_address=address)
        return _launch(
            command,
            options,
            os.environ if environ is None else environ,
            folder=folder,
            fds=(stdin_fd, stdout_fd, stderr_fd),
            adopts_orphans=adopts_orphans,
            on_link=on_link,
        )


def _launch(
    command: Command,
    options: LaunchOptions,
    base: Mapping[str, str],
    *,
    folder: str,
    fds: tuple[int | None, int, int],
    adopts_orphans: bool,
    on_link: Callable[[launcher_link.LauncherLink], None] | None,
) -> int:
    """Implements `launch`; the processes share `folder`, unless it is ""."""
    launch_id = uuid.uuid4().hex
    coordinator_address = options.coordinator_address
    assert coordinator_address is not None
    key = find_key(options, base)
    environs, cores = _share_out(
        options, base, launch_id, coordinator_address, key=key, folder=folder
    )
    link, problem = None, ""
    if options.num_nodes > 1:
        link, problem = _open_link(options, coordinator_address, key, base)
    try:
        if link is not None and on_link is not None:
            on_link(link)
        forwarder, watch = _make_outputs(options, environs, fds, link, folder)
        if problem:
            forwarder.print_line(problem)
        job = supervisor.Supervisor(
            launch_id,
            forwarder,
            grace_s=options.grace_s,
            link=link,
            folder=folder,
            adopts_orphans=adopts_orphans,
            cores=cores,
            watch=watch,
        )
        return job.run(process_arguments(command), environs)
    except Exception as error:
        if link is not None:
            link.say_failed(error)
        raise
    finally:
        if link is not None:
            link.close()


def _share_out(
    options: LaunchOptions,
    base: Mapping[str, str],
    launch_id: str,
    coordinator_address: str,
    *,
    key: bytes | None,
    folder: str,
) -> tuple[dict[int, dict[str, str]], dict[int, frozenset[int]]]:
    """Returns the environment and the cores of each process of this host, by id."""
    num_shares = options.num_processes if options.has_shares else 1
    shares = core_shares.find_shares(num_shares, base)
    environs = {}
    for i in range(options.num_processes):
        place = place_of(options, i, coordinator_address=coordinator_address)
        environs[place.process_id] = shares.environ | process_environ(
            place,
            launch_id,
            base=base,
            key=key,
            folder=folder,
            grace_s=options.grace_s,
        )
    return environs, dict(zip(environs, shares.cores, strict=False))


def _make_outputs(
    options: LaunchOptions,
    process_ids: Iterable[int],
    fds: tuple[int | None, int, int],
    link: launcher_link.LauncherLink | None,
    folder: str,
) -> tuple[output.Forwarder, watching.Watch]:
    """Returns the output of the processes, and the watch that writes to it."""
    num_processes = options.num_nodes * options.num_processes
    names = logs.name_processes(process_ids, num_processes)
    files = logs.LogFiles(options.log_dir, names) if options.log_dir else None
    forwarder = output.Forwarder(
        num_processes=num_processes,
        stdin_fd=fds[0],
        stdout_fd=fds[1],
        stderr_fd=fds[2],
        logs=files,
    )
    watch = watching.Watch(
        options.as_watch(),
        num_processes=num_processes,
        show=functools.partial(reports.show_to_all, forwarder, files),
        host=options.node_rank,
        link=link,
        folder=folder,
        timeline=options.timeline,
        port=options.prometheus_port if options.node_rank == 0 else None,
    )
    return forwarder, watch


def _open_link(
    options: LaunchOptions,
    coordinator_address: str,
    key: bytes | None,
    environ: Mapping[str, str],
) -> tuple[launcher_link.LauncherLink | None, str]:
    """Opens the link to the launchers of other hosts, or returns why it cannot."""
    if key is None:
        why = "there is no `--key-file`, of which every host has a copy"
    else:
        try:
            link = launcher_link.LauncherLink(
                options.node_rank,
                options.num_nodes,
                address=coordinator_address,
                key=key,
                job=job_key.name_job(coordinator_address, environ),
            )
            return link, ""
        except socket.gaierror as error:
            host = addresses.split(coordinator_address)[0]
            why = f"the host {host!r} has no address here: {error.strerror}"
        except OSError as error:
            port = launcher_link.find_port(addresses.split(coordinator_address)[1])
            why = f"port {port} is not free here: {error.strerror}"
    return None, (
        f"jdp launch: the launchers of the hosts are not linked, because {why}. A "
        "failure on one host ends its processes there; the others notice it."
    )


def place_of(
    options: LaunchOptions, local_process_id: int, *, coordinator_address: str
) -> environment.LaunchEnvironment:
    """Returns the place of one process of this host in the whole job."""
    return environment.LaunchEnvironment(
        coordinator_address=coordinator_address,
        num_processes=options.num_nodes * options.num_processes,
        process_id=options.node_rank * options.num_processes + local_process_id,
        local_process_id=local_process_id,
        num_local_processes=options.num_processes,
        node_rank=options.node_rank,
        devices_per_process=options.devices_per_process,
    )


def find_key(options: LaunchOptions, environ: Mapping[str, str]) -> bytes | None:
    """Returns the secret of the job, shape (32,).

    It comes from the options. Otherwise it is a new one on a single host, and
    JDP_JOB_KEY on several hosts, whose launchers need the same; None if that is unset.
    """
    if options.key is not None:
        return options.key
    if options.num_nodes == 1:
        return job_key.make()
    return job_key.from_environ(environ)


def process_environ(
    place: environment.LaunchEnvironment,
    launch_id: str,
    *,
    base: Mapping[str, str],
    key: bytes | None = None,
    folder: str = "",
    grace_s: float | None = None,
) -> dict[str, str]:
    """Returns the environment of a process; `base` without the place of another job."""
    kept = {k: v for k, v in base.items() if k not in environment.VARIABLES}
    secret = {} if key is None else job_key.to_environ(key)
    shared = {environment.LAUNCH_ID: launch_id}
    if folder:
        shared[environment.LAUNCH_FOLDER] = folder
    if grace_s is not None:
        shared[environment.GRACE_S] = str(grace_s)
    return {**kept, **place.to_environ(), **shared, **secret}


def process_arguments(command: Command) -> list[str]:
    """Returns the command line of one process."""
    # -u: a line is shown when it is printed, not when a buffer is full.
    start = [sys.executable, "-u", user_program.__file__]
    return [*start, command.kind, command.target, *command.arguments]


def _check_address(address: str) -> None:
    try:
        addresses.split(address)
    except ValueError as error:
        raise ValueError(
            f"`coordinator` {error}. Give the host and the port alone, such as "
            "10.0.0.1:29500, also without `http://`."
        ) from None
