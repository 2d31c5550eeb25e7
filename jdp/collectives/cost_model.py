"""Cost model: how long an all-reduce takes, from its rounds, its bytes and the links.

With n replicas, S bytes, latency a, bandwidth B and C seconds a byte reduced, for n a
power of two, 32 bits and more, and parts that divide:

    algorithm           rounds          communication              computation
    ring                2(n-1)          2(n-1)a + 2(n-1)/n S/B     (n-1)/n S C
    bidirectional_ring  2(n-1)          2(n-1)a + (n-1)/n S/B      (n-1)/n S C
    halving_doubling    2 log2 n        2 log2 n a + 2(n-1)/n S/B  (n-1)/n S C
    butterfly           log2 n          log2 n (a + S/B)           log2 n S C
    star                2(n-1)          2(n-1)(a + S/B)            (n-1) S C
    tree                2 log2 n        2 log2 n (a + S/B)         log2 n S C
    chain, k chunks     2(n-2+k)        2(n-2+k)(a + S/(k B))      (n-2+k)/k S C
    hierarchical        ring within, halving_doubling across S/L, L replicas a node
    adasum              log2 n          log2 n (a + S/B)           4 log2 n S C

(Thakur, Rabenseifner and Gropp, 2005; Patarasuk and Yuan, 2009.) What is predicted is
what the programs do: parts are padded, other n fold (two rounds with S more), sums of
16-bit floats travel in float32, and the star's root serves one after another.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.collectives import base, butterfly, halving_doubling, ring
from jdp.collectives.adaptive_sum import adasum
from jdp.collectives.butterfly import butterfly_all_reduce
from jdp.collectives.halving_doubling import halving_doubling_all_reduce
from jdp.collectives.hierarchical import hierarchical_all_reduce
from jdp.collectives.ring import ring_all_reduce
from jdp.collectives.tree import reduce_broadcast_all_reduce


class Curve(NamedTuple):
    """How long an algorithm took on a mesh."""

    algorithm: str  # a key of `ALGORITHMS`, or one that only a mesh can tell about.
    num_replicas: int
    points: tuple[tuple[int, float], ...]  # bytes, rising, and seconds.

    def at(self, num_bytes: int) -> float:
        """Seconds at any size: straight between points on logarithmic axes.

        Below the first point it is constant, above the last in proportion to the size.
        """
        sizes, seconds = zip(*self.points, strict=True)
        if num_bytes > sizes[-1]:
            return seconds[-1] * num_bytes / sizes[-1]
        size = math.log(max(num_bytes, 1))
        return math.exp(np.interp(size, np.log(sizes), np.log(seconds)))


@dataclasses.dataclass(frozen=True)
class Links:
    """Links between replicas, and how fast replicas reduce."""

    latency_s: float  # of one message.
    bandwidth_bytes_per_s: float  # of one replica, sending and receiving at once.
    compute_s_per_byte: float = 0.0  # to reduce what arrived with what was there.
    measured: tuple[Curve, ...] = ()  # what `fit_links` has seen.

    def __post_init__(self) -> None:
        """Checks that the numbers are ones that a link can have."""
        for name in ("latency_s", "compute_s_per_byte"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` must be at least 0, got {value}.")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(
                "`bandwidth_bytes_per_s` must be positive, got "
                f"{self.bandwidth_bytes_per_s}."
            )


@dataclasses.dataclass(frozen=True)
class Node:
    """Replicas that are nearer to each other than to all others."""

    num_replicas: int
    links: Links

    def __post_init__(self) -> None:
        """Checks that there is a replica."""
        if self.num_replicas < 1:
            raise ValueError(
                f"`num_replicas` of a node must be at least 1, got {self.num_replicas}."
            )


class Work(NamedTuple):
    """Steps, bytes and reductions of an algorithm."""

    num_rounds: int = 0  # messages that wait for each other.
    num_messages: int = 0  # `ppermute`s; two a round if both directions are in use.
    serial_bytes: int = 0  # that go through a link one after another.
    sent_bytes: int = 0  # by the busiest replica.
    reduced_bytes: int = 0  # one after another, in the dtype of the accumulator.

    def __add__(self, other: "Work") -> "Work":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Work of both in sequence, where one replica is the busiest in both."""
        return Work(*map(sum, zip(self, other, strict=True)))


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


class Size(NamedTuple):
    """A buffer, and how it is cut."""

    num_elements: int
    itemsize: int  # bytes of an element as it is, and as it is summed up.
    sum_itemsize: int
    num_chunks: int = 1


Counter = Callable[[Size, int], Work]


class Algorithm(NamedTuple):
    """A program, and what it does."""

    all_reduce: Callable[..., Any]  # as `AllReduce`; "adasum" takes a tree.
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
    """Predicts what an all-reduce sum costs.

    Args:
      algorithm: a key of `ALGORITHMS`.
      num_bytes: size of the buffer, in bytes.
      num_replicas: of the whole axis; up to 100,000 and more.
      links: between replicas; of "hierarchical", between nodes, for each replica.
      dtype: of the buffer.
      num_chunks: as it is given to the all-reduce; one without ignores it.
      node: of "hierarchical": the replicas of one node.

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
        return _price(_count(counter, size, num_replicas), links)
    assert node is not None
    within, across = count_hierarchical(size, num_replicas, node.num_replicas)
    costs = _price(within, node.links), _price(across, links)
    return Cost(
        work=within + across,
        communication_s=sum(c.communication_s for c in costs),
        computation_s=sum(c.computation_s for c in costs),
    )


def choose(num_bytes: int, num_replicas: int, links: Links) -> str:
    """Picks the all-reduce that takes the least time.

    Where `links` were measured with as many replicas, from all that were measured, by
    interpolation; "psum" then stays unless another one is a fifth faster. Elsewhere
    from ring, halving_doubling and butterfly, by `predict`.

    Args:
      num_bytes: size of the buffer, in bytes.
      num_replicas: of the axis.
      links: between the replicas, as given or from `fit_links`.

    Returns:
      A key of `ALGORITHMS`, or "psum", "shared_memory" or "hierarchical".
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
    """Returns into how many chunks an algorithm cuts float32 by itself, here."""
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


def count_hierarchical(
    size: Size, num_replicas: int, replicas_per_node: int
) -> tuple[Work, Work]:
    """Returns what `hierarchical_all_reduce` does within nodes, and across them."""
    part = math.ceil(size.num_elements / replicas_per_node)
    within = _count(_count_ring, size._replace(num_chunks=1), replicas_per_node)
    across = Size(part, size.sum_itemsize, size.sum_itemsize, size.num_chunks)
    num_nodes = num_replicas // replicas_per_node
    return within, _count(_count_halving_doubling, across, num_nodes)


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


def _count(counter: Counter, size: Size, num_replicas: int) -> Work:
    is_trivial = num_replicas == 1 or size.num_elements == 0
    return Work() if is_trivial else counter(size, num_replicas)


def _price(work: Work, links: Links) -> Cost:
    return Cost(
        work=work,
        communication_s=work.num_rounds * links.latency_s
        + work.serial_bytes / links.bandwidth_bytes_per_s,
        computation_s=work.reduced_bytes * links.compute_s_per_byte,
    )


def _count_ring(size: Size, n: int, *, num_lanes: int = 1) -> Work:
    elements, itemsize, sum_itemsize, num_chunks = size
    num_chunks = min(num_chunks, math.ceil(elements / (n * num_lanes)))
    width = math.ceil(elements / (n * num_lanes * num_chunks))
    num_rounds = 2 * (n - 1) * num_chunks
    # The first round sends what was not summed yet, the gather what no longer is.
    sent = num_chunks * width * (n * itemsize + (n - 2) * sum_itemsize)
    return Work(
        num_rounds=num_rounds,
        num_messages=num_rounds * num_lanes,
        serial_bytes=sent,
        sent_bytes=sent * num_lanes,
        reduced_bytes=num_chunks * width * num_lanes * (n - 1) * sum_itemsize,
    )


def _count_halving_doubling(size: Size, n: int) -> Work:
    elements, itemsize, sum_itemsize, num_chunks = size
    num_chunks = min(num_chunks, elements)
    team, fold = _count_folds(size, n)
    first_itemsize = itemsize if team == n else sum_itemsize
    width = math.ceil(elements / (team * num_chunks))  # of a part of a chunk.
    halves = width * team // 2 * first_itemsize + width * (team // 2 - 1) * sum_itemsize
    num_rounds = 2 * num_chunks * (team.bit_length() - 1)
    sent = num_chunks * (halves + width * (team - 1) * itemsize)
    reduced = num_chunks * width * (team - 1) * sum_itemsize
    return fold + Work(num_rounds, num_rounds, sent, sent, reduced)


def _count_butterfly(size: Size, n: int) -> Work:
    num_chunks = min(size.num_chunks, size.num_elements)
    width = math.ceil(size.num_elements / num_chunks)
    team, fold = _count_folds(size._replace(num_elements=width), n)
    first_itemsize = size.itemsize if team == n else size.sum_itemsize
    num_rounds = team.bit_length() - 1
    sent = width * (first_itemsize + (num_rounds - 1) * size.sum_itemsize)
    reduced = num_rounds * width * size.sum_itemsize
    chunk = fold + Work(num_rounds, num_rounds, sent, sent, reduced)
    return Work(*(num_chunks * value for value in chunk))


def _count_folds(size: Size, n: int) -> tuple[int, Work]:
    """Returns the size of the team, and what the folds do; a host is the busiest."""
    team = 1 << (n.bit_length() - 1)
    num_bytes = size.num_elements * size.itemsize
    reduced = size.num_elements * size.sum_itemsize
    return team, Work() if team == n else Work(2, 2, 2 * num_bytes, num_bytes, reduced)


def _count_star(size: Size, n: int) -> Work:
    num_bytes = size.num_elements * size.itemsize
    num_rounds = 2 * (n - 1)
    return Work(
        num_rounds=num_rounds,
        num_messages=num_rounds,
        serial_bytes=num_rounds * num_bytes,
        sent_bytes=(n - 1) * num_bytes,
        reduced_bytes=(n - 1) * size.num_elements * size.sum_itemsize,
    )


def _count_tree(size: Size, n: int) -> Work:
    elements, itemsize, sum_itemsize, _ = size
    depth = (n - 1).bit_length()
    # Of the ranks that hear from as many children the lowest has the most to serve.
    sent = [depth * itemsize, itemsize]  # by the root; by a leaf.
    for k in range(1, depth):
        children = sum((1 << k) + (1 << i) < n for i in range(k))
        sent.append(sum_itemsize + children * itemsize)
    return Work(
        num_rounds=2 * depth,
        num_messages=2 * depth,
        serial_bytes=elements * ((depth + 1) * itemsize + (depth - 1) * sum_itemsize),
        sent_bytes=elements * max(sent),
        reduced_bytes=depth * elements * sum_itemsize,
    )


def _count_chain(size: Size, n: int) -> Work:
    elements, itemsize, sum_itemsize, num_chunks = size
    num_chunks = min(num_chunks, elements)
    num_rounds = n - 2 + num_chunks
    width = math.ceil(elements / num_chunks)
    serial = num_rounds * width * (itemsize + sum_itemsize)
    return Work(
        num_rounds=2 * num_rounds,
        num_messages=2 * num_rounds,
        serial_bytes=serial,
        # Of two, each is an end: one sends the sums, the other the result.
        sent_bytes=serial if n > 2 else num_rounds * width * sum_itemsize,
        reduced_bytes=num_rounds * width * sum_itemsize,
    )


def _count_adasum(size: Size, n: int) -> Work:
    num_rounds = n.bit_length() - 1
    sent = num_rounds * size.num_elements * size.itemsize
    # Three dot products and their combination.
    reduced = 4 * num_rounds * size.num_elements * size.sum_itemsize
    return Work(num_rounds, num_rounds, sent, sent, reduced)


ALGORITHMS: Mapping[str, Algorithm] = {
    "ring": Algorithm(ring_all_reduce, _count_ring),
    "bidirectional_ring": Algorithm(
        functools.partial(ring_all_reduce, bidirectional=True),
        functools.partial(_count_ring, num_lanes=2),
    ),
    "halving_doubling": Algorithm(halving_doubling_all_reduce, _count_halving_doubling),
    "butterfly": Algorithm(butterfly_all_reduce, _count_butterfly),
    "star": Algorithm(reduce_broadcast_all_reduce, _count_star),
    "tree": Algorithm(
        functools.partial(reduce_broadcast_all_reduce, pattern="tree"), _count_tree
    ),
    "chain": Algorithm(
        functools.partial(reduce_broadcast_all_reduce, pattern="chain"), _count_chain
    ),
    "hierarchical": Algorithm(hierarchical_all_reduce, None),
    "adasum": Algorithm(adasum, _count_adasum),
}
