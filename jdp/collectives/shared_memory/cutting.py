"""Cutting: which elements of arrays go through the shared memory at once."""

from collections.abc import Sequence
from typing import NamedTuple

# One stage reads all buffers on each process, two stages wait twice: on 2 processes
# they cost the same at about 32 KiB (`jdp bench step`'s machine).
ONE_STAGE_BYTES = 32 << 10


# A chunk stays in the cache from its sum until it is written to the shared memory.
_CHUNK_BYTES = 128 << 10


LINE_BYTES = 64  # bytes of a cache line; parts of two processes never share one.


class ElementRun(NamedTuple):
    """Contiguous elements of one array."""

    array: int
    where: slice  # in the array.
    at: slice  # in the piece.


class ReducePiece(NamedTuple):
    """Part of the data that goes through the shared memory at once, to be reduced."""

    size: int  # elements.
    others: list[ElementRun]  # summed by other processes; in one stage, everything.
    own: list[ElementRun]  # summed by this process, in chunks.


class RowsPiece(NamedTuple):
    """Part of the rows of all processes that goes through the memory at once."""

    size: int  # elements.
    runs: list[ElementRun]  # in chunks.


def cut_arrays(
    sizes: Sequence[int], itemsize: int, num_bytes: int, rank: int, count: int
) -> list[ReducePiece]:
    """Cuts concatenated arrays into pieces that fit, and each piece into parts."""
    total = sum(sizes)
    step = max(num_bytes, ONE_STAGE_BYTES) // itemsize
    pieces = []
    for start in range(0, total, step):
        stop = min(total, start + step)
        size = stop - start
        if size * itemsize <= ONE_STAGE_BYTES:
            pieces.append(ReducePiece(size, _runs(sizes, start, 0, size, size), []))
            continue
        a, b = _part(size, itemsize, rank, count)
        others = _runs(sizes, start, 0, a, size)
        others += _runs(sizes, start, b, size, size)
        own = _runs(sizes, start, a, b, _CHUNK_BYTES // itemsize)
        pieces.append(ReducePiece(size, others, own))
    return pieces


def cut_rows(
    sizes: Sequence[int], itemsize: int, num_bytes: int, count: int
) -> list[RowsPiece]:
    """Cuts rows of `count` processes into pieces that fit."""
    total = sum(sizes)
    step = max(1, num_bytes // (count * itemsize))
    chunk = _CHUNK_BYTES // itemsize
    steps = []
    for start in range(0, total, step):
        size = min(step, total - start)
        steps.append(RowsPiece(size, _runs(sizes, start, 0, size, chunk)))
    return steps


def round_up(num_bytes: int) -> int:
    """Rounds up to whole cache lines, so that buffers do not share one."""
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def _runs(
    sizes: Sequence[int], piece: int, a: int, b: int, chunk: int
) -> list[ElementRun]:
    """Returns the runs from `a` to `b` of the piece that begins at `piece`."""
    found, first = [], 0
    for i, size in enumerate(sizes):
        start, stop = max(first, piece + a), min(first + size, piece + b)
        for k in range(start, stop, chunk):
            end = min(k + chunk, stop)
            where, at = slice(k - first, end - first), slice(k - piece, end - piece)
            found.append(ElementRun(i, where, at))
        first += size
    return found


def _part(size: int, itemsize: int, rank: int, count: int) -> tuple[int, int]:
    """Returns the first element, and the end, of the part that `rank` sums."""
    step = LINE_BYTES // itemsize
    ends = [size * p // count // step * step for p in range(count)] + [size]
    return ends[rank], ends[rank + 1]
