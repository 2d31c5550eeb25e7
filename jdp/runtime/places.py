"""Places: which process of the job is this one, and where does it find the others?"""

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence

from jdp import compat
from jdp.runtime import addresses, environment, launchers
from jdp.runtime.environment import LaunchEnvironment


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Arguments of `jdp.init` that give a process its place."""

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None
    timeout_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """The place of this process in a job of several processes."""

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None = None
    num_cpu_devices: int | None = None
    node: str | None = None  # equal on one machine; None: found automatically.
    is_one_launch: bool = False  # whether one launcher has started all processes.

    def __post_init__(self) -> None:
        try:
            addresses.split(self.coordinator_address)
        except ValueError:
            raise ValueError(
                "`coordinator_address` must be 'host:port' of process 0, or "
                f"'[IPv6]:port', got {self.coordinator_address!r}."
            ) from None
        if self.num_processes < 1:
            raise ValueError(
                f"`num_processes` must be at least 1, got {self.num_processes}."
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"`process_id` must be from 0 to {self.num_processes - 1} "
                f"(`num_processes={self.num_processes}`), got {self.process_id}."
            )


def find(options: PlaceOptions, environ: Mapping[str, str]) -> ProcessPlace | None:
    """Finds the place of this process; None if it is alone.

    Raises:
      ValueError: an argument or a variable is missing or wrong, or a launcher has
        started several processes and does not tell where they meet.
    """
    explicit = {
        "coordinator_address": options.coordinator_address,
        "num_processes": options.num_processes,
        "process_id": options.process_id,
    }
    given = [name for name, value in explicit.items() if value is not None]
    if given == ["num_processes"] and options.num_processes == 1:
        return None
    if given == ["coordinator_address"]:
        launched = launchers.find(environ, address=options.coordinator_address)
        if launched is not None:
            return _of_launcher(launched, options, environ)
    if given:
        missing = [name for name, value in explicit.items() if value is None]
        if missing:
            raise ValueError(
                f"{', '.join(f'`{m}`' for m in missing)} must be given too: "
                "`coordinator_address`, `num_processes` and `process_id` go together."
            )
        return ProcessPlace(**explicit, local_device_ids=options.local_device_ids)
    own = LaunchEnvironment.from_environ(environ)
    if own is not None:
        environment.check_place_is_free(environ, os.getpid())
        return _of_own_launcher(own, options)
    launched = launchers.find(environ)
    if launched is not None and (
        launched.coordinator_address or not launchers.is_of_open_mpi_4(environ)
    ):
        place = _of_launcher(launched, options, environ)
    else:
        place = _of_cluster(options, environ)
    if place is None and (text := environment.describe_lonely(environ)):
        warnings.warn(text, stacklevel=3)  # For the caller of `jdp.init`.
    return place


def _of_own_launcher(
    launched: LaunchEnvironment, options: PlaceOptions
) -> ProcessPlace:
    device_ids = options.local_device_ids
    count = launched.devices_per_process
    if count is None and launched.num_local_processes > 1:
        count = 1  # One process per GPU, unless the command line gives a number.
    if device_ids is None and count is not None:
        first = launched.local_process_id * count
        device_ids = tuple(range(first, first + count))
    return ProcessPlace(
        coordinator_address=launched.coordinator_address,
        num_processes=launched.num_processes,
        process_id=launched.process_id,
        local_device_ids=device_ids,
        num_cpu_devices=launched.devices_per_process,
        node=f"node {launched.node_rank}",
        is_one_launch=launched.num_local_processes == launched.num_processes,
    )


def _of_launcher(
    launched: launchers.LaunchedPlace,
    options: PlaceOptions,
    environ: Mapping[str, str],
) -> ProcessPlace | None:
    if launched.num_processes == 1:
        environment.check_count(environ, 1)
        return None
    environment.check_place_is_free(environ, os.getpid())
    if launched.coordinator_address is None:
        raise ValueError(launchers.explain_missing_address(launched, environ))
    device_ids = options.local_device_ids
    if device_ids is None and launched.local_process_id is not None:
        device_ids = (launched.local_process_id,)  # One process per GPU.
    return ProcessPlace(
        coordinator_address=launched.coordinator_address,
        num_processes=launched.num_processes,
        process_id=launched.process_id,
        local_device_ids=device_ids,
    )


def _of_cluster(
    options: PlaceOptions, environ: Mapping[str, str]
) -> ProcessPlace | None:
    """Finds the place with what JAX detects."""
    is_alone = environment.is_in_shell_of_slurm(environ)
    place = None if is_alone else _detect(options)
    if place is not None and place.num_processes > 1:
        environment.check_place_is_free(environ, os.getpid())
    environment.check_count(environ, place.num_processes if place else 1)
    if place is None and not is_alone:
        environment.check_not_numbered(environ)
    return place


def _detect(options: PlaceOptions) -> ProcessPlace | None:
    try:
        address, count, process_id, device_ids = compat.detect_cluster(
            timeout_s=options.timeout_s
        )
        if address is None or count is None or process_id is None:
            return None
        return ProcessPlace(
            coordinator_address=address,
            num_processes=count,
            process_id=process_id,
            # JAX proposes one GPU per process; a single process takes all.
            local_device_ids=options.local_device_ids
            or (device_ids if count > 1 else None),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(environment.explain_cluster(os.environ, error)) from error
