"""Quorum: which replica groups take part in a step, and is it committed?

Pure: messages, news of slots and the time in; messages out. Views follow one another.
Each is decided by the members of the one before, as in Paxos (Lamport, "Paxos made
simple", 2001), so that there is at most one view per epoch. These decide:

- more than half of the members, or half of them with the oldest; or
- any, if no other member can live: each other slot is empty, or its group says that it
  has no view. So of many groups the last one goes on. What the others have sent before
  they ended is thrown away: it could tell of a view that no living group has decided.

A step is committed when all members of the view have voted for it. A member that has
promised to end a view votes no more in it. So if a member has committed a step, all
have voted for it, and the next view begins with it; and if all that decide have voted
for a step, the next view may begin with it.

The oldest member that is heard proposes. There is nothing to hand over when it ends.
"""

from typing import NamedTuple

from msgspec.structs import replace

from jdp.elastic.attempt import Attempt, make_view
from jdp.elastic.messages import (
    NO_STEP,
    NO_VIEW,
    Accept,
    Accepted,
    Ballot,
    Beat,
    Decided,
    MemberId,
    Message,
    Prepare,
    Promise,
    Refusal,
    View,
    Wish,
)
from jdp.elastic.roster import QuorumOptions, Roster

Sent = tuple[int, Message]  # slot of the receiver.
_RETRY_S = 0.3  # for the answers to an attempt; longer each time.
_MOST_RETRY_S = 2.0


class _Held(NamedTuple):
    """A promise that is given after a step."""

    sender: MemberId
    ballot: Ballot
    after: int


class Quorum:
    """One group's part in the agreement.

    Attributes:
      own: this life of this group.
      view: the view that it is in; None: it is in none, and asks to join one.
      committed: last step that it has committed; `NO_STEP`: it has no state yet.
      ready: last step whose result it has.
      wish: "leave" to be left out of the next view.
      hang_up: slots whose messages that have come, and were not taken yet, must be
        thrown away; the caller empties it.
    """

    def __init__(self, options: QuorumOptions, own: MemberId, *, now_s: float):
        """Begins without a view."""
        self._options = options
        self.own = own
        self.view: View | None = None
        self.committed = self.ready = NO_STEP
        self.wish: Wish = "join"
        self._roster = Roster(options, now_s)
        self.hang_up: set[int] = set()
        self._newcomers: list[MemberId] = []
        self._began_s = self._beat_at_s = now_s
        self._largest = 0
        self._num_failed = 0
        self._forget_attempts()

    # --- What the group does ----------------------------------------------------------

    def vote(self, step: int) -> list[Sent]:
        """Says that this group has the result of a step, the one after `committed`.

        Nothing is said after a promise: the next view says whether the step counts.
        """
        if self.view is None or self._promised is not None:
            return []
        assert step in (self.committed, self.committed + 1)
        self.ready = step
        sent = self._beat_all()
        self._commit()
        return sent

    def take_state(self, step: int) -> None:
        """Notes that this group has got the state of a step from another one."""
        self.committed = self.ready = step

    def come_to_boundary(self) -> list[Sent]:
        """Says that this group is between two steps, and may promise what is asked."""
        if self._held is None or self.committed < self._held.after:
            return []
        held, self._held = self._held, None
        return self._promise(held.sender, held.ballot)

    @property
    def may_step(self) -> bool:
        """Whether this group may begin the next step in its view."""
        if self.view is None or self._promised is not None:
            return False
        return self._held is None or self.committed < self._held.after

    # --- News of slots ----------------------------------------------------------------

    def note_empty(self, slot: int) -> None:
        """Notes that no group lives at a slot: its process has been seen to be gone."""
        if slot != self.own.slot:
            self._roster.note_empty(slot)

    # --- Messages ---------------------------------------------------------------------

    def receive(self, sender: MemberId, message: Message, now_s: float) -> list[Sent]:
        """Takes a message; returns the answers."""
        self._roster.set_time(now_s)
        if sender.slot == self.own.slot or sender.slot not in self._options.slots:
            return []
        beat = message if isinstance(message, Beat) else None
        if not self._roster.note(sender, beat):
            return []
        if isinstance(message, Beat):
            self._commit()
            return self._teach(sender, message.epoch)
        if isinstance(message, Decided):
            self._install(message.view)
            return []
        if message.epoch != self._epoch:
            if self.view is None and isinstance(message, Prepare):
                return self._say_without_view(sender, message)
            return self._teach(sender, message.epoch)
        match message:
            case Prepare(_, ballot, after, empty):
                self.hang_up |= set(empty) - {self.own.slot}
                return self._on_prepare(sender, ballot, after)
            case Promise():
                return self._on_promise(sender, message)
            case Refusal(_, ballot):
                self._largest = max(self._largest, ballot.number)
                if self._attempt is not None and ballot > self._attempt.ballot:
                    self._fail()
            case Accept(_, ballot, view):
                return self._on_accept(sender, ballot, view)
            case Accepted(_, ballot):
                return self._on_accepted(sender, ballot)
        return []

    def tick(self, now_s: float) -> list[Sent]:
        """Sends signs of life and attempts; called ten times per second or more."""
        self._roster.set_time(now_s)
        sent: list[Sent] = []
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self._options.beat_s
            sent += self._beat_all()
        if self._attempt is not None and now_s >= self._attempt.until_s:
            self._fail()
            self._begin_s = now_s + 0.05 * (1 + self._num_failed)
        if self._attempt is None and now_s >= self._begin_s:
            sent += self._try(now_s)
        elif self._attempt is not None and self._attempt.view is None:
            sent += self._propose()
        return sent

    def _teach(self, sender: MemberId, epoch: int) -> list[Sent]:
        """Tells a group that is behind about the view here."""
        if self.view is not None and epoch < self.view.epoch:
            is_new = epoch == NO_VIEW and sender not in self.view.members
            return [] if is_new else [(sender.slot, Decided(self.view))]
        return []

    def _beat_all(self) -> list[Sent]:
        beat = Beat(self._epoch, self.committed, self.ready, self.wish)
        return [(slot, beat) for slot in self._options.slots if slot != self.own.slot]

    def _commit(self) -> None:
        """Commits a step for which all members have voted in this view."""
        if self.view is None or self.ready == self.committed:
            return
        if self._roster.have_voted(self.view, self.own, self.ready):
            self.committed = self.ready

    # --- The decision on the next view ------------------------------------------------

    @property
    def _epoch(self) -> int:
        return NO_VIEW if self.view is None else self.view.epoch

    def _forget_attempts(self) -> None:
        self._promised: Ballot | None = None
        self._accepted: tuple[Ballot, View] | None = None
        self._held: _Held | None = None
        self._attempt: Attempt | None = None
        self._begin_s = 0.0

    def _fail(self) -> None:
        self._attempt = None
        self._num_failed += 1

    def _find_heard(self) -> list[MemberId]:
        """Returns the members that decide and are heard, the oldest first."""
        found = self._voters()
        return [m for m in found if m == self.own or self._roster.is_heard(m)]

    def _voters(self) -> tuple[MemberId, ...]:
        """Returns the members that decide on the next view."""
        if self.view is not None:
            return self.view.members
        return tuple(sorted([self.own, *self._newcomers]))

    def _try(self, now_s: float) -> list[Sent]:
        """Begins an attempt, if a change is due and this member has to propose it."""
        after = NO_STEP
        if self.view is None:
            self._newcomers = self._roster.find_joining(None)
            present = [self.own, *self._newcomers]
            missing = set(self._options.slots) - {m.slot for m in present}
            is_early = now_s - self._began_s < self._options.founding_s
            if self.wish != "join" or min(present) != self.own:
                return []
            if missing - self._roster.empty or (missing and is_early):
                return []  # A group may have a view, or be about to come.
        else:
            heard = self._find_heard()
            if heard[0] != self.own:
                return []
            is_due = len(heard) < len(self.view.members) or self._is_state_lost()
            if not is_due and self._promised is None:
                if not (self._leaving() or self._roster.find_joining(self.view)):
                    return []
                if self.committed != NO_STEP and not self._num_failed:
                    # No member is further than in the step after the next: that needs
                    # votes of this member, which come after this message.
                    after = self.committed + 2
        self._largest += 1
        retry_s = min(_MOST_RETRY_S, _RETRY_S * (1 + self._num_failed))
        if after != NO_STEP:
            retry_s = 4 * self._options.timeout_s  # A step may take long.
        ballot = Ballot(self._largest, self.own)
        empty = frozenset(self._roster.empty)
        self._attempt = Attempt(ballot, now_s + retry_s, empty)
        prepare = Prepare(self._epoch, ballot, after, tuple(sorted(empty)))
        asked = dict.fromkeys([*self._voters(), *self._roster.find_joining(self.view)])
        sent: list[Sent] = [(m.slot, prepare) for m in asked if m != self.own]
        return sent + self._on_prepare(self.own, ballot, after)

    def _is_state_lost(self) -> bool:
        """Whether all that had the state of the view have ended before the others."""
        assert self.view is not None
        if self.view.step == NO_STEP or self.committed != NO_STEP:
            return False
        return self._roster.have_no_state(self.view, self.own)

    def _leaving(self) -> set[MemberId]:
        """Returns the members that want to leave."""
        if self.view is None:
            return set()
        own = {self.own} if self.wish == "leave" else set()
        return own | self._roster.find_leaving(self.view)

    def _on_prepare(self, sender: MemberId, ballot: Ballot, after: int) -> list[Sent]:
        self._largest = max(self._largest, ballot.number)
        if self._promised is not None and self._promised > ballot:
            return [(sender.slot, Refusal(self._epoch, self._promised))]
        if after != NO_STEP and self._promised is None:
            self._held = _Held(sender, ballot, after)
            return []
        self._held = None
        return self._promise(sender, ballot)

    def _say_without_view(self, sender: MemberId, message: Prepare) -> list[Sent]:
        self.hang_up |= set(message.empty) - {self.own.slot}
        nothing = Promise(message.epoch, message.ballot, None, None, NO_STEP, NO_STEP)
        return [(sender.slot, nothing)]

    def _promise(self, sender: MemberId, ballot: Ballot) -> list[Sent]:
        if self._promised is not None and self._promised > ballot:
            return []
        self._promised = ballot
        accepted, view = self._accepted or (None, None)
        promise = Promise(
            self._epoch, ballot, accepted, view, self.committed, self.ready
        )
        if sender == self.own:
            if self._attempt is not None and self._attempt.ballot == ballot:
                self._attempt.promises[self.own] = promise
            return []
        return [(sender.slot, promise)]

    def _on_promise(self, sender: MemberId, promise: Promise) -> list[Sent]:
        attempt = self._attempt
        if attempt is None or attempt.ballot != promise.ballot:
            return []
        if sender not in self._voters():
            attempt.without_view.add(sender)
        else:
            attempt.promises[sender] = promise
        return self._propose() if attempt.view is None else []

    def _propose(self) -> list[Sent]:
        """Asks to accept a view, once all members that are heard have promised."""
        attempt = self._attempt
        assert attempt is not None
        promises = attempt.promises
        if any(member not in promises for member in self._find_heard()):
            return []
        if not self._is_valid(set(promises)):
            return []
        attempt.view = attempt.find_accepted(self._options.slots) or make_view(
            self._epoch + 1,
            self._voters(),
            promises,
            self._leaving(),
            self._roster.find_joining(self.view) if self.view else [],
        )
        accept = Accept(self._epoch, attempt.ballot, attempt.view)
        sent: list[Sent] = [(m.slot, accept) for m in promises if m != self.own]
        return sent + self._on_accept(self.own, attempt.ballot, attempt.view)

    def _on_accept(self, sender: MemberId, ballot: Ballot, view: View) -> list[Sent]:
        if self._promised is not None and self._promised > ballot:
            return [(sender.slot, Refusal(self._epoch, self._promised))]
        self._promised, self._held = ballot, None
        self._accepted = ballot, view
        if sender == self.own:
            return self._on_accepted(self.own, ballot)
        return [(sender.slot, Accepted(self._epoch, ballot))]

    def _on_accepted(self, sender: MemberId, ballot: Ballot) -> list[Sent]:
        attempt = self._attempt
        if attempt is None or attempt.ballot != ballot or attempt.view is None:
            return []
        attempt.accepted.add(sender)
        if not self._is_valid(attempt.accepted):
            return []
        view, voters = attempt.view, self._voters()
        self._install(view)
        others = dict.fromkeys([*view.members, *voters])
        return [(m.slot, Decided(view)) for m in others if m != self.own]

    def _is_majority(self, members: set[MemberId]) -> bool:
        if self.view is None:
            return False
        count = len(members & set(self.view.members))
        if 2 * count == len(self.view.members):
            return self.view.members[0] in members
        return 2 * count > len(self.view.members)

    def _is_valid(self, members: set[MemberId]) -> bool:
        """Whether these members may decide in the attempt of this one."""
        assert self._attempt is not None
        return self._is_majority(members) or self._attempt.are_all(
            members, self._options.slots
        )

    def _install(self, view: View) -> None:
        """Enters a view, or leaves it where this group is left out."""
        if view.epoch <= self._epoch:
            return
        self._num_failed = 0
        self._beat_at_s = 0.0  # All others are to know at once.
        is_new = self.view is None
        if self.own not in view.members:
            if not is_new:
                self._forget_attempts()
                self._rejoin()
            return
        self._forget_attempts()
        self.view = view
        self._roster.give_time()
        if self.wish == "join":
            self.wish = ""
        has_state = view.step in (self.committed, self.ready)
        self.committed = self.ready = view.step if has_state else NO_STEP

    def _rejoin(self) -> None:
        """Begins a further life, without a view."""
        self.view = None
        if self.wish == "leave":
            return
        self.own = replace(self.own, life=self.own.life + 1)
        self.committed = self.ready = NO_STEP
        self.wish = "join"
