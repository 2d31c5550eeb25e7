"""Fuzz: malformed messages at every decoder between processes, signed ones too.

`python -m tests.wire_fuzz --messages 1000000 --seed 1`
"""

import argparse
import random
import time

import msgspec
import zmq

from jdp import agreement, wire
from jdp.collectives import gpu_topology, measurement, shared_segment
from jdp.runtime import (
    job_key,
    join_context,
    lockstep,
    store,
    transport,
    transport_lane,
    transport_meeting,
)
from tests.runtime.transport_fuzz import mutate

_PEER = shared_segment.Peer(7, "11")
_OPTIONS = transport.LinkOptions()
_OFFER = transport_meeting._Offer(zmq.curve_keypair()[0], _OPTIONS)
_LANE_OFFER = transport_lane._Offer(b"\0jdp-" + b"5e" * 16, b"t" * 16)
# A message of each kind that processes send each other by way of the store.
MESSAGES = {
    "agreement.Record": agreement.Record("a topic", b"body", "why"),
    "agreement.Verdict": agreement.Verdict(b"body", "why"),
    "shared_segment._Hello": shared_segment._Hello(_PEER, "/proc/7/fd/3", b"t" * 16),
    "shared_segment._Verdict": shared_segment._Verdict([_PEER, _PEER]),
    "transport_meeting._Offer": _OFFER,
    "transport_meeting._Notice": transport_meeting._Notice(endpoints=("a", "b")),
    "transport_lane._Offer": _LANE_OFFER,
    "lockstep.Announcement": lockstep.Announcement(1, 2),
    "lockstep.Decision": lockstep.Decision(error="why"),
    "join_context.Progress": join_context.Progress(3, is_joined=True),
    "gpu_topology.Facts": gpu_topology.Facts(platform="cpu", host="a"),
    "measurement.Seconds": measurement.Seconds("ring", 8, 0.5),
}
_ODD = (
    None,
    True,
    -1,
    2**64 - 1,
    0.5,
    "",
    "\x00",
    "x" * 300,
    b"",
    b"\xff" * 40,
    [],
    {},
)
_DEEP = b"\x91" * 100_000  # lists in lists


class Client:
    """A client of `jax.distributed` whose store holds what a test puts there."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def key_value_set_bytes(self, key, value, overwrite):
        self.values[key] = value

    def key_value_try_get_bytes(self, key):
        return self.values[key]

    def blocking_key_value_get_bytes(self, key, timeout_ms):
        return self.values[key]

    def key_value_dir_get_bytes(self, prefix):
        return [(k, v) for k, v in self.values.items() if k.startswith(prefix)]

    def key_value_delete(self, key):
        self.values.pop(key, None)


def mangle(rng: random.Random, data: bytes) -> bytes:
    """Changes bytes, or fields, of a message; or makes something else."""
    kind = rng.randrange(6)
    if kind < 2:
        return mutate(rng, data)
    if kind == 2:
        return rng.randbytes(rng.randrange(60))
    if kind == 3 and rng.random() < 0.01:
        return data + _DEEP if rng.random() < 0.5 else _DEEP
    fields = msgspec.msgpack.decode(data)
    names = sorted(fields) if isinstance(fields, dict) else range(len(fields))
    for name in rng.sample(list(names), rng.randint(0, min(2, len(names)))):
        fields[name] = rng.choice(_ODD)
    if isinstance(fields, dict) and kind == 5:
        fields["\x00unknown"] = rng.choice(_ODD)
    return msgspec.msgpack.encode(fields)


def fuzz_decoder(name: str, num_messages: int, *, seed: int) -> int:
    """Decodes; returns how many were messages, for which what is done next is tried."""
    rng, message = random.Random(seed), MESSAGES[name]
    good, count = msgspec.msgpack.encode(message), 0
    check = {
        "transport_lane._Offer": lambda data, found: _try(
            transport_lane._decode_offer, data
        ),
        "transport_meeting._Notice": lambda data, found: _try(
            transport_meeting._check_endpoints, found.endpoints
        ),
        "shared_segment._Hello": lambda data, found: _open(found),
    }.get(name, lambda data, found: None)
    for _ in range(num_messages):
        data = mangle(rng, good)
        found = _try(wire.decode, data, type(message), what="It")
        if found is not None:
            assert isinstance(found, type(message))
            check(data, found)
            count += 1
    return count


def _try(decode, *args, **kwargs):
    try:
        return decode(*args, **kwargs)
    except wire.Malformed as error:
        assert str(error).encode()
        return None


def _open(offer: shared_segment._Hello) -> None:
    """No path that is not memory of this user is opened, and none raises."""
    mapped, hello = shared_segment._open(8192, _PEER, offer, 0)
    assert mapped is None and hello.error is not None


def fuzz_judge(num_messages: int, *, seed: int) -> None:
    """Any records that can be decoded have a verdict that can be sent."""
    rng = random.Random(seed)
    good = msgspec.msgpack.encode(MESSAGES["agreement.Record"])
    records = [agreement.Record("a topic")] * 3
    for _ in range(num_messages):
        found = _try(wire.decode, mangle(rng, good), agreement.Record, what="It")
        if found is not None:
            records = [*records[1:], found]
        verdict = agreement.judge(records, b"".join)
        assert msgspec.msgpack.encode(verdict)


def fuzz_store(num_messages: int, *, seed: int) -> None:
    """Only what this job has signed for a key is ever read there."""
    rng, key, client = random.Random(seed), job_key.make(), Client()
    ours = store.DistributedStore(client, key)
    ours.set("d/a", b"value of a")
    ours.set("d/b", b"value of b")
    ours.set("other", b"")
    good = dict(client.values)
    for _ in range(num_messages):
        client.values.clear()
        for name, value in good.items():
            match rng.randrange(4):
                case 0:
                    client.values[name] = mutate(rng, value)
                case 1:  # One that was signed, but for another key.
                    client.values[name] = rng.choice(list(good.values()))
                case 2:
                    client.values[name] = rng.randbytes(rng.randrange(80))
                case _:
                    client.values[name] = value
        client.values["d/c"] = good["d/a"]
        expected = {
            name: value[job_key.CODE_BYTES :]
            for name, value in client.values.items()
            if value == good.get(name)
        }
        for name in client.values:
            assert ours.try_get(name) == expected.get(name)
        listed = ours.list_directory("d")
        assert listed == {
            name[2:]: v for name, v in expected.items() if name.startswith("d/")
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in MESSAGES:
        start_s = time.monotonic()
        count = fuzz_decoder(name, args.messages, seed=args.seed)
        seconds = time.monotonic() - start_s
        print(f"{name}: {args.messages} in {seconds:.1f} s, {count} were messages")
    fuzz_judge(args.messages, seed=args.seed)
    fuzz_store(args.messages // 10, seed=args.seed)
    print("agreement's verdicts and the store: done")


if __name__ == "__main__":
    main()
