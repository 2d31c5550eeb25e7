"""Buffer sync: state that is not trained, such as statistics, made the same again.

Each replica updates it from its own samples, so it differs between them after a step.
"""

from typing import Literal, TypeVar, get_args, overload

import jax
import jax.numpy as jnp
from jax import lax

from jdp import compat, types
from jdp.collectives import base
from jdp.gradients import averaging, step_trace
from jdp.replicas import axes
from jdp.replicas.per_replica import PerReplica
from jdp.types import AxisName, PyTree

BufferPolicy = Literal["broadcast", "mean", "local"]
T = TypeVar("T")


@overload
def sync_buffers(
    buffers: T,
    *,
    policy: Literal["broadcast", "mean"] = ...,
    source: int = ...,
    axis_name: AxisName = ...,
) -> T: ...
@overload
def sync_buffers(
    buffers: T,
    *,
    policy: Literal["local"],
    source: int = ...,
    axis_name: AxisName = ...,
) -> PerReplica[T]: ...
def sync_buffers(
    buffers: PyTree,
    *,
    policy: BufferPolicy = "broadcast",
    source: int = 0,
    axis_name: AxisName | None = None,
) -> PyTree:
    """Prepares state that each replica updated from its own samples for the next step.

    Called inside a traced function by every replica, once per step.

    Args:
      buffers: pytree of arrays of this replica, of any dtypes.
      policy: "broadcast": all get the buffers of one replica, as torch's
        DistributedDataParallel does with `broadcast_buffers`. "mean": floats are
        averaged, in a `jdp.Join` over the replicas with data; the others are broadcast.
        "local": each replica keeps its own.
      source: the replica whose buffers are broadcast. In a `jdp.Join`, if that has no
        data, the next replica that has.
      axis_name: the axis, or axes, over which replicas lie; None: the world's.

    Returns:
      The same tree, the same on all replicas; for "local" a `jdp.PerReplica` of it, as
      `jdp.copy_per_replica` makes it for the first step.

    Raises:
      TypeError: `source` is not an integer.
      ValueError: an unknown policy, or there is no such replica.
    """
    if policy not in get_args(BufferPolicy):
        raise ValueError(
            f"`policy` must be 'broadcast', 'mean' or 'local', got {policy!r}."
        )
    axis_name = axes.find(axis_name)
    if policy == "local":
        return PerReplica(compat.cast_tree_varying(buffers, axis_name))
    rank = _find_source(source, axis_name)
    leaves, treedef = jax.tree.flatten(buffers)
    leaves = [jnp.asarray(x) for x in leaves]
    averaged = {
        i
        for i, x in enumerate(leaves)
        if policy == "mean" and jnp.issubdtype(x.dtype, jnp.inexact)
    }
    copied = [i for i in range(len(leaves)) if i not in averaged]
    means = averaging.average({i: leaves[i] for i in averaged}, axis_name=axis_name)
    found = _copy_from([leaves[i] for i in copied], rank, axis_name)
    synced = means | dict(zip(copied, found, strict=True))
    return jax.tree.unflatten(treedef, [synced[i] for i in range(len(leaves))])


def broadcast_from(tree: T, source: int, *, axis_name: AxisName | None = None) -> T:
    """Copies the values of one replica to all, bit for bit, in one collective.

    Called inside a traced function by every replica.

    Args:
      tree: pytree of arrays of this replica, of any dtypes, PRNG keys too.
      source: rank of the replica to copy from.
      axis_name: the axis, or axes, over which replicas lie; None: the world's.

    Returns:
      The same tree, with the values of `source`, the same on all replicas.

    Raises:
      TypeError: `source` is not an integer.
      ValueError: there is no such replica.
    """
    axis_name = axes.find(axis_name)
    _check_source(source, axis_name)
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(x) for x in leaves]
    return jax.tree.unflatten(treedef, _copy_from(leaves, source, axis_name))


def _check_source(source: int, axis_name: AxisName) -> int:
    size = compat.axis_size(axis_name)
    if not 0 <= types.as_integer(source, "source") < size:
        raise ValueError(
            f"`source` must be one of the {size} replicas, from 0 to {size - 1}, got "
            f"{source}."
        )
    return size


def _find_source(source: int, axis_name: AxisName) -> jax.Array | int:
    """Returns the first replica from `source` on with data, if weights are known."""
    size = _check_source(source, axis_name)
    weighting = step_trace.current().resolve(None, "weight")
    if weighting is None:
        return source
    distance = (base.find_group(axis_name).rank - source) % size
    own = jnp.where(weighting.amount > 0, distance, size)
    nearest = lax.pmin(base.cast_varying(own, axis_name), axis_name)
    return (source + jnp.where(nearest == size, 0, nearest)) % size


def _copy_from(
    leaves: list[jax.Array], source: jax.Array | int, axis_name: AxisName
) -> list[jax.Array]:
    """Sums bits to which all replicas but `source` contribute zeros."""
    if not leaves:
        return []
    packed = [as_bytes(x) for x in leaves]
    # XLA sums words on all platforms, but not bytes.
    flat = base.pad(jnp.concatenate(packed), 4)
    words = lax.bitcast_convert_type(flat.reshape(-1, 4), jnp.uint32)
    is_source = base.find_group(axis_name).rank == source
    words = jnp.where(is_source, words, jnp.zeros_like(words))
    total = lax.psum(base.cast_varying(words, axis_name), axis_name)
    flat = lax.bitcast_convert_type(total, jnp.uint8).reshape(-1)
    found, start = [], 0
    for x, part in zip(leaves, packed, strict=True):
        found.append(from_bytes(flat[start : start + part.size], x))
        start += part.size
    return found


def as_bytes(x: jax.Array) -> jax.Array:
    """Returns the bits of an array of any dtype, uint8 (bytes,)."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


def from_bytes(flat: jax.Array, like: jax.Array) -> jax.Array:
    """Returns the array that `as_bytes` was given, in the shape and dtype of `like`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        data = from_bytes(flat, jax.random.key_data(like))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        parts = from_bytes(flat, jnp.stack([like.real, like.imag]))
        return lax.complex(parts[0], parts[1])
    if like.dtype == jnp.bool_:
        return flat.reshape(like.shape).astype(jnp.bool_)
    size = like.dtype.itemsize
    shape = (*like.shape, size) if size > 1 else like.shape
    return lax.bitcast_convert_type(flat.reshape(shape), like.dtype)
