"""Response cache: what one rank knows of the coordinator's slots."""

from typing import NamedTuple

from jdp.eager.messages import Batch, Request, Response

_MAX_WHOLE = 64


class _Slot(NamedTuple):
    process_set: int
    name: str
    spec: bytes
    locals: tuple[tuple[int, ...], ...]  # by member of the set; () if none has any.


class ResponseCache:
    """Names that were negotiated, by slot; the coordinator decides what is in it."""

    def __init__(self):
        """Begins with nothing."""
        self.num_seen = 0  # batches.
        self._slots: dict[int, _Slot] = {}
        self._slot_of: dict[tuple[int, str], int] = {}
        # Responses that came as slots alone; the same ones come over and over.
        self._whole: dict[tuple[int, ...], Response] = {}

    def find(self, request: Request, place: int) -> int | None:
        """Returns the slot that says all of `request`, or None.

        Args:
          request: what this rank submits.
          place: of this rank among the members of the process set.
        """
        slot = self._slot_of.get((request.process_set, request.name))
        if slot is None:
            return None
        known = self._slots[slot]
        local = known.locals[place] if known.locals else ()
        is_same = known.spec == request.spec and local == request.local
        return slot if is_same else None

    def apply(self, batch: Batch) -> list[Response]:
        """Takes what the coordinator says; call it once for each batch, in order.

        Returns:
          The responses, with all that is left out of those that are cached.
        """
        self.num_seen += 1
        whole = [self._expand(response) for response in batch.responses]
        if batch.evicted:
            self._whole.clear()
        for slot in batch.evicted:
            gone = self._slots.pop(slot)
            key = (gone.process_set, gone.name)
            if self._slot_of.get(key) == slot:
                del self._slot_of[key]
        return whole

    def _expand(self, response: Response) -> Response:
        if response.error:
            return response
        if not response.names:
            whole = self._whole.get(response.slots)
            if whole is not None:
                return whole
            known = [self._slots[slot] for slot in response.slots]
            locals_ = tuple(each.locals for each in known)
            if len(self._whole) == _MAX_WHOLE:
                self._whole.clear()
            whole = self._whole[response.slots] = Response(
                tuple(each.name for each in known),
                tuple(each.spec for each in known),
                response.process_set,
                locals_ if any(locals_) else (),
                response.slots,
            )
            return whole
        for i, slot in enumerate(response.slots):
            if slot < 0:
                continue
            locals_ = response.locals[i] if response.locals else ()
            name, set_id = response.names[i], response.process_set
            self._slots[slot] = _Slot(set_id, name, response.specs[i], locals_)
            self._slot_of[set_id, name] = slot
        return response
