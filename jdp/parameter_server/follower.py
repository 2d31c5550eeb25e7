"""Follower: how far has a server executed the log, and which pushes does it hold?

Every server has one, server 0 included.
"""

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

# Number of sessions whose last settled push is remembered, the most recent ones. A
# forgotten session must not send an earlier push again.
_MOST_SESSIONS = 4096


class PushPart(NamedTuple):
    """A server's part of a push that is not settled."""

    push: Push
    payload: Any  # the arrays, or a view of shared memory.


class ExecutedEntry(NamedTuple):
    """Result of an executed entry."""

    parts: list[PushPart]  # the pushes of an `Apply`, in its order.
    settled: dict[bytes, Settled]  # outcomes of pushes, by session.


class Follower:
    """State of a server as it follows the log; without clocks, sockets and arrays."""

    def __init__(self) -> None:
        self.version = Version()
        self.leader = b""
        self.next_index = 0
        self.settled: dict[bytes, Settled] = {}
        self._parts: dict[bytes, PushPart] = {}

    def hold(self, push: Push, payload: Any) -> bool:
        """Takes a part; returns whether it is new and not settled."""
        if not self.wants(push.session, push.sequence):
            return False
        self._parts[push.session] = PushPart(push, payload)
        return True

    def wants(self, session: bytes, sequence: int) -> bool:
        """Whether a push is neither settled nor held.

        A session has one push at a time. While an unsettled push is held, no other one
        is taken: the log may name the held one.
        """
        settled = self.settled.get(session)
        if settled is not None and sequence <= settled.sequence:
            return False
        return session not in self._parts

    def find_held(self) -> tuple[tuple[bytes, int], ...]:
        """Returns session and sequence number of each unsettled part."""
        return tuple((s, part.push.sequence) for s, part in self._parts.items())

    def receive(self, log: LeaderLog) -> list[LogEntry]:
        """Returns the entries of a log to execute now, in this order.

        Raises:
          MessageError: the log is malformed; the state has not changed.
        """
        for index, entry in enumerate(log.entries, log.first_index):
            if isinstance(entry, Restore) != (index == 0):
                raise MessageError("sent a log that does not begin with a checkpoint")
            if isinstance(entry, Restore) and entry.version.epoch != log.epoch:
                raise MessageError("sent a log that begins another epoch")
        is_same = (log.leader, log.epoch) == (self.leader, self.version.epoch)
        if not is_same:
            # Another log is taken only if it is newer, and only from its beginning.
            if log.epoch <= self.version.epoch or log.first_index != 0:
                return []
            self.leader, self.next_index = log.leader, 0
        skipped = self.next_index - log.first_index
        return [] if skipped < 0 else list(log.entries[skipped:])

    def execute(self, entry: LogEntry) -> ExecutedEntry:
        """Updates the state by an entry; after a `Restore`, call `restore` too.

        Raises:
          MessageError: an `Apply` names a push that is not held; the state has not
            changed.
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
        """Takes the settled pushes of a checkpoint."""
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
