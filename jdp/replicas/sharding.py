"""Sharding: how do the processes share out a data set of any kind?"""

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, overload

import numpy as np

from jdp import types
from jdp.replicas import shards, stamps
from jdp.replicas.shards import Seat, Shard
from jdp.types import PyTree


class Indexed(Protocol):
    """Data set with a length and indices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


SizedData = int | Indexed


class _World(Protocol):
    """Processes that share a data set."""

    @property
    def process_index(self) -> int: ...

    @property
    def process_count(self) -> int: ...

    @property
    def num_shards(self) -> int | None: ...


class StreamShard:
    """Elements of this process, of an iterable that has no indices.

    As an iterable it yields the elements of this process. All processes read the whole
    iterable, in the same order, and each keeps its own elements.

    Attributes:
      data: the iterable.
      epoch: the epoch; see `set_epoch`.
      position: elements that were used before, and are left out; see `set_epoch`.
    """

    def __init__(self, data: Iterable[Any], seat: Seat, *, drop_last: bool):
        """Use `world.shard`."""
        self.data = data
        self.epoch = self.position = 0
        self._seat = seat
        self._drop_last = drop_last
        self._was_read = False

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Notes the epoch, and chooses where to begin; see `Shard.set_epoch`.

        Args:
          epoch: number of the epoch, from 0. The order is the order of the iterable.
          position: number of elements that all processes together have used already.
        """
        self.epoch = types.as_count(epoch, "epoch", least=0)
        self.position = types.as_count(position, "position", least=0)

    def __iter__(self) -> Iterator[Any]:
        """Yields the elements of this process.

        Raises:
          ValueError: the iterable can be read once, and was read before.
        """
        elements = iter(self.data)
        if elements is self.data and self._was_read:
            elements = self._read_on(elements)
        self._was_read = True
        left = itertools.islice(elements, self.position, None)
        while turn := self._read_turn(left):
            is_whole = len(turn) == self._seat.process_count
            if is_whole or not self._drop_last and self._seat.process_index < len(turn):
                yield turn[self._seat.process_index]

    def _read_turn(self, left: Iterator[Any]) -> list[Any]:
        """Returns the next element of each process, as far as there are some."""
        with stamps.loading():
            return list(itertools.islice(left, self._seat.process_count))

    def _read_on(self, elements: Iterator[Any]) -> Iterator[Any]:
        """Returns the rest of an iterator that was read before, if it has one."""
        rest = list(itertools.islice(elements, 1))
        if self.position or not rest:
            raise ValueError(
                f"`data` is a {type(self.data).__name__}, which can be read once, and "
                "was read before. Make a shard of a new one for each epoch, "
                "`world.shard(make_data(), shuffle=False)`, or pass an iterable that "
                "begins anew whenever it is read, such as a class whose `__iter__` is "
                "a generator."
            )
        return itertools.chain(rest, elements)

    def batches(self, batch_size: int) -> Iterator[PyTree]:
        """Yields the elements of this process, stacked; see `Shard.batches`.

        Args:
          batch_size: samples of all processes together, a multiple of their number.

        Raises:
          ValueError: `batch_size` is not a multiple of the number of processes.
        """
        size = self._seat.local_size(batch_size)
        return self._stacked(iter(self), size)

    def _stacked(self, elements: Iterator[Any], size: int) -> Iterator[PyTree]:
        while batch := list(itertools.islice(elements, size)):
            if len(batch) == size or not self._drop_last:
                yield shards.stack(batch)


@overload
def shard(
    world: _World,
    data: SizedData,
    *,
    shuffle: bool = ...,
    seed: int = ...,
    drop_last: bool = ...,
) -> Shard: ...
@overload
def shard(
    world: _World,
    data: Iterable[Any],
    *,
    shuffle: bool = ...,
    seed: int = ...,
    drop_last: bool = ...,
) -> StreamShard: ...
def shard(
    world: _World,
    data: Any,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> Shard | StreamShard:
    """Returns the samples of a data set that this process reads.

    Every process calls it with the same arguments. No sample belongs to two processes,
    and none is doubled. Each epoch has its own order, which follows from `seed` and the
    number of the epoch alone. Batches of all processes together have the samples that
    one process would read, for any number of processes:

        shard = world.shard((images, labels), seed=1)
        for epoch in range(10):
            shard.set_epoch(epoch)
            for images, labels in shard.batches(64):  # 64 of all processes
                state, metrics = step(state, images, labels)

    Args:
      world: the processes; a method of `World`.
      data: arrays of shape (n, ...) in a dict or tuple, or one array; a data set with a
        length and indices; the number of its samples; or an iterable without indices,
        such as a `tf.data.Dataset`, of which each process keeps every
        `process_count`-th element.
      shuffle: whether each epoch has another order. Must be False for an iterable.
      seed: seed of the orders, at least 0.
      drop_last: whether to leave out the samples at the end of an epoch that do not
        divide among the processes, and batches that are not whole. With False,
        processes may have a sample or a batch more than others; `jdp.join_batches`
        takes these.

    Returns:
      A `Shard`, whose iteration yields indices, for the sampler of a
      `torch.utils.data.DataLoader`; for an iterable a `StreamShard`, whose iteration
      yields elements. Both have `batches` and `set_epoch`.

    Raises:
      TypeError: `data` is something else, such as a frame of pandas, whose indices are
        labels; or an option has the wrong type.
      ValueError: arrays have different lengths, `seed` is negative, or `shuffle` is
        True for an iterable.
    """
    seat = Seat(world.process_index, world.process_count, world.num_shards)
    types.check_flags(shuffle=shuffle, drop_last=drop_last)
    seed = types.as_count(seed, "seed", least=0)
    if isinstance(data, np.integer):
        data = int(data)
    if (
        isinstance(data, int)
        or isinstance(data, Sized)
        and hasattr(data, "__getitem__")
    ):
        return Shard(data, seat, shuffle=shuffle, seed=seed, drop_last=drop_last)
    if not isinstance(data, Iterable):
        raise TypeError(
            "`data` must be a number of samples, arrays, a data set with `len` and "
            f"indices, or an iterable, got {type(data).__name__}."
        )
    if shuffle:
        raise ValueError(
            f"`data` is a {type(data).__name__}, which has no indices, so that its "
            "order cannot be shuffled here. Pass `shuffle=False`, and shuffle the "
            "iterable itself, with the same seed on all processes."
        )
    return StreamShard(data, seat, drop_last=drop_last)
