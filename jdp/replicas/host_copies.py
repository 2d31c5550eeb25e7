"""Host copies: which values has this process on its replicas?"""

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdp.replicas import layouts
from jdp.replicas.mesh import Device, World

SAME_VALUES = (
    " Give all processes the same values, for example with `jdp.replicate(world, "
    "tree)`, or look for a value that each computes from its own data, clock or random "
    "numbers."
)


def host_copy(leaf: Any) -> np.ndarray:
    """Returns an array, number, or the data of PRNG keys, in the dtype JAX gives it."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)
    value = np.asarray(leaf)
    dtype = value.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return value.astype(jax.dtypes.canonicalize_dtype(dtype), copy=False)


def as_bytes(x: np.ndarray) -> bytes:
    """Returns the elements of an array in C order."""
    return np.ascontiguousarray(x).tobytes()


def digest(data: bytes) -> bytes:
    """Returns a digest of 16 bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def of_replicas(world: World, leaf: Any, path: str) -> np.ndarray:
    """Returns the values that the replicas of this process have of a leaf.

    If devices of several processes share a replica, every process must call it for
    the same leaves.

    Args:
      world: the replicas.
      leaf: array that every replica has, or a number.
      path: the path of the leaf, for errors.

    Raises:
      RuntimeError: replicas of this process have different bits.
      ValueError: the array is split over the replicas.
    """
    if not isinstance(leaf, jax.Array):
        # A Python number has the dtype that JAX gives it, as in `describe_leaves`.
        return np.asarray(leaf) if hasattr(leaf, "dtype") else host_copy(leaf)
    found = _copies(world, leaf)
    if found is None:
        raise ValueError(
            f"`{path}` is split over the replicas ({leaf.sharding}); only arrays that "
            "every replica holds whole can be compared. Leave it out, or wrap values "
            "that belong to one replica in a `jdp.PerReplica`, which is not compared."
        )
    device, value = next(found)
    for other, copy in found:
        if as_bytes(copy) != as_bytes(value):
            raise RuntimeError(
                f"`{path}` differs between replicas of one process, on devices "
                f"{device} and {other} of process {world.process_index}.{SAME_VALUES}"
            )
    return value


def _copies(
    world: World, leaf: jax.Array
) -> Iterator[tuple[Device, np.ndarray]] | None:
    """Returns the copies of an array on this process, each with its first device."""
    if leaf.is_fully_replicated:
        shards = leaf.addressable_shards
        return ((shard.device, host_copy(shard.data)) for shard in shards)
    spec = layouts.find(world, leaf, is_own=False)
    if spec is None:
        return None
    if world.has_whole_replicas:
        return _join_parts(world, leaf)
    own = NamedSharding(world.mesh, PartitionSpec(*layouts.rows(world)))
    rows = jax.jit(lambda x: x, out_shardings=own)(stack(world, leaf, spec))
    return (
        (shard.device, host_copy(shard.data)[0]) for shard in rows.addressable_shards
    )


def _join_parts(world: World, leaf: jax.Array) -> Iterator[tuple[Device, np.ndarray]]:
    """Yields the array of each replica, put together from the parts of its devices."""
    shards = {shard.device: shard for shard in leaf.addressable_shards}
    for replica in world.local_replicas:
        devices = world.grid[replica]
        whole: np.ndarray | None = None
        for device in devices:
            part = host_copy(shards[device].data)
            if whole is None:  # The data of keys have more dimensions.
                shape = (*leaf.shape, *part.shape[leaf.ndim :])
                whole = np.empty(shape, part.dtype)
            whole[shards[device].index] = part
        assert whole is not None
        yield devices[0], whole


def stack(world: World, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Returns the copies that replicas have as rows of one array; no data moves.

    Args:
      world: the replicas.
      x: an array of a state, or PRNG keys, whose data are stacked.
      spec: its layout.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    rows = PartitionSpec(*layouts.rows(world), *spec)
    shards = [shard.data[None] for shard in x.addressable_shards]
    shape = (world.num_replicas, *x.shape)
    sharding = NamedSharding(world.mesh, rows)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)
