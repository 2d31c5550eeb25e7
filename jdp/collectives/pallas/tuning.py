"""Tuning: the limits of the custom all-reduce, from times on the GPUs at hand."""

import itertools
import math
from collections.abc import Sequence

from jdp.collectives import measurement
from jdp.collectives.measurement import Seconds
from jdp.collectives.pallas.all_reduce import PallasAllReduce
from jdp.collectives.pallas.choice import Algorithm, Limits, Thresholds, Topology
from jdp.collectives.xla import psum_all_reduce
from jdp.replicas.mesh import World
from jdp.types import AllReduceFn

SIZES = tuple(1 << k for k in range(10, 27))  # bytes, to 64 MiB.
_NCCL = "psum"


def all_sizes(num_replicas: int) -> Thresholds:
    """Returns thresholds that allow every size."""
    whole = Limits(num_replicas=num_replicas, one_stage_below=None, max_bytes=SIZES[-1])
    return Thresholds(limits=(whole,), source="to be measured")


def kernels(num_replicas: int, topology: Topology) -> dict[str, AllReduceFn]:
    """Returns the algorithms of the custom all-reduce, by name, for all sizes."""
    algorithms: list[Algorithm] = ["one_stage", "two_stage"]
    if topology.has_multicast:
        algorithms.append("multimem")
    thresholds = all_sizes(num_replicas)
    return {name: PallasAllReduce(name, thresholds) for name in algorithms}


def candidates(num_replicas: int, topology: Topology) -> dict[str, AllReduceFn]:
    """Returns the functions to time to find the limits, by name."""
    return {_NCCL: psum_all_reduce} | kernels(num_replicas, topology)


def measure_limits(
    world: World,
    all_reduces: dict[str, AllReduceFn],
    *,
    sizes: Sequence[int] = SIZES,
    rounds: int = 11,
) -> tuple[Limits, list[Seconds]]:
    """Times float32 buffers of each size; every process calls it.

    Args:
      world: the replicas.
      all_reduces: result of `candidates`.
      sizes: sizes of the buffers, in bytes.
      rounds: how often each function is timed per size.

    Returns:
      The best limits for this number of replicas, and the times.
    """
    times = measurement.time_all_reduces(world, all_reduces, sizes, rounds=rounds)
    return find_limits(times, world.num_replicas), times


def find_limits(times: Sequence[Seconds], num_replicas: int) -> Limits:
    """Returns the limits with the smallest loss against the best choice per size.

    The loss is the product of time ratios over all sizes, so that a single outlier does
    not move a limit. Among equal losses, NCCL and then one stage get the largest range.

    Args:
      times: times of "psum", "one_stage", "two_stage" and optionally "multimem", at
        the same sizes.
      num_replicas: number of replicas of these times.
    """
    by_size: dict[int, dict[str, float]] = {}
    for each in times:
        by_size.setdefault(each.num_bytes, {})[each.algorithm] = each.median
    sizes = sorted(by_size)
    has_switch = all("multimem" in found for found in by_size.values())
    best, least = None, math.inf
    # A limit is a measured size, or None: beyond all of them.
    ends: list[int | None] = [*sizes, None]
    for max_bytes, below, from_ in itertools.product(
        [0, *sizes], ends[::-1], ends if has_switch else [None]
    ):
        limits = Limits(
            num_replicas=num_replicas,
            one_stage_below=below,
            multimem_from=from_,
            max_bytes=max_bytes,
        )
        chosen = {
            size: _NCCL
            if size > max_bytes
            else limits.choose(size, can_multicast=has_switch)
            for size in sizes
        }
        lost = sum(math.log(by_size[size][name]) for size, name in chosen.items())
        if lost < least - 1e-9:
            best, least = limits, lost
    assert best is not None
    return best
