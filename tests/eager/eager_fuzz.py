"""Fuzz: messages of a process that holds the key of the job, and makes no sense.

Every decoder and every state machine of the eager engine takes them, or refuses them
by `ProtocolError`. Nothing else may come out.

python -m tests.eager.eager_fuzz --messages 1000000 --seed 1
"""

import argparse
import collections
import pickle
import random
import time

import msgspec
import numpy as np

from jdp.eager import checks, encoding, messages, startup
from jdp.eager.coordinator.cache_slots import bits
from jdp.eager.diagnosis import flight_recorder
from jdp.eager.execution import fused
from jdp.eager.execution.base import CollectiveTask
from jdp.eager.execution.fused import FusedJob, Scratch
from jdp.eager.messages import (
    Batch,
    FromRank,
    ProtocolError,
    Request,
    Response,
    Spec,
    Tunable,
)
from jdp.replicas import cores
from tests.eager import coordinator_simulation
from tests.runtime.transport_fuzz import mutate

_NAMES = ("a", "b", "c", "d", "unnamed x 1", "", "\0", "join")
_KINDS = messages.Kind.__args__


def _int(rng):
    """Mostly what can be, else what cannot."""
    if rng.random() < 0.9:
        return rng.randint(-1, 4)
    return rng.choice((-(2**63), 2**64 - 1, 2**31, 1 << 48, 7, -2, 300))


def _ints(rng, most=3):
    return tuple(_int(rng) for _ in range(rng.randint(0, most)))


def _float(rng):
    odd = (float("nan"), float("inf"), -1.0, 1e308)
    return 1.0 if rng.random() < 0.95 else rng.choice(odd)


def make_spec(rng):
    """Any spec, often one that an engine makes."""
    kind = rng.choice(_KINDS)
    shape = (rng.randint(1, 3),) if rng.random() < 0.7 else _ints(rng)
    dtype = "float32"
    if rng.random() < 0.15:
        dtype = rng.choice(("", "int64", "object", "bfloat16", "str", "V4", "f4", "x"))
    op = rng.choice(("sum", "average", "min", "adasum", "", "x"))
    if rng.random() < 0.8:
        op = "sum" if kind in messages.OPS else ""
    group = rng.choice(("", "", "", "g", "h"))
    spec = Spec(
        kind,
        dtype if rng.random() < 0.1 or kind in messages._OF_TENSORS else "",
        shape,
        "cpu" if rng.random() < 0.95 else rng.choice(("gpu", "")),
        op,
        _float(rng),
        _float(rng),
        rng.randint(0, 2) if kind == "broadcast" else -1,
        group,
        rng.randint(1, 3) if group else 0,
        "f" if kind == "submit" else "",
    )
    if rng.random() < 0.03:
        field = rng.choice(("root", "group_size"))
        spec = msgspec.structs.replace(spec, **{field: _int(rng)})
    encoded = messages.encode_spec(spec)
    return mutate(rng, encoded) if rng.random() < 0.02 else encoded


class _Pool:
    """A few specs that come again, so that names meet, and are cached."""

    def __init__(self, rng):
        self.rng = rng
        self.specs = {name: make_spec(rng) for name in _NAMES}

    def request(self):
        rng, name = self.rng, self.rng.choice(_NAMES)
        if rng.random() < 0.05:
            self.specs[name] = make_spec(rng)
        spec = self.specs[name] if rng.random() < 0.95 else make_spec(rng)
        local = ()
        if rng.random() < 0.5:
            local = tuple(rng.randint(0, 2) for _ in range(rng.choice((0, 1, 2, 3))))
        set_id = rng.choice((0, 0, 0, 1)) if rng.random() < 0.95 else _int(rng)
        if rng.random() < 0.02:
            local = _ints(rng)
        return Request(name, spec, set_id, local)


def _data(rng):
    sizes = (0, 4, 8, 12, 4, 8, 3, 100)
    return tuple(rng.randbytes(rng.choice(sizes)) for _ in range(rng.choice((1, 1, 2))))


def make_from_rank(rng, pool, seen):
    """Any message of a rank."""
    num_requests = rng.choice((0, 1, 1, 2))
    hits = b""
    if rng.random() < 0.5:
        hits = rng.randint(0, 20).to_bytes(1, "little")
        if rng.random() < 0.05:
            hits = rng.randbytes(rng.randint(1, 200))
    if rng.random() < 0.05:
        seen += rng.choice((-1, 1, 10**6, -(10**6), 2**63 - 1))
    return FromRank(
        seen,
        () if hits and rng.random() < 0.7 else _some(rng, pool.request, num_requests),
        hits,
        _data(rng) if hits and rng.random() < 0.4 else (),
        joined=rng.random() < 0.03,
        leaves=rng.random() < 0.005,
        failure="why" if rng.random() < 0.002 else "",
        asks=rng.random() < 0.01,
        is_last=rng.random() < 0.01,
        doubts=_some(rng, lambda: (_int(rng), rng.choice(_NAMES), _int(rng)), 2)
        if rng.random() < 0.1
        else (),
    )


def _some(rng, make, most):
    return tuple(make() for _ in range(rng.randint(0, most)))


def make_response(rng, pool):
    """Any response of the coordinator."""
    if rng.random() < 0.4:
        return Response(
            (), (), rng.choice((0, 0, 1, 7)), (), tuple({_int(rng), rng.randint(0, 3)})
        )
    requests = [pool.request() for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    locals_ = ()
    if rng.random() < 0.5:
        locals_ = tuple(
            _some(rng, lambda: _ints(rng, 2) or (1,), 3)
            if rng.random() < 0.3
            else tuple((rng.randint(0, 2),) for _ in range(3))
            for _ in requests
        )
    slots = tuple(rng.randint(-1, 5) for _ in requests) if rng.random() < 0.7 else ()
    return Response(
        tuple(each.name for each in requests),
        tuple(each.spec for each in requests)[: rng.choice((9, 9, 9, 9, 1))],
        requests[0].process_set,
        locals_,
        slots,
        "why" if rng.random() < 0.05 else "",
    )


def make_batch(rng, pool):
    """Any batch of the coordinator."""
    tuned = None
    if rng.random() < 0.02:
        tuned = Tunable(_int(rng), _float(rng), bool(rng.randint(0, 1)))
    return Batch(
        _some(rng, lambda: make_response(rng, pool), 2),
        _data(rng) if rng.random() < 0.3 else (),
        _ints(rng, 2) if rng.random() < 0.2 else (),
        _int(rng) if rng.random() < 0.05 else -1,
        "stop" if rng.random() < 0.005 else "",
        bool(rng.randint(0, 1)),
        "who" if rng.random() < 0.01 else "",
        tuned,
        ((0, "a", 1),) if rng.random() < 0.02 else (),
        "closing" if rng.random() < 0.01 else "",
    )


class _Noisy(coordinator_simulation.Simulation):
    """A simulation in whose midst copies of its parts are told nonsense."""

    def __init__(self, seed, *, left, side):
        super().__init__(seed)
        self.left = left
        self.side = side
        self.pool = _Pool(self.rng)
        self.counts_of_noise = collections.Counter()

    def _deliver(self, rank):
        if self.side == "coordinator" and self.rng.random() < 0.05:
            self._disturb_coordinator(rank)
        super()._deliver(rank)

    def _hear(self, rank):
        if self.side == "rank":
            self._disturb_rank(rank)
        super()._hear(rank)

    def _disturb_coordinator(self, rank):
        rng, coordinator = self.rng, pickle.loads(pickle.dumps(self.coordinator))
        message, number = messages.decode_from_rank(rank.sent[0]), rank.rank
        for _ in range(20):
            self.left -= 1
            if rng.random() < 0.6:
                message = self._change(message, coordinator)
            try:
                message = messages.decode_from_rank(messages.encode(message))
                coordinator.names_of(message)
                coordinator.receive(number, message, now_s=self.now_s)
            except ProtocolError as error:
                assert str(error)
                self.counts_of_noise["refused"] += 1
                coordinator.stop(str(error))
            else:
                self.counts_of_noise["taken"] += 1
                coordinator.find_unknown(number, message.doubts)
            coordinator.find_stalls(now_s=self.now_s, after_s=0.0)
            batch = coordinator.decide(now_s=self.now_s)
            if batch is not None:
                again = messages.decode_batch(messages.encode(batch))
                assert again == batch
                num = sum(len(each.names or each.slots) for each in again.responses)
                self.counts_of_noise["names"] += num
                if batch.stop:
                    return
            number = rng.randrange(self.size)
            message = self._make_plausible(coordinator, number)

    def _make_plausible(self, coordinator, rank):
        """What a rank might say next."""
        rng, names, hits = self.rng, coordinator._names, coordinator._hits
        seen = rng.randint(coordinator._seen[rank], coordinator.num_batches)
        slots = [
            slot
            for slot in bits(coordinator._slots.live & ~hits.of_rank[rank])
            if rank in names.members[coordinator._slots.get(slot).process_set]
        ]
        requests = [
            Request(name, entry.spec, set_id, next(iter(entry.locals.values()), ()))
            for set_id, table in names.tables.items()
            for name, entry in table.items()
            if rank in names.members[set_id] and not entry.arrived >> rank & 1
        ]
        slots = rng.sample(slots, rng.randint(0, min(3, len(slots))))
        requests = rng.sample(requests, rng.randint(0, min(2, len(requests))))
        mask = sum(1 << slot for slot in slots)
        sizes = [coordinator._slots.get(slot).carried_bytes for slot in sorted(slots)]
        data = ()
        if not requests and min(sizes, default=-1) >= 0:
            data = tuple(rng.randbytes(size) for size in sizes)
        encoded = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
        return FromRank(seen, tuple(requests), encoded, data, rng.random() < 0.05)

    def _change(self, message, coordinator):
        """Changes a part of what a rank says."""
        rng = self.rng
        if rng.random() < 0.2:
            return make_from_rank(rng, self.pool, coordinator.num_batches)
        changed = make_from_rank(rng, self.pool, message.seen)
        fields = rng.sample(FromRank.__struct_fields__, rng.choice((1, 1, 2)))
        changes = {field: getattr(changed, field) for field in fields}
        if "hits" in changes and message.hits:
            mask = int.from_bytes(message.hits, "little") ^ 1 << rng.randint(0, 12)
            changes["hits"] = mask.to_bytes(4, "little")
        if "requests" in changes:
            changes["requests"] += message.requests
        return msgspec.structs.replace(message, **changes)

    def _disturb_rank(self, rank):
        rng, cache = self.rng, pickle.dumps(rank.cache)
        for _ in range(5):
            self.left -= 1
            batch = self._change_batch(messages.decode_batch(rank.coming[0]))
            twin = _Rank(rng, pickle.loads(cache), rank, self.sets)
            try:
                twin.apply(messages.decode_batch(messages.encode(batch)))
                self.counts_of_noise["taken"] += 1
            except ProtocolError as error:
                assert str(error)
                self.counts_of_noise["refused"] += 1
            self.counts_of_noise["run"] += twin.num_run

    def _change_batch(self, batch):
        """Changes a part of what the coordinator says."""
        rng = self.rng
        changed = make_batch(rng, self.pool)
        fields = rng.sample(Batch.__struct_fields__, rng.choice((0, 1, 1, 2)))
        changes = {field: getattr(changed, field) for field in fields}
        if "responses" in changes:
            responses = list(batch.responses)
            if responses and rng.random() < 0.7:
                at = rng.randrange(len(responses))
                responses[at] = self._change_response(responses[at])
            else:
                responses += changed.responses
            changes["responses"] = tuple(rng.sample(responses, len(responses)))
        return msgspec.structs.replace(batch, **changes)

    def _change_response(self, response):
        rng = self.rng
        changed = make_response(rng, self.pool)
        field = rng.choice(Response.__struct_fields__)
        value = getattr(changed, field)
        if field in ("names", "specs", "slots") and rng.random() < 0.5:
            value = getattr(response, field)[:-1] or value
        return msgspec.structs.replace(response, **{field: value})


def fuzz_coordinator(rng, num_messages):
    """Ranks say anything, encoded well; the coordinator decides, or refuses."""
    return _disturb(rng, num_messages, "coordinator")


def fuzz_rank(rng, num_messages):
    """The coordinator says anything, encoded well; a rank takes it, or refuses."""
    return _disturb(rng, num_messages, "rank")


def _disturb(rng, num_messages, side):
    counts = collections.Counter()
    while num_messages > 0:
        noisy = _Noisy(rng.random(), left=num_messages, side=side)
        noisy.run(min(400, num_messages // 4 + 20))
        counts += noisy.counts_of_noise
        num_messages = noisy.left
    return dict(counts)


class _Rank:
    """What a rank does with a batch, without threads; members give what it gives."""

    def __init__(self, rng, cache, rank, sets):
        self.rng, self.cache, self.rank, self.sets = rng, cache, rank.rank, sets
        self.pending = dict(rank.pending)
        self.has_joined = rank.has_joined
        self.num_run = 0

    def apply(self, batch):
        checks.check_batch(batch, size=4)
        if batch.who_waits or batch.tuned is not None or batch.unknown:
            return
        whole = self.cache.apply(batch)
        data = batch.data or [b""] * len(whole)
        for response, carried in zip(whole, data, strict=True):
            members = self.sets.get(response.process_set, ())
            if not response.error and self.rank in members:
                self._run(response, carried, members)

    def _run(self, response, data, members):
        place = members.index(self.rank)
        entries = [self._submitted(*each) for each in _pairs(response)]
        specs = [messages.decode_spec(spec) for spec in response.specs]
        checks.check_places(response, specs, members, size=4)
        checks.check_entries(response, entries, has_joined=self.has_joined, place=place)
        num_bytes = sum(messages.num_bytes_of(spec, ()) for spec in specs)
        task = CollectiveTask(specs[0].kind, specs[0].op, None, num_bytes, False)
        checks.check_data(response, data, task)
        if specs[0].kind not in messages._OF_TENSORS:
            return
        if num_bytes > 1 << 20 or any(max(n, default=0) > 99 for n in _rows(response)):
            return  # No engine here has so much memory.
        arrays = [
            None if entry is None else _make_array(spec, entry.request.local)
            for entry, spec in zip(entries, specs, strict=True)
        ]
        job, echo = FusedJob(specs, response.locals, arrays), _Echo(len(members))
        members = _Members(members, place)
        with np.errstate(all="ignore"):
            if data:
                fused.run_carried(job, data, members, Scratch())
            else:
                fused.run(job, echo, members, Scratch())
        self.num_run += 1

    def _submitted(self, set_id, name, spec, local):
        """What this rank has submitted under a name; or what is to run, if it had."""
        entry = self.pending.pop((set_id, name), None)
        if entry is None and self.rng.random() < 0.8:
            return _Entry(Request(name, spec, set_id, local))
        return entry


def _rows(response):
    return [each for locals_ in response.locals for each in locals_]


def _make_array(spec, local):
    rows = ()
    if spec.kind in messages.HAS_LOCAL_FIRST:
        rows = (sum(local),)
    return np.ones((*rows, *spec.shape), spec.dtype)


class _Entry:
    """Stands for `jdp.eager.entries.Entry`."""

    def __init__(self, request):
        self.request = request


class _Members:
    """Stands for `jdp.eager.execution.base.SetMembers`."""

    def __init__(self, ranks, place):
        self.ranks, self.place, self.size = ranks, place, len(ranks)


class _Echo:
    """An implementation in which all members give the same."""

    name = "echo"

    def __init__(self, count):
        self.count = count

    def all_reduce(self, arrays, op):
        return arrays

    def adaptive_sum(self, array):
        return array

    def all_gather(self, part):
        return np.stack([part] * self.count)

    def reduce_scatter(self, parts, op):
        return parts[0]

    def all_to_all(self, parts):
        return parts

    def broadcast(self, array, root):
        assert 0 <= root < self.count
        return array


def _pairs(response):
    for i, name in enumerate(response.names):
        locals_ = response.locals[i] if response.locals else ()
        spec = messages.decode_spec(response.specs[i])
        is_local = spec.kind in messages.HAS_LOCAL_FIRST and locals_
        local = tuple(locals_[0]) if is_local else ()
        yield response.process_set, name, response.specs[i], local


def _make_bytes(rng, good):
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(60))
    return mutate(rng, good)


def _decode_dump(data):
    """A file; what is refused is named by a ValueError."""
    try:
        return flight_recorder.decode_dump(data, "file")
    except ValueError as error:
        assert str(error).startswith("file is ")
        raise ProtocolError(str(error)) from None


def fuzz_decoders(rng, num_messages):
    """Bytes of all kinds, for all decoders."""
    pool = _Pool(rng)
    values = (
        "é",
        {"a": [1, 2.5, None, "é"]},
        {1, 2},
        np.arange(3),
        frozenset({(1, 2)}),
        {(1, "k"): (np.float32(1), (2, [])), 2: np.str_("x")},
    )
    hello = startup._Hello(
        {"fusion_bytes": 1, "timeline": ""}, "node", cores.UsableCores((0, 1))
    )
    record = flight_recorder.Record("a", "all_reduce")
    dump = msgspec.json.encode(
        flight_recorder.Dump(
            rank=0,
            size=1,
            reason="",
            time=0.0,
            clock_s=0.0,
            capacity=1,
            num_dropped=0,
            dropped_order=-1,
            records=(record,),
        )
    )
    counts = {"taken": 0, "refused": 0}
    decoders = (
        (messages.decode_from_rank, lambda: make_from_rank(rng, pool, 1)),
        (messages.decode_batch, lambda: make_batch(rng, pool)),
        (messages.decode_spec, None),
        (lambda data: messages.decode_as(startup._hello, data), lambda: hello),
        (
            lambda data: messages.decode_as(startup._answer, data),
            lambda: startup._Answer("", ("a", "b"), frozenset({"a"})),
        ),
        (encoding.decode, None),
        (_decode_dump, None),
    )
    for _ in range(num_messages):
        decode, make = rng.choice(decoders)
        if decode is encoding.decode:
            good = encoding.encode(rng.choice(values))
        elif decode is _decode_dump:
            good = dump
        elif make is None:
            good = make_spec(rng)
        else:
            good = messages.encode(make())
        try:
            decode(_make_bytes(rng, good))
            counts["taken"] += 1
        except ProtocolError as error:
            assert str(error)
            counts["refused"] += 1
    return counts


FUZZERS = {
    "coordinator": fuzz_coordinator,
    "rank": fuzz_rank,
    "decoders": fuzz_decoders,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for name, fuzz in FUZZERS.items():
        start_s = time.monotonic()
        counts = fuzz(random.Random(f"{args.seed} {name}"), args.messages)
        print(
            f"{name}: {args.messages} messages, {counts}, seed {args.seed}, "
            f"{time.monotonic() - start_s:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
