"""`jdp bench eager`: how fast is the eager engine beside torch and a compiled step?"""

import functools
import importlib.util
import pathlib
import shutil
import statistics
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import rich.console
import rich.table
import typer

from jdp.bench import channel, collectives, driver, step

# Names of the variants, as the processes make them.
ALL_REDUCE = "all_reduce"  # and the bytes.
MANY = "many all_reduces"
MANY_NEW = "many new all_reduces"
STEP = "step, by name"
FLAT = "step, flat shard_map"
DECORATED = "step, jdp"
IDLE = "idle"
COORDINATOR = "coordinator"
# Made by `horovod_all_reduce`, which needs Horovod.
HOROVOD_ONE = "Horovod, one name"
HOROVOD_MANY = "Horovod, many names"
HOROVOD_MANY_NEW = "Horovod, many new names"

NUM_NAMES = 1000
NUM_RANKS = 256  # ranks that send names to the coordinator.
_ELEMENT_BYTES = 4
NUM_BYTES = (_ELEMENT_BYTES, 64 << 10, 1 << 20, 12_681_216)
_START_TORCH = functools.partial(step.start_torch, "jdp.bench.torch_all_reduce")


class _Figure(NamedTuple):
    """One line of the table."""

    what: str
    variant: str
    unit: str
    beside: str = ""  # the variant that it is compared with.
    limit: float | None = None  # of the ratio if it is compared, else of the value.
    is_least: bool = False  # whether the limit is a lower limit.


def bench_eager(
    num_processes: Annotated[int, typer.Option("-n", min=1, help="Processes.")] = 2,
    blocks: Annotated[int, typer.Option(min=1, help="Depth of the model.")] = 48,
    width: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Samples per process.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over everything.")] = 11,
    steps: Annotated[int, typer.Option(min=1, help="Calls or steps per turn.")] = 20,
    idle_s: Annotated[
        float, typer.Option(min=0.1, help="Idle seconds per turn.")
    ] = 2.0,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
) -> None:
    """Time the eager engine beside torch, Horovod and jit.

    An all_reduce by name from the call to its result, beside torch's over gloo; 1,000
    all_reduces at once, beside Horovod's where it is installed for torch; a step of the
    model of `jdp bench step` whose gradients are submitted one by one, in another order
    on each process, beside compiled steps; the CPU time of an idle engine, and of a
    coordinator to which 256 ranks send 1,000 names. The table has medians over the
    rounds, and limits.
    """
    channel.check_can_write(json_file)
    start_jax = functools.partial(driver.start_jax, "jdp.bench.eager_step")
    seconds = driver.time_systems(
        (start_jax, _start_torch, _start_horovod),
        num_processes,
        (blocks, width, batch, round(1e3 * idle_s)),
        rounds=rounds,
        steps=steps,
    )
    result = summarize(seconds)
    config = {
        "num_processes": num_processes,
        "num_blocks": blocks,
        "width": width,
        "batch_size": batch,
        "rounds": rounds,
        "steps": steps,
        "idle_s": idle_s,
    }
    driver.write_result(result, config, json_file)
    rich.console.Console().print(_table(result))


def summarize(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Turns the medians of the rounds into rows.

    Args:
      seconds: by variant, the median of each round, in seconds. For `IDLE`, CPU seconds
        per second, minus the load of a process without an engine.

    Returns:
      A dict with "rows". Each row has its median in `unit`. If the variant that it is
      compared with has run, it has `over`, the median over the rounds of the ratio of
      times, also where the medians are names per second. If it has a limit, it has
      `is_met`, which is None if the other variant has not run.
    """
    return {"rows": [_summarize(row, seconds) for row in _make_rows()]}


def _make_rows() -> list[_Figure]:
    one, *others = [
        _Figure(
            f"{collectives.format_size(size)} / torch gloo",
            f"{ALL_REDUCE} {size}",
            "ms",
            f"{collectives.TORCH} {size}",
        )
        for size in NUM_BYTES
    ]
    return [
        one._replace(what="1 element / torch gloo", unit="µs", limit=1.2),
        _Figure(
            f"{NUM_NAMES:,} names at once", MANY, "/s", limit=50_000, is_least=True
        ),
        _Figure(
            f"{NUM_NAMES:,} new names at once",
            MANY_NEW,
            "/s",
            limit=60_000,
            is_least=True,
        ),
        _Figure(
            "1 element / Horovod",
            f"{ALL_REDUCE} {_ELEMENT_BYTES}",
            "µs",
            HOROVOD_ONE,
        ),
        _Figure(f"{NUM_NAMES:,} names / Horovod", MANY, "/s", HOROVOD_MANY),
        _Figure(
            f"{NUM_NAMES:,} new names / Horovod",
            MANY_NEW,
            "/s",
            HOROVOD_MANY_NEW,
            limit=1.0,
        ),
        _Figure("step / flat shard_map", STEP, "ms", FLAT, limit=1.5),
        _Figure("step / jdp", STEP, "ms", DECORATED),
        _Figure("idle engine", IDLE, "% CPU", limit=0.5),
        _Figure(f"coordinator, {NUM_RANKS} ranks", COORDINATOR, "s CPU", limit=1.0),
        *others,
    ]


def _summarize(row: _Figure, seconds: dict[str, list[float]]) -> dict[str, Any]:
    rounds = seconds[row.variant]
    found: dict[str, Any] = {
        "what": row.what,
        "median": _convert(statistics.median(rounds), row.unit),
        "unit": row.unit,
        "rounds_s": rounds,
    }
    judged = None if row.beside else found["median"]
    if row.beside in seconds:
        others = seconds[row.beside]
        ratios = [a / b for a, b in zip(rounds, others, strict=True)]
        judged = statistics.median(ratios)
        found["beside"] = row.beside
        found["beside_median"] = _convert(statistics.median(others), row.unit)
        found["over"] = judged
        found["beside_rounds_s"] = others
    if row.limit is not None:
        found["must_be"] = f"at {'least' if row.is_least else 'most'} {row.limit:,g}"
        found["is_met"] = None
        if judged is not None:
            found["is_met"] = (
                judged >= row.limit if row.is_least else judged <= row.limit
            )
    return found


def _convert(median_s: float, unit: str) -> float:
    if unit == "/s":
        return NUM_NAMES / median_s
    return median_s * {"µs": 1e6, "ms": 1e3, "s CPU": 1.0, "% CPU": 100.0}[unit]


def _table(result: dict[str, Any]) -> rich.table.Table:
    config = result["config"]
    has_torch = any("torch" in row.get("beside", "") for row in result["rows"])
    table = rich.table.Table(
        title=f"{config['num_processes']} processes, {config['num_blocks']} blocks, "
        f"width {config['width']}, batch {config['batch_size']}, jax {config['jax']}",
        caption=None if has_torch else "torch did not run: nothing is beside it",
        caption_justify="left",
    )
    table.add_column("what")
    for name in ("eager", "beside", "ratio", "must be", "met"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        beside = ratio = ""
        if "beside" in row:
            beside = _show(row["beside_median"], row["unit"])
            ratio = f"{row['over']:.3f}"
        is_met = {True: "yes", False: "no", None: ""}[row.get("is_met")]
        limit = row.get("must_be", "").replace("at least", "≥").replace("at most", "≤")
        median = _show(row["median"], row["unit"])
        table.add_row(row["what"], median, beside, ratio, limit, is_met)
    return table


def _show(value: float, unit: str) -> str:
    if unit == "/s":
        return f"{value:,.0f}/s"
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}{'' if unit.startswith('%') else ' '}{unit}"


def _start_torch(*args: Any) -> driver.Group | None:
    num_processes, port, _, folder = args
    # The processes take a number of devices first, which torch does not use.
    return _START_TORCH(num_processes, port, (1, *NUM_BYTES), folder)


def _start_horovod(
    num_processes: int, port: int, sizes: Sequence[int], folder: pathlib.Path
) -> driver.Group | None:
    del sizes  # of the model.
    launcher = shutil.which("horovodrun", path=str(pathlib.Path(sys.executable).parent))
    if launcher is None or importlib.util.find_spec("torch") is None:
        return None
    log = folder / "horovod.log"
    module = [sys.executable, "-m", "jdp.bench.horovod_all_reduce"]
    command = [launcher, "-np", str(num_processes), "--gloo", *module]
    variants = [HOROVOD_ONE, HOROVOD_MANY, HOROVOD_MANY_NEW]
    process = driver.spawn([*command, str(port), str(NUM_NAMES), *variants], log, {})
    return driver.Group("Horovod", [process], log)
