"""`jdp bench local`: is the sending of DiLoCo hidden behind the steps?"""

from jdp.bench import compared

bench_local = compared.make_command(
    "jdp.bench.local_step",
    "no communication",
    """Times a step in which DiLoCo sends all parameters, and one that sends none.

    The model is that of `jdp bench step`. Without a delay a step waits for what it
    sends; with a delay it sends what it began with, which may go on beside it. A step
    of plain data-parallel training, which sends as much, is there for comparison.
    """,
)
