"""`jdp bench hooks`: how much does each hook send, and how fast is its step?"""

from typing import Annotated

import typer

from jdp.bench import compared, hook_option, plots
from jdp.bench.compared import (
    Batch,
    Blocks,
    CompareOptions,
    JsonFile,
    NumProcesses,
    Rounds,
    Steps,
    Width,
)

HOOKS = (
    "none",
    "cast:bfloat16",
    "int8",
    "power_sgd:4",
    "top_k:0.01",
    "power_sgd:4+cast:bfloat16",
)


def bench_hooks(
    num_processes: NumProcesses = 2,
    blocks: Blocks = 48,
    width: Width = 256,
    batch: Batch = 16,
    rounds: Rounds = 11,
    steps: Steps = 10,
    hook: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOOK",
            help=f"{hook_option.HELP} May be given several times.  [default: all]",
            show_default=False,
        ),
    ] = None,
    plot: plots.PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Time a step with each communication hook.

    The model is the model of `jdp bench step`. Every round times each hook in turn; the
    table has medians over the rounds. Bytes are counted on the TCP connections of a
    process, per step, on Linux.
    """
    hooks = hook or HOOKS
    for text in hooks:
        hook_option.parse(text)
    compared.bench(
        "jdp.bench.hooks_step",
        "no hook",
        CompareOptions(
            num_processes, blocks, width, batch, rounds, steps, plot, json_file
        ),
        arguments=hooks,
    )
