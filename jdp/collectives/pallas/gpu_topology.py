"""GPU topology: the facts about devices that decide on the custom all-reduce."""

import ctypes
import pathlib
import platform
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from jdp.collectives.pallas.choice import Topology
from jdp.replicas import agreement, wire
from jdp.replicas.mesh import World

_CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = 132  # cuda.h, CUDA 12.1 and newer.


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one process about its devices and their host."""

    platform: str
    host: str
    compute_capability: float | None = None
    is_fully_connected: bool | None = None
    has_multicast: bool = False
    unknown_because: str = ""


def find_topology(world: World) -> Topology:
    """Finds the topology; every process calls it, and all get the same.

    Raises:
      RuntimeError: a process did not take part.
    """
    topic = "look at the GPUs"
    with agreement.reporting(world, topic):
        facts = find_facts(world)
    body = agreement.meet(world, topic, msgspec.msgpack.encode(facts), _collect)
    return combine(decode(body, world.process_count))


def decode(body: bytes, process_count: int) -> list[GpuFacts]:
    """Decodes the facts that process 0 has collected.

    Raises:
      Malformed: it is not a list of facts, or processes are missing.
    """
    found = wire.decode(body, list[GpuFacts], what="The list of GPUs of process 0")
    if len(found) != process_count:
        raise wire.Malformed(
            f"The list of GPUs of process 0 is of {len(found)} processes, there are "
            f"{process_count}. Install the same jdp in every process."
        )
    return found


def _collect(bodies: list[bytes]) -> bytes:
    return msgspec.msgpack.encode(
        [
            wire.decode(body, GpuFacts, what=f"The note of GPUs of process {process}")
            for process, body in enumerate(bodies)
        ]
    )


def combine(facts: Sequence[GpuFacts]) -> Topology:
    """Combines the facts of all processes."""
    capabilities = [each.compute_capability for each in facts]
    known = [c for c in capabilities if c is not None]
    connected = [each.is_fully_connected for each in facts]
    return Topology(
        platform=" and ".join(sorted({each.platform for each in facts})),
        num_hosts=len({each.host for each in facts}),
        compute_capability=min(known) if len(known) == len(facts) else None,
        is_fully_connected=None if None in connected else all(connected),
        has_multicast=all(each.has_multicast for each in facts),
        unknown_because=next(
            (f.unknown_because for f in facts if f.unknown_because), ""
        ),
    )


def find_facts(world: World) -> GpuFacts:
    """Finds the facts about the devices of this process."""
    devices = world.local_devices
    host = f"{platform.node()} {_boot_id()}"
    if devices[0].platform != "gpu":
        return GpuFacts(platform=devices[0].platform, host=host)
    is_connected, because = _ask_nvml()
    return GpuFacts(
        platform="gpu",
        host=host,
        compute_capability=min_capability([d.compute_capability for d in devices]),
        is_fully_connected=is_connected,
        has_multicast=all(_has_multicast(d.local_hardware_id) for d in devices),
        unknown_because=because,
    )


def min_capability(names: Sequence[str]) -> float | None:
    """Returns the lowest capability, such as 9.0; None if a GPU is not NVIDIA's."""
    known = [re.fullmatch(r"\d+\.\d+", name) for name in names]
    return min(float(match[0]) for match in known if match) if all(known) else None


def _ask_nvml() -> tuple[bool | None, str]:
    """Asks the driver whether all GPUs are connected; None and why if unknown."""
    try:
        import pynvml  # the package nvidia-ml-py; only GPUs need it.
    except ImportError:
        return None, "pip install nvidia-ml-py"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"the driver does not answer ({error})"
    try:
        return are_all_connected(pynvml), ""
    except pynvml.NVMLError as error:
        return None, f"the driver does not say how GPUs are connected ({error})"
    finally:
        pynvml.nvmlShutdown()


def are_all_connected(nvml: Any) -> bool:
    """Returns whether every GPU of this host reaches every other one over NVLink.

    This includes GPUs that the job does not use: a process with one GPU sees the others
    only as devices of the driver.

    Args:
      nvml: the module `pynvml`, after `nvmlInit`.
    """
    count = nvml.nvmlDeviceGetCount()
    gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    index, ok = nvml.NVML_P2P_CAPS_INDEX_NVLINK, nvml.NVML_P2P_STATUS_OK
    return all(
        nvml.nvmlDeviceGetP2PStatus(a, b, index) == ok
        for a in gpus
        for b in gpus
        if a is not b
    )


def find_driver_version() -> str:
    """Returns the version of the NVIDIA driver, or "unknown"."""
    try:
        import pynvml
    except ImportError:
        return "unknown"
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return "unknown"


def _has_multicast(ordinal: int) -> bool:
    """Asks the driver whether a GPU of this process is on a switch that reduces."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, found = ctypes.c_int(), ctypes.c_int()
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        or cuda.cuDeviceGetAttribute(
            ctypes.byref(found), _CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device
        )
    )
    return not failed and found.value == 1


def _boot_id() -> str:
    """Returns an id that tells hosts of the same name apart."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
