"""Coordinator: which operations are ready on all ranks, and in which order do they run?

It is pure: no thread, socket or clock. Ranks may submit names in any order. The
coordinator gives all ranks the same order, so that no rank waits in a collective that
others have not begun. A negotiated request gets a slot of the cache, for its name and
all its properties. A rank that submits it again sends the slot as a bit. The bit sets
of all ranks, combined by AND, are the slots that are ready.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from jdp.eager.coordinator import broken_groups, fusion, groups, late_names, mismatch
from jdp.eager.coordinator.cache_hits import Hits, match_tensors
from jdp.eager.coordinator.cache_slots import Cached, SlotTable, bits, make_cached
from jdp.eager.coordinator.groups import Groups, Ready
from jdp.eager.coordinator.late_names import Stall
from jdp.eager.coordinator.names import Names
from jdp.eager.execution import small_tensors
from jdp.eager.messages import (
    UNNAMED,
    Batch,
    Doubt,
    FromRank,
    ProtocolError,
    Request,
    Response,
    decode_spec,
)
from jdp.eager.options import CoordinatorOptions

_NEVER_CACHED = ("barrier", "add_process_set", "remove_process_set")
_MAX_WARM = 64  # ready sets whose responses are kept.


class _Warm(NamedTuple):
    """Responses made when exactly these slots were ready."""

    keys: list[tuple[int, str]]  # process set and name.
    responses: tuple[Response, ...]


class Coordinator:
    """Coordinator on rank 0: tracks the requests of all ranks and decides."""

    def __init__(self, size: int, options: CoordinatorOptions):
        self.size = size
        self.options = options
        self.num_batches = 0  # sent to all ranks.
        self._names = Names(size)
        self._groups = Groups()
        self._broken: dict[groups.Key, str] = {}  # with reasons, not sent yet.
        self._last_joined = -1
        self._stop = ""
        self._is_asked = False  # whether a rank has asked for the stop.
        self._closing = ""  # which rank wants to shut down.
        self._has_called = False  # whether ranks were asked for their last requests.
        self._last = 0  # ranks that have answered, as bits.
        self._seen = [0] * size
        self._slots = SlotTable(options.cache_capacity)
        self._hits = Hits(size)
        self._parts = (self._names, self._groups, self._hits, self._slots)
        self._refused: list[Response] = []  # for process sets that were removed.
        self._warm: dict[tuple[int, int], _Warm] = {}  # by process set and slots.

    def add_process_set(self, set_id: int, ranks: Sequence[int]) -> None:
        """Adds a process set; `ranks` are ascending."""
        self._names.add_set(set_id, ranks)
        self._slots.of_set[set_id] = 0

    def _add_new_set(self, ranks: Sequence[int]) -> int:
        set_id = self._names.add_new_set(ranks, num_seen=min(self._seen))
        self._slots.of_set[set_id] = 0
        return set_id

    def _remove_process_set(self, set_id: int) -> Iterator[Ready]:
        """Removes a set; yields an error for each name that some ranks wait for."""
        waiting: dict[str, tuple[bytes, Sequence[int]]] = {}
        for slot in bits(self._slots.of_set[set_id]):
            cached, ranks = self._retire(slot)
            if ranks:
                waiting[cached.name] = cached.spec, ranks
        for name, spec in self._groups.forget(set_id).items():
            waiting[name] = spec, self._names.members[set_id]
        waiting |= self._names.remove_set(set_id, num_batches=self.num_batches)
        del self._slots.of_set[set_id]
        for name, (spec, ranks) in waiting.items():
            error = mismatch.describe_removed(set_id, name)
            ready = Ready(set_id, name, spec, (), error=error, is_alone=True)
            yield ready._replace(ranks=tuple(ranks))

    def receive(self, rank: int, message: FromRank, *, now_s: float) -> None:
        """Takes a message of one rank.

        Raises:
          ProtocolError: no engine sends it; for example, it submits a name twice or
            has an empty slot. The caller must then stop the coordinator.
        """
        if not self._seen[rank] <= message.seen <= self.num_batches:
            raise ProtocolError(
                f"rank {rank} has got {message.seen} batches of {self.num_batches}, "
                f"and {self._seen[rank]} before"
            )
        self._seen[rank] = message.seen
        if (message.requests or message.hits) and self._names.joined >> rank & 1:
            raise ProtocolError(f"rank {rank} has joined, and submits more")
        if message.hits:
            self._receive_hits(rank, message, now_s)
        elif message.data:
            raise ProtocolError(f"rank {rank} has sent tensors of no slot")
        for request in message.requests:
            self._add(rank, request, now_s)
        if message.joined:
            self._join(rank)
        if message.failure:
            self.stop(message.failure)
        if message.leaves:
            self._closing = self._closing or f"rank {rank} has shut the engine down"
        if message.leaves or message.is_last:
            self._last |= 1 << rank

    def tune(self, *, fusion_bytes: int, cache_enabled: bool) -> None:
        """Changes options from the next batch on."""
        self.options = msgspec.structs.replace(self.options, fusion_bytes=fusion_bytes)
        self._slots.capacity = self.options.cache_capacity if cache_enabled else 0
        if not cache_enabled:
            for slot in bits(self._slots.live & ~self._in_use()):
                self._retire(slot)
        self._warm.clear()

    def stop(self, why: str) -> None:
        """Ends the engine on all ranks with the next batch; the first reason counts."""
        self._stop = self._stop or why

    def _receive_hits(self, rank: int, message: FromRank, now_s: float) -> None:
        if len(message.hits) > self.options.cache_capacity // 8 + 1:
            raise ProtocolError(
                f"rank {rank} has sent {len(message.hits)} bytes of bits"
            )
        hits = int.from_bytes(message.hits, "little")
        data: Sequence[tuple[int, bytes]] = ()
        if message.data:
            data = match_tensors(rank, hits, message, self._slots)
        if hits & self._hits.of_rank[rank]:
            slot = next(bits(hits & self._hits.of_rank[rank]))
            raise ProtocolError(f"rank {rank} has submitted slot {slot} twice")
        dead = hits & ~self._slots.live
        for slot in bits(dead) if dead else ():
            # The slot was taken back while its bit was on the way. The request counts,
            # but its tensor is dropped: the slot's next owner would get it.
            cached = self._slots.find_retired(slot)
            if cached is None:
                raise ProtocolError(f"rank {rank} has submitted the empty slot {slot}")
            self._add(rank, self._names.request_of(cached, rank), now_s)
            hits ^= 1 << slot
        if dead and hits & ~self._slots.live:  # The name has another slot by now.
            raise ProtocolError(f"rank {rank} has submitted a name by two slots")
        if len(self._slots.of_set) > 1 or self._groups.held:
            self._check_hits(rank, hits)
        self._hits.add(rank, hits, data)
        self._names.touched.update(self._slots.find_groups(hits))

    def _check_hits(self, rank: int, hits: int) -> None:
        """Checks that a rank may submit these live slots."""
        for set_id, slots in self._slots.of_set.items():
            if hits & slots:
                self._names.check_member(rank, set_id)
        held = hits & self._groups.slots()
        if held:
            name = self._slots.get(next(bits(held))).name
            raise ProtocolError(f"rank {rank} has submitted {name!r} twice")

    def _add(self, rank: int, request: Request, now_s: float) -> None:
        """Notes that a name is ready on one rank."""
        name, set_id = request.name, request.process_set
        if self._names.was_removed(set_id, seen=self._seen[rank]):
            error = mismatch.describe_removed(set_id, name)
            refused = Response((name,), (request.spec,), set_id, error=error)
            self._refused.append(msgspec.structs.replace(refused, ranks=(rank,)))
            return
        self._names.check_member(rank, set_id)
        if self._groups.held and self._groups.is_held(set_id, name):
            raise ProtocolError(f"rank {rank} has submitted {name!r} twice")
        slot = self._slots.find(set_id, name)
        if slot is not None:
            self._take_back(slot, now_s)
        self._names.add(rank, request, now_s)

    def _join(self, rank: int) -> None:
        if self._names.joined >> rank & 1:
            raise ProtocolError(f"rank {rank} has joined twice")
        self._last_joined = rank
        self._names.join(rank)
        self._names.touched.update(self._slots.of_group)

    def decide(self, *, now_s: float) -> Batch | None:
        """Returns the next batch for all ranks, or None if there is none."""
        responses, self._refused = self._refused, []
        data = [b""] * len(responses)
        for set_id, slots in self._hits.find_ready(self._names, self._slots.of_set):
            taken = self._hits.take(self._names.members[set_id], slots)
            # Read now: a new request may take one of these slots below.
            specs = {slot: self._slots.get(slot).spec for slot in taken}
            found = self._respond_to_hits(set_id, slots, now_s)
            responses += found
            data += [small_tensors.reduce_taken(each, taken, specs) for each in found]
        if self._names.has_ready:
            found = self._respond_to_all(self._take_ready(), now_s, slots=0)
            responses += found
            data += [b""] * len(found)
        if self._broken or self._names.touched:
            found = list(broken_groups.fail(self._broken, *self._parts))
            self._broken.clear()
            responses += found
            data += [b""] * len(found)
        last_joined = -1
        if self._names.joined == self._names.full[0]:
            last_joined, self._names.joined = self._last_joined, 0
        if self._closing and self._last == self._names.full[0] and not self._stop:
            self._stop, self._is_asked = self._closing, True
        is_call = bool(self._closing) and not self._has_called
        self._has_called |= is_call
        evicted = self._slots.take_evicted()
        if not (responses or evicted or last_joined >= 0 or self._stop or is_call):
            return None
        batch = Batch(
            tuple(responses),
            tuple(data) if any(data) else (),
            evicted,
            last_joined,
            self._stop,
            self._is_asked,
            closing=self._closing if is_call else "",
        )
        self.num_batches += 1
        return batch

    def _respond_to_hits(
        self, set_id: int, slots: int, now_s: float
    ) -> Sequence[Response]:
        """Returns the responses for ready slots; cached, as the same sets recur."""
        is_plain = not self._names.joined and not self._groups.held
        warm = self._warm.get((set_id, slots)) if is_plain else None
        if warm is not None:
            self._slots.touch(warm.keys)
            return warm.responses
        numbers = list(bits(slots))
        cached = [self._slots.get(slot) for slot in numbers]
        keys = [(set_id, each.name) for each in cached]
        self._slots.touch(keys)
        if is_plain and not any([each.group for each in cached]):
            items = [each.item for each in cached]
            responses = [
                Response((), (), set_id, (), tuple([numbers[i] for i in together]))
                for together in fusion.fuse(items, self.options.fusion_bytes)
            ]
        else:
            ready = []
            for slot, each in zip(numbers, cached, strict=True):
                error = self._names.find_join_fault(set_id, each.name, each.spec)
                ready.append(Ready(*each[:4], slot, error))
            responses = self._respond_to_all(ready, now_s, slots=slots)
        if is_plain and not self._groups.held:
            if len(self._warm) == _MAX_WARM:
                self._warm.clear()
            self._warm[set_id, slots] = _Warm(keys, tuple(responses))
        return responses

    def _respond_to_all(
        self, ready: Iterable[Ready], now_s: float, *, slots: int
    ) -> list[Response]:
        """Returns the responses for ready names; `slots` are their slots, as bits."""
        torn = (self._broken, slots, *self._parts)
        has_more = functools.partial(broken_groups.has_more, *torn)
        complete = self._groups.complete(ready, has_more, now_s=now_s)
        responses = [
            Response((r.name,), (r.spec,), r.process_set, error=r.error, ranks=r.ranks)
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
        """Takes and checks the names that every rank has submitted."""
        for set_id, name, entry in self._names.take_ready():
            error = self._names.find_join_fault(set_id, name, entry.spec)
            broken: set[groups.Key] = set()
            if entry.odd:
                specs = {entry.first: entry.spec} | entry.odd
                decoded = {rank: decode_spec(spec) for rank, spec in specs.items()}
                error = mismatch.explain(name, decoded) or error
                broken = broken_groups.keys_of(set_id, decoded.values())
                self._broken |= dict.fromkeys(broken, error)
            spec = decode_spec(entry.spec)
            error = error or mismatch.find_fault(name, spec, self._names.members)
            locals_: tuple[tuple[int, ...], ...] = ()
            if spec.kind == "add_process_set" and not error:
                locals_ = ((self._add_new_set(spec.shape),),)
            if spec.kind == "remove_process_set" and not error:
                yield from self._remove_process_set(*spec.shape)
            if entry.locals:
                members = self._names.members[set_id]
                locals_ = tuple(entry.locals.get(rank, ()) for rank in members)
            is_alone = bool(broken)
            yield Ready(
                set_id, name, entry.spec, locals_, error=error, is_alone=is_alone
            )

    def _respond(self, ready: list[Ready]) -> Response:
        num_seen = min(self._seen)
        slots = tuple(
            [e.slot if e.slot >= 0 else self._give_slot(e, num_seen) for e in ready]
        )
        set_id = ready[0].process_set
        if all([each.slot >= 0 for each in ready]):
            return Response((), process_set=set_id, slots=slots)
        locals_ = tuple([each.locals for each in ready])
        return Response(
            tuple([each.name for each in ready]),
            tuple([each.spec for each in ready]),
            set_id,
            locals_ if any(locals_) else (),
            slots,
        )

    def _give_slot(self, ready: Ready, num_seen: int) -> int:
        """Gives a name a slot; returns -1 if none is free, or the name cannot recur."""
        if decode_spec(ready.spec).kind in _NEVER_CACHED:
            return -1
        if ready.name.startswith(UNNAMED):
            return -1
        if ready.process_set not in self._names.members:  # Removed in this batch.
            return -1
        slot = self._slots.give(make_cached(*ready[:4]), num_seen=num_seen)
        if slot < 0:
            oldest = self._slots.find_oldest(self._in_use())
            if oldest is not None:  # Makes room for a later name.
                self._retire(oldest)
        return slot

    def _take_back(self, slot: int, now_s: float) -> None:
        """Takes a slot back; ranks that have sent its bit have submitted the name."""
        cached, ranks = self._retire(slot)
        for rank in ranks:
            self._names.add(rank, self._names.request_of(cached, rank), now_s)

    def _retire(self, slot: int) -> tuple[Cached, list[int]]:
        """Takes a slot back; returns its request, and the ranks that sent its bit."""
        self._warm.clear()
        ranks = self._hits.drop(slot)
        return self._slots.retire(slot, num_batches=self.num_batches), ranks

    def _in_use(self) -> int:
        """Returns the slots that must not be taken back now, as a bit set."""
        return self._hits.pending() | self._groups.slots()

    def names_of(self, message: FromRank) -> list[str]:
        """Returns the names in a message, before `receive` takes it."""
        hits = int.from_bytes(message.hits, "little") & self._slots.live
        names = [self._slots.get(slot).name for slot in bits(hits)]
        return [request.name for request in message.requests] + names

    @property
    def has_waiting(self) -> bool:
        """Whether some ranks wait for others."""
        has_names = any(self._names.tables.values())
        return has_names or any(self._hits.of_rank) or bool(self._groups.held)

    def find_unknown(self, rank: int, doubts: Iterable[Doubt]) -> tuple[Doubt, ...]:
        """Returns the names, and `JOIN`, that the coordinator does not wait for.

        Decisions on them were made before this call.

        Args:
          rank: the process that waits for the names.
          doubts: the names.
        """
        is_awaited = functools.partial(late_names.is_awaited, rank, *self._parts)
        # An error that is not sent yet.
        refused = {(each.process_set, *each.names) for each in self._refused}
        return tuple(
            doubt
            for doubt in doubts
            if doubt[:2] not in refused and not is_awaited(doubt[:2])
        )

    def find_stalls(self, *, now_s: float, after_s: float) -> list[Stall]:
        """Returns the names that some ranks wait for longer than `after_s` seconds.

        The wait of a cached name is counted from the first call that finds it.
        """
        return late_names.find_stalls(*self._parts, now_s=now_s, after_s=after_s)
