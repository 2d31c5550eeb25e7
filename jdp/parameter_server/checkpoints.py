"""Checkpoints: what a server writes down, and what it finds after it was killed."""

import importlib.util
import logging
import mmap
import os
import pathlib
import re
import shutil
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from jdp.parameter_server.messages import Settled, Version

# Servers may be one checkpoint apart when one is killed, and one may be half written.
_NUM_KEPT = 3
_FOLDER = re.compile(r"updates-(\d+)")
_PROGRESS = struct.Struct("<qq")  # epoch and count.
_logger = logging.getLogger("jdp")
_table = msgspec.msgpack.Decoder(dict[bytes, Settled])


class Checkpoints:
    """The checkpoints of one server, with the table of pushes in each.

    Beside them lies a file with the version of each moment, which outlives the process:
    so it is known which epochs there were, and how many updates were lost.
    """

    def __init__(self, folder: str | os.PathLike[str], server: int, num_servers: int):
        """Opens the folder of a server, or makes it.

        Raises:
          RuntimeError: orbax is not installed.
          ValueError: the folder is that of another number of servers.
        """
        if importlib.util.find_spec("orbax.checkpoint") is None:
            raise RuntimeError(
                "`checkpoint_dir` needs orbax: `pip install 'jdp[checkpoints]'`."
            )
        root = pathlib.Path(folder).absolute()
        for other in root.glob("server-*-of-*"):
            if not other.name.endswith(f"-of-{num_servers}"):
                raise ValueError(
                    f"`checkpoint_dir` {str(root)!r} has {other.name}, and there are "
                    f"{num_servers} servers. Start as many as there were, or give "
                    "another folder."
                )
        self._folder = root / f"server-{server}-of-{num_servers}"
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "progress"
        if not path.exists() or path.stat().st_size != _PROGRESS.size:
            path.write_bytes(_PROGRESS.pack(0, 0))
        with path.open("r+b") as file:
            self._progress = mmap.mmap(file.fileno(), _PROGRESS.size)
        self.last = Version(*_PROGRESS.unpack(self._progress[:]))  # before this start.

    def find_counts(self) -> tuple[int, ...]:
        """Returns the counts of the versions that can be loaded, apart from 0."""
        names = [_FOLDER.fullmatch(p.name) for p in self._folder.iterdir()]
        return tuple(sorted(int(match[1]) for match in names if match))

    def note(self, version: Version) -> None:
        """Notes how far the server is; costs a microsecond."""
        _PROGRESS.pack_into(self._progress, 0, version.epoch, version.count)

    def save(
        self, count: int, arrays: Sequence[np.ndarray], settled: dict[bytes, Settled]
    ) -> None:
        """Writes a checkpoint, whole or not at all, and drops old ones."""
        table = np.frombuffer(msgspec.msgpack.encode(settled), np.uint8)
        tree = {"settled": table, "arrays": _as_dict(arrays)}
        path = self._folder / f"updates-{count}"
        shutil.rmtree(path, ignore_errors=True)
        _open().save(path, tree)
        for old in self.find_counts()[:-_NUM_KEPT]:
            shutil.rmtree(self._folder / f"updates-{old}", ignore_errors=True)

    def load(self, count: int) -> tuple[list[np.ndarray], dict[bytes, Settled]]:
        """Reads a checkpoint."""
        tree = _open().restore(self._folder / f"updates-{count}")
        arrays = tree["arrays"]
        return (
            [np.asarray(arrays[str(i)]) for i in range(len(arrays))],
            _table.decode(np.asarray(tree["settled"]).tobytes()),
        )

    def drop_after(self, count: int) -> None:
        """Drops what is newer than where the servers go on."""
        for newer in self.find_counts():
            if newer > count:
                shutil.rmtree(self._folder / f"updates-{newer}", ignore_errors=True)


def _as_dict(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {str(i): x for i, x in enumerate(arrays)}


def _open() -> Any:
    import orbax.checkpoint

    handler = orbax.checkpoint.PyTreeCheckpointHandler()
    return orbax.checkpoint.Checkpointer(handler)
