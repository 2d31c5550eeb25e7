"""`jdp bench zero1`: how much does a step with a sharded optimizer state cost?"""

from jdp.bench import compared

bench_zero1 = compared.make_command(
    "jdp.bench.zero1_step",
    "Adam, shared memory",
    """Time a step of Adam with and without `jdp.zero1`.

    The model is the model of `jdp bench step`. Gradients are summed through shared
    memory or by XLA's collectives. Every round times each step in turn; the table has
    medians over the rounds.
    """,
)
