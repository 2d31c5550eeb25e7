"""Entry: one request of this process, and how its caller hears that it is done."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jdp.eager.diagnosis.flight_recorder import Record
from jdp.eager.messages import Request


class Entry:
    """One request, until it is done."""

    __slots__ = (
        "key",
        "request",
        "record",
        "array",
        "run",
        "is_small",
        "group",
        "is_done",
        "value",
        "error",
    )

    def __init__(
        self,
        request: Request,
        record: Record,
        array: Any = None,
        run: Callable[[], Any] | None = None,
        is_small: bool = False,
        group: tuple[int, str] | None = None,
    ):
        """Makes a request that is not submitted yet.

        Args:
          request: what the other ranks hear of it.
          record: what is kept of it for errors.
          array: the tensor that this process gives.
          run: the program that is run instead.
          is_small: whether the tensor may travel with the agreement.
          group: process set and name of the group that it is a leaf of; None: of none.
        """
        self.key = (request.process_set, request.name)
        self.request = request
        self.record = record
        self.array = array
        self.run = run
        self.is_small = is_small
        self.group = group
        self.is_done = False
        self.value: Any = None
        self.error: Exception | None = None


class Completion:
    """Where callers wait for their entries; any thread may use it."""

    def __init__(self) -> None:
        """Begins with nothing done."""
        self.changed = threading.Condition()

    def wait(self, entries: Sequence[Entry], timeout_s: float | None) -> bool:
        """Waits until all entries are done, or one has failed; returns whether so."""
        if _is_over(entries):
            return True
        with self.changed:
            return self.changed.wait_for(lambda: _is_over(entries), timeout_s)

    def finish(self, entries: Sequence[Entry | None], values: Sequence[Any]) -> None:
        """Gives entries their values; None stands for those of other ranks."""
        now_s = time.perf_counter()
        for entry, value in zip(entries, values, strict=True):
            if entry is not None and not entry.is_done:
                entry.record.finished_s = now_s
                entry.array = entry.run = None
                entry.value = value
                entry.is_done = True
        with self.changed:
            self.changed.notify_all()

    def fail(self, entries: Sequence[Entry | None], error: Exception) -> None:
        """Lets those that wait for entries raise `error`."""
        for entry in entries:
            if entry is not None and not entry.is_done:
                entry.error = error
                entry.record.error = str(error)
        self.finish(entries, [None] * len(entries))


def _is_over(entries: Sequence[Entry]) -> bool:
    is_over = True
    for entry in entries:
        if entry.error is not None:
            return True
        is_over = is_over and entry.is_done
    return is_over
