"""Results: from values on the host to arrays of the kind that was given."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jdp.types import Device


class ResultKind(NamedTuple):
    """Properties of the given array, which may be donated meanwhile, for its result."""

    dtype: np.dtype
    sharding: Sharding | None = None  # None: an array of numpy.
    is_of_all: bool = False  # whether other processes have a copy of it as well.


def kind_of(array: Any) -> ResultKind:
    """Returns the kind of an array of numpy or JAX."""
    if isinstance(array, np.ndarray):
        return ResultKind(array.dtype)
    return ResultKind(array.dtype, array.sharding, not array.is_fully_addressable)


def restore(value: Any, kind: ResultKind) -> Any:
    """Returns a result as an array of some kind.

    On several devices it is split as what was given, or, where its shape does not
    divide among them, whole on each.
    """
    value = cast(value, kind.dtype)
    if kind.sharding is None:
        return value
    # The transfer is asked for, and keeps 64 bits, whatever holds where it is read.
    with jax.transfer_guard_host_to_device("allow"), jax.enable_x64(True):
        if kind.is_of_all:
            # A copy on each device; `device_put` would ask the other processes.
            return jax.make_array_from_callback(
                value.shape, kind.sharding, lambda index: value[index]
            )
        # A third of the time of `device_put`, and no copy of what is aligned.
        if _is_default(kind.sharding):
            return jnp.asarray(value)
        return jax.device_put(value, _fit(kind.sharding, value.shape))


def cast(array: Any, dtype: np.dtype) -> Any:
    """Casts an array; what is out of range becomes infinite, without a warning."""
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def _fit(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    """Returns a sharding of the same devices that takes a shape."""
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
    """Whether it is that of an array for which no place is given."""
    if jax.config.jax_default_device is not None:  # pyright: ignore
        return False
    if jax.sharding.get_abstract_mesh().axis_names:  # of `jax.set_mesh`.
        return False
    return (sharding.device_set, sharding.memory_kind) == _default()


@functools.cache
def _default() -> tuple[set[Device], str | None]:
    """Returns the device, and its kind of memory, that JAX uses by default."""
    device = jax.local_devices()[0]
    return {device}, device.default_memory().kind
