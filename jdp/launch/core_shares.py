"""Core shares: which cores of a host, and how many threads, does each process get?

Processes of a data-parallel step do the same work at the same time. Where each has
cores of its own, none is moved to the core of another, and each spins in peace. All
shares are alike: the slowest process sets the pace, and replicas whose thread pools
differ in size may round differently.
"""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jdp.replicas import cores
from jdp.runtime import environment

_SYSTEM = pathlib.Path("/sys/devices")
# XLA sizes the thread pool of its CPU client by the first of these that is set, and
# otherwise by the affinity mask (`DefaultThreadPoolSize` in XLA's cpu_client.cc).
_XLA_THREADS = ("PJRT_NPROC", "NPROC")
_OPENMP_THREADS = "OMP_NUM_THREADS"


class CoreShares(NamedTuple):
    """Shares of the processes of one host."""

    cores: tuple[frozenset[int], ...] = ()  # by process; (): all run on all cores.
    environ: dict[str, str] = {}  # variables of every process: numbers of threads.


class Core(NamedTuple):
    """A CPU of the system, that is, a hardware thread, and its place in the machine."""

    id: int
    domain: int = 0  # of memory: NUMA.
    package: int = 0
    physical: int = 0  # core of the package; hardware threads of one core share it.
    kind: int = 0  # cores of different kinds are not equally fast.


def find_shares(num_processes: int, environ: Mapping[str, str]) -> CoreShares:
    """Shares out the cores that this process may use.

    One process gets no share: it may use all cores. Processes with accelerators get
    none either: those compute elsewhere, and their data loaders, which inherit the
    cores of their process, need more. With more processes than cores, pinned processes
    could not move to a core that becomes idle; each gets one OpenMP thread, as with
    `torchrun`.

    Args:
      num_processes: number of processes on this host.
      environ: their environment; its numbers of threads are kept.
    """
    if (
        num_processes == 1
        or sys.platform != "linux"
        or environment.has_accelerator(environ)
    ):
        return CoreShares()
    usable = cores.find_usable()
    own, num_threads = share_out(find_cores(usable.ids), num_processes)
    threads = {_OPENMP_THREADS: "1"}
    if own:
        num_threads = max(1, int(min(num_threads, usable.quota / num_processes)))
        threads[_OPENMP_THREADS] = str(num_threads)
        if not any(environ.get(name) for name in _XLA_THREADS):
            threads[_XLA_THREADS[0]] = str(num_threads)
    given = {name for name in threads if environ.get(name)}
    return CoreShares(own, {k: v for k, v in threads.items() if k not in given})


def find_cores(ids: Iterable[int], system: pathlib.Path = _SYSTEM) -> list[Core]:
    """Returns the place of each core; what the system does not tell stays 0.

    Args:
      ids: ids of the cores.
      system: the folder `/sys/devices`; see
        Documentation/ABI/stable/sysfs-devices-system-cpu of Linux.
    """
    folder = system / "system"
    domains = {
        core: int(path.parent.name.removeprefix("node"))
        for path in folder.glob("node/node*/cpulist")
        for core in _parse_list(_read(path))
    }
    # Cores of one kind have one capacity (Arm), or are in the list of small ones (x86).
    small = set(_parse_list(_read(system / "cpu_atom/cpus")))

    def find(core: int) -> Core:
        place = folder / f"cpu/cpu{core}"
        return Core(
            core,
            domain=domains.get(core, 0),
            package=_read_int(place / "topology/physical_package_id", 0),
            physical=_read_int(place / "topology/core_id", core),
            kind=_read_int(place / "cpu_capacity", int(core in small)),
        )

    return [find(core) for core in ids]


def share_out(
    cores: Sequence[Core], num_shares: int
) -> tuple[tuple[frozenset[int], ...], int]:
    """Shares out cores; pure.

    Each share has the same number of cores of each kind for itself: neighbours, which
    are on one NUMA domain if that costs less than half of them. Hardware threads of one
    core are divided only where there are fewer cores than shares. The cores that are
    left over are for all shares of their domain.

    Args:
      cores: the cores of the host that may be used.
      num_shares: number of shares.

    Returns:
      The ids of the cores in each share, and the number of cores that each has for
      itself; no shares if there are not enough cores.
    """
    own: list[list[Core]] = [[] for _ in range(num_shares)]
    for kind in sorted({core.kind for core in cores}):
        for share, found in zip(own, _cut(cores, kind, num_shares), strict=False):
            share += found
    if not all(own):
        return (), 0
    left = set(cores).difference(*own)
    shares = []
    for share in own:
        near = {core.domain for core in share}
        near_left = [core for core in left if core.domain in near]
        shares.append(frozenset(core.id for core in (*share, *near_left)))
    return tuple(shares), min(len(share) for share in own)


@contextlib.contextmanager
def inherited(cores: frozenset[int] | None) -> Iterator[None]:
    """Lets processes that this thread starts meanwhile run on `cores`; None: as it.

    A new process has the affinity of the thread that starts it, before its first
    instruction. Other threads keep theirs.
    """
    if cores is None or sys.platform != "linux":
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        # They may have been taken from this process since it shared them out.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def _cut(cores: Sequence[Core], kind: int, num_shares: int) -> list[list[Core]]:
    """Cuts the cores of one kind into shares; empty if there are not enough."""
    units = _group([core for core in cores if core.kind == kind], by_thread=False)
    if len(units) < num_shares:
        units = _group([core for core in cores if core.kind == kind], by_thread=True)
    size = len(units) // num_shares
    if size == 0:
        return []
    domains: dict[int, list[list[Core]]] = {}
    for unit in units:
        domains.setdefault(unit[0].domain, []).append(unit)
    # The largest number with which no share is in two domains.
    inside = next(
        n
        for n in range(size, 0, -1)
        if sum(len(found) // n for found in domains.values()) >= num_shares
    )
    runs = list(domains.values()) if 2 * inside > size else [units]
    size = inside if 2 * inside > size else size
    pieces = [
        [core for unit in run[at : at + size] for core in unit]
        for run in runs
        for at in range(0, len(run) - size + 1, size)
    ]
    return pieces[:num_shares]


def _group(cores: Sequence[Core], *, by_thread: bool) -> list[list[Core]]:
    """Returns the hardware threads of each core, neighbours together."""
    units: dict[tuple[int, ...], list[Core]] = {}
    for core in cores:
        key = (core.domain, core.package, core.physical)
        units.setdefault((*key, core.id) if by_thread else key, []).append(core)
    return [units[key] for key in sorted(units)]


def _parse_list(text: str) -> list[int]:
    """Returns the numbers in a list of the kernel, such as "0-2,8"."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: pathlib.Path, default: int) -> int:
    text = _read(path).strip()
    return int(text) if text.isdigit() else default
