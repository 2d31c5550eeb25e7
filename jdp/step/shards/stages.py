"""Stages: which equations of a step run between the exchanges of its shards.

A stage first computes values that are the same for all shards, once per replica; then
values of each shard, one shard after the other; then its transfers run. All values of
a stage are made by two programs of one device, which are the same wherever they run.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxprs_in_params

from jdp.backward import flow, sub_program
from jdp.backward.flat_program import Equation, is_literal
from jdp.backward.sub_program import SubProgram
from jdp.collectives import base
from jdp.compat import primitives
from jdp.step.shards import shard_index
from jdp.step.shards.shard_program import INDEX, ShardProgram, Transfer

# Smaller values travel in one buffer per dtype.
_PACKED_BYTES = 1 << 16
_ARITHMETIC = (
    primitives.PRODUCTS | primitives.ADDITIONS - {"neg"} | {"div", "reduce_sum"}
)
_MOVING = primitives.RESHAPES | {"transpose"}


class Stage(NamedTuple):
    """Programs between two exchanges."""

    same: SubProgram  # reads and makes values that are the same for all shards.
    of_shard: SubProgram  # makes values of one shard.
    transfers: list[Transfer]  # of arrays with a dimension 0.


class StagedProgram(NamedTuple):
    """A step in stages."""

    stages: list[Stage]
    program: ShardProgram
    differing: frozenset[int]  # keys of values that differ between shards.
    last_use: dict[int, int]  # by key: the last stage that reads it.


def cut(program: ShardProgram) -> StagedProgram:
    """Cuts a program into stages.

    Transfers run as early as possible, and what is the same for all shards is computed
    as late as possible, so that there are few stages.
    """
    program = _drop_unused(program)
    for item in program.items:
        if isinstance(item, Equation) and item.eqn.primitive.name == "axis_index":
            raise shard_index.refuse_index(item.eqn)
    packed = _pack(program)
    levels, differing = _levels(packed)
    num_stages = 1 + max(levels.values(), default=0)
    places = _places(packed, levels, differing, num_stages)
    parts = [([], [], []) for _ in range(num_stages)]
    for item, place in zip(packed.items, places, strict=True):
        if isinstance(item, Transfer):
            parts[place][2].append(item)
        else:
            parts[place][_differs(item, differing)].append(item)
    last_use = _last_uses(packed, places, num_stages)
    stages = []
    for k, (same, of_shard, transfers) in enumerate(parts):
        sent = [t.operand for t in transfers]
        later = _read_later(of_shard, last_use, k)
        same, of_shard = _join_cheap(same, of_shard, last_use, k)
        stages.append(
            Stage(
                sub_program.make(same, _kept(same, of_shard, sent, last_use, k)),
                sub_program.make(of_shard, list(dict.fromkeys([*sent, *later]))),
                transfers,
            )
        )
    return StagedProgram(stages, packed, frozenset(differing), last_use)


def _keys(atoms: Iterable[Any]) -> list[int]:
    return [x for x in atoms if not is_literal(x)]


def _reads(item: Equation | Transfer) -> list[int]:
    return [item.operand] if isinstance(item, Transfer) else _keys(item.inputs)


def _makes(item: Equation | Transfer) -> list[int]:
    return [item.result] if isinstance(item, Transfer) else item.outputs


def _differs(item: Equation | Transfer, differing: set[int]) -> bool:
    return not isinstance(item, Transfer) and not differing.isdisjoint(_reads(item))


def _drop_unused(program: ShardProgram) -> ShardProgram:
    """Drops equations and transfers that nothing needs."""
    needed = set(_keys(program.outputs))
    kept = []
    for item in reversed(program.items):
        has_effect = isinstance(item, Equation) and _has_effect(item.eqn)
        if has_effect or not needed.isdisjoint(_makes(item)):
            kept.append(item)
            needed.update(_reads(item))
    return program._replace(items=kept[::-1])


def _has_effect(eqn: Any) -> bool:
    return any("Axis" not in type(effect).__name__ for effect in eqn.effects)


def _levels(program: ShardProgram) -> tuple[dict[int, int], set[int]]:
    """Returns how many transfers precede each value, and which values differ."""
    levels: dict[int, int] = {}
    pairs = zip(program.inputs, program.are_split, strict=True)
    differing = {INDEX, *(key for key, is_split in pairs if is_split)}
    for item in program.items:
        level = max((levels.get(key, 0) for key in _reads(item)), default=0)
        if isinstance(item, Transfer):
            levels[item.result] = level + 1
            continue
        levels.update((key, level) for key in item.outputs)
        if not differing.isdisjoint(_reads(item)):
            differing.update(item.outputs)
    return levels, differing


def _places(
    program: ShardProgram, levels: dict[int, int], differing: set[int], num_stages: int
) -> list[int]:
    """Returns the stage of each item."""
    needed = dict.fromkeys(_keys(program.outputs), num_stages - 1)
    places = []
    for item in reversed(program.items):
        place = max((levels.get(key, 0) for key in _reads(item)), default=0)
        if isinstance(item, Equation) and not (
            _differs(item, differing) or _has_effect(item.eqn)
        ):
            found = [needed.get(key, num_stages - 1) for key in item.outputs]
            place = max(place, min(found, default=place))
        for key in _reads(item):
            needed[key] = min(needed.get(key, place), place)
        places.append(place)
    return places[::-1]


def _last_uses(
    program: ShardProgram, places: list[int], num_stages: int
) -> dict[int, int]:
    """Returns the last stage that reads each value; a result of the step is after."""
    last: dict[int, int] = {}
    for item, place in zip(program.items, places, strict=True):
        for key in _reads(item):
            last[key] = max(last.get(key, 0), place)
    last.update(dict.fromkeys(_keys(program.outputs), num_stages))
    return last


def _join_cheap(
    same: list[Equation], of_shard: list[Equation], last_use: dict[int, int], k: int
) -> tuple[list[Equation], list[Equation]]:
    """Moves cheap equations to the shards that read them, which saves a program.

    Broadcasts and casts of parameters cost less with what reads them than alone.
    """
    needed = {key for item in of_shard for key in _reads(item)}
    joined, left = [], []
    kept: set[int] = set()  # read by equations that stay.
    for item in reversed(same):
        is_read = not needed.isdisjoint(item.outputs)
        is_cheap = is_read and _is_cheap(item.eqn)
        if is_cheap:
            joined.append(item)
            needed.update(_reads(item))
        is_used = any(last_use.get(key, -1) > k for key in item.outputs)
        if not is_cheap or is_used or not kept.isdisjoint(item.outputs):
            left.append(item)
            kept.update(_reads(item))
    return left[::-1], [*joined[::-1], *of_shard]


def _is_cheap(eqn: Any) -> bool:
    inner = [flow.open_jaxpr(x)[0] for x in jaxprs_in_params(eqn.params)]
    is_heavy = eqn.primitive.name in primitives.HEAVY | primitives.DECOMPOSITIONS
    if is_heavy or _has_effect(eqn):
        return False
    return all(_is_cheap(each) for jaxpr in inner for each in jaxpr.eqns)


def _kept(
    same: list[Equation],
    of_shard: list[Equation],
    sent: list[int],
    last_use: dict[int, int],
    k: int,
) -> list[int]:
    """Returns the values that the equations of all shards make for others."""
    here = {*sent, *(key for item in of_shard for key in _reads(item))}
    made = [key for item in same for key in item.outputs]
    return [key for key in made if key in here or last_use.get(key, -1) > k]


def _read_later(
    of_shard: list[Equation], last_use: dict[int, int], k: int
) -> list[int]:
    """Returns the values of a shard that later stages read."""
    made = [key for item in of_shard for key in item.outputs]
    return [key for key in made if last_use.get(key, -1) > k]


# --- Packing -------------------------------------------------------------------------


class _Packing:
    """Makes flat buffers of the values that travel at one level."""

    def __init__(self, program: ShardProgram):
        self.items: list[Equation | Transfer] = []
        self.avals = dict(program.avals)
        self._num_keys = max(self.avals)
        equations = (x for x in program.items if isinstance(x, Equation))
        self._makers = {key: x for x in equations for key in x.outputs}

    def send(self, transfers: list[Transfer]) -> None:
        """Sends transfers, small ones of one dtype and kind together."""
        groups: dict[Any, list[Transfer]] = {}
        for transfer in transfers:
            aval = self.avals[transfer.operand]
            num_bytes = aval.size * aval.dtype.itemsize
            alone = transfer.result if num_bytes > _PACKED_BYTES else 0
            groups.setdefault((transfer.kind, aval.dtype, alone), []).append(transfer)
        for members in groups.values():
            self._send_group(members)

    def _send_group(self, members: list[Transfer]) -> None:
        avals = [self.avals[t.operand] for t in members]
        kind, dtype = members[0].kind, avals[0].dtype
        wide = jnp.dtype(jnp.uint8) if dtype == jnp.bool_ else dtype
        if kind != "gather" and jnp.issubdtype(dtype, jnp.number):
            wide = base.accumulator(dtype, "sum" if kind == "sum" else "max")

        may_be_subnormal = kind == "sum" and not all(
            self._is_computed(t.operand) for t in members
        )

        # Large arrays keep their shape: XLA writes the gradient of a matrix as it is.
        keeps_shape = kind != "gather" and len(avals) == 1 and avals[0].ndim > 0

        def pack(*xs: jax.Array) -> jax.Array:
            parts = [x.astype(wide) for x in xs]
            if keeps_shape:
                (buffer,) = parts
            else:
                buffer = jnp.concatenate([x.reshape(-1) for x in parts])
            return _flush_subnormal(buffer) if may_be_subnormal else buffer

        def unpack(buffer: jax.Array) -> list[jax.Array]:
            parts, first = [], 0
            buffer = _flush_subnormal(buffer) if kind == "sum" else buffer
            if keeps_shape:
                return [buffer.astype(dtype)]
            for aval in avals:
                part = buffer[..., first : first + aval.size]
                parts.append(part.reshape(*part.shape[:-1], *aval.shape).astype(dtype))
                first += aval.size
            return parts

        (operand,) = self._apply(pack, [t.operand for t in members])
        shape = self.avals[operand].shape
        if kind == "gather":
            shape = (self.avals[members[0].result].shape[0], *shape)
        self._num_keys += 1
        result = self._num_keys
        self.avals[result] = jax.ShapeDtypeStruct(shape, wide)
        self.items.append(Transfer(kind, operand, result))
        self._apply(unpack, [result], [t.result for t in members])

    def _is_computed(self, key: int) -> bool:
        """Whether a value is the result of arithmetic, and so not subnormal on CPU."""
        while key in self._makers:
            maker = self._makers[key]
            name = maker.eqn.primitive.name
            if name not in _MOVING or is_literal(maker.inputs[0]):
                return name in _ARITHMETIC
            key = maker.inputs[0]
        return False

    def _apply(
        self,
        fn: Callable[..., Any],
        operands: list[int],
        results: list[int] | None = None,
    ) -> list[int]:
        """Lists the equations of a function; its results get the keys `results`."""
        avals = [
            jax.ShapeDtypeStruct(self.avals[k].shape, self.avals[k].dtype)
            for k in operands
        ]
        traced = jax.make_jaxpr(jax.jit(lambda *xs: jax.tree.leaves(fn(*xs))))(*avals)
        (eqn,) = flow.open_jaxpr(traced)[0].eqns
        if results is None:
            first = self._num_keys + 1
            self._num_keys += len(eqn.outvars)
            results = list(range(first, self._num_keys + 1))
            self.avals.update(zip(results, [v.aval for v in eqn.outvars], strict=True))
        self.items.append(Equation(eqn, list(operands), results))
        return results


def _flush_subnormal(x: jax.Array) -> jax.Array:
    """Replaces subnormal numbers by zeros, as XLA does in every operation on CPU.

    Processes that add through shared memory would not.
    """
    if jax.default_backend() != "cpu" or x.dtype not in _BITS:
        return x
    kind, exponent, sign = _BITS[x.dtype]
    bits = lax.bitcast_convert_type(x, kind)
    is_small = (bits & kind(exponent)) == 0
    return lax.bitcast_convert_type(
        jnp.where(is_small, bits & kind(sign), bits), x.dtype
    )


# By dtype: the type of its bits, and which of them are the exponent and the sign.
_BITS = {
    jnp.dtype(jnp.float32): (jnp.uint32, 0x7F80_0000, 0x8000_0000),
    jnp.dtype(jnp.float64): (jnp.uint64, 0x7FF0 << 48, 0x8000 << 48),
}


def _pack(program: ShardProgram) -> ShardProgram:
    """Returns a program that sends flat buffers, sorted by level."""
    levels, _ = _levels(program)
    by_level: dict[int, list[Any]] = {}
    for item in program.items:
        level = max((levels.get(key, 0) for key in _reads(item)), default=0)
        by_level.setdefault(level, []).append(item)
    packing = _Packing(program)
    for level in sorted(by_level):
        items = by_level[level]
        packing.items += [x for x in items if isinstance(x, Equation)]
        packing.send([x for x in items if isinstance(x, Transfer)])
    return program._replace(items=packing.items, avals=packing.avals)
