"""Pending: what this process has submitted, and is not decided."""

import threading
from collections.abc import Iterable, Sequence

from jdp.eager.entry import Entry


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

    def add(self, entries: Sequence[Entry]) -> None:
        """Adds some entries, of one group or of none; all or none.

        Raises:
          ValueError: a name is in use.
        """
        pending, group = self.entries, entries[0].group
        if group is not None and group in self._groups:
            raise ValueError(_describe("a group", group[1]))
        for i, entry in enumerate(entries):
            if entry.key in pending:
                for earlier in entries[:i]:
                    del pending[earlier.key]
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
