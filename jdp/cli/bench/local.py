"""`jdp bench local`: is the sending of DiLoCo hidden behind the steps?"""

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


def bench_local(
    num_processes: NumProcesses = 2,
    blocks: Blocks = 48,
    width: Width = 256,
    batch: Batch = 16,
    rounds: Rounds = 11,
    steps: Steps = 10,
    json_file: JsonFile = None,
) -> None:
    """Times a step in which DiLoCo sends all parameters, and one that sends none.

    The model is that of `jdp bench step`. Without a delay a step waits for what it
    sends; with a delay it sends what it began with, which may go on beside it. A step
    of plain data-parallel training, which sends as much, is there for comparison.
    """
    compared.bench(
        "jdp.cli.bench.local_step",
        "no communication",
        num_processes=num_processes,
        blocks=blocks,
        width=width,
        batch=batch,
        rounds=rounds,
        steps=steps,
        json_file=json_file,
    )
