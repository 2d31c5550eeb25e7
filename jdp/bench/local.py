"""`jdp bench local`: is the sending of DiLoCo hidden behind the steps?"""

from jdp.bench import compared

bench_local = compared.make_command(
    "jdp.bench.local_step",
    "no communication",
    """Times steps of DiLoCo that send all parameters, and steps that send nothing.

    The model is the model of `jdp bench step`. Without a delay, a step waits until its
    parameters are sent. With a delay, it sends the parameters that it started from
    while it computes. A step of plain data-parallel training, which sends as much, is
    timed too.
    """,
)
