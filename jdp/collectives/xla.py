"""XLA: its own collectives, under the contract of this package."""

from collections.abc import Sequence

import jax
from jax import lax

from jdp import types
from jdp.collectives import base
from jdp.collectives.base import Op, ReduceScatterAllGather
from jdp.compat import annotations
from jdp.types import AllReduce, AxisName

# XLA's own all-reduce, for which leaves are packed or not, as the backend prefers.
PLAIN = AllReduce(lax.psum, name="psum")


def psum_in_order(
    groups: Sequence[Sequence[jax.Array]], axis_name: AxisName, names: Sequence[str]
) -> list[list[jax.Array]]:
    """Sums leaf by leaf, side by side within a group and one group after another.

    XLA combines all-reduces that do not depend on each other, so a group becomes one
    all-reduce with as many operands, and the dependence keeps groups apart; on CPU only
    if the pass "cse_barrier_expander" does not remove it first.

    Args:
      groups: the arrays.
      axis_name: the axis, or axes, over which replicas lie.
      names: name scope of each group, for profilers.
    """
    reduced: list[list[jax.Array]] = []
    for group, name in zip(groups, names, strict=True):
        if reduced:
            group, reduced[-1] = annotations.order_after(group, reduced[-1])
        with jax.named_scope(name):
            reduced.append([lax.psum(x, axis_name) for x in group])
    return reduced


def psum_all_reduce(x: jax.Array, axis_name: AxisName, *, op: Op = "sum") -> jax.Array:
    """Reduces with the collectives of XLA, under the contract of this package.

    XLA has no product over replicas, so it is computed from `lax.all_gather`, which
    takes num_replicas times the memory of `x`. How a minimum or maximum treats NaN
    depends on the backend; on CPU NaN is lost.

    Args:
      x: shape (n,).
      axis_name: the axis, or axes, over which replicas lie.
      op: "sum", "mean", "min", "max" or "product".

    Returns:
      The reduction, shape (n,), dtype of `x`.
    """
    x, group = base.enter(x, axis_name, op)
    if base.is_trivial(x, group):
        return base.replicated(x, axis_name)
    if op in ("min", "max"):
        y = (lax.pmin if op == "min" else lax.pmax)(x, axis_name)
    elif op == "product":
        y = x
        for name in reversed(types.as_axis_names(axis_name)):
            y = lax.all_gather(y, name)
        y = y.reshape(group.size, -1).astype(base.accumulator(x.dtype, op)).prod(0)
    else:
        y = lax.psum(x.astype(base.accumulator(x.dtype, op)), axis_name)
    return base.replicated(base.finish(y, op, group.size, x.dtype), axis_name)


def psum_reduce_scatter(
    x: jax.Array,
    axis_name: AxisName,
    *,
    op: Op = "sum",
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Reduces and scatters with XLA's collectives: replica i gets part i of n.

    XLA only scatters sums. For another `op` this reduces everything and keeps a part.

    Args:
      x: shape (n,); padded with zeros to a multiple of the number of replicas.
      axis_name: the axis, or axes, over which replicas lie.
      op: "sum", "mean", "min", "max" or "product".
      dtype: dtype of the result; None: the dtype of `x`.

    Returns:
      Shape (ceil(n / num_replicas),).
    """
    x, group = base.enter(x, axis_name, op)
    dtype = x.dtype if dtype is None else dtype
    if base.is_trivial(x, group):
        return base.finish(x, op, 1, dtype)
    x = base.pad(x, group.size).astype(base.accumulator(x.dtype, op))
    names = types.as_axis_names(axis_name)
    if op in ("sum", "mean"):
        part = lax.psum_scatter(x, names, tiled=True)
        return base.finish(part, op, group.size, dtype)
    whole = base.cast_varying(psum_all_reduce(x, axis_name, op=op), axis_name)
    width = x.size // group.size
    return lax.dynamic_slice(whole, (group.rank * width,), (width,)).astype(dtype)


def psum_all_gather(part: jax.Array, axis_name: AxisName) -> jax.Array:
    """Gathers all parts with XLA's collectives.

    Args:
      part: shape (m,).
      axis_name: the axis, or axes, over which replicas lie.

    Returns:
      Shape (num_replicas * m,), the same on all replicas.
    """
    part, group = base.enter(part, axis_name, "sum")
    whole = part
    if not base.is_trivial(part, group):
        for name in reversed(types.as_axis_names(axis_name)):
            whole = lax.all_gather(whole, name)
    return base.replicated(whole.reshape(-1), axis_name)


PSUM = ReduceScatterAllGather(psum_reduce_scatter, psum_all_gather)
