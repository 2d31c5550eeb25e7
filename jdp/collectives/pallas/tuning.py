"""Tuning: the limits of the custom all-reduce, from times on the GPUs that are here."""

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
    """Returns thresholds under which every size may be reduced."""
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
    """Returns what is timed to find the limits, by name."""
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
      all_reduces: `candidates` of them.
      sizes: bytes of the buffers.
      rounds: how often each is timed at each size.

    Returns:
      The best limits for so many replicas, and the times.
    """
    times = measurement.time_all_reduces(world, all_reduces, sizes, rounds=rounds)
    return find_limits(times, world.num_replicas), times


def find_limits(times: Sequence[Seconds], num_replicas: int) -> Limits:
    """Returns the limits that lose least against the best choice at each size.

    What is lost is counted as the ratio of times, all sizes alike, so that one
    measurement out of line moves no limit; of limits that lose the same, NCCL and then
    one stage get most.

    Args:
      times: of "psum", "one_stage" and "two_stage", maybe "multimem", at the same
        sizes.
      num_replicas: how many have reduced.
    """
    by_size: dict[int, dict[str, float]] = {}
    for each in times:
        by_size.setdefault(each.num_bytes, {})[each.algorithm] = each.median
    sizes = sorted(by_size)
    has_switch = all("multimem" in found for found in by_size.values())
    best, least = None, math.inf
    # A limit lies at a measured size, or beyond all of them.
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
