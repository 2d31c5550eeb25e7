"""Shard program: the equations of a step of V replicas, and what they exchange.

The step is traced for as many replicas as there are shards. Here its program becomes
one flat list of equations in which nothing depends on an axis: the number of a shard is
an input, and a collective is a transfer between equations, of which the fixed tree or a
gather knows the result. Loops that contain collectives are unrolled.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal as LiteralValue
from jax.extend.core import jaxprs_in_params

from jdp import compat
from jdp.backward import exchange, flow
from jdp.backward.flat_program import Equation, is_literal
from jdp.compat import primitives
from jdp.step.divided_control import CollectiveFinder
from jdp.step.shards import shard_collectives, shard_index

Kind = Literal["sum", "max", "min", "gather"]
INDEX = -1  # the key of a shard's number, int32 ().
_REDUCTIONS: dict[str, Kind] = {"pmax": "max", "pmin": "min", "psum": "sum"}
_MOST_ITERATIONS = 256  # of a loop that is unrolled.


class Transfer(NamedTuple):
    """A value of every shard becomes one value, the same for all."""

    kind: Kind  # a reduction in the fixed tree, or all values, one row per shard.
    operand: int  # key.
    result: int  # key.


class ShardProgram(NamedTuple):
    """Equations and transfers of a step, each after what it reads."""

    items: list[Equation | Transfer]
    inputs: list[int]  # keys.
    are_split: list[bool]  # per input: whether each shard has its own part.
    outputs: list[Any]  # keys, or literals.
    are_rows: list[bool]  # per output: whether it has one row per shard.
    constants: dict[int, Any]  # values that the program closes over, by key.
    avals: dict[int, Any]  # types of values by key; of one shard where they differ.


def flatten(closed: Any, num_shards: int, axis_names: Sequence[str]) -> ShardProgram:
    """Lists the equations of one shard's part of a step.

    Args:
      closed: closed jaxpr of `shard_map`s over one axis of `num_shards`.
      num_shards: the number of shards.
      axis_names: the axis.

    Raises:
      ValueError: a collective is where it cannot be unrolled, or is unknown.
    """
    return _Flattening(num_shards, axis_names).of_program(closed)


class _Flattening:
    def __init__(self, num_shards: int, axis_names: Sequence[str]):
        self._num_shards = num_shards
        self._items: list[Equation | Transfer] = []
        self._constants: dict[int, Any] = {}
        self._avals: dict[int, Any] = {INDEX: jax.ShapeDtypeStruct((), jnp.int32)}
        self._num_keys = 0
        self._differing = {INDEX}  # keys of values that differ between shards.
        self._collectives = CollectiveFinder(dict.fromkeys(axis_names, 1))

    def of_program(self, closed: Any) -> ShardProgram:
        jaxpr, consts = flow.open_jaxpr(closed)
        known = self._bind_constants(jaxpr, consts)
        inputs = [self._make_key(v.aval) for v in jaxpr.invars]
        are_split = [False] * len(inputs)
        known.update(zip(jaxpr.invars, inputs, strict=True))
        rows: set[Any] = set()  # variables.
        for eqn in jaxpr.eqns:
            operands = [_read(known, v) for v in eqn.invars]
            if eqn.primitive.name != "shard_map":  # Such as a cast of a constant.
                assert rows.isdisjoint(v for v in eqn.invars if _is_key(v)), eqn
                found = self._of_equation(eqn, operands)
                known.update(zip(eqn.outvars, found, strict=True))
                continue
            body = eqn.params["jaxpr"]
            for key, spec, var in zip(
                operands, eqn.params["in_specs"], body.invars, strict=True
            ):
                if key in inputs and _is_split(spec):
                    are_split[inputs.index(key)] = True
                    self._avals[key] = var.aval
                    self._differing.add(key)
            known.update(zip(eqn.outvars, self._walk(body, operands), strict=True))
            specs = zip(eqn.outvars, eqn.params["out_specs"], strict=True)
            rows.update(var for var, spec in specs if _is_split(spec))
        return ShardProgram(
            self._items,
            inputs,
            are_split,
            [_read(known, v) for v in jaxpr.outvars],
            [not isinstance(v, LiteralValue) and v in rows for v in jaxpr.outvars],
            self._constants,
            self._avals,
        )

    def _make_key(self, aval: Any) -> int:
        self._num_keys += 1
        self._avals[self._num_keys] = aval
        return self._num_keys

    def _bind_constants(self, jaxpr: Any, consts: Sequence[Any]) -> dict[Any, Any]:
        known = {}
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            known[var] = self._make_key(var.aval)
            self._constants[known[var]] = value
        return known

    def _walk(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Lists the equations of a jaxpr; returns its results as keys or literals."""
        body, consts = flow.open_jaxpr(jaxpr)
        known = self._bind_constants(body, consts)
        known.update(zip(body.invars, operands, strict=True))
        for eqn in body.eqns:
            results = self._of_equation(eqn, [_read(known, v) for v in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [_read(known, v) for v in body.outvars]

    def _of_equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = exchange.stem(eqn)
        if name == "axis_index" and compat.is_own_index(eqn):
            return [INDEX]
        if name in primitives.UNITING or name in primitives.MOVING:
            return self._of_collective(eqn, operands)
        inner = list(jaxprs_in_params(eqn.params))
        if any(map(self._collectives.find, inner)):
            return self._open(eqn, operands)
        if any(map(shard_index.reads_index, inner)):
            return self._with_index(eqn, operands)
        keys = [self._make_key(v.aval) for v in eqn.outvars]
        self._items.append(Equation(eqn, operands, keys))
        if self._differ(operands):
            self._differing.update(keys)
        return keys

    def _differ(self, atoms: list[Any]) -> bool:
        return not self._differing.isdisjoint(filter(_is_key, atoms))

    def _open(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Replaces an equation by the equations inside it."""
        name = eqn.primitive.name
        if name in primitives.INLINABLE:
            return self._walk(flow.called_jaxpr(eqn), operands)
        if name == "scan" and eqn.params["length"] <= _MOST_ITERATIONS:
            return self._unroll(eqn, operands)
        raise ValueError(
            f"A collective is inside of `{name}`{exchange.line_of(eqn)}. With "
            "`num_shards`, shards run one after the other between collectives, so a "
            "collective can be in calls and in a `lax.scan` of at most "
            f"{_MOST_ITERATIONS} iterations, which is unrolled. Take it out, or train "
            "without `num_shards`."
        )

    def _unroll(self, eqn: Any, operands: list[Any]) -> list[Any]:
        body, num_consts, num_carries = flow.loop_shape(eqn)
        end, length = num_consts + num_carries, eqn.params["length"]
        carries, scanned = operands[num_consts:end], operands[end:]
        rows: list[list[Any]] = []
        steps = range(length)
        for i in reversed(steps) if eqn.params["reverse"] else steps:
            parts = [self._apply(lambda x, i=i: x[i], [key])[0] for key in scanned]
            out = self._walk(body, [*operands[:num_consts], *carries, *parts])
            carries = out[:num_carries]
            rows.append(out[num_carries:])
        if eqn.params["reverse"]:
            rows.reverse()
        columns = zip(*rows, strict=True) if rows else ()
        stacked = [
            self._apply(lambda *xs: jnp.stack(xs), list(column))[0]
            for column in columns
        ]
        if not rows:
            stacked = [
                self._apply(lambda v=v: jnp.zeros(v.aval.shape, v.aval.dtype), [])[0]
                for v in eqn.outvars[num_carries:]
            ]
        return [*carries, *stacked]

    def _with_index(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Lists an equation that takes the number of a shard as an operand."""

        def run(index: jax.Array, *operands: jax.Array) -> list[jax.Array]:
            return shard_index.evaluate(eqn, list(operands), index)

        return self._apply(run, [INDEX, *operands])

    def _apply(self, fn: Callable[..., Any], operands: list[Any]) -> list[Any]:
        """Lists the equations of a function."""
        avals = [self._aval(x) for x in operands]
        traced = jax.make_jaxpr(lambda *xs: jax.tree.leaves(fn(*xs)))(*avals)
        return self._walk(traced, operands)

    def _aval(self, atom: Any) -> Any:
        aval = atom.aval if is_literal(atom) else self._avals[atom]
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    def _of_collective(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name, groups = exchange.stem(eqn), eqn.params.get("axis_index_groups")
        if name in ("psum_invariant", "all_gather_invariant"):
            name = name.removesuffix("_invariant")
        if name == "jdp_replicated" and not self._differ(operands):
            return operands
        if name in _REDUCTIONS and not groups:
            return [self._transfer(_REDUCTIONS[name], x) for x in operands]
        if name not in shard_collectives.FROM_ROWS:
            raise ValueError(
                f"{exchange.describe(eqn)} cannot be in a step with `num_shards`, "
                "whose reductions follow one fixed tree: leave `all_reduce` and "
                '`halves` at "auto".'
            )
        if name == "reduce_scatter" and not groups:
            cut = functools.partial(shard_collectives.part_of, params=eqn.params)
            return self._apply(cut, [self._transfer("sum", operands[0]), INDEX])
        gathered = [self._transfer("gather", x) for x in operands]
        derive = shard_collectives.FROM_ROWS[name]

        def run(index: jax.Array, *rows: jax.Array) -> list[jax.Array]:
            return [derive(x, index, eqn.params) for x in rows]

        return self._apply(run, [INDEX, *gathered])

    def _transfer(self, kind: Kind, operand: Any) -> int:
        if is_literal(operand):
            (operand,) = self._apply(lambda: jnp.asarray(operand.val), [])
        aval = self._avals[operand]
        if kind == "gather":
            shape = (self._num_shards, *aval.shape)
            aval = jax.ShapeDtypeStruct(shape, aval.dtype)
        result = self._make_key(aval)
        self._items.append(Transfer(kind, operand, result))
        return result


def _is_key(atom: Any) -> bool:
    return not is_literal(atom)


def _read(known: dict[Any, Any], var: Any) -> Any:
    return var if isinstance(var, LiteralValue) else known[var]


def _is_split(spec: Any) -> bool:
    return any(part is not None for part in spec)
