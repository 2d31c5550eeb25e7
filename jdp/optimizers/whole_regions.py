"""Whole regions: equations of an optimizer that need whole arrays and go together.

The orthogonalization of a matrix in `optax.contrib.muon` is one region: it begins with
the first operation that shards do not allow and ends with the last. Regions of
different leaves share no data but scalars, so each can run on another replica.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from jdp import compat
from jdp.backward import contents, flow, sub_program
from jdp.backward.flat_program import Equation, is_literal
from jdp.backward.sub_program import SubProgram
from jdp.compat import primitives
from jdp.optimizers import equation_groups, sharded_operations
from jdp.optimizers.equation_groups import DisjointSets
from jdp.optimizers.shard_layout import ArrayShard

# Multiplications and additions per element that goes in and out, from which a region
# runs on one replica even where the others have no such region. Two matrix products
# with a side of 16 have as many; optax's L-BFGS has fewer.
_MANY_OPERATIONS = 16


class Region(NamedTuple):
    """Equations that need whole arrays."""

    program: SubProgram
    results: tuple[jax.ShapeDtypeStruct, ...]  # types of its outputs.
    are_shards: tuple[bool, ...]  # whether each input is in shards.
    signature: Hashable  # the same for regions that differ in nothing but values.
    cost: float  # operations.
    is_heavy: bool  # whether it takes longer to run than its arrays take to be sent.
    is_light_to_send: bool  # whether it mostly reads shards.


def find(
    waiting: Sequence[Equation],
    values: Mapping[Any, Any],
    captured: AbstractSet[Any],
    results: Sequence[Any],
) -> list[Region]:
    """Finds the regions among equations that wait.

    Args:
      waiting: the equations in the order of their program. What none of them makes is
        in `values`.
      values: shards, partial reductions, or whole arrays, by key.
      captured: keys that are not combined with shards.
      results: keys that the whole program returns, or literals.

    Returns:
      Regions that need nothing of one another. The rest waits for them, or cannot run
      in a region: it has effects, or sends or receives itself.
    """
    members = _Members(values, captured)
    for i, equation in enumerate(waiting):
        members.offer(i, equation)
    kept = members.between_musts(waiting)

    def is_link(key: Any, atom: Any) -> bool:
        is_own = isinstance(values.get(key), ArrayShard) and atom.aval.size > 1
        return is_own or key not in values

    groups = equation_groups.connect(waiting, kept, is_link)
    outputs = equation_groups.find_outputs(waiting, groups, results)
    return [
        _make([waiting[i] for i in group], keys, values)
        for group, keys in zip(groups, outputs, strict=True)
    ]


class _Members:
    """Equations that can be in a region, found in the order of the program."""

    def __init__(self, values: Mapping[Any, Any], captured: AbstractSet[Any]):
        self._values, self._captured = values, captured
        self._is_sharded: dict[Any, bool] = {}  # by key that a member makes.
        self._maker: dict[Any, int] = {}
        self._sets = DisjointSets()  # of equations that share arrays.
        self._indices: set[int] = set()
        self._musts: set[int] = set()  # members that need whole arrays.

    def offer(self, i: int, equation: Equation) -> None:
        """Takes equation `i`, if it can be in a region."""
        keys = [key for key in equation.inputs if not is_literal(key)]
        if not self._is_eligible(equation, keys) or self._mixes_regions(keys, equation):
            return
        self._indices.add(i)
        are_sharded = [
            not is_literal(key)
            and (
                self._is_sharded.get(key)
                or isinstance(self._values.get(key), ArrayShard)
            )
            for key in equation.inputs
        ]
        place = "partial"
        if any(are_sharded):
            place = sharded_operations.find_place(equation.eqn, are_sharded)
        if place is None:
            self._musts.add(i)
        for key in equation.outputs:
            self._is_sharded[key] = place != "partial"
            self._maker[key] = i
        for key in keys:
            if key in self._maker:
                self._sets.unite(i, self._maker[key])

    def between_musts(self, waiting: Sequence[Equation]) -> list[int]:
        """Returns the members that need whole arrays, and members between two such."""
        kept, wanted = [], set()
        for i in sorted(self._indices, reverse=True):
            equation = waiting[i]
            if i in self._musts or not wanted.isdisjoint(equation.outputs):
                kept.append(i)
                wanted.update(key for key in equation.inputs if not is_literal(key))
        return kept[::-1]

    def _is_eligible(self, equation: Equation, keys: Sequence[Any]) -> bool:
        eqn = equation.eqn
        if (
            eqn.effects
            or compat.has_ordered_effect(eqn)
            or eqn.primitive.name == "cond"
        ):
            return False
        if any(
            key in self._captured
            or (key not in self._values and key not in self._maker)
            for key in keys
        ):
            return False
        return not _is_foreign(eqn) and not any(
            any(contents.find_equations(flow.open_jaxpr(x)[0], _is_foreign))
            for x in jaxprs_in_params(eqn.params)
        )

    def _mixes_regions(self, keys: Sequence[Any], equation: Equation) -> bool:
        """Whether an equation combines one region with a scalar of another."""
        scalars, arrays = set(), set()
        for key, atom in zip(equation.inputs, equation.eqn.invars, strict=True):
            if not is_literal(key) and key in self._maker:
                group = self._sets.find(self._maker[key])
                (scalars if atom.aval.size == 1 else arrays).add(group)
        return bool(scalars - arrays) and len(scalars | arrays) > 1


_FOREIGN = (
    primitives.UNITING
    | primitives.MOVING
    | primitives.CASTS
    | primitives.OPAQUE
    | primitives.STATEFUL
    | {"axis_index"}
)


def _is_foreign(eqn: Any) -> bool:
    """Whether an equation communicates, or depends on the replica or the host."""
    return eqn.primitive.name in _FOREIGN


def _make(
    equations: list[Equation], outputs: list[Any], values: Mapping[Any, Any]
) -> Region:
    program = sub_program.make(equations, outputs)
    inputs = [values[key] for key in program.inputs]
    are_shards = tuple(isinstance(x, ArrayShard) for x in inputs)
    types = tuple((x.shape, _dtype_of(x)) for x in inputs)
    signature = program.signature, are_shards, types
    cost = sum(_count_operations(x.eqn) for x in equations)
    sizes = [math.prod(x.shape) for x in inputs]
    cut = sum(n for n, is_shard in zip(sizes, are_shards, strict=True) if is_shard)
    made = {
        key: jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
        for x in equations
        for key, var in zip(x.outputs, x.eqn.outvars, strict=True)
    }
    results = tuple(made[key] for key in outputs)
    num_elements = sum(sizes) + sum(x.size for x in results)
    return Region(
        program,
        results,
        are_shards,
        signature,
        cost,
        is_heavy=cost >= _MANY_OPERATIONS * num_elements > 0,
        is_light_to_send=2 * cut >= sum(sizes) > 0,
    )


def _dtype_of(x: Any) -> Any:
    return x.data.dtype if isinstance(x, ArrayShard) else x.dtype


def _count_operations(eqn: Any) -> float:
    """Returns about how many multiplications and additions an equation takes."""
    name = eqn.primitive.name
    size = sum(var.aval.size for var in eqn.outvars)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * size * math.prod(shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        out = eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * size * kernel.size / kernel.shape[out]
    if name in primitives.DECOMPOSITIONS:
        return _OPERATIONS_OF_DECOMPOSITION * max(
            atom.aval.size * max(atom.aval.shape, default=1) for atom in eqn.invars
        )
    inner = [
        sum(map(_count_operations, flow.open_jaxpr(x)[0].eqns))
        for x in jaxprs_in_params(eqn.params)
    ]
    return max([size, *inner]) * eqn.params.get("length", 1)


# A symmetric eigendecomposition of n x n takes about 9 n^3 operations, others less
# (Golub and Van Loan, 2013: Matrix Computations, 8.3).
_OPERATIONS_OF_DECOMPOSITION = 9
