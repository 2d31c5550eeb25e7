"""Shared memory: an all-reduce among CPU processes of one host, inside `jit`."""

from jdp import types
from jdp.collectives.host import members
from jdp.collectives.host.default_media import DefaultMedia
from jdp.collectives.host.host_all_reduce import HostAllReduce
from jdp.collectives.shared_memory import cutting
from jdp.collectives.shared_memory.shared_buffer import (
    DEFAULT_NUM_BYTES,
    LEAST_NUM_BYTES,
    SharedBuffer,
)
from jdp.replicas.mesh import World
from jdp.types import AxisName

# Gradients are reduced while they are in the cache, and used from there: a step of
# 101 MB takes 112 ms, and 125 ms with buckets of 25 MiB (docs/performance.md).
_BUCKET_BYTES = 4 << 20
_TITLE = "shared-memory all-reduce"


def create_shared_buffer(
    world: World,
    num_bytes: int = DEFAULT_NUM_BYTES,
    *,
    axis_name: AxisName | None = None,
) -> SharedBuffer:
    """Makes the memory through which the processes of one host reduce.

    Every process calls it, in the same order relative to other collective calls. Each
    process frees it with its last reference; nothing stays in /dev/shm.

    Args:
      world: the processes, with as many CPU replicas each.
      num_bytes: size of the largest piece that is reduced at once, in bytes. The
        memory takes this size twice per process, and twice more.
      axis_name: axes to reduce over: all, or the inner axis of a pair; None: all.

    Returns:
      The shared buffer, for `SharedMemoryAllReduce`.

    Raises:
      RuntimeError: see `SharedSegment`.
      ValueError: processes have different numbers of replicas, or several and
        `axis_name` is not all axes, or `num_bytes` is below 1.
    """
    if num_bytes < 1:
        raise ValueError(f"`num_bytes` must be at least 1, got {num_bytes}.")
    axis_name = world.axis_name if axis_name is None else axis_name
    processes = members.find_processes(world, axis_name, _TITLE)
    number = 0 if world.store is None else world.store.next_round()
    return SharedBuffer(
        world,
        processes,
        cutting.round_up(num_bytes),
        key=f"jdp/shared_memory/{number}/{processes[0]}",
        axis_name=axis_name,
    )


def _make_default(world: World, axis_name: AxisName) -> SharedBuffer:
    processes = members.find_processes(world, axis_name, _TITLE)
    number_of_axes = len(types.as_axis_names(axis_name))
    return SharedBuffer(
        world,
        processes,
        DEFAULT_NUM_BYTES,
        key=f"jdp/shared_memory/default/{number_of_axes}/{processes[0]}",
        axis_name=axis_name,
        least_bytes=LEAST_NUM_BYTES,
    )


class SharedMemoryAllReduce(HostAllReduce):
    """Reduces over CPU processes of one host through memory that they share.

    Without a `buffer`, it reduces through a default buffer, with pieces of 1 MiB, made
    when a program with it first runs.
    """

    name = "shared_memory_all_reduce"
    title = _TITLE
    bucket_bytes = _BUCKET_BYTES

    def __init__(self, buffer: SharedBuffer | None = None):
        super().__init__(buffer)

    def _open_default(self, world: World, axis_name: AxisName) -> SharedBuffer:
        return default_buffer(world, axis_name)


shared_memory_all_reduce = SharedMemoryAllReduce()
SHARED_MEMORY = shared_memory_all_reduce.halves


_defaults = DefaultMedia(_make_default)


def default_buffer(world: World, axis_name: AxisName) -> SharedBuffer:
    """Returns the default buffer over these axes; the first call makes it.

    Raises:
      RuntimeError: see `SharedSegment`.
    """
    return _defaults.find(world, axis_name)
