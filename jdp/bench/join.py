"""`jdp bench join`: how much does it cost that processes may have uneven inputs?"""

from jdp.bench import compared

bench_join = compared.make_command(
    "jdp.bench.join_step",
    "plain loop",
    """Time loops with `jdp.join_batches` and `jdp.Join`.

    The model is the model of `jdp bench step`. Batches come from the host, and all
    processes have the same number. Every round times each loop in turn; the table has
    medians over the rounds.
    """,
    default_rounds=21,
)
