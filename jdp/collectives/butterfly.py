"""Butterfly: log2(n) exchanges of the whole buffer, for small ones."""

import jax

from jdp.collectives import base, folding
from jdp.collectives.base import Op
from jdp.types import AxisName


def butterfly_all_reduce(
    x: jax.Array, axis_name: AxisName, *, op: Op = "sum"
) -> jax.Array:
    """Reduces by recursive doubling: pairs at distance 1, 2, 4, ... swap buffers.

    The fewest rounds of all, log2(n), and the most bytes: the whole buffer in each. If
    n is no power of two there is a round more before, and one after.

    Args:
      x: shape (n,).
      axis_name: the axis, or axes, over which replicas lie.
      op: "sum", "mean", "min", "max" or "product".

    Returns:
      The reduction, shape (n,), dtype of `x`; see `jdp.collectives.base`.
    """
    x, group = base.enter(x, axis_name, op)
    if base.is_trivial(x, group):
        return base.replicated(x, axis_name)
    team = folding.make_team(group)
    y = folding.fold_in(team, x, op)
    distance = 1
    while distance < team.size:
        y = base.combine(op, *team.swap(y, distance))
        distance *= 2
    y = folding.fold_out(team, base.finish(y, op, group.size, x.dtype))
    return base.replicated(y, axis_name)
