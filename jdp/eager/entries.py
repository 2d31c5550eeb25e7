"""Entries: which requests has this process submitted, and which of them are done?"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jdp.eager.diagnosis.flight_recorder import Record
from jdp.eager.messages import Request

# Why nothing more can be submitted.
JOINED = (
    "This process has called `join`, and has no more data until all processes have. "
    "Wait for it before another operation."
)
JOINED_TWICE = "`join` was called again before all processes had joined."


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


class Submitted(threading.local):
    """How often the thread that looks has submitted something."""

    count = 0


class Pending:
    """Entries by process set and name, and the names of their groups.

    A name is there once. So is a group: the coordinator could not tell the leaves of
    one from the leaves of another of its name.
    """

    def __init__(self) -> None:
        """Begins with none."""
        self.entries: dict[tuple[int, str], Entry] = {}
        self._groups: set[tuple[int, str]] = set()

    def put(self, entries: Sequence[Entry], queue: list[Entry]) -> None:
        """Adds some entries, of one group or of none, also to a queue; all or none.

        Also where a signal's handler raises meanwhile: a name that is in use without
        being in the queue would be so for ever.

        Raises:
          ValueError: a name is in use.
        """
        num_before = len(queue)
        try:
            self._add(entries)
            queue.extend(entries)
        except BaseException:
            del queue[num_before:]
            for entry in entries:
                if self.entries.get(entry.key) is entry:
                    self.drop(entry)
            raise

    def _add(self, entries: Sequence[Entry]) -> None:
        pending, group = self.entries, entries[0].group
        if group is not None and group in self._groups:
            raise ValueError(_describe("a group", group[1]))
        for entry in entries:
            if entry.key in pending:
                raise ValueError(_describe("an operation", entry.key[1]))
            pending[entry.key] = entry
        if group is not None:
            self._groups.add(group)

    def take(
        self, keys: Iterable[tuple[int, str]], *, agreed_s: float, order: int
    ) -> list[Entry | None]:
        """Takes out what ranks have agreed on.

        All leaves of a group are agreed on at once, so that its name is free then.

        Args:
          keys: process sets and names.
          agreed_s: the time, of `time.perf_counter`.
          order: how many responses came before.

        Returns:
          By key its entry; None where this process has submitted none.
        """
        entries = [self.entries.pop(key, None) for key in keys]
        for entry in entries:
            if entry is not None:
                entry.record.agreed_s = agreed_s
                entry.record.order = order
                if entry.group is not None:
                    self._groups.discard(entry.group)
        return entries

    def drop(self, entry: Entry) -> None:
        """Takes out one that the other ranks have not heard of."""
        del self.entries[entry.key]
        if entry.group is not None:
            self._groups.discard(entry.group)

    def take_all(self) -> list[Entry]:
        """Takes out all."""
        entries = list(self.entries.values())
        self.entries.clear()
        self._groups.clear()
        return entries


def _is_over(entries: Sequence[Entry]) -> bool:
    is_over = True
    for entry in entries:
        if entry.error is not None:
            return True
        is_over = is_over and entry.is_done
    return is_over


def _describe(what: str, name: str) -> str:
    return (
        f"`name={name!r}` is the name of {what} that is still being processed. Wait "
        "for it with `synchronize`, or use another name."
    )
