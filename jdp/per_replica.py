"""Per replica: the parts of a train state of which every replica has its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdp import compat, mesh
from jdp.mesh import World
from jdp.types import AxisName, PyTree


class PerReplica(NamedTuple):
    """A part of a train state that differs between the replicas.

    What the optimizer state of a shard is, or a replica's own rounding errors. Inside
    of a step `value` is what this replica has. Outside of it every array has one more
    dimension in front, of length num_replicas, over which it is split: row i is that of
    replica i. `jdp.data_parallel` takes it from one form to the other.

    Attributes:
      value: pytree of arrays.
    """

    value: PyTree


def init_on_replicas(
    init: Callable[..., PyTree],
    *args: PyTree,
    axis_name: AxisName,
    world: World | None = None,
) -> PyTree:
    """Makes a state that has parts of the replicas' own.

    Inside of a step it is `init(*args)`. Outside, every replica runs that: every
    process calls it, with the same arguments, and nothing is sent.

    Args:
      init: makes the state of one replica; it may use `axis_name`.
      *args: pytrees of host arrays, or of `jax.Array`s that are local or replicated.
      axis_name: the axis, or axes, over which replicas lie.
      world: the replicas; None: what `jdp.init` made. Inside of a step it is not used.

    Returns:
      What `init` returns, its `PerReplica` parts split over the replicas, all others
      replicated.

    Raises:
      RuntimeError: outside of a step, without a world.
      ValueError: the world has other axes.
    """
    if mesh.is_bound(axis_name):
        names = sorted(mesh.tracked_axes(axis_name))
        return _map(init(*args), lambda x: x, lambda x: compat.cast_varying(x, names))
    world = mesh.current_world() if world is None else world
    if mesh.as_axis_names(axis_name) != world.axis_names:
        raise ValueError(
            f"`axis_name={axis_name!r}` is not that of the world, {world.axis_name!r}."
        )
    args = jax.tree.map(lambda x: _on_all(world, x), args)
    made = []

    def run(*args: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
        tree = init(*args)
        made.append(jax.tree.structure(tree))
        return split_leaves(leave(tree))

    names = world.axis_names
    mapped = jax.shard_map(
        run,
        mesh=world.mesh,
        in_specs=PartitionSpec(),
        out_specs=(PartitionSpec(), PartitionSpec(names)),
        check_vma=False,
    )
    shared, own = jax.jit(mapped)(*args)
    return merge_leaves(made[-1], shared, own)


def copy_per_replica(
    tree: PyTree, *, axis_name: AxisName = "data", world: World | None = None
) -> PerReplica:
    """Gives every replica a copy of its own, from which they may go apart.

    Args:
      tree: pytree of arrays, the same on all replicas.
      axis_name: the axis, or axes, over which replicas lie.
      world: the replicas; None: what `jdp.init` made. Inside of a step it is not used.

    Returns:
      The copies; outside of a step with a row for each replica.

    Raises:
      RuntimeError: outside of a step, without a world.
    """
    return init_on_replicas(
        lambda tree: PerReplica(jax.tree.map(jnp.asarray, tree)),
        tree,
        axis_name=axis_name,
        world=world,
    )


def specs(tree: PyTree, axis_names: tuple[str, ...]) -> PyTree:
    """Returns how the leaves of a state, outside of a step, lie over the replicas."""
    return _map(tree, lambda _: PartitionSpec(), lambda _: PartitionSpec(axis_names))


def enter(tree: PyTree) -> PyTree:
    """Takes a state from the form outside of a step to that of one replica."""
    return _map(tree, lambda x: x, lambda x: x.reshape(x.shape[1:]))


def leave(tree: PyTree) -> PyTree:
    """The inverse of `enter`."""
    return _map(tree, lambda x: x, lambda x: jnp.asarray(x)[None])


def are_own(tree: PyTree) -> list[bool]:
    """Returns by leaf of a tree whether it is a replica's own."""
    return jax.tree.leaves(_map(tree, lambda _: False, lambda _: True))


def split_leaves(tree: PyTree) -> tuple[list[Any], list[Any]]:
    """Returns the leaves that all replicas share, and those of their own."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for leaf, is_own in zip(jax.tree.leaves(tree), are_own(tree), strict=True):
        parts[is_own].append(leaf)
    return parts


def merge_leaves(treedef: Any, shared: list[Any], own: list[Any]) -> PyTree:
    """The inverse of `split_leaves`."""
    tree = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    left = iter(shared), iter(own)
    return jax.tree.unflatten(treedef, [next(left[k]) for k in are_own(tree)])


def _map(
    tree: PyTree, of_shared: Callable[[Any], Any], of_own: Callable[[Any], Any]
) -> PyTree:
    def visit(node: Any) -> Any:
        return jax.tree.map(of_own, node) if _is_own(node) else of_shared(node)

    return jax.tree.map(visit, tree, is_leaf=_is_own)


def _is_own(node: Any) -> bool:
    return isinstance(node, PerReplica)


def _on_all(world: World, leaf: Any) -> Any:
    """An argument that a program of all replicas takes as replicated."""
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
    return np.asarray(leaf)
