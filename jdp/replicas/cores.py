"""Cores: on which may a process run, and can all processes of a host run at once?"""

import math
import os
import pathlib
import sys
from collections.abc import Sequence

import msgspec

from jdp.replicas import control_groups


class UsableCores(msgspec.Struct, frozen=True, array_like=True):
    """Cores that one process may use; a core is what the system calls a CPU.

    Attributes:
      ids: the affinity mask, ascending.
      quota: limit of the control groups: the number of cores that the process and
        others of its groups keep busy together, at most; may be a fraction, or `inf`.
    """

    ids: tuple[int, ...]
    quota: float = math.inf


def find_usable() -> UsableCores:
    """Returns the cores of the calling thread, which its children inherit."""
    if sys.platform != "linux":  # No affinity, and no control groups.
        return UsableCores(tuple(range(os.cpu_count() or 1)))
    ids = tuple(sorted(os.sched_getaffinity(0)))
    return UsableCores(ids, find_quota(control_groups.read_own()))


def find_quota(groups: str, root: pathlib.Path = control_groups.ROOT) -> float:
    """Returns the CPU quota of control groups, in cores; `inf` without a limit.

    Args:
      groups: the content of /proc/self/cgroup; see cgroups(7).
      root: the folder where control groups are mounted.
    """
    folders = control_groups.find_folders(groups, "cpu", root)
    return min(map(_read_quota, folders), default=math.inf)


def _read_quota(folder: pathlib.Path) -> float:
    """Reads the quota of one group, of version 2 or 1; `inf` if it has none."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # "max": there is no limit.
        return math.inf


def are_enough(processes: Sequence[UsableCores]) -> bool:
    """Returns whether each process of a host can have a core of its own; pure.

    Processes that spin while they wait for each other need this. A matching of
    processes and cores is grown by augmenting paths (Kuhn's algorithm).
    """
    if min(process.quota for process in processes) < len(processes):
        return False
    if len({core for process in processes for core in process.ids}) < len(processes):
        return False
    user_of: dict[int, int] = {}
    return all(_seat(i, processes, user_of, set()) for i in range(len(processes)))


def _seat(
    index: int,
    processes: Sequence[UsableCores],
    user_of: dict[int, int],
    tried: set[int],
) -> bool:
    """Gives a process a core, for which others may move to other cores."""
    ids = processes[index].ids
    free = next((core for core in ids if core not in user_of), None)
    if free is not None:
        user_of[free] = index
        return True
    for core in ids:
        if core not in tried:
            tried.add(core)
            if _seat(user_of[core], processes, user_of, tried):
                user_of[core] = index
                return True
    return False
