"""`jdp bench join`: what it costs that processes may have uneven inputs."""

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


def bench_join(
    num_processes: NumProcesses = 2,
    blocks: Blocks = 48,
    width: Width = 256,
    batch: Batch = 16,
    rounds: Rounds = 21,
    steps: Steps = 10,
    json_file: JsonFile = None,
) -> None:
    """Times a loop over `jdp.join_batches`, and one in a `jdp.Join`, with a plain one.

    The model is that of `jdp bench step`. Batches come from the host, and all processes
    have as many; every round times each loop in turn, and the table holds medians over
    the rounds.
    """
    compared.bench(
        "jdp.cli.bench.join_step",
        "plain loop",
        num_processes=num_processes,
        blocks=blocks,
        width=width,
        batch=batch,
        rounds=rounds,
        steps=steps,
        json_file=json_file,
    )
