"""Sharded operations: one equation on the shards that a replica has of its operands."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdp import compat
from jdp.backward.flat_program import is_literal
from jdp.collectives import base
from jdp.compat import primitives
from jdp.optimizers import partials
from jdp.optimizers.partials import Op, Partial
from jdp.optimizers.shard_layout import ArrayShard, ShardLayout


def run(eqn: Any, values: list[Any], layout: ShardLayout) -> list[Any] | None:
    """Runs an equation, but not a `cond`, without communication.

    Args:
      eqn: the equation.
      values: its operands: shards, partial reductions, or whole arrays.
      layout: the replicas that have the shards.

    Returns:
      The results; None if the equation needs data of other replicas.
    """
    if any(isinstance(x, Partial) for x in values):
        return _run_linear(eqn, values, layout)
    if not any(isinstance(x, ArrayShard) for x in values):
        return compat.bind_equation(eqn, values)
    if find_place(eqn, [isinstance(x, ArrayShard) for x in values]) is None:
        return None
    name = eqn.primitive.name
    if is_elementwise(eqn):
        return _run_elementwise(eqn, values, layout)
    if name in primitives.RESHAPES:
        (shard,) = values
        return [ArrayShard(shard.data, eqn.outvars[0].aval.shape)]
    if name in primitives.REDUCTIONS:
        return _run_reduction(eqn, values[0], primitives.REDUCTIONS[name], layout)
    return _run_dot(eqn, values, layout)


def find_place(
    eqn: Any, are_sharded: Sequence[bool]
) -> Literal["shards", "partial"] | None:
    """Returns how an equation leaves its results if some operands are in shards.

    None if it needs data of other replicas.
    """
    name, avals = eqn.primitive.name, [atom.aval for atom in eqn.invars]
    if is_elementwise(eqn):
        shape = avals[are_sharded.index(True)].shape
        pairs = zip(avals, are_sharded, strict=True)
        fits = all(
            aval.shape == shape or (aval.shape == () and not is_sharded)
            for aval, is_sharded in pairs
        )
        return "shards" if fits else None
    if name in primitives.RESHAPES:
        return "shards"
    if name in primitives.REDUCTIONS:
        return "partial" if _is_full_reduction(eqn, avals[0]) else None
    return "partial" if name == "dot_general" and _is_full_dot(eqn) else None


def is_elementwise(eqn: Any) -> bool:
    """Whether each element of a result depends on one element of each operand."""
    if eqn.primitive.name == "bitcast_convert_type":
        # To another width, it adds a dimension or takes one away.
        return eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    return eqn.primitive.name in primitives.ELEMENTWISE


def _run_linear(eqn: Any, values: list[Any], layout: ShardLayout) -> list[Any] | None:
    """Adds partial sums, or multiplies one by a number; the result is a partial sum.

    Integers wrap around in any order, but their quotients are truncated. Floats of less
    than 32 bits are multiplied after the sums are combined: their parts may round to
    zero or overflow.
    """
    name = eqn.primitive.name
    if name not in (*primitives.ADDITIONS, "mul", "div", *primitives.RESHAPES):
        return None
    are_partial = [isinstance(x, Partial) for x in values]
    parts = [x for x in values if isinstance(x, Partial)]
    if any(isinstance(x, ArrayShard) for x in values) or any(
        x.op != "sum" for x in parts
    ):
        return None
    aval = eqn.outvars[0].aval
    if aval.size != 1:  # To send it would take longer.
        return None
    is_exact = jnp.issubdtype(aval.dtype, jnp.integer)
    is_wide = not is_exact and jnp.finfo(aval.dtype).bits >= 32
    if name in (*primitives.ADDITIONS, *primitives.RESHAPES):
        # One replica alone adds the operands that all have.
        is_first = layout.rank == 0
        operands = [
            x.data if is_partial else jnp.where(is_first, x, jnp.zeros_like(x))
            for x, is_partial in zip(values, are_partial, strict=True)
        ]
    elif (
        (name == "mul" and len(parts) == 1 and (is_wide or is_exact))
        or (name == "div" and are_partial == [True, False] and is_wide)
    ) and _is_plain(eqn.invars[1 - are_partial.index(True)]):
        operands = [x.data if isinstance(x, Partial) else x for x in values]
    else:
        return None
    operands = compat.cast_alike(operands, sorted(layout.tracked_axes))
    (out,) = compat.bind_equation(eqn, operands)
    return [Partial(out, "sum")]


def _is_plain(atom: Any) -> bool:
    """Whether an operand is a number that does not turn a partial sum of 0 into NaN."""
    return is_literal(atom) and bool(np.isfinite(atom.val)) and atom.val != 0


def _run_elementwise(eqn: Any, values: list[Any], layout: ShardLayout) -> list[Any]:
    shape = next(x.shape for x in values if isinstance(x, ArrayShard))
    operands = []
    for x in values:
        if isinstance(x, ArrayShard):
            operands.append(x.data)
        elif x.shape == shape and shape:
            operands.append(layout.cut(x).data)
        else:  # A scalar, or a scalar beside shards of a scalar.
            operands.append(x)
    row = (1, layout.width(shape))
    if eqn.primitive.name not in ("clamp", "select_n"):
        operands = [_broadcast(x, row) for x in operands]
    elif eqn.primitive.name == "select_n":  # Its predicate may be a scalar.
        operands = [
            x if i == 0 and x.ndim == 0 else _broadcast(x, row)
            for i, x in enumerate(operands)
        ]
    else:
        low, x, high = operands
        operands = [low, _broadcast(x, row), high]
    operands = compat.cast_alike(operands, sorted(layout.tracked_axes))
    return [ArrayShard(out, shape) for out in compat.bind_equation(eqn, operands)]


def _broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # `jnp.broadcast_to` takes 0.1 ms to find that there is nothing to do.
    return x if x.shape == shape else jnp.broadcast_to(x, shape)


def _is_full_reduction(eqn: Any, aval: Any) -> bool:
    """Whether an equation reduces all elements, and parts determine the result."""
    name, axes = eqn.primitive.name, eqn.params["axes"]
    if name in ("reduce_and", "reduce_or") and aval.dtype != jnp.bool_:
        return False
    left = math.prod(d for i, d in enumerate(aval.shape) if i not in axes)
    return left == 1 and partials.has_parts(aval.dtype, primitives.REDUCTIONS[name])


def _run_reduction(
    eqn: Any, shard: ArrayShard, op: Op, layout: ShardLayout
) -> list[Any]:
    """Reduces all elements of a shard; the parts of other replicas are missing."""
    data = layout.mask(shard, partials.neutral(shard.data.dtype, op))
    return [partials.reduce_elements(data, op, eqn.outvars[0].aval.shape)]


def _is_full_dot(eqn: Any) -> bool:
    """Whether an equation sums the products of all elements, in the same places."""
    a, b = (atom.aval for atom in eqn.invars)
    (contracted, others), _ = eqn.params["dimension_numbers"]
    return (
        a.shape == b.shape
        and len(contracted) == len(a.shape)
        and tuple(contracted) == tuple(others)
        and partials.has_parts(eqn.outvars[0].aval.dtype, "sum")
    )


def _run_dot(eqn: Any, values: list[Any], layout: ShardLayout) -> list[Any]:
    """Multiplies two arrays element by element and sums over all elements."""
    a, b = map(layout.as_shard, values)
    dtype = eqn.outvars[0].aval.dtype
    wide = base.accumulator(dtype, "sum")
    products = a.data.astype(wide) * b.data.astype(wide)
    products = layout.mask(ArrayShard(products, a.shape), 0)
    return [Partial(products.sum().astype(dtype), "sum")]
