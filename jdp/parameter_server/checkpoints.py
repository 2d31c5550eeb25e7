"""Checkpoints: which checkpoints of a server are kept, and which can be used?"""

import contextlib
import importlib.util
import logging
import os
import pathlib
import re
from collections.abc import Collection, Sequence

import numpy as np

from jdp.parameter_server import checkpoint_files
from jdp.parameter_server.checkpoint_files import CheckpointError
from jdp.parameter_server.folder_lock import FolderLock
from jdp.parameter_server.messages import Settled, Version
from jdp.parameter_server.progress import ProgressFile, ServerProgress

# The newest may be damaged, and so may the one before.
_NUM_KEPT = 3
_FOLDER = re.compile(r"updates-(0|[1-9][0-9]{0,17})")
# Larger than the number of epochs since any checkpoint.
_LOST_EPOCHS = 1000
_ATTENDANCE = "attendance"
_logger = logging.getLogger("jdp")


class Checkpoints:
    """The checkpoints of one server, with the table of pushes in each.

    A file beside them has the current version. It outlives the process, so a restart
    knows earlier epochs and the number of lost updates.

    A damaged checkpoint is refused: the log names it, and its folder is renamed to
    `refused-N`. A checkpoint of all servers is only dropped for a newer
    checkpoint of all servers, so there is always one to return to.
    """

    def __init__(self, folder: str | os.PathLike[str], server: int, num_servers: int):
        """Opens the folder of a server, or makes it.

        Raises:
          RuntimeError: orbax is not installed, the folder cannot be read or written,
            or it has a checkpoint of another version of jdp; nothing is changed then.
          ValueError: the folder belongs to another number of servers.
        """
        if importlib.util.find_spec("orbax.checkpoint") is None:
            raise RuntimeError(
                "`checkpoint_dir` needs orbax: `pip install 'orbax-checkpoint>=0.11'`."
            )
        root = pathlib.Path(folder).absolute()
        for other in root.glob("server-*-of-*"):
            if not other.name.endswith(f"-of-{num_servers}"):
                raise ValueError(
                    f"`checkpoint_dir` {str(root)!r} has {other.name}, and there are "
                    f"{num_servers} servers. Start as many as there were, or give "
                    "another folder."
                )
        self._place = (server, num_servers)
        self._folder = root / f"server-{server}-of-{num_servers}"
        self._counts: set[int] = set()
        self._runs: dict[int, str] = {}
        self._states: dict[int, tuple[str, ...]] = {}
        self._state: tuple[str, ...] = ()
        self._num_failures = 0  # of writes, one after the other.
        self._has_lost = False  # a checkpoint, or whether there was one.
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self._folder)
            try:
                newest = self._scan()
                self._progress = ProgressFile(self._folder / "progress")
            except BaseException:
                self._lock.close()
                raise
        except OSError as error:
            raise _cannot_be_used(self._folder, error) from None
        if self._progress.damage:
            self._has_lost = self._has_lost or bool(self._counts)
            _logger.error(
                "Server %d refuses the file `%s`: %s. How far the servers came is "
                "found from the checkpoints.",
                server,
                self._folder / "progress",
                self._progress.damage,
            )
            if self._counts:
                last = Version(newest.epoch + _LOST_EPOCHS, newest.count)
                self._progress.write(ServerProgress(last, 0))
        self.last = self._progress.found.version  # before this start.
        common = self._progress.found.common
        self._commons = [common] if common else []  # see `find_superfluous`.

    def find_counts(self) -> tuple[int, ...]:
        """Returns the update counts that the server can begin with.

        They include 0, the initial parameters, until all servers have had a checkpoint
        or one was refused. From then on, beginning with 0 would discard the training.
        """
        has_begun = self._progress.found.common > 0 or self._has_lost
        return (*(() if has_begun else (0,)), *sorted(self._counts))

    def find_runs(self) -> tuple[bytes, ...]:
        """Returns the run of each of `find_counts`; b"" for the initial parameters."""
        return tuple(self._runs.get(c, "").encode() for c in self.find_counts())

    def set_state(self, state: tuple[str, ...]) -> None:
        """Sets the names of the arrays, and compares them with existing checkpoints.

        Raises:
          ValueError: a checkpoint belongs to another model or optimizer.
        """
        self._state = state
        if not self._counts:
            return
        count = max(self._counts)
        found = self._states[count]
        for i in range(max(len(found), len(state))):
            theirs, own = (x[i] if i < len(x) else "nothing" for x in (found, state))
            if theirs != own:
                raise ValueError(
                    "The checkpoint belongs to another model, optimizer or number of "
                    f"servers: `{self._folder / f'updates-{count}'}` has {theirs}, "
                    f"where this program has {own}. Give another `checkpoint_dir`, or "
                    "the same model and optimizer."
                )

    def note(self, version: Version) -> None:
        """Stores the current version; costs some microseconds."""
        self._write_progress(version, self._progress.found.common)

    def read_attendance(self) -> bytes:
        """Returns the data of `note_attendance`; b"" for none.

        Raises:
          RuntimeError: the file cannot be read.
        """
        path = self._folder / _ATTENDANCE
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise _cannot_be_used(path, error) from None

    def note_attendance(self, data: bytes) -> None:
        """Stores which workers have come and left; b"" removes the file."""
        path = self._folder / _ATTENDANCE
        half = self._folder / f"half-{_ATTENDANCE}"
        # A disk that is full is named where a checkpoint is written.
        with contextlib.suppress(OSError):
            if not data:
                path.unlink(missing_ok=True)
                return
            # A link made by another account could lead to a file of this account.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(half, flags, 0o644), "wb") as file:
                file.write(data)
            half.rename(path)

    def save(
        self,
        version: Version,
        arrays: Sequence[np.ndarray],
        settled: dict[bytes, Settled],
        run: str = "",
    ) -> bool:
        """Writes a checkpoint, whole or not at all, and drops old ones.

        A full or unwritable disk does not end the job. The log reports the first
        failure, the 8th, 16th and so on, the next success, and a failure at the end.

        Returns:
          Whether the checkpoint was written.
        """
        server, count = self._place[0], version.count
        folder = self._folder / f"updates-{count}"
        self._remove_leftovers()
        try:
            checkpoint_files.write(
                folder,
                self._folder / f"half-{count}",
                place=self._place,
                version=version,
                arrays=arrays,
                settled=settled,
                run=run,
                state=self._state,
            )
        except OSError as error:
            self._tell_failure(count, error)
            return False
        if self._num_failures:
            self._num_failures = 0
            _logger.warning(
                "Server %d writes checkpoints again, to `%s`: newest is update %d.",
                server,
                self._folder,
                count,
            )
        self._counts.add(count)
        self._runs[count], self._states[count] = run, self._state
        if self._place[1] == 1:
            self.keep(count)
        self._drop(find_superfluous(self._counts, self._commons))
        return True

    def load(self, count: int) -> tuple[list[np.ndarray], dict[bytes, Settled]] | None:
        """Reads a checkpoint; None if it is damaged, and therefore refused.

        Raises:
          RuntimeError: the checkpoint cannot be read now; it stays as it is.
        """
        folder = self._folder / f"updates-{count}"
        try:
            return checkpoint_files.read(folder, place=self._place)
        except CheckpointError as error:
            self._refuse(count, error)
            return None
        except OSError as error:
            raise _cannot_be_used(folder, error) from None

    def keep(self, count: int) -> None:
        """Stores the count of the newest checkpoint that all servers have."""
        self._commons = add_common(self._commons, count)
        self._write_progress(self._progress.found.version, count)

    def drop_after(self, count: int) -> None:
        """Drops checkpoints that are newer than the restored one."""
        self._drop([newer for newer in self._counts if newer > count])

    def close(self) -> None:
        """Closes the folder, and removes partial checkpoints."""
        if self._num_failures:
            _logger.error(
                "Server %d ends, and could not write its last updates: the newest "
                "checkpoint in `%s` is %s.",
                self._place[0],
                self._folder,
                self._name_newest(),
            )
        self._remove_leftovers()
        self._progress.close()
        self._lock.close()

    def _scan(self) -> Version:
        """Reads all manifests; returns the newest version.

        Raises:
          RuntimeError: a checkpoint was written by another version of jdp. Nothing is
            changed then, nor at an OSError.
        """
        refused, has_refused = [], False
        newest = Version()
        for path in sorted(self._folder.iterdir()):
            has_refused |= path.name.startswith("refused-")
            if (match := _FOLDER.fullmatch(path.name)) is None:
                continue
            try:
                found = checkpoint_files.read_manifest(path, place=self._place)
            except CheckpointError as error:
                refused.append((int(match[1]), error))
            except checkpoint_files.FormatError as error:
                raise RuntimeError(
                    f"`checkpoint_dir` cannot be used: {error}. Nothing was changed. "
                    "Start with the jdp that wrote it, or give another folder."
                ) from None
            else:
                count = found.version.count
                self._counts.add(count)
                self._runs[count], self._states[count] = found.run, found.state
                newest = max(newest, found.version)
        self._has_lost |= has_refused
        self._remove_leftovers()
        for count, error in refused:
            self._refuse(count, error)
        return newest

    def _tell_failure(self, count: int, error: OSError) -> None:
        """Logs the first failure, the 8th, the 16th and so on."""
        num = self._num_failures = self._num_failures + 1
        if num & (num - 1) or num in (2, 4):
            return
        again = f" {num} were not written." if num > 1 else ""
        _logger.error(
            "Server %d cannot write the checkpoint of update %d to `%s`: %s.%s The job "
            "goes on; the newest checkpoint is %s: a server that is killed loses all "
            "updates since.",
            self._place[0],
            count,
            self._folder,
            error.strerror or error,
            again,
            self._name_newest(),
        )

    def _name_newest(self) -> str:
        return f"`updates-{max(self._counts)}`" if self._counts else "missing"

    def _remove_leftovers(self) -> None:
        """Removes folders that could not be removed before, for lack of descriptors."""
        with contextlib.suppress(OSError):
            for path in list(self._folder.iterdir()):
                if path.name.startswith(("half-", "drop-")):
                    checkpoint_files.remove(path)

    def _refuse(self, count: int, error: CheckpointError) -> None:
        self._counts.discard(count)
        self._has_lost = True
        name, path = f"refused-{count}", self._folder / f"updates-{count}"
        _logger.error(
            "Server %d refuses the checkpoint of update %d, `%s`: %s. It is not used, "
            "and is kept as `%s`.",
            self._place[0],
            count,
            path,
            error,
            name,
        )
        checkpoint_files.remove(self._folder / name)
        try:
            path.rename(self._folder / name)
        except OSError:  # It is gone, or the disk cannot be written: it is not used.
            return
        others = self._folder.glob("refused-*")
        by_age = sorted(others, key=lambda p: p.stat().st_ctime_ns)
        for old in by_age[:-_NUM_KEPT]:
            checkpoint_files.remove(old)

    def _drop(self, counts: Collection[int]) -> None:
        for count in counts:
            self._counts.discard(count)
            checkpoint_files.drop(self._folder / f"updates-{count}")

    def _write_progress(self, version: Version, common: int) -> None:
        # A disk that is full is named where a checkpoint is written.
        self._progress.write(ServerProgress(version, common))


def _cannot_be_used(path: pathlib.Path, error: OSError) -> RuntimeError:
    return RuntimeError(
        f"`checkpoint_dir` {str(path)!r} cannot be used: {error}. A server needs to "
        "read and write there. Nothing was changed: start it again once that works."
    )


def find_superfluous(counts: Collection[int], commons: Sequence[int]) -> list[int]:
    """Returns which checkpoints a server may drop.

    If the newest checkpoint is damaged, all servers return to an earlier checkpoint of
    all servers. Servers whose disks are full in turn also have checkpoints that others
    lack. These must not displace the checkpoints of all servers.

    Args:
      counts: update counts of the checkpoints of a server.
      commons: counts of checkpoints that all servers had, ascending, as far as this
        process knows them. The last `_NUM_KEPT` stay, and so do the newest `_NUM_KEPT`
        up to the last of them and the newest `_NUM_KEPT` after it, which the others may
        not have yet. Checkpoints before the first of `commons` stay until `_NUM_KEPT`
        are known: all servers may have any of these.
    """
    commons = commons[-_NUM_KEPT:]
    newest = commons[-1] if commons else 0
    older = sorted(c for c in counts if c <= newest)
    newer = sorted(c for c in counts if c > newest)
    first = commons[0] if 0 < len(commons) < _NUM_KEPT else 0
    kept = {*commons, *older[-_NUM_KEPT:]}
    return [c for c in older if c > first and c not in kept] + newer[:-_NUM_KEPT]


def add_common(commons: Sequence[int], count: int) -> list[int]:
    """Returns `commons` with the newest checkpoint of all servers.

    Args:
      commons: see `find_superfluous`.
      count: count of that checkpoint; 0: the initial parameters. If it is below the
        last of `commons`, the servers went back to it.
    """
    before = [c for c in commons if c < count]
    return [*before, count][-_NUM_KEPT:] if count else []
