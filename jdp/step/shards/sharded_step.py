"""Sharded step: runs a step shard by shard, with the same bits on any replicas.

Each program of a stage is compiled for one device, and so is the same wherever it runs:
XLA never sees how many shards or replicas there are. Between the stages the shards of a
replica are folded along the fixed tree, and then the replicas.
"""

import collections
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.backward.flat_program import is_literal
from jdp.backward.sub_program import SubProgram
from jdp.collectives.fixed_tree import Subtree
from jdp.compat import array_parts
from jdp.replicas.mesh import World
from jdp.step.options import StepOptions
from jdp.step.shards import shard_program, stages
from jdp.step.shards.shard_program import INDEX, ShardProgram
from jdp.step.shards.stages import Stage, StagedProgram
from jdp.step.shards.tree_reduction import (
    Arrays,
    Assembly,
    Exchange,
    Folding,
    ShardPlan,
)
from jdp.types import PyTree


class _LastCall(NamedTuple):
    """Types of the arguments of a call, and its program."""

    treedef: Any
    avals: list[Any]
    runner: "_Runner"
    out: Any  # treedef of the results.


class ShardedStep:
    """Compiled step of all shards; it traces once per type of its arguments."""

    def __init__(
        self,
        step: Callable[..., PyTree],
        world: World,
        options: StepOptions,
    ):
        """Compiles nothing yet.

        Args:
          step: the program of as many replicas as there are shards.
          world: the replicas.
          options: options of the step.
        """
        self._step = step
        self._plan = ShardPlan(world)
        self._donates = options.donate_state
        self._options = _compiler_options() | (options.compiler_options or {})
        self._known: dict[Any, tuple[_Runner, Any]] = {}
        self._last: _LastCall | None = None

    def __call__(self, state: PyTree, *batches: PyTree) -> PyTree:
        """Runs one step, like the jitted step of all replicas."""
        leaves, treedef = jax.tree.flatten((state, batches))
        avals = [x.aval for x in leaves]
        # Lists of the same objects are equal at once; to hash types takes longer.
        last = self._last
        if last is None or treedef != last.treedef or avals != last.avals:
            kinds = [(x.shape, x.dtype, x.weak_type) for x in avals]
            key = treedef, tuple(kinds)
            if key not in self._known:
                self._known[key] = self._trace(state, batches)
            last = self._last = _LastCall(treedef, avals, *self._known[key])
        return jax.tree.unflatten(last.out, last.runner.run(leaves))

    def _trace(self, state: PyTree, batches: PyTree) -> "tuple[_Runner, Any]":
        traced, shapes = jax.make_jaxpr(self._step, return_shape=True)(state, *batches)
        world = self._plan.world
        program = shard_program.flatten(traced, self._plan.num_shards, world.axis_names)
        num_donated = len(jax.tree.leaves(state)) if self._donates else 0
        donated = frozenset(program.inputs[:num_donated])
        count = len(jax.tree.leaves(shapes[0]))
        runner = _Runner(program, self._plan, donated, self._options, count)
        return runner, jax.tree.structure(shapes)


class _HeldParts:
    """Parts of the state that a step returned last, for its next call.

    To take an array apart costs 4 us. No array is kept alive: when one dies, all parts
    are let go.
    """

    def __init__(self) -> None:
        self._arrays: list[weakref.ref[jax.Array]] = []
        self._parts: list[Arrays] = []

    def hold(self, arrays: list[jax.Array], parts: list[Arrays]) -> None:
        """Holds the parts of each array, in place of the ones before."""
        held = list(parts)

        def let_go(_: Any) -> None:
            held.clear()

        self._arrays = [weakref.ref(x, let_go) for x in arrays]
        self._parts = held

    def find(self, arrays: Sequence[jax.Array]) -> list[Arrays]:
        """Returns the parts of the first arrays, or nothing if they are others."""
        held = list(self._parts)
        if len(held) != len(self._arrays):
            return []
        pairs = zip(self._arrays, arrays, strict=False)
        return held if all(ref() is x for ref, x in pairs) else []


class _Runner:
    """Runs a program for one type of its arguments."""

    def __init__(
        self,
        program: ShardProgram,
        plan: ShardPlan,
        donated: frozenset[int],
        options: dict[str, Any],
        num_state_leaves: int,
    ):
        self._plan = plan
        self._num_state_leaves = num_state_leaves
        self._devices = plan.world.local_devices
        staged = stages.cut(program)
        self._program = staged.program
        self._stages = [
            _StageRunner(stage, staged, plan, donated, options, k)
            for k, stage in enumerate(staged.stages)
        ]
        firsts = [r * plan.num_per_replica for r in plan.world.local_replicas]
        self._shards = [[f + j for j in range(plan.num_per_replica)] for f in firsts]
        self._indices = [
            [jax.device_put(np.int32(shard), device) for shard in shards]
            for device, shards in zip(self._devices, self._shards, strict=True)
        ]
        constants = {
            key: self._on_devices(x) for key, x in self._program.constants.items()
        }
        self._constants = [
            {key: arrays[d] for key, arrays in constants.items()}
            for d in range(len(self._devices))
        ]
        # Results that are literals, by their place.
        self._literals = {
            i: self._on_devices(jnp.asarray(atom.val))
            for i, atom in enumerate(self._program.outputs)
            if is_literal(atom)
        }
        self._assemblies = [
            Assembly(plan.world, is_split=is_row) for is_row in self._program.are_rows
        ]
        places = list(enumerate(program.are_split))
        self._split_inputs = [i for i, is_split in places if is_split]
        self._whole_inputs = [
            (i, program.inputs[i]) for i, split in places if not split
        ]
        places = list(enumerate(program.are_rows))
        self._whole_outputs = [i for i, is_row in places if not is_row]
        self._held = _HeldParts()
        self._cut = jax.jit(_cut_rows, static_argnums=1)
        self._join = jax.jit(_join_rows)

    def _on_devices(self, x: Any) -> Arrays:
        """Returns a value on each device of this process."""
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return array_parts.parts(x)
        return [jax.device_put(x, device) for device in self._devices]

    def run(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results of the step."""
        same, rows = self._enter(leaves)
        for stage in self._stages:
            stage.run(same, rows, self._shards)
        return self._leave(same, rows)

    def _enter(self, leaves: Sequence[jax.Array]) -> tuple[Any, Any]:
        """Returns the values that are the same for all shards, and of each shard."""
        k, program = self._plan.num_per_replica, self._program
        same = [dict(x) for x in self._constants]
        rows = [[{INDEX: index} for index in indices] for indices in self._indices]
        taken = self._held.find(leaves)
        taken += map(array_parts.parts, leaves[len(taken) :])
        split_keys = [program.inputs[i] for i in self._split_inputs]
        split_parts = [taken[i] for i in self._split_inputs]
        for d, values in enumerate(same):
            values.update([(key, taken[i][d]) for i, key in self._whole_inputs])
        for d, of_device in enumerate(rows if split_keys else ()):
            own = [parts[d] for parts in split_parts]
            cut = [own] if k == 1 else self._cut(own, k)
            for values, found in zip(of_device, cut, strict=True):
                values.update(zip(split_keys, found, strict=True))
        return same, rows

    def _leave(self, same: Any, rows: Any) -> list[jax.Array]:
        """Returns the results as arrays of all replicas."""
        program = self._program
        made: list[list[Any]] = [[] for _ in program.outputs]
        own = [i for i, is_row in enumerate(program.are_rows) if is_row]
        for d in range(len(self._devices)):
            if own:
                columns = [
                    [self._find(i, d, same[d], values) for i in own]
                    for values in rows[d]
                ]
                joined = columns[0] if len(columns) == 1 else self._join(columns)
                for i, x in zip(own, joined, strict=True):
                    made[i].append(x)
            for i in self._whole_outputs:
                # An equation, such as a loop, may make values of both kinds.
                made[i].append(self._find(i, d, same[d], rows[d][0]))
        results = list(map(Assembly.make, self._assemblies, made))
        count = self._num_state_leaves
        if self._plan.world.num_replicas > 1:
            self._held.hold(results[:count], made[:count])
        return results

    def _find(
        self, output: int, device: int, same: dict[int, Any], values: dict[int, Any]
    ) -> jax.Array:
        key = self._program.outputs[output]
        if output in self._literals:
            return self._literals[output][device]
        return values[key] if key in values else same[key]


class _StageRunner:
    """Runs one stage."""

    def __init__(
        self,
        stage: Stage,
        staged: StagedProgram,
        plan: ShardPlan,
        donated: frozenset[int],
        options: dict[str, Any],
        number: int,
    ):
        self._plan, self._stage = plan, stage
        avals = staged.program.avals

        def can_donate(key: int, *, of_shard: bool) -> bool:
            is_last = staged.last_use.get(key) == number
            is_passed = key in staged.program.inputs
            if not is_last or key == INDEX or key in staged.program.constants:
                return False
            if of_shard and key not in staged.differing:
                return False
            if not of_shard and key in stage.of_shard.inputs:
                return False
            return key in donated or not is_passed

        self._same = _compile(stage.same, avals, can_donate, options, of_shard=False)
        self._of_shard = _compile(
            stage.of_shard, avals, can_donate, options, of_shard=True
        )
        self._reduced = [t for t in stage.transfers if t.kind != "gather"]
        self._gathered = [t for t in stage.transfers if t.kind == "gather"]
        self._folding = Folding(plan, [t.kind for t in self._reduced], options)
        self._exchange = Exchange(plan, [*self._reduced, *self._gathered], options)
        self._assemblies = [
            Assembly(plan.world, is_split=True) for _ in stage.transfers
        ]
        self._stack = jax.jit(jnp.stack, compiler_options=options)
        self._read_last = [key for key, k in staged.last_use.items() if k == number]

    def run(self, same: Any, rows: Any, shards: list[list[int]]) -> None:
        """Adds what the stage makes to the values of the replicas and shards."""
        stage, num_devices = self._stage, len(same)
        if stage.same.equations:
            for values in same:
                _run(self._same, stage.same, values, values)
        terms: list[dict[Subtree, Arrays]] = [{} for _ in range(num_devices)]
        if stage.of_shard.equations or stage.transfers:
            for j in range(self._plan.num_per_replica):
                for d in range(num_devices):
                    values = rows[d][j]
                    found = _run(self._of_shard, stage.of_shard, same[d], values)
                    if self._reduced:
                        given = [found.pop(t.operand) for t in self._reduced]
                        self._folding.add(terms[d], shards[d][j], given)
                    values.update(found)
        if stage.transfers:
            self._bring_together(same, rows, terms)
        for values in (*same, *(values for of_device in rows for values in of_device)):
            for key in self._read_last:
                values.pop(key, None)

    def _bring_together(self, same: Any, rows: Any, terms: Any) -> None:
        world, num_terms = self._plan.world, self._exchange.num_terms
        per_device: list[list[Arrays]] = []  # by device and transfer.
        for of_device, folded in zip(rows, terms, strict=True):
            sums = [folded[subtree] for subtree in sorted(folded)]
            sums += sums[:1] * (num_terms - len(sums))
            columns = [[x[i] for x in sums] for i in range(len(self._reduced))]
            columns += [
                [values.pop(t.operand) for values in of_device] for t in self._gathered
            ]
            per_device.append(columns)
        transfers = [*self._reduced, *self._gathered]
        if world.num_replicas == 1:
            for t, arrays in zip(transfers, per_device[0], strict=True):
                is_sum = t.kind != "gather"
                same[0][t.result] = arrays[0] if is_sum else self._stack(arrays)
            return
        given = [
            [assembly.make(list(parts)) for parts in zip(*columns, strict=True)]
            for assembly, columns in zip(
                self._assemblies, zip(*per_device, strict=True), strict=True
            )
        ]
        results = self._exchange.run(given)
        for t, x in zip(transfers, results, strict=True):
            for values, part in zip(same, array_parts.parts(x), strict=True):
                values[t.result] = part


def _compile(
    part: SubProgram,
    avals: dict[int, Any],
    can_donate: Callable[..., bool],
    options: dict[str, Any],
    *,
    of_shard: bool,
) -> Callable[..., Arrays]:
    """Compiles a part of a stage for one device, which may reuse what it reads last."""

    def run(*arguments: jax.Array) -> Arrays:
        # JAX returns an argument itself, which a later program may be given to reuse.
        taken = set(map(id, arguments))
        return [jnp.copy(x) if id(x) in taken else x for x in part.run(arguments)]

    free = collections.Counter(_type_of(avals[key]) for key in part.outputs)
    donated = []
    for i, key in enumerate(part.inputs):
        kind = _type_of(avals[key])
        if free[kind] and can_donate(key, of_shard=of_shard):
            free[kind] -= 1
            donated.append(i)
    return jax.jit(run, donate_argnums=donated, compiler_options=options)


def _compiler_options() -> dict[str, Any]:
    """Returns the XLA options with which a program has the same bits every time."""
    if jax.default_backend() == "cpu":
        # A product is cut for as many threads as there are, in another order of sums.
        return {"xla_cpu_multi_thread_eigen": False}
    if jax.default_backend() == "gpu":
        return {"xla_gpu_deterministic_ops": True}
    return {}


def _type_of(aval: Any) -> Any:
    return aval.shape, aval.dtype


def _run(
    compiled: Callable[..., Arrays],
    part: SubProgram,
    same: dict[int, jax.Array],
    values: dict[int, jax.Array],
) -> dict[int, jax.Array]:
    """Runs a part on one device; returns its outputs, or adds them to `same`."""
    arguments = [same[key] if key in same else values[key] for key in part.inputs]
    found = dict(zip(part.outputs, compiled(*arguments), strict=True))
    if values is same:
        same.update(found)
    return found


def _cut_rows(arrays: Arrays, count: int) -> list[Arrays]:
    """Cuts the samples of a replica into the samples of its shards."""
    cut = [jnp.split(x, count) for x in arrays]
    return [list(row) for row in zip(*cut, strict=True)]


def _join_rows(columns: list[Arrays]) -> Arrays:
    return [jnp.concatenate(xs) for xs in zip(*columns, strict=True)]
