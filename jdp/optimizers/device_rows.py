"""Device rows: rows of replicas where each device of a replica has its own.

Beside manual model axes, a state of `zero1` holds shards of the part of an array that a
device has. The rows of a replica's devices follow each other, in the order of the axes.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdp.replicas import layouts, mesh
from jdp.replicas.mesh import World

ArrayT = TypeVar("ArrayT", jax.Array, np.ndarray)


class Cut(NamedTuple):
    """How an array is cut into the parts of the devices of a replica."""

    names: tuple[str, ...]  # of the model axes along which the parts differ.
    sizes: tuple[int, ...]
    dimensions: tuple[int, ...]  # of the array, which each of the axes cuts.


def model_axes_of(x: Any) -> tuple[str, ...]:
    """Returns the model axes along which the devices of a replica have own rows."""
    world = mesh.find_current_world()
    if world is None or not world.manual_axes:
        return ()
    spec = layouts.find(world, x, is_own=True)
    names = layouts.names_in(spec[0]) if spec else ()
    return tuple(name for name in names if name in world.model_axes)


def are_possible() -> bool:
    """Returns whether the devices of a replica may have rows of their own."""
    world = mesh.find_current_world()
    return world is not None and bool(world.manual_axes)


def count_devices(x: Any) -> int:
    """Returns the number of rows that a replica has in an array on the replicas."""
    world = mesh.find_current_world()
    names = model_axes_of(x)
    return math.prod(world.mesh.shape[n] for n in names) if world and names else 1


def by_device(rows: ArrayT, count: int) -> ArrayT:
    """Returns rows, shape (n * count, ...), by device of a replica: (count, n, ...)."""
    shape = (len(rows) // count, count, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(0, 1)


def by_replica(rows: ArrayT) -> ArrayT:
    """Inverts `by_device`."""
    count, num_replicas, *rest = rows.shape
    return rows.swapaxes(0, 1).reshape(num_replicas * count, *rest)


def find_cut(
    rows: Any, part: Sequence[int], whole: Sequence[int], like: Any
) -> Cut | None:
    """Finds how an array was cut.

    Args:
      rows: the shards of the parts, on the current world or on the host.
      part: shape of the part of one device.
      whole: shape of the array.
      like: the whole array, whose sharding tells; or anything else of its shape.

    Returns:
      The cut; None if the shapes do not tell, or fit no cut.
    """
    world = mesh.find_current_world()
    if tuple(part) == tuple(whole):
        return Cut((), (), ())
    if world is None or len(part) != len(whole):
        return None
    told = _told_by(world, like)
    candidates = [model_axes_of(rows)] if model_axes_of(rows) else _choices(world)
    fitting = []
    for names in candidates:
        sizes = tuple(world.mesh.shape[name] for name in names)
        for places in itertools.product(range(len(whole)), repeat=len(names)):
            is_told = not told or told == dict(zip(names, places, strict=True))
            if is_told and _part_of(whole, sizes, places) == tuple(part):
                fitting.append(Cut(names, sizes, places))
    return fitting[0] if len(fitting) == 1 else None


def _choices(world: World) -> list[tuple[str, ...]]:
    axes = world.manual_axes
    counts = range(1, len(axes) + 1)
    return [names for k in counts for names in itertools.combinations(axes, k)]


def _part_of(
    whole: Sequence[int], sizes: Sequence[int], places: Sequence[int]
) -> tuple[int, ...]:
    part = list(whole)
    for size, place in zip(sizes, places, strict=True):
        part[place] = part[place] // size if part[place] % size == 0 else -1
    return tuple(part)


def _told_by(world: World, like: Any) -> dict[str, int]:
    """Returns per manual axis the dimension that it cuts; empty if nothing tells."""
    spec = layouts.partition_of(world, like)
    return {
        name: dimension
        for dimension, entry in enumerate(spec or ())
        for name in layouts.names_in(entry)
        if name in world.manual_axes
    }


def join(rows: ArrayT, part: Sequence[int], whole: Sequence[int], cut: Cut) -> ArrayT:
    """Puts the shards of all devices together.

    Args:
      rows: shape (num_replicas * devices per replica, k).
      part: shape of the part of one device.
      whole: shape of the result.
      cut: how the array was cut.
    """
    of_devices = by_device(rows, math.prod(cut.sizes))
    size = math.prod(part)
    flat = of_devices.reshape(len(of_devices), -1)[:, :size]
    split = flat.reshape(*cut.sizes, *part)
    return split.transpose(_order(cut, len(part))).reshape(tuple(whole))


def cut_up(
    whole: np.ndarray, part: Sequence[int], cut: Cut, num_replicas: int
) -> np.ndarray:
    """Inverts `join`: returns rows, padded with zeros."""
    order = _order(cut, len(part))
    shape = [(*cut.sizes, *part)[i] for i in order]
    split = whole.reshape(shape).transpose(np.argsort(order))
    flat = split.reshape(math.prod(cut.sizes), -1)
    width = -(-flat.shape[1] // num_replicas)
    padded = np.zeros((len(flat), num_replicas * width), whole.dtype)
    padded[:, : flat.shape[1]] = flat
    return by_replica(padded.reshape(len(flat), num_replicas, width))


def _order(cut: Cut, num_dimensions: int) -> list[int]:
    """Returns the order in which each dimension follows the axes that cut it."""
    order = []
    for d in range(num_dimensions):
        order += [i for i, place in enumerate(cut.dimensions) if place == d]
        order.append(len(cut.sizes) + d)
    return order


def sharding_of_whole(rows: jax.Array, cut: Cut, like: Any) -> NamedSharding:
    """Returns the sharding of an array that is put together of rows of devices.

    Along the model axes it is cut like `like`, or else as the parts were.
    """
    assert isinstance(rows.sharding, NamedSharding)
    world = mesh.find_current_world()
    spec = None if world is None else layouts.partition_of(world, like)
    if world is not None and spec:
        return layouts.over_devices(world, layouts.keep(spec, world.model_axes))
    entries: list[tuple[str, ...]] = [()] * (max(cut.dimensions, default=-1) + 1)
    for name, dimension in zip(cut.names, cut.dimensions, strict=True):
        entries[dimension] = (*entries[dimension], name)
    return NamedSharding(rows.sharding.mesh, PartitionSpec(*entries))
