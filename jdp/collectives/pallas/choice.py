"""Choice: which buffers take the custom all-reduce, and by which algorithm."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import msgspec

Algorithm = Literal["one_stage", "two_stage", "multimem"]

DTYPES = ("float32", "bfloat16", "float16")
MULTIMEM_DTYPE = "float32"
MIN_COMPUTE_CAPABILITY = 9.0  # Mosaic GPU compiles for Hopper and newer.
_KIB, _MIB = 1 << 10, 1 << 20

# Half of the multiprocessors of an H100: within 6 % of the best of 36, 66, 132 and 264
# blocks in every row of benchmarks/results/2026-11-22_kernel_launches_gpu.jsonl (H100
# 80GB HBM3, driver 580.159.04, jax 0.11.2), from 64 KiB to 64 MiB and for 2 and 8
# replicas, if `default_launch` says how often to unroll. vLLM has 36 (kMaxBlocks in
# csrc/custom_all_reduce.cuh), which took up to 2.2 times the best there.
MAX_BLOCKS = 66


@dataclasses.dataclass(frozen=True)
class Topology:
    """Facts about the GPUs of the replicas.

    Attributes:
      platform: platform of the devices: "gpu", "cpu" or "tpu".
      num_hosts: number of hosts of the devices.
      compute_capability: lowest of the devices, such as 9.0; None if unknown.
      is_fully_connected: whether every GPU can read the memory of every other GPU over
        NVLink; None if unknown.
      has_multicast: whether a switch that reduces (NVLink SHARP) connects them.
      unknown_because: why a fact is unknown.
    """

    platform: str
    num_hosts: int = 1
    compute_capability: float | None = None
    is_fully_connected: bool | None = None
    has_multicast: bool = False
    unknown_because: str = ""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes at which the algorithm changes, for one number of replicas.

    Attributes:
      num_replicas: size of the axis.
      one_stage_below: buffers of fewer bytes take one stage; None: all buffers.
      multimem_from: buffers of at least this many bytes are reduced by the switch, if
        there is one; None: never.
      max_bytes: larger buffers go to NCCL.
      max_blocks: most blocks of a launch. `PallasAllReduce` also takes at most half the
        number of multiprocessors; see `limit_blocks`.
    """

    num_replicas: int
    one_stage_below: int | None
    multimem_from: int | None = None
    max_bytes: int = 8 * _MIB
    max_blocks: int = MAX_BLOCKS

    def choose(self, num_bytes: int, *, can_multicast: bool) -> Algorithm:
        """Returns the algorithm for a buffer of at most `max_bytes`."""
        from_ = self.multimem_from
        if can_multicast and from_ is not None and num_bytes >= from_:
            return "multimem"
        below = self.one_stage_below
        return "one_stage" if below is None or num_bytes < below else "two_stage"


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for all numbers of replicas, and their source.

    `jdp bench collectives --tune` measures them on the GPUs at hand and writes a file.
    Pass `Thresholds.load(path)` to `jdp.collectives.AutoAllReduce`.
    """

    limits: tuple[Limits, ...]
    source: str

    def find(self, num_replicas: int) -> Limits | None:
        """Returns the limits for a number of replicas, or None if it has none."""
        return next((e for e in self.limits if e.num_replicas == num_replicas), None)

    def get(self, num_replicas: int) -> Limits:
        """Returns the limits for a number of replicas.

        Raises:
          ValueError: it has no limits.
        """
        limits = self.find(num_replicas)
        if limits is None:
            raise ValueError(
                f"The custom all-reduce takes {self.known()} replicas, "
                f"got {num_replicas}."
            )
        return limits

    def known(self) -> str:
        """Returns the numbers of replicas that have limits, as text."""
        return ", ".join(str(each.num_replicas) for each in self.limits)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Thresholds":
        """Reads a file that `save` wrote.

        Raises:
          ValueError: the file does not hold thresholds.
        """
        try:
            return msgspec.json.decode(pathlib.Path(path).read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"`{path}` does not hold thresholds: {error}.") from error

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the thresholds as JSON."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        pathlib.Path(path).write_bytes(text + b"\n")


# Two replicas take one stage, since a second one saves nothing. jdp has not measured
# these, as it has not run on several GPUs. The switch is used once it is measured.
THRESHOLDS = Thresholds(
    limits=(
        Limits(num_replicas=2, one_stage_below=None),
        Limits(num_replicas=4, one_stage_below=512 * _KIB),
        Limits(num_replicas=6, one_stage_below=256 * _KIB),
        Limits(num_replicas=8, one_stage_below=256 * _KIB),
    ),
    source="vLLM 0.6, csrc/custom_all_reduce.cuh and custom_all_reduce.py (max_size)",
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """Threads of a kernel.

    Attributes:
      num_blocks: number of thread blocks.
      num_warpgroups: warpgroups per block, of 128 threads each.
      unroll: loads of 16 bytes that a thread has in flight per peer.
    """

    num_blocks: int
    num_warpgroups: int = 4
    unroll: int = 1


_LOADS_UNDER_WAY = 8  # per thread; with 512 threads and 66 blocks 4.3 MB per GPU.
_TILE_BYTES = 128 * 16


def default_launch(
    num_bytes: int, num_replicas: int, algorithm: Algorithm, *, max_blocks: int
) -> Launch:
    """Returns as many blocks as there is work for, unrolled for larger buffers.

    With 66 and 132 blocks, eight warpgroups per block were not better than four. For
    large buffers, 8 vectors in flight per thread were best with 2 replicas, and as good
    as 16 with 8 replicas. `MAX_BLOCKS` names the measurement.

    Args:
      num_bytes: size of the buffer.
      num_replicas: number of replicas that reduce it.
      algorithm: name of the body.
      max_blocks: most blocks. All blocks must be resident at once, since they wait for
        the blocks of the peers. A multiprocessor always holds one block of 512 threads,
        so there must not be more blocks than multiprocessors.
    """
    work = num_bytes if algorithm == "one_stage" else -(-num_bytes // num_replicas)
    num_tiles = max(1, work // _TILE_BYTES)
    threads = Launch(num_blocks=1).num_warpgroups
    num_blocks = min(max_blocks, -(-num_tiles // threads))
    rounds = -(-num_tiles // (num_blocks * threads))
    sources = 1 if algorithm == "multimem" else num_replicas
    unroll = max(1, min(_LOADS_UNDER_WAY // sources, rounds))
    return Launch(num_blocks, threads, unroll)


def limit_blocks(max_blocks: int, num_multiprocessors: int | None) -> int:
    """Returns how many blocks may be launched on a device.

    It is at most half the number of multiprocessors. Blocks of this kernel wait for
    other devices, and so do blocks of NCCL, which XLA may run beside it on another
    stream. If each kernel held a multiprocessor that the other one needs, on different
    devices, both would wait forever. NCCL takes up to 32 multiprocessors of an H100.

    Args:
      max_blocks: limit that does not depend on the device.
      num_multiprocessors: multiprocessors of the device; None if unknown. GPUs of
        compute capability 9.0 with NVLink have 78 or more (H20).
    """
    if num_multiprocessors is None:
        return max_blocks
    return max(1, min(max_blocks, num_multiprocessors // 2))


def choose_algorithm(
    num_bytes: int,
    num_replicas: int,
    *,
    thresholds: Thresholds = THRESHOLDS,
    can_multicast: bool = False,
) -> Algorithm:
    """Returns the algorithm for a buffer.

    Args:
      num_bytes: size of the buffer.
      num_replicas: 2, 4, 6 or 8.
      thresholds: sizes at which the algorithm changes.
      can_multicast: whether a switch connects the GPUs that can reduce the dtype of the
        buffer.

    Raises:
      ValueError: `thresholds` has no limits for this number of replicas.
    """
    return thresholds.get(num_replicas).choose(num_bytes, can_multicast=can_multicast)


def should_use_custom(
    num_bytes: int,
    num_replicas: int,
    dtype: Any,
    topology: Topology,
    *,
    thresholds: Thresholds = THRESHOLDS,
    explain: Callable[[str], None] | None = None,
) -> bool:
    """Returns whether a sum or mean should take the custom all-reduce.

    It is meant for GPUs of one host that are all connected to each other, and for
    buffers so small that NCCL spends its time on latency. The kernel pads them to 16
    bytes.

    Args:
      num_bytes: size of the buffer.
      num_replicas: size of the axis.
      dtype: dtype of the buffer.
      topology: facts about the devices of the replicas.
      thresholds: the limits; see `jdp bench collectives --tune`.
      explain: called with the reason if the result is False.

    Returns:
      True where the kernel takes the buffer, False where `psum` should.
    """
    reason = why_not_custom(num_bytes, num_replicas, dtype, topology, thresholds)
    if reason is not None and explain is not None:
        explain(reason)
    return reason is None


def why_not_custom(
    num_bytes: int,
    num_replicas: int,
    dtype: Any,
    topology: Topology,
    thresholds: Thresholds = THRESHOLDS,
) -> str | None:
    """Returns why the custom all-reduce does not take a buffer, or None if it does.

    See `should_use_custom`.
    """
    if topology.platform != "gpu":
        return f"it runs on GPUs, and the devices are of platform {topology.platform!r}"
    if topology.num_hosts != 1:
        return f"it runs within a host, and the replicas lie on {topology.num_hosts}"
    limits = thresholds.find(num_replicas)
    if limits is None:
        return f"it takes {thresholds.known()} replicas, and there are {num_replicas}"
    if jnp.dtype(dtype).name not in DTYPES:
        return f"it takes {', '.join(DTYPES)}, and the buffer is {jnp.dtype(dtype)}"
    if num_bytes > limits.max_bytes:
        return (
            f"it takes at most {limits.max_bytes} bytes of {num_replicas} replicas, "
            f"and the buffer has {num_bytes}"
        )
    capability = topology.compute_capability
    if capability is None or capability < MIN_COMPUTE_CAPABILITY:
        found = "unknown" if capability is None else capability
        return (
            f"it needs GPUs of compute capability {MIN_COMPUTE_CAPABILITY} or more, "
            f"and theirs is {found}"
        )
    if topology.is_fully_connected is None:
        return (
            "it needs GPUs that are all connected by NVLink, and whether they are "
            f"could not be found out: {topology.unknown_because}"
        )
    if not topology.is_fully_connected:
        return "it needs GPUs that are all connected by NVLink, and they are not"
    return None
