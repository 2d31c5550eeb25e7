"""Shard clusters: elementwise equations of one leaf, traced once per kind of leaf.

Most equations of an optimizer work on the shards of one leaf. The equations of a leaf
form a cluster, and leaves of one shape have clusters that differ in nothing but values.
These share a `jit`, so that a thousand leaves are traced and lowered almost as one.
"""

from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import compat
from jdp.backward import sub_program
from jdp.backward.flat_program import Equation, is_literal
from jdp.backward.sub_program import SubProgram
from jdp.optimizers import equation_groups, sharded_operations
from jdp.optimizers.partials import Partial
from jdp.optimizers.shard_layout import ArrayShard, ShardLayout


class Cluster(NamedTuple):
    """Equations on shards of one leaf that need nothing from other replicas."""

    program: SubProgram
    signature: Hashable  # the same for clusters that differ in nothing but values.


def run(
    waiting: Sequence[Equation],
    values: dict[Any, Any],
    captured: AbstractSet[Any],
    results: Sequence[Any],
    layout: ShardLayout,
) -> list[Equation]:
    """Runs clusters of which there are several of one kind.

    Args:
      waiting: the equations in the order of their program.
      values: shards, partial reductions, or whole arrays, by key; the results are
        added.
      captured: keys that are not combined with shards.
      results: keys that the whole program returns, or literals.
      layout: the replicas that have the shards.

    Returns:
      The equations that are left.
    """
    members, done = _find_members(waiting, values, captured)
    groups: dict[Hashable, list[Cluster]] = {}
    for cluster in _find_clusters(waiting, members, values, results):
        groups.setdefault(cluster.signature, []).append(cluster)
    for group in groups.values():
        if len(group) > 1:
            _run_group(group, values, layout)
            done.update(id(x) for one in group for x in one.program.equations)
    return [equation for equation in waiting if id(equation) not in done]


def _find_members(
    waiting: Sequence[Equation], values: dict[Any, Any], captured: AbstractSet[Any]
) -> tuple[list[int], set[int]]:
    """Finds equations on shards that can run; runs equations that they may wait for.

    Returns:
      The indices of the equations, and the ids of equations of whole arrays, which ran.
    """
    members, done = [], set()
    made: dict[Any, bool] = {}  # whether a key that members make is in shards.
    for i, equation in enumerate(waiting):
        eqn = equation.eqn
        kinds = [_kind_of(key, values, made, captured) for key in equation.inputs]
        if None in kinds or eqn.effects or compat.has_ordered_effect(eqn):
            continue
        if "shards" not in kinds:
            operands = [
                jnp.asarray(key.val) if is_literal(key) else values[key]
                for key in equation.inputs
            ]
            found = compat.bind_equation(eqn, operands)
            values.update(zip(equation.outputs, found, strict=True))
            done.add(id(equation))
            continue
        place = sharded_operations.find_place(eqn, [x == "shards" for x in kinds])
        if place is not None:
            members.append(i)
            made.update(dict.fromkeys(equation.outputs, place == "shards"))
    return members, done


def _kind_of(
    key: Any,
    values: Mapping[Any, Any],
    made: Mapping[Any, bool],
    captured: AbstractSet[Any],
) -> str | None:
    """Returns "shards" or "whole"; None for an operand that no cluster takes."""
    if is_literal(key):
        return "whole"
    if key in made:
        return "shards" if made[key] else None
    if key in captured or key not in values or isinstance(values[key], Partial):
        return None
    return "shards" if isinstance(values[key], ArrayShard) else "whole"


def _find_clusters(
    waiting: Sequence[Equation],
    members: Sequence[int],
    values: Mapping[Any, Any],
    results: Sequence[Any],
) -> list[Cluster]:
    def is_link(key: Any, _: Any) -> bool:
        return key not in values or isinstance(values[key], ArrayShard)

    groups = equation_groups.connect(waiting, members, is_link)
    clusters = []
    outputs = equation_groups.find_outputs(waiting, groups, results)
    for group, keys in zip(groups, outputs, strict=True):
        program = sub_program.make([waiting[i] for i in group], keys)
        inputs = [values[key] for key in program.inputs]
        types = tuple((isinstance(x, ArrayShard), x.shape) for x in inputs)
        clusters.append(Cluster(program, (program.signature, types)))
    return clusters


def _run_group(
    group: Sequence[Cluster], values: dict[Any, Any], layout: ShardLayout
) -> None:
    """Runs clusters of one signature."""
    first = group[0].program
    given = [values[key] for key in first.inputs]
    shapes = [x.shape if isinstance(x, ArrayShard) else None for x in given]
    kinds: list[Any] = []

    def run(rank: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
        here = layout._replace(rank=rank)
        pairs = zip(arrays, shapes, strict=True)
        made = _evaluate(
            first, [x if s is None else ArrayShard(x, s) for x, s in pairs], here
        )
        kinds[:] = [x._replace(data=None) for x in made]
        return [x.data for x in made]

    # Without staging, each call would compile anew.
    call = jax.jit(run) if compat.is_staged(layout.rank) else run
    for cluster in group:
        arrays = [_data_of(values[key]) for key in cluster.program.inputs]
        found = call(layout.rank, arrays)
        for key, kind, x in zip(cluster.program.outputs, kinds, found, strict=True):
            values[key] = kind._replace(data=x)


def _evaluate(
    program: SubProgram, arguments: Sequence[Any], layout: ShardLayout
) -> list[Any]:
    """Returns the shards and partial reductions that a cluster makes."""
    known = dict(zip(program.inputs, arguments, strict=True))
    for equation in program.equations:
        operands = [
            jnp.asarray(key.val) if is_literal(key) else known[key]
            for key in equation.inputs
        ]
        found = sharded_operations.run(equation.eqn, operands, layout)
        assert found is not None, equation.eqn
        known.update(zip(equation.outputs, found, strict=True))
    return [known[key] for key in program.outputs]


def _data_of(x: Any) -> Any:
    return x.data if isinstance(x, ArrayShard) else x
