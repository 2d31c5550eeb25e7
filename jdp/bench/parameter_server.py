"""`jdp bench parameter-server`: how fast are servers beside other ways?"""

import functools
import importlib.util
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import rich.console
import rich.table
import typer

from jdp.bench import channel, driver

# Names of the variants, as the processes make them.
ALL_REDUCE_STEP = "step, all-reduce over gloo"
SYNC_STEP = "step, sync"
EXCHANGE = "push + pull"
RAW = "raw loopback"
SYNC_SLOW = "sync, a worker 5x slower"
ASYNC_SLOW = "async, a worker 5x slower"
NUM_WORKERS = 2
_MODULE = "jdp.bench.parameter_server_step"


class _Comparison(NamedTuple):
    """One line of the table: a ratio of two variants, and its limit."""

    what: str
    variant: str
    beside: str
    limit: float
    is_least: bool = False


_ROWS = (
    _Comparison("sync step / all-reduce step", SYNC_STEP, ALL_REDUCE_STEP, 1.5),
    _Comparison("push + pull / raw loopback", EXCHANGE, RAW, 1.5),
    # Times are seconds per update, so the ratio of updates per second is inverted.
    _Comparison("updates/s, async / sync", SYNC_SLOW, ASYNC_SLOW, 1.6, is_least=True),
)


def bench_parameter_server(
    blocks: Annotated[int, typer.Option(min=1, help="Depth of the model.")] = 48,
    width: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Samples per worker.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over everything.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Steps per turn.")] = 20,
    seeds: Annotated[
        int, typer.Option(min=0, help="Training runs on digits per mode.")
    ] = 5,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
) -> None:
    """Time one parameter server with two workers.

    A synchronous step beside a step whose gradients gloo averages; a push and a pull
    beside a round trip of the same bytes over a socket; updates per second with a slow
    worker; and the accuracy of each mode on digits, if scikit-learn is installed.
    """
    channel.check_can_write(json_file)
    with tempfile.TemporaryDirectory() as folder:
        seconds = driver.time_systems(
            (
                functools.partial(driver.start_jax, _MODULE, arguments=("gloo",)),
                functools.partial(_start_servers, "sync", folder),
                functools.partial(_start_servers, "async", folder),
            ),
            NUM_WORKERS,
            (blocks, width, batch, driver.free_port()),
            rounds=rounds,
            steps=steps,
        )
        accuracy = {}
        if seeds and importlib.util.find_spec("sklearn") is not None:
            from jdp.bench import parameter_server_step

            accuracy = parameter_server_step.measure_accuracy(
                folder, driver.free_port, seeds
            )
    result = summarize(seconds, accuracy)
    config = {
        "num_servers": 1,
        "num_workers": NUM_WORKERS,
        "num_blocks": blocks,
        "width": width,
        "batch_size": batch,
        "rounds": rounds,
        "steps": steps,
        "seeds": seeds,
    }
    driver.write_result(result, config, json_file)
    rich.console.Console().print(_table(result))


def summarize(
    seconds: dict[str, list[float]], accuracy: dict[str, float]
) -> dict[str, Any]:
    """Turns the medians of the rounds, and accuracies in percent, into rows."""
    rows = []
    for row in _ROWS:
        pairs = zip(seconds[row.variant], seconds[row.beside], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        rows.append(
            {
                "what": row.what,
                "value": ratio,
                "must_be": f"at {'least' if row.is_least else 'most'} {row.limit:g}",
                "is_met": ratio >= row.limit if row.is_least else ratio <= row.limit,
                "ms": 1e3 * statistics.median(seconds[row.variant]),
                "beside_ms": 1e3 * statistics.median(seconds[row.beside]),
                "rounds_s": seconds[row.variant],
                "beside_rounds_s": seconds[row.beside],
            }
        )
    for mode, value in accuracy.items():
        if mode != "sync":
            lost = accuracy["sync"] - value
            rows.append(
                {
                    "what": f"points below sync, {mode}",
                    "value": lost,
                    "must_be": "at most 1",
                    "is_met": lost <= 1,
                }
            )
    return {"rows": rows, "accuracy_percent": accuracy}


def _table(result: dict[str, Any]) -> rich.table.Table:
    config = result["config"]
    table = rich.table.Table(
        title=f"1 server, {config['num_workers']} workers, {config['num_blocks']} "
        f"blocks, width {config['width']}, jax {config['jax']}"
    )
    table.add_column("what")
    for name in ("ms", "beside", "value", "must be", "met"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        times = [f"{row[k]:.1f}" if k in row else "" for k in ("ms", "beside_ms")]
        limit = row["must_be"].replace("at least", "≥").replace("at most", "≤")
        met = "yes" if row["is_met"] else "no"
        table.add_row(row["what"], *times, f"{row['value']:.2f}", limit, met)
    return table


def _start_servers(
    mode: str,
    key_folder: str,
    num_workers: int,
    port: int,
    sizes: Sequence[int],
    folder: pathlib.Path,
) -> driver.Group:
    # Here, for the other benchmarks do not need them.
    from jdp.parameter_server import keys, launching

    key_file = f"{key_folder}/{mode}-keys"
    keys.make_keys(key_file)
    options = launching.RoleOptions(num_servers=1, num_workers=num_workers)
    address = f"127.0.0.1:{driver.free_port()}"
    log = folder / f"{mode}.log"
    processes = [
        driver.spawn(_command(mode, port, sizes), log, place.to_environ())
        for place in options.find_places((address,), key_file)
    ]
    return driver.Group(mode, processes, log)


def _command(mode: str, port: int, sizes: Sequence[int]) -> list[str]:
    return [sys.executable, "-m", _MODULE, str(port), *map(str, sizes), mode]
