"""Simulation: a coordinator, and ranks whose messages are late, against an oracle.

There are more names than slots, so that slots are taken back and given to others while
bits for them are on their way. Some names are small, and travel with the agreement;
some run in groups, in process sets that come and go, or differ between ranks; some
groups have other leaves on other ranks. A rank hears batches while it holds requests
back. Ranks join, and ask whether what they wait for is lost. Every sum is checked, that
every name is decided once on each rank and not before the rank has sent its request,
and that the coordinator waits for just the names that the ranks wait for.

python -m tests.eager.coordinator_simulation --decisions 1000000 --seed 1
"""

import argparse
import collections
import dataclasses
import random
import time
from typing import NamedTuple

import numpy as np

from jdp.eager import checks, messages
from jdp.eager.coordinator.cache_slots import bits
from jdp.eager.coordinator.coordinator import Coordinator
from jdp.eager.execution import small_tensors
from jdp.eager.messages import Batch, FromRank, ProtocolError, Request, Spec
from jdp.eager.options import CoordinatorOptions
from jdp.eager.response_cache import ResponseCache

_SHAPES = ((1,), (4,), (1000,))  # the last one is too large to be carried.
_NUM_NAMES = 14
_GROUPS = {"g": {"n0", "n1", "n5"}, "h": {"n2", "n3"}}
_TORN = ("n14", "n15", "n16", "n17")  # names of a group of which ranks may differ.
_MIXED = ("n18", "n19", "n20", "n21", "n22")  # the same of several groups.


class Wrong(AssertionError):
    """What the simulation is there to find."""


class Call(NamedTuple):
    """One operation of a plan: the same on all ranks, unless it is to fail."""

    set_id: int
    name: str
    number: int  # how often the name came before, in this process set.
    specs: dict[int, Spec]  # by rank that submits it.
    is_wrong: bool  # whether ranks differ, here or in the group.
    round: int = 0  # of the plan: all leaves of a group are of one.
    is_mixed: bool = False  # of one rank alone: it may fail, or run with any other.

    @property
    def key(self):
        """What the engine knows it by."""
        return self.set_id, self.name

    def group_of(self, rank):
        """The process set and group that a rank submits it in, or None."""
        group = self.specs[rank].group
        return (self.set_id, group) if group else None


@dataclasses.dataclass
class _Entry:
    """Stands for `jdp.eager.entries.Entry`."""

    call: Call
    request: Request
    array: np.ndarray
    is_small: bool

    @property
    def key(self):
        return self.call.key


class _Rank:
    """One rank: what it has still to submit, what it waits for, and its queues."""

    def __init__(self, rank):
        self.rank = rank
        self.cache = ResponseCache()
        self.plan = collections.deque()
        self.pending = {}
        self.queue = []  # submitted, and not sent.
        self.joins = self.has_joined = False
        self.sent = collections.deque()  # to the coordinator.
        self.coming = collections.deque()  # from it.
        self.gone = set()  # process sets that were removed.
        self.log = []  # what was decided, in order.


class Simulation:
    """One job; `run` goes on until so many names have been decided."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.size = rng.randint(2, 4)
        capacity = rng.choice((1, 2, 4, 7, 10, 13, 16, 20))
        fusion_bytes = rng.choice((0, 16, 64, 9000, 1 << 20))
        fuse_groups = rng.random() < 0.5
        self.coordinator = Coordinator(
            self.size,
            CoordinatorOptions(
                fusion_bytes=fusion_bytes,
                cache_capacity=capacity,
                fuse_groups=fuse_groups,
            ),
        )
        self.ranks = [_Rank(rank) for rank in range(self.size)]
        self.sets = {0: tuple(range(self.size))}
        self.counts = collections.Counter()
        self.decided = {}  # by call: whether it failed, and who heard of it.
        self.num_decisions = self.num_sums = 0
        self.now_s = 0.0
        self.tunes = rng.random() < 0.2
        # Jobs of few names that are all small are carried mostly.
        self.num_names = rng.choice((2, 5, 8, _NUM_NAMES))
        self.is_small = rng.random() < 0.7
        self.num_rounds = 0
        self.most = rng.choice(((1,), (1, 2), (1, 1, 2, 5)))
        self.max_sets = rng.choice((1, 2, 4))

    def run(self, num_decisions):
        while self.num_decisions < num_decisions:
            self._change_sets()
            self._plan()
            self._run_epoch()

    # What is to be done

    def _plan(self):
        """Plans some rounds; ranks may join after another number of them."""
        rng = self.rng
        num_rounds = rng.randint(1, 60)
        joins = rng.random() < 0.3
        mixes, mixed = joins and rng.random() < 0.5, set()
        last = [rng.randint(0, num_rounds) if joins else num_rounds for _ in self.ranks]
        for number in range(num_rounds):
            set_id = rng.choice(list(self.sets))
            ranks = [r for r in self.sets[set_id] if last[r] > number]
            if mixes and set_id not in mixed and rng.random() < 0.2:
                mixed.add(set_id)
                self._add_mixed(set_id, ranks)
            calls = self._make_round(set_id, ranks, joins)
            for rank in ranks:
                mine = [call for call in calls if rank in call.specs]
                self.ranks[rank].plan.extend(rng.sample(mine, len(mine)))
        for rank in self.ranks:
            rank.joins = joins

    def _make_round(self, set_id, ranks, joins):
        rng = self.rng
        self.num_rounds += 1
        if rng.random() < 0.1:
            return self._make_torn(set_id, ranks)
        num_names = rng.randint(1, min(4, self.num_names))
        names = {f"n{i}" for i in rng.sample(range(self.num_names), num_names)}
        touched = [each for each, of_it in _GROUPS.items() if names & of_it]
        group = touched[0] if touched and rng.random() < 0.8 else ""
        in_group = _GROUPS.get(group, set())
        names |= in_group
        calls, names = [], sorted(names)
        odd = ""
        if len(ranks) > 1 and rng.random() < 0.02:
            odd = rng.choice(names)
        for name in names:
            # Mostly the same under one name, so that it is cached.
            shape = _SHAPES[hash_of(name) % (2 if self.is_small else 3)]
            if rng.random() < 0.02:
                shape = (5,)
            spec = Spec("all_reduce", "int64", shape, op="sum")
            if name in in_group:
                spec = replace(spec, group=group, group_size=len(in_group))
            elif not (joins or self.is_small) and hash_of(name) % 5 == 4:
                spec = replace(spec, kind="all_gather", shape=(2,), op="")
            specs = dict.fromkeys(ranks, spec)
            if name == odd:
                specs[rng.choice(ranks)] = replace(spec, shape=(7, 7, 7))
            is_wrong = bool(odd) and (name == odd or {name, odd} <= set(in_group))
            number = self.counts[set_id, name]
            self.counts[set_id, name] += 1
            call = Call(set_id, name, number, specs, is_wrong, self.num_rounds)
            calls.append(call)
        return calls

    def _make_torn(self, set_id, ranks):
        """A group whose leaves may differ between ranks; perhaps none is on all."""
        rng, specs = self.rng, collections.defaultdict(dict)
        leaves = dict.fromkeys(ranks, _TORN[:2])
        if rng.random() < 0.5:
            most = rng.randint(1, 3)
            leaves = {r: rng.sample(_TORN, rng.randint(1, most)) for r in ranks}
        for rank, names in leaves.items():
            for name in names:
                shape = _SHAPES[hash_of(name) % (2 if self.is_small else 3)]
                spec = Spec("all_reduce", "int64", shape, op="sum")
                specs[name][rank] = replace(spec, group="t", group_size=len(names))
        is_torn = len({frozenset(names) for names in leaves.values()}) > 1
        calls = []
        for name, of_ranks in specs.items():
            number = self.counts[set_id, name]
            self.counts[set_id, name] += 1
            call = Call(set_id, name, number, of_ranks, is_torn, self.num_rounds)
            calls.append(call)
        return calls

    def _add_mixed(self, set_id, ranks):
        """Names that are in a group on one rank, and alone or in another on others.

        Each comes once before all join: what a rank waits for must not hinder it.
        """
        rng = self.rng
        for rank in ranks:
            names, groups = rng.sample(_MIXED, len(_MIXED)), rng.sample("uvwxy", 5)
            while names and rng.random() < 0.9:
                num = rng.randint(1, min(3, len(names)))
                names, leaves = names[num:], names[:num]
                group = groups.pop() if num > 1 or rng.random() < 0.5 else ""
                spec = Spec("all_reduce", "int64", (1,), op="sum")
                spec = replace(spec, group=group, group_size=num if group else 0)
                self.num_rounds += 1
                for name in leaves:
                    number = self.counts[set_id, name]
                    self.counts[set_id, name] += 1
                    call = Call(
                        set_id, name, number, {rank: spec}, False, self.num_rounds, True
                    )
                    self.ranks[rank].plan.append(call)

    def _change_sets(self):
        """Adds and removes process sets, with what still waits in them."""
        rng = self.rng
        if rng.random() < 0.2 and len(self.sets) < self.max_sets:
            ranks = tuple(
                sorted(rng.sample(range(self.size), rng.randint(1, self.size)))
            )
            set_id = self._agree(Spec("add_process_set", shape=ranks))
            self.sets[set_id] = ranks
        elif rng.random() < 0.1 and len(self.sets) > 1:
            set_id = rng.choice([each for each in self.sets if each])
            members = self.sets[set_id]
            late = rng.sample(members, rng.randint(0, len(members) - 1))
            name = f"n{rng.randrange(_NUM_NAMES)}"
            spec = Spec("all_reduce", "int64", (1,), op="sum")
            number = self.counts[set_id, name]
            self.counts[set_id, name] += 1
            orphan = Call(set_id, name, number, dict.fromkeys(late, spec), True)
            self._agree(Spec("remove_process_set", shape=(set_id,)), orphan)
            del self.sets[set_id]
            self.counts = collections.Counter(
                {key: n for key, n in self.counts.items() if key[0] != set_id}
            )

    def _agree(self, spec, orphan=None):
        name = f"unnamed {spec.kind}"
        number = self.counts[0, name]
        self.counts[0, name] += 1
        call = Call(0, name, number, dict.fromkeys(range(self.size), spec), False)
        for rank in self.ranks:
            rank.plan.append(call)
            if orphan is not None and rank.rank in orphan.specs:
                # Before it or after it, from another thread.
                rank.plan.insert(self.rng.randint(0, 1), orphan)
        self.number = None
        self._run_epoch()
        return self.number

    # What happens, in random order

    def _run_epoch(self):
        rng = self.rng
        # Some ranks are slow in one thing, some in another.
        speed = [[rng.choice((0.1, 0.5, 1.0)) for _ in range(3)] for _ in self.ranks]
        eager_s = rng.choice((0.05, 0.5, 1.0))
        while True:
            self.now_s += 1.0
            moves, weights = [], []
            for rank, (submits, delivers, hears) in zip(self.ranks, speed, strict=True):
                if rank.sent:
                    moves.append((self._deliver, rank))
                    weights.append(delivers)
                if rank.coming:
                    moves.append((self._hear, rank))
                    weights.append(hears)
                if not rank.has_joined and self._can_go_on(rank):
                    moves.append((self._submit, rank))
                    weights.append(submits)
                if rank.queue:
                    moves.append((self._say, rank))
                    weights.append(submits)
            if not moves:
                if self._is_quiet():
                    break
                continue
            ((what, rank),) = rng.choices(moves, weights)
            what(rank)
            chance = rng.random()
            if what == self._deliver and chance < eager_s:
                self._decide()
            if chance < 0.01:
                self._ask(rank)
            if self.tunes and chance < 0.001:
                self.coordinator.tune(
                    fusion_bytes=rng.choice((0, 64, 1 << 20)),
                    cache_enabled=rng.random() < 0.7,
                )

    def _is_quiet(self):
        """Whether all is done; raises where nothing can go on."""
        if self._decide():
            return False
        if not any(rank.plan or rank.joins for rank in self.ranks):
            self._compare_waits()
        for rank in self.ranks:
            if rank.pending or rank.plan or rank.has_joined:
                raise Wrong(f"rank {rank.rank} waits for ever for {rank.pending}")
            rank.joins = False
            if rank.log != self.ranks[0].log:
                raise Wrong("the ranks were told different things")
        if self.coordinator._names.came:
            raise Wrong(f"{self.coordinator._names.came} is left of groups")
        for call, heard in self.decided.items():
            if heard != set(call.specs):
                raise Wrong(f"{call} was decided on {heard} alone")
        for rank in self.ranks:
            rank.log.clear()
        self.decided.clear()
        return True

    def _can_go_on(self, rank):
        if not rank.plan:
            return rank.joins
        call = rank.plan[0]
        if call.key in rank.pending or rank.has_joined:
            return False
        group = call.group_of(rank.rank)
        if group is None:
            return True
        # The leaves of a group are submitted at once: none while a name is in use.
        names = [
            each.key
            for each in rank.plan
            if each.round == call.round and each.group_of(rank.rank) == group
        ]
        rounds = {
            each.call.round
            for each in rank.pending.values()
            if each.call.group_of(rank.rank) == group
        }
        return rounds <= {call.round} and not any(key in rank.pending for key in names)

    def _submit(self, rank):
        """Puts what became ready into the queue, and mostly sends it at once."""
        num, most, whole = 0, self.rng.choice(self.most), 0
        while rank.plan and self._can_go_on(rank):
            if num >= most and rank.plan[0].round != whole:
                break
            call = rank.plan.popleft()
            if call.name in _TORN or call.is_mixed:
                whole = call.round  # All leaves at once.
            entry = _make_entry(rank.rank, call)
            rank.pending[call.key] = entry
            rank.queue.append(entry)
            num += 1
        if self.rng.random() < 0.8 or rank.joins and not rank.plan:
            self._say(rank)

    def _say(self, rank):
        """One message, with all that is in the queue, as `Engine._say` makes it."""
        queue, rank.queue, entries = rank.queue, [], []
        joined = rank.joins and not rank.plan
        for entry in queue:
            if rank.pending.get(entry.key) is not entry:
                raise Wrong(f"{entry.call} was decided before it was sent")
            if entry.call.set_id in rank.gone:  # It refuses it by itself.
                del rank.pending[entry.key]
                self._note_decided(rank, entry)
            else:
                entries.append(entry)
        full, hits, slots = [], 0, []
        for entry in entries:
            place = self.sets[entry.call.set_id].index(rank.rank)
            slot = rank.cache.find(entry.request, place)
            if slot is None:
                full.append(entry.request)
            else:
                hits |= 1 << slot
                slots.append(slot)
        data = (
            () if len(slots) < len(entries) else small_tensors.collect(entries, slots)
        )
        bits = hits.to_bytes((hits.bit_length() + 7) // 8, "little")
        self._send(rank, FromRank(0, tuple(full), bits, data, joined))
        if joined:
            rank.joins, rank.has_joined = False, True

    def _ask(self, rank):
        """Asks about what it waits for, as `lost.Watch` does."""
        said = {k: e for k, e in rank.pending.items() if e not in rank.queue}
        if said:
            doubts = [(*key, each.call.number) for key, each in said.items()]
            self._send(rank, FromRank(doubts=tuple(doubts)))

    def _send(self, rank, message):
        message = messages.msgspec.structs.replace(message, seen=rank.cache.num_seen)
        rank.sent.append(messages.encode(message))

    def _deliver(self, rank):
        message = messages.decode_from_rank(rank.sent.popleft())
        self.coordinator.receive(rank.rank, message, now_s=self.now_s)
        if message.doubts:
            unknown = self.coordinator.find_unknown(rank.rank, message.doubts)
            if unknown:
                rank.coming.append(messages.encode(Batch(unknown=unknown)))

    def _decide(self):
        batch = self.coordinator.decide(now_s=self.now_s)
        if batch is None:
            return False
        for rank, hits in enumerate(self.coordinator._hits.of_rank):
            for slot in self.coordinator._hits.slots_with_data(rank):
                if not hits >> slot & 1:
                    raise Wrong(f"a tensor of rank {rank} is left in slot {slot}")
        payload = messages.encode(batch)
        for rank in self.ranks:
            rank.coming.append(payload)
        return True

    def _hear(self, rank):
        batch = messages.decode_batch(rank.coming.popleft())
        checks.check_batch(batch, size=self.size)
        if batch.unknown:
            for *key, number in batch.unknown:
                entry = rank.pending.get(tuple(key))
                if entry is not None and entry.call.number == number:
                    raise Wrong(f"{entry.call} is lost")
            return
        whole = rank.cache.apply(batch)
        data = batch.data or (b"",) * len(whole)
        for response, reduced in zip(whole, data, strict=False):  # Found as lost.
            self._check(rank, response, reduced)
        if batch.last_joined >= 0:
            rank.has_joined = False
            rank.log.append(batch.last_joined)

    # The oracle

    def _check(self, rank, response, data):
        set_id = response.process_set
        is_mine = not response.ranks or rank.rank in response.ranks
        entries = [
            rank.pending.pop((set_id, name), None) if is_mine else None
            for name in response.names
        ]
        rank.log.append((set_id, response.names, response.error, data))
        if response.error:
            for entry in entries:
                if entry is not None and not (
                    entry.call.is_wrong or entry.call.is_mixed
                ):
                    raise Wrong(f"{entry.call}: {response.error}")
        elif rank.rank in self.sets[set_id]:
            checks.check_entries(
                response,
                entries,
                has_joined=rank.has_joined,
                place=self.sets[set_id].index(rank.rank),
            )
        for entry in entries:
            if entry is None:
                continue
            if entry.call.is_wrong and not response.error:
                raise Wrong(f"{entry.call} must fail")
            self._note_decided(rank, entry)
        spec = messages.decode_spec(response.specs[0])
        if spec.kind == "add_process_set":
            self.number = response.locals[0][0][0]
            rank.gone.discard(self.number)
        elif spec.kind == "remove_process_set":
            rank.gone.add(*spec.shape)
        if data:
            self._check_sums(entries, data)

    def _note_decided(self, rank, entry):
        heard = self.decided.setdefault(_Id(entry.call), set())
        if rank.rank in heard:
            raise Wrong(f"{entry.call} was decided twice on rank {rank.rank}")
        heard.add(rank.rank)
        if len(heard) == 1:
            self.num_decisions += 1

    def _compare_waits(self):
        """Compares what ranks wait for with what the coordinator waits for."""
        for rank in self.ranks:
            for key, entry in rank.pending.items():
                if not self.coordinator._is_awaited(rank.rank, key):
                    raise Wrong(f"{entry.call} is lost on rank {rank.rank}")
        for (set_id, name), ranks in waiting_of(self.coordinator).items():
            for rank in ranks:
                if (set_id, name) not in self.ranks[rank].pending:
                    raise Wrong(f"{name!r} of rank {rank} was decided, and is awaited")

    def _check_sums(self, entries, data):
        """Compares with the sum of what the ranks gave in this call of the name."""
        found = np.frombuffer(data, np.int64)
        for entry in entries:
            if entry is None:
                continue
            call = entry.call
            if call.is_mixed:
                found = found[entry.array.size :]
                continue
            wanted = sum(value_of(call, rank) for rank in self.sets[call.set_id])
            if set(call.specs) != set(self.sets[call.set_id]):
                raise Wrong(f"{call} was summed without a rank")
            mine, found = np.split(found, [entry.array.size])
            if not (mine == wanted).all():
                raise Wrong(f"{call}: {mine} instead of {wanted}")
            self.num_sums += 1
        if None not in entries and found.size:
            raise Wrong("more sums than names")


class _Id(NamedTuple):
    """A call, as a key."""

    call: Call

    def __hash__(self):
        return hash(self.call[:3])

    @property
    def specs(self):
        return self.call.specs


def waiting_of(coordinator):
    """By process set and name, the ranks that the coordinator believes to wait."""
    names = coordinator._names
    waiting = {
        (set_id, name): each.ranks
        for set_id, table in names.tables.items()
        for name, each in table.items()
    }
    for rank, hits in enumerate(coordinator._hits.of_rank):
        for slot in bits(hits):
            cached = coordinator._slots.get(slot)
            waiting.setdefault((cached.process_set, cached.name), []).append(rank)
    return waiting


def hash_of(name):
    """A number that is the same in every process."""
    return int(name[1:]) * 7 + 3


def value_of(call, rank):
    """What a rank gives: no other call has it."""
    mixed = (call.set_id, hash_of(call.name), call.number, rank)
    value = 0
    for part in mixed:
        value = (value * 1_000_003 + part + 1) & (1 << 50) - 1
    return value


def replace(spec, **changes):
    """A spec with other fields."""
    return messages.msgspec.structs.replace(spec, **changes)


def _make_entry(rank, call):
    spec = call.specs[rank]
    local = (rank + call.number % 3,) if spec.kind == "all_gather" else ()
    request = Request(call.name, messages.encode_spec(spec), call.set_id, local)
    is_tensor = spec.kind == "all_reduce" and not call.is_wrong
    array = np.full(spec.shape, value_of(call, rank) if is_tensor else 0, np.int64)
    is_small = small_tensors.is_small(spec, array.nbytes)
    return _Entry(call, request, array, is_small)


def simulate(num_decisions, seed, *, per_job=2000):
    """Runs jobs until so many names were decided; returns how many, and sums."""
    done = sums = number = 0
    while done < num_decisions:
        simulation = Simulation(f"{seed}/{number}")
        try:
            simulation.run(min(per_job, num_decisions - done))
        except (AssertionError, ProtocolError, LookupError, ValueError) as error:
            raise Wrong(f"job {number} of seed {seed}: {error!r}") from error
        done += simulation.num_decisions
        sums += simulation.num_sums
        number += 1
    return done, sums


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--decisions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    start_s = time.monotonic()
    done, sums = simulate(args.decisions, args.seed)
    print(
        f"{done} names decided, {sums} sums on ranks, seed {args.seed}: all right, "
        f"none lost, {time.monotonic() - start_s:.0f} s"
    )


if __name__ == "__main__":
    main()
