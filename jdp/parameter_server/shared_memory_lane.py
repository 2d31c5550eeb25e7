"""Lane: arrays between a worker and a server of one host go through shared memory.

The worker makes memory without a name for each server, which opens it through the
worker's entry in /proc, so nothing is left behind. The first half is for what is
pushed, the second for what is pulled: of each, one is under way at a time, and its
header travels over the socket.
"""

import fcntl
import mmap
import os
import re
import secrets
import stat

from jdp.parameter_server.messages import SharedMemoryOffer

_TOKEN_BYTES = 16
_HEADER_BYTES = 4096
_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class SharedMemoryLane:
    """Memory that a worker and a server share."""

    def __init__(self, mapped: mmap.mmap, num_bytes: int):
        """Use `make_lane` and `open_lane`."""
        whole = memoryview(mapped)
        self.pushed = whole[_HEADER_BYTES : _HEADER_BYTES + num_bytes]
        self.pulled = whole[_HEADER_BYTES + num_bytes :]


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
    if not hasattr(os, "memfd_create") or num_bytes == 0:
        return None
    size = _HEADER_BYTES + 2 * num_bytes
    token = secrets.token_bytes(_TOKEN_BYTES)
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    descriptor = os.memfd_create("jdp-parameter-server", flags)
    try:
        os.fchmod(descriptor, 0o600)  # It is made with 0777.
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        mapped = mmap.mmap(descriptor, size)
    except OSError:  # There is not so much memory: the socket needs none beforehand.
        os.close(descriptor)
        return None
    mapped[:_TOKEN_BYTES] = token
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    return SharedMemoryLane(mapped, num_bytes), SharedMemoryFile(
        descriptor, SharedMemoryOffer(path, token, num_bytes)
    )


def open_lane(offer: SharedMemoryOffer, *, least_bytes: int) -> SharedMemoryLane | None:
    """Opens what a worker offers; None if it is on another host, or is not right.

    Args:
      offer: where it is.
      least_bytes: how many it must have in each direction.
    """
    num_bytes = offer.num_bytes
    size = _HEADER_BYTES + 2 * num_bytes
    if num_bytes < least_bytes or not _PATH.fullmatch(offer.path):
        return None
    try:
        # Looked at first: to open a device may already do something.
        if not _is_ours(os.stat(offer.path), size):
            return None
        descriptor = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # On another host the path may be anything. Without the seal its owner could cut
        # it off, and a process that touches it then is killed.
        if not _is_ours(os.fstat(descriptor), size):
            return None
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            return None
        mapped = mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    if mapped[:_TOKEN_BYTES] != offer.token:
        return None
    return SharedMemoryLane(mapped, num_bytes)


def _is_ours(found: os.stat_result, size: int) -> bool:
    """Whether it is memory or a file of this user, of the right size."""
    is_file = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return is_file and found.st_size == size
