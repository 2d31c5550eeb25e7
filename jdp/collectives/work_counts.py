"""Work counts: rounds, messages and bytes of each algorithm as it is built."""

import math
from collections.abc import Callable
from typing import NamedTuple


class Work(NamedTuple):
    """Rounds, bytes and reductions of an algorithm."""

    num_rounds: int = 0  # messages that wait for each other.
    num_messages: int = 0  # `ppermute`s; two per round if both directions are in use.
    serial_bytes: int = 0  # through a link, one after another.
    sent_bytes: int = 0  # by the busiest replica.
    reduced_bytes: int = 0  # in sequence, in the dtype of the accumulator.

    def __add__(self, other: "Work") -> "Work":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Adds work in sequence, where the same replica is the busiest in both."""
        return Work(*map(sum, zip(self, other, strict=True)))


class Size(NamedTuple):
    """Size of a buffer, and how it is cut."""

    num_elements: int
    itemsize: int  # bytes of an element.
    sum_itemsize: int  # bytes of an element in the dtype of the accumulator.
    num_chunks: int = 1


Counter = Callable[[Size, int], Work]


def count(counter: Counter, size: Size, num_replicas: int) -> Work:
    """Returns the work of an algorithm; zero if there is nothing to send."""
    is_trivial = num_replicas == 1 or size.num_elements == 0
    return Work() if is_trivial else counter(size, num_replicas)


def count_hierarchical(
    size: Size, num_replicas: int, replicas_per_node: int
) -> tuple[Work, Work]:
    """Returns the work of `hierarchical_all_reduce` within a node, and across nodes."""
    part = math.ceil(size.num_elements / replicas_per_node)
    within = count(count_ring, size._replace(num_chunks=1), replicas_per_node)
    across = Size(part, size.sum_itemsize, size.sum_itemsize, size.num_chunks)
    num_nodes = num_replicas // replicas_per_node
    return within, count(count_halving_doubling, across, num_nodes)


def count_ring(size: Size, n: int, *, num_lanes: int = 1) -> Work:
    """Counts a ring; two lanes go both ways round."""
    elements, itemsize, sum_itemsize, num_chunks = size
    num_chunks = min(num_chunks, math.ceil(elements / (n * num_lanes)))
    width = math.ceil(elements / (n * num_lanes * num_chunks))
    num_rounds = 2 * (n - 1) * num_chunks
    # The first round sends inputs, and the gather sends results: both in `itemsize`.
    sent = num_chunks * width * (n * itemsize + (n - 2) * sum_itemsize)
    return Work(
        num_rounds=num_rounds,
        num_messages=num_rounds * num_lanes,
        serial_bytes=sent,
        sent_bytes=sent * num_lanes,
        reduced_bytes=num_chunks * width * num_lanes * (n - 1) * sum_itemsize,
    )


def count_halving_doubling(size: Size, n: int) -> Work:
    """Counts recursive halving and doubling, folds included."""
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


def count_butterfly(size: Size, n: int) -> Work:
    """Counts recursive doubling, folds included."""
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
    """Returns the size of the team, and the work of folding; a host is the busiest."""
    team = 1 << (n.bit_length() - 1)
    num_bytes = size.num_elements * size.itemsize
    reduced = size.num_elements * size.sum_itemsize
    return team, Work() if team == n else Work(2, 2, 2 * num_bytes, num_bytes, reduced)


def count_star(size: Size, n: int) -> Work:
    """Counts a reduction to a root and a broadcast from it, peer after peer."""
    num_bytes = size.num_elements * size.itemsize
    num_rounds = 2 * (n - 1)
    return Work(
        num_rounds=num_rounds,
        num_messages=num_rounds,
        serial_bytes=num_rounds * num_bytes,
        sent_bytes=(n - 1) * num_bytes,
        reduced_bytes=(n - 1) * size.num_elements * size.sum_itemsize,
    )


def count_tree(size: Size, n: int) -> Work:
    """Counts a reduction and a broadcast along a binomial tree."""
    elements, itemsize, sum_itemsize, _ = size
    depth = (n - 1).bit_length()
    # Among ranks with equally many children, the lowest serves the most.
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


def count_chain(size: Size, n: int) -> Work:
    """Counts a pipelined reduction and broadcast along a chain."""
    elements, itemsize, sum_itemsize, num_chunks = size
    num_chunks = min(num_chunks, elements)
    num_rounds = n - 2 + num_chunks
    width = math.ceil(elements / num_chunks)
    serial = num_rounds * width * (itemsize + sum_itemsize)
    return Work(
        num_rounds=2 * num_rounds,
        num_messages=2 * num_rounds,
        serial_bytes=serial,
        # With two replicas, one sends the sums and the other the result.
        sent_bytes=serial if n > 2 else num_rounds * width * sum_itemsize,
        reduced_bytes=num_rounds * width * sum_itemsize,
    )


def count_adasum(size: Size, n: int) -> Work:
    """Counts Adasum by recursive doubling."""
    num_rounds = n.bit_length() - 1
    sent = num_rounds * size.num_elements * size.itemsize
    # Three dot products and their combination.
    reduced = 4 * num_rounds * size.num_elements * size.sum_itemsize
    return Work(num_rounds, num_rounds, sent, sent, reduced)
