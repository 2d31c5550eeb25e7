"""Pending: what this process has submitted, and is not decided."""

import threading
from collections.abc import Iterable, Sequence

from jdp.eager.entry import Entry

# Why nothing more can be submitted.
JOINED = (
    "This process has called `join`, and has no more data until all processes have. "
    "Wait for it before another operation."
)
JOINED_TWICE = "`join` was called again before all processes had joined."


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


def _describe(what: str, name: str) -> str:
    return (
        f"`name={name!r}` is the name of {what} that is still being processed. Wait "
        "for it with `synchronize`, or use another name."
    )
