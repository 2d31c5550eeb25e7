"""Results: from values on the host to arrays like the given ones."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jdp.types import Device


class ResultKind(NamedTuple):
    """Properties of an input that its result has too; the input may be donated."""

    dtype: np.dtype
    sharding: Sharding | None = None  # None: a numpy array.
    is_of_all: bool = False  # whether other processes have a copy of it too.


def kind_of(array: Any) -> ResultKind:
    """Returns the properties of a numpy or JAX array that its result has too."""
    if isinstance(array, np.ndarray):
        return ResultKind(array.dtype)
    return ResultKind(array.dtype, array.sharding, not array.is_fully_addressable)


def restore(value: Any, kind: ResultKind) -> Any:
    """Returns a result as an array of the given kind.

    On several devices it has the sharding of the input or, if its shape does not divide
    evenly, is replicated.
    """
    value = cast(value, kind.dtype)
    if kind.sharding is None:
        return value
    # The caller asked for the transfer, and 64 bits are kept, whatever its settings.
    with jax.transfer_guard_host_to_device("allow"), jax.enable_x64(True):
        if kind.is_of_all:
            # One copy per device; `device_put` would communicate with other processes.
            return jax.make_array_from_callback(
                value.shape, kind.sharding, lambda index: value[index]
            )
        # Takes a third of the time of `device_put`; does not copy aligned arrays.
        if _is_default(kind.sharding):
            return jnp.asarray(value)
        return jax.device_put(value, _fit(kind.sharding, value.shape))


def cast(array: Any, dtype: np.dtype) -> Any:
    """Casts an array; values out of range become infinite, without a warning."""
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def _fit(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    """Returns a sharding of the same devices that can hold a shape."""
    try:
        sharding.shard_shape(shape)
        return sharding
    except ValueError:
        if isinstance(sharding, NamedSharding):
            mesh = sharding.mesh
        else:
            devices = sorted(sharding.device_set, key=lambda device: device.id)
            mesh = Mesh(np.array(devices), ("device",))
        return NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


def _is_default(sharding: Sharding) -> bool:
    """Whether JAX would choose this sharding for an array by default."""
    if jax.config.jax_default_device is not None:  # pyright: ignore
        return False
    if jax.sharding.get_abstract_mesh().axis_names:  # set by `jax.set_mesh`.
        return False
    return (sharding.device_set, sharding.memory_kind) == _default()


@functools.cache
def _default() -> tuple[set[Device], str | None]:
    """Returns the device that JAX uses by default, and its kind of memory."""
    device = jax.local_devices()[0]
    return {device}, device.default_memory().kind
