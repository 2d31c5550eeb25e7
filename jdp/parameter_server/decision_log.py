"""Decision log: what has server 0 decided, and what has each server executed?"""

from collections.abc import Iterable

from jdp.parameter_server.messages import (
    FollowerStatus,
    LeaderLog,
    LogEntry,
    Restore,
    Settled,
    Stop,
    Version,
)
from jdp.parameter_server.restoring import settle

_MOST_SENT = 256  # entries per message.


class DecisionLog:
    """Entries of one epoch, without the entries that all servers have executed.

    Attributes:
      version: the version after the last entry.
    """

    def __init__(self, incarnation: bytes):
        self.version = Version()
        self._incarnation = incarnation
        self._entries: list[LogEntry] = []
        self._first_index = 0  # index in the log of `_entries[0]`.
        self._num_returned = 0  # entries of the log that `take` has returned.

    @property
    def end(self) -> int:
        """Number of entries since the beginning of the epoch."""
        return self._first_index + len(self._entries)

    @property
    def is_over(self) -> bool:
        """Whether the last entry ends the job."""
        return self._entries[-1:] == [Stop()]

    def begin(self, version: Version) -> None:
        """Begins a new log, with a `Restore` as its first entry."""
        self._entries, self._first_index, self._num_returned = [], 0, 0
        self.append(Restore(version))

    def append(self, entry: LogEntry) -> dict[bytes, Settled]:
        """Adds an entry; returns the pushes that it settles, by session."""
        self._entries.append(entry)
        self.version, settled = settle(self.version, entry)
        return settled

    def take(self, followers: Iterable[FollowerStatus]) -> list[LogEntry]:
        """Returns the new entries, and drops those that all servers have executed."""
        end = self.end
        entries = self._entries[self._num_returned - self._first_index :]
        self._num_returned = end
        least = self.find_least_index(followers)
        # The last entry stays: `is_over` looks at it.
        num_dropped = max(0, min(least - self._first_index, len(self._entries) - 1))
        del self._entries[:num_dropped]
        self._first_index += num_dropped
        return entries

    def find_unsent(self, status: FollowerStatus) -> LeaderLog | None:
        """Returns what a server has not executed yet; None if there is nothing."""
        first = max(self.find_next_index(status), self._first_index)
        entries = self._entries[first - self._first_index :][:_MOST_SENT]
        if not entries:
            return None
        return LeaderLog(self._incarnation, self.version.epoch, first, tuple(entries))

    def find_next_index(self, status: FollowerStatus) -> int:
        """Returns the index of the entry that a server executes next."""
        follows = (
            status.leader == self._incarnation and status.epoch == self.version.epoch
        )
        return status.next_index if follows else 0

    def find_least_index(self, followers: Iterable[FollowerStatus]) -> int:
        """Returns the index up to which all servers have executed the log."""
        return min(map(self.find_next_index, followers), default=self.end)

    def find_held(
        self, followers: Iterable[FollowerStatus]
    ) -> list[tuple[int, set[tuple[bytes, int]]]]:
        """Returns the argument `held` of `members.find_held`."""
        return [(self.find_next_index(f), set(f.held)) for f in followers]
