"""Freed memory: does it stay in this process, for the next step to use?

XLA allocates the temporary memory of a program at each call. glibc takes 32 MiB and
more from the system and gives them back when they are freed, so that each step would
touch new pages: 10,000 page faults, 17 ms of 84, in a step of a GPT with 40 MiB. Here
freed memory stays in the process, up to `MAX_KEPT_BYTES` at the end of the heap.

glibc gives each thread an arena, which holds at most 64 MiB, except for the main
thread's. XLA's threads would still map larger memory anew. One arena serves all
threads, if that is set before they start: before JAX makes its devices.
"""

import ctypes
import os

SWITCH = "JDP_KEEP_FREED_MEMORY"

# The largest argument of mallopt(3), an int.
MAX_KEPT_BYTES = 2**31 - 1

# The numbers of M_TRIM_THRESHOLD, M_MMAP_MAX and M_ARENA_MAX in malloc.h of glibc.
_TRIM_THRESHOLD = -1
_MAX_MAPPINGS = -4
_MAX_ARENAS = -8


def keep() -> bool:
    """Keeps the memory that this process frees from now on; returns whether it does.

    It does nothing where the C library is not glibc, where the environment has options
    of its malloc, or where `JDP_KEEP_FREED_MEMORY` is "0".
    """
    if os.environ.get(SWITCH) == "0" or not _is_glibc() or _has_own_options():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    options = {_MAX_MAPPINGS: 0, _TRIM_THRESHOLD: MAX_KEPT_BYTES, _MAX_ARENAS: 1}
    return all([mallopt(name, value) == 1 for name, value in options.items()])


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):  # Not Unix, or another C library.
        return False


def _has_own_options() -> bool:
    return any(name.startswith("MALLOC_") for name in os.environ) or (
        "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    )
