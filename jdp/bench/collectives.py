"""`jdp bench collectives`: how long does every all-reduce take, and as predicted?"""

import functools
import pathlib
import re
import statistics
from typing import Annotated, Any, Literal

import rich.console
import rich.progress
import rich.table
import typer

from jdp.bench import channel, collectives_plot, driver, plots, step
from jdp.bench import tune as tuning
from jdp.bench.collectives_step import ALONE, CHAIN_CHUNKS, FIT, NONE
from jdp.collectives import cost_model, measurement
from jdp.collectives.cost_model import ALGORITHMS, Links, Node
from jdp.collectives.measurement import Seconds

TORCH = "torch gloo"
_OFF = 2.0  # ratio of model and measurement from which the model is off.


def bench_collectives(
    replicas: Annotated[
        str, typer.Option(help="How many replicas, such as 2,4,8.")
    ] = "2,4,8",
    sizes: Annotated[
        str, typer.Option(help="Buffers, such as 1k,16k,1m,12.1m (KiB and MiB).")
    ] = "1k,16k,256k,1m,4m,16m,64m",
    kind: Annotated[
        Literal["devices", "processes"],
        typer.Option(help="Replicas are devices of one process, or processes."),
    ] = "devices",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over everything.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="All-reduces per turn.")] = 10,
    plot: plots.PlotFile = None,
    tune: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Only find thresholds of the custom all-reduce on GPUs; write here."
        ),
    ] = None,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
) -> None:
    """Time every all-reduce, and test the cost model.

    Each program makes a buffer and reduces it. The reported time is the difference to
    the program without the all-reduce, a median over the rounds. The number in brackets
    is the prediction of the cost model, as a multiple of that time, for the links that
    `fit_links` has measured before.
    """
    counts = parse_counts(replicas)
    if tune is not None:
        tuning.tune(tune, counts, rounds=rounds)
        return
    num_bytes = [parse_size(text) for text in sizes.split(",")]
    channel.check_can_write(json_file)
    plots.check(plot)
    results = [_measure(kind, n, num_bytes, rounds, steps) for n in counts]
    result: dict[str, Any] = {"replicas": results}
    config = {"kind": kind, "rounds": rounds, "steps": steps}
    driver.write_result(result, config, json_file)
    console = rich.console.Console()
    for each in results:
        console.print(_table(each, result["config"]))
        console.print(_remarks(each), markup=False, highlight=False)
        collectives_plot.show(each, console)
    if plot is not None:
        collectives_plot.write(results, result["config"], plot)


def _measure(
    kind: str, num_replicas: int, num_bytes: list[int], rounds: int, steps: int
) -> dict[str, Any]:
    """Times every all-reduce of `num_replicas`; returns the summary."""
    if kind == "devices":
        starters = [_start_jax]
        processes, devices = 1, num_replicas
    else:
        starters = [_start_jax, _start_torch]
        processes, devices = num_replicas, 1
    seconds = driver.time_systems(
        starters, processes, (devices, *num_bytes), rounds=rounds, steps=steps
    )
    return summarize(seconds, num_replicas)


def summarize(seconds: dict[str, list[float]], num_replicas: int) -> dict[str, Any]:
    """Turns the medians of the rounds into the times of each all-reduce.

    Args:
      seconds: by "name bytes", seconds per round, including programs without an
        all-reduce.
      num_replicas: the number of replicas.

    Returns:
      A dict with the fitted links; "times", one record per all-reduce and size, with
      the measured and the predicted seconds; "choices", the pick of `choose` at each
      size, and its time over the time of the best; and "over_torch", by size, the time
      of a call through shared memory over torch's time, if both were timed.
    """
    rounds: dict[tuple[str, int], list[float]] = {}
    for variant, values in seconds.items():
        name, _, size = variant.rpartition(" ")
        rounds[name, int(size)] = values
    fitted, measured = [], []
    for (name, size), values in rounds.items():
        if name.startswith(FIT):
            fitted.append(Seconds(name.removeprefix(FIT), size, values))
        elif name != NONE:
            bare = [0.0] * len(values) if name in (ALONE, TORCH) else rounds[NONE, size]
            net = [a - b for a, b in zip(values, bare, strict=True)]
            measured.append(Seconds(name, size, net))
    links = measurement.make_links(fitted, num_replicas)
    times = [
        {
            "algorithm": each.algorithm,
            "num_bytes": each.num_bytes,
            "measured_s": each.median,
            "model_s": _model_s(each, num_replicas, links),
            "rounds_s": each.rounds,
        }
        for each in measured
    ]
    return {
        "num_replicas": num_replicas,
        "latency_s": links.latency_s,
        "bandwidth_bytes_per_s": links.bandwidth_bytes_per_s,
        "compute_s_per_byte": links.compute_s_per_byte,
        "times": times,
        "choices": _choices(measured, num_replicas, links),
        "over_torch": {
            str(size): statistics.median(
                a / b for a, b in zip(values, rounds[TORCH, size], strict=True)
            )
            for (name, size), values in rounds.items()
            if name == ALONE and (TORCH, size) in rounds
        },
    }


def _choices(
    measured: list[Seconds], num_replicas: int, links: Links
) -> list[dict[str, Any]]:
    """Returns the choice of `choose` among all but Adasum, which does not sum."""
    sizes = sorted({each.num_bytes for each in measured})
    found = []
    for size in sizes:
        at_size = {
            each.algorithm: each.median
            for each in measured
            if each.num_bytes == size and each.algorithm not in (ALONE, TORCH, "adasum")
        }
        chosen = cost_model.choose(size, num_replicas, links)
        best = min(at_size, key=at_size.__getitem__)
        found.append(
            {
                "num_bytes": size,
                "chosen": chosen,
                "best": best,
                "over_best": at_size[chosen] / at_size[best],
            }
        )
    return found


def _model_s(each: Seconds, num_replicas: int, links: Links) -> float | None:
    if each.algorithm not in ALGORITHMS:
        return None  # XLA's and shared memory are measured, not modelled.
    chunks = cost_model.num_chunks_here(each.algorithm, each.num_bytes, num_replicas)
    return cost_model.predict(
        each.algorithm,
        each.num_bytes,
        num_replicas,
        links,
        num_chunks=CHAIN_CHUNKS if each.algorithm == "chain" else chunks,
        node=Node(num_replicas // 2, links) if num_replicas % 2 == 0 else None,
    ).total_s


def _table(result: dict[str, Any], config: dict[str, Any]) -> rich.table.Table:
    sizes = sorted({time["num_bytes"] for time in result["times"]})
    table = rich.table.Table(
        title=f"{result['num_replicas']} {config['kind']}, jax {config['jax']}: "
        "milliseconds, and the model over them"
    )
    table.add_column("all-reduce")
    for size in sizes:
        table.add_column(format_size(size), justify="right")
    cells: dict[str, dict[int, str]] = {}
    for time in result["times"]:
        text = f"{1e3 * time['measured_s']:.3g}"
        if time["model_s"] is not None:
            ratio = time["model_s"] / time["measured_s"]
            mark = "!" if _is_off(ratio) else ""
            text += f" ({ratio:.2g}{mark})"
        cells.setdefault(time["algorithm"], {})[time["num_bytes"]] = text
    for name, by_size in cells.items():
        table.add_row(name, *(by_size.get(size, "") for size in sizes))
    return table


def _remarks(result: dict[str, Any]) -> str:
    n = result["num_replicas"]
    lines = [
        f"links of {n} replicas: latency {1e6 * result['latency_s']:.3g} us, bandwidth "
        f"{8e-9 * result['bandwidth_bytes_per_s']:.3g} Gbit/s, reducing "
        f"{1e9 * result['compute_s_per_byte']:.3g} ns per byte"
    ]
    for time in result["times"]:
        if time["model_s"] is None:
            continue
        ratio = time["model_s"] / time["measured_s"]
        if _is_off(ratio):
            lines.append(
                f"the model is off by {max(ratio, 1 / ratio):.1f}x: "
                f"{time['algorithm']}, {format_size(time['num_bytes'])}: "
                f"{1e3 * time['measured_s']:.3g} ms measured, "
                f"{1e3 * time['model_s']:.3g} ms predicted"
            )
    for choice in result["choices"]:
        lines.append(
            f"choose at {format_size(choice['num_bytes'])}: {choice['chosen']}, "
            f"{choice['over_best']:.2f} of the best ({choice['best']})"
        )
    for size, ratio in result["over_torch"].items():
        lines.append(
            f"a call through shared memory over torch, {format_size(int(size))}: "
            f"{ratio:.2f}"
        )
    worst = max(choice["over_best"] for choice in result["choices"])
    lines.append(f"choose at its worst: {worst:.2f} of the best")
    return "\n".join(lines)


def _is_off(ratio: float) -> bool:
    return not 1 / _OFF <= ratio <= _OFF


def format_size(num_bytes: int) -> str:
    """Returns a size in KiB or MiB."""
    unit, name = (1 << 20, "MiB") if num_bytes >= 1 << 20 else (1 << 10, "KiB")
    return f"{num_bytes / unit:.4g} {name}"


def parse_counts(text: str) -> list[int]:
    """Returns numbers of replicas."""
    return parse_numbers(text, 2, 64, "--replicas")


def parse_numbers(text: str, least: int, most: int, option: str) -> list[int]:
    """Returns numbers that are separated by commas.

    Raises:
      typer.BadParameter: a part is not a number, or out of range.
    """
    parts = text.split(",")
    if not all(part.strip().isdigit() and least <= int(part) <= most for part in parts):
        raise typer.BadParameter(
            f"{text!r} must be numbers from {least} to {most}, such as {most // 2},"
            f"{most}.",
            param_hint=option,
        )
    return [int(part) for part in parts]


def parse_size(text: str) -> int:
    """Returns bytes, a multiple of 4.

    Raises:
      typer.BadParameter: `text` is not a number with a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km])", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise typer.BadParameter(
            f"{text!r} must be a number with k or m (KiB, MiB), such as 64k or 12.1m.",
            param_hint="--sizes",
        )
    return int(float(match[1]) * (1 << (10 if match[2] == "k" else 20))) // 4 * 4


_start_jax = functools.partial(driver.start_jax, "jdp.bench.collectives_step")
_start_torch = functools.partial(step.start_torch, "jdp.bench.torch_all_reduce")
