"""Launching: how do servers and workers of one host start, and when is it over?"""

import contextlib
import dataclasses
import os
import socket
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from jdp.launch import core_shares, launch, logs, output, ports, supervisor
from jdp.launch.endings import Exit
from jdp.parameter_server import keys, metrics, option_checks
from jdp.parameter_server.keys import Place
from jdp.replicas import wire
from jdp.runtime import environment


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """Servers and workers of this host, and addresses of all servers.

    Attributes:
      num_servers, num_workers: number of servers and workers on this host.
      addresses: "host:port" of each server of the job; (): free ports of this host.
      key_file: keys of the job; "": new keys that do not outlive it.
      first: index of the first server here, or of the first worker if there are only
        workers here.
      all_workers: number of workers of all hosts; None: only the workers here.
      restarts: number of times that each killed server is started again.
      report: as `ServerOptions.report`. A table is drawn below the output of all
        processes, if stderr is a terminal.
      grace_s: seconds from SIGTERM to SIGKILL.
      has_shares: whether the workers share out the cores; servers run on all of them.
      log_dir: folder for the output of each process; "": none is kept.
    """

    num_servers: int
    num_workers: int
    addresses: tuple[str, ...] = ()
    key_file: str = ""
    first: int = 0
    all_workers: int | None = None
    restarts: int = 3
    report: str = ""
    grace_s: float = 5.0
    has_shares: bool = True
    log_dir: str = ""

    def __post_init__(self) -> None:
        for name in ("num_servers", "num_workers", "first", "restarts"):
            option_checks.check_count(name, getattr(self, name), 0)
        if self.num_servers + self.num_workers == 0:
            raise ValueError("There must be a server or a worker to start.")
        if self.report not in ("", "table", "json"):
            raise ValueError(
                f'`report` must be "table" or "json", got {self.report!r}.'
            )
        if not 0 <= self.grace_s < float("inf"):
            raise ValueError(
                f"`grace_s` must be a number of seconds, 0 or more, got {self.grace_s}."
            )
        for address in self.addresses:
            keys.check_address(address)
        if not self.addresses and self.num_servers * self.num_workers == 0:
            raise ValueError(
                "Without `addresses`, servers and workers run on this host: both "
                f"`num_servers` and `num_workers` must be at least 1, got "
                f"{self.num_servers} and {self.num_workers}. If the others are on "
                "other hosts, pass the `addresses` of all servers and a `key_file` "
                "that all hosts have."
            )
        most = self.num_workers + (0 if self.num_servers else self.first)
        if self.all_workers is not None and self.all_workers < most:
            raise ValueError(
                f"`all_workers` must be at least {most}, the number of workers up to "
                f"the last one here, got {self.all_workers}."
            )
        if self.addresses and not self.key_file:
            raise ValueError(
                "A job with `addresses` needs a `key_file`: write one with "
                "`jdp.parameter_server.make_keys(path)`, and copy it to all hosts."
            )
        if self.addresses and self.num_servers + self._first_server > len(
            self.addresses
        ):
            raise ValueError(
                f"`addresses` must name every server of the job, got "
                f"{len(self.addresses)} for servers {self._first_server} to "
                f"{self._first_server + self.num_servers - 1}."
            )

    @property
    def _first_server(self) -> int:
        return self.first if self.num_servers else 0

    def find_places(self, addresses: tuple[str, ...], key_file: str) -> list[Place]:
        """Returns the place of each process: servers first."""
        num_workers = self.all_workers or self.num_workers or None
        if self.all_workers is None and not self.num_servers and self.first:
            num_workers = None  # The number of workers elsewhere is unknown.
        first_worker = 0 if self.num_servers else self.first
        servers = [("server", self._first_server + i) for i in range(self.num_servers)]
        workers = [("worker", first_worker + i) for i in range(self.num_workers)]
        return [
            Place(
                role="server" if role == "server" else "worker",
                index=index,
                addresses=addresses,
                num_workers=num_workers,
                key_file=key_file,
            )
            for role, index in servers + workers
        ]


class RolePolicy:
    """Policy: killed workers are forgiven, killed servers restart, workers end the job.

    A process whose program fails ends the job, whatever its role.
    """

    def __init__(self, num_servers: int, num_workers: int, restarts: int):
        """Processes 0 to `num_servers - 1` are servers, the others workers."""
        self._num_servers, self._num_workers = num_servers, num_workers
        self._restarts_left = [restarts] * num_servers
        self._has_ended_well = False
        self._is_over = False

    def judge(
        self, end: Exit, running: Collection[int]
    ) -> Literal["count", "forgive", "restart"]:
        """Decides about an ended process, as `policy.Policy` asks."""
        is_server = end.process_id < self._num_servers
        if end.returncode >= 0:
            self._has_ended_well |= not is_server and end.returncode == 0
            return "count"
        if is_server:
            if self._is_over:
                return "forgive"
            if self._restarts_left[end.process_id] == 0:
                return "count"
            self._restarts_left[end.process_id] -= 1
            return "restart"
        others = any(i >= self._num_servers for i in running)
        return "forgive" if others or self._has_ended_well else "count"

    def find_superfluous(self, running: Collection[int]) -> list[int]:
        """Returns the servers that can end, once all workers have ended."""
        if self._num_workers == 0 or any(i >= self._num_servers for i in running):
            return []
        self._is_over = True
        return list(running)


def launch_roles(
    command: launch.Command,
    options: RoleOptions,
    *,
    environ: Mapping[str, str] | None = None,
    stdout_fd: int = 1,
    stderr_fd: int = 2,
    stdin_fd: int | None = None,
    adopts_orphans: bool = False,
) -> int:
    """Runs servers and workers on this host, and returns when the last has ended.

    Args:
      command: command of every process; `Place.from_environ` tells its role and index.
      options: numbers and addresses.
      environ: environment of the processes; None: the environment of the caller.
      stdout_fd: descriptor for their stdout, with the index of the process before each
        line, servers first.
      stderr_fd: the same for their stderr and for messages of the launcher.
      stdin_fd, adopts_orphans: as in `launch.launch`.

    Returns:
      0, or the exit code of the first failure.
    """
    launch_id = uuid.uuid4().hex
    base = dict(os.environ if environ is None else environ)
    for name in (*environment.VARIABLES, *keys.VARIABLES, keys.DISPLAY_FD):
        base.pop(name, None)
    if options.report:
        base[keys.REPORT] = options.report
    with contextlib.ExitStack() as stack:
        key_file = options.key_file
        pass_fds: list[int] = []
        if not key_file:
            key_file, pass_fds = _make_key_file(stack)
        addresses = options.addresses or _hold_addresses(options.num_servers, stack)
        places = options.find_places(addresses, os.path.abspath(key_file))
        names = {i: f"{place.role}_{place.index}" for i, place in enumerate(places)}
        forwarder = output.Forwarder(
            num_processes=len(places),
            stdout_fd=stdout_fd,
            stderr_fd=stderr_fd,
            stdin_fd=stdin_fd,
            logs=logs.LogFiles(options.log_dir, names) if options.log_dir else None,
        )
        if forwarder.stderr.is_terminal:
            pass_fds.append(stack.enter_context(_display(forwarder)))
            base[keys.DISPLAY_FD] = str(pass_fds[-1])
        environs = {
            i: {**base, **place.to_environ(), environment.LAUNCH_ID: launch_id}
            for i, place in enumerate(places)
        }
        cores = _share_cores(options, environs)
        policy = RolePolicy(options.num_servers, options.num_workers, options.restarts)
        job = supervisor.Supervisor(
            launch_id,
            forwarder,
            grace_s=options.grace_s,
            policy=policy,
            pass_fds=pass_fds,
            adopts_orphans=adopts_orphans,
            cores=cores,
        )
        return job.run(launch.process_arguments(command), environs)


def _share_cores(
    options: RoleOptions, environs: Mapping[int, dict[str, str]]
) -> dict[int, frozenset[int]]:
    """Returns the cores of each worker, and adds variables to its environment.

    A server computes while workers wait for it, on any core that is idle.
    """
    workers = [i for i in environs if i >= options.num_servers]
    if not options.has_shares or not workers:
        return {}
    shares = core_shares.find_shares(len(workers), environs[workers[0]])
    for i in workers:
        environs[i].update(shares.environ)
    return dict(zip(workers, shares.cores, strict=False))


def _make_key_file(stack: contextlib.ExitStack) -> tuple[str, list[int]]:
    """Makes keys that do not outlive the job, however it ends.

    Returns:
      Their path in each process of the job, and the descriptors that processes inherit.
    """
    try:
        descriptor = keys.open_new_keys()
    except OSError:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = os.path.join(folder, "keys")
        keys.make_keys(path)
        return path, []
    stack.callback(os.close, descriptor)
    return f"/proc/self/fd/{descriptor}", [descriptor]


@contextlib.contextmanager
def _display(forwarder: output.Forwarder) -> Iterator[int]:
    """Yields a descriptor, and draws the lines that server 0 sends to it."""
    screen = forwarder.stderr
    # A datagram is a whole line: a killed server leaves no partial one.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    def draw(data: bytes) -> None:
        try:
            line = metrics.decode_line(data)
        except wire.DecodeError:  # A program wrote to the descriptor of the server.
            return
        num_columns = os.get_terminal_size(screen.fd).columns or 80
        screen.draw_footer(metrics.render_table(line, num_columns=num_columns))

    with ours, theirs:
        theirs.setblocking(False)
        forwarder.watch(ours.fileno(), draw)
        yield theirs.fileno()


def _hold_addresses(num: int, stack: contextlib.ExitStack) -> tuple[str, ...]:
    found = (stack.enter_context(ports.held("127.0.0.1")) for _ in range(num))
    return tuple(f"127.0.0.1:{port}" for port in found)
