"""Virtual replicas: the shards of a batch, each traced as if it had its own replica."""

import dataclasses
from typing import Any

import jax

from jdp import types
from jdp.replicas.mesh import World


def with_shards(world: World, num_shards: Any) -> World:
    """Returns the same replicas, which compute a step shard by shard.

    Args:
      world: the replicas.
      num_shards: number of shards of a batch.

    Raises:
      TypeError: `num_shards` is not an integer.
      ValueError: it is not a multiple of the number of replicas, or the world has
        several axes.
    """
    count = types.as_count(num_shards, "num_shards", least=1)
    if not world.is_plain or len(world.axis_names) > 1:
        raise ValueError(
            f"`num_shards` needs a mesh of one axis, got the axes "
            f"{', '.join(map(repr, world.mesh.axis_names))}: shards are computed by "
            "programs of one device."
        )
    if count % world.num_replicas:
        raise ValueError(
            f"`num_shards` must be a multiple of the {world.num_replicas} replicas, "
            f"got {count}: each replica computes as many shards."
        )
    return dataclasses.replace(world, num_shards=count)


def world_of_shards(world: World) -> World:
    """Returns a world without devices, with one replica and process per shard.

    The program that is traced in it is the same for any number of replicas.
    """
    assert world.num_shards is not None
    mesh: Any = jax.sharding.AbstractMesh(
        (world.num_shards,),
        world.axis_names,
        axis_types=(jax.sharding.AxisType.Auto,),
    )
    return dataclasses.replace(world, mesh=mesh, process_count=world.num_shards)
