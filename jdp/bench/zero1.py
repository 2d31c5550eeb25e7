"""`jdp bench zero1`: what a step costs whose optimizer state is spread out."""

from jdp.bench import compared

bench_zero1 = compared.make_command(
    "jdp.bench.zero1_step",
    "Adam, shared memory",
    """Times a step of Adam with `jdp.zero1`, in turns with one without.

    The model is that of `jdp bench step`; what sums is shared memory, or XLA's
    collectives. Every round times each in turn; the table holds medians over the
    rounds.
    """,
)
