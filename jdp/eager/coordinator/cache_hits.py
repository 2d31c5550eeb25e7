"""Cache hits: which slots has each rank submitted, and with which tensors?

A tensor is kept as long as the bit it came with: until all ranks have sent the bit, or
the slot is taken back. So no tensor is left for the slot's next owner.
"""

from collections.abc import Iterator, Mapping, Sequence

from jdp.eager.coordinator.cache_slots import SlotTable, bits
from jdp.eager.coordinator.names import Names
from jdp.eager.messages import FromRank, ProtocolError


class Hits:
    """Slots that some ranks have submitted and that are not ready on all ranks."""

    def __init__(self, size: int):
        self.of_rank = [0] * size  # bit sets.
        self._data: list[dict[int, bytes]] = [{} for _ in range(size)]  # by slot.
        self._since_s: dict[int, float] = {}  # by slot, when `waited_s` first found it.
        self._taken = 0  # slots taken since the last `waited_s`, as a bit set.

    def add(self, rank: int, hits: int, data: Sequence[tuple[int, bytes]]) -> None:
        """Adds the slots that a rank has submitted.

        Args:
          rank: the rank.
          hits: bit set of slots.
          data: some slots of `hits` with the rank's tensors.
        """
        self.of_rank[rank] |= hits
        if data:
            self._data[rank].update(data)

    def find_ready(
        self, names: Names, of_set: Mapping[int, int]
    ) -> Iterator[tuple[int, int]]:
        """Finds the slots that all ranks have submitted or joined for.

        Args:
          names: members of the process sets, and ranks that have joined.
          of_set: by process set, its slots as a bit set.

        Yields:
          A process set and its ready slots as a bit set.
        """
        if not any(self.of_rank):
            return
        for set_id, ready in list(of_set.items()):
            members, asked = names.members[set_id], 0
            if not names.joined:
                for rank in members:
                    ready &= self.of_rank[rank]
            else:
                for rank in members:
                    asked |= self.of_rank[rank]
                    if not names.joined >> rank & 1:
                        ready &= self.of_rank[rank]
                ready &= asked  # If all have joined, slots that some had submitted.
            if ready:
                yield set_id, ready

    def take(self, ranks: Sequence[int], ready: int) -> dict[int, list[bytes]]:
        """Takes out slots that are ready.

        Returns:
          By slot, its tensors in the order of `ranks`; only slots for which all ranks
          have sent one.
        """
        self._taken |= ready
        given = []
        for rank in ranks:
            self.of_rank[rank] &= ~ready
            given.append(self._data[rank])
        if not any(given):
            return {}
        taken = {}
        for slot in bits(ready):
            parts = [data.pop(slot, None) for data in given]
            if None not in parts:
                taken[slot] = parts
        return taken  # pyright: ignore[reportReturnType]

    def drop(self, slot: int) -> list[int]:
        """Drops a slot that is taken back; returns the ranks that had submitted it."""
        self._since_s.pop(slot, None)
        ranks = []
        for rank, hits in enumerate(self.of_rank):
            if hits >> slot & 1:
                ranks.append(rank)
                self.of_rank[rank] = hits ^ 1 << slot
                self._data[rank].pop(slot, None)
        return ranks

    def pending(self) -> int:
        """Returns the slots that some rank has submitted, as a bit set."""
        pending = 0
        for hits in self.of_rank:
            pending |= hits
        return pending

    def find_ranks(self, slots: int) -> int:
        """Returns the ranks that have submitted any of `slots`, both as bit sets."""
        return sum(1 << r for r, hits in enumerate(self.of_rank) if hits & slots)

    def waited_s(self, *, now_s: float) -> dict[int, float]:
        """Returns how long each slot has waited, since the first call that found it.

        A slot that was taken since the last call and submitted again starts a new wait,
        so the waits of a name that comes in every step do not add up.

        Args:
          now_s: the time.

        Returns:
          Seconds by slot.
        """
        pending = self.pending()
        still, self._taken = pending & ~self._taken, 0
        self._since_s = {s: t for s, t in self._since_s.items() if still >> s & 1}
        return {s: now_s - self._since_s.setdefault(s, now_s) for s in bits(pending)}

    def slots_with_data(self, rank: int) -> set[int]:
        """Returns the slots for which a tensor of a rank is kept."""
        return set(self._data[rank])


def match_tensors(
    rank: int, hits: int, message: FromRank, slots: SlotTable
) -> list[tuple[int, bytes]]:
    """Returns the tensors of a message by slot, without slots that were taken back.

    Args:
      rank: sender of the message.
      hits: its bit set of slots, as an integer.
      message: carries one tensor per bit.
      slots: the names that the slots stand for.

    Raises:
      ProtocolError: a tensor has no slot, or another size than its slot.
    """
    if message.requests or len(message.data) != hits.bit_count():
        raise ProtocolError(
            f"rank {rank} has sent {len(message.data)} tensors of "
            f"{hits.bit_count()} slots"
        )
    matched = []
    for slot, tensor in zip(bits(hits), message.data, strict=True):
        if not slots.live >> slot & 1:
            continue
        cached = slots.get(slot)
        if len(tensor) != cached.carried_bytes:
            raise ProtocolError(
                f"rank {rank} has sent {len(tensor)} bytes of {cached.name!r}"
            )
        matched.append((slot, tensor))
    return matched
