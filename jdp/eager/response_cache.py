"""Response cache: which request does each slot of the coordinator stand for?"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jdp.eager import checks
from jdp.eager.entries import Entry
from jdp.eager.messages import Batch, ProtocolError, Request, Response

_MAX_WHOLE = 64


class _CachedSlot(NamedTuple):
    process_set: int
    name: str
    spec: bytes
    locals: tuple[tuple[int, ...], ...]  # by member of the set; () if none has one.


class Abbreviated(NamedTuple):
    """Requests of one rank, in the parts of its message."""

    full: list[Request]  # those that are not cached.
    hits: bytes  # bit set of the slots of the others.
    slots: list[int]  # the same, in the order of the requests.
    refused: list[Entry]  # their process set was removed.


class ResponseCache:
    """Negotiated requests by slot; the coordinator decides which ones are cached."""

    def __init__(self):
        self.num_seen = 0  # batches.
        self._slots: dict[int, _CachedSlot] = {}
        self._slot_of: dict[tuple[int, str], int] = {}
        # Responses that came as slots; the same ones come over and over.
        self._whole: dict[tuple[int, ...], Response] = {}

    def abbreviate(
        self, entries: Sequence[Entry], places: Mapping[int, int]
    ) -> Abbreviated:
        """Returns how this rank tells the coordinator about requests.

        Args:
          entries: the requests.
          places: by process set, the position of this rank among its members.
        """
        full, hits, slots, refused = [], 0, [], []
        for entry in entries:
            request = entry.request
            place = places.get(request.process_set)
            slot = None if place is None else self.find(request, place)
            if place is None:
                refused.append(entry)
            elif slot is None:
                full.append(request)
            else:
                hits |= 1 << slot
                slots.append(slot)
        num_bytes = (hits.bit_length() + 7) // 8
        return Abbreviated(full, hits.to_bytes(num_bytes, "little"), slots, refused)

    def find(self, request: Request, place: int) -> int | None:
        """Returns the slot that stands for `request`, or None.

        Args:
          request: a request of this rank.
          place: position of this rank among the members of the process set.
        """
        slot = self._slot_of.get((request.process_set, request.name))
        if slot is None:
            return None
        known = self._slots[slot]
        local = known.locals[place] if known.locals else ()
        is_same = known.spec == request.spec and local == request.local
        return slot if is_same else None

    def apply(self, batch: Batch) -> list[Response]:
        """Applies a batch to the cache; call it once per batch, in order.

        Returns:
          The responses, with the names and specs that `slots` stands for.

        Raises:
          ProtocolError: a response makes no sense, or has an empty slot.
        """
        self.num_seen += 1
        evicted = batch.evicted
        whole = [self._expand(response, evicted) for response in batch.responses]
        if evicted:
            self._whole.clear()
        for slot in evicted:
            gone = self._slots.pop(slot, None)
            if gone is None:
                raise ProtocolError(f"the empty slot {slot} is taken back")
            key = (gone.process_set, gone.name)
            if self._slot_of.get(key) == slot:  # Both slots may go at once.
                del self._slot_of[key]
        return whole

    def _expand(self, response: Response, evicted: Sequence[int]) -> Response:
        if not response.names and not response.error:
            whole = self._whole.get(response.slots)
            if whole is not None and whole.process_set == response.process_set:
                return whole
            return self._recall(response.slots, response.process_set)
        checks.check_response(response)
        if response.error:
            return response
        for i, slot in enumerate(response.slots):
            if slot >= 0:
                locals_ = response.locals[i] if response.locals else ()
                name, set_id = response.names[i], response.process_set
                self._fill(
                    slot, _CachedSlot(set_id, name, response.specs[i], locals_), evicted
                )
        return response

    def _recall(self, slots: tuple[int, ...], set_id: int) -> Response:
        """Returns the response that some slots stand for."""
        known = []
        for slot in slots:
            one = self._slots.get(slot)
            if one is None or one.process_set != set_id:
                raise ProtocolError(f"slot {slot} of process set {set_id} is empty")
            known.append(one)
        locals_ = tuple(each.locals for each in known)
        whole = Response(
            tuple(each.name for each in known),
            tuple(each.spec for each in known),
            set_id,
            locals_ if any(locals_) else (),
            slots,
        )
        checks.check_response(whole)
        if len(self._whole) == _MAX_WHOLE:
            self._whole.clear()
        self._whole[slots] = whole
        return whole

    def _fill(self, slot: int, given: _CachedSlot, evicted: Sequence[int]) -> None:
        """Notes which request a slot stands for; the same one may come again."""
        key = (given.process_set, given.name)
        before = self._slot_of.get(key, slot)
        if self._slots.get(slot, given) != given or (
            # The batch that takes a slot back may give its name another one.
            before != slot and before not in evicted
        ):
            raise ProtocolError(f"slot {slot} is given to {given.name!r}, and is taken")
        self._slots[slot] = given
        self._slot_of[key] = slot
