"""Replication: how does a tree get onto all replicas, with the same values?"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdp.replicas import (
    agreement,
    comparison,
    differences,
    host_arrays,
    host_copies,
    layouts,
    mesh,
    per_replica,
    placing,
)
from jdp.replicas.mesh import World
from jdp.trees import tree_paths
from jdp.types import HostLeaf, PyTree

K = TypeVar("K")
T = TypeVar("T")
Leaf = TypeVar("Leaf", bound=HostLeaf)


def check_same_program(fn: Callable[..., Any], *args: PyTree, world: World) -> None:
    """Checks that `fn(*args)` is the same program in every process.

    Every process must call it. It compares the paths, shapes and dtypes of the
    arguments, the jaxpr, and the bits of the arrays that `fn` captures, each hashed
    once. Captured arrays that are spread over devices of several processes are compared
    by shape, dtype and sharding. The values of arguments are not compared.

    Args:
      fn: a function that JAX can trace.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      world: the processes.

    Raises:
      RuntimeError: the programs differ, or a process failed or did not come within
        `world.timeout_s`. Every process raises, and names the first difference and
        both values.
    """
    mesh.check_world(world)
    topic = "comparison of programs"
    with agreement.reporting(world, topic):
        jaxpr = jax.make_jaxpr(fn)(*args)
    named = {f"args[{i}]": arg for i, arg in enumerate(args)}
    comparison.compare_programs(world, jaxpr, named, topic=topic, jaxprs=[jaxpr])


def check_replicas(tree: PyTree, *, world: World) -> None:
    """Checks that every replica holds the same bits of `tree`.

    Every process must call it. It costs a copy to the host and a hash of every leaf,
    and no collective on the devices, except for arrays that are cut among the devices
    of a replica in several processes. A `jdp.PerReplica` is not compared.

    Args:
      tree: pytree of host arrays, or `jax.Array`s that are replicated or local.
      world: the processes.

    Raises:
      RuntimeError: a leaf differs, or a process did not come in time. Every process
        raises, and names the first such leaf, the first element, and both values.
      ValueError: a leaf is split over the replicas.
    """
    mesh.check_world(world)
    comparison.compare_values(world, tree, name="tree", topic="comparison of replicas")


@overload
def replicate(
    world: World, tree: HostLeaf, *, process: int = ..., specs: PyTree = ...
) -> jax.Array: ...
@overload
def replicate(
    world: World, tree: dict[K, Leaf], *, process: int = ..., specs: PyTree = ...
) -> dict[K, jax.Array]: ...
@overload
def replicate(
    world: World, tree: T, *, process: int = ..., specs: PyTree = ...
) -> T: ...
def replicate(
    world: World, tree: PyTree, *, process: int = 0, specs: PyTree = None
) -> PyTree:
    """Puts a tree on all replicas, with the values of one process.

    Every process must call it with a tree of the same structure, shapes and dtypes.
    Leaves that all replicas hold already are returned as they are. Other leaves are
    copied, so that a step that donates its state does not delete the argument. Arrays
    in a `jdp.PerReplica`, shape (num_replicas, ...), are split over the replicas: each
    replica gets its own row of the array in its process.

    Beside model axes, `specs` says how the devices of a replica share an array:

        specs = {"w": P(None, "model"), "v": P("model"), "b": None}
        params = jdp.replicate(world, params, specs=specs)

    Args:
      world: the replicas.
      tree: pytree of host arrays, local `jax.Array`s, numbers and PRNG keys; or arrays
        that are spread over the replicas, which are gathered.
      process: index of the process whose values all replicas get; the same on every
        process.
      specs: partitions over the model axes, of type `jax.sharding.PartitionSpec`: a
        tree like `tree`, or a prefix of it. None, for the whole or a part: an array
        stays cut along the model axes as it is, and anything else gets whole onto each
        device.

    Returns:
      The same tree of `jax.Array`s, with the bits of `process`, the same on all
      replicas of `world.mesh`.

    Raises:
      RuntimeError: the structure, a shape or a dtype differs between the processes, or
        a leaf is on all replicas in one process and not in another. Every process
        raises, and names the path and both values.
      TypeError: `world` or `process` has the wrong type, or one of `specs` has.
      ValueError: an array in a `jdp.PerReplica` does not have one row per replica, or
        lies on devices of several processes in another way; an array lies on devices
        other than the devices of the replicas; there is no process `process`; or one of
        `specs` does not fit its array or names another axis than a model axis.
    """
    mesh.check_world(world)
    if isinstance(process, bool) or not isinstance(process, int | np.integer):
        raise TypeError(f"`process` must be an integer, got {process!r}.")
    if not 0 <= process < world.process_count:
        raise ValueError(
            f"`process` must be one of the {world.process_count} processes, from 0 to "
            f"{world.process_count - 1}, got {process}."
        )
    topic = "replication of a tree"
    return place(world, tree, name="tree", topic=topic, process=process, specs=specs)


@mesh.without_ambient
def place(
    world: World,
    tree: PyTree,
    *,
    name: str,
    topic: str,
    process: int = 0,
    specs: PyTree = None,
) -> PyTree:
    """Puts a tree on all replicas; see `replicate`.

    Args:
      world: the replicas.
      tree: see `replicate`.
      name: the name of the tree, for errors.
      topic: the activity of the processes, for errors.
      process: see `replicate`.
      specs: see `replicate`.
    """
    are_own = per_replica.are_own(tree)
    with agreement.reporting(world, topic):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            where = f"`{name}{jax.tree_util.keystr(path)}`"
            host_arrays.check_has_no_mask(leaf, where)
            host_arrays.check_has_known_dtype(leaf, where)
        given = layouts.check_specs(world, tree, specs, name)
        leaves, treedef = jax.tree.flatten(place_own_rows(world, tree))
        targets = [
            layouts.target_of(world, leaf) if spec is None else spec
            for leaf, spec in zip(leaves, given, strict=True)
        ]
        places = [
            "is of one replica" if is_own else _find_place(world, tree, i, leaf, target)
            for i, (leaf, is_own, target) in enumerate(
                zip(leaves, are_own, targets, strict=True)
            )
        ]
    if world.store is not None:
        _compare_places(world, tree, name, topic, process, places)
    todo = [i for i, place in enumerate(places) if place.startswith(_ELSEWHERE)]
    for i, place in enumerate(places):
        if place.startswith(_SPREAD):
            leaves[i] = placing.gather(world, leaves[i], targets[i])
    if world.store is not None:
        placing.send(world, leaves, todo, targets, process=process)
    else:
        for i in todo:
            leaves[i] = placing.copy_out(world, leaves[i], targets[i])
    return jax.tree.unflatten(treedef, leaves)


def _compare_places(
    world: World,
    tree: PyTree,
    name: str,
    topic: str,
    process: int,
    places: Sequence[str],
) -> None:
    """Compares the leaves, and which of them are to be sent, between the processes."""
    described = comparison.describe_leaves({name: tree})
    lines = [
        f"`{path}` {place}" for (path, _), place in zip(described, places, strict=True)
    ]
    # Without 64-bit types a host array is narrowed, and no program fits both.
    is_wide = jax.dtypes.canonicalize_dtype(float) == np.float64
    settings = [f"`process` is {process}", f"`jax_enable_x64` is {is_wide}"]
    text = "\n".join([*settings, *lines])
    comparison.compare_described(
        world, topic, described, text, differences.explain_places
    )


def place_own_rows(world: World, tree: PyTree) -> PyTree:
    """Splits the arrays of each `jdp.PerReplica` over the replicas; sends nothing.

    Raises:
      ValueError: such an array does not have one row per replica.
    """
    leaves, treedef = jax.tree.flatten(tree)
    for i, is_own in enumerate(per_replica.are_own(tree)):
        if is_own:
            leaves[i] = _split_rows(world, tree, i, leaves[i])
    return jax.tree.unflatten(treedef, leaves)


@mesh.without_ambient
def place_own_value(world: World, leaf: Any, name: str) -> jax.Array:
    """Puts a value of this process on each of its replicas; sends nothing.

    Args:
      world: the replicas.
      leaf: array or number; an array on all replicas is returned as it is.
      name: the name of the leaf, for errors.

    Raises:
      ValueError: the leaf is spread over devices of several processes.
    """
    if is_replicated(world, leaf):
        return leaf
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"{name} is spread over devices of several processes ({leaf.sharding}). "
            "Pass a host array, a local array, or an array that all replicas hold."
        )
    value: Any = leaf
    if not isinstance(leaf, jax.Array):
        value = host_arrays.own_copy(np.asarray(leaf))
    elif jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(leaf)
    return placing.place(world, value, like=leaf)


@mesh.without_ambient
def copy_from(world: World, tree: PyTree, *, process: int) -> PyTree:
    """Gives all replicas one process' values of a replicated tree.

    Every process must call it with arrays of the same shapes. Leaves that are not whole
    on every replica are returned as they are.
    """
    if world.store is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    are_own = per_replica.are_own(tree)
    found = [
        None if is_own else layouts.find(world, x, is_own=False)
        for x, is_own in zip(leaves, are_own, strict=True)
    ]
    whole = [i for i, spec in enumerate(found) if spec == layouts.WHOLE]
    targets = [spec or layouts.WHOLE for spec in found]
    placing.send(world, leaves, whole, targets, process=process)
    cut = [i for i, spec in enumerate(found) if spec]
    parts = [leaves[i] for i in cut], [targets[i] for i in cut]
    copies = placing.copy_over_replicas(world, *parts, world.replica_of(process))
    for i, x in zip(cut, copies, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def is_replicated(world: World, x: Any) -> bool:
    """Returns whether each device of `world` holds the whole of the array `x`."""
    return layouts.find(world, x, is_own=False) == layouts.WHOLE


_IN_PLACE = "is on all replicas"
_ELSEWHERE = "is not yet on the replicas"
_SPREAD = "is spread over devices of several processes"


def _find_place(
    world: World, tree: PyTree, index: int, leaf: Any, target: PartitionSpec
) -> str:
    """Returns where a leaf lies, and how it is to be cut, in the words of errors."""
    suffix = f", cut as {target}" if target else ""
    if layouts.find(world, leaf, is_own=False) == target:
        return _IN_PLACE + suffix
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return _ELSEWHERE + suffix
    if leaf.sharding.device_set == set(world.mesh.devices.flat):
        return _SPREAD + suffix
    raise ValueError(
        f"`{tree_paths.leaf_paths(tree)[index]}` lies on devices of several processes "
        f"other than the devices of the replicas ({leaf.sharding}). Pass host arrays, "
        "or arrays on this process' devices."
    )


def _split_rows(world: World, tree: PyTree, index: int, leaf: Any) -> jax.Array:
    if layouts.find(world, leaf, is_own=True) is not None:
        return leaf
    path = tree_paths.leaf_paths(tree)[index]
    num_rows = jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0
    axes = layouts.axes_with_rows(world, num_rows)
    if axes is None:
        raise ValueError(
            f"`{path}` is in a `jdp.PerReplica`, so outside of a step its first "
            f"dimension must be {world.num_rows}, one row per "
            f"{'shard' if world.num_shards else 'replica'}, got shape "
            f"{jnp.shape(leaf)}."
        )
    if isinstance(leaf, jax.Array) and not _is_whole_here(leaf):
        raise ValueError(
            f"`{path}` is in a `jdp.PerReplica` and lies on devices of several "
            "processes in another way than one row on each replica, in their order "
            f"({leaf.sharding}). Pass host arrays, or arrays that a step or "
            "`jdp.replicate` returned."
        )
    rows = host_copies.host_copy(leaf)
    if not isinstance(leaf, jax.Array):
        rows = host_arrays.own_copy(rows)
    sharding = layouts.sharding_of_rows(world, rows.shape, axes)
    placed = jax.make_array_from_callback(
        rows.shape, sharding, lambda where: rows[where]
    )
    return placing.as_keys(placed, like=leaf)


def _is_whole_here(x: jax.Array) -> bool:
    """Returns whether this process holds all rows of an array.

    `jdp.replicate` gives all rows to each replica if it gets the arrays of a
    `jdp.PerReplica` alone, as in the `nnx.state` of an optimizer.
    """
    return x.is_fully_addressable or (
        x.is_fully_replicated and bool(x.addressable_shards)
    )
