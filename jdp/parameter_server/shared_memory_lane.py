"""Shared memory lane: how do arrays reach a server on the same host without a socket?

The worker makes anonymous memory for each server, which opens it through the worker's
entry in /proc, so nothing is left behind. The first half holds a push, the second a
pull. At most one of each is pending, and its header travels over the socket.
"""

import mmap
import os

from jdp.parameter_server.messages import SharedMemoryOffer
from jdp.replicas import sealed_memory

_LABEL = "jdp-parameter-server"


class SharedMemoryLane:
    """Memory shared by a worker and a server."""

    def __init__(self, mapped: mmap.mmap, num_bytes: int):
        """Use `make_lane` and `open_lane`."""
        whole, start = memoryview(mapped), sealed_memory.HEADER_BYTES
        self.pushed = whole[start : start + num_bytes]
        self.pulled = whole[start + num_bytes :]


class SharedMemoryFile:
    """Open offer of shared memory, for a server that connects again too."""

    def __init__(self, descriptor: int, offer: SharedMemoryOffer):
        """Use `make_lane`."""
        self._descriptor = descriptor
        self.offer = offer

    def close(self) -> None:
        """Withdraws the offer; memory that is open already stays valid."""
        os.close(self._descriptor)


def make_lane(num_bytes: int) -> tuple[SharedMemoryLane, SharedMemoryFile] | None:
    """Makes memory for `num_bytes` in each direction; None if that fails."""
    if num_bytes == 0:
        return None
    size = sealed_memory.HEADER_BYTES + 2 * num_bytes
    try:
        mapped, descriptor, found = sealed_memory.make_memory(size, label=_LABEL)
    except OSError:  # Not enough memory; the socket needs none in advance.
        return None
    offer = SharedMemoryOffer(found.path, found.token, num_bytes)
    return SharedMemoryLane(mapped, num_bytes), SharedMemoryFile(descriptor, offer)


def open_lane(offer: SharedMemoryOffer, *, least_bytes: int) -> SharedMemoryLane | None:
    """Opens the memory of a worker; None if that is on another host or invalid.

    Args:
      offer: the offer of the worker.
      least_bytes: the bytes that it must have in each direction.
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
