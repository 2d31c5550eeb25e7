"""Orphans: how does a launcher adopt and reap descendants whose parents have ended?"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable

from jdp.launch import guard

_PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>.


def adopt_orphans() -> bool:
    """Makes this process the parent of orphans among its descendants.

    Returns:
      Whether every child from now on descends from a process that this process starts.
      False if it has children already: their orphans could not be told apart.
    """
    if sys.platform != "linux" or os.getpid() == 1:
        return False
    own = os.getpid()
    if any(stat.parent == own for stat in guard.read_stats().values()):
        return False
    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def reap_adopted(own: Iterable[int]) -> None:
    """Reaps adopted children, but not the processes of `own`."""
    kept = set(own)
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitid(os.P_ALL, 0, options)) is not None:
            if end.si_pid in kept:
                return  # Its turn comes; what is behind it in the queue waits.
            os.waitpid(end.si_pid, os.WNOHANG)
