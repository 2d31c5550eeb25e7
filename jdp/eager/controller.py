"""Controller: the coordinator, which knows what is ready everywhere and orders it.

Pure: it has no thread, socket or clock. Ranks may submit names in any order; the
coordinator says to all in one order what runs, so that nobody waits in a collective
that others have not begun. What was negotiated once gets a slot of the cache, by its
name and everything that was said of it. A rank that submits it again sends the number
of the slot, as a bit; the bit sets of all ranks, combined by AND, are what is ready.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from jdp.eager import carried, fusion, groups, mismatch
from jdp.eager.fusion import Item
from jdp.eager.groups import Groups, Ready
from jdp.eager.messages import (
    UNNAMED,
    Batch,
    FromRank,
    Request,
    Response,
    decode_spec,
)
from jdp.eager.slots import Cached, SlotTable, bits

_NOT_WITH_JOIN = ("all_gather", "broadcast", "all_to_all", "reduce_scatter", "submit")
_NEVER_CACHED = ("barrier", "add_process_set", "remove_process_set")
_MAX_WARM = 64  # ready sets whose responses are kept.


class ProtocolError(Exception):
    """A rank said what it must not; the message names it."""


class Stall(NamedTuple):
    """A name that some ranks have submitted, and others not; or a part of a group."""

    process_set: int
    name: str
    missing: tuple[int, ...]
    waited_s: float


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator goes by.

    Attributes:
      fusion_bytes: most bytes of operations that run as one; 0: none do.
      cache_capacity: slots of the response cache; 0: nothing is cached.
      fuse_groups: whether a group may run together with what is not in it.
    """

    fusion_bytes: int = 128 << 20
    cache_capacity: int = 1024
    fuse_groups: bool = True


class _Entry:
    """A name that is not ready everywhere."""

    __slots__ = ("first", "spec", "arrived", "odd", "locals", "since_s")

    def __init__(self, first: int, spec: bytes, now_s: float):
        self.first = first  # the rank that came first.
        self.spec = spec
        self.arrived = 0  # a bit for each rank.
        self.odd: dict[int, bytes] = {}  # by rank, specs that differ from the first.
        self.locals: dict[int, tuple[int, ...]] = {}
        self.since_s = now_s


class _Warm(NamedTuple):
    """What was said when just these slots were ready."""

    keys: list[tuple[int, str]]  # process set and name.
    responses: tuple[Response, ...]


class Coordinator:
    """What rank 0 knows of all ranks, and decides."""

    def __init__(self, size: int, options: Options):
        """Begins with all ranks in process set 0."""
        self.size = size
        self.options = options
        self.num_batches = 0  # sent to all ranks.
        self._members: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._full: dict[int, int] = {0: (1 << size) - 1}
        self._tables: dict[int, dict[str, _Entry]] = {0: {}}
        self._ready: list[tuple[int, str]] = []
        self._groups = Groups()
        self._joined = 0  # a bit for each rank.
        self._last_joined = -1
        self._stop = ""
        self._is_asked = False  # to stop.
        self._seen = [0] * size
        self._slots = SlotTable(options.cache_capacity)
        self._hits = [0] * size  # bits: submitted, and not ready everywhere.
        self._hit_since_s: dict[int, float] = {}
        self._data: list[dict[int, bytes]] = [{} for _ in range(size)]  # by slot.
        self._warm: dict[tuple[int, int], _Warm] = {}  # by process set and slots.

    def add_process_set(self, set_id: int, ranks: Sequence[int]) -> None:
        """Lets `ranks`, ascending, have operations of their own."""
        assert set_id not in self._members
        self._members[set_id] = tuple(ranks)
        self._full[set_id] = sum(1 << rank for rank in ranks)
        self._tables[set_id] = {}
        self._slots.of_set[set_id] = 0

    def _add_free_set(self, ranks: Sequence[int]) -> int:
        set_id = next(i for i in itertools.count() if i not in self._members)
        self.add_process_set(set_id, ranks)
        return set_id

    def _remove_process_set(self, set_id: int) -> None:
        """Forgets a set; its number may become that of another one."""
        for slot in bits(self._slots.of_set[set_id]):
            self._retire(slot)
        for known in (self._members, self._full, self._tables, self._slots.of_set):
            del known[set_id]
        self._groups.forget(set_id)

    def receive(self, rank: int, message: FromRank, *, now_s: float) -> None:
        """Takes what one rank says.

        Raises:
          ProtocolError: it submits a name twice, or for a set it is not in, or a slot
            that does not exist.
        """
        self._seen[rank] = message.seen
        hits = int.from_bytes(message.hits, "little")
        if hits:
            self._receive_hits(rank, hits, now_s)
        if message.data:
            self._data[rank].update(zip(bits(hits), message.data, strict=True))
        for request in message.requests:
            self._add(rank, request, now_s)
        if message.joined and not self._joined >> rank & 1:
            self._join(rank)
        if message.failure:
            self.stop(message.failure)
        if message.leaves and not self._stop:
            self._stop = f"rank {rank} has shut the engine down"
            self._is_asked = True

    def tune(self, *, fusion_bytes: int, cache_enabled: bool) -> None:
        """Goes by other options from the next batch on."""
        self.options = msgspec.structs.replace(self.options, fusion_bytes=fusion_bytes)
        self._slots.capacity = self.options.cache_capacity if cache_enabled else 0
        if not cache_enabled:
            for slot in bits(self._slots.live & ~self._pending()):
                self._retire(slot)
        self._warm.clear()

    def stop(self, why: str) -> None:
        """Ends the engine on all ranks with the next batch; the first reason counts."""
        self._stop = self._stop or why

    def _receive_hits(self, rank: int, hits: int, now_s: float) -> None:
        if hits & self._hits[rank]:
            slot = next(bits(hits & self._hits[rank]))
            raise ProtocolError(f"rank {rank} has submitted slot {slot} twice")
        for slot in bits(hits & ~self._slots.live):
            # It was taken back while the bit was on its way.
            cached = self._slots.find_retired(slot)
            if cached is None:
                raise ProtocolError(f"rank {rank} has submitted the empty slot {slot}")
            self._add(rank, self._request_of(cached, rank), now_s)
            hits ^= 1 << slot
        self._hits[rank] |= hits

    def _request_of(self, cached: Cached, rank: int) -> Request:
        local: tuple[int, ...] = ()
        if cached.locals and cached.process_set in self._members:
            local = cached.locals[self._members[cached.process_set].index(rank)]
        return Request(cached.name, cached.spec, cached.process_set, local)

    def _add(self, rank: int, request: Request, now_s: float) -> None:
        """Notes that a name is ready on one rank."""
        name, spec, set_id = request.name, request.spec, request.process_set
        table = self._tables.get(set_id)
        if table is None or not self._full[set_id] >> rank & 1:
            raise ProtocolError(f"rank {rank} is not in process set {set_id}")
        slot = self._slots.find(set_id, name)
        if slot is not None:
            self._take_back(slot, now_s)
        entry = table.get(name)
        if entry is None:
            entry = table[name] = _Entry(rank, spec, now_s)
        elif entry.spec != spec:
            entry.odd[rank] = spec
        bit = 1 << rank
        if entry.arrived & bit:
            raise ProtocolError(f"rank {rank} has submitted {name!r} twice")
        entry.arrived |= bit
        if request.local:
            entry.locals[rank] = request.local
        if entry.arrived | self._joined & self._full[set_id] == self._full[set_id]:
            self._ready.append((set_id, name))

    def _join(self, rank: int) -> None:
        self._joined |= 1 << rank
        self._last_joined = rank
        for set_id, table in self._tables.items():
            full = self._full[set_id]
            if not full >> rank & 1:
                continue
            joined = self._joined & full
            waiting = {name for set_, name in self._ready if set_ == set_id}
            for name, entry in table.items():
                if entry.arrived | joined == full and name not in waiting:
                    self._ready.append((set_id, name))

    def decide(self, *, now_s: float) -> Batch | None:
        """Returns what all ranks do next, or None if there is nothing."""
        responses: list[Response] = []
        for set_id, slots in self._take_hits():
            responses += self._respond_to_hits(set_id, slots, now_s)
        data = ()
        if responses and any(self._data):
            data = tuple([self._reduce_data(response) for response in responses])
        if self._ready:
            responses += self._respond_to_all(self._take_ready(), now_s)
        last_joined = -1
        if self._joined == self._full[0]:
            last_joined, self._joined = self._last_joined, 0
        evicted = self._slots.take_evicted()
        if not (responses or evicted or last_joined >= 0 or self._stop):
            return None
        batch = Batch(
            tuple(responses),
            data if any(data) else (),
            evicted,
            last_joined,
            self._stop,
            self._is_asked,
        )
        self.num_batches += 1
        return batch

    def _take_hits(self) -> Iterator[tuple[int, int]]:
        """Takes the slots whose bits all ranks have sent, as a bit set by set."""
        for set_id, slots in self._slots.of_set.items():
            if self._full[set_id] & ~self._joined == 0:
                continue
            ready = slots
            for rank in self._members[set_id]:
                if not self._joined >> rank & 1:
                    ready &= self._hits[rank]
            if ready:
                for rank in self._members[set_id]:
                    self._hits[rank] &= ~ready
                yield set_id, ready

    def _respond_to_hits(
        self, set_id: int, slots: int, now_s: float
    ) -> Sequence[Response]:
        """Makes the responses of slots; the same ones come over and over."""
        is_plain = not self._joined and not self._groups.held
        warm = self._warm.get((set_id, slots)) if is_plain else None
        if warm is not None:
            self._slots.touch(warm.keys)
            return warm.responses
        numbers = list(bits(slots))
        cached = [self._slots.get(slot) for slot in numbers]
        keys = [(set_id, each.name) for each in cached]
        self._slots.touch(keys)
        if is_plain and not any([each.is_grouped for each in cached]):
            items = [each.item for each in cached]
            responses = [
                Response((), (), set_id, (), tuple([numbers[i] for i in together]))
                for together in fusion.fuse(items, self.options.fusion_bytes)
            ]
        else:
            ready = []
            for slot, each in zip(numbers, cached, strict=True):
                error = self._why_not_joined(set_id, each.name, each.spec)
                ready.append(Ready(*each[:4], slot, error))
            responses = self._respond_to_all(ready, now_s)
        if is_plain and not self._groups.held:
            if len(self._warm) == _MAX_WARM:
                self._warm.clear()
            self._warm[set_id, slots] = _Warm(keys, tuple(responses))
        return responses

    def _reduce_data(self, response: Response) -> bytes:
        """Reduces the tensors of a response, where all ranks have sent theirs."""
        members = self._members[response.process_set]
        given = [
            [self._data[rank].pop(slot, None) for slot in response.slots]
            for rank in members
        ]
        if response.error or any(part is None for parts in given for part in parts):
            return b""
        spec = decode_spec(self._slots.get(response.slots[0]).spec)
        return carried.reduce(spec, [b"".join(parts) for parts in given])  # pyright: ignore

    def _respond_to_all(self, ready: Iterable[Ready], now_s: float) -> list[Response]:
        complete = self._groups.complete(ready, now_s=now_s)
        responses = [
            Response((r.name,), (r.spec,), r.process_set, error=r.error)
            for r in complete
            if r.error
        ]
        together = groups.fuse(
            [r for r in complete if not r.error],
            fusion_bytes=self.options.fusion_bytes,
            fuse_groups=self.options.fuse_groups,
        )
        return responses + [self._respond(same) for same in together]

    def _take_ready(self) -> Iterator[Ready]:
        """Takes the names that every rank has submitted; checks them."""
        for set_id, name in self._ready:
            if set_id not in self._tables:
                continue  # The set was removed just now.
            entry = self._tables[set_id].pop(name)
            error = self._why_not_joined(set_id, name, entry.spec)
            if entry.odd:
                specs = {entry.first: entry.spec} | entry.odd
                decoded = {rank: decode_spec(spec) for rank, spec in specs.items()}
                error = mismatch.explain(name, decoded) or error
            error = error or mismatch.find_fault(name, decode_spec(entry.spec)) or ""
            locals_: tuple[tuple[int, ...], ...] = ()
            kind = decode_spec(entry.spec).kind
            if kind == "add_process_set" and not error:
                locals_ = ((self._add_free_set(decode_spec(entry.spec).shape),),)
            if kind == "remove_process_set" and not error:
                self._remove_process_set(*decode_spec(entry.spec).shape)
            if entry.locals:
                members = self._members[set_id]
                locals_ = tuple(entry.locals.get(rank, ()) for rank in members)
            yield Ready(set_id, name, entry.spec, locals_, error=error)
        self._ready = []

    def _why_not_joined(self, set_id: int, name: str, spec: bytes) -> str:
        """Why a name cannot run since ranks have joined; "" if it can."""
        joined = self._joined & self._full[set_id]
        kind = decode_spec(spec).kind
        if not joined or kind not in _NOT_WITH_JOIN:
            return ""
        return (
            f"{kind} of {name!r} is not supported after a rank has joined; joined: "
            f"{list(bits(joined))}."
        )

    def _respond(self, ready: list[Ready]) -> Response:
        slots = tuple(
            each.slot if each.slot >= 0 else self._give_slot(each) for each in ready
        )
        set_id = ready[0].process_set
        if all(each.slot >= 0 for each in ready):
            return Response((), process_set=set_id, slots=slots)
        locals_ = tuple(each.locals for each in ready)
        return Response(
            tuple(each.name for each in ready),
            tuple(each.spec for each in ready),
            set_id,
            locals_ if any(locals_) else (),
            slots,
        )

    # The cache

    def _give_slot(self, ready: Ready) -> int:
        """Gives a name a slot; -1 if there is none, or it is not worth it."""
        if decode_spec(ready.spec).kind in _NEVER_CACHED:
            return -1
        if ready.name.startswith(UNNAMED):  # It will not come again.
            return -1
        spec = decode_spec(ready.spec)
        key = fusion.key_of(ready.process_set, spec)
        item = Item(key, fusion.num_bytes_of(spec, ready.locals))
        facts = ready.process_set, ready.name, ready.spec, ready.locals
        cached = Cached(*facts, item, bool(spec.group))
        slot = self._slots.give(cached, num_seen=min(self._seen))
        if slot < 0:
            in_use = self._pending()
            in_use |= self._groups.slots()
            oldest = self._slots.find_oldest(in_use)
            if oldest is not None:  # This one goes without; the next one has room.
                self._retire(oldest)
        return slot

    def _take_back(self, slot: int, now_s: float) -> None:
        """Takes a slot back; who has sent its bit has submitted the name."""
        cached = self._retire(slot)
        for rank in self._members[cached.process_set]:
            if self._hits[rank] >> slot & 1:
                self._hits[rank] ^= 1 << slot
                self._add(rank, self._request_of(cached, rank), now_s)

    def _retire(self, slot: int) -> Cached:
        self._hit_since_s.pop(slot, None)
        for data in self._data:
            data.pop(slot, None)
        self._warm.clear()
        return self._slots.retire(slot, num_batches=self.num_batches)

    def _pending(self) -> int:
        """The slots whose bit some rank has sent."""
        pending = 0
        for hits in self._hits:
            pending |= hits
        return pending

    # Who is late

    def names_of(self, message: FromRank) -> list[str]:
        """Returns the names that a message says are ready, before it is taken."""
        hits = int.from_bytes(message.hits, "little") & self._slots.live
        names = [self._slots.get(slot).name for slot in bits(hits)]
        return [request.name for request in message.requests] + names

    @property
    def has_waiting(self) -> bool:
        """Whether some ranks wait for others."""
        return any(self._tables.values()) or any(self._hits) or bool(self._groups.held)

    def find_stalls(self, *, now_s: float, after_s: float) -> list[Stall]:
        """Returns the names that some ranks wait for longer than `after_s` seconds.

        Of cached names the wait is counted from the first call that found them.
        """
        stalls = []
        for set_id, table in self._tables.items():
            full = self._full[set_id] & ~self._joined
            for name, entry in table.items():
                waited_s = now_s - entry.since_s
                missing = full & ~entry.arrived
                if missing and waited_s >= after_s:
                    ranks = tuple(bits(missing))
                    stalls.append(Stall(set_id, name, ranks, waited_s))
        for (set_id, group), held in self._groups.held.items():
            if now_s - held.since_s >= after_s:
                waited_s = now_s - held.since_s
                names = ", ".join(each.name for each in held.ready)
                text = f"group {group!r}, of which only {names} came"
                stalls.append(Stall(set_id, text, (), waited_s))
        pending = self._pending()
        for slot in list(self._hit_since_s):
            if not pending >> slot & 1:
                del self._hit_since_s[slot]
        for slot in bits(pending):
            waited_s = now_s - self._hit_since_s.setdefault(slot, now_s)
            if waited_s < after_s:
                continue
            cached = self._slots.get(slot)
            missing = tuple(
                rank
                for rank in self._members[cached.process_set]
                if not (self._hits[rank] >> slot | self._joined >> rank) & 1
            )
            stalls.append(Stall(cached.process_set, cached.name, missing, waited_s))
        return stalls
