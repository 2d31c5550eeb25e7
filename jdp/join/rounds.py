"""Rounds: how do announcements and decisions of `lockstep` travel over the store?"""

import msgspec

from jdp.join import lockstep, lockstep_checks
from jdp.join.lockstep import Announcement, Decision
from jdp.replicas import wire
from jdp.replicas.meeting import StoreMeeting
from jdp.replicas.mesh import World

_ROUNDS_PER_FOLDER = 32  # deleted together.


class Rounds:
    """One process's side of the rounds of one loop; its agent calls `exchange`."""

    def __init__(self, world: World, number: int, directory: str):
        """Takes part in the rounds of a loop.

        Args:
          world: the processes.
          number: number of the loop, the same on all processes.
          directory: the key under which its messages lie.
        """
        self.number = number
        self.is_stopping = False
        self.has_failed = False  # this process got no decision.
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
        """Sends the announcement of this process, and returns the decision.

        Returns:
          The decision of the round; None if the loop was closed meanwhile.
        """
        index, self._index = self._index, self._index + 1
        if self._world.store is None:
            return self._decide([announcement])
        if self._world.is_main_process:
            return self._lead(index, announcement)
        folder = self._folder(index)
        meeting = self._meeting(folder)
        meeting.leave_record(msgspec.msgpack.encode(announcement))
        return self._wait_for_decision(meeting)

    def finish(self) -> None:
        """Marks keys that process 0 deletes once this loop is over everywhere."""
        store = self._world.store
        if store is not None and self._world.is_main_process:
            for directory in [*self._retired, self._directory]:
                store.retire(directory)
            self._retired = []

    def _judge(self, announcements: list[Announcement]) -> Decision:
        """Decides, unless an announcement is impossible."""
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
        others = range(1, self._world.process_count)
        meeting = self._meeting(self._folder(index))
        found = meeting.gather(others)
        if found is None:
            return None
        missing = [p for p in others if p not in found]
        if missing:
            text = self._describe_missing(missing, index)
            decision = Decision(error=text, culprit=missing[0])
        else:
            try:
                theirs = [
                    wire.decode(
                        found[p], Announcement, what=f"The announcement of process {p}"
                    )
                    for p in others
                ]
                decision = self._judge([announcement, *theirs])
            except wire.Malformed as error:
                decision = Decision(error=str(error))
        meeting.announce(msgspec.msgpack.encode(decision))
        if not missing:
            self._delete_old(index)
        return decision

    def _wait_for_decision(self, meeting: StoreMeeting) -> Decision | None:
        # Process 0 comes to the round after at most half of `timeout_s`, and then waits
        # for the others.
        timeout_s = 2 * self._world.timeout_s + 5.0
        try:
            value = meeting.hear(timeout_s=timeout_s)
        except TimeoutError:
            self.has_failed = True
            return Decision(
                error="Process 0 has sent no decision about the next iterations for "
                f"{timeout_s:g} s; it may have stopped, or not come to this loop.",
                culprit=0,
            )
        if value is None:
            return None
        return wire.decode(value, Decision, what="The decision of process 0")

    def _meeting(self, folder: str) -> StoreMeeting:
        world = self._world
        assert world.store is not None
        return StoreMeeting(
            world.store,
            folder,
            world.process_index,
            world.timeout_s,
            is_stopping=lambda: self.is_stopping,
        )

    def _delete_old(self, index: int) -> None:
        """Deletes keys of earlier rounds: all processes have left them."""
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
        subject = "Process" if len(missing) == 1 else "Processes"
        verb = "has" if len(missing) == 1 else "have"
        where = "come to this loop" if index == 0 else "been heard of in this loop"
        return (
            f"{subject} {names} {verb} not {where} within {self._world.timeout_s:g} s; "
            "it may have stopped, or be in another part of the program (for example, "
            "it ran one loop more or fewer than the others)."
        )
