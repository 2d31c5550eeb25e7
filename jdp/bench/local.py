"""`jdp bench local`: is the sending of DiLoCo hidden behind the steps?"""

from jdp.bench import compared

bench_local = compared.make_command(
    "jdp.bench.local_step",
    "no communication",
    """Time steps of DiLoCo with and without communication.

    The model is the model of `jdp bench step`. A step that communicates sends all
    parameters. Without a delay, it waits until they are sent. With a delay, it sends
    the parameters that it started from while it computes. A step of plain data-parallel
    training, which sends as much, is timed too.
    """,
)
