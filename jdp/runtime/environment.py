"""Launch environment: how does a launcher tell a process its place in the job?"""

import dataclasses
import glob
from collections.abc import Mapping, Sequence

COORDINATOR_ADDRESS = "JDP_COORDINATOR_ADDRESS"
NUM_PROCESSES = "JDP_NUM_PROCESSES"
PROCESS_ID = "JDP_PROCESS_ID"
LOCAL_PROCESS_ID = "JDP_LOCAL_PROCESS_ID"
NUM_LOCAL_PROCESSES = "JDP_NUM_LOCAL_PROCESSES"
NODE_RANK = "JDP_NODE_RANK"
DEVICES_PER_PROCESS = "JDP_DEVICES_PER_PROCESS"
LAUNCH_ID = "JDP_LAUNCH_ID"  # The same for all processes of one launcher.
LAUNCH_FOLDER = "JDP_LAUNCH_FOLDER"  # See `private_folder`.
GRACE_S = "JDP_GRACE_S"  # Seconds from SIGTERM to SIGKILL, at the end of a failed job.
RECORD = "JDP_RECORD"  # Memory of the launcher for the record of this process.
JOINED = "JDP_JOINED"  # The pid of the process that has taken this place.
JOB_KEY = "JDP_JOB_KEY"  # The secret of the job; see `job_key`.
JOB_ID = "JDP_JOB_ID"  # Any text that tells the job from others with its key.
# JAX takes a minute to make as many, and seconds for a thousand.
MAX_CPU_DEVICES = 16_384
_REQUIRED = (
    COORDINATOR_ADDRESS,
    NUM_PROCESSES,
    PROCESS_ID,
    LOCAL_PROCESS_ID,
    NUM_LOCAL_PROCESSES,
    NODE_RANK,
)
VARIABLES = (
    *(*_REQUIRED, DEVICES_PER_PROCESS),
    *(LAUNCH_ID, LAUNCH_FOLDER, GRACE_S, RECORD, JOINED, JOB_KEY),
)


# Devices of NVIDIA and AMD, and TPUs, by the age of their driver.
_ACCELERATORS = ("nvidia[0-9]*", "kfd", "accel[0-9]*", "accel/accel*", "vfio/[0-9]*")
# Variables from which JAX detects a process's place, besides Kubernetes and TPUs.
_NUMBERS_OF_CLUSTERS = (
    *("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
# Variables of launchers that neither JAX nor `launchers` knows, or knows from more
# variables; the first is the number of processes. Slurm sets `SLURM_NTASKS` also
# without `srun`.
_OF_OTHER_LAUNCHERS = (
    ("WORLD_SIZE", "RANK", "MASTER_ADDR"),  # torchrun.
    ("PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI; Slurm.
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI.
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),  # MVAPICH2.
    ("HOROVOD_SIZE", "HOROVOD_RANK"),  # horovodrun.
    ("NUM_PROCESSES", "PROCESS_ID", "COORDINATOR_ADDRESS"),  # JAXJob of Kubeflow.
)
# Variables for the index of a process, of launchers that do not set the number of
# processes, and why JAX does not find the others.
_NUMBERED = (
    (
        ("JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST"),
        "an indexed Job of Kubernetes, whose other processes JAX finds with the "
        "package `kubernetes` alone (`pip install 'jax[k8s]'`)",
    ),
    (
        ("PMIX_RANK", "PMIX_NAMESPACE"),
        "a launcher of MPI, whose other processes JAX does not find",
    ),
)
_OF_ANYONE = ("NUM_PROCESSES",)  # Any program may call a variable so.
_FOUND_BY_JAX = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_TEXTS_OF_CLUSTERS = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """The place of one process in a job started by `jdp launch`."""

    coordinator_address: str  # "host:port" of process 0.
    num_processes: int
    process_id: int
    local_process_id: int  # Position among the processes of this host.
    num_local_processes: int  # Processes of this host.
    node_rank: int  # Position of this host.
    devices_per_process: int | None  # None: not given on the command line.

    def to_environ(self) -> dict[str, str]:
        """Returns the variables that `from_environ` reads."""
        environ = {
            COORDINATOR_ADDRESS: self.coordinator_address,
            NUM_PROCESSES: str(self.num_processes),
            PROCESS_ID: str(self.process_id),
            LOCAL_PROCESS_ID: str(self.local_process_id),
            NUM_LOCAL_PROCESSES: str(self.num_local_processes),
            NODE_RANK: str(self.node_rank),
        }
        if self.devices_per_process is not None:
            environ[DEVICES_PER_PROCESS] = str(self.devices_per_process)
        return environ

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "LaunchEnvironment | None":
        """Reads the variables; None if no launcher has set them.

        Raises:
          ValueError: some are set and others are missing, or one is not a number.
        """
        present = [name for name in _REQUIRED if name in environ]
        missing = [name for name in _REQUIRED if name not in environ]
        if not present:
            return None
        if missing:
            raise ValueError(
                f"{present} are set in the environment but {missing} are not. "
                "`jdp launch` sets all of them; unset them to start without it."
            )
        devices = environ.get(DEVICES_PER_PROCESS)
        return cls(
            coordinator_address=environ[COORDINATOR_ADDRESS],
            num_processes=_parse_int(environ, NUM_PROCESSES),
            process_id=_parse_int(environ, PROCESS_ID),
            local_process_id=_parse_int(environ, LOCAL_PROCESS_ID),
            num_local_processes=_parse_int(environ, NUM_LOCAL_PROCESSES),
            node_rank=_parse_int(environ, NODE_RANK),
            devices_per_process=(
                None if devices is None else _parse_int(environ, DEVICES_PER_PROCESS)
            ),
        )


def check_num_devices(name: str, count: int | None) -> None:
    """Raises ValueError for more devices of a process than JAX makes in a minute."""
    if count is not None and count > MAX_CPU_DEVICES:
        raise ValueError(
            f"`{name}` must be at most {MAX_CPU_DEVICES}, got {count}: JAX needs "
            "minutes and gigabytes to divide a CPU into more devices."
        )


def has_accelerator(environ: Mapping[str, str]) -> bool:
    """Returns whether JAX may compute on more than the CPU; imports nothing."""
    platforms = environ.get("JAX_PLATFORMS") or environ.get("JAX_PLATFORM_NAME")
    if platforms:
        return platforms.strip().lower() != "cpu"
    return any(glob.glob(f"/dev/{name}") for name in _ACCELERATORS)


def is_in_shell_of_slurm(environ: Mapping[str, str]) -> bool:
    """Returns whether the process runs in the interactive step of `salloc`; pure.

    There `SLURM_NTASKS` counts the allocation, while the step has one task.
    """
    return (
        environ.get("SLURM_STEP_NUM_TASKS") == "1"
        and environ.get("SLURM_PROCID") == "0"
        and environ.get("SLURM_NTASKS", "1") != "1"
        # Each part of such a step counts its own tasks.
        and "SLURM_HET_SIZE" not in environ
        and "OMPI_MCA_orte_hnp_uri" not in environ  # mpirun was called there.
    )


def describe_lonely(environ: Mapping[str, str]) -> str:
    """Describes a number of processes of which this one finds no other; pure.

    Returns:
      A warning; "" if no variable says that there are several.
    """
    counts = [name for name, *_ in _OF_OTHER_LAUNCHERS if name not in _OF_ANYONE]
    for name in (*counts, "SLURM_NTASKS"):
        if not (environ.get(name, "").isdecimal() and int(environ[name]) > 1):
            continue
        advice = "start it with that launcher, which sets more variables than this,"
        if name == "SLURM_NTASKS":
            advice = "start it with `srun`,"
        return (
            f"`{name}={environ[name]!r}` says that there are {environ[name]} "
            "processes, and this one finds no other: it trains alone. If it is one of "
            f"them, {advice} or with `jdp launch`, or give `coordinator_address`, "
            "`num_processes` and `process_id`. If it is meant to be alone, "
            "`jdp.init(num_processes=1)` says so."
        )
    return ""


def check_count(environ: Mapping[str, str], num_processes: int) -> None:
    """Refuses the environment of a launcher that JAX does not detect; pure.

    Args:
      environ: an environment that `jdp launch` did not make.
      num_processes: number of processes that JAX finds in it; 1 if it finds none.

    Raises:
      ValueError: another launcher has set a larger number of processes.
    """
    for names in _OF_OTHER_LAUNCHERS:
        if all(environ.get(name) for name in names) and (
            environ[names[0]].isdecimal() and int(environ[names[0]]) > num_processes
        ):
            found = [n for n in _FOUND_BY_JAX if environ.get(n) == str(num_processes)]
            while_found = f" (it finds {num_processes} by {_show(environ, found)})"
            raise ValueError(
                f"This process is one of several, by {_show(environ, names)}, of a "
                f"launcher that JAX does not find{while_found if found else ''}. Give "
                "`coordinator_address`, `num_processes` and `process_id`, or start the "
                "job with `jdp launch`; with `num_processes=1` alone, this process is "
                "alone."
            )


def check_place_is_free(environ: Mapping[str, str], pid: int) -> None:
    """Refuses a process that has inherited its parent's place in the job; pure.

    Args:
      environ: the environment of a launcher; `jdp.init` sets `JOINED` in it.
      pid: process id of this process.

    Raises:
      ValueError: another process has taken the place.
    """
    owner = environ.get(JOINED)
    if owner is not None and owner != str(pid):
        process = f"Process {environ[PROCESS_ID]}" if PROCESS_ID in environ else "One"
        raise ValueError(
            f"{process} of the processes of the job (pid {owner}) has joined it and "
            "has started this one, which inherits its environment and has no place of "
            "its own. If `multiprocessing` has spawned this process, it imports the "
            "script again: put what the script does under `if __name__ == "
            "'__main__':`. To be alone, pass `num_processes=1` and nothing else. To "
            "join another job, unset the variables that the launcher set, and "
            f"`{JOINED}`."
        )


def check_not_numbered(environ: Mapping[str, str]) -> None:
    """Refuses a process that a launcher has numbered; pure.

    Number 0 is refused as well: otherwise it would train alone while the others fail.

    Args:
      environ: an environment in which JAX does not find a place.

    Raises:
      ValueError: a launcher has numbered this process.
    """
    is_counted = any(environ.get(names[0]) for names in _OF_OTHER_LAUNCHERS)
    for names, launcher in _NUMBERED:
        if all(environ.get(name) for name in names) and not is_counted:
            raise ValueError(
                f"This process has number {environ[names[0]]} in {launcher}, by "
                f"{_show(environ, names)}. If it is one of several, give "
                "`coordinator_address`, `num_processes` and `process_id`; if it is "
                "alone, or each is to train alone, `num_processes=1` and nothing else."
            )


def explain_cluster(environ: Mapping[str, str], error: Exception) -> str:
    """Explains which variable of Slurm or Open MPI is wrong; pure.

    Args:
      environ: the environment from which JAX has read the place of this process.
      error: JAX's error.
    """
    numbers = [name for name in _NUMBERS_OF_CLUSTERS if name in environ]
    wrong = [name for name in numbers if not environ[name].isdecimal()]
    if not wrong:
        wrong = numbers + [name for name in _TEXTS_OF_CLUSTERS if name in environ]
    shown = _show(environ, wrong)
    missing = f"{error} is not set" if isinstance(error, KeyError) else str(error)
    return (
        f"The place of this process in a job of Slurm or Open MPI cannot be read from "
        f"{shown or 'the environment'}: {missing} Set these variables as the launcher "
        "of the cluster does, or unset them to start without it, or give "
        "`coordinator_address`, `num_processes` and `process_id`."
    )


def find_grace_s(environ: Mapping[str, str]) -> float | None:
    """Returns the grace time of the launcher in seconds; None without a launcher."""
    try:
        return float(environ[GRACE_S])
    except (KeyError, ValueError):
        return None


def _show(environ: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(f"`{name}={environ[name]!r}`" for name in names)


def _parse_int(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(
            f"`{name}` must be a whole number, got {environ[name]!r}."
        ) from None
