"""Array parts: the arrays of single devices that an array consists of."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax._src import array
from jax._src.random import prng


def parts(x: Any) -> list[Any]:
    """Returns the parts of an array on this process's devices, in their order."""
    if type(x) is array.ArrayImpl:
        return x._arrays  # `addressable_shards` takes 30 times as long.
    return [shard.data for shard in x.addressable_shards]


def assemble(aval: Any, sharding: Any, arrays: Sequence[Any]) -> Any:
    """Makes an array of the parts that this process's devices have, in their order.

    Args:
      aval: type of the array.
      sharding: how it lies over all devices.
      arrays: its parts.
    """
    if type(arrays[0]) is not array.ArrayImpl:
        return jax.make_array_from_single_device_arrays(aval.shape, sharding, arrays)
    # Without the checks, which take four times as long.
    return array.ArrayImpl(aval, sharding, arrays, True, True)


def part_bytes(x: Any) -> int:
    """Returns the size of an array's part on a device of this process, in bytes."""
    part = parts(_data(x))[0]
    return part.size * part.dtype.itemsize


def computed_addresses(x: Any) -> set[int]:
    """Returns the addresses of an array's parts that are computed, without waiting.

    Only parts on the devices of this process count.
    """
    if not x.size:
        return set()
    # JAX waits for others, and lets no thread run Python until then.
    ready = [part for part in parts(_data(x)) if part.is_ready()]
    return {part.unsafe_buffer_pointer() for part in ready}


def may_share_memory(x: Any, others: Iterable[Any]) -> bool:
    """Returns whether a part of `x` shares memory with a part of another array.

    Only parts on the devices of this process count. Never waits, so that a program may
    be started while earlier ones still run. Arrays that share memory are computed at
    the same time; if none of two parts is computed yet, the answer is true.
    """
    if not x.size:
        return False
    awaited = [part for part in parts(_data(x)) if not part.is_ready()]
    computed = computed_addresses(x)
    for other in others:
        if other is x:
            return True
        for part in parts(_data(other)):
            if not part.is_ready():
                if awaited:
                    return True
            elif part.unsafe_buffer_pointer() in computed and other.size:
                return True
            elif awaited and _is_at(awaited, part.unsafe_buffer_pointer()):
                return True
    return False


def _is_at(awaited: Iterable[Any], address: int) -> bool:
    """Returns whether a part has been computed since, and has this address."""
    return any(x.is_ready() and x.unsafe_buffer_pointer() == address for x in awaited)


def _data(x: Any) -> Any:
    """Returns the array of integers that an array of PRNG keys consists of."""
    return x._base_array if type(x) is prng.PRNGKeyArray else x
