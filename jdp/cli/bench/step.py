"""`jdp bench step`: one train step in jdp and in what it is compared to."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import rich.console
import rich.progress
import rich.table
import typer

from jdp.cli.bench import channel
from jdp.cli.bench.channel import StepConfig
from jdp.runtime.environment import LaunchEnvironment

_START_TIMEOUT_S = 120.0
_RUN_TIMEOUT_S = 300.0
_REFERENCE = "jdp"


class BenchmarkError(RuntimeError):
    """A worker did not start, or ended."""


@dataclasses.dataclass
class Group:
    """The processes of one system."""

    name: str
    processes: list[subprocess.Popen[bytes]]
    log: pathlib.Path
    lines: list[channel.Line] = dataclasses.field(default_factory=list)  # by rank.
    variants: list[str] = dataclasses.field(default_factory=list)


def bench_step(
    num_processes: Annotated[int, typer.Option("-n", min=1, help="Processes.")] = 2,
    blocks: Annotated[int, typer.Option(min=1, help="Depth of the model.")] = 48,
    width: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a process.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all systems.")] = 11,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a system a round.")] = 10,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
) -> None:
    """Times a data-parallel step, in turns with what it is compared to.

    The model is a stack of blocks `h + tanh(h @ W + b) * s * 0.1` with three leaves
    each; a step is loss, gradients, their average, and plain gradient descent. Every
    round times each system in turn; the table holds medians over the rounds.
    """
    channel.check_can_write(json_file)
    console = rich.console.Console(stderr=True)
    config = StepConfig(blocks, width, batch)
    try:
        with _started(num_processes, config, console) as groups:
            seconds = _measure(groups, rounds, steps, console)
    except BenchmarkError as error:
        console.print(f"jdp bench: {error}", markup=False, highlight=False)
        raise typer.Exit(1) from None
    result = summarize(seconds)
    result["config"] = {
        "num_processes": num_processes,
        "num_blocks": blocks,
        "width": width,
        "batch_size": batch,
        "rounds": rounds,
        "steps": steps,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
    }
    rich.console.Console().print(_table(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def summarize(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Turns the medians of the rounds into one row a system.

    Args:
      seconds: for each system, the median step of each round, in seconds.

    Returns:
      A dict whose "systems" maps each name to its median and least time in
      milliseconds, and `jdp_over`: the median over the rounds of jdp's time over its.
    """
    reference = seconds[_REFERENCE]
    systems = {}
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(reference, values, strict=True)]
        systems[name] = {
            "median_ms": 1e3 * statistics.median(values),
            "min_ms": 1e3 * min(values),
            "jdp_over": statistics.median(ratios),
            "rounds_ms": [1e3 * value for value in values],
        }
    return {"systems": systems}


def _table(result: dict[str, Any]) -> rich.table.Table:
    config = result["config"]
    title = (
        f"{config['num_processes']} processes, {config['num_blocks']} blocks, width "
        f"{config['width']}, batch {config['batch_size']}, jax {config['jax']}"
    )
    table = rich.table.Table(title=title)
    table.add_column("system")
    for name in ("median ms", "least ms", "jdp / it"):
        table.add_column(name, justify="right")
    for name, row in result["systems"].items():
        table.add_row(
            name,
            f"{row['median_ms']:.2f}",
            f"{row['min_ms']:.2f}",
            f"{row['jdp_over']:.3f}",
        )
    return table


def _measure(
    groups: list[Group], rounds: int, steps: int, console: rich.console.Console
) -> dict[str, list[float]]:
    turns = [(group, variant) for group in groups for variant in group.variants]
    seconds: dict[str, list[float]] = {variant: [] for _, variant in turns}
    with rich.progress.Progress(console=console, transient=True) as progress:
        task = progress.add_task("rounds", total=rounds * len(turns))
        for round_index in range(rounds):
            # Every other round backwards, so that no system always follows another.
            for group, variant in turns[:: 1 if round_index % 2 == 0 else -1]:
                progress.update(task, description=variant)
                seconds[variant].append(_run(group, variant, steps))
                progress.advance(task)
    return seconds


def _run(group: Group, variant: str, steps: int) -> float:
    """Runs `steps` steps on all processes; returns the median of process 0, in s."""
    for line in group.lines:
        line.send({"variant": variant, "num_steps": steps})
    try:
        replies = [line.receive(timeout_s=_RUN_TIMEOUT_S) for line in group.lines]
    except (EOFError, OSError):
        raise BenchmarkError(
            f"a worker of {group.name} ended in {variant!r}:\n{_tail(group.log)}"
        ) from None
    return statistics.median(replies[0])


@contextlib.contextmanager
def _started(
    num_processes: int, config: StepConfig, console: rich.console.Console
) -> Iterator[list[Group]]:
    """Starts the workers of all systems that are installed, and ends them."""
    groups: list[Group] = []
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        sizes = [str(value) for value in config[:3]]
        try:
            for start in (_start_jax, _start_torch, _start_mpi4jax):
                group = start(num_processes, port, sizes, folder)
                if group is None:
                    continue
                groups.append(group)
                with console.status(f"starting {group.name} ..."):
                    started = _accept(server, group, num_processes)
                if started:
                    continue
                message = f"{group.name} did not start:\n{_tail(group.log)}"
                if group.name == "jax":
                    raise BenchmarkError(message)
                console.print(message, markup=False)
                _stop(groups.pop())
            yield groups
        finally:
            server.close()
            for group in groups:
                _stop(group)


def _start_jax(
    num_processes: int, port: int, sizes: list[str], folder: pathlib.Path
) -> Group:
    coordinator = f"127.0.0.1:{_free_port()}"
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
        command = [sys.executable, "-m", "jdp.cli.bench.jax_step", str(port), *sizes]
        processes.append(_spawn(command, log, place.to_environ()))
    return Group("jax", processes, log)


def _start_torch(
    num_processes: int, port: int, sizes: list[str], folder: pathlib.Path
) -> Group | None:
    if importlib.util.find_spec("torch") is None:
        return None
    rendezvous = str(_free_port())
    log = folder / "torch.log"
    module = [sys.executable, "-m", "jdp.cli.bench.torch_step", str(port)]
    processes = [
        _spawn([*module, str(rank), str(num_processes), rendezvous, *sizes], log, {})
        for rank in range(num_processes)
    ]
    return Group("torch", processes, log)


def _start_mpi4jax(
    num_processes: int, port: int, sizes: list[str], folder: pathlib.Path
) -> Group | None:
    mpirun = shutil.which("mpirun")
    if mpirun is None or importlib.util.find_spec("mpi4jax") is None:
        return None
    worker = [sys.executable, "-m", "jdp.cli.bench.mpi4jax_step", str(port), *sizes]
    command = [mpirun, "--oversubscribe", "--bind-to", "none", "-n"]
    log = folder / "mpi4jax.log"
    # Open MPI refuses to run as root, as containers do, without these.
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    process = _spawn([*command, str(num_processes), *worker], log, as_root)
    return Group("mpi4jax", [process], log)


def _spawn(
    command: list[str], log: pathlib.Path, environ: dict[str, str]
) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


def _accept(server: socket.socket, group: Group, num_processes: int) -> bool:
    """Waits until all workers of `group` have called; False if one ended first."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    by_rank: dict[int, channel.Line] = {}
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
        line = channel.Line(connection)
        hello = line.receive(timeout_s=10.0)
        by_rank[hello["rank"]] = line
        group.variants = hello["variants"]
    group.lines = [by_rank[rank] for rank in range(num_processes)]
    return True


def _stop(group: Group) -> None:
    """Hangs up, at which the workers end; kills those that do not."""
    for line in group.lines:
        line.close()
    for process in group.processes:
        try:
            process.wait(timeout=10.0 if group.lines else 0.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _tail(log: pathlib.Path, num_lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
