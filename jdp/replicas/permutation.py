"""Permutation: which sample stands at a place of a shuffled epoch?

A Feistel network over a rectangle of at least n cells, with sums in place of exclusive
or (Black and Rogaway, 2002: Ciphers with Arbitrary Finite Domains). A place is found
without the others, so an epoch takes no memory and can be entered anywhere. The
arithmetic is fixed here: the order does not change with a version of NumPy.
"""

import math
from collections.abc import Iterable

import numpy as np

_NUM_ROUNDS = 12
_MASK = (1 << 64) - 1
# The constants of SplitMix64 (Steele, Lea and Flood, 2014).
_STEP = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def find_samples(
    places: np.ndarray, num_samples: int, key: Iterable[int]
) -> np.ndarray:
    """Returns the samples that stand at some places of a shuffled sequence.

    Args:
      places: integers from 0 to num_samples - 1, shape (k,).
      num_samples: number of samples, n.
      key: integers; another key gives another order.

    Returns:
      int64 (k,). Over all n places each sample occurs once.
    """
    if num_samples < 2:
        return np.zeros(len(places), np.int64)
    num_rows = math.isqrt(num_samples - 1) + 1
    num_columns = -(-num_samples // num_rows)
    keys = _round_keys(key)
    found = _permute(places.astype(np.uint64), num_rows, num_columns, keys)
    while len(outside := np.flatnonzero(found >= num_samples)):
        found[outside] = _permute(found[outside], num_rows, num_columns, keys)
    return found.astype(np.int64)


def _permute(
    x: np.ndarray, num_rows: int, num_columns: int, keys: list[int]
) -> np.ndarray:
    """Permutes the cells of a rectangle, numbered row by row."""
    row, column = np.divmod(x, np.uint64(num_columns))
    for i, key in enumerate(keys):
        if i % 2:
            row = (row + _mix(column, key) % num_rows) % num_rows
        else:
            column = (column + _mix(row, key) % num_columns) % num_columns
    return row * np.uint64(num_columns) + column


def _mix(x: np.ndarray, key: int) -> np.ndarray:
    """Returns 64 bits that look random, for each element."""
    x = x + np.uint64(key)  # It wraps around, as each product does.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FACTORS[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return x ^ (x >> np.uint64(31))


def _round_keys(key: Iterable[int]) -> list[int]:
    state = 0
    for number in key:
        words = np.array([(state + number) & _MASK], np.uint64)
        state = int(_mix(words, _STEP)[0])
    counters = np.array(
        [(state + i * _STEP) & _MASK for i in range(_NUM_ROUNDS)], np.uint64
    )
    return [int(x) for x in _mix(counters, _STEP)]
