"""Rows: how do results reach the disk as soon as they are measured?"""

import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any


class Rows:
    """File with one JSON object per line, flushed: an aborted run keeps its rows.

    Attributes:
      written: the rows so far.
    """

    def __init__(self, path: pathlib.Path | None, limit_s: float | None = None):
        """Creates the file.

        Args:
          path: the file, which is overwritten; None: rows are not written.
          limit_s: seconds from now after which `is_late` is true.
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
        """Whether the time limit is over."""
        return self._end_s is not None and time.monotonic() > self._end_s
