"""Names: what ranks have said by name, in each process set, and who has joined."""

from collections.abc import Iterator, Sequence

from jdp.eager import checks
from jdp.eager.coordinator.cache_slots import Cached, bits
from jdp.eager.messages import ProtocolError, Request, decode_spec


class Waiting:
    """A name that is not ready everywhere."""

    __slots__ = ("first", "spec", "arrived", "odd", "locals", "since_s")

    def __init__(self, first: int, spec: bytes, now_s: float):
        """Begins without ranks; `first` is the rank that comes first."""
        self.first = first
        self.spec = spec
        self.arrived = 0  # a bit for each rank.
        self.odd: dict[int, bytes] = {}  # by rank, specs that differ from the first.
        self.locals: dict[int, tuple[int, ...]] = {}
        self.since_s = now_s

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have submitted it, ascending."""
        return tuple(bits(self.arrived))


class Names:
    """Process sets, with the names that some of their ranks have submitted."""

    def __init__(self, size: int):
        """Begins with all ranks in process set 0."""
        self.size = size
        self.members: dict[int, tuple[int, ...]] = {}
        self.full: dict[int, int] = {}  # the members as bits.
        self.tables: dict[int, dict[str, Waiting]] = {}
        self.joined = 0  # a bit for each rank.
        self._ready: dict[tuple[int, str], None] = {}  # in the order of the last rank.
        # Sets that are gone, with the number of batches before the one that says so.
        self._removed: dict[int, int] = {}
        self._num_sets = 0  # that there ever were.
        # By process set and group, who has submitted leaves by name, as bits. Some of
        # the leaves may have been decided since; `broken_groups` looks.
        self.came: dict[tuple[int, str], int] = {}
        # Groups of which more has come since the last look, by name or by slot.
        self.touched: set[tuple[int, str]] = set()
        self.add_set(0, range(size))

    def add_set(self, set_id: int, ranks: Sequence[int]) -> None:
        """Lets `ranks`, ascending, have names of their own."""
        assert set_id >= self._num_sets
        self._num_sets = set_id + 1
        self.members[set_id] = tuple(ranks)
        self.full[set_id] = sum(1 << rank for rank in ranks)
        self.tables[set_id] = {}

    def add_new_set(self, ranks: Sequence[int], *, num_seen: int) -> int:
        """Adds a set under a number that no set had before, and returns that.

        Ranks count what has no name by the number of the set. Some of them may have
        been in a set that was removed, and others not: under its number they would go
        on from different counts, and what they submitted for it would run in the new
        one.

        Args:
          ranks: its members, ascending.
          num_seen: how many batches every rank has got.
        """
        for set_id, batch in list(self._removed.items()):
            if num_seen > batch:  # Nothing for it is on its way.
                del self._removed[set_id]
        self.add_set(self._num_sets, ranks)
        return self._num_sets - 1

    def remove_set(
        self, set_id: int, *, num_batches: int
    ) -> dict[str, tuple[bytes, Sequence[int]]]:
        """Forgets a set; returns by waiting name its spec and the ranks that wait.

        Args:
          set_id: its number.
          num_batches: how many came before the one that says so.
        """
        del self.members[set_id], self.full[set_id]
        self._removed[set_id] = num_batches
        self._ready = {key: None for key in self._ready if key[0] != set_id}
        self.came = {key: bits for key, bits in self.came.items() if key[0] != set_id}
        table = self.tables.pop(set_id)
        return {name: (each.spec, each.ranks) for name, each in table.items()}

    def was_removed(self, set_id: int, *, seen: int) -> bool:
        """Whether a set is gone, of which a rank that has got `seen` batches spoke."""
        return set_id in self._removed and seen <= self._removed[set_id]

    def check_member(self, rank: int, set_id: int) -> None:
        """Checks that a rank is in a set.

        Raises:
          ProtocolError: it is not, or there is no such set.
        """
        if not self.full.get(set_id, 0) >> rank & 1:
            raise ProtocolError(f"rank {rank} is not in process set {set_id}")

    def add(self, rank: int, request: Request, now_s: float) -> None:
        """Notes that a name is ready on one rank, which is in the set.

        Raises:
          ProtocolError: it has submitted the name before, or what makes no sense.
        """
        name, spec, set_id = request.name, request.spec, request.process_set
        checks.check_request(rank, request, self.members[set_id], size=self.size)
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
        group = decode_spec(spec).group
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
        """Whether a name is ready everywhere."""
        return bool(self._ready)

    def take_ready(self) -> Iterator[tuple[int, str, Waiting]]:
        """Takes the names that every rank has submitted, or has joined."""
        while self._ready:
            set_id, name = key = next(iter(self._ready))
            del self._ready[key]
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
        """Whether a rank has submitted a name that is not ready, or not taken yet."""
        entry = self.tables.get(set_id, {}).get(name)
        if entry is None or not entry.arrived >> rank & 1:
            return False
        full = self.full[set_id]
        is_complete = entry.arrived | self.joined & full == full
        return not is_complete or (set_id, name) in self._ready
