"""`jdp bench zero1`: what a step costs whose optimizer state is spread out."""

from jdp.cli.bench import compared
from jdp.cli.bench.compared import (
    Batch,
    Blocks,
    JsonFile,
    NumProcesses,
    Rounds,
    Steps,
    Width,
)


def bench_zero1(
    num_processes: NumProcesses = 2,
    blocks: Blocks = 48,
    width: Width = 256,
    batch: Batch = 16,
    rounds: Rounds = 11,
    steps: Steps = 10,
    json_file: JsonFile = None,
) -> None:
    """Times a step of Adam with `jdp.zero1`, in turns with one without.

    The model is that of `jdp bench step`; what sums is shared memory, or XLA's
    collectives. Every round times each in turn; the table holds medians over the
    rounds.
    """
    compared.bench(
        "jdp.cli.bench.zero1_step",
        "Adam, shared memory",
        num_processes=num_processes,
        blocks=blocks,
        width=width,
        batch=batch,
        rounds=rounds,
        steps=steps,
        json_file=json_file,
    )
