"""Ranks and a coordinator of the eager engine, with messages that are late."""

import random

from jdp.eager.coordinator.coordinator import Coordinator
from jdp.eager.messages import FromRank, Request, Spec, encode_spec
from jdp.eager.options import CoordinatorOptions
from jdp.eager.response_cache import ResponseCache


def all_reduce(name, *, process_set=0, **changes):
    spec = Spec("all_reduce", "float32", (4,), op="sum")
    for field, value in changes.items():
        spec = type(spec)(**{**_fields(spec), field: value})
    return Request(name, encode_spec(spec), process_set)


def all_gather(name, num_rows, **changes):
    spec = Spec("all_gather", "float32", (3,))
    spec = Spec(**{**_fields(spec), **changes})
    return Request(name, encode_spec(spec), 0, (num_rows,))


def _fields(spec):
    return {field: getattr(spec, field) for field in spec.__struct_fields__}


class Job:
    """A coordinator and all ranks; messages are delivered when the test says."""

    def __init__(self, size, *, sets=None, **options):
        self.size = size
        self.coordinator = Coordinator(size, CoordinatorOptions(**options))
        self.sets = {0: tuple(range(size))} | (sets or {})
        for set_id, ranks in (sets or {}).items():
            self.coordinator.add_process_set(set_id, ranks)
        self.caches = [ResponseCache() for _ in range(size)]
        self.to_coordinator = [[] for _ in range(size)]
        self.to_rank = [[] for _ in range(size)]
        self.executed = [[] for _ in range(size)]  # (set, names, error), in order.
        self.last_joined = [[] for _ in range(size)]
        self.num_full = 0  # requests that were sent with their name.
        self.now_s = 0.0

    def submit(self, rank, *requests, **flags):
        """One message of a rank, with all that became ready there."""
        cache, full, hits = self.caches[rank], [], 0
        for request in requests:
            place = self.sets[request.process_set].index(rank)
            slot = cache.find(request, place)
            if slot is None:
                full.append(request)
            else:
                hits |= 1 << slot
        self.num_full += len(full)
        bits = hits.to_bytes((hits.bit_length() + 7) // 8, "little")
        message = FromRank(cache.num_seen, tuple(full), bits, **flags)
        self.to_coordinator[rank].append(message)

    def deliver(self, rank):
        """The oldest message of a rank reaches the coordinator."""
        message = self.to_coordinator[rank].pop(0)
        self.coordinator.receive(rank, message, now_s=self.now_s)

    def decide(self):
        batch = self.coordinator.decide(now_s=self.now_s)
        if batch is not None:
            for waiting in self.to_rank:
                waiting.append(batch)
        return batch

    def hear(self, rank):
        """A rank gets the oldest batch that it has not seen."""
        batch = self.to_rank[rank].pop(0)
        for response in self.caches[rank].apply(batch):
            if rank in self.sets[response.process_set]:
                self.executed[rank].append(
                    (response.process_set, response.names, response.error)
                )
        if batch.last_joined >= 0:
            self.last_joined[rank].append(batch.last_joined)

    def settle(self):
        """Delivers everything, in order."""
        while any(self.to_coordinator):
            for rank in range(self.size):
                while self.to_coordinator[rank]:
                    self.deliver(rank)
        while self.decide() is not None:
            pass
        for rank in range(self.size):
            while self.to_rank[rank]:
                self.hear(rank)

    def run_randomly(self, plans, rng: random.Random):
        """Each rank submits its plan in its order; messages are late at random."""
        left = [list(plan) for plan in plans]
        outstanding = [set() for _ in range(self.size)]

        def can_submit(rank):
            # A name that is outstanding must not be submitted again.
            return left[rank] and _key(left[rank][0]) not in outstanding[rank]

        while True:
            moves = [("submit", r) for r in range(self.size) if can_submit(r)]
            moves += [("deliver", r) for r, q in enumerate(self.to_coordinator) if q]
            moves += [("hear", r) for r, q in enumerate(self.to_rank) if q]
            if not moves:
                if self.decide() is None:
                    assert not any(left), "nobody can go on"
                    return
                continue
            what, rank = rng.choice(moves)
            if what == "deliver":
                self.deliver(rank)
                if rng.random() < 0.5:
                    self.decide()
            elif what == "hear":
                before = len(self.executed[rank])
                self.hear(rank)
                for set_id, names, _ in self.executed[rank][before:]:
                    outstanding[rank] -= {(set_id, name) for name in names}
            else:
                ready = []
                while can_submit(rank) and len(ready) < rng.randint(1, 3):
                    ready.append(left[rank].pop(0))
                    outstanding[rank].add(_key(ready[-1]))
                self.submit(rank, *ready)


def _key(request):
    return (request.process_set, request.name)
