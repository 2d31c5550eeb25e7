"""Replication: how does a tree get onto all replicas, with the same values?"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdp.replicas import agreement, comparison, differences, mesh, per_replica
from jdp.replicas.mesh import World
from jdp.trees import tree_paths
from jdp.types import HostLeaf, PyTree

K = TypeVar("K")
T = TypeVar("T")
Leaf = TypeVar("Leaf", bound=HostLeaf)

_BROADCAST_WORDS = 1 << 24  # 64 MiB of 32-bit words at a time.


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
    and no collective on the devices. A `jdp.PerReplica` is not compared.

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
def replicate(world: World, tree: HostLeaf, *, process: int = ...) -> jax.Array: ...
@overload
def replicate(
    world: World, tree: dict[K, Leaf], *, process: int = ...
) -> dict[K, jax.Array]: ...
@overload
def replicate(world: World, tree: T, *, process: int = ...) -> T: ...
def replicate(world: World, tree: PyTree, *, process: int = 0) -> PyTree:
    """Puts a tree on all replicas, with the values of one process.

    Every process must call it with a tree of the same structure, shapes and dtypes.
    Leaves that all replicas hold already are returned as they are. Other leaves are
    copied, so that a step that donates its state does not delete the argument. Arrays
    in a `jdp.PerReplica`, shape (num_replicas, ...), are split over the replicas: each
    replica gets its own row of the array in its process.

    Args:
      world: the replicas.
      tree: pytree of host arrays, local `jax.Array`s, numbers and PRNG keys; or arrays
        that are spread over the replicas, which are gathered.
      process: index of the process whose values all replicas get; the same on every
        process.

    Returns:
      The same tree of `jax.Array`s, with the bits of `process`, replicated over
      `world.mesh`.

    Raises:
      RuntimeError: the structure, a shape or a dtype differs between the processes, or
        a leaf is on all replicas in one process and not in another. Every process
        raises, and names the path and both values.
      TypeError: `world` or `process` has the wrong type.
      ValueError: an array in a `jdp.PerReplica` does not have one row per replica, or
        lies on devices of several processes in another way; an array lies on devices
        other than the devices of the replicas; or there is no process `process`.
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
    return place(world, tree, name="tree", topic=topic, process=process)


@mesh.without_ambient
def place(
    world: World, tree: PyTree, *, name: str, topic: str, process: int = 0
) -> PyTree:
    """Puts a tree on all replicas; see `replicate`.

    Args:
      world: the replicas.
      tree: see `replicate`.
      name: the name of the tree, for errors.
      topic: the activity of the processes, for errors.
      process: see `replicate`.
    """
    are_own = per_replica.are_own(tree)
    with agreement.reporting(world, topic):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            where = f"`{name}{jax.tree_util.keystr(path)}`"
            mesh.check_has_no_mask(leaf, where)
            mesh.check_has_known_dtype(leaf, where)
        leaves, treedef = jax.tree.flatten(place_own_rows(world, tree))
        places = [
            "is of one replica" if is_own else _find_place(world, tree, i, leaf)
            for i, (leaf, is_own) in enumerate(zip(leaves, are_own, strict=True))
        ]
    if world.store is not None:
        # The processes must also agree on which leaves to send.
        described = comparison.describe_leaves({name: tree})
        lines = [
            f"`{path}` {place}"
            for (path, _), place in zip(described, places, strict=True)
        ]
        # Without 64-bit types a host array is narrowed, and no program fits both.
        is_wide = jax.dtypes.canonicalize_dtype(float) == np.float64
        settings = [f"`process` is {process}", f"`jax_enable_x64` is {is_wide}"]
        text = "\n".join([*settings, *lines])
        comparison.compare_described(
            world, topic, described, text, differences.explain_places
        )
    spread = [i for i, place in enumerate(places) if place == _SPREAD]
    todo = [i for i, place in enumerate(places) if place == _ELSEWHERE]
    for i in spread:
        leaves[i] = _gather(world, leaves[i])
    if world.store is not None:
        _send(world, leaves, todo, process=process)
    else:
        for i in todo:
            leaves[i] = _copy_out(world, leaves[i])
    return jax.tree.unflatten(treedef, leaves)


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
        value = mesh.own_copy(np.asarray(leaf))
    elif jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(leaf)
    return _place(world, value, like=leaf)


@mesh.without_ambient
def copy_from(world: World, tree: PyTree, *, process: int) -> PyTree:
    """Gives all replicas one process' values of a replicated tree.

    Every process must call it with arrays of the same shapes. Leaves that are not whole
    on every replica are returned as they are.
    """
    if world.store is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    todo = [i for i, x in enumerate(leaves) if is_replicated(world, x)]
    _send(world, leaves, todo, process=process)
    return jax.tree.unflatten(treedef, leaves)


def is_replicated(world: World, x: Any) -> bool:
    """Returns whether every replica of `world` holds the whole of the array `x`."""
    return _has_sharding(x, world.replicated)


def is_split(world: World, x: Any) -> bool:
    """Returns whether every replica has its row of the array `x`, on dimension 0."""
    places = world.split, sharding_of_rows(world, jnp.shape(x))
    is_placed = any(_has_sharding(x, sharding) for sharding in places)
    return is_placed and x.shape[0] == world.num_replicas


def sharding_of_rows(world: World, shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding of an array that has one row per replica."""
    # JAX programs return most arrays without elements as replicated, whatever their
    # sharding was; since JAX 0.12 not all. Another sharding recompiles the step.
    return world.split if math.prod(shape) else world.replicated


_IN_PLACE = "is on all replicas"
_ELSEWHERE = "is not yet on the replicas"
_SPREAD = "is spread over devices of several processes"


def _find_place(world: World, tree: PyTree, index: int, leaf: Any) -> str:
    if is_replicated(world, leaf):
        return _IN_PLACE
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return _ELSEWHERE
    if leaf.sharding.device_set == set(world.mesh.devices.flat):
        return _SPREAD
    raise ValueError(
        f"`{tree_paths.leaf_paths(tree)[index]}` lies on devices of several processes "
        f"other than the devices of the replicas ({leaf.sharding}). Pass host arrays, "
        "or arrays on this process' devices."
    )


def _has_sharding(x: Any, sharding: NamedSharding) -> bool:
    return isinstance(x, jax.Array) and (
        x.sharding == sharding
        or (
            isinstance(x.sharding, NamedSharding)
            and x.ndim >= len(sharding.spec)
            and x.sharding.is_equivalent_to(sharding, x.ndim)
        )
    )


def _split_rows(world: World, tree: PyTree, index: int, leaf: Any) -> jax.Array:
    if is_split(world, leaf):
        return leaf
    if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != world.num_replicas:
        raise ValueError(
            f"`{tree_paths.leaf_paths(tree)[index]}` is in a `jdp.PerReplica`, so "
            f"outside of a step its first dimension must be {world.num_replicas}, one "
            f"row per replica, got shape {jnp.shape(leaf)}."
        )
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"`{tree_paths.leaf_paths(tree)[index]}` is in a `jdp.PerReplica` and lies "
            "on devices of several processes in another way than one row on each "
            f"replica, in their order ({leaf.sharding}). Pass host arrays, or arrays "
            "that a step or `jdp.replicate` returned."
        )
    rows = comparison.host_copy(leaf)
    if not isinstance(leaf, jax.Array):
        rows = mesh.own_copy(rows)
    placed = jax.make_array_from_callback(
        rows.shape, sharding_of_rows(world, rows.shape), lambda where: rows[where]
    )
    return _as_keys(placed, like=leaf)


def _gather(world: World, x: jax.Array) -> jax.Array:
    """Gathers an array that is spread over the replicas' devices, on all of them."""
    found = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    mesh_of_x = found if isinstance(found, jax.sharding.Mesh) else world.mesh
    if [*mesh_of_x.devices.flat] == [*world.mesh.devices.flat]:
        return jax.jit(lambda x: x, out_shardings=world.replicated)(x)
    # An XLA program has one order of devices, so `x` is gathered in its own order.
    data = x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
    everywhere = NamedSharding(mesh_of_x, PartitionSpec())
    whole = jax.jit(lambda x: x, out_shardings=everywhere)(data)
    shards = [shard.data.copy() for shard in whole.addressable_shards]
    placed = jax.make_array_from_single_device_arrays(
        whole.shape, world.replicated, shards
    )
    return _as_keys(placed, like=x)


def _copy_out(world: World, leaf: Any) -> jax.Array:
    # If a device has the array already, `device_put` may use it as one of the copies; a
    # step that donates its state would then delete the caller's array.
    if isinstance(leaf, jax.Array):
        return jax.device_put(leaf.copy(), world.replicated)
    value = mesh.own_copy(leaf) if isinstance(leaf, np.ndarray) else leaf
    return jax.device_put(value, world.replicated)


def _place(world: World, value: np.ndarray | jax.Array, *, like: Any) -> jax.Array:
    shards = jax.device_put(
        [value] * world.num_local_replicas, list(world.local_devices)
    )
    placed = jax.make_array_from_single_device_arrays(
        value.shape, world.replicated, shards
    )
    return _as_keys(placed, like=like)


def _as_keys(placed: jax.Array, *, like: Any) -> jax.Array:
    dtype = getattr(like, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(like))
    return placed


def _send(world: World, leaves: list[Any], todo: Sequence[int], process: int) -> None:
    """Replaces the leaves `todo` by the values that `process` has."""
    copies = [comparison.host_copy(leaves[i]) for i in todo]
    sent = _broadcast(world, b"".join(comparison.as_bytes(x) for x in copies), process)
    start = 0
    for i, like in zip(todo, copies, strict=True):
        value = np.frombuffer(sent, like.dtype, like.size, offset=start)
        start += like.nbytes
        leaves[i] = _place(world, value.reshape(like.shape), like=leaves[i])


def _broadcast(world: World, data: bytes, process: int) -> bytes:
    """Sends the `data` of `process` to all: a sum to which the others add zeros."""
    num_words = -(-len(data) // 4)
    words = np.frombuffer(data.ljust(4 * num_words, b"\0"), np.uint32)
    total = jax.jit(
        lambda x: x.sum(axis=0, dtype=jnp.uint32), out_shardings=world.replicated
    )
    received = []
    for start in range(0, num_words, _BROADCAST_WORDS):
        chunk = words[start : start + _BROADCAST_WORDS][None]
        parts = [np.zeros_like(chunk)] * world.num_local_replicas
        if world.process_index == process:
            parts[0] = chunk
        shards = jax.device_put(parts, list(world.local_devices))
        shape = (world.num_replicas, chunk.size)
        x = jax.make_array_from_single_device_arrays(shape, world.split, shards)
        received.append(np.asarray(total(x).addressable_data(0)))
    return b"".join(map(comparison.as_bytes, received))[: len(data)]
