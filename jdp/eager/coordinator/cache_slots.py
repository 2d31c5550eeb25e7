"""Cache slots: which requests may ranks submit by number?

A slot is taken back when a rank submits another request under its name, or when another
name needs it. Bits for the slot may still be on their way. So its request is kept, and
the slot is not reused, until every rank has seen that it was taken back.
"""

import collections
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jdp.eager.coordinator import fusion
from jdp.eager.coordinator.fusion import FusionItem
from jdp.eager.execution import small_tensors
from jdp.eager.messages import decode_spec


class Cached(NamedTuple):
    """Request that a slot stands for."""

    process_set: int
    name: str
    spec: bytes
    locals: tuple[tuple[int, ...], ...]  # by member of the set; () if none has one.
    item: FusionItem
    group: str  # see `Spec.group`.
    carried_bytes: int  # size of a tensor that may come with the bit; -1: none may.


def make_cached(
    process_set: int, name: str, spec: bytes, locals_: tuple[tuple[int, ...], ...]
) -> Cached:
    """Returns the table's entry for a request; the arguments are its first fields."""
    decoded = decode_spec(spec)
    item = fusion.item_of(process_set, spec, locals_)
    is_small = small_tensors.is_small(decoded, item.num_bytes)
    carried_bytes = item.num_bytes if is_small else -1
    facts = (process_set, name, spec, locals_)
    return Cached(*facts, item, decoded.group, carried_bytes)


class SlotTable:
    """Table of `capacity` slots; the least recently used one makes room."""

    def __init__(self, capacity: int):
        self.live = 0  # bits: slots that stand for a name.
        self.of_set: dict[int, int] = {0: 0}  # the same, by process set.
        self.of_group: dict[tuple[int, str], int] = {}  # by set and group.
        self.grouped = 0  # all of these.
        self.capacity = capacity  # may change; live slots stay.
        self._slot_of: collections.OrderedDict[tuple[int, str], int] = (
            collections.OrderedDict()  # in the order of use.
        )
        self._cached: dict[int, Cached] = {}
        # Requests of slots that were taken back, and the number of the batch that says
        # so: the oldest first. Looking for the first item of a plain dict takes long
        # once many before it were deleted.
        self._retired: collections.OrderedDict[int, tuple[Cached, int]] = (
            collections.OrderedDict()
        )
        self._evicted: list[int] = []  # for the next batch.

    def find(self, set_id: int, name: str) -> int | None:
        """Returns the slot of a name, or None."""
        return self._slot_of.get((set_id, name))

    def get(self, slot: int) -> Cached:
        """Returns the request that a slot stands for."""
        return self._cached[slot]

    def find_groups(self, slots: int) -> Iterator[tuple[int, str]]:
        """Yields the groups, as process set and name, of a bit set of slots."""
        left = slots & self.grouped
        while left:
            cached = self._cached[(left & -left).bit_length() - 1]
            key = (cached.process_set, cached.group)
            left &= ~self.of_group[key]
            yield key

    def find_retired(self, slot: int) -> Cached | None:
        """Returns the former request of a slot whose bit may still be on its way."""
        retired = self._retired.get(slot)
        return None if retired is None else retired[0]

    def touch(self, keys: Iterable[tuple[int, str]]) -> None:
        """Marks names, as process set and name, as recently used."""
        for key in keys:
            self._slot_of.move_to_end(key)

    def take_evicted(self) -> tuple[int, ...]:
        """Returns the slots that were taken back since the last call."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def give(self, cached: Cached, *, num_seen: int) -> int:
        """Assigns a slot to a request; returns it, or -1 if none is free.

        Args:
          cached: the request.
          num_seen: number of batches that every rank has received.
        """
        slot = self._find_free(num_seen)
        if slot >= 0:
            self._cached[slot] = cached
            self._slot_of[cached.process_set, cached.name] = slot
            self.live |= 1 << slot
            self.of_set[cached.process_set] |= 1 << slot
            if cached.group:
                key = (cached.process_set, cached.group)
                self.of_group[key] = self.of_group.get(key, 0) | 1 << slot
                self.grouped |= 1 << slot
        return slot

    def _find_free(self, num_seen: int) -> int:
        if len(self._cached) >= self.capacity:
            return -1
        if self._retired:
            slot, (_, batch) = next(iter(self._retired.items()))
            if num_seen > batch:
                del self._retired[slot]
                return slot
        # New slots are assigned in order; slots that were taken back are in `_retired`.
        taken = len(self._cached) + len(self._retired)
        return taken if taken < self.capacity else -1

    def find_oldest(self, in_use: int) -> int | None:
        """Returns the least recently used slot that is not in the bit set `in_use`."""
        return next((s for s in self._slot_of.values() if not in_use >> s & 1), None)

    def retire(self, slot: int, *, num_batches: int) -> Cached:
        """Takes a slot back.

        Args:
          slot: the slot.
          num_batches: number of batches before the report of it.

        Returns:
          The request that the slot stood for.
        """
        cached = self._cached.pop(slot)
        del self._slot_of[cached.process_set, cached.name]
        self.live ^= 1 << slot
        self.of_set[cached.process_set] ^= 1 << slot
        if cached.group:
            key = (cached.process_set, cached.group)
            self.grouped ^= 1 << slot
            left = self.of_group.pop(key) ^ 1 << slot
            if left:
                self.of_group[key] = left
        self._retired[slot] = (cached, num_batches)
        self._evicted.append(slot)
        return cached


def bits(mask: int) -> Iterator[int]:
    """Yields the positions of the bits, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
