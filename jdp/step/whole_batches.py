"""Whole batches: which part of a batch that every process has is this process' own?"""

from typing import Any

import jax
import numpy as np

from jdp.replicas.mesh import World
from jdp.step import call_arguments
from jdp.trees import tree_paths
from jdp.types import PyTree


def take_part(world: World, batches: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Returns this process' part of batches that every process has whole.

    Args:
      world: the replicas.
      batches: arguments of a call: arrays or `jax.ShapeDtypeStruct`s, shape (n, ...).
        Arrays that are split over the replicas already stay as they are.

    Raises:
      ValueError: n is not a multiple of the number of processes, or, where these
        share replicas, of replicas.
    """
    if world.process_count == 1:
        return batches
    paths = iter(
        path
        for tree in call_arguments.by_name(batches).values()
        for path in tree_paths.leaf_paths(tree)
    )
    return call_arguments.map_batches(lambda x: _cut(world, x, next(paths)), batches)


def _cut(world: World, leaf: Any, path: str) -> Any:
    shape = getattr(leaf, "shape", ())
    is_placed = isinstance(leaf, jax.Array) and leaf.sharding == world.split
    if not shape or is_placed:
        return leaf
    count, what = world.process_count, "processes"
    if not world.is_plain:  # Processes may have parts of one replica.
        count, what = world.num_replicas, "replicas"
    size, rest = divmod(shape[0], count)
    if rest:
        raise ValueError(
            f"The batch's leaf `{path}` has {shape[0]} samples, of all processes "
            f"together (`split_batches=True`), which do not divide among the {count} "
            f"{what}. Drop or pad the rest."
        )
    mine = (world.process_index,) if world.is_plain else world.local_replicas
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((size * len(mine), *shape[1:]), leaf.dtype)
    if len(mine) == 1:
        return leaf[mine[0] * size : (mine[0] + 1) * size]
    return leaf[np.concatenate([np.arange(i * size, (i + 1) * size) for i in mine])]
