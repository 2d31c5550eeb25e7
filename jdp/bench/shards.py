"""`jdp bench shards`: how much does a step with the same bits everywhere cost?"""

from jdp.bench import compared

bench_shards = compared.make_command(
    "jdp.bench.shards_step",
    "plain",
    """Time a step with and without `num_shards`.

    The model is the model of `jdp bench step`. With one shard per replica the step is
    compared with the plain step, and with four with `accumulate_gradients(loss_fn, 4)`,
    which computes as many samples at once. Every round times each step in turn; the
    table has medians over the rounds.
    """,
)
