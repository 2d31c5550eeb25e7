"""Launchers: which place do torchrun and MPI give a process, by its environment?

JAX detects Slurm, Open MPI up to 4, Kubernetes and TPUs. It does not know torchrun, the
launchers of the MPICH family, nor Open MPI 5.
"""

import dataclasses
import os
import zlib
from collections.abc import Callable, Mapping, Sequence

from jdp.runtime import addresses

COORDINATOR_ADDRESS = "JAX_COORDINATOR_ADDRESS"  # as for `jax.distributed`.
COORDINATOR_PORT = "JAX_COORDINATOR_PORT"
# Above the ports that Linux gives to connections; JAX chooses from this range, too.
_FIRST_PORT, _NUM_PORTS = 61440, 4096
_OWN_HOST = "127.0.0.1"
# Programs that start the processes of a host, for launchers that give a job no name.
_STARTERS = ("hydra_pmi_proxy", "pmi_proxy", "mpiexec", "mpirun")


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A launcher, and the variables that it sets in each process."""

    name: str
    count: str
    rank: str
    local_rank: str
    local_count: str
    marks: tuple[str, ...]  # further variables that only this launcher sets.


_LAUNCHERS = (
    Launcher(
        "torchrun",
        count="WORLD_SIZE",
        rank="RANK",
        local_rank="LOCAL_RANK",
        local_count="LOCAL_WORLD_SIZE",
        marks=("MASTER_ADDR",),
    ),
    Launcher(
        "Open MPI",
        count="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_count="OMPI_COMM_WORLD_LOCAL_SIZE",
        marks=(),
    ),
    Launcher(
        "MVAPICH",
        count="MV2_COMM_WORLD_SIZE",
        rank="MV2_COMM_WORLD_RANK",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_count="MV2_COMM_WORLD_LOCAL_SIZE",
        marks=(),
    ),
    Launcher(  # Slurm sets `PMI_SIZE` and `PMI_RANK`, too, and JAX knows Slurm.
        "MPICH",
        count="PMI_SIZE",
        rank="PMI_RANK",
        local_rank="MPI_LOCALRANKID",
        local_count="MPI_LOCALNRANKS",
        marks=("MPI_LOCALRANKID",),
    ),
)
_OF_OPEN_MPI_4 = "OMPI_MCA_orte_hnp_uri"  # JAX reads the address of `mpirun` from it.


@dataclasses.dataclass(frozen=True)
class LaunchedPlace:
    """The place of a process, as a launcher has told it."""

    launcher: str
    num_processes: int
    process_id: int
    local_process_id: int | None  # None: it is the only one of its host, or not told.
    coordinator_address: str | None  # None: the variables do not tell it.


def find(
    environ: Mapping[str, str],
    *,
    address: str | None = None,
    find_starter: Callable[[], str] | None = None,
) -> LaunchedPlace | None:
    """Finds the place of this process; None if none of these launchers started it.

    The address of the coordinator is `address` if it is given, or else, in this order:
    `JAX_COORDINATOR_ADDRESS`; this host, if it has all processes; and what torchrun
    says in `MASTER_ADDR`. The port is `JAX_COORDINATOR_PORT`, or else a number of the
    job. It is `MASTER_PORT` only where no torchrun has set it, which listens there.

    Args:
      environ: the environment.
      address: the address that the program gives.
      find_starter: identifies the program that started the processes of this host;
        None: looks for it.

    Raises:
      ValueError: a variable is not a number, or the rank does not fit the count.
    """
    launcher = next((x for x in _LAUNCHERS if _has_started(x, environ)), None)
    if launcher is None:
        return None
    count, rank = _number(environ, launcher.count), _number(environ, launcher.rank)
    local_count = _find_number(environ, launcher.local_count)
    if not 0 <= rank < count:
        raise ValueError(
            f"`{launcher.rank}={rank}` must be from 0 to {count - 1}, for "
            f"`{launcher.count}={count}` of {launcher.name}."
        )
    if address is None:
        is_one_host = local_count == count
        if is_one_host or launcher.name == "torchrun":
            starter = find_starter or _find_starter
            address = _find_address(launcher, environ, is_one_host, starter)
        address = environ.get(COORDINATOR_ADDRESS) or address
    local_rank = _find_number(environ, launcher.local_rank)
    if local_count == 1:
        local_rank = None
    return LaunchedPlace(launcher.name, count, rank, local_rank, address)


def is_of_open_mpi_4(environ: Mapping[str, str]) -> bool:
    """Returns whether JAX finds the other hosts of a job of Open MPI; pure."""
    return bool(environ.get(_OF_OPEN_MPI_4))


def explain_missing_address(place: LaunchedPlace, environ: Mapping[str, str]) -> str:
    """Explains what to do where the variables give no address; pure."""
    launcher = next(x for x in _LAUNCHERS if x.name == place.launcher)
    given = [launcher.count, launcher.rank, launcher.local_count, *launcher.marks]
    given = [name for name in dict.fromkeys(given) if environ.get(name)]
    shown = ", ".join(f"`{name}={environ[name]!r}`" for name in given)
    return (
        f"This process is one of several, by {shown}, of {place.launcher}, whose "
        "variables do not tell where process 0 is: the processes are on several hosts, "
        "or the variables do not say that they are on one. Set "
        f"`{COORDINATOR_ADDRESS}=host:port`, or pass "
        "`jdp.init(coordinator_address='host:port')`, on all processes: an address of "
        "the host of process 0, and a port that is free there. With `num_processes=1` "
        "alone, this process is alone."
    )


def _has_started(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    names = (launcher.count, launcher.rank, *launcher.marks)
    return all(environ.get(name) for name in names)


def _find_address(
    launcher: Launcher,
    environ: Mapping[str, str],
    is_one_host: bool,
    find_starter: Callable[[], str],
) -> str | None:
    host = _OWN_HOST if is_one_host else environ.get("MASTER_ADDR")
    port = environ.get(COORDINATOR_PORT)
    if host is None:
        return None
    if port is None and launcher.name == "torchrun":
        port = environ.get("MASTER_PORT")
        if port is None:
            return None
        if "TORCHELASTIC_RUN_ID" in environ:
            names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
            names = (*names, "TORCHELASTIC_RESTART_COUNT")
            port = _port_of([environ.get(name, "") for name in names])
    if port is None:  # `PMIX_NAMESPACE` names the job; MPICH has no such variable.
        port = _port_of([environ.get("PMIX_NAMESPACE") or find_starter()])
    if not port.isdecimal():
        raise ValueError(
            f"The port of the coordinator must be a number, got {port!r}, by "
            f"`{COORDINATOR_PORT}` or `MASTER_PORT`."
        )
    return addresses.join(host.strip("[]"), int(port))


def _port_of(key: Sequence[str]) -> str:
    """Returns a port that all processes of a job choose alike."""
    return str(_FIRST_PORT + zlib.crc32("\n".join(key).encode()) % _NUM_PORTS)


def _find_starter() -> str:
    """Identifies the program that has started the processes of this host."""
    import psutil  # `import jdp` does not need it.

    for parent in psutil.Process().parents():
        try:
            if parent.name().startswith(_STARTERS):
                return f"{parent.pid} {parent.create_time()}"
        except psutil.Error:  # It has ended, or belongs to another user.
            continue
    return str(os.getppid())


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise ValueError(
            f"`{name}` must be a number, which the launcher sets, got "
            f"{environ[name]!r}. Unset it to start without that launcher."
        )
    return int(environ[name])


def _find_number(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if environ.get(name) else None
