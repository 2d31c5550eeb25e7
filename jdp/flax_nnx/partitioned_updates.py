"""Partitioned updates: what of a metric's update does each replica do for its samples?

An update is traced twice: for the samples of a replica, and for the samples of all. The
second program is run, each of its values in one of three forms: the whole value, which
is the same on all replicas; a part, which belongs to a replica's samples; or a sum of
what each replica has. A sum over samples turns a part into a sum, and linear operations
leave it one. What no rule covers is unknown.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jdp import compat
from jdp.backward import flow
from jdp.compat import primitives
from jdp.flax_nnx.program_pairs import (
    Pair,
    Part,
    Total,
    Value,
    Whole,
    are_alike,
    grown_dims,
)


def run(
    narrow: Any,
    wide: Any,
    states: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
    dims: Sequence[int | None],
    axis_names: tuple[str, ...],
) -> list[Total] | None:
    """Runs an update of all replicas' samples without gathering them.

    Args:
      narrow: closed jaxpr: states and arrays -> new states.
      wide: the same for the samples of all replicas.
      states: the states, the same on all replicas.
      arrays: the arguments of the update on this replica.
      dims: per array the dimension of samples; None: it is the same on all replicas.
      axis_names: the axes along which the replicas lie.

    Returns:
      The new states; None if the samples must be gathered.
    """
    entering: list[Value] = [Whole(x) for x in states]
    for x, dim in zip(arrays, dims, strict=True):
        entering.append(Whole(x) if dim is None else Part(x, dim))
    found = _Partition(axis_names).follow(narrow, wide, entering)
    totals = []
    for value in found or [None]:
        if isinstance(value, Whole):
            totals.append(Total(jnp.asarray(value.x), None))
        elif isinstance(value, Total):
            totals.append(value)
        else:
            return None
    return totals


class _Partition:
    """Runs equations of the second program."""

    def __init__(self, axis_names: tuple[str, ...]):
        self._axis_names = axis_names
        rules: dict[str, Callable[[Pair, list[Value]], Value]] = {
            "argmax": self._reduce,
            "argmin": self._reduce,
            "broadcast_in_dim": self._broadcast,
            "concatenate": self._concatenate,
            "dot_general": self._contract,
            "gather": self._gather,
            "reduce_sum": self._sum,
            "reshape": self._reshape,
            "scatter-add": self._scatter,
            "squeeze": self._reshape,
            "transpose": self._transpose,
        }
        rules |= {
            name: self._reduce for name in primitives.REDUCTIONS if name not in rules
        }
        rules |= dict.fromkeys(primitives.ELEMENTWISE, self._elementwise)
        self._rules = rules

    def follow(
        self, narrow: Any, wide: Any, entering: Sequence[Value]
    ) -> list[Value] | None:
        """Returns the results of a jaxpr; None if the programs are not alike."""
        (a, _), (b, consts) = flow.open_jaxpr(narrow), flow.open_jaxpr(wide)
        if not are_alike(a, b):
            return None
        known: dict[Any, Value] = dict(zip(b.invars, entering, strict=True))
        known |= {var: Whole(x) for var, x in zip(b.constvars, consts, strict=True)}

        def read(var: Any) -> Value:
            return Whole(var.val) if isinstance(var, Literal) else known[var]

        for pair in map(Pair, a.eqns, b.eqns):
            leaving = self._of_equation(pair, [read(v) for v in pair.wide.invars])
            known.update(zip(pair.wide.outvars, leaving, strict=True))
        return [read(v) for v in b.outvars]

    def _of_equation(self, pair: Pair, operands: list[Value]) -> list[Value]:
        eqn = pair.wide
        unknown: list[Value] = [None] * len(eqn.outvars)
        if any(x is None for x in operands):
            return unknown
        if all(isinstance(x, Whole) for x in operands):
            wholes = [x.x for x in operands if isinstance(x, Whole)]
            return [Whole(x) for x in compat.bind_equation(eqn, wholes)]
        if eqn.primitive.name in primitives.INLINABLE:
            narrow, wide = map(flow.called_jaxpr, pair)
            return self.follow(narrow, wide, operands) or unknown
        if eqn.primitive.name == "scatter-add":
            return [self._scatter(pair, operands)]
        if any(isinstance(x, Total) for x in operands):
            return [_of_sums(pair, operands)] if len(unknown) == 1 else unknown
        rule = self._rules.get(eqn.primitive.name)
        return unknown if rule is None else [rule(pair, operands)]

    def _part(self, pair: Pair, place: int, x: Value, dim: int) -> Any | None:
        """Returns the part of an operand; None if there is none along `dim`."""
        if isinstance(x, Part):
            return x.x if x.dim == dim else None
        shape, wide_shape = pair.shape(place), pair.wide_shape(place)
        if not isinstance(x, Whole) or len(shape) != len(wide_shape):
            return None
        if grown_dims(shape, wide_shape) != [dim]:
            return None
        first = compat.axis_index(self._axis_names) * shape[dim]
        return lax.dynamic_slice_in_dim(x.x, first, shape[dim], dim)

    def _bind(self, pair: Pair, operands: Sequence[Any], dim: int) -> Value:
        """Runs an equation on parts, if its result has the samples along `dim`."""
        shape, wide = (eqn.outvars[0].aval.shape for eqn in pair)
        if grown_dims(shape, wide) != [dim]:
            return None
        return Part(compat.bind_equation(pair.narrow, operands)[0], dim)

    def _elementwise(self, pair: Pair, operands: list[Value]) -> Value:
        dims = {x.dim for x in operands if isinstance(x, Part)}
        if len(dims) > 1 or not pair.has_equal_params():
            return None
        (dim,) = dims
        parts = []
        for i, x in enumerate(operands):
            shape = pair.shape(i)
            is_spread = shape == pair.wide_shape(i) and (not shape or shape[dim] == 1)
            if isinstance(x, Whole) and is_spread:  # The same for each sample.
                parts.append(x.x)
            else:
                parts.append(self._part(pair, i, x, dim))
        if any(x is None for x in parts):
            return None
        return self._bind(pair, parts, dim)

    def _sum(self, pair: Pair, operands: list[Value]) -> Value:
        (x,) = operands
        assert isinstance(x, Part)
        if x.dim not in pair.wide.params["axes"]:
            return self._reduce(pair, operands)
        return self._own(pair, [x.x]) if pair.has_equal_params() else None

    def _own(self, pair: Pair, operands: Sequence[Any]) -> Value:
        """Runs an equation whose results all replicas add."""
        shape, wide_shape = (eqn.outvars[0].aval.shape for eqn in pair)
        if shape != wide_shape:
            return None
        return Total(None, compat.bind_equation(pair.narrow, operands)[0])

    def _reduce(self, pair: Pair, operands: list[Value]) -> Value:
        (x,) = operands
        axes = pair.wide.params["axes"]
        if not isinstance(x, Part) or x.dim in axes or not pair.has_equal_params():
            return None
        return self._bind(pair, [x.x], x.dim - sum(i < x.dim for i in axes))

    def _broadcast(self, pair: Pair, operands: list[Value]) -> Value:
        x = operands[0]
        if not isinstance(x, Part) or not pair.has_equal_params("shape"):
            return None
        dim = pair.wide.params["broadcast_dimensions"][x.dim]
        if pair.wide.outvars[0].aval.shape[dim] != pair.wide_shape(0)[x.dim]:
            return None
        return self._bind(pair, [x.x], dim)

    def _concatenate(self, pair: Pair, operands: list[Value]) -> Value:
        dims = {x.dim for x in operands if isinstance(x, Part)}
        if pair.wide.params["dimension"] in dims:
            return None
        return self._elementwise(pair, operands)

    def _reshape(self, pair: Pair, operands: list[Value]) -> Value:
        x = operands[0]
        if not isinstance(x, Part):
            return None
        # Where the dimensions before the samples have as many elements as before.
        before = pair.wide_shape(0)[: x.dim]
        shape, wide = (eqn.outvars[0].aval.shape for eqn in pair)
        grown = grown_dims(shape, wide)
        if len(grown) != 1 or math.prod(wide[: grown[0]]) != math.prod(before):
            return None
        return self._bind(pair, [x.x], grown[0])

    def _transpose(self, pair: Pair, operands: list[Value]) -> Value:
        (x,) = operands
        assert isinstance(x, Part)
        if not pair.has_equal_params():
            return None
        return self._bind(pair, [x.x], pair.wide.params["permutation"].index(x.dim))

    def _contract(self, pair: Pair, operands: list[Value]) -> Value:
        """Follows a product that sums over samples, or has a row for each."""
        contracting, batch = pair.wide.params["dimension_numbers"]
        if not pair.has_equal_params():
            return None
        place = next(i for i, x in enumerate(operands) if isinstance(x, Part))
        first, other = operands[place], 1 - place
        assert isinstance(first, Part)
        for dims in (contracting, batch):
            if first.dim not in dims[place]:
                continue
            k = dims[place].index(first.dim)
            parts = [first.x, first.x]
            parts[other] = self._part(pair, other, operands[other], dims[other][k])
            if parts[other] is None:
                return None
            return (
                self._own(pair, parts)
                if dims is contracting
                else self._bind(pair, parts, k)
            )
        return None

    def _gather(self, pair: Pair, operands: list[Value]) -> Value:
        """Follows the choice of elements, of each sample or for each."""
        source, indices = operands
        numbers = pair.wide.params["dimension_numbers"]
        dims = numbers.operand_batching_dims
        row = indices.dim if isinstance(indices, Part) else None
        if isinstance(source, Part):
            if source.dim not in dims:
                return None
            row = numbers.start_indices_batching_dims[dims.index(source.dim)]
        elif row is None or row in numbers.start_indices_batching_dims:
            return None
        chosen = self._part(pair, 1, indices, row)
        rank = len(pair.wide.outvars[0].aval.shape)
        rows = [i for i in range(rank) if i not in numbers.offset_dims]
        if chosen is None or not isinstance(source, Part | Whole):
            return None
        if row >= len(rows) or not pair.has_equal_params("fill_value"):
            return None
        return self._bind(pair, [source.x, chosen], rows[row])

    def _scatter(self, pair: Pair, operands: list[Value]) -> Value:
        """Follows the addition of samples to places of an array."""
        target, *others = operands
        numbers = pair.wide.params["dimension_numbers"]
        if isinstance(target, Part) or not pair.has_equal_params():
            return None
        indices, updates = others
        rank = len(pair.wide_shape(2))
        rows = [i for i in range(rank) if i not in numbers.update_window_dims]
        if isinstance(indices, Part):
            row = indices.dim
        elif isinstance(updates, Part) and updates.dim in rows:
            row = rows.index(updates.dim)
        else:
            return None
        if row >= len(rows) or numbers.operand_batching_dims:
            return None
        parts = [
            self._part(pair, 1, indices, row),
            self._part(pair, 2, updates, rows[row]),
        ]
        if any(x is None for x in parts):
            return None
        whole, own = _as_total(target)
        aval = pair.narrow.outvars[0].aval
        start = jnp.zeros(aval.shape, aval.dtype) if own is None else own
        made = self._own(pair, [start, *parts])
        return made._replace(whole=whole) if isinstance(made, Total) else None


def _of_sums(pair: Pair, operands: list[Value]) -> Value:
    """Follows an operation on sums, with the parameters of the second program."""
    eqn, name = pair.wide, pair.wide.primitive.name
    if any(isinstance(x, Part) for x in operands):
        return None
    if name in primitives.ADDITIONS - {"neg"}:
        pairs = zip(*map(_as_total, operands), strict=True)
        return Total(*(_add(eqn, x, y) for x, y in pairs))
    totals = [i for i, x in enumerate(operands) if isinstance(x, Total)]
    is_linear = (
        name in primitives.KEEPING_SUMS
        or name == "mul"
        or (name == "div" and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact))
        or (name == "convert_element_type" and _keeps_sums(eqn))
    )
    if not is_linear or len(totals) != 1 or (name == "div" and totals != [0]):
        return None

    def apply(x: Any) -> Any:
        if x is None:
            return None
        wholes = [y.x if isinstance(y, Whole) else x for y in operands]
        return compat.bind_equation(eqn, wholes)[0]

    return Total(*map(apply, _as_total(operands[totals[0]])))


def _add(eqn: Any, x: Any, y: Any) -> Any:
    """Adds or subtracts values that may be zero, which is None."""
    if y is None:
        return x
    if x is None:
        return -y if eqn.primitive.name == "sub" else y
    return compat.bind_equation(eqn, [x, y])[0]


def _keeps_sums(eqn: Any) -> bool:
    """Returns whether a conversion of a sum is the sum of conversions."""
    before, after = (x.aval.dtype for x in (eqn.invars[0], eqn.outvars[0]))
    if jnp.issubdtype(after, jnp.inexact):
        return before != jnp.bool_
    return jnp.issubdtype(before, jnp.integer) and after != jnp.bool_


def _as_total(x: Value) -> Total:
    if isinstance(x, Total):
        return x
    assert isinstance(x, Whole)
    return Total(x.x, None)
