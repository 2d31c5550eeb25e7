"""Slots: what the coordinator lets ranks say by number.

A slot is taken back when a rank says something else of its name, or when another name
needs it. Bits for it may still be on their way then. So what it stood for is kept, and
the slot is not given to another name, until every rank has seen that it was taken.
"""

import collections
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jdp.eager.coordinator import fusion
from jdp.eager.coordinator.fusion import FusionItem
from jdp.eager.execution import small_tensors
from jdp.eager.messages import decode_spec, num_bytes_of


class Cached(NamedTuple):
    """Request that a slot stands for."""

    process_set: int
    name: str
    spec: bytes
    locals: tuple[tuple[int, ...], ...]  # by member of the set; () if none has any.
    item: FusionItem  # what it is fused by.
    group: str  # what it runs together with, or not at all; "" for itself.
    carried_bytes: int  # of a tensor that may come with the bit; -1: it may not.


def make_cached(
    process_set: int, name: str, spec: bytes, locals_: tuple[tuple[int, ...], ...]
) -> Cached:
    """Returns a request as a slot stands for it; the arguments are those fields."""
    decoded = decode_spec(spec)
    key = fusion.key_of(process_set, decoded)
    item = FusionItem(key, num_bytes_of(decoded, locals_))
    is_small = small_tensors.is_small(decoded, item.num_bytes)
    carried_bytes = item.num_bytes if is_small else -1
    facts = (process_set, name, spec, locals_)
    return Cached(*facts, item, decoded.group, carried_bytes)


class SlotTable:
    """Which slot stands for which name; the least recently used makes room."""

    def __init__(self, capacity: int):
        """Begins empty, with `capacity` slots."""
        self.live = 0  # bits: slots that stand for a name.
        self.of_set: dict[int, int] = {0: 0}  # the same, by process set.
        self.of_group: dict[tuple[int, str], int] = {}  # by set and group.
        self.grouped = 0  # all of these.
        self.capacity = capacity  # of what is given from now on.
        self._slot_of: collections.OrderedDict[tuple[int, str], int] = (
            collections.OrderedDict()  # in the order of use.
        )
        self._cached: dict[int, Cached] = {}
        # What slots stood for, with the number of batches before the one that says so.
        self._retired: dict[int, tuple[Cached, int]] = {}
        self._evicted: list[int] = []  # to be said in the next batch.

    def find(self, set_id: int, name: str) -> int | None:
        """Returns the slot of a name, or None."""
        return self._slot_of.get((set_id, name))

    def get(self, slot: int) -> Cached:
        """Returns what a slot stands for."""
        return self._cached[slot]

    def find_groups(self, slots: int) -> Iterator[tuple[int, str]]:
        """Returns the groups, by process set and name, of which slots are in a set."""
        left = slots & self.grouped
        while left:
            cached = self._cached[(left & -left).bit_length() - 1]
            key = (cached.process_set, cached.group)
            left &= ~self.of_group[key]
            yield key

    def find_retired(self, slot: int) -> Cached | None:
        """Returns what a slot stood for, of which some ranks may still speak."""
        retired = self._retired.get(slot)
        return None if retired is None else retired[0]

    def touch(self, keys: Iterable[tuple[int, str]]) -> None:
        """Notes that names were used, by process set and name."""
        for key in keys:
            self._slot_of.move_to_end(key)

    def take_evicted(self) -> tuple[int, ...]:
        """Returns the slots that were taken back since the last call."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def give(self, cached: Cached, *, num_seen: int) -> int:
        """Gives a name a slot; returns it, or -1 if none is free.

        Args:
          cached: what it is to stand for.
          num_seen: how many batches every rank has got.
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
        for slot, (_, batch) in self._retired.items():
            if num_seen > batch:
                del self._retired[slot]
                return slot
        # Slots are given in order, and those taken back wait in `_retired`.
        taken = len(self._cached) + len(self._retired)
        return taken if taken < self.capacity else -1

    def find_oldest(self, in_use: int) -> int | None:
        """Returns the slot that was used least recently, and is not in the bit set."""
        return next((s for s in self._slot_of.values() if not in_use >> s & 1), None)

    def retire(self, slot: int, *, num_batches: int) -> Cached:
        """Takes a slot back, to be said in the next batch; `num_batches` came before.

        Returns:
          What it stood for.
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
    """Returns the positions of the bits, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
