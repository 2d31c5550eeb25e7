"""Simulation: replica groups that die, freeze, are cut off, come and leave at random.

    python -m tests.elastic.simulation [--runs 1000] [--slots 8] [--seed 0]

Groups train in steps, which need all members of a view. After some time the disturbance
ends, and then steps must be committed again. At all times, groups that live must agree
on every view that they have been in and on every step that they have committed.
"""

import argparse
import collections
import heapq
import itertools
import random
import sys

from jdp.elastic.messages import NO_STEP, MemberId
from jdp.elastic.quorum import Quorum, QuorumOptions

_TICK_S = 0.1
_END_S = 60.0  # after the disturbance, until a run counts as stopped.


class Wrong(AssertionError):
    """A rule was broken."""


class _Group:
    """A living group: its part in the quorum, and where it is in its loop."""

    def __init__(self, options, member, now_s):
        self.quorum = Quorum(options, member, now_s=now_s)
        self.is_stopped = False
        self.doing = None  # (epoch, step) that it computes.
        self.done = set()  # (epoch, step) that it has computed.
        self.views = {}  # by epoch.
        self.voted = {}  # epoch in which it has voted for a step, by step.
        self.log = {}  # epoch whose sum it has committed, by step.
        self.heal_at_s = None
        self.life = member.life


class Simulation:
    """One run."""

    def __init__(self, num_slots, seed, *, chaos_s, rate):
        self.random = random.Random(seed)
        self.options = QuorumOptions(slots=tuple(range(num_slots)), founding_s=2.0)
        self.groups = dict.fromkeys(range(num_slots))
        self.lives = itertools.count(1)
        self.now_s = 0.0
        self.events = []
        self.counter = itertools.count()
        self.queues = collections.defaultdict(collections.deque)  # by (from, to) slot.
        self.cut = set()  # pairs of slots that do not reach each other.
        self.chaos_s, self.rate = chaos_s, rate
        self.speed = self.random.choice([200.0, 20.0, 5.0])  # messages per second.
        self.dying = self.random.choice([0.0, 0.001, 0.01])
        self.is_quiet = False
        self.num_steps = self.num_kills = self.num_views = 0

    def run(self):
        """Runs to the end; raises `Wrong`."""
        for slot in self.groups:
            if self.random.random() < 0.9:
                self.at(self.random.random(), self.start, slot)
            else:
                self.at(0.0, self.tell_empty, slot)
        self.at(self.random.expovariate(self.rate), self.disturb)
        self.at(self.chaos_s, self.calm)
        while self.events:
            self.now_s, _, act, arguments = heapq.heappop(self.events)
            act(*arguments)
            if self.is_quiet and self.has_recovered():
                return
            if self.now_s > self.chaos_s + _END_S:
                raise Wrong(f"the run has stopped: {self.describe()}")

    def at(self, delay_s, act, *arguments):
        heapq.heappush(
            self.events, (self.now_s + delay_s, next(self.counter), act, arguments)
        )

    # --- Groups -----------------------------------------------------------------------

    def start(self, slot):
        if self.groups[slot] is None:
            member = MemberId(slot, next(self.lives) * 1000)
            self.groups[slot] = _Group(self.options, member, self.now_s)
            for other, group in self.groups.items():
                if group is None:
                    self.queue(other, slot, None)
            self.at(0.0, self.tick, slot, member.life // 1000)

    def tick(self, slot, life):
        group = self.groups[slot]
        if group is None or group.quorum.own.life // 1000 != life:
            return
        if not group.is_stopped:
            self.probe(slot)
            self.send(slot, group.quorum.tick(self.now_s))
            if self.groups[slot] is group:
                self.step(slot)
        self.at(_TICK_S * self.random.uniform(0.8, 1.2), self.tick, slot, life)

    def step(self, slot):
        """Goes on with the loop of a group, as far as it comes without waiting."""
        group = self.groups[slot]
        quorum = group.quorum
        self.check(slot)
        view = quorum.view
        if view is None:
            group.doing = None
            if quorum.wish == "leave":
                self.end(slot)
            return
        if quorum.committed == NO_STEP:
            self.heal(group)
            return
        key = view.epoch, quorum.committed + 1
        if group.doing is not None and group.doing != key:
            group.doing = None  # Committed, or given up with its view.
        if group.doing is None:
            self.send(slot, quorum.come_to_boundary())
            if self.groups[slot] is group and quorum.may_step and quorum.view is view:
                group.doing = key
                self.at(self.random.expovariate(5.0), self.compute, slot, key)
        elif key in group.done and quorum.ready < key[1] and self.all_have(view, key):
            group.voted[key[1]] = view.epoch
            self.send(slot, quorum.vote(key[1]))
            if self.groups[slot] is group:
                self.check(slot)

    def compute(self, slot, key):
        group = self.groups[slot]
        if group is None or group.doing != key:
            return
        if group.is_stopped:
            self.at(0.2, self.compute, slot, key)
            return
        group.done.add(key)
        for member in group.quorum.view.members if group.quorum.view else ():
            other = self.groups[member.slot]
            if other is not None and not other.is_stopped:
                self.step(member.slot)

    def all_have(self, view, key):
        """Whether every member has given its part of a sum."""
        for member in view.members:
            other = self.groups[member.slot]
            if other is None or other.quorum.own != member or key not in other.done:
                return False
        return True

    def heal(self, group):
        """Gets the state from a member that has it, or a checkpoint if nobody has."""
        view = group.quorum.view
        if group.heal_at_s is None:
            group.heal_at_s = self.now_s + self.random.expovariate(5.0)
        if self.now_s < group.heal_at_s:
            return
        group.heal_at_s = None
        if view.step == NO_STEP:
            group.quorum.take_state(0)
            group.log, group.voted = {}, {}
            return
        for member in view.members:
            other = self.groups[member.slot]
            slots = frozenset((member.slot, group.quorum.own.slot))
            if (
                other is not None
                and other.quorum.own == member
                and other.quorum.view == view
                and other.quorum.committed == view.step
                and not other.is_stopped
                and slots not in self.cut
            ):
                group.quorum.take_state(view.step)
                group.log, group.voted = dict(other.log), dict(other.voted)
                return

    # --- The network ------------------------------------------------------------------

    def send(self, slot, sent):
        own = self.groups[slot].quorum.own
        dies = bool(sent) and not self.is_quiet and self.random.random() < self.dying
        if dies:  # In the middle of it.
            self.random.shuffle(sent)
            sent = sent[: self.random.randint(0, len(sent))]
        for to, message in sent:
            self.queue(slot, to, (own, message))
        if dies:
            self.kill(slot)

    def queue(self, sender, to, message):
        """Messages arrive in order; None says that the slot has been seen empty."""
        self.queues[sender, to].append(message)
        self.at(self.random.expovariate(self.speed), self.deliver, sender, to)

    def deliver(self, sender, to):
        queue, group = self.queues[sender, to], self.groups[to]
        if not queue:
            return
        if group is None:
            queue.popleft()  # Refused.
            return
        if frozenset((sender, to)) in self.cut or group.is_stopped:
            self.at(0.2, self.deliver, sender, to)
            return
        message = queue.popleft()
        if message is None:
            if self.groups[sender] is None:
                group.quorum.note_empty(sender)
            return
        self.send(to, group.quorum.receive(*message, self.now_s))
        for slot in group.quorum.hang_up:
            self.queues[slot, to].clear()
        group.quorum.hang_up.clear()
        if self.groups[to] is group:
            self.step(to)

    def probe(self, slot):
        """Looks now and then whether slots are empty."""
        for other, group in self.groups.items():
            is_cut = frozenset((slot, other)) in self.cut
            if group is None and not is_cut and self.random.random() < 0.1:
                self.queue(other, slot, None)

    def tell_empty(self, slot):
        for to in self.groups:
            if to != slot:
                self.queue(slot, to, None)

    # --- Disturbance ------------------------------------------------------------------

    def disturb(self):
        if self.is_quiet:
            return
        slot = self.random.choice(list(self.groups))
        match self.random.choice(["kill", "kill", "stop", "cut", "leave", "split"]):
            case "kill":
                self.kill(slot)
            case "stop":
                if self.groups[slot] is not None:
                    self.groups[slot].is_stopped = True
                    self.at(self.random.uniform(0.1, 9.0), self.resume, slot)
            case "cut":
                other = self.random.choice(list(self.groups))
                if other != slot:
                    self.cut_off([(slot, other)])
            case "split":
                side = [s for s in self.groups if self.random.random() < 0.4]
                rest = [s for s in self.groups if s not in side]
                self.cut_off(list(itertools.product(side, rest)))
            case "leave":
                if self.groups[slot] is not None:
                    self.groups[slot].quorum.wish = "leave"
        self.at(self.random.expovariate(self.rate), self.disturb)

    def cut_off(self, pairs):
        pairs = [frozenset(pair) for pair in pairs]
        self.cut |= set(pairs)
        self.at(self.random.uniform(0.1, 9.0), self.mend, pairs)

    def mend(self, pairs):
        self.cut -= set(pairs)

    def resume(self, slot):
        if self.groups[slot] is not None:
            self.groups[slot].is_stopped = False

    def kill(self, slot):
        if self.groups[slot] is None:
            return
        self.num_kills += 1
        self.end(slot)

    def end(self, slot):
        self.groups[slot] = None
        for sender in self.groups:
            self.queues[sender, slot].clear()
        self.tell_empty(slot)
        self.at(self.random.uniform(0.05, 4.0), self.start, slot)

    def calm(self):
        """Ends the disturbance: all is reachable again, and some slots stay empty."""
        self.is_quiet = True
        self.cut.clear()
        for slot, group in self.groups.items():
            if group is not None:
                group.is_stopped = False
            else:
                self.tell_empty(slot)
        self.goal = None

    # --- Rules ------------------------------------------------------------------------

    def check(self, slot):
        """Whether a group agrees with all others that live."""
        group = self.groups[slot]
        quorum, view = group.quorum, group.quorum.view
        news = False
        if group.life != quorum.own.life:  # It was left out, and has begun anew.
            group.life, group.views = quorum.own.life, {}
            group.voted, group.log = {}, {}
        if view is not None and view.epoch not in group.views:
            group.views[view.epoch] = view
            self.num_views += 1
            news = True
        if quorum.committed != NO_STEP and quorum.committed not in group.log:
            group.log[quorum.committed] = group.voted.get(quorum.committed, -1)
            self.num_steps += 1
            news = True
        if not news:
            return
        for other in self.groups.values():
            if other is None or other is group:
                continue
            for epoch in {*group.views} & {*other.views}:
                if group.views[epoch] != other.views[epoch]:
                    raise Wrong(
                        f"two views in epoch {epoch}: {group.views[epoch]} and "
                        f"{other.views[epoch]}"
                    )
            for step in {*group.log} & {*other.log}:
                if group.log[step] != other.log[step]:
                    raise Wrong(
                        f"step {step} was committed twice, in epochs "
                        f"{group.log[step]} and {other.log[step]}"
                    )

    def has_recovered(self):
        """Whether all living groups that want to are in one view and commit steps."""
        living = [
            g
            for g in self.groups.values()
            if g is not None and g.quorum.wish != "leave"
        ]
        if not living:
            return True
        views = {g.quorum.view for g in living}
        if len(views) > 1 or None in views:
            return False
        (view,) = views
        if {g.quorum.own for g in living} != set(view.members):
            return False
        steps = [g.quorum.committed for g in living]
        if min(steps) == NO_STEP:
            return False
        if self.goal is None or self.goal[0] != view.epoch:
            self.goal = view.epoch, max(steps) + 3
        return min(steps) >= self.goal[1]

    def describe(self):
        return [
            (g.quorum.own, g.quorum.view, g.quorum.committed, g.quorum.wish)
            if g
            else None
            for g in self.groups.values()
        ]


def run(num_slots, seed, *, chaos_s=20.0, rate=1.0):
    """Runs one schedule; returns the simulation."""
    simulation = Simulation(num_slots, seed, chaos_s=chaos_s, rate=rate)
    simulation.run()
    return simulation


def main() -> None:
    """Runs many schedules."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=0, help="0: from 1 to 8.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    wrong = steps = kills = views = 0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        rng = random.Random(seed)
        slots = arguments.slots or rng.randint(1, 8)
        try:
            done = run(slots, seed, rate=rng.choice([0.3, 1.0, 3.0]))
        except Wrong as error:
            print(f"seed {seed}, {slots} slots: {error}", flush=True)
            wrong += 1
            continue
        steps, kills = steps + done.num_steps, kills + done.num_kills
        views += done.num_views
    print(
        f"{arguments.runs} runs, {kills} kills, {views} views entered, {steps} steps "
        f"committed: {wrong} wrong"
    )
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
