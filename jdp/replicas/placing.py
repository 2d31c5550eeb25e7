"""Placing: how do arrays get onto the devices of all replicas?"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jdp import compat
from jdp.replicas import host_arrays, host_copies, layouts
from jdp.replicas.mesh import World

_BROADCAST_WORDS = 1 << 24  # 64 MiB of 32-bit words at a time.


def gather(world: World, x: jax.Array, target: PartitionSpec) -> jax.Array:
    """Gathers an array that is spread over the replicas' devices, on all of them.

    Every process calls it.

    Args:
      world: the replicas.
      x: an array on the devices of the world.
      target: the layout of the result.
    """
    found = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    mesh_of_x = found if isinstance(found, jax.sharding.Mesh) else world.mesh
    if [*mesh_of_x.devices.flat] == [*world.mesh.devices.flat]:
        sharding = layouts.over_devices(world, target)
        return jax.jit(lambda x: x, out_shardings=sharding)(x)
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
    placed = typed_like(placed, like=x)
    return gather(world, placed, target) if target else placed


def copy_out(world: World, leaf: Any, target: PartitionSpec) -> jax.Array:
    """Copies a leaf onto all devices of the only process, in a layout."""
    # If a device has the array already, `device_put` may use it as one of the copies; a
    # step that donates its state would then delete the caller's array.
    sharding = layouts.over_devices(world, target)
    if isinstance(leaf, jax.Array):
        return jax.device_put(leaf.copy(), sharding)
    value = host_arrays.own_copy(leaf) if isinstance(leaf, np.ndarray) else leaf
    return jax.device_put(value, sharding)


def place(
    world: World,
    value: np.ndarray | jax.Array,
    *,
    like: Any,
    target: PartitionSpec = layouts.WHOLE,
) -> jax.Array:
    """Puts a value that all processes have onto their devices, in a layout.

    Args:
      world: the replicas.
      value: array on the host or on a device of this process; the data of PRNG keys.
      like: the leaf that is placed; PRNG keys give keys.
      target: the layout of the result.
    """
    if target:
        placed = jax.make_array_from_callback(
            value.shape, layouts.over_devices(world, target), lambda i: value[i]
        )
        return as_keys(placed, like=like)
    devices = list(world.local_devices)
    shards = jax.device_put([value] * len(devices), devices)
    placed = jax.make_array_from_single_device_arrays(
        value.shape, world.replicated, shards
    )
    return as_keys(placed, like=like)


def as_keys(placed: jax.Array, *, like: Any) -> jax.Array:
    """Returns an array, or PRNG keys of its data if `like` are keys."""
    dtype = getattr(like, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(like))
    return placed


def typed_like(placed: jax.Array, *, like: jax.Array) -> jax.Array:
    """Returns an array, as keys or weakly typed if `like` is."""
    placed = as_keys(placed, like=like)
    return compat.as_weak(placed) if compat.is_weak(like) else placed


def send(
    world: World,
    leaves: list[Any],
    todo: Sequence[int],
    targets: Sequence[PartitionSpec],
    process: int,
) -> None:
    """Replaces the leaves `todo` by the values that `process` has.

    They are weakly typed where they are in `process`. A product of a Python number and
    bfloat16 is bfloat16, and of a float32 array and bfloat16 float32.
    """
    copies = [host_copies.host_copy(leaves[i]) for i in todo]
    weak = bytes(compat.is_weak(leaves[i]) for i in todo)
    data = b"".join([*map(host_copies.as_bytes, copies), weak])
    sent = _broadcast(world, data, process)
    weak = sent[len(data) - len(weak) :]
    start = 0
    for i, like, is_weak in zip(todo, copies, weak, strict=True):
        value = np.frombuffer(sent, like.dtype, like.size, offset=start)
        start += like.nbytes
        value = value.reshape(like.shape)
        placed = place(world, value, like=leaves[i], target=targets[i])
        leaves[i] = compat.as_weak(placed) if is_weak else placed


def _broadcast(world: World, data: bytes, process: int) -> bytes:
    """Sends the `data` of `process` to all: a sum to which the others add zeros."""
    num_words = -(-len(data) // 4)
    words = np.frombuffer(data.ljust(4 * num_words, b"\0"), np.uint32)
    total = jax.jit(
        lambda x: x.sum(axis=0, dtype=jnp.uint32), out_shardings=world.replicated
    )
    devices = list(world.local_devices)
    every = layouts.over_devices(world, layouts.rows(world, world.model_axes))
    received = []
    for start in range(0, num_words, _BROADCAST_WORDS):
        chunk = words[start : start + _BROADCAST_WORDS][None]
        parts = [np.zeros_like(chunk)] * len(devices)
        if world.process_index == process:
            parts[0] = chunk
        shards = jax.device_put(parts, devices)
        shape = (world.grid.size, chunk.size)
        x = jax.make_array_from_single_device_arrays(shape, every, shards)
        received.append(np.asarray(total(x).addressable_data(0)))
    return b"".join(map(host_copies.as_bytes, received))[: len(data)]


def copy_over_replicas(
    world: World,
    arrays: Sequence[jax.Array],
    targets: Sequence[PartitionSpec],
    index: int,
) -> list[jax.Array]:
    """Gives all replicas the bits that one of them has.

    Every process calls it.

    Args:
      world: the replicas.
      arrays: arrays of a state that may differ between the replicas, against their
        shardings.
      targets: their layouts.
      index: the replica.
    """
    if not arrays:
        return []
    stacked = [
        host_copies.stack(world, x, t) for x, t in zip(arrays, targets, strict=True)
    ]
    places = [layouts.over_devices(world, spec) for spec in targets]
    pick = jax.jit(
        lambda xs: [_from_bits(_to_bits(x)[index], x.dtype) for x in xs],
        out_shardings=places,
    )
    pairs = zip(pick(stacked), arrays, strict=True)
    return [typed_like(x, like=like) for x, like in pairs]


def _to_bits(x: jax.Array) -> jax.Array:
    """Returns integers, which a sum with zeros leaves as they are."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    if dtype == jnp.bool_:
        return bits.astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real = lax.bitcast_convert_type(bits, jnp.finfo(dtype).dtype)
        return lax.complex(real[..., 0], real[..., 1])
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)
