"""Algorithms: ring and halving-doubling over links, and what else is made of pieces.

Every element is summed on one rank, so all ranks get the same bits. Inputs and results
travel in their own dtype, and partial results in the dtype in which they are summed.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jdp.collectives import base
from jdp.collectives.base import Op
from jdp.collectives.host import arithmetic
from jdp.collectives.host.strip import Strip
from jdp.collectives.host.transfer import Transfer

# Bytes that are sent or summed at once: what has come is summed while the kernel moves
# the rest. On 2 cores, 12.7 MB take 12.3, 8.4 and 6.5 ms with 64 KiB, 256 KiB and 1
# MiB, and 1 MiB takes 0.51, 0.22 and 0.27 ms.
PIECE_BYTES = 256 << 10
# Up to here, halving-doubling: it has fewer rounds, and a ring more pieces under way.
_MOST_HALVED_BYTES = 256 << 10


class Reduction:
    """Arrays that are reduced in place, and their partial results.

    Attributes:
      given: the inputs, and the results once they are finished.
      partial: partial results: `given` itself, or, for 16-bit floats, float32.
    """

    def __init__(self, arrays: Sequence[np.ndarray], op: Op, count: int):
        """Begins with the inputs of this rank.

        Args:
          arrays: flat arrays of one dtype.
          op: see `HostAllReduce`.
          count: number of ranks.
        """
        self.given = self.partial = Strip(arrays)
        dtype = base.accumulator(self.given.dtype, op)
        self._wide = None
        if dtype != self.given.dtype:
            self._wide = np.concatenate([x.astype(dtype) for x in arrays])
            self.partial = Strip([self._wide])
        self._op: Op = op
        self._count = count
        step = max(1, PIECE_BYTES // dtype.itemsize)
        self._come = np.empty(min(step, self.given.size), dtype)
        self._come_given = self._come
        if dtype != self.given.dtype:
            self._come_given = np.empty(self._come.size, self.given.dtype)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cuts a range of elements into ranges that are moved at once."""
        for first in range(start, stop, max(1, self._come.size)):
            yield first, min(stop, first + self._come.size)

    def receive_and_add(
        self,
        transfer: Transfer,
        rank: int,
        piece: tuple[int, int],
        then: Callable[[], None] | None,
        *,
        is_input: bool,
    ) -> None:
        """Receives a piece, and reduces the partial results here with it."""
        start, stop = piece
        come = (self._come_given if is_input else self._come)[: stop - start]

        def add() -> None:
            at = 0
            for x in self.partial.views(start, stop):
                other = come[at : at + x.size]
                arithmetic.reduce_pair(other, x, self._op, out=x)
                at += x.size
            if then is not None:
                then()

        transfer.receive(rank, come, add)

    def finish(self, start: int, stop: int) -> None:
        """Makes results of the partial results of all ranks."""
        if self._op == "mean":
            for x in self.partial.views(start, stop):
                arithmetic.divide(x, self._count)
        if self._wide is not None:
            for x in self.given.views(start, stop):
                x[...] = self._wide[start : start + x.size]
                start += x.size


def all_reduce(
    transfer: Transfer, arrays: Sequence[np.ndarray], op: Op, rank: int, count: int
) -> None:
    """Replaces arrays by their reductions over all ranks.

    Args:
      transfer: the collective, with links among all ranks.
      arrays: flat, contiguous and writeable, of one dtype.
      op: see `HostAllReduce`.
      rank: rank of this process.
      count: number of ranks.
    """
    if count == 1:
        return
    reduction = Reduction(arrays, op, count)
    num_bytes = reduction.given.size * reduction.given.dtype.itemsize
    if count > 2 and num_bytes <= _MOST_HALVED_BYTES:
        halve_and_double(transfer, reduction, rank, count)
    else:
        go_round(transfer, reduction, rank, count)


def go_round(transfer: Transfer, reduction: Reduction, rank: int, count: int) -> None:
    """Reduces in a ring: n - 1 rounds reduce and scatter, as many gather.

    Each rank sends 2 (n - 1) / n of the bytes (Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009).
    """
    after, before = (rank + 1) % count, (rank - 1) % count
    given, partial = reduction.given, reduction.partial
    parts = given.cut(count)

    def send(strip: Strip, piece: tuple[int, int]) -> None:
        for x in strip.views(*piece):
            transfer.send(after, x)

    def finish(piece: tuple[int, int]) -> None:
        reduction.finish(*piece)
        send(given, piece)

    for piece in reduction.pieces(*parts[rank]):
        send(given, piece)
    for i in range(count - 1):
        is_last = i == count - 2
        for piece in reduction.pieces(*parts[(rank - i - 1) % count]):
            then = _bound(finish, piece) if is_last else _bound(send, partial, piece)
            reduction.receive_and_add(transfer, before, piece, then, is_input=i == 0)
    for i in range(count - 1):
        for piece in reduction.pieces(*parts[(rank - i) % count]):
            then = _bound(send, given, piece) if i < count - 2 else None
            _receive(transfer, before, given.views(*piece), then)
    transfer.run()


def halve_and_double(
    transfer: Transfer, reduction: Reduction, rank: int, count: int
) -> None:
    """Reduces by halving and doubling, in 2 log2(n) rounds.

    Ranks beyond the largest power of two first give their inputs to another rank, and
    get its results in the end (Thakur, Rabenseifner and Gropp, "Optimization of
    collective communication operations in MPICH", 2005).
    """
    given, partial = reduction.given, reduction.partial
    power = 1 << (count.bit_length() - 1)
    whole: tuple[int, int] = (0, given.size)
    if rank >= power:
        _send_all(transfer, rank - power, given.views(*whole))
        _receive(transfer, rank - power, given.views(*whole), None)
        transfer.run()
        return
    extra = rank + power if rank + power < count else None
    if extra is not None:
        for piece in reduction.pieces(*whole):
            reduction.receive_and_add(transfer, extra, piece, None, is_input=True)
        transfer.run()
    start, stop = whole
    held: list[tuple[int, int]] = [whole]
    distance = power // 2
    while distance:
        other = rank ^ distance
        is_first = distance == power // 2
        middle = start + (stop - start + 1) // 2
        keep, leave = (start, middle), (middle, stop)
        if rank & distance:
            keep, leave = leave, keep
        strip = given if is_first and extra is None else partial
        _send_all(transfer, other, strip.views(*leave))
        is_input = is_first and other + power >= count
        for piece in reduction.pieces(*keep):
            reduction.receive_and_add(transfer, other, piece, None, is_input=is_input)
        transfer.run()
        start, stop = keep
        held.append(keep)
        distance //= 2
    reduction.finish(start, stop)
    distance = 1
    while distance < power:
        other = rank ^ distance
        own, outer = held.pop(), held[-1]
        _send_all(transfer, other, given.views(*own))
        theirs = (own[1], outer[1]) if own[0] == outer[0] else (outer[0], own[0])
        _receive(transfer, other, given.views(*theirs), None)
        transfer.run()
        distance *= 2
    if extra is not None:
        _send_all(transfer, extra, given.views(*whole))
        transfer.run()


def reduce_scatter(
    transfer: Transfer,
    rows: Sequence[np.ndarray],
    op: Op,
    rank: int,
    outs: Sequence[np.ndarray],
) -> None:
    """Reduces row `rank` of each array, in the order of the ranks.

    Args:
      transfer: see `all_reduce`.
      rows: arrays of one dtype, shape (n, k) each.
      op: see `HostAllReduce`.
      rank: rank of this process.
      outs: shape (k,) each, dtype of `rows` or of their sum.
    """
    count = len(rows[0])
    come = [[np.empty_like(x[0]) for x in rows] for _ in range(count)]
    come[rank] = [x[rank] for x in rows]
    for i in range(1, count):
        to, source = (rank + i) % count, (rank - i) % count
        _send_all(transfer, to, [x[to] for x in rows])
        _receive(transfer, source, come[source], None)
    transfer.run()
    for k, out in enumerate(outs):
        arithmetic.reduce([each[k] for each in come], op, out=out)


def all_gather(
    transfer: Transfer,
    parts: Sequence[np.ndarray],
    rank: int,
    outs: Sequence[np.ndarray],
) -> None:
    """Fills row r of each array with the part of rank r.

    Args:
      transfer: see `all_reduce`.
      parts: arrays of one dtype, shape (k,) each.
      rank: rank of this process.
      outs: shape (n, k) each.
    """
    count = len(outs[0])
    for i in range(1, count):
        source = (rank - i) % count
        _send_all(transfer, (rank + i) % count, parts)
        _receive(transfer, source, [out[source] for out in outs], None)
    for part, out in zip(parts, outs, strict=True):
        out[rank] = part
    transfer.run()


def broadcast(
    transfer: Transfer, array: np.ndarray, root: int, rank: int, count: int
) -> None:
    """Replaces a flat array by the array of `root`, along a chain, piece by piece."""
    if count == 1:
        return
    place = (rank - root) % count
    before, after = (rank - 1) % count, (rank + 1) % count
    is_last = place == count - 1
    step = max(1, PIECE_BYTES // array.itemsize)
    for start in range(0, array.size, step):
        piece = array[start : start + step]
        if place == 0:
            transfer.send(after, piece)
        else:
            then = None if is_last else _bound(transfer.send, after, piece)
            transfer.receive(before, piece, then)
    transfer.run()


def _bound(function: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: function(*arguments)


def _send_all(transfer: Transfer, rank: int, arrays: Sequence[np.ndarray]) -> None:
    for x in arrays:
        transfer.send(rank, x)


def _receive(
    transfer: Transfer,
    rank: int,
    arrays: Sequence[np.ndarray],
    then: Callable[[], None] | None,
) -> None:
    """Receives into arrays, and calls `then` when the last of them is full."""
    for i, x in enumerate(arrays):
        transfer.receive(rank, x, then if i == len(arrays) - 1 else None)
