"""Initial state: how do all replicas make a state at once, each its own part?

All processes make it with one program and the same values. They compare both first:
JAX does not, and treats different values as the same.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import PartitionSpec

from jdp import compat, types
from jdp.replicas import agreement, axes, comparison, mesh, per_replica, replication
from jdp.replicas.mesh import World
from jdp.replicas.per_replica import PerReplica
from jdp.types import AxisName, HostLeaf, PyTree

K = TypeVar("K")
T = TypeVar("T")
Leaf = TypeVar("Leaf", bound=HostLeaf)

_ADVICE = (
    "\nA state is made by the same program on all processes, with the same "
    "hyperparameters and seeds. Use the values of process 0 on all processes."
)


def init_on_replicas(
    init: Callable[..., T],
    *args: PyTree,
    axis_name: AxisName | None,
    world: World | None = None,
) -> T:
    """Makes a state of which each replica has its own parts.

    Inside a step this is `init(*args)`. Outside, every replica runs `init(*args)`, and
    every process must call this function. All use the arguments of process 0, as with
    `jdp.replicate`, and compare the program and the values that it captures.

    Args:
      init: makes the state of one replica; it may use `axis_name`.
      *args: pytrees of host arrays, or of `jax.Array`s that are local or replicated.
      axis_name: the axis, or axes, along which the replicas lie; None: the axes of
        the world.
      world: the replicas; None: the world that `jdp.init` returned. Not used inside a
        step.

    Returns:
      The result of `init`, with its `PerReplica` parts split over the replicas, and all
      other parts replicated.

    Raises:
      RuntimeError: outside of a step, there is no world; or the processes have
        arguments with other paths, shapes or dtypes, other programs, or other captured
        values, such as a learning rate. Every process raises, and names the difference.
      ValueError: the world has other axes.
      TypeError: `world` is not a world.
    """
    axis_name = axes.find_outside(axis_name, world)
    if compat.is_bound(axis_name):
        names = sorted(compat.tracked_axes(axis_name))
        return per_replica.map_parts(
            init(*args), lambda x: x, lambda x: compat.cast_varying(x, names)
        )
    world = mesh.current_world() if world is None else world
    if types.as_axis_names(axis_name) != world.axis_names:
        raise ValueError(
            f"`axis_name={axis_name!r}` is not the axis of the world, "
            f"{world.axis_name!r}."
        )
    topic = "making of a state on all replicas"
    if world.store is None:
        args = jax.tree_util.tree_map_with_path(
            lambda path, x: _on_all(
                world, x, f"`argument{jax.tree_util.keystr(path)}`"
            ),
            args,
        )
    else:
        args = replication.place(world, args, name="argument", topic=topic)
    made = []

    def run(*args: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
        tree = init(*args)
        made.append((jax.tree.structure(tree), per_replica.are_own(tree)))
        return per_replica.split_leaves(per_replica.leave(tree))

    names = world.axis_names
    mapped = jax.shard_map(
        run,
        mesh=world.mesh,
        in_specs=PartitionSpec(),
        out_specs=(PartitionSpec(), PartitionSpec(names)),
        check_vma=False,
    )
    if world.store is not None:
        _compare(world, mapped, args, topic)
    shared, own = jax.jit(mapped)(*args)
    treedef, are_own = made[-1]
    leaves = per_replica.merge_leaves(are_own, shared, own)
    return jax.tree.unflatten(treedef, leaves)


@overload
def copy_per_replica(
    tree: HostLeaf, *, axis_name: AxisName = ..., world: World | None = ...
) -> PerReplica[jax.Array]: ...
@overload
def copy_per_replica(
    tree: dict[K, Leaf], *, axis_name: AxisName = ..., world: World | None = ...
) -> PerReplica[dict[K, jax.Array]]: ...
@overload
def copy_per_replica(
    tree: T, *, axis_name: AxisName = ..., world: World | None = ...
) -> PerReplica[T]: ...
def copy_per_replica(
    tree: PyTree, *, axis_name: AxisName | None = None, world: World | None = None
) -> PerReplica[Any]:
    """Gives every replica its own copy, which may diverge afterwards.

    Args:
      tree: pytree of arrays, the same on all replicas.
      axis_name: the axis, or axes, along which the replicas lie; None: the axes of
        the world.
      world: the replicas; None: the world that `jdp.init` returned. Not used inside a
        step.

    Returns:
      The copies. Outside of a step they have one row per replica; every process must
      call this function there, and all use the arrays of process 0.

    Raises:
      RuntimeError: outside of a step, there is no world; or the processes have arrays
        with other paths, shapes or dtypes. Every process raises, and names the
        difference.
    """
    return init_on_replicas(
        lambda tree: PerReplica(jax.tree.map(jnp.asarray, tree)),
        tree,
        axis_name=axis_name,
        world=world,
    )


def _on_all(world: World, leaf: Any, name: str) -> Any:
    """Converts an argument so that a program of all replicas takes it as replicated."""
    if isinstance(leaf, jax.Array) and leaf.sharding.device_set == set(
        world.mesh.devices.flat
    ):
        return leaf
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf))
        impl = jax.random.key_impl(leaf)
        return jax.random.wrap_key_data(
            jax.device_put(data, world.replicated), impl=impl
        )
    mesh.check_has_no_mask(leaf, name)
    return np.asarray(leaf)


def _compare(world: World, fn: Callable[..., Any], args: PyTree, topic: str) -> None:
    """Compares a program and the values inside it between the processes."""
    with agreement.reporting(world, topic):
        closed = jax.make_jaxpr(fn)(*args)
        found = _constants(closed)
        values = [x for x in found if _is_here(x)]
    comparison.compare_programs(world, closed, {}, topic=topic, advice=_ADVICE)
    comparison.compare_values(
        world, values, name="captured value ", topic=topic, advice=_ADVICE
    )


def _is_here(x: Any) -> bool:
    """Returns whether this process holds the whole value."""
    return not isinstance(x, jax.Array) or x.is_fully_replicated


def _constants(closed: Any) -> Iterator[Any]:
    """Yields the values in a program: literals, and the arrays that it captures."""
    if isinstance(closed, ClosedJaxpr):
        yield from closed.consts
        closed = closed.jaxpr
    for eqn in closed.eqns:
        yield from (atom.val for atom in eqn.invars if isinstance(atom, Literal))
        leaves = jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: isinstance(x, _JAXPRS)
        )
        for inner in leaves:
            if isinstance(inner, _JAXPRS):
                yield from _constants(inner)
    yield from (atom.val for atom in closed.outvars if isinstance(atom, Literal))


_JAXPRS = (Jaxpr, ClosedJaxpr)
