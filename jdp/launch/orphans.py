"""Orphans: how does a launcher get the descendants whose parents have ended?"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable

from jdp.launch import guard

_PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>.


def adopt_orphans() -> bool:
    """Lets orphans among the descendants of this process become its children.

    Returns:
      Whether every child from now on descends from what this process starts. A process
      that has children already could not tell theirs apart.
    """
    if sys.platform != "linux" or os.getpid() == 1:
        return False
    own = os.getpid()
    if any(stat.parent == own for stat in guard.read_stats().values()):
        return False
    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def reap_adopted(own: Iterable[int]) -> None:
    """Takes the ends of children that were adopted, but not the ends of `own`."""
    kept = set(own)
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitid(os.P_ALL, 0, options)) is not None:
            if end.si_pid in kept:
                return  # Its turn comes; what is behind it in the queue waits.
            os.waitpid(end.si_pid, os.WNOHANG)
