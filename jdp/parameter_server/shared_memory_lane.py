"""Lane: arrays between a worker and a server of one host go through shared memory.

The worker makes memory without a name for each server, which opens it through the
worker's entry in /proc, so nothing is left behind. The first half is for what is
pushed, the second for what is pulled: of each, one is under way at a time, and its
header travels over the socket.
"""

import mmap
import os

from jdp.parameter_server.messages import SharedMemoryOffer
from jdp.replicas import sealed_memory

_LABEL = "jdp-parameter-server"


class SharedMemoryLane:
    """Memory that a worker and a server share."""

    def __init__(self, mapped: mmap.mmap, num_bytes: int):
        """Use `make_lane` and `open_lane`."""
        whole, start = memoryview(mapped), sealed_memory.HEADER_BYTES
        self.pushed = whole[start : start + num_bytes]
        self.pulled = whole[start + num_bytes :]


class SharedMemoryFile:
    """Open offer of a shared_memory, for a server that comes or comes back."""

    def __init__(self, descriptor: int, offer: SharedMemoryOffer):
        """Use `make_lane`."""
        self._descriptor = descriptor
        self.offer = offer

    def close(self) -> None:
        """Takes the offer back; who has opened it keeps its memory."""
        os.close(self._descriptor)


def make_lane(num_bytes: int) -> tuple[SharedMemoryLane, SharedMemoryFile] | None:
    """Makes memory for `num_bytes` in each direction; None where that cannot be."""
    if num_bytes == 0:
        return None
    size = sealed_memory.HEADER_BYTES + 2 * num_bytes
    try:
        mapped, descriptor, found = sealed_memory.make_memory(size, label=_LABEL)
    except OSError:  # There is not so much memory: the socket needs none beforehand.
        return None
    offer = SharedMemoryOffer(found.path, found.token, num_bytes)
    return SharedMemoryLane(mapped, num_bytes), SharedMemoryFile(descriptor, offer)


def open_lane(offer: SharedMemoryOffer, *, least_bytes: int) -> SharedMemoryLane | None:
    """Opens what a worker offers; None if it is on another host, or is not right.

    Args:
      offer: where it is.
      least_bytes: how many it must have in each direction.
    """
    num_bytes = offer.num_bytes
    if num_bytes < least_bytes:
        return None
    found = sealed_memory.MemoryOffer(offer.path, offer.token)
    try:
        mapped = sealed_memory.open_memory(
            found, sealed_memory.HEADER_BYTES + 2 * num_bytes
        )
    except OSError:
        return None
    return SharedMemoryLane(mapped, num_bytes)
