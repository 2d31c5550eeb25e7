"""Saving: how does a server write its state to checkpoints, and restore it?"""

import logging

from jdp.parameter_server.checkpoints import Checkpoints
from jdp.parameter_server.messages import Settled, Version
from jdp.parameter_server.updates import Updater

_logger = logging.getLogger("jdp")


class Saver:
    """Parameters of one server, and its checkpoints, if there is a folder for them."""

    def __init__(self, server: int, updater: Updater, checkpoints: Checkpoints | None):
        self._server, self._updater, self._checkpoints = server, updater, checkpoints
        if checkpoints is not None:
            checkpoints.set_state(updater.describe())
        # The newest version of which a checkpoint was requested, written or not.
        self.asked = Version()

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is a folder for them."""
        return self._checkpoints is not None

    def find_counts(self) -> tuple[int, ...]:
        """Returns the update counts that this server can begin with."""
        return (0,) if self._checkpoints is None else self._checkpoints.find_counts()

    def find_runs(self) -> tuple[bytes, ...]:
        """Returns the run of each of `find_counts`; b"" for the initial parameters."""
        return (b"",) if self._checkpoints is None else self._checkpoints.find_runs()

    def find_epoch(self) -> int:
        """Returns the highest epoch before this process."""
        return 0 if self._checkpoints is None else self._checkpoints.last.epoch

    def note(self, version: Version) -> None:
        """Notes the current version of the parameters."""
        if self._checkpoints is not None:
            self._checkpoints.note(version)

    def keep(self, count: int) -> None:
        """Notes that all servers have the checkpoint with this count."""
        if self._checkpoints is not None:
            self._checkpoints.keep(count)

    def read_attendance(self) -> bytes:
        """Returns the data of the last `note_attendance` before this process."""
        return b"" if self._checkpoints is None else self._checkpoints.read_attendance()

    def note_attendance(self, data: bytes) -> None:
        """Stores which workers have come and left; b"": the job is over."""
        if self._checkpoints is not None:
            self._checkpoints.note_attendance(data)

    def has_saved(self, version: Version) -> bool:
        """Whether a checkpoint of this version was requested, or there is no folder."""
        return self._checkpoints is None or self.asked >= version

    def save(
        self, version: Version, settled: dict[bytes, Settled], leader: bytes
    ) -> bool:
        """Writes a checkpoint; returns whether it was written.

        Args:
          version: version of the parameters.
          settled: the last settled push of each session.
          leader: incarnation of server 0; together with the epoch, it names the run.
        """
        self.asked = version
        if self._checkpoints is None:
            return False
        run = f"{leader.hex()}.{version.epoch}"
        return self._checkpoints.save(version, self._updater.save(), settled, run)

    def restore(self, version: Version, before: Version) -> dict[bytes, Settled] | None:
        """Returns to a version.

        Args:
          version: the first version of an epoch; its count is the count of a
            checkpoint, or 0.
          before: the current version of the parameters.

        Returns:
          The settled pushes of the checkpoint. None if it is missing or damaged; the
          parameters then stay as they are.

        Raises:
          RuntimeError: the checkpoint belongs to other parameters.
        """
        settled: dict[bytes, Settled] = {}
        checkpoints = self._checkpoints
        if version.count and checkpoints is not None:
            # It may have been dropped after server 0 heard of it.
            is_here = version.count in checkpoints.find_counts()
            found = checkpoints.load(version.count) if is_here else None
            if found is None:
                return None
            arrays, settled = found
            self._updater.load(arrays)
        elif version.epoch > 1:
            self._updater.reset()
        if checkpoints is not None:
            before = max(before, checkpoints.last)
            checkpoints.drop_after(version.count)
            checkpoints.keep(version.count)
            checkpoints.note(version)
            checkpoints.last = version
        self.asked = version
        if version.epoch > 1:
            self._tell(version, before)
        return settled

    def close(self) -> None:
        """Closes the folder."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _tell(self, version: Version, before: Version) -> None:
        _logger.warning(
            "Server %d goes on from %s: of %d updates, %d are lost.",
            self._server,
            f"the checkpoint of update {version.count}"
            if version.count
            else "the initial parameters",
            max(before.count, version.count),
            max(0, before.count - version.count),
        )
