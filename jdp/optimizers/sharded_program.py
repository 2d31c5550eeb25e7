"""Sharded program: a program of whole arrays, run on the shards that a replica has.

Each array is flattened and cut into one shard per replica, all of one size; shard i is
on replica i. Elementwise operations run on the shards. A sum, a maximum or a minimum of
all elements is first taken over each shard, then over the replicas. Other operations
need whole arrays. Operations on one leaf run on one replica (`region_owners`). For all
others the shards are gathered, and every replica runs them. So the results always equal
the results of the whole program.

Equations are run in waves: first all that need nothing from other replicas, then the
collectives for the operands of the next wave. Reads and writes of mutable arrays, and
other ordered effects, stay in the order of the program.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jdp import compat, types
from jdp.backward import flat_program
from jdp.backward.flat_program import Equation, is_literal
from jdp.collectives import xla
from jdp.compat import annotations, primitives
from jdp.optimizers import (
    partials,
    region_owners,
    shard_clusters,
    shard_layout,
    sharded_operations,
    whole_regions,
)
from jdp.optimizers.partials import Partial
from jdp.optimizers.shard_layout import ArrayShard, ShardLayout
from jdp.types import PyTree

_logger = logging.getLogger("jdp")


def run(
    fn: Callable[..., PyTree], args: PyTree, avals: PyTree, layout: ShardLayout
) -> PyTree:
    """Runs `fn(*args)` where some leaves of `args` are shards.

    Args:
      fn: a function of whole arrays.
      args: its arguments; leaves are `ArrayShard`s, or arrays that are the same on all.
      avals: the types of the whole arrays, in the structure of `args`.
      layout: the replicas that have the shards.

    Returns:
      The result of `fn`; leaves are `ArrayShard`s, or arrays that are the same on all.

    Raises:
      ValueError: an operation combines shards with an array that `fn` closes over and
        that may differ between the replicas.
    """
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*avals)
    values = jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, ArrayShard))
    evaluation = _ShardedEvaluation(layout)
    out = evaluation.run(closed, values)
    return jax.tree.unflatten(jax.tree.structure(shape), out)


_DIFFERS = (
    "A function that the optimizer of `zero1` calls, such as a `value_fn`, closes over "
    "an array that may differ between the replicas, such as their own samples, so that "
    "they would take different steps. Make it with `jdp.mean_loss(loss_fn)`: the "
    "gradient of a `jdp.average` is of one replica alone."
)


class _ShardedEvaluation:
    """Evaluates one program on shards."""

    def __init__(self, layout: ShardLayout):
        self._layout = layout
        self._values: dict[Any, Any] = {}  # by key.
        # Keys of values that `fn` closes over, or that depend on such values alone.
        # They may come from a replica's own samples, so no shard is combined with them.
        self._captured: set[Any] = set()

    def run(
        self, closed: Any, args: Sequence[Any], captured: Sequence[int] = ()
    ) -> list[Any]:
        """Returns the results: shards or arrays; `captured` are indices of `args`."""
        program = flat_program.flatten(closed, primitives.INLINABLE)
        self._captured.update(program.inputs[i] for i in captured)
        self._values.update(zip(program.inputs, args, strict=True))
        self._values.update(program.constants)
        self._captured.update(
            key
            for key, value in program.constants.items()
            if isinstance(value, jax.core.Tracer)
        )
        waiting = program.equations
        while waiting:
            waiting = self._run_wave(waiting, program.outputs)
        self._combine([key for key in program.outputs if not is_literal(key)])
        return [self._check_value(key, self._read(key)) for key in program.outputs]

    def _read(self, key: Any) -> Any:
        return jnp.asarray(key.val) if is_literal(key) else self._values[key]

    def _run_wave(
        self, waiting: list[Equation], results: Sequence[Any]
    ) -> list[Equation]:
        """Runs the equations whose operands are here; fetches operands of the others.

        Returns:
          The equations that are left.
        """
        waiting = shard_clusters.run(
            waiting, self._values, self._captured, results, self._layout
        )
        left, wanted, whole = [], [], []
        is_held = False  # Whether an ordered effect waits; later ones wait, too.
        for equation in waiting:
            is_in_order = compat.has_ordered_effect(equation.eqn)
            if (is_in_order and is_held) or any(
                not is_literal(k) and k not in self._values for k in equation.inputs
            ):
                left.append(equation)
                is_held |= is_in_order
                continue
            values = [self._read(key) for key in equation.inputs]
            found = None
            if not self._runs_whole(equation, values):
                found = self._run_here(equation, self._check_values(equation, values))
            if found is not None:
                self._values.update(zip(equation.outputs, found, strict=True))
                continue
            left.append(equation)
            is_held |= is_in_order
            for key in self._find_missing(equation, values):
                if isinstance(self._values[key], Partial):
                    wanted.append(key)
                else:
                    whole.append((key, equation))
        if wanted or not whole:
            self._combine(wanted)
            return left
        done = self._run_regions(left, results)
        left = [x for x in left if id(x) not in done]
        self._gather([(key, x.eqn) for key, x in whole if id(x) not in done])
        return left

    def _run_regions(self, waiting: list[Equation], results: Sequence[Any]) -> set[int]:
        """Runs regions of equations that need whole arrays, each on one replica.

        Returns:
          The ids of the equations that ran.
        """
        if self._layout.num_replicas == 1:
            return set()
        regions = whole_regions.find(waiting, self._values, self._captured, results)
        ownership = region_owners.assign(regions, self._layout.num_replicas)
        programs = [region.program for region in ownership.regions]
        if not programs:
            return set()
        self._combine([key for program in programs for key in program.inputs])
        self._values.update(region_owners.run(ownership, self._values, self._layout))
        return {id(x) for program in programs for x in program.equations}

    def _runs_whole(self, equation: Equation, values: list[Any]) -> bool:
        """Whether an equation combines shards with a captured array, not a number.

        Such an equation runs on whole arrays: its result may be averaged later.
        """
        if equation.eqn.primitive.name == "cond":
            return False  # Its branches check their operands.
        if not any(isinstance(x, ArrayShard) for x in values):
            return False
        pairs = zip(equation.inputs, values, strict=True)
        return any(self._is_captured(k) and math.prod(x.shape) != 1 for k, x in pairs)

    def _check_values(self, equation: Equation, values: list[Any]) -> list[Any]:
        """Returns operands; those that meet shards must be the same on all replicas."""
        keys = equation.inputs
        if not any(self._is_captured(key) for key in keys):
            return values
        if not equation.outputs and equation.eqn.primitive.name != "cond":
            return values  # The results do not depend on `jax.debug.print`.
        if not any(isinstance(x, ArrayShard | Partial) for x in values):
            self._captured.update(equation.outputs)
            # A mutable array is written here, and may be read later.
            self._captured.update(
                key for key, x in zip(keys, values, strict=True) if compat.is_mutable(x)
            )
            return values
        count = 1 if equation.eqn.primitive.name == "cond" else len(values)
        pairs = zip(keys[:count], values[:count], strict=True)
        return [self._check_value(key, x) for key, x in pairs] + values[count:]

    def _is_captured(self, key: Any) -> bool:
        return not is_literal(key) and key in self._captured

    def _check_value(self, key: Any, x: Any) -> Any:
        if (
            not self._is_captured(key)
            or isinstance(x, ArrayShard)
            or compat.is_mutable(x)
        ):
            return x
        names = types.as_axis_names(self._layout.axis_name)
        return annotations.expect_same(x, names, _DIFFERS)

    def _find_missing(self, equation: Equation, values: list[Any]) -> list[Any]:
        """Returns keys of operands that are needed from other replicas first."""
        keys = equation.inputs
        pairs = list(zip(keys, values, strict=True))
        found = [key for key, x in pairs if isinstance(x, Partial)]
        if found:
            return found
        if equation.eqn.primitive.name == "cond" and isinstance(values[0], ArrayShard):
            return keys[:1]
        found = [key for key, x in pairs if isinstance(x, ArrayShard)]
        if sharded_operations.is_elementwise(equation.eqn):
            # Scalars beside arrays. Only one replica has the shard of a scalar.
            shapes = {x.shape for x in values}
            if len(shapes) > 1:
                return [k for k in found if self._values[k].shape == ()] or found
        return found

    def _run_here(self, equation: Equation, values: list[Any]) -> list[Any] | None:
        """Runs an equation; returns None if it needs data of other replicas."""
        eqn = equation.eqn
        if (
            eqn.primitive.name == "cond"
            and any(isinstance(x, ArrayShard) for x in values)
            and not any(isinstance(x, Partial) for x in values)
        ):
            captured = [self._is_captured(key) for key in equation.inputs[1:]]
            return self._cond(eqn, values, captured)
        return sharded_operations.run(eqn, values, self._layout)

    def _cond(
        self, eqn: Any, values: list[Any], captured: list[bool]
    ) -> list[Any] | None:
        """Runs a `cond` on shards; all replicas take the same branch."""
        index, *operands = values
        if isinstance(index, ArrayShard) or any(map(compat.is_mutable, operands)):
            return None
        shapes = [x.shape if isinstance(x, ArrayShard) else None for x in operands]
        arrays = list(map(_data_of, operands))
        places = [i for i, is_captured in enumerate(captured) if is_captured]

        def take(branch: Any, *arrays: Any) -> list[Any]:
            given = [
                x if shape is None else ArrayShard(x, shape)
                for x, shape in zip(arrays, shapes, strict=True)
            ]
            return _ShardedEvaluation(self._layout).run(branch, given, places)

        branches = [functools.partial(take, x) for x in eqn.params["branches"]]
        kinds = [_are_sharded(branch, arrays) for branch in branches]
        # A result is sharded if any branch has it in shards.
        are_sharded = [any(column) for column in zip(*kinds, strict=True)]

        def run(branch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
            return lambda *arrays: self._in_kinds(branch(*arrays), are_sharded)

        out = lax.switch(index.astype(jnp.int32), list(map(run, branches)), *arrays)
        return [
            ArrayShard(x, var.aval.shape) if is_sharded else x
            for x, is_sharded, var in zip(out, are_sharded, eqn.outvars, strict=True)
        ]

    def _in_kinds(self, results: list[Any], are_sharded: list[bool]) -> list[Any]:
        """Returns the results of a branch, or this replica's shards of them."""
        # All are computed before any is cast.
        data = [
            _data_of(self._layout.as_shard(x)) if is_sharded else x
            for x, is_sharded in zip(results, are_sharded, strict=True)
        ]
        names = sorted(self._layout.tracked_axes)
        return [
            compat.cast_varying(x, names) if is_sharded else x
            for x, is_sharded in zip(data, are_sharded, strict=True)
        ]

    def _combine(self, keys: Sequence[Any]) -> None:
        """Combines partial reductions: one collective per operation and dtype."""
        keys = [k for k in dict.fromkeys(keys) if isinstance(self._values[k], Partial)]
        found = partials.combine(
            [self._values[key] for key in keys], self._layout.axis_name
        )
        self._values.update(zip(keys, found, strict=True))

    def _gather(self, wanted: Sequence[tuple[Any, Any]]) -> None:
        """Gathers whole arrays on all replicas, in one collective per dtype."""
        groups: dict[Any, list[Any]] = {}
        for key, eqn in wanted:
            value = self._values[key]
            if isinstance(value, ArrayShard) and key not in groups.get(
                value.data.dtype, ()
            ):
                _logger.debug(
                    "Gathering an array of shape %s for `%s`.",
                    value.shape,
                    eqn.primitive.name,
                )
                groups.setdefault(value.data.dtype, []).append(key)
        for members in groups.values():
            shards = [self._values[key] for key in members]
            wholes = shard_layout.gather(shards, self._layout, xla.PSUM)
            self._values.update(zip(members, wholes, strict=True))


def _data_of(x: Any) -> Any:
    return x.data if isinstance(x, ArrayShard) else x


def _are_sharded(branch: Callable[..., list[Any]], arrays: Sequence[Any]) -> list[bool]:
    """Returns for each result of a branch whether it is in shards."""
    found: list[bool] = []

    def run(*arrays: Any) -> list[Any]:
        out = branch(*arrays)
        found[:] = [isinstance(x, ArrayShard) for x in out]
        return list(map(_data_of, out))

    jax.eval_shape(run, *arrays)
    return found
