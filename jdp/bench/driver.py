"""Driver: how are the processes of a benchmark started, and their variants timed?"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import rich.console
import rich.progress
import typer

from jdp.bench import channel
from jdp.launch import core_shares
from jdp.launch.core_shares import CoreShares
from jdp.runtime.environment import LaunchEnvironment

_START_TIMEOUT_S = 300.0
_RUN_TIMEOUT_S = 300.0
_ALL_CORES = CoreShares()


class BenchmarkError(RuntimeError):
    """A process of a benchmark did not start, or ended."""


@dataclasses.dataclass
class Group:
    """Processes of one system, such as JAX or torch."""

    name: str
    processes: list[subprocess.Popen[bytes]]
    log: pathlib.Path
    # By rank.
    lines: list[channel.JsonChannel] = dataclasses.field(default_factory=list)
    variants: list[str] = dataclasses.field(default_factory=list)


# Starts the processes of one system; returns None if it is not installed:
# (number of processes, port of the driver, sizes of the model, folder for logs).
Starter = Callable[[int, int, Sequence[int], pathlib.Path], Group | None]


class Turn(NamedTuple):
    """Figures of a variant in one round."""

    seconds: float  # of the median step.
    sent_bytes: float  # over TCP, per process and step.
    loss: float | None = None  # after the turn, where the processes tell it.


def time_systems(
    starters: Sequence[Starter],
    num_processes: int,
    sizes: Sequence[int],
    *,
    rounds: int,
    steps: int,
) -> dict[str, list[float]]:
    """Runs `measure_systems`; returns only the times.

    Returns:
      By variant, the median step of each round, in seconds.
    """
    turns = measure_systems(starters, num_processes, sizes, rounds=rounds, steps=steps)
    return {name: [turn.seconds for turn in found] for name, found in turns.items()}


def measure_systems(
    starters: Sequence[Starter],
    num_processes: int,
    sizes: Sequence[int],
    *,
    rounds: int,
    steps: int,
) -> dict[str, list[Turn]]:
    """Runs the variants of several systems in turn, on the same machine.

    Args:
      starters: one per system; the first system must start.
      num_processes: number of processes per system.
      sizes: sizes of the model, as arguments of the processes.
      rounds: number of turns per variant.
      steps: number of steps per turn.

    Returns:
      By variant, the figures of each round.

    Raises:
      typer.Exit: a process did not start, or ended; its last output was printed.
    """
    console = rich.console.Console(stderr=True)
    try:
        with _started(starters, num_processes, sizes, console) as groups:
            return _measure(groups, rounds, steps, console)
    except BenchmarkError as error:
        console.print(f"jdp bench: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from None


def start_jax(
    module: str,
    num_processes: int,
    port: int,
    sizes: Sequence[int],
    folder: pathlib.Path,
    *,
    arguments: Sequence[str] = (),
    shares: CoreShares = _ALL_CORES,
) -> Group:
    """Starts processes that run a module with `jdp.init`; `arguments` come last."""
    coordinator = f"127.0.0.1:{free_port()}"
    log = folder / "jax.log"
    processes = []
    for rank in range(num_processes):
        place = LaunchEnvironment(
            coordinator_address=coordinator,
            num_processes=num_processes,
            process_id=rank,
            local_process_id=rank,
            num_local_processes=num_processes,
            node_rank=0,
            devices_per_process=None,
        )
        command = [
            sys.executable,
            "-m",
            module,
            str(port),
            *map(str, sizes),
            *arguments,
        ]
        processes.append(spawn(command, log, place.to_environ(), shares, rank))
    return Group("jax", processes, log)


def spawn(
    command: list[str],
    log: pathlib.Path,
    environ: dict[str, str],
    shares: CoreShares = _ALL_CORES,
    rank: int = 0,
) -> subprocess.Popen[bytes]:
    """Starts process `rank` of `shares`; its output goes to `log`."""
    cores = shares.cores[rank] if shares.cores else None
    with log.open("ab") as file, core_shares.inherited(cores):
        return subprocess.Popen(
            command,
            env={**os.environ, **shares.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


def free_port() -> int:
    """Returns a free port of this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def write_result(
    result: dict[str, Any], config: dict[str, Any], json_file: pathlib.Path | None
) -> None:
    """Adds versions and the configuration to `result`; writes it to `json_file`."""
    result["config"] = config | {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
        "cpu": _find_cpu_name(),
        "peers": _find_versions("torch", "mpi4jax", "horovod"),
    }
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def _find_cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _find_versions(*packages: str) -> dict[str, str]:
    """Returns the versions of the packages that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _measure(
    groups: list[Group], rounds: int, steps: int, console: rich.console.Console
) -> dict[str, list[Turn]]:
    turns = [(group, variant) for group in groups for variant in group.variants]
    found: dict[str, list[Turn]] = {variant: [] for _, variant in turns}
    with rich.progress.Progress(console=console, transient=True) as progress:
        task = progress.add_task("rounds", total=rounds * len(turns))
        for round_index in range(rounds):
            # Every other round is reversed: no variant always follows the same one.
            for group, variant in turns[:: 1 if round_index % 2 == 0 else -1]:
                progress.update(task, description=variant)
                found[variant].append(_run(group, variant, steps))
                progress.advance(task)
    return found


def _run(group: Group, variant: str, steps: int) -> Turn:
    """Runs `steps` steps on all processes; process 0 reports the times."""
    for line in group.lines:
        line.send({"variant": variant, "num_steps": steps})
    try:
        replies = [line.receive(timeout_s=_RUN_TIMEOUT_S) for line in group.lines]
    except (EOFError, OSError):
        raise BenchmarkError(
            f"a process of {group.name} ended in {variant!r}:\n{_tail(group.log)}"
        ) from None
    sent = [reply["sent_bytes"] / steps for reply in replies]
    first = replies[0]
    loss = first.get("loss")
    return Turn(statistics.median(first["seconds"]), statistics.mean(sent), loss)


@contextlib.contextmanager
def _started(
    starters: Sequence[Starter],
    num_processes: int,
    sizes: Sequence[int],
    console: rich.console.Console,
) -> Iterator[list[Group]]:
    """Starts the processes of all installed systems, and ends them afterwards."""
    groups: list[Group] = []
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        try:
            for start in starters:
                group = start(num_processes, port, sizes, folder)
                if group is None:
                    continue
                groups.append(group)
                with console.status(f"starting {group.name} ..."):
                    started = _accept(server, group, num_processes)
                if started:
                    continue
                message = f"{group.name} did not start:\n{_tail(group.log)}"
                if start is starters[0]:
                    raise BenchmarkError(message)
                console.print(message, markup=False)
                _stop(groups.pop())
            yield groups
        finally:
            server.close()
            for group in groups:
                _stop(group)


def _accept(server: socket.socket, group: Group, num_processes: int) -> bool:
    """Waits until all processes of `group` have connected; False if one ended."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    by_rank: dict[int, channel.JsonChannel] = {}
    server.settimeout(0.2)
    while len(by_rank) < num_processes:
        if any(process.poll() is not None for process in group.processes):
            return False
        if time.monotonic() > deadline_s:
            return False
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        line = channel.JsonChannel(connection)
        hello = line.receive(timeout_s=10.0)
        by_rank[hello["rank"]] = line
        group.variants = hello["variants"]
    group.lines = [by_rank[rank] for rank in range(num_processes)]
    return True


def _stop(group: Group) -> None:
    """Hangs up, which ends the processes; kills processes that still run."""
    for line in group.lines:
        line.close()
    for process in group.processes:
        try:
            process.wait(timeout=10.0 if group.lines else 0.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log: pathlib.Path, num_lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
