"""Registry: the implementations of a process set, in order of preference."""

import dataclasses

from jdp.eager.execution.base import Implementation, SetMembers
from jdp.eager.execution.hierarchical import make_hierarchical
from jdp.eager.execution.local import LocalCopy
from jdp.eager.execution.pallas import make_pallas_kernel
from jdp.eager.execution.shared_memory import SharedMemory
from jdp.eager.execution.xla import Xla
from jdp.eager.options import EagerOptions


def make_implementations(
    members: SetMembers, options: EagerOptions, *, key: str
) -> list[Implementation]:
    """Constructs all implementations; the members of the set call it together.

    Args:
      members: the process set.
      options: the same on all members.
      key: where the members meet in the store; unique to the process set.

    Returns:
      The implementations in order of preference: the first enabled one runs.
    """
    # A process that has agreed to an operation comes at once, or not at all.
    world = dataclasses.replace(members.world, timeout_s=options.timeout_s)
    impatient = dataclasses.replace(members, world=world)
    return [
        SharedMemory(impatient, options.shared_memory_bytes, key=f"{key}/memory"),
        make_hierarchical(
            members,
            all_reduce=options.hierarchical_all_reduce,
            all_gather=options.hierarchical_all_gather,
        ),
        make_pallas_kernel(members),
        Xla(members),
        LocalCopy(members),
    ]
