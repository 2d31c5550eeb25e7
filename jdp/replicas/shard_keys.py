"""Shard keys: random numbers that belong to a shard, not to a device."""

import jax

from jdp import compat, types
from jdp.replicas import axes
from jdp.types import AxisName


def shard_key(key: jax.Array, *, axis_name: AxisName | None = None) -> jax.Array:
    """Returns a PRNG key of this shard, in a step.

    It is folded from `key` and the number of the shard, or the number of the replica
    where a step has no `num_shards`. With `num_shards`, a run on any number of replicas
    draws the same numbers.

        key = jdp.shard_key(jax.random.fold_in(seed_key, state["step"]))

    Args:
      key: PRNG key, the same on all replicas, shape () or in the old style uint32 (2,).
      axis_name: the axis, or axes, along which the replicas lie; None: of the step.

    Returns:
      A key of the same type, different on each shard.

    Raises:
      ValueError: the axis is not bound: this is called outside of a step.
    """
    names = types.as_axis_names(axes.find(axis_name))
    compat.axis_size(names)  # It raises outside of a step.
    return jax.random.fold_in(key, compat.axis_index(names))
