"""Replica groups agree on who takes part, and on which steps are committed."""

import itertools

import pytest

from jdp.elastic import messages
from jdp.elastic.messages import (
    NO_STEP,
    Accepted,
    Ballot,
    Beat,
    Decided,
    MemberId,
    Prepare,
    Promise,
    View,
)
from jdp.elastic.quorum import Quorum
from jdp.elastic.roster import QuorumOptions
from jdp.replicas import wire
from tests.elastic import elastic_messages, simulation

A, B, C = (MemberId(slot, 1) for slot in range(3))


class _Network:
    """Groups whose messages arrive at once, in time that passes in ticks."""

    def __init__(self, members, *, num_slots=None):
        slots = tuple(range(num_slots or len(members)))
        self.options = QuorumOptions(slots=slots)
        self.groups = {}
        self.now_s = 0.0
        for member in members:
            self.start(member)
        for slot in slots:
            if slot not in self.groups:
                self.tell_empty(slot)

    def start(self, member):
        self.groups[member.slot] = Quorum(self.options, member, now_s=self.now_s)

    def end(self, slot):
        del self.groups[slot]
        self.tell_empty(slot)

    def tell_empty(self, slot):
        for group in self.groups.values():
            group.note_empty(slot)

    def send(self, slot, sent, *, lost=()):
        waiting = [(slot, *each) for each in sent]
        while waiting:
            sender, to, message = waiting.pop(0)
            if to in self.groups and to not in lost:
                body = messages.decode(messages.encode(message))
                own = self.groups[sender].own
                found = self.groups[to].receive(own, body, self.now_s)
                waiting += [(to, *each) for each in found]

    def pass_time(self, seconds, *, frozen=()):
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            for slot, group in list(self.groups.items()):
                if slot not in frozen:
                    self.send(slot, group.tick(self.now_s), lost=frozen)

    def step(self, number, *, votes=None):
        """All, or some, vote for a step."""
        for slot in self.groups if votes is None else votes:
            self.send(slot, self.groups[slot].vote(number))

    def boundary(self):
        for slot, group in self.groups.items():
            self.send(slot, group.come_to_boundary())

    def give_state(self, step=0):
        for group in self.groups.values():
            group.take_state(step)

    def views(self):
        return {slot: group.view for slot, group in self.groups.items()}


def _founded(members, **options):
    network = _Network(members, **options)
    network.pass_time(6.0)
    network.give_state()
    return network


def test_the_first_groups_found_a_run_together():
    network = _Network([A, B, C])
    network.pass_time(1.0)
    assert set(network.views().values()) == {View(0, (A, B, C), NO_STEP)}
    assert all(group.may_step for group in network.groups.values())


def test_empty_slots_are_waited_for_and_silent_ones_forever():
    network = _Network([A, B], num_slots=3)
    network.pass_time(4.5)
    assert set(network.views().values()) == {None}
    network.pass_time(1.5)
    assert set(network.views().values()) == {View(0, (A, B), NO_STEP)}
    # Whoever is silent may have a view.
    silent = Quorum(QuorumOptions(slots=(0, 1)), A, now_s=0.0)
    for k in range(1000):
        silent.tick(k / 10)
    assert silent.view is None


def test_a_step_is_committed_when_all_have_voted():
    network = _founded([A, B, C])
    network.step(1, votes=[0, 1])
    assert [g.committed for g in network.groups.values()] == [0, 0, 0]
    network.step(1, votes=[2])
    assert [g.committed for g in network.groups.values()] == [1, 1, 1]


def test_who_is_left_goes_on_from_what_all_of_them_have():
    network = _founded([A, B, C])
    network.step(1, votes=[0, 1, 2])
    network.step(2, votes=[0, 1])
    network.end(2)
    network.pass_time(0.5)
    assert set(network.views().values()) == {View(1, (A, B), 2)}
    assert [g.committed for g in network.groups.values()] == [2, 2]


def test_a_step_that_one_of_them_lacks_is_run_again():
    network = _founded([A, B, C])
    network.step(1, votes=[0, 2])
    network.end(2)
    network.pass_time(0.5)
    assert set(network.views().values()) == {View(1, (A, B), 0)}
    assert [g.ready for g in network.groups.values()] == [0, 0]


def test_the_oldest_is_replaced_like_any_other_and_the_last_goes_on_alone():
    network = _founded([A, B, C])
    network.end(0)
    network.pass_time(0.5)
    assert set(network.views().values()) == {View(1, (B, C), 0)}
    network.end(1)
    network.pass_time(0.5)
    assert set(network.views().values()) == {View(2, (C,), 0)}
    network.step(1)
    assert network.groups[2].committed == 1


def test_a_frozen_group_is_left_out_after_a_while_and_joins_anew():
    network = _founded([A, B, C])
    network.pass_time(2.5, frozen=(1,))
    assert network.views()[0].epoch == 0
    network.pass_time(1.5, frozen=(1,))
    assert network.views()[0] == View(1, (A, C), 0)
    network.pass_time(0.3)
    assert network.groups[1].own == MemberId(1, 2)
    assert network.groups[1].committed == NO_STEP
    for number in (1, 2):
        network.step(number, votes=[0, 2])
        network.boundary()
    network.pass_time(0.3)
    assert network.views()[1] == View(2, (A, C, MemberId(1, 2)), 2)


def test_of_two_halves_the_one_with_the_oldest_goes_on():
    network = _founded([A, B])
    network.pass_time(4.0, frozen=(1,))
    assert network.views()[0] == View(1, (A,), 0)
    network = _founded([A, B])
    network.pass_time(20.0, frozen=(0,))
    assert network.views()[1] == View(0, (A, B), NO_STEP)
    assert not network.groups[1].may_step  # It has promised to end the view.


def test_nobody_votes_after_a_promise():
    network = _founded([A, B])
    group = network.groups[1]
    (answer,) = group.receive(A, Prepare(0, Ballot(9, A)), network.now_s)
    assert isinstance(answer[1], Promise)
    assert group.vote(1) == [] and group.ready == 0


def test_a_group_joins_between_two_steps_and_no_step_is_lost():
    network = _founded([A, B], num_slots=3)
    network.start(C)
    network.pass_time(0.3)
    # The members may be in the middle of a step, and of the next one.
    assert all(network.groups[slot].may_step for slot in (0, 1))
    for number in (1, 2):
        network.boundary()
        network.step(number, votes=[0, 1])
    assert [network.groups[slot].committed for slot in (0, 1)] == [2, 2]
    assert not network.groups[0].may_step
    network.boundary()
    network.pass_time(0.2)
    assert set(network.views().values()) == {View(1, (A, B, C), 2)}
    assert network.groups[2].committed == NO_STEP
    network.groups[2].take_state(2)
    network.step(3)
    assert [g.committed for g in network.groups.values()] == [3, 3, 3]


def test_who_leaves_stays_until_another_member_has_the_state():
    network = _founded([A], num_slots=2)
    network.groups[0].wish = "leave"
    network.start(B)
    network.pass_time(0.3)
    for number in (1, 2):
        network.boundary()
        network.step(number, votes=[0])
    network.boundary()
    network.pass_time(0.2)
    assert network.views()[1] == View(1, (A, B), 2)
    network.groups[1].take_state(2)
    for number in (3, 4, 5):
        network.pass_time(0.6)
        network.boundary()
        network.step(number)
    network.boundary()
    network.pass_time(0.6)
    assert network.views() == {0: None, 1: View(2, (B,), 4)}


def test_a_run_whose_state_is_lost_says_so():
    network = _founded([A], num_slots=2)
    network.start(B)
    for number in (1, 2):
        network.pass_time(0.3)
        network.boundary()
        network.step(number, votes=[0])
    network.boundary()
    network.pass_time(0.2)
    network.end(0)  # Before it could give the state to the other.
    network.pass_time(1.0)
    assert network.views() == {1: View(2, (B,), NO_STEP)}


def test_messages_of_an_earlier_life_are_not_heard():
    group = Quorum(QuorumOptions(slots=(0, 1)), A, now_s=0.0)
    group.receive(MemberId(1, 7), Beat(-1, -1, -1, "join"), 0.1)
    group.receive(MemberId(1, 6), Decided(View(4, (A, B), 3)), 0.2)
    assert group.view is None
    group.receive(MemberId(1, 7), Decided(View(4, (A, B), 3)), 0.3)
    assert group.view == View(4, (A, B), 3)


def test_what_empty_slots_have_sent_is_thrown_away():
    """Else a group could enter a view that only those have decided who have ended."""
    network = _founded([A, B], num_slots=4)
    member, stranger = network.groups[1], Quorum(network.options, C, now_s=0.0)
    prepare = Prepare(0, Ballot(9, A), empty=(2, 3))
    member.receive(A, prepare, 7.0)
    assert member.hang_up == {2, 3}
    ((to, answer),) = stranger.receive(A, prepare, 7.0)
    assert (to, answer.committed, answer.epoch) == (0, NO_STEP, 0)
    assert stranger.hang_up == {3}  # Not at its own.


def test_a_view_that_may_have_been_decided_is_proposed_again():
    network = _founded([A, B, C])
    view = View(1, (A, B, C), 0)
    accepted = Ballot(5, C)
    for slot in (1, 2):
        network.groups[slot].receive(
            C if slot == 1 else B, messages.Accept(0, accepted, view), network.now_s
        )
    network.end(2)
    network.pass_time(0.5)
    # It counts, with the member that has ended; the next view is without it.
    assert set(network.views().values()) == {View(2, (A, B), 0)}


def test_larger_attempts_win():
    group = _founded([A, B]).groups[1]
    group.receive(A, Prepare(0, Ballot(9, A)), 7.0)
    ((_, refusal),) = group.receive(A, Prepare(0, Ballot(8, A)), 7.0)
    assert refusal == messages.Refusal(0, Ballot(9, A))
    view = View(1, (A, B), 0)
    ((_, refusal),) = group.receive(A, messages.Accept(0, Ballot(8, A), view), 7.0)
    assert refusal == messages.Refusal(0, Ballot(9, A))
    ((_, answer),) = group.receive(A, messages.Accept(0, Ballot(9, A), view), 7.0)
    assert answer == Accepted(0, Ballot(9, A))


def test_senders_without_a_slot_are_not_heard():
    group = _founded([A, B]).groups[1]
    for slot in (1, 2, -1):
        decided = Decided(View(8, (MemberId(slot, 1),), 3))
        assert group.receive(MemberId(slot, 5), decided, 7.0) == []
    assert group.view.epoch == 0


@pytest.mark.parametrize(
    "message", elastic_messages.ALL, ids=lambda m: type(m).__name__
)
def test_messages_are_decoded_as_they_were(message):
    assert messages.decode(messages.encode(message)) == message
    with pytest.raises(wire.DecodeError):
        messages.decode(messages.encode(message)[:-1])


# --- Random schedules -----------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 8])
def test_random_deaths_freezes_and_partitions(num_slots):
    done = [
        simulation.run(num_slots, seed, rate=rate)
        for seed, rate in itertools.product(range(12), (0.3, 1.0, 3.0))
    ]
    assert sum(each.num_kills for each in done) > 20
    assert sum(each.num_steps for each in done) > 300


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [4, 16])
def test_many_random_schedules(num_slots):
    for seed in range(1000, 1000 + 4800 // num_slots**2):
        simulation.run(num_slots, seed)


def test_the_simulation_finds_a_quorum_that_is_too_small(monkeypatch):
    monkeypatch.setattr(Quorum, "_is_majority", lambda self, members: bool(members))
    with pytest.raises(simulation.Wrong):
        for seed in range(200):
            simulation.run(5, seed)
