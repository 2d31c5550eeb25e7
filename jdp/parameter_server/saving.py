"""Saving: the state of a server goes to its checkpoints, and comes back from them."""

import logging

from jdp.parameter_server.checkpoints import Checkpoints
from jdp.parameter_server.messages import Settled, Version
from jdp.parameter_server.updates import Updater

_logger = logging.getLogger("jdp")


class Saver:
    """The parameters of one server, and where they are written, if anywhere."""

    def __init__(self, server: int, updater: Updater, checkpoints: Checkpoints | None):
        """Begins with what the server finds."""
        self._server, self._updater, self._checkpoints = server, updater, checkpoints
        if checkpoints is not None:
            checkpoints.set_state(updater.describe())
        # The newest version that was to be written, whether or not it could be.
        self.asked = Version()

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is a folder for them."""
        return self._checkpoints is not None

    def find_counts(self) -> tuple[int, ...]:
        """Returns the counts of the versions that this server can begin with."""
        return (0,) if self._checkpoints is None else self._checkpoints.find_counts()

    def find_runs(self) -> tuple[bytes, ...]:
        """Returns the run of each of `find_counts`; b"" for the given parameters."""
        return (b"",) if self._checkpoints is None else self._checkpoints.find_runs()

    def find_epoch(self) -> int:
        """Returns the highest epoch that there was before this process."""
        return 0 if self._checkpoints is None else self._checkpoints.last.epoch

    def note(self, version: Version) -> None:
        """Notes that the parameters have this version now."""
        if self._checkpoints is not None:
            self._checkpoints.note(version)

    def keep(self, count: int) -> None:
        """Takes note that all servers have the checkpoint with this count."""
        if self._checkpoints is not None:
            self._checkpoints.keep(count)

    def read_attendance(self) -> bytes:
        """Returns what `note_attendance` was given before this process began."""
        return b"" if self._checkpoints is None else self._checkpoints.read_attendance()

    def note_attendance(self, data: bytes) -> None:
        """Writes down which workers have come and left; b"": that the job is over."""
        if self._checkpoints is not None:
            self._checkpoints.note_attendance(data)

    def has_saved(self, version: Version) -> bool:
        """Whether there is nothing left to write up to this version."""
        return self._checkpoints is None or self.asked >= version

    def save(
        self, version: Version, settled: dict[bytes, Settled], leader: bytes
    ) -> bool:
        """Writes a checkpoint; returns whether there is one more.

        Args:
          version: of the parameters.
          settled: see `checkpoint_files.write`.
          leader: the server 0 that let it be written; with the epoch, the run.
        """
        self.asked = version
        if self._checkpoints is None:
            return False
        run = f"{leader.hex()}.{version.epoch}"
        return self._checkpoints.save(version, self._updater.save(), settled, run)

    def restore(self, version: Version, before: Version) -> dict[bytes, Settled] | None:
        """Goes back to a version.

        Args:
          version: the first of an epoch; its count is that of a checkpoint, or 0.
          before: the version of the parameters.

        Returns:
          What the checkpoint has of pushes; None if it is not here, or is not what
          was written: then the parameters are as they were.

        Raises:
          RuntimeError: it is that of other parameters.
        """
        settled: dict[bytes, Settled] = {}
        checkpoints = self._checkpoints
        if version.count and checkpoints is not None:
            # Server 0 may have heard of it just before it was dropped.
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
        """Ends."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _tell(self, version: Version, before: Version) -> None:
        _logger.warning(
            "Server %d goes on from %s: of %d updates, %d are lost.",
            self._server,
            f"the checkpoint of update {version.count}"
            if version.count
            else "the parameters that it was given",
            max(before.count, version.count),
            max(0, before.count - version.count),
        )
