"""Tree reduction: how do the values of all shards come together over the replicas?

Only these programs depend on the number of replicas. They add numbers along the fixed
tree and move them, and compute nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdp.backward import flow
from jdp.collectives import auto, base, fixed_tree, xla
from jdp.collectives.base import Op
from jdp.collectives.fixed_tree import Subtree
from jdp.collectives.host import arithmetic, ordered, program_order
from jdp.collectives.shared_memory.all_reduce import shared_memory_all_reduce
from jdp.compat import array_parts
from jdp.replicas.mesh import World
from jdp.step.shards.shard_program import Kind, Transfer

_OPS: dict[str, Op] = {"max": "max", "min": "min", "sum": "sum"}
Arrays = list[jax.Array]


class ShardPlan(NamedTuple):
    """Which shards the replicas have."""

    world: World

    @property
    def num_shards(self) -> int:
        """Number of shards of all replicas together."""
        assert self.world.num_shards is not None
        return self.world.num_shards

    @property
    def num_per_replica(self) -> int:
        """Number of shards of each replica."""
        return self.num_shards // self.world.num_replicas

    @property
    def blocks(self) -> list[list[Subtree]]:
        """Per replica, the subtrees of the tree that it can reduce alone."""
        tree, k = fixed_tree.whole_tree(self.num_shards), self.num_per_replica
        starts = range(0, self.num_shards, k)
        return [tree.cover(first, first + k) for first in starts]


class Folding:
    """Reduces the shards of one replica, one after the other, along the tree."""

    def __init__(self, plan: ShardPlan, kinds: Sequence[Kind], options: dict[str, Any]):
        """Makes the program that combines two terms.

        Args:
          plan: the shards.
          kinds: reductions of the values that are reduced together.
          options: XLA options.
        """
        self._tree = fixed_tree.whole_tree(plan.num_shards)
        ops: list[Op] = [_OPS[kind] for kind in kinds]

        def combine(xs: Arrays, ys: Arrays) -> Arrays:
            triples = zip(ops, xs, ys, strict=True)
            return [base.combine(op, x, y).astype(x.dtype) for op, x, y in triples]

        self._combine = jax.jit(combine, donate_argnums=0, compiler_options=options)

    def add(self, terms: dict[Subtree, Arrays], shard: int, values: Arrays) -> None:
        """Adds the values of a shard to the terms of its replica.

        Args:
          terms: the sums so far, by subtree; the shards before `shard` are in.
          shard: number of the shard.
          values: its values.
        """
        subtree = Subtree(shard, shard + 1)
        for parent in self._parents(subtree):
            left, right = parent.children
            if right != subtree or left not in terms:
                break
            values = self._combine(terms.pop(left), values)
            subtree = parent
        terms[subtree] = values

    def _parents(self, subtree: Subtree) -> list[Subtree]:
        """Returns the subtrees above a subtree, the nearest first."""
        path, above = [], self._tree
        while above != subtree:
            path.append(above)
            left, right = above.children
            above = left if subtree.end <= left.end else right
        return path[::-1]


class Exchange:
    """Program that brings the values of one stage together over the replicas."""

    def __init__(
        self,
        plan: ShardPlan,
        transfers: Sequence[Transfer],
        options: dict[str, Any],
    ):
        self._plan, self._transfers = plan, transfers
        self._options = options
        self._compiled: Callable[..., Arrays] | None = None

    @property
    def num_terms(self) -> int:
        """Number of terms of a reduction per replica; further ones do not count."""
        return max(map(len, self._plan.blocks))

    def run(self, given: list[Arrays]) -> Arrays:
        """Returns one array per transfer, the same on all replicas.

        Args:
          given: per transfer the terms, or rows, of every replica, split over the
            replicas on dimension 0.
        """
        if self._compiled is None:
            self._compiled = self._compile(given)
        return self._compiled(given)

    def _compile(self, given: list[Arrays]) -> Callable[..., Arrays]:
        world = self._plan.world
        with auto.without_measuring():
            mapped = jax.shard_map(
                self._bring_together,
                mesh=world.mesh,
                in_specs=PartitionSpec(world.axis_names),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
            traced = jax.make_jaxpr(mapped)(given)
        if world.process_count > 1:
            traced = program_order.keep(traced, world, [])
        body, consts = flow.open_jaxpr(traced)

        def exchange(given: list[Arrays]) -> Arrays:
            return jax.core.eval_jaxpr(body, consts, *jax.tree.leaves(given))

        # A replica with fewer terms than another passes its first one twice.
        has_equal = len({len(subtrees) for subtrees in self._plan.blocks}) == 1
        donated = (0,) if has_equal else ()
        return jax.jit(exchange, donate_argnums=donated, compiler_options=self._options)

    def _bring_together(self, given: list[Arrays]) -> Arrays:
        with ordered.tracing_body():
            return self._reduce_and_gather(given)

    def _reduce_and_gather(self, given: list[Arrays]) -> Arrays:
        results: list[Any] = [None] * len(given)
        alone: dict[Any, list[int]] = {}
        for i, (transfer, arrays) in enumerate(
            zip(self._transfers, given, strict=True)
        ):
            if transfer.kind == "gather":
                results[i] = self._gather(arrays)
            elif self._can_share(transfer.kind, arrays):
                alone.setdefault((transfer.kind, arrays[0].dtype), []).append(i)
            else:
                results[i] = self._reduce(transfer.kind, arrays)
        for (kind, _), places in alone.items():
            found = shared_memory_all_reduce.reduce_group(
                [given[i][0] for i in places],
                self._plan.world.axis_name,
                op=_OPS[kind],
            )
            for i, x in zip(places, found, strict=True):
                results[i] = x
        return results

    def _can_share(self, kind: Kind, terms: Arrays) -> bool:
        """Whether shared memory reduces the terms, and along the tree."""
        # numpy's maximum treats zeros and NaN in its own way, and XLA takes subnormal
        # numbers for zeros: terms and sums have none, but sums of sums might.
        world = self._plan.world
        is_one_sum = world.process_count == 2 and world.num_local_replicas == 1
        if kind != "sum" or len(terms) > 1 or not is_one_sum:
            return False
        x, axis_name = terms[0], world.axis_name
        if not (
            jnp.issubdtype(x.dtype, jnp.floating) and arithmetic.can_reduce(x.dtype)
        ):
            return False
        aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
        found = auto.auto_all_reduce.choose(aval, axis_name)
        return found == shared_memory_all_reduce.value

    def _reduce(self, kind: Kind, terms: Arrays) -> jax.Array:
        shape, axis_name = terms[0].shape, self._plan.world.axis_name
        flat = [x.reshape(-1) for x in terms]
        blocks = self._plan.blocks
        total = fixed_tree.reduce_blocks(flat, axis_name, blocks, op=_OPS[kind])
        return total.reshape(shape)

    def _gather(self, rows: Arrays) -> jax.Array:
        """Returns the rows of all shards, shape (num_shards, n)."""
        plan = self._plan
        found = [
            xla.psum_all_gather(row, plan.world.axis_name).reshape(-1, row.size)
            for row in rows
        ]
        return jnp.stack(found, axis=1).reshape(plan.num_shards, -1)


class Assembly:
    """Makes an array of all replicas from the arrays of this process's devices."""

    def __init__(self, world: World, *, is_split: bool):
        """Notes how the arrays lie.

        Args:
          world: the replicas.
          is_split: whether they are parts along dimension 0; otherwise they are equal.
        """
        self._num_replicas = world.num_replicas
        self._is_split = is_split
        self._sharding = world.split if is_split else world.replicated
        self._aval: Any = None

    def make(self, parts: Arrays) -> jax.Array:
        """Makes an array of one array per local device, always of the same type."""
        if self._num_replicas == 1:
            return parts[0]
        if self._aval is None:
            shape = parts[0].shape
            if self._is_split:
                shape = (shape[0] * self._num_replicas, *shape[1:])
            made = jax.make_array_from_single_device_arrays(
                shape, self._sharding, parts
            )
            weak_type = parts[0].aval.weak_type
            self._aval = made.aval.update(weak_type=weak_type)
        return array_parts.assemble(self._aval, self._sharding, parts)
