"""Cost model: the time of an all-reduce, from its rounds, its bytes and the links.

With n replicas, S bytes, latency a, bandwidth B and C seconds per reduced byte, for n a
power of two, dtypes of 32 bits or more, and parts that divide evenly:

    algorithm           rounds          communication              computation
    ring                2(n-1)          2(n-1)a + 2(n-1)/n S/B     (n-1)/n S C
    bidirectional_ring  2(n-1)          2(n-1)a + (n-1)/n S/B      (n-1)/n S C
    halving_doubling    2 log2 n        2 log2 n a + 2(n-1)/n S/B  (n-1)/n S C
    butterfly           log2 n          log2 n (a + S/B)           log2 n S C
    star                2(n-1)          2(n-1)(a + S/B)            (n-1) S C
    tree                2 log2 n        2 log2 n (a + S/B)         log2 n S C
    chain, k chunks     2(n-2+k)        2(n-2+k)(a + S/(k B))      (n-2+k)/k S C
    hierarchical        ring within, halving_doubling across S/L, L replicas per node
    adasum              log2 n          log2 n (a + S/B)           4 log2 n S C

(Thakur, Rabenseifner and Gropp, 2005; Patarasuk and Yuan, 2009.) The predictions
count the programs as they are built: parts are padded, other n fold (two more rounds
with S bytes), sums of 16-bit floats travel in float32, and the root of a star serves
one replica after another.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.collectives import base, butterfly, halving_doubling, ring, work_counts
from jdp.collectives.adaptive_sum import adasum
from jdp.collectives.butterfly import butterfly_all_reduce
from jdp.collectives.halving_doubling import halving_doubling_all_reduce
from jdp.collectives.hierarchical import hierarchical_all_reduce
from jdp.collectives.ring import ring_all_reduce
from jdp.collectives.tree import reduce_broadcast_all_reduce
from jdp.collectives.work_counts import Counter, Size, Work


class Curve(NamedTuple):
    """Measured times of an algorithm on a mesh."""

    algorithm: str  # a key of `ALGORITHMS`, or "psum" and others without a model.
    num_replicas: int
    points: tuple[tuple[int, float], ...]  # bytes, rising, and seconds.

    def is_possible(self) -> bool:
        """Whether these are sizes and times, rising from the smallest size."""
        sizes = [size for size, _ in self.points]
        are_times = all(0 < seconds < math.inf for _, seconds in self.points)
        is_rising = sizes == sorted({*sizes}) and sizes[:1] > [0]
        return are_times and is_rising and self.num_replicas > 0

    def at(self, num_bytes: int) -> float:
        """Returns seconds at any size, interpolated linearly on logarithmic axes.

        Below the first point it is constant; above the last it grows with the size.
        """
        sizes, seconds = zip(*self.points, strict=True)
        if num_bytes > sizes[-1]:
            return seconds[-1] * num_bytes / sizes[-1]
        size = math.log(max(num_bytes, 1))
        return math.exp(np.interp(size, np.log(sizes), np.log(seconds)))


@dataclasses.dataclass(frozen=True)
class Links:
    """Speed of the links between replicas, and of reducing on a replica."""

    latency_s: float  # of one message.
    bandwidth_bytes_per_s: float  # of one replica, sending and receiving at once.
    compute_s_per_byte: float = 0.0  # to reduce received data into local data.
    measured: tuple[Curve, ...] = ()  # times from `fit_links`.

    def __post_init__(self) -> None:
        for name, value in (
            ("latency_s", self.latency_s),
            ("compute_s_per_byte", self.compute_s_per_byte),
        ):
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` must be at least 0, got {value}.")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(
                "`bandwidth_bytes_per_s` must be positive, got "
                f"{self.bandwidth_bytes_per_s}."
            )


@dataclasses.dataclass(frozen=True)
class Node:
    """Replicas of one node, and the links between them."""

    num_replicas: int
    links: Links

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(
                f"`num_replicas` of a node must be at least 1, got {self.num_replicas}."
            )


@dataclasses.dataclass(frozen=True)
class Cost:
    """Predicted cost and time of an all-reduce."""

    work: Work
    communication_s: float
    computation_s: float

    @property
    def total_s(self) -> float:
        """Seconds from the first message to the last sum."""
        return self.communication_s + self.computation_s


class Algorithm(NamedTuple):
    """All-reduce function, and the counter of its work."""

    all_reduce: Callable[..., Any]  # an `AllReduceFn`; "adasum" takes a tree.
    counter: Counter | None  # (size, num_replicas); None: see `predict`.


def predict(
    algorithm: str,
    num_bytes: int,
    num_replicas: int,
    links: Links,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    num_chunks: int = 1,
    node: Node | None = None,
) -> Cost:
    """Predicts the cost of an all-reduce sum.

    Args:
      algorithm: a key of `ALGORITHMS`.
      num_bytes: size of the buffer, in bytes.
      num_replicas: size of the whole axis; 100,000 and more is fine.
      links: links between replicas; for "hierarchical", between nodes, per replica.
      dtype: dtype of the buffer.
      num_chunks: as passed to the all-reduce; ignored by algorithms without chunks.
      node: for "hierarchical", the replicas of one node.

    Returns:
      The prediction; zero for one replica and for an empty buffer.

    Raises:
      ValueError: an argument is out of range, the algorithm is unknown or does not
        exist for `num_replicas`, or `node` is missing.
    """
    _check(algorithm, num_bytes, num_replicas, num_chunks, node)
    itemsize = jnp.dtype(dtype).itemsize
    sum_itemsize = base.accumulator(jnp.dtype(dtype), "sum").itemsize
    size = Size(math.ceil(num_bytes / itemsize), itemsize, sum_itemsize, num_chunks)
    counter = ALGORITHMS[algorithm].counter
    if counter is not None:
        return _price(work_counts.count(counter, size, num_replicas), links)
    assert node is not None
    within, across = work_counts.count_hierarchical(
        size, num_replicas, node.num_replicas
    )
    costs = _price(within, node.links), _price(across, links)
    return Cost(
        work=within + across,
        communication_s=sum(c.communication_s for c in costs),
        computation_s=sum(c.computation_s for c in costs),
    )


def choose(num_bytes: int, num_replicas: int, links: Links) -> str:
    """Chooses the all-reduce that takes the least time.

    If `links` holds times measured with this number of replicas, it interpolates them
    and keeps "psum" unless another algorithm is a fifth faster. Otherwise it compares
    ring, halving_doubling and butterfly by `predict`.

    Args:
      num_bytes: size of the buffer, in bytes.
      num_replicas: size of the axis.
      links: links between the replicas, for example from `fit_links`.

    Returns:
      A key of `ALGORITHMS`, or "psum", "shared_memory" or "tcp".
    """
    seconds = {
        curve.algorithm: curve.at(num_bytes)
        for curve in links.measured
        if curve.num_replicas == num_replicas
    }
    if not seconds:
        seconds = {
            name: predict(name, num_bytes, num_replicas, links).total_s
            for name in ("ring", "halving_doubling", "butterfly")
        }
    best = min(seconds, key=seconds.__getitem__)
    if "psum" in seconds and seconds["psum"] * 0.8 <= seconds[best]:
        return "psum"
    return best


def num_chunks_here(algorithm: str, num_bytes: int, num_replicas: int) -> int:
    """Returns the default number of chunks of a float32 buffer on this backend."""
    elements = math.ceil(num_bytes / 4)
    match algorithm:
        case "ring":
            return ring.default_num_chunks(elements, 4, num_replicas)
        case "bidirectional_ring":
            return ring.default_num_chunks(elements, 4, 2 * num_replicas)
        case "halving_doubling":
            return halving_doubling.default_num_chunks(elements, 4)
        case "butterfly":
            return butterfly.default_num_chunks(elements, 4)
        case _:
            return 1


def _check(
    algorithm: str,
    num_bytes: int,
    num_replicas: int,
    num_chunks: int,
    node: Node | None,
) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"`algorithm` must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}."
        )
    if num_bytes < 0 or num_replicas < 1 or num_chunks < 1:
        raise ValueError(
            "`num_bytes` must be at least 0, `num_replicas` and `num_chunks` at least "
            f"1, got {num_bytes}, {num_replicas} and {num_chunks}."
        )
    if algorithm == "adasum" and num_replicas & (num_replicas - 1):
        raise ValueError(
            f"'adasum' needs a power of two of replicas, got {num_replicas}."
        )
    if algorithm == "hierarchical" and node is None:
        raise ValueError("'hierarchical' needs `node=Node(num_replicas, links)`.")
    if node is not None and num_replicas % node.num_replicas:
        raise ValueError(
            f"{num_replicas} replicas do not divide into nodes of {node.num_replicas}; "
            "every node must have as many."
        )


def _price(work: Work, links: Links) -> Cost:
    return Cost(
        work=work,
        communication_s=work.num_rounds * links.latency_s
        + work.serial_bytes / links.bandwidth_bytes_per_s,
        computation_s=work.reduced_bytes * links.compute_s_per_byte,
    )


ALGORITHMS: Mapping[str, Algorithm] = {
    "ring": Algorithm(ring_all_reduce, work_counts.count_ring),
    "bidirectional_ring": Algorithm(
        functools.partial(ring_all_reduce, bidirectional=True),
        functools.partial(work_counts.count_ring, num_lanes=2),
    ),
    "halving_doubling": Algorithm(
        halving_doubling_all_reduce, work_counts.count_halving_doubling
    ),
    "butterfly": Algorithm(butterfly_all_reduce, work_counts.count_butterfly),
    "star": Algorithm(reduce_broadcast_all_reduce, work_counts.count_star),
    "tree": Algorithm(
        functools.partial(reduce_broadcast_all_reduce, pattern="tree"),
        work_counts.count_tree,
    ),
    "chain": Algorithm(
        functools.partial(reduce_broadcast_all_reduce, pattern="chain"),
        work_counts.count_chain,
    ),
    "hierarchical": Algorithm(hierarchical_all_reduce, None),
    "adasum": Algorithm(adasum, work_counts.count_adasum),
}
