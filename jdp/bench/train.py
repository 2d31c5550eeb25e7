"""`jdp bench train`: how many tokens per second does a GPT train on, in each system?"""

import functools
import pathlib
import statistics
from typing import Annotated, Any

import rich.console
import rich.table
import typer

from jdp.bench import (
    channel,
    compared,
    driver,
    plots,
    step,
    train_plot,
    train_setup,
)
from jdp.bench.driver import Turn
from jdp.bench.train_setup import TrainConfig
from jdp.launch import core_shares
from jdp.launch.core_shares import CoreShares
from jdp.replicas import cores

REFERENCE = "jdp"
# Systems that average their gradients, and so train the same model.
AVERAGING = (REFERENCE, "partitioned", "torch DDP")
# Systems sum in different orders, and training amplifies differences by and by.
TOLERANCE = 0.02  # of the loss, relative.


def bench_train(
    num_processes: compared.NumProcesses = 2,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the GPT.")] = 3,
    width: Annotated[
        int,
        typer.Option(
            min=1, help=f"Width of the GPT, a multiple of {train_setup.HEAD_WIDTH}."
        ),
    ] = 192,
    context: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per process.")] = 4,
    rounds: compared.Rounds = 21,
    steps: compared.Steps = 10,
    is_unpinned: Annotated[
        bool,
        typer.Option(
            "--no-pin",
            help="Let each process run on all cores, as `jdp launch --no-pin` does.",
        ),
    ] = False,
    plot: plots.PlotFile = None,
    json_file: compared.JsonFile = None,
) -> None:
    """Train a GPT in turns beside other systems, on the CPU.

    A step draws a batch of made-up text and trains on it with Adam. The systems are
    jdp with no option set, torch DDP over gloo if torch is installed, JAX's automatic
    partitioning (`jit` with a `NamedSharding`), and both frameworks without
    communication. All start from the same parameters, read the same batches, and run on
    the cores that `jdp launch` gives to processes. Every round trains each system for a
    few steps in turn; the table has medians over the rounds.

    The losses of the systems on held-out text must agree, or the command fails: it
    compares the same training.
    """
    _check(width, json_file, plot)
    config = TrainConfig(layers, width, context, batch)
    shares = _find_shares(num_processes, has_shares=not is_unpinned)
    starters = (
        functools.partial(driver.start_jax, "jdp.bench.train_jax", shares=shares),
        functools.partial(step.start_torch, "jdp.bench.train_torch", shares=shares),
    )
    turns = driver.measure_systems(
        starters, num_processes, config, rounds=rounds, steps=steps
    )
    result = summarize(turns, num_processes * context * batch, steps)
    described = config._asdict() | {
        "num_processes": num_processes,
        "rounds": rounds,
        "steps": steps,
        "is_pinned": bool(shares.cores),
    }
    driver.write_result(result, described, json_file)
    _show(result, plot)


def _check(
    width: int, json_file: pathlib.Path | None, plot: pathlib.Path | None
) -> None:
    """Raises typer.BadParameter for a width or a file that cannot be."""
    if width % train_setup.HEAD_WIDTH:
        raise typer.BadParameter(
            f"must be a multiple of {train_setup.HEAD_WIDTH}, the width of a head.",
            param_hint="--width",
        )
    channel.check_can_write(json_file)
    plots.check(plot)


def _find_shares(num_processes: int, *, has_shares: bool) -> CoreShares:
    """Returns the cores of each process, as `jdp launch` shares them out on the CPU."""
    on_cpu = {"JAX_PLATFORMS": "cpu"}
    num_threads = max(1, len(cores.find_usable().ids) // num_processes)
    threads = {"OMP_NUM_THREADS": str(num_threads)}  # torch takes all by default.
    if not has_shares:
        return CoreShares(environ=threads | on_cpu)
    found = core_shares.find_shares(num_processes, on_cpu)
    return CoreShares(found.cores, threads | found.environ | on_cpu)


def summarize(
    turns: dict[str, list[Turn]], tokens_per_step: int, steps: int
) -> dict[str, Any]:
    """Turns the rounds into one row per system.

    Args:
      turns: by system, its turn in each round; all have a loss.
      tokens_per_step: number of tokens that all processes train on in one step.
      steps: number of steps per turn.

    Returns:
      A dict whose "systems" maps each name to its median tokens per second, its median
      step in milliseconds, `over_jdp`, the median over the rounds of its tokens per
      second over jdp's, and the figures and losses by round. "steps" has the number of
      steps after each round, and "disagreement" names the systems whose losses are
      further from jdp's than `TOLERANCE`, with the largest relative difference.
    """
    reference = turns[REFERENCE]
    systems, disagreement = {}, {}
    for name, rounds in turns.items():
        pairs = list(zip(rounds, reference, strict=True))
        systems[name] = {
            "tokens_per_s": tokens_per_step
            / statistics.median(turn.seconds for turn in rounds),
            "median_ms": 1e3 * statistics.median(turn.seconds for turn in rounds),
            "over_jdp": statistics.median(
                there.seconds / here.seconds for here, there in pairs
            ),
            "rounds_tokens_per_s": [tokens_per_step / turn.seconds for turn in rounds],
            "losses": [turn.loss for turn in rounds],
        }
        largest = max(_relative_difference(here, there) for here, there in pairs)
        # Also where a loss is not a number.
        if name in AVERAGING and not largest <= TOLERANCE:
            disagreement[name] = largest
    after = range(steps, steps * len(reference) + 1, steps)
    trained = [train_setup.WARM_UP_STEPS + num_steps for num_steps in after]
    return {"systems": systems, "steps": trained, "disagreement": disagreement}


def _relative_difference(here: Turn, there: Turn) -> float:
    assert here.loss is not None and there.loss is not None
    return abs(here.loss - there.loss) / abs(there.loss)


def _show(result: dict[str, Any], plot: pathlib.Path | None) -> None:
    """Prints and draws the results; fails if the systems trained different models."""
    console = rich.console.Console()
    console.print(_table(result))
    train_plot.show(result, console)
    if plot is not None:
        train_plot.write(result, plot)
    for name, difference in result["disagreement"].items():
        typer.echo(
            f"jdp bench: the loss of {name} is up to {difference:.1%} from jdp's, more "
            f"than {TOLERANCE:.0%}: they do not train the same model.",
            err=True,
        )
    if result["disagreement"]:
        raise typer.Exit(1)


def _table(result: dict[str, Any]) -> rich.table.Table:
    config = result["config"]
    table = rich.table.Table(
        title=f"{config['num_processes']} processes, {config['num_layers']} layers, "
        f"width {config['width']}, {config['batch_size']} x {config['context']} tokens "
        f"per process, jax {config['jax']}",
        caption=f"loss: on held-out text after {result['steps'][-1]} steps",
    )
    table.add_column("system", no_wrap=True)
    for name in ("tokens/s", "ms per step", "speed / jdp's", "loss"):
        table.add_column(name, justify="right")
    for name, row in result["systems"].items():
        table.add_row(
            name,
            f"{row['tokens_per_s']:,.0f}",
            f"{row['median_ms']:.1f}",
            f"{row['over_jdp']:.3f}",
            f"{row['losses'][-1]:.4f}",
        )
    return table
