"""`jdp bench join`: what it costs that processes may have uneven inputs."""

from jdp.bench import compared

bench_join = compared.make_command(
    "jdp.bench.join_step",
    "plain loop",
    """Times a loop over `jdp.join_batches`, and one in a `jdp.Join`, with a plain one.

    The model is that of `jdp bench step`. Batches come from the host, and all processes
    have as many; every round times each loop in turn, and the table holds medians over
    the rounds.
    """,
    default_rounds=21,
)
