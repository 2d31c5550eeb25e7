"""Hierarchical: an all-reduce in which each replica sends one part across nodes."""

import jax

from jdp import types
from jdp.collectives import base
from jdp.collectives.base import Op, ReduceScatterAllGather
from jdp.collectives.halving_doubling import halving_doubling_all_reduce
from jdp.collectives.ring import RING
from jdp.types import AllReduceFn, AxisName


def hierarchical_all_reduce(
    x: jax.Array,
    axis_name: AxisName,
    *,
    op: Op = "sum",
    within: ReduceScatterAllGather = RING,
    across: AllReduceFn = halving_doubling_all_reduce,
) -> jax.Array:
    """Reduce-scatters within a node, all-reduces across nodes, all-gathers within.

    With L replicas per node, each replica sends 1/L of the buffer to other nodes.
    Partial sums of 16-bit floats cross in float32.

    Args:
      x: shape (n,).
      axis_name: the axis across nodes and the axis within a node, in that order.
      op: "sum", "mean", "min", "max" or "product".
      within: `jdp.collectives.RING`, `HALVING_DOUBLING` or `SHARED_MEMORY`.
      across: function that all-reduces one part over the nodes; called with `op=`
        unless `op` is "sum" or "mean".

    Returns:
      The reduction, shape (n,), dtype of `x`; see `jdp.collectives.base`.

    Raises:
      ValueError: `axis_name` is not a pair of names.
    """
    names = types.as_axis_names(axis_name)
    if len(names) != 2:
        raise ValueError(
            "`axis_name` must be a pair, the axis across nodes and the axis within a "
            f"node, got {axis_name!r}. Make the mesh with "
            "`jdp.init(axis_name=('node', 'data'))`, which takes as many devices from "
            "every node; on one axis, use `ring_all_reduce`."
        )
    x, group = base.enter(x, names, op)
    if base.is_trivial(x, group):
        return base.replicated(x, names)
    outer, inner = names
    partial_op: Op = "sum" if op == "mean" else op
    dtype = base.accumulator(x.dtype, op)
    part = within.reduce_scatter(x, inner, op=partial_op, dtype=dtype)
    if partial_op == "sum":
        part = across(part, outer)
    else:
        part = across(part, outer, op=partial_op)  # pyright: ignore[reportCallIssue]
    part = base.finish(part, op, group.size, x.dtype)
    return base.replicated(within.all_gather(part, inner)[: x.size], names)
