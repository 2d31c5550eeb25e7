"""Roster: which groups live, as far as this one has heard?"""

import dataclasses

from jdp.elastic.messages import NO_STEP, NO_VIEW, Beat, MemberId, View


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuorumOptions:
    """Limits of a quorum.

    Attributes:
      slots: places where groups can live, the same for all groups.
      beat_s: time between signs of life, in seconds.
      timeout_s: a group from which nothing is heard for so long is left out, in
        seconds.
      founding_s: how long the first groups wait for those at all other slots, in
        seconds.
    """

    slots: tuple[int, ...]
    beat_s: float = 0.5
    timeout_s: float = 3.0
    founding_s: float = 5.0


@dataclasses.dataclass
class Heard:
    """Last sign of life of a group."""

    member: MemberId
    beat: Beat
    at_s: float


class Roster:
    """Signs of life of the groups at all other slots.

    Attributes:
      heard: the last sign of life, by slot.
      empty: slots at which no group lives.
    """

    def __init__(self, options: QuorumOptions, now_s: float):
        """Begins without a sign."""
        self._options = options
        self.heard: dict[int, Heard] = {}
        self.empty: set[int] = set()
        self._since_s = self._now_s = now_s

    def set_time(self, now_s: float) -> None:
        """Takes the time of the caller's monotonic clock."""
        self._now_s = now_s

    def give_time(self) -> None:
        """Gives groups that were not heard yet as long as silent ones."""
        self._since_s = self._now_s

    def note(self, sender: MemberId, beat: Beat | None) -> bool:
        """Notes a message; returns False if it is from an earlier life."""
        heard = self.heard.get(sender.slot)
        if heard is not None and heard.member > sender:
            return False
        self.empty.discard(sender.slot)
        if beat is not None:
            self.heard[sender.slot] = Heard(sender, beat, self._now_s)
        elif heard is not None and heard.member == sender:
            heard.at_s = self._now_s
        return True

    def note_empty(self, slot: int) -> None:
        """Notes that no group lives at a slot."""
        self.empty.add(slot)
        self.heard.pop(slot, None)

    def is_heard(self, member: MemberId) -> bool:
        """Whether a group has been heard in time."""
        heard = self.heard.get(member.slot)
        if heard is None:
            is_new = self._now_s - self._since_s < self._options.timeout_s
            return is_new and member.slot not in self.empty
        is_silent = self._now_s - heard.at_s >= self._options.timeout_s
        return heard.member == member and not is_silent

    def find_joining(self, view: View | None) -> list[MemberId]:
        """Returns the groups without a view that ask to join, by slot."""
        members = () if view is None else view.members
        return sorted(
            heard.member
            for heard in self.heard.values()
            if heard.beat.epoch == NO_VIEW
            and heard.beat.wish == "join"
            and heard.member not in members
            and self.is_heard(heard.member)
        )

    def find_leaving(self, view: View) -> set[MemberId]:
        """Returns the members that want to leave."""
        return {
            heard.member
            for heard in self.heard.values()
            if heard.beat.wish == "leave" and heard.member in view.members
        }

    def have_voted(self, view: View, own: MemberId, step: int) -> bool:
        """Whether all other members of a view have voted for a step in it."""
        for member in view.members:
            heard = self.heard.get(member.slot)
            if member == own:
                continue
            if heard is None or heard.member != member:
                return False
            if heard.beat.epoch != view.epoch or heard.beat.ready < step:
                return False
        return True

    def have_no_state(self, view: View, own: MemberId) -> bool:
        """Whether all other members of a view say that they have no state."""
        for member in view.members:
            heard = self.heard.get(member.slot)
            if member == own:
                continue
            if heard is None or heard.beat.epoch != view.epoch:
                return False
            if heard.beat.committed != NO_STEP:
                return False
        return True
