"""Shards: which samples of a data set does this process read, and in which order?

The order of an epoch is one sequence of all samples, the same for any number of
processes. The processes take turns: place k of what is left belongs to process k modulo
their number. So a batch of all processes has the samples that one process would have
read, and a job may go on with another number of processes, anywhere in an epoch. With
`jdp.init(num_shards=)` each process reads its block of a batch instead.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp import types
from jdp.replicas import permutation, stamps
from jdp.trees import tree_paths
from jdp.types import PyTree

_CHUNK = 1 << 14  # indices that are computed together.


class Seat(NamedTuple):
    """Place of a process among those that share a data set."""

    process_index: int
    process_count: int
    # With shards a batch is cut into blocks, so that samples stay in their shard on any
    # number of processes; without, processes take turns.
    num_shards: int | None = None

    def local_size(self, batch_size: int) -> int:
        """Returns the number of samples of this process in a batch of all.

        Raises:
          ValueError: `batch_size` is not a multiple of the number of processes.
        """
        batch_size = types.as_count(batch_size, "batch_size", least=1)
        if batch_size % self.process_count:
            raise ValueError(
                "`batch_size` is the number of samples of all processes together, and "
                f"must be a multiple of their number, {self.process_count}, got "
                f"{batch_size}."
            )
        return batch_size // self.process_count


class Shard:
    """Samples of this process, as `world.shard` returns them; a sampler of torch.

    As an iterable it yields the indices of this process in the current epoch, which is
    what a `torch.utils.data.DataLoader` takes as `sampler=`. `len` is their number.

    Attributes:
      data: the data set, or the number of its samples.
      num_samples: number of samples of the data set.
      epoch: the epoch; see `set_epoch`.
      position: samples of this epoch that were used before; see `set_epoch`.
    """

    def __init__(
        self,
        data: Any,
        seat: Seat,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ):
        """Use `world.shard`."""
        self.data = data
        self.epoch = self.position = 0
        self._seat = seat
        self._drop_last = drop_last
        self._are_arrays, self.num_samples = _inspect(data)
        self._shuffle = shuffle
        self._seed = seed

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Chooses the epoch that is read next, and where to begin in it.

        Iterators and views that exist already are not affected. Every process makes the
        same call. The number of processes may be another one than before.

        Args:
          epoch: number of the epoch, from 0.
          position: number of samples of this epoch that all processes together have
            used already: the batches that were trained on, times their size.

        Raises:
          TypeError: an argument is not an integer.
          ValueError: an argument is negative, or there are not so many samples.
        """
        epoch = types.as_count(epoch, "epoch", least=0)
        position = types.as_count(position, "position", least=0)
        if position > self.num_samples:
            raise ValueError(
                f"`position` must be at most {self.num_samples}, the samples of an "
                f"epoch, got {position}."
            )
        self.epoch, self.position = epoch, position

    def __len__(self) -> int:
        """Returns the number of samples of this process that are left of the epoch."""
        left = self.num_samples - self.position
        if not self._drop_last:
            left += self._seat.process_count - 1 - self._seat.process_index
        return left // self._seat.process_count

    def __iter__(self) -> Iterator[int]:
        """Yields the indices of this process' samples that are left of the epoch."""
        yield from itertools.chain.from_iterable(
            map(np.ndarray.tolist, self._chunks(_CHUNK))
        )

    def indices(self) -> np.ndarray:
        """Returns what iteration yields, int64 (len(self),)."""
        return self._look_up(self.position, np.arange(len(self)), self.epoch)

    def samples(self) -> "ShardSamples":
        """Returns a view of the samples of this process in this epoch.

        It has `len` and takes an index: what `grain.MapDataset.source` and a
        `DataLoader` of torch without a sampler need.

        Raises:
          TypeError: the shard was made of a number.
        """
        if isinstance(self.data, int):
            raise TypeError(
                "There are no samples to view: the shard was made of their number. "
                "Make it of the data set, `world.shard(data)`."
            )
        return ShardSamples(self)

    def num_batches(self, batch_size: int) -> int:
        """Returns the number of batches that are left of the epoch.

        With `drop_last` each process gets as many; otherwise a process without a sample
        in the last batch gets one less.

        Args:
          batch_size: see `batches`.
        """
        self._seat.local_size(batch_size)
        left = self.num_samples - self.position
        return left // batch_size if self._drop_last else -(-left // batch_size)

    def batches(self, batch_size: int) -> Iterator[PyTree]:
        """Yields the batches of this process that are left of the epoch.

        A batch of all processes has the next `batch_size` samples of the epoch. Without
        `drop_last`, the last batch is smaller, and processes may have different numbers
        of its samples, or none: read them through `jdp.join_batches`.

        With `jdp.init(num_shards=)`, process p of n gets block p of n of each batch, so
        that a sample is in the same shard on any number of processes; the last batch
        fills the blocks one after the other.

        Args:
          batch_size: samples of all processes together, a multiple of their number.

        Returns:
          An iterator. A batch is the data set with the chosen rows if that is an array
          or a dict or tuple of arrays; an array of indices if it is a number; otherwise
          the samples, stacked leaf by leaf.

        Raises:
          ValueError: `batch_size` is not a multiple of the number of processes.
        """
        size = self._seat.local_size(batch_size)
        count = self.num_samples - self.position
        last = count // batch_size if self._drop_last else count
        read = self._chunks if self._seat.num_shards is None else self._blocks
        return map(self._gather, itertools.islice(read(size), last))

    def _blocks(self, size: int) -> Iterator[np.ndarray]:
        """Returns the indices of this process' block of each batch of the epoch."""
        epoch, seat = self.epoch, self._seat
        first = self.position + seat.process_index * size
        return (
            self._find(np.arange(i, min(i + size, self.num_samples)), epoch)
            for i in range(first, self.num_samples, size * seat.process_count)
        )

    def _chunks(self, size: int) -> Iterator[np.ndarray]:
        """Returns the indices, `size` at a time, of the epoch as it is now."""
        epoch, position, count = self.epoch, self.position, len(self)
        return (
            self._look_up(position, np.arange(i, min(i + size, count)), epoch)
            for i in range(0, count, size)
        )

    def _look_up(self, position: int, turns: np.ndarray, epoch: int) -> np.ndarray:
        """Returns the indices of the samples of some turns of this process."""
        places = position + self._seat.process_index + turns * self._seat.process_count
        return self._find(places, epoch)

    def _find(self, places: np.ndarray, epoch: int) -> np.ndarray:
        """Returns the indices of the samples at some places of an epoch."""
        if not self._shuffle:
            return places
        return permutation.find_samples(places, self.num_samples, (self._seed, epoch))

    def _gather(self, indices: np.ndarray) -> PyTree:
        with stamps.loading():
            return self._read(indices)

    def _read(self, indices: np.ndarray) -> PyTree:
        if isinstance(self.data, int):
            return indices
        if self._are_arrays:
            return jax.tree.map(lambda x: _take_rows(x, indices), self.data)
        return stack([self.data[i] for i in indices.tolist()])


class ShardSamples(Sequence[Any]):
    """Samples of a process in one epoch, by index; see `Shard.samples`."""

    def __init__(self, shard: Shard):
        """Use `Shard.samples`."""
        self._data = shard.data
        self._are_arrays = shard._are_arrays
        self._look_up, self._count = shard._look_up, len(shard)
        self._start, self._epoch = shard.position, shard.epoch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"There are {self._count} samples, got index {index}.")
        turns = np.array([index % self._count])
        (place,) = self._look_up(self._start, turns, self._epoch).tolist()
        if self._are_arrays:
            return jax.tree.map(lambda x: x[place], self._data)
        return self._data[place]


def _inspect(data: Any) -> tuple[bool, int]:
    """Returns whether `data` consists of arrays, and its number of samples.

    Raises:
      ValueError: arrays differ in their first dimension, or a number is negative.
      TypeError: a leaf is not an array, or has labels for indices; a number is a bool.
    """
    if isinstance(data, int):
        return False, types.as_count(data, "data", least=0)
    if not isinstance(data, Mapping | tuple) and not hasattr(data, "shape"):
        return False, len(data)
    leaves = jax.tree.leaves(data)
    lengths: dict[int, str] = {}
    for path, leaf in zip(tree_paths.leaf_paths(data), leaves, strict=True):
        if not getattr(leaf, "shape", ()):
            raise TypeError(
                f"The leaf `{path}` of `data` is a {type(leaf).__name__}, not an array "
                "with a dimension of samples. Pass arrays, or a list of samples."
            )
        if hasattr(leaf, "iloc"):
            where = f"The leaf `{path}` of `data`" if len(leaves) > 1 else "`data`"
            raise TypeError(
                f"{where} is a {type(leaf).__name__} of pandas or alike, whose indices "
                "are labels, not places. Pass arrays: `series.to_numpy()`, or "
                "`{name: frame[name].to_numpy() for name in frame}`."
            )
        lengths.setdefault(leaf.shape[0], path)
    if len(lengths) != 1:
        found = ", ".join(f"`{path}` {n}" for n, path in lengths.items()) or "no leaf"
        raise ValueError(
            "The arrays of `data` must have the same first dimension, one row per "
            f"sample, got {found}."
        )
    return True, next(iter(lengths))


def _take_rows(x: Any, indices: np.ndarray) -> Any:
    """Returns some rows of an array.

    Data sets of h5py take increasing indices alone, and files are read faster so.
    """
    if isinstance(x, np.ndarray | jax.Array) or not hasattr(x, "dtype"):
        return x[indices]
    order = np.argsort(indices)
    return x[indices[order]][np.argsort(order)]


def stack(samples: list[Any]) -> PyTree:
    """Stacks samples leaf by leaf.

    Raises:
      ValueError: the samples have different shapes.
    """
    return jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *samples)
