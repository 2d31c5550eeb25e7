"""Checkpoint schedule: when do servers write one, and which one do all have?"""

from collections.abc import Mapping

from jdp.parameter_server.decision_log import DecisionLog
from jdp.parameter_server.messages import FollowerStatus, Version
from jdp.parameter_server.restoring import find_common

_MOST_SAVES = 2  # checkpoints that not all servers have written or failed to write.

Followers = Mapping[int, FollowerStatus]  # the newest status of each other server.


class CheckpointSchedule:
    """Checkpoints of all servers, as server 0 knows them; pure."""

    def __init__(self, every: int):
        """Has no checkpoint yet.

        Args:
          every: updates from one checkpoint to the next; 0: only on request.
        """
        self._every = every
        self._own: tuple[int, ...] | None = None
        self._own_runs: tuple[bytes, ...] = ()
        self._highest_epoch = 0  # that this server knows.
        self._common = 0  # count of the newest checkpoint that all servers have.
        self._is_requested = False  # a checkpoint is wanted now.
        self._is_due = False  # a checkpoint is wanted once earlier ones are written.
        self._saved = Version()  # version of the newest `SaveCheckpoint`.
        self._saves: list[int] = []  # log indices that not all servers have executed.

    def set_own(
        self, counts: tuple[int, ...], epoch: int, runs: tuple[bytes, ...]
    ) -> None:
        """Sets the checkpoints that server 0 has, and the highest epoch it knows."""
        self._own, self._own_runs = counts, runs
        self._highest_epoch = max(self._highest_epoch, epoch)

    def request(self) -> None:
        """Asks for a checkpoint of the current version."""
        self._is_requested = True

    def begin_epoch(self, followers: Followers) -> Version | None:
        """Returns the version to restore; None while `set_own` was not called.

        Raises:
          NoCheckpointError: there were checkpoints, and none is left that all have.
        """
        if self._own is None:
            return None
        common = find_common(self._own, followers, self._own_runs)
        known = [status.epoch for status in followers.values()]
        self._highest_epoch = 1 + max(self._highest_epoch, *known, 0)
        self._common = common
        self._saved = Version(self._highest_epoch, common)
        self._saves, self._is_due = [], False
        return self._saved

    def note_update(self, version: Version) -> bool:
        """Notes an update; returns whether a checkpoint is due after it."""
        is_due = self._every > 0 and version.count % self._every == 0
        self._is_due |= is_due
        return is_due

    def note_save(self, log: DecisionLog) -> None:
        """Notes that the last entry of the log is a `SaveCheckpoint`."""
        self._saved = log.version
        self._saves.append(log.end - 1)

    def take_save(self, log: DecisionLog, followers: Followers) -> bool:
        """Returns whether all servers are to write a checkpoint now.

        Periodic checkpoints wait until earlier ones are written. So a server has few
        that others lack, and there are always some that all have.
        """
        least = log.find_least_index(followers.values())
        self._saves = [i for i in self._saves if i >= least]
        has_room = len(self._saves) < _MOST_SAVES
        if not self._is_requested and not (self._is_due and has_room):
            return False
        self._is_requested = self._is_due = False
        return self._saved != log.version

    def take_common(self, log: DecisionLog, followers: Followers) -> int | None:
        """Returns the count of a newer checkpoint that all servers have, if any."""
        assert self._own is not None
        counts = [c for c in self._own if c > self._common]
        # A server that has not executed the `Restore` reports earlier checkpoints.
        if not counts or not all(map(log.find_next_index, followers.values())):
            return None
        for count in reversed(counts):
            if all(count in f.checkpoints for f in followers.values()):
                self._common = count
                return count
        return None

    def is_saved_everywhere(self, version: Version, followers: Followers) -> bool:
        """Whether all servers have a checkpoint with the count of this version."""
        assert self._own is not None
        known = [self._own, *(f.checkpoints for f in followers.values())]
        return all(version.count in counts for counts in known)
