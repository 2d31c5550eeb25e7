"""Strip: elements that lie in several arrays, addressed as one."""

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

# Smaller arrays are moved together: each costs some microseconds otherwise.
_SMALL_BYTES = 64 << 10
_ALIGNED = 16  # elements: parts begin on cache lines of 64 bytes or less.


class Strip:
    """Flat arrays of one dtype, one after another.

    Attributes:
      dtype: dtype of the arrays.
      size: number of all elements.
    """

    def __init__(self, arrays: Sequence[np.ndarray]):
        """Refers to `arrays`, shape (n,) each; at least one."""
        self._arrays = arrays
        self._starts = [0, *itertools.accumulate(x.size for x in arrays)]
        self.dtype = arrays[0].dtype
        self.size = self._starts[-1]

    def views(self, start: int, stop: int) -> list[np.ndarray]:
        """Returns views of the elements from `start` to `stop`, in their order."""
        found = []
        i = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            x, first = self._arrays[i], self._starts[i]
            end = min(stop, first + x.size)
            if end > start:
                found.append(x[start - first : end - first])
            start, i = end, i + 1
        return found

    def cut(self, count: int) -> list[tuple[int, int]]:
        """Cuts the elements into `count` ranges, as equal as whole lines allow."""
        lines = -(-self.size // _ALIGNED)
        bounds = [
            min(self.size, lines * i // count * _ALIGNED) for i in range(count + 1)
        ]
        return list(itertools.pairwise(bounds))


class Packed:
    """Arrays of which the small ones are moved together.

    Attributes:
      arrays: the large arrays, and a copy of all small ones.
    """

    def __init__(self, arrays: Sequence[np.ndarray]):
        """Packs flat arrays of one dtype."""
        small = [x for x in arrays if x.nbytes < _SMALL_BYTES]
        self._small = small if len(small) > 1 else []
        self.arrays = list(arrays)
        if self._small:
            self.arrays = [x for x in arrays if x.nbytes >= _SMALL_BYTES]
            self.arrays.append(np.concatenate(small))

    def unpack(self) -> None:
        """Copies what became of the small arrays back."""
        start = 0
        for x in self._small:
            x[...] = self.arrays[-1][start : start + x.size]
            start += x.size
