"""`jdp bench step`: how long does one train step take in jdp and in other systems?"""

import functools
import importlib.util
import pathlib
import shutil
import statistics
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import rich.console
import rich.table
import typer

from jdp.bench import channel, driver, overlap, plots, step_plot
from jdp.launch.core_shares import CoreShares

_REFERENCE = "jdp"
_ALL_CORES = CoreShares()


def bench_step(
    num_processes: Annotated[int, typer.Option("-n", min=1, help="Processes.")] = 2,
    blocks: Annotated[int, typer.Option(min=1, help="Depth of the model.")] = 48,
    width: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Samples per process.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all systems.")] = 11,
    steps: Annotated[int, typer.Option(min=1, help="Steps per system and round.")] = 10,
    is_overlap: Annotated[
        bool,
        typer.Option(
            "--overlap", help="Time how much of the communication is hidden instead."
        ),
    ] = False,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Layers of the model with a loop. With --overlap only. [default: 24]",
            show_default=False,
        ),
    ] = None,
    plot: plots.PlotFile = None,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
) -> None:
    """Time a data-parallel step beside other systems.

    The model is a stack of blocks `h + tanh(h @ W + b) * s * 0.1` with three leaves
    each. A step is the loss, gradients, their average, and plain gradient descent.
    Every round times each system in turn; the table has medians over the rounds. "two
    copies alone" copies as many bytes as the gradients have into shared memory, and
    back, with numpy: what a reduction through memory takes at least.

    With --overlap: the step, the step without communication, and the communication
    alone, for that model and for a model of stacked layers in a loop.
    """
    _check(is_overlap, layers, json_file, plot)
    sizes = (blocks, width, batch)
    config = {
        "num_processes": num_processes,
        "num_blocks": blocks,
        "width": width,
        "batch_size": batch,
        "rounds": rounds,
        "steps": steps,
    }
    if is_overlap:
        config["num_layers"] = layers or 24
        result = overlap.measure(num_processes, (*sizes, layers or 24), rounds, steps)
        make_table = overlap.make_table
    else:
        result, make_table = measure(num_processes, sizes, rounds, steps), _table
    driver.write_result(result, config, json_file)
    rich.console.Console().print(make_table(result))
    if plot is not None:
        step_plot.write([result], plot)


def _check(
    is_overlap: bool,
    layers: int | None,
    json_file: pathlib.Path | None,
    plot: pathlib.Path | None,
) -> None:
    """Raises typer.BadParameter for options that exclude each other, and for files."""
    if layers is not None and not is_overlap:
        raise typer.BadParameter("is for --overlap alone.", param_hint="--layers")
    if plot is not None and is_overlap:
        raise typer.BadParameter("cannot draw --overlap.", param_hint="--plot")
    channel.check_can_write(json_file)
    plots.check(plot)


def measure(
    num_processes: int, sizes: tuple[int, ...], rounds: int, steps: int
) -> dict[str, Any]:
    """Times the step of every system; returns the summary."""
    start_jax = functools.partial(driver.start_jax, "jdp.bench.jax_step")
    start_peer = functools.partial(start_torch, "jdp.bench.torch_step")
    starters = (start_jax, start_peer, _start_mpi4jax)
    seconds = driver.time_systems(
        starters, num_processes, sizes, rounds=rounds, steps=steps
    )
    return summarize(seconds)


def summarize(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Turns the medians of the rounds into one row per system.

    Args:
      seconds: by system, the median step of each round, in seconds.

    Returns:
      A dict whose "systems" maps each name to its median and least time in
      milliseconds, and to `jdp_over`, the median over the rounds of jdp's time over the
      time of the system.
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


def start_torch(
    worker: str,
    num_processes: int,
    port: int,
    sizes: Sequence[int],
    folder: pathlib.Path,
    *,
    shares: CoreShares = _ALL_CORES,
) -> driver.Group | None:
    """Starts the processes of a module that runs torch; None if torch is missing."""
    if importlib.util.find_spec("torch") is None:
        return None
    rendezvous = str(driver.free_port())
    log = folder / "torch.log"
    module = [sys.executable, "-m", worker, str(port)]
    processes = [
        driver.spawn(
            [*module, str(rank), str(num_processes), rendezvous, *map(str, sizes)],
            log,
            {},
            shares,
            rank,
        )
        for rank in range(num_processes)
    ]
    return driver.Group("torch", processes, log)


def _start_mpi4jax(
    num_processes: int, port: int, sizes: Sequence[int], folder: pathlib.Path
) -> driver.Group | None:
    mpirun = shutil.which("mpirun")
    if mpirun is None or importlib.util.find_spec("mpi4jax") is None:
        return None
    worker = [
        sys.executable,
        "-m",
        "jdp.bench.mpi4jax_step",
        str(port),
        *map(str, sizes),
    ]
    command = [mpirun, "--oversubscribe", "--bind-to", "none", "-n"]
    log = folder / "mpi4jax.log"
    # Open MPI refuses to run as root, as containers do, without these.
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    process = driver.spawn([*command, str(num_processes), *worker], log, as_root)
    return driver.Group("mpi4jax", [process], log)
