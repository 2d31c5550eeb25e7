"""State layouts: how does a state lie over the model axes, before and after a step?

A leaf lies as the user has put it, and the step returns it the same way. Without model
axes there is nothing to say: a leaf is whole on every replica, or has a row for each.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jdp.replicas import layouts, per_replica
from jdp.replicas.mesh import World
from jdp.replicas.per_replica import Outline
from jdp.types import PyTree

Layouts = tuple[PartitionSpec, ...] | None  # per leaf; None without model axes.


def of_state(world: World, state: PyTree) -> Layouts:
    """Returns how the leaves of a state lie, or will lie once they are placed.

    Args:
      world: the replicas.
      state: arrays, `jax.ShapeDtypeStruct`s or numbers.
    """
    if not world.model_axes:
        return None
    pairs = zip(jax.tree.leaves(state), per_replica.are_own(state), strict=True)
    return tuple(layouts.aim(world, x, is_own=is_own) for x, is_own in pairs)


def after(world: World, before: Outline, old: Layouts, new: Outline) -> Layouts:
    """Returns how the leaves of the new state lie.

    A leaf that keeps path and shape keeps its layout. Any other becomes whole on each
    device, or rows of replicas.

    Args:
      world: the replicas.
      before: the state, in its form on one replica.
      old: its layouts.
      new: the new state, likewise.
    """
    if old is None:
        return None
    known = dict(zip(_keys(before), old, strict=True))
    kinds = layouts.WHOLE, layouts.rows(world)
    pairs = zip(_keys(new), new.are_own, strict=True)
    return tuple(known.get(key, kinds[is_own]) for key, is_own in pairs)


def pin(world: World, leaves: Sequence[jax.Array], found: Layouts) -> list[jax.Array]:
    """Keeps JAX from choosing another layout for the leaves of a new state."""
    if found is None or set(world.model_axes) <= set(world.manual_axes):
        return list(leaves)
    return [
        lax.with_sharding_constraint(x, layouts.over_devices(world, spec))
        for x, spec in zip(leaves, found, strict=True)
    ]


def _keys(state: Outline) -> list[tuple[str, bool, tuple[int, ...]]]:
    shapes = [np.shape(x) for x in state.leaves]
    return list(zip(state.paths, state.are_own, shapes, strict=True))
