"""Attempt: what may a member propose as the next view, by the promises that it has?"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jdp.elastic.messages import NO_STEP, Ballot, MemberId, Promise, View


@dataclasses.dataclass
class Attempt:
    """An attempt of a member to decide on the next view.

    Attributes:
      ballot: its number and its proposer.
      until_s: when it is given up.
      empty: slots at which no group lived when it began.
      promises: promises of members.
      without_view: other groups that have said that they have no view.
      view: view that the members are asked to accept; None: not yet.
      accepted: members that have accepted it.
    """

    ballot: Ballot
    until_s: float
    empty: frozenset[int]
    promises: dict[MemberId, Promise] = dataclasses.field(default_factory=dict)
    without_view: set[MemberId] = dataclasses.field(default_factory=set)
    view: View | None = None
    accepted: set[MemberId] = dataclasses.field(default_factory=set)

    def are_all(self, members: Collection[MemberId], slots: Collection[int]) -> bool:
        """Whether no group at `slots` but these members can have a view."""
        known = {member.slot for member in (*members, *self.without_view)}
        return known | self.empty >= set(slots)

    def find_accepted(self, slots: Collection[int]) -> View | None:
        """Returns the view that may have been decided already, if there is one."""
        views: dict[Ballot, View] = {}
        for promise in self.promises.values():
            if promise.accepted is not None and promise.view is not None:
                views[promise.accepted] = promise.view
        if self.are_all(self.promises, slots):
            # A view whose members have all ended is over, decided or not.
            living = self.promises.keys() | self.without_view
            views = {b: view for b, view in views.items() if living & {*view.members}}
        return views[max(views)] if views else None


def make_view(
    epoch: int,
    voters: Sequence[MemberId],
    promises: Mapping[MemberId, Promise],
    leaving: Collection[MemberId],
    joining: Sequence[MemberId],
) -> View:
    """Makes the view that follows from promises.

    Args:
      epoch: its number.
      voters: members that decide, the oldest first.
      promises: promises of those that take part further.
      leaving: members that want to leave. One of them stays if no other member has the
        state, until one has.
      joining: groups to be taken in.
    """
    having = [m for m in voters if m in promises and promises[m].committed != NO_STEP]
    left = set(leaving)
    staying = (promises.keys() - left) | set(joining)
    if staying and having and left >= set(having):
        left.discard(having[0])
    kept = [m for m in voters if m in promises and m not in left]
    step = max(promise.committed for promise in promises.values())
    if len(having) == len(promises):
        if all(promise.ready > step for promise in promises.values()):
            step += 1  # A member that was lost may have committed it.
    return View(epoch, (*kept, *(m for m in joining if m not in kept)), step)
