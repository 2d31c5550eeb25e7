"""XLA: its own collectives, under the contract of this package."""

import jax
from jax import lax

from jdp.collectives import base
from jdp.collectives.base import Op, ReduceScatterAllGather
from jdp.replicas import mesh
from jdp.types import AxisName


def psum_all_reduce(x: jax.Array, axis_name: AxisName, *, op: Op = "sum") -> jax.Array:
    """Reduces with the collectives of XLA, under the contract of this package.

    XLA has no product of replicas: theirs is taken of what `lax.all_gather` returns,
    num_replicas times the memory of `x`. NaN in a minimum or a maximum becomes whatever
    the backend makes of it: on CPU it is lost.

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
        for name in reversed(mesh.as_axis_names(axis_name)):
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
    """The first half with the collectives of XLA: replica i gets part i of n.

    XLA scatters sums alone; of another `op` it reduces all and keeps a part.

    Args:
      x: shape (n,); padded with zeros to a multiple of the number of replicas.
      axis_name: the axis, or axes, over which replicas lie.
      op: "sum", "mean", "min", "max" or "product".
      dtype: of the result; that of `x` if None.

    Returns:
      Shape (ceil(n / num_replicas),).
    """
    x, group = base.enter(x, axis_name, op)
    dtype = x.dtype if dtype is None else dtype
    if base.is_trivial(x, group):
        return base.finish(x, op, 1, dtype)
    x = base.pad(x, group.size).astype(base.accumulator(x.dtype, op))
    names = mesh.as_axis_names(axis_name)
    if op in ("sum", "mean"):
        part = lax.psum_scatter(x, names, tiled=True)
        return base.finish(part, op, group.size, dtype)
    whole = base.cast_varying(psum_all_reduce(x, axis_name, op=op), axis_name)
    width = x.size // group.size
    return lax.dynamic_slice(whole, (group.rank * width,), (width,)).astype(dtype)


def psum_all_gather(part: jax.Array, axis_name: AxisName) -> jax.Array:
    """The second half with the collective of XLA.

    Args:
      part: shape (m,).
      axis_name: the axis, or axes, over which replicas lie.

    Returns:
      Shape (num_replicas * m,), the same on all replicas.
    """
    part, group = base.enter(part, axis_name, "sum")
    whole = part
    if not base.is_trivial(part, group):
        for name in reversed(mesh.as_axis_names(axis_name)):
            whole = lax.all_gather(whole, name)
    return base.replicated(whole.reshape(-1), axis_name)


PSUM = ReduceScatterAllGather(psum_reduce_scatter, psum_all_gather)
