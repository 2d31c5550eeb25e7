"""Rows: results that are on disk as soon as they are known."""

import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any


class Rows:
    """A file with one JSON object a line, each flushed: a cut run keeps its own.

    Attributes:
      written: what was added.
    """

    def __init__(self, path: pathlib.Path | None, limit_s: float | None = None):
        """Begins a file.

        Args:
          path: the file, begun anew; None writes nothing.
          limit_s: seconds from now after which `is_late`.
        """
        self.written: list[dict[str, Any]] = []
        self._file = None if path is None else path.open("w", encoding="utf-8")
        self._end_s = None if limit_s is None else time.monotonic() + limit_s

    def add(self, row: Mapping[str, Any]) -> None:
        """Writes a row."""
        self.written.append(dict(row))
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    @property
    def is_late(self) -> bool:
        """Whether the limit is over."""
        return self._end_s is not None and time.monotonic() > self._end_s
