"""Replica: what every server, server 0 too, does with the log and its own parts."""

from typing import Any, NamedTuple

from jdp.parameter_server import protocol
from jdp.parameter_server.messages import (
    Apply,
    Discard,
    Entry,
    Forget,
    Log,
    Push,
    Restore,
    Settled,
    Version,
)

# Of how many sessions it is remembered which pushes were settled: of those that settled
# one last. Whoever is forgotten must not re-send a push that it sent so long ago.
_MOST_SESSIONS = 4096


class Part(NamedTuple):
    """A server's part of a push that is not settled."""

    push: Push
    payload: Any  # the arrays, or where they lie.


class Done(NamedTuple):
    """What is to be done for an entry that was executed."""

    parts: list[Part]  # of an `Apply`, in its order.
    settled: dict[bytes, Settled]  # what became of pushes by it.


class Replica:
    """How far a server has executed the log; without clocks, sockets and arrays."""

    def __init__(self) -> None:
        """Begins before the first epoch."""
        self.version = Version()
        self.lead = b""
        self.next_index = 0
        self.settled: dict[bytes, Settled] = {}
        self._parts: dict[bytes, Part] = {}

    def hold(self, push: Push, payload: Any) -> bool:
        """Takes a part; returns whether it is a new one that is not settled."""
        if not self.wants(push.session, push.sequence):
            return False
        self._parts[push.session] = Part(push, payload)
        return True

    def wants(self, session: bytes, sequence: int) -> bool:
        """Whether a push is neither settled nor here."""
        settled = self.settled.get(session)
        if settled is not None and sequence <= settled.sequence:
            return False
        part = self._parts.get(session)
        return part is None or part.push.sequence < sequence

    def find_held(self) -> tuple[tuple[bytes, int], ...]:
        """Returns session and sequence number of the parts that are not settled."""
        return tuple((s, part.push.sequence) for s, part in self._parts.items())

    def receive(self, log: Log) -> list[Entry]:
        """Returns the entries of a log that are to be executed now, in this order."""
        is_same = (log.lead, log.epoch) == (self.lead, self.version.epoch)
        if not is_same:
            # Another log counts if it is newer, and from its beginning on.
            if log.epoch <= self.version.epoch or log.first_index != 0:
                return []
            self.lead, self.next_index = log.lead, 0
        skipped = self.next_index - log.first_index
        return [] if skipped < 0 else list(log.entries[skipped:])

    def execute(self, entry: Entry) -> Done:
        """Goes by an entry; see `restore` for what a `Restore` needs besides."""
        self.next_index += 1
        self.version, settled = protocol.settle(self.version, entry)
        parts: list[Part] = []
        match entry:
            case Apply():
                parts = [self._take(s, number) for s, number in entry.pushes]
            case Discard():
                self._drop(entry.session, entry.sequence)
            case Forget():
                self._parts.pop(entry.session, None)
            case Restore():
                self._parts.clear()
        for session, found in settled.items():
            self.settled.pop(session, None)
            self.settled[session] = found
        while len(self.settled) > _MOST_SESSIONS:
            del self.settled[next(iter(self.settled))]
        return Done(parts, settled)

    def restore(self, settled: dict[bytes, Settled]) -> None:
        """Takes what a checkpoint has of pushes."""
        self.settled = dict(settled)

    def _take(self, session: bytes, sequence: int) -> Part:
        part = self._parts.pop(session)
        assert part.push.sequence == sequence
        return part

    def _drop(self, session: bytes, sequence: int) -> None:
        part = self._parts.get(session)
        if part is not None and part.push.sequence <= sequence:
            del self._parts[session]
