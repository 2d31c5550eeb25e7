"""Layouts: how do the arrays of a state lie over the axes beside the replicas?

Every replica has the whole of a state, except its `jdp.PerReplica` parts. Beside model
axes a replica consists of several devices, among which an array may be cut. A layout is
the `PartitionSpec` of an array outside of a step. Without model axes there are two:
whole on every replica, and rows of replicas.
"""

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdp.replicas import per_replica
from jdp.replicas.mesh import World
from jdp.types import PyTree

WHOLE = PartitionSpec()
Entry = str | tuple[str, ...] | None  # of a `PartitionSpec`, per dimension.


def find(world: World, x: Any, *, is_own: bool) -> PartitionSpec | None:
    """Returns the layout of an array that is in its place.

    Args:
      world: the replicas.
      x: any leaf of a state.
      is_own: whether it is in a `jdp.PerReplica`, with rows of replicas.

    Returns:
      The layout, tidy; None if the leaf is not in its place.
    """
    if not isinstance(x, jax.Array):
        return None
    if is_own:
        return _find_rows(world, x)
    if _is_like(x, world.replicated):
        return WHOLE
    spec = partition_of(world, x)
    if spec is None or axes_of(spec).intersection(world.axis_names):
        return None
    return spec


def _find_rows(world: World, x: jax.Array) -> PartitionSpec | None:
    # JAX programs return most arrays without elements as replicated, whatever their
    # sharding was; since JAX 0.12 not all.
    places = world.split, sharding_of_rows(world, x.shape)
    if any(_is_like(x, place) for place in places):
        return rows(world) if x.shape[0] == world.num_rows else None
    spec = partition_of(world, x)
    if not spec:
        return None
    own = [n for n in names_in(spec[0]) if n in world.model_axes]
    along = PartitionSpec(rows(world, own)[0], *spec[1:])
    is_elsewhere = axes_of(PartitionSpec(*spec[1:])).intersection(world.axis_names)
    if is_elsewhere or x.shape[0] != num_rows(world, along):
        return None
    return along if _is_like(x, NamedSharding(world.mesh, along)) else None


def sharding_of_rows(
    world: World, shape: Sequence[int], model_axes: Collection[str] = ()
) -> NamedSharding:
    """Returns the sharding of an array of this shape that has rows of replicas."""
    if not math.prod(shape):  # Another sharding recompiles the step.
        return world.replicated
    return NamedSharding(world.mesh, rows(world, model_axes))


def partition_of(world: World, x: Any) -> PartitionSpec | None:
    """Returns the partition of an array over the mesh of the world, if it has one."""
    is_array = isinstance(x, jax.Array | jax.ShapeDtypeStruct)
    sharding = x.sharding if is_array else None
    if not (isinstance(sharding, NamedSharding) and _lies_on(world, sharding.mesh)):
        return None
    wide = [name for name, size in world.mesh.shape.items() if size > 1]
    return keep(sharding.spec, wide)


def keep(spec: PartitionSpec, names: Collection[str]) -> PartitionSpec:
    """Returns a partition along these axes alone, tidy.

    It has neither tuples of one name nor None at its end.
    """
    entries: list[Entry] = []
    for entry in spec:
        kept = tuple(name for name in names_in(entry) if name in names)
        entries.append(kept[0] if len(kept) == 1 else kept or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def rows(world: World, model_axes: Collection[str] = ()) -> PartitionSpec:
    """Returns the layout of rows of replicas.

    Args:
      world: the replicas.
      model_axes: axes along which the devices of a replica have rows of their own.
    """
    own = [name for name in world.model_axes if name in model_axes]
    names = (*world.axis_names, *own)
    return PartitionSpec(names[0] if len(names) == 1 else names)


def num_rows(world: World, spec: PartitionSpec) -> int:
    """Returns the length of dimension 0 of rows of replicas, given their layout."""
    return math.prod(world.mesh.shape[name] for name in names_in(spec[0]))


def names_in(entry: Entry) -> tuple[str, ...]:
    """Returns the names in an entry of a partition."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of(spec: PartitionSpec) -> frozenset[str]:
    """Returns the names in a partition."""
    return frozenset(name for entry in spec for name in names_in(entry))


def over_devices(world: World, spec: PartitionSpec) -> NamedSharding:
    """Returns the sharding of arrays with a layout."""
    return NamedSharding(world.mesh, spec) if spec else world.replicated


def aim(world: World, x: Any, *, is_own: bool) -> PartitionSpec:
    """Returns the layout that a leaf of a state has once it is placed.

    Args:
      world: the replicas.
      x: an array, a `jax.ShapeDtypeStruct` or a number.
      is_own: whether it is in a `jdp.PerReplica`, with rows of replicas.
    """
    if not is_own:
        return target_of(world, x)
    num_rows_of_x = x.shape[0] if np.ndim(x) else 0
    own = axes_with_rows(world, num_rows_of_x) or ()
    return find(world, x, is_own=True) or rows(world, own)


def target_of(world: World, x: Any) -> PartitionSpec:
    """Returns the layout that a leaf gets if all replicas are to have it.

    Along the model axes an array stays cut as it is.
    """
    spec = partition_of(world, x)
    return WHOLE if spec is None else keep(spec, world.model_axes)


def check_specs(
    world: World, tree: PyTree, specs: PyTree, name: str
) -> list[PartitionSpec | None]:
    """Returns the layout that `specs` gives each leaf of a tree; None: no layout.

    Args:
      world: the replicas.
      tree: arrays and numbers.
      specs: see `jdp.replicate`.
      name: the name of the tree, for errors.

    Raises:
      TypeError: one of `specs` is not a partition.
      ValueError: `specs` is not like the tree, or a partition does not fit its leaf.
    """
    found: list[Any] = []

    def add(spec: Any, part: PyTree) -> None:
        found.extend([spec] * len(jax.tree.leaves(part)))

    def is_spec(node: Any) -> bool:
        return node is None or isinstance(node, PartitionSpec)

    try:
        jax.tree.map(add, specs, tree, is_leaf=is_spec)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"`specs` is neither a tree like `{name}` nor a prefix of it, of "
            f"`PartitionSpec`s and None: {error}"
        ) from None
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    are_own = per_replica.are_own(tree)
    checked: list[PartitionSpec | None] = []
    for (path, leaf), is_own, spec in zip(leaves, are_own, found, strict=True):
        where = f"`{name}{jax.tree_util.keystr(path)}`"
        if spec is not None:
            _check_spec(world, where, leaf, is_own, spec)
        checked.append(None if spec is None else keep(spec, world.model_axes))
    return checked


def _check_spec(world: World, where: str, leaf: Any, is_own: bool, spec: Any) -> None:
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"`specs` must consist of `jax.sharding.PartitionSpec`s and None, got "
            f"{spec!r} for {where}."
        )
    stray = sorted(axes_of(spec).difference(world.model_axes))
    if stray:
        raise ValueError(
            f"`specs` cuts {where} along {stray[0]!r}, which is not a model axis: "
            f"{' and '.join(map(repr, world.model_axes)) or 'there is none'}. Every "
            "replica has the whole of a state; make the mesh of a model axis with "
            "`jdp.init(mesh=...)`."
        )
    if spec and is_own:
        raise ValueError(
            f"`specs` cuts {where}, which is in a `jdp.PerReplica`: its rows are split "
            "over the replicas. Give it None."
        )
    shape = np.shape(leaf)
    sizes = [math.prod(world.mesh.shape[n] for n in names_in(e)) for e in spec]
    if len(spec) > len(shape) or any(n % k for n, k in zip(shape, sizes, strict=False)):
        raise ValueError(
            f"`specs` cuts {where}, shape {shape}, as {spec}, along axes of sizes "
            f"{[world.mesh.shape[n] for n in sorted(axes_of(spec))]}: each dimension "
            "must divide among the devices."
        )


def axes_with_rows(world: World, num_rows: int) -> tuple[str, ...] | None:
    """Returns the model axes along which an array with so many rows has its own rows.

    Returns:
      The fewest such axes; None if no choice of axes gives that number.
    """
    axes = world.model_axes
    for count in range(len(axes) + 1):
        for own in itertools.combinations(axes, count):
            sizes = (world.mesh.shape[name] for name in own)
            if num_rows == world.num_rows * math.prod(sizes):
                return own
    return None


def _lies_on(world: World, mesh: Any) -> bool:
    """Returns whether a mesh has the axes and the devices of the world's mesh."""
    if mesh is world.mesh or mesh == world.mesh:
        return True
    return (  # Types of axes may differ.
        isinstance(mesh, jax.sharding.Mesh)
        and mesh.axis_names == world.mesh.axis_names
        and np.array_equal(mesh.devices, world.mesh.devices)
    )


def _is_like(x: jax.Array, sharding: NamedSharding) -> bool:
    return x.sharding == sharding or (
        isinstance(x.sharding, NamedSharding)
        and x.ndim >= len(sharding.spec)
        and x.sharding.is_equivalent_to(sharding, x.ndim)
    )
