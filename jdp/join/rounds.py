"""Rounds: how announcements and decisions of `lockstep` travel over the store."""

import time

import msgspec

from jdp.join import lockstep, lockstep_checks
from jdp.join.lockstep import Announcement, Decision
from jdp.replicas import wire
from jdp.replicas.mesh import World

# A blocking get wakes at once, but cannot be interrupted, and one that times out leaves
# memory behind in process 0. So only the first wait of a round is one; then we poll.
_FIRST_WAIT_S = 0.3
_POLL_PERIOD_S = 0.05
_ROUNDS_PER_FOLDER = 32  # they are deleted together.


class Rounds:
    """One process' side of the rounds of one loop; its agent calls `exchange`."""

    def __init__(self, world: World, directory: str):
        """Takes part in the rounds under `directory`, the same on all processes."""
        self.is_stopping = False
        self.has_failed = False  # this process could not come to a decision.
        self._world = world
        self._directory = directory
        self._index = 0
        self._coordinator = None
        self._retired: list[str] = []  # directories of loops that ended before this.
        if world.is_main_process:
            self._coordinator = lockstep.start_coordinator(
                world.process_count, timeout_s=world.timeout_s
            )
            if world.store is not None:
                self._retired = world.store.take_retired()

    def exchange(self, announcement: Announcement) -> Decision | None:
        """Brings this process' announcement and returns the decision of the round.

        Returns:
          None where the loop was closed meanwhile.
        """
        index, self._index = self._index, self._index + 1
        if self._world.store is None:
            return self._decide([announcement])
        if self._world.is_main_process:
            return self._lead(index, announcement)
        folder = self._folder(index)
        own_key = f"{folder}/{self._world.process_index}"
        self._world.store.set(own_key, msgspec.msgpack.encode(announcement))
        return self._wait_for_decision(folder)

    def finish(self) -> None:
        """Notes what process 0 is to delete once this loop is over everywhere."""
        store = self._world.store
        if store is not None and self._world.is_main_process:
            for directory in [*self._retired, self._directory]:
                store.retire(directory)
            self._retired = []

    def _judge(self, announcements: list[Announcement]) -> Decision:
        """Decides, unless a process says what makes no sense."""
        assert self._coordinator is not None
        for process, announcement in enumerate(announcements):
            fault = lockstep_checks.find_announcement_fault(
                self._coordinator, process, announcement
            )
            if fault is not None:
                return Decision(error=fault, culprit=process)
        return self._decide(announcements)

    def _decide(self, announcements: list[Announcement]) -> Decision:
        assert self._coordinator is not None
        self._coordinator, decision = lockstep.decide(self._coordinator, announcements)
        return decision

    def _lead(self, index: int, announcement: Announcement) -> Decision | None:
        store = self._world.store
        assert store is not None
        folder = self._folder(index)
        found = self._gather(folder)
        if found is None:
            return None
        missing = [p for p in range(1, self._world.process_count) if p not in found]
        if missing:
            text = self._describe_missing(missing, index)
            decision = Decision(error=text, culprit=missing[0])
        else:
            try:
                others = [
                    wire.decode(found[p], Announcement, what=f"What process {p} says")
                    for p in range(1, self._world.process_count)
                ]
                decision = self._judge([announcement, *others])
            except wire.Malformed as error:
                decision = Decision(error=str(error))
        store.set(f"{folder}/decision", msgspec.msgpack.encode(decision))
        if not missing:
            self._delete_old(index)
        return decision

    def _gather(self, folder: str) -> dict[int, bytes] | None:
        """Collects what the others announce; what is there in time."""
        store, count = self._world.store, self._world.process_count
        assert store is not None
        found: dict[int, bytes] = {}
        start_s = now_s = time.monotonic()
        while len(found) < count - 1:
            if self.is_stopping:
                return None
            left_s = start_s + self._world.timeout_s - now_s
            if left_s <= 0:
                break
            missing = [p for p in range(1, count) if p not in found]
            if len(missing) > 1:
                listed = store.list_directory(folder)
                names = {str(p): p for p in missing}
                found |= {names[n]: v for n, v in listed.items() if n in names}
                missing = [p for p in missing if p not in found]
            if missing and now_s - start_s < _FIRST_WAIT_S:
                key, wait_s = f"{folder}/{missing[-1]}", min(left_s, _FIRST_WAIT_S)
                try:
                    found[missing[-1]] = store.get(key, timeout_s=wait_s)
                except TimeoutError:
                    pass
            elif missing:
                time.sleep(min(left_s, _POLL_PERIOD_S))
                value = store.try_get(f"{folder}/{missing[-1]}")
                if value is not None:
                    found[missing[-1]] = value
            now_s = time.monotonic()
        return found

    def _wait_for_decision(self, folder: str) -> Decision | None:
        store = self._world.store
        assert store is not None
        # Process 0 waits for its own turn, half of `timeout_s` at most, and then for
        # the others.
        timeout_s = 2 * self._world.timeout_s + 5.0
        deadline_s = time.monotonic() + timeout_s
        key = f"{folder}/decision"
        value = None
        try:
            value = store.get(key, timeout_s=_FIRST_WAIT_S)
        except TimeoutError:
            while value is None and time.monotonic() < deadline_s:
                if self.is_stopping:
                    return None
                time.sleep(_POLL_PERIOD_S)
                value = store.try_get(key)
        if value is None:
            self.has_failed = True
            return Decision(
                error="Process 0 has decided nothing about the next iterations for "
                f"{timeout_s:g} s; it may have stopped, or not come to this loop.",
                culprit=0,
            )
        return wire.decode(value, Decision, what="The decision of process 0")

    def _delete_old(self, index: int) -> None:
        """Deletes keys that all have passed: in a round, the last one is over."""
        store = self._world.store
        assert store is not None
        for directory in self._retired:
            store.delete(directory)
        self._retired = []
        if index and index % _ROUNDS_PER_FOLDER == 0:
            store.delete(self._folder(index - 1).rpartition("/")[0])

    def _folder(self, index: int) -> str:
        return f"{self._directory}/{index // _ROUNDS_PER_FOLDER}/{index}"

    def _describe_missing(self, missing: list[int], index: int) -> str:
        names = ", ".join(map(str, missing[:10])) + ", ..." * (len(missing) > 10)
        who = f"Process {names} has" if len(missing) == 1 else f"Processes {names} have"
        where = "come to this loop" if index == 0 else "been heard of in this loop"
        return (
            f"{who} not {where} within {self._world.timeout_s:g} s; it may have "
            "stopped, or be in another part of the program (a loop more or less)."
        )
