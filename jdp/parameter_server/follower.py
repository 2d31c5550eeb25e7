"""Replica: what every server, server 0 too, does with the log and its own parts."""

from typing import Any, NamedTuple

from jdp.parameter_server.messages import (
    Apply,
    Discard,
    DropSession,
    LeaderLog,
    LogEntry,
    MessageError,
    Push,
    Restore,
    Settled,
    Version,
)
from jdp.parameter_server.restoring import settle

# Of how many sessions it is remembered which pushes were settled: of those that settled
# one last. A forgotten session must not re-send a push that it sent so long ago.
_MOST_SESSIONS = 4096


class PushPart(NamedTuple):
    """A server's part of a push that is not settled."""

    push: Push
    payload: Any  # the arrays, or where they lie.


class ExecutedEntry(NamedTuple):
    """Result of an executed entry: work to do, and settled pushes."""

    parts: list[PushPart]  # of an `Apply`, in its order.
    settled: dict[bytes, Settled]  # what became of pushes by it.


class Follower:
    """How far a server has executed the log; without clocks, sockets and arrays."""

    def __init__(self) -> None:
        """Begins before the first epoch."""
        self.version = Version()
        self.leader = b""
        self.next_index = 0
        self.settled: dict[bytes, Settled] = {}
        self._parts: dict[bytes, PushPart] = {}

    def hold(self, push: Push, payload: Any) -> bool:
        """Takes a part; returns whether it is a new one that is not settled."""
        if not self.wants(push.session, push.sequence):
            return False
        self._parts[push.session] = PushPart(push, payload)
        return True

    def wants(self, session: bytes, sequence: int) -> bool:
        """Whether a push is neither settled nor here.

        A session has one push at a time: while one is here that is not settled, no
        other is taken, for the log may name the one that is.
        """
        settled = self.settled.get(session)
        if settled is not None and sequence <= settled.sequence:
            return False
        return session not in self._parts

    def find_held(self) -> tuple[tuple[bytes, int], ...]:
        """Returns session and sequence number of the parts that are not settled."""
        return tuple((s, part.push.sequence) for s, part in self._parts.items())

    def receive(self, log: LeaderLog) -> list[LogEntry]:
        """Returns the entries of a log that are to be executed now, in this order.

        Raises:
          MessageError: it is no log; nothing has changed.
        """
        for index, entry in enumerate(log.entries, log.first_index):
            if isinstance(entry, Restore) != (index == 0):
                raise MessageError("sent a log that does not begin with a checkpoint")
            if isinstance(entry, Restore) and entry.version.epoch != log.epoch:
                raise MessageError("sent a log that begins another epoch")
        is_same = (log.leader, log.epoch) == (self.leader, self.version.epoch)
        if not is_same:
            # Another log counts if it is newer, and from its beginning on.
            if log.epoch <= self.version.epoch or log.first_index != 0:
                return []
            self.leader, self.next_index = log.leader, 0
        skipped = self.next_index - log.first_index
        return [] if skipped < 0 else list(log.entries[skipped:])

    def execute(self, entry: LogEntry) -> ExecutedEntry:
        """Goes by an entry; see `restore` for what a `Restore` needs besides.

        Raises:
          MessageError: it applies what is not here; nothing has changed.
        """
        if isinstance(entry, Apply):
            self._check(entry)
        self.next_index += 1
        self.version, settled = settle(self.version, entry)
        parts: list[PushPart] = []
        match entry:
            case Apply():
                parts = [self._parts.pop(session) for session, _ in entry.pushes]
            case Discard():
                self._drop(entry.session, entry.sequence)
            case DropSession():
                self._parts.pop(entry.session, None)
            case Restore():
                self._parts.clear()
        for session, found in settled.items():
            self.settled.pop(session, None)
            self.settled[session] = found
        while len(self.settled) > _MOST_SESSIONS:
            del self.settled[next(iter(self.settled))]
        return ExecutedEntry(parts, settled)

    def restore(self, settled: dict[bytes, Settled]) -> None:
        """Takes what a checkpoint has of pushes."""
        self.settled = dict(settled)

    def _check(self, entry: Apply) -> None:
        held = [
            session in self._parts and self._parts[session].push.sequence == sequence
            for session, sequence in entry.pushes
        ]
        num_sessions = len({session for session, _ in entry.pushes})
        if not all(held) or not len(held) == num_sessions == len(entry.weights):
            raise MessageError("sent an update with pushes that this server lacks")

    def _drop(self, session: bytes, sequence: int) -> None:
        part = self._parts.get(session)
        if part is not None and part.push.sequence <= sequence:
            del self._parts[session]
