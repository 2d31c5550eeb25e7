"""Names: which names has each rank submitted, and which ranks have joined?"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from jdp.eager import checks
from jdp.eager.coordinator.cache_slots import Cached, bits
from jdp.eager.messages import ProtocolError, Request, decode_spec

_MAX_KNOWN = 4096


class Waiting(msgspec.Struct, gc=False):
    """Name that is not ready on all ranks.

    Attributes:
      first: the first rank to submit it.
      spec: `Request.spec` of that rank.
      since_s: time of its submission.
      arrived: ranks that have submitted it, as bits.
      odd: by rank, specs that differ from the first.
      locals: by rank, `Request.local`.
    """

    first: int
    spec: bytes
    since_s: float
    arrived: int = 0
    odd: dict[int, bytes] = {}
    locals: dict[int, tuple[int, ...]] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have submitted it, ascending."""
        return tuple(bits(self.arrived))


class Names:
    """Process sets, with the names that some of their ranks have submitted."""

    def __init__(self, size: int):
        self.size = size
        self.members: dict[int, tuple[int, ...]] = {}
        self.full: dict[int, int] = {}  # the members as bits.
        self.tables: dict[int, dict[str, Waiting]] = {}
        self.joined = 0  # one bit per rank.
        # In the order of becoming ready.
        self._ready: OrderedDict[tuple[int, str], None] = OrderedDict()
        # Removed sets, and the number of the batch that says so.
        self._removed: dict[int, int] = {}
        self._num_sets = 0  # that there ever were.
        # By process set and group, ranks that have submitted leaves by name, as bits.
        # Some leaves may have been decided since; `broken_groups` checks.
        self.came: dict[tuple[int, str], int] = {}
        # Groups with new leaves, by name or by slot, since `broken_groups` last looked.
        self.touched: set[tuple[int, str]] = set()
        # By set and spec of requests that are right, and have no `local`: their group.
        self._group_of: dict[tuple[int, bytes], str] = {}
        self.add_set(0, range(size))

    def add_set(self, set_id: int, ranks: Sequence[int]) -> None:
        """Adds a process set; `ranks` are ascending."""
        assert set_id >= self._num_sets
        self._num_sets = set_id + 1
        self.members[set_id] = tuple(ranks)
        self.full[set_id] = sum(1 << rank for rank in ranks)
        self.tables[set_id] = {}

    def add_new_set(self, ranks: Sequence[int], *, num_seen: int) -> int:
        """Adds a set under a number that no set had before, and returns the number.

        Ranks number unnamed calls by the number of the set. Only some of the ranks may
        have been in a removed set: with its number they would continue from different
        counts, and old requests would run in the new set.

        Args:
          ranks: its members, ascending.
          num_seen: number of batches that every rank has received.
        """
        for set_id, batch in list(self._removed.items()):
            if num_seen > batch:  # No request for it is on its way.
                del self._removed[set_id]
        self.add_set(self._num_sets, ranks)
        return self._num_sets - 1

    def remove_set(
        self, set_id: int, *, num_batches: int
    ) -> dict[str, tuple[bytes, Sequence[int]]]:
        """Removes a set; returns by name the spec and the ranks that wait for it.

        Args:
          set_id: its number.
          num_batches: number of batches before the report of it.
        """
        del self.members[set_id], self.full[set_id]
        self._removed[set_id] = num_batches
        for key in [key for key in self._ready if key[0] == set_id]:
            del self._ready[key]
        self.came = {key: bits for key, bits in self.came.items() if key[0] != set_id}
        table = self.tables.pop(set_id)
        return {name: (each.spec, each.ranks) for name, each in table.items()}

    def was_removed(self, set_id: int, *, seen: int) -> bool:
        """Whether a set was removed, unknown to a rank that has `seen` batches."""
        return set_id in self._removed and seen <= self._removed[set_id]

    def check_member(self, rank: int, set_id: int) -> None:
        """Checks that a rank is in a set.

        Raises:
          ProtocolError: the rank is not in the set, or there is no such set.
        """
        if not self.full.get(set_id, 0) >> rank & 1:
            raise ProtocolError(f"rank {rank} is not in process set {set_id}")

    def add(self, rank: int, request: Request, now_s: float) -> None:
        """Notes that a name is ready on one rank, which is in the set.

        Raises:
          ProtocolError: the rank has submitted the name before, or no engine sends
            such a request.
        """
        name, spec, set_id = request.name, request.spec, request.process_set
        group = None if request.local else self._group_of.get((set_id, spec))
        if group is None:
            checks.check_request(rank, request, self.members[set_id], size=self.size)
            group = decode_spec(spec).group
            if not request.local:
                if len(self._group_of) == _MAX_KNOWN:
                    self._group_of.clear()
                self._group_of[set_id, spec] = group
        entry = self.tables[set_id].get(name)
        if entry is None:
            entry = self.tables[set_id][name] = Waiting(rank, spec, now_s)
        elif entry.arrived >> rank & 1:
            raise ProtocolError(f"rank {rank} has submitted {name!r} twice")
        elif entry.spec != spec:
            entry.odd[rank] = spec
        entry.arrived |= 1 << rank
        if request.local:
            entry.locals[rank] = request.local
        if group:
            key = (set_id, group)
            self.came[key] = self.came.get(key, 0) | 1 << rank
            self.touched.add(key)
        self._note_ready(set_id, name, entry)

    def join(self, rank: int) -> None:
        """Notes that a rank has no more data."""
        self.joined |= 1 << rank
        self.touched.update(self.came)
        for set_id, table in self.tables.items():
            if self.full[set_id] >> rank & 1:
                for name, entry in table.items():
                    self._note_ready(set_id, name, entry)

    def _note_ready(self, set_id: int, name: str, entry: Waiting) -> None:
        full = self.full[set_id]
        if entry.arrived | self.joined & full == full:
            self._ready[set_id, name] = None

    @property
    def has_ready(self) -> bool:
        """Whether a name is ready on all ranks."""
        return bool(self._ready)

    def take_ready(self) -> Iterator[tuple[int, str, Waiting]]:
        """Takes out the names that every rank has submitted or joined for."""
        while self._ready:
            (set_id, name), _ = self._ready.popitem(last=False)
            yield set_id, name, self.tables[set_id].pop(name)

    def find_join_fault(self, set_id: int, name: str, spec: bytes) -> str:
        """Returns why a name cannot run after ranks have joined; "" if it can."""
        joined = self.joined & self.full[set_id]
        fault = checks.find_join_fault(decode_spec(spec)) if joined else ""
        if not fault:
            return ""
        return (
            f"{fault} of {name!r} is not supported after a rank has joined; joined: "
            f"{list(bits(joined))}."
        )

    def request_of(self, cached: Cached, rank: int) -> Request:
        """Returns the request that the bit of a slot stands for, sent by one rank."""
        local: tuple[int, ...] = ()
        members = self.members.get(cached.process_set, ())
        if cached.locals and rank in members:
            local = cached.locals[members.index(rank)]
        return Request(cached.name, cached.spec, cached.process_set, local)

    def is_awaited(self, rank: int, set_id: int, name: str) -> bool:
        """Whether a rank has submitted a name that has not been taken as ready."""
        entry = self.tables.get(set_id, {}).get(name)
        if entry is None or not entry.arrived >> rank & 1:
            return False
        full = self.full[set_id]
        is_complete = entry.arrived | self.joined & full == full
        return not is_complete or (set_id, name) in self._ready
