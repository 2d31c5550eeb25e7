"""Launch: how does one command line become the processes of a job?"""

import dataclasses
import importlib.machinery
import os
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from jdp.launch import core_shares, launcher_link, logs, output, supervisor
from jdp.runtime import addresses, environment, job_key, private_folder, user_program


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
            _check_script(self.target)
        else:
            _check_module(self.target)


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
    # The secret of the job, the same on every host; None: see `find_key`.
    key: bytes | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_processes", "devices_per_process", "num_nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(
                f"`node_rank` must be at least 0 and less than `num_nodes`, which is "
                f"{self.num_nodes}, got {self.node_rank}. Hosts are counted from 0."
            )
        if not 0 <= self.grace_s < float("inf"):
            raise ValueError(
                f"`grace_s` must be a number of seconds, 0 or more, got {self.grace_s}."
            )
        if self.coordinator_address is not None:
            _check_address(self.coordinator_address)
        elif self.num_nodes > 1:
            raise ValueError(
                f"`coordinator` is needed when `num_nodes` is {self.num_nodes}: give "
                "every host the same host:port, a free port on the host of node 0."
            )


def launch(
    command: Command,
    options: LaunchOptions,
    *,
    environ: Mapping[str, str] | None = None,
    stdout_fd: int = 1,
    stderr_fd: int = 2,
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
      adopts_orphans: see `supervisor.Supervisor`; for a process that does nothing else,
        such as `jdp launch`.
      on_link: called with the link to the launchers of other hosts, if there is one.

    Returns:
      0, or the exit code of the process that failed first; 128 + s where signal s ended
      that process or was sent to the launcher.

    Raises:
      RuntimeError: the guard process could not be started.
    """
    with private_folder.for_launch() as folder:
        return _launch(
            command,
            options,
            os.environ if environ is None else environ,
            folder=folder,
            fds=(stdout_fd, stderr_fd),
            adopts_orphans=adopts_orphans,
            on_link=on_link,
        )


def _launch(
    command: Command,
    options: LaunchOptions,
    base: Mapping[str, str],
    *,
    folder: str,
    fds: tuple[int, int],
    adopts_orphans: bool,
    on_link: Callable[[launcher_link.LauncherLink], None] | None,
) -> int:
    """Implements `launch`; the processes share `folder`, unless it is ""."""
    launch_id = uuid.uuid4().hex
    coordinator_address = options.coordinator_address
    if coordinator_address is None:
        coordinator_address = f"127.0.0.1:{_free_port()}"
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
        forwarder = _make_forwarder(options, environs, fds)
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


def _make_forwarder(
    options: LaunchOptions, process_ids: Iterable[int], fds: tuple[int, int]
) -> output.Forwarder:
    num_processes = options.num_nodes * options.num_processes
    names = logs.name_processes(process_ids, num_processes)
    return output.Forwarder(
        num_processes=num_processes,
        stdout_fd=fds[0],
        stderr_fd=fds[1],
        logs=logs.LogFiles(options.log_dir, names) if options.log_dir else None,
    )


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


def _check_script(path: str) -> None:
    if not os.path.exists(path):
        hint = "Give a path"
        if _has_module(path):
            hint = f"Use `-m {path}` to run the module of that name, or give a path"
        raise ValueError(
            f"There is no script {path!r} in {_folder()}. "
            f"{hint} that `python` could run."
        )
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        raise ValueError(
            f"`{path}` is a folder without a `__main__.py`. Give the path of a script."
        )


def _check_module(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"`-m` takes the dotted name of a module, such as `package.train`, got "
            f"{name!r}. Leave out `-m` to run a script by its path."
        )
    if not _has_module(name):
        raise ValueError(
            f"There is no module {name!r} that could be run: it was looked for in "
            f"{_folder()} and on `sys.path`. A package needs a `__main__.py`."
        )


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "the current folder, which was deleted"


def _has_module(name: str) -> bool:
    """Whether `python -m name` might find a module; imports nothing."""
    top, *parts = name.split(".")
    spec = _find_top(top)
    for part in (*parts, None):
        if spec is None:
            return False
        folders = spec.submodule_search_locations
        if folders is None:
            return part is None
        child = _find_in(part or "__main__", list(folders))
        if child is None and _edits_its_path(spec):
            return True
        spec = child
    return spec is not None


def _find_top(name: str) -> importlib.machinery.ModuleSpec | None:
    spec = _find_in(name, ["", *sys.path])  # "" is the current folder.
    if spec is not None:
        return spec
    for finder in sys.meta_path:  # Built-in modules, and editable installations.
        spec = finder.find_spec(name, None)
        if spec is not None:
            return spec
    return None


def _find_in(
    name: str, folders: Sequence[str]
) -> importlib.machinery.ModuleSpec | None:
    # Only the last part of a name: with the full name, a namespace package would look
    # for its parent in `sys.modules`.
    return importlib.machinery.PathFinder.find_spec(name, folders)


def _edits_its_path(spec: importlib.machinery.ModuleSpec) -> bool:
    """Whether only an import could tell which modules the package has."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return False
    try:
        with open(spec.origin, "rb") as file:
            return b"__path__" in file.read()
    except OSError:
        return False


def _check_address(address: str) -> None:
    try:
        addresses.split(address)
    except ValueError as error:
        raise ValueError(
            f"`coordinator` {error}. Give the host and the port alone, such as "
            "10.0.0.1:29500, also without `http://`."
        ) from None


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
