"""Sealed memory: how do processes of one host share memory that has no name?

One process makes it; the others open it through that process' entry in /proc. So
nothing is left behind, whichever process is killed. Seals fix its size: a process that
touches memory which its owner has truncated would be killed.
"""

import contextlib
import errno
import fcntl
import math
import mmap
import os
import pathlib
import re
import secrets
import stat
from typing import NamedTuple

from jdp.replicas import control_groups

HEADER_BYTES = 4096  # at the beginning; its last bytes hold the token.
_TOKEN = slice(HEADER_BYTES - 16, HEADER_BYTES)
_PATH = re.compile(r"/proc/([1-9][0-9]{0,9})/fd/[0-9]{1,10}", re.ASCII)
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class MemoryOffer(NamedTuple):
    """Path at which other processes of this host find memory, and a token to check."""

    path: str
    token: bytes  # shape (16,)


def make_memory(
    size: int, *, label: str, is_populated: bool = False
) -> tuple[mmap.mmap, int, MemoryOffer]:
    """Makes and maps zeros, with the token in their header.

    Args:
      size: size in bytes, including the header.
      label: the name that /proc shows.
      is_populated: whether all pages are mapped now, not when they are touched first.

    Returns:
      The memory, its descriptor, and the offer, which is valid until the descriptor is
      closed.

    Raises:
      OSError: there is not enough memory, or this is not Linux.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    _check_available(size)
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)  # It is made with 0777.
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mapped = _map(fd, size, is_populated=is_populated)
    except BaseException:
        os.close(fd)
        raise
    token = secrets.token_bytes(16)
    mapped[_TOKEN] = token
    return mapped, fd, MemoryOffer(f"/proc/{os.getpid()}/fd/{fd}", token)


def open_memory(
    offer: MemoryOffer, size: int, *, pid: int | None = None, is_populated: bool = False
) -> mmap.mmap:
    """Maps memory that another process has made.

    Args:
      offer: the offer of that process.
      size: size in bytes, including the header.
      pid: id of that process; None: any.
      is_populated: whether all pages are mapped now, not when they are touched first.

    Raises:
      OSError: the path does not lead to sealed memory of this user with that size, for
        example because the process is on another host.
    """
    found = _PATH.fullmatch(offer.path)
    if found is None or pid not in (None, int(found[1])):
        raise OSError("its path is not the path of a descriptor of the process")
    # On another host the path may be anything, and merely opening a device may have
    # effects: nothing is opened before it is known to be memory.
    _check(os.stat(offer.path), size)
    fd = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(os.fstat(fd), size)
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("its size is not sealed")
        mapped = _map(fd, size, is_populated=is_populated)
    except ValueError as error:
        raise OSError(str(error)) from None
    finally:
        os.close(fd)
    if mapped[_TOKEN] != offer.token:
        raise OSError("it is not the memory that was offered")
    return mapped


def _check(found: os.stat_result, size: int) -> None:
    """Raises OSError unless the file is like the memory of `make_memory`."""
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 0:
        raise OSError("it is not memory without a name")
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OSError("it does not belong to this user alone")
    if found.st_size != size:
        raise OSError(f"it has {found.st_size:,} bytes, not {size:,}")


def _check_available(size: int) -> None:
    """Raises OSError if the kernel would run out of memory and kill a process."""
    with open("/proc/meminfo") as file:
        found = re.search(r"MemAvailable: *(\d+) kB", file.read())
    left = [math.inf if found is None else 1024 * int(found[1])]
    groups = control_groups.read_own()
    left += map(find_left, control_groups.find_folders(groups, "memory"))
    if size > min(left):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def find_left(group: pathlib.Path) -> float:
    """Returns the bytes that a control group may still use; `inf` without a limit.

    Files that the kernel keeps in memory count as used, but give way.

    Args:
      group: the folder of the group.
    """
    for limit, usage in (
        ("memory.max", "memory.current"),  # version 2
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max".
            left = int((group / limit).read_text()) - int((group / usage).read_text())
            with contextlib.suppress(OSError):
                statistics = (group / "memory.stat").read_text()
                found = re.search(r"^(?:total_)?inactive_file (\d+)$", statistics, re.M)
                left += 0 if found is None else int(found[1])
            return left
    return math.inf


def _map(fd: int, size: int, *, is_populated: bool) -> mmap.mmap:
    populate = mmap.MAP_POPULATE if is_populated else 0
    return mmap.mmap(fd, size, mmap.MAP_SHARED | populate)
