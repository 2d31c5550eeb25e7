"""Members: which processes of a world reduce on the host?"""

import collections

from jdp import types
from jdp.replicas.mesh import World
from jdp.types import AxisName


def find_processes(world: World, axis_name: AxisName, title: str) -> tuple[int, ...]:
    """Returns the processes that reduce with this one, by rank on the axis.

    Args:
      world: the world.
      axis_name: axes to reduce over.
      title: name of the reduction, for messages.

    Raises:
      ValueError: `axis_name` is neither all axes of the world nor the inner axis of a
        pair, a process has several replicas, or they are not on CPU.
    """
    device = world.local_devices[0]
    if device.platform != "cpu":
        raise ValueError(
            f"The replicas are on {device.platform}; the {title} is for CPUs."
        )
    if not world.is_plain:
        raise ValueError(
            "The world has the user's mesh, "
            f"{dict(world.mesh.shape)}; the {title} is for a mesh that `jdp.init` "
            "makes. Leave `all_reduce` out: XLA then reduces."
        )
    names = types.as_axis_names(axis_name)
    is_whole = names == world.axis_names
    counts = collections.Counter(x.process_index for x in world.mesh.devices.flat)
    fits = is_whole and world.process_count > 1 and len({*counts.values()}) == 1
    if not fits and world.num_replicas != world.process_count:
        raise ValueError(
            f"{world.num_replicas} replicas on {world.process_count} processes: the "
            f"{title} reduces over all axes of several processes with as many replicas "
            "each, and over the inner axis of a pair where each has one."
        )
    # Processes of a host need not have consecutive numbers; in the mesh they are
    # adjacent.
    order = tuple(dict.fromkeys(x.process_index for x in world.mesh.devices.flat))
    if is_whole:
        return order
    if names == world.axis_names[1:]:
        size = world.mesh.devices.shape[1]
        first = order.index(world.process_index) // size * size
        return order[first : first + size]
    raise ValueError(
        f"`axis_name={axis_name!r}`: the {title} reduces over all axes of the "
        f"world, {world.axis_name!r}, or over the inner axis of a pair."
    )
