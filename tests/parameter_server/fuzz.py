"""Fuzz: messages that nobody should send, from peers that have the keys.

`python -m tests.parameter_server.fuzz --messages 1000000` gives as many to each decoder
and to each state machine. Whatever comes, the typed refusal is all that they raise, and
the parameters are those of the honest pushes alone.
"""

import argparse
import logging
import random
import struct
import time

import msgspec
import numpy as np
import optax

from jdp import parameter_server
from jdp.parameter_server import (
    attendance,
    checkpoint_files,
    keys,
    messages,
    metrics,
    progress,
    saving,
    service,
    shards,
    updates,
)
from jdp.parameter_server.client import Client
from jdp.parameter_server.follower import Follower
from jdp.parameter_server.leader import Leader
from jdp.parameter_server.leader_options import LeaderOptions
from jdp.parameter_server.messages import (
    FollowerStatus,
    Leave,
    MessageError,
    Params,
    Ping,
    Pull,
    Push,
    RefusedError,
    Restore,
    Version,
    WorkerHello,
)
from jdp.parameter_server.restoring import NoCheckpointError
from jdp.parameter_server.sockets import Message
from jdp.replicas import wire
from tests.runtime.transport_fuzz import mutate

PARAMS = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)}
PLAN = shards.plan_shards(PARAMS, 1)
LAYOUT = PLAN.of_server[0].layout
LEAVES = shards.describe_leaves(PLAN.plan)
SESSIONS = [b"a", b"b", b"c", bytes(16), b"x" * 64]
TO_SERVER = "WorkerHello Ping Push Pull Leave FollowerStatus".split()
TO_WORKER = "Welcome SessionUnknown Pong Settled Params Farewell Failed Ended".split()
ENTRIES = "Apply Discard HandOut DropSession SaveCheckpoint".split()
ENTRIES += "KeepCheckpoint Restore Stop".split()
TAGS = [*TO_SERVER, *TO_WORKER, *ENTRIES, "LeaderLog", "Nonsense"]
BOMBS = [
    b"\x91" * 5000,
    b"\x81\xa1\xff" * 50,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x92\xa4\xff\xff\xff\xff\x01",
    b"\x92\xa4Ping\xa2\xc3\x28",
    b"\xd6\xff\xff\xff\xff\xff",
    b"\xc1",
    b"",
]
_INTS = [0, 1, 2, 3, -1, 7, 1 << 31, -(1 << 31), 1 << 60, (1 << 62) + 1, (1 << 64) - 1]
_FLOATS = [0.0, -1.0, 1.0, 3.5, 1e-320, 1e300, float("nan"), float("inf")]
_TEXTS = ["", "a", "applied", "late", "[/bold]", "\n\x1b[2J", "\u0661", "x" * 5000]


def draw(rng, depth=0):
    """Any value that msgpack has."""
    match rng.randrange(9 if depth < 3 else 6):
        case 0:
            return rng.choice(_INTS)
        case 1:
            return rng.choice(_FLOATS)
        case 2:
            return rng.choice(_TEXTS)
        case 3:
            return rng.choice([*SESSIONS, b"", bytes(65)])
        case 4:
            return rng.choice([None, True, False])
        case 5:
            return rng.randrange(20)
        case 6:
            return {
                draw_key(rng): draw(rng, depth + 1) for _ in range(rng.randrange(3))
            }
        case _:
            return [draw(rng, depth + 1) for _ in range(rng.randrange(5))]


def draw_key(rng):
    return rng.choice(["a", 1, b"s", None, 2.5])


def draw_session(rng):
    return rng.choice(SESSIONS)


def draw_version(rng):
    return [rng.choice([0, 1, 1, 1, 2, -1, 1 << 40]), rng.choice([*range(6), *_INTS])]


def draw_message(rng, tags):
    """A message as a list, with the right types most of the time."""
    session, number = draw_session(rng), rng.choice([0, 1, 2, 3, 1, 2, 1 << 59])
    version = draw_version(rng)
    held = [[draw_session(rng), rng.randrange(4)] for _ in range(rng.randrange(3))]
    outcomes = ["applied", "late", "rejected"] * 9 + _TEXTS
    tag = rng.choice(tags if rng.random() < 0.95 else TAGS)
    is_it = rng.random() < 0.5
    found = [tag]
    match tag:
        case "WorkerHello":
            leaves = LEAVES if rng.random() < 0.7 else [["x", "float32[9]"]]
            where = [0, 1] if rng.random() < 0.7 else [number, number]
            shared_memory = rng.choice(
                [None, ["/proc/1/fd/1", bytes(16), rng.choice(_INTS)]]
            )
            known = rng.choice([[0, 0], version])
            found += [session, number, *where, leaves, "", known, shared_memory]
        case "Ping" | "Leave" | "DropSession":
            found += [session, number]
        case "Push":
            weight = rng.choice([1.0, 2.0, *_FLOATS])
            found += [session, number, version, weight, True, is_it, rng.random() < 0.2]
        case "Pull" | "HandOut":
            found += [session, number, number]
        case "Welcome":
            found += [version, "sync()", is_it, rng.choice(_FLOATS), is_it]
        case "Pong" | "KeepCheckpoint":
            found += [number]
        case "Settled":
            found += [number, rng.choice(outcomes), version]
        case "Discard":
            found += [session, number, rng.choice(outcomes)]
        case "Params":
            found += [number, version, is_it]
        case "Failed":
            found += [rng.choice(_TEXTS)]
        case "Ended":
            found += [is_it]
        case "Apply":
            found += [held, [rng.choice([1.0] * 30 + _FLOATS) for _ in held], number]
        case "Restore":
            found += [version]
        case "FollowerStatus":
            which = [rng.choice([1, 1, 2, 0, -1, 9]), draw_session(rng), b"leader"]
            found += [*which, version[0], number, [0, 3, number], held, is_it]
            found += [[b"r"] * rng.choice([0, 3, 3, 1])]
        case "LeaderLog":
            entries = [draw_message(rng, ENTRIES) for _ in range(rng.randrange(4))]
            first = rng.choice([0, 0, number])
            if rng.random() < 0.5:
                entries.insert(0, ["Restore", version])
                first = 0
            found += [rng.choice([b"a", b"b"]), version[0], first, entries]
    if rng.random() < 0.1:
        found[rng.randrange(len(found))] = draw(rng)
    if rng.random() < 0.05:
        del found[rng.randrange(len(found)) :]
    return found


def draw_frame(rng, tags):
    """A first frame, of which some are messages."""
    choice = rng.random()
    if choice < 0.05:
        data = rng.choice(BOMBS)
    elif choice < 0.1:
        data = rng.randbytes(rng.randrange(30))
    else:
        data = msgspec.msgpack.encode(draw_message(rng, tags))
        if choice < 0.25:
            data = mutate(rng, data)
    head = bytes((messages.VERSION, messages.MESSAGE))
    return (
        rng.choice([head, head[::-1], b"\x01", b""]) if choice > 0.97 else head
    ) + data


def fuzz_decoder(rng, num_messages, decoder, tags):
    """Returns how many were messages."""
    num_good = 0
    for _ in range(num_messages):
        try:
            found = messages.decode(draw_frame(rng, tags), decoder)
        except (MessageError, RefusedError) as error:
            assert all(map(str.isprintable, str(error).split("\n"))), error
            continue
        num_good += 1
        # What is let in is what this version may say itself.
        assert messages.decode(messages.encode(found), decoder) == found
    return num_good


KEYS = (
    b'{"server_public":"x","server_secret":"y","worker_public":"z","worker_secret":""}'
)


def _fuzz_json(rng, num_messages, sample, decode):
    num_good = 0
    for _ in range(num_messages):
        data = rng.choice([*BOMBS, b"[" * 5000, b'"\xff"', b"{}"])
        if rng.random() < 0.9:
            data = mutate(rng, sample)
        try:
            decode(data)
        except wire.DecodeError:
            continue
        num_good += 1
    return num_good


def fuzz_keys(rng, num_messages):
    """The file of keys."""

    def decode(data):
        keys._check_keys(wire.decode_with(keys._decode_keys, data))

    pairs = [key.decode() for _ in range(2) for key in _curve_pair()]
    sample = msgspec.json.encode(keys.Keys(*pairs))
    decode(sample)
    return _fuzz_json(rng, num_messages, sample, decode)


def _curve_pair():
    import zmq

    return zmq.curve_keypair()


def fuzz_report(rng, num_messages):
    """What a server sends to the table of the launcher."""
    line = metrics.Metrics().summarize(
        version="1.2",
        counts={"applied": 3, "late": 0},
        num_workers=1,
        num_waiting=0,
        num_refused=0,
        now_s=1.0,
    )
    count = 0

    def decode(data):
        nonlocal count
        found, count = metrics.decode_line(data), count + 1
        if count % 50 == 0:  # Drawing is slow.
            metrics.render_table(found, num_columns=60)

    return _fuzz_json(rng, num_messages, msgspec.json.encode(line), decode)


def fuzz_manifest(rng, num_messages):
    """The manifest of a checkpoint whose checksum is right, and its table of pushes."""
    leaves = (checkpoint_files._Leaf("float32", (3, 2), "0" * 32),)
    files = (checkpoint_files._File("d/0", 3, "0" * 32),)
    table = {b"s": messages.Settled(1, "late", Version(1, 2))}
    manifest = checkpoint_files.Manifest(
        2,
        0,
        1,
        Version(1, 2),
        "r",
        ("a",),
        leaves,
        files,
        msgspec.msgpack.encode(table),
    )

    def decode(data):
        wire.decode_with(checkpoint_files._header.decode, data)
        found = wire.decode_with(checkpoint_files._manifest.decode, data)
        wire.decode_with(checkpoint_files._table.decode, found.settled)

    return _fuzz_json(rng, num_messages, msgspec.json.encode(manifest), decode)


def fuzz_attendance(rng, num_messages):
    """What server 0 has written of its workers, of this launch or another one."""
    num_good = 0
    for _ in range(num_messages):
        came = {rng.choice([0, 1, 2, *_INTS]): draw_session(rng) for _ in range(3)}
        record = [rng.choice(["l", "m", ""]), came, [rng.choice([0, 1, *_INTS])]]
        data = msgspec.msgpack.encode(dict(zip(_RECORD, record, strict=True)))
        data = mutate(rng, data) if rng.random() < 0.5 else data
        data = rng.choice(BOMBS) if rng.random() < 0.05 else data
        options = LeaderOptions(mode=parameter_server.sync(), num_workers=2, launch="l")
        known = attendance.Attendance(options)
        known.load(data)
        num_good += known.has_changed
        known.come(1, b"a", has_seen=True)
        known.leave(b"a", 1)
        known.is_over(is_empty=True, now_s=1.0)
        attendance.Attendance(options).load(known.encode())
    return num_good


_RECORD = ("launch", "came", "left")


def fuzz_progress(rng, num_messages):
    """A record of the progress file, with a checksum that is right at times."""
    import zlib

    num_good = 0
    for _ in range(num_messages):
        record = struct.pack("<qqq", *(rng.choice(_INTS[:9]) for _ in range(3)))
        slot = record + struct.pack("<I", zlib.crc32(record))
        slot = slot.ljust(rng.choice([64, 64, 64, 30, 70]), b"\0")
        if rng.random() < 0.3:
            slot = mutate(rng, slot)
        num_good += progress._decode(slot) is not None
    return num_good


def fuzz_lead(rng, num_messages):
    """Server 0's protocol: any order of messages, deaths and delays."""
    num_good = 0
    for start in range(0, num_messages, 500):
        mode = rng.choice(
            [
                parameter_server.sync(),
                parameter_server.sync(backup=1),
                parameter_server.asynchronous(),
                parameter_server.bounded(staleness=2),
            ]
        )
        num_servers = rng.choice([1, 2, 3])
        leader = Leader(
            LeaderOptions(mode=mode, num_servers=num_servers, checkpoint_every=2),
            b"leader",
        )
        follower, now_s = Follower(), 0.0
        leader.set_checkpoints((0,), 0)
        for server in range(1, num_servers):
            leader.update_follower(FollowerStatus(server, b"f", b"", 0, 0, (0,), ()))
        for _ in range(min(500, num_messages - start)):
            try:
                found = messages.decode(draw_frame(rng, TO_SERVER), messages.to_server)
            except (MessageError, RefusedError):
                continue
            num_good += 1
            now_s += rng.choice([0.0, 0.1, 1.0])
            try:
                match found:
                    case WorkerHello():
                        leader.join(found.session, found.worker, now_s=now_s)
                    case Ping():
                        leader.renew_lease(found.session, now_s=now_s)
                    case Push():
                        if leader.renew_lease(found.session, now_s=now_s):
                            if follower.hold(found, b""):
                                leader.push(found)
                    case Pull():
                        leader.pull(found)
                    case Leave():
                        leader.leave(found.session)
                    case FollowerStatus():
                        leader.update_follower(found)
                for entry in leader.decide(now_s=now_s):
                    if isinstance(entry, Restore):
                        leader.restored({})
                        leader.set_checkpoints(
                            (0, leader.version.count), leader.version.epoch
                        )
                    follower.execute(entry)
                for server in range(1, num_servers):
                    leader.find_log(server)
                leader.has_all()
            except (MessageError, NoCheckpointError):
                continue
    return num_good


def fuzz_follower(rng, num_messages):
    """Another server's protocol: any log, and any parts of pushes."""
    num_good, follower = 0, Follower()
    for i in range(num_messages):
        if i % 500 == 0:
            follower = Follower()
        try:
            if rng.random() < 0.3:
                found = messages.decode(draw_frame(rng, TO_SERVER), messages.to_server)
                if isinstance(found, Push):
                    follower.hold(found, b"")
                continue
            log = messages.decode(draw_frame(rng, ["LeaderLog"]), messages.to_follower)
            for entry in follower.receive(log):
                done = follower.execute(entry)
                assert all(part.push.sequence > 0 for part in done.parts)
            num_good += 1
        except (MessageError, RefusedError):
            continue
    return num_good


def fuzz_client(rng, num_messages):
    """A worker's protocol: any answers of any server."""
    num_good, now_s = 0, 0.0
    client = None
    for i in range(num_messages):
        if client is None or i % 500 == 0:
            hellos = [
                WorkerHello(b"s", 0, k, 2, LEAVES, "", Version(), None) for k in (0, 1)
            ]
            client = Client(hellos)
        now_s += rng.choice([0.0, 0.1, 1.0])
        try:
            found = messages.decode(draw_frame(rng, TO_WORKER), messages.to_worker)
        except (MessageError, RefusedError):
            continue
        num_good += 1
        client.receive(rng.randrange(2), found, now_s=now_s)
        for server, message in client.tick(now_s=now_s):
            assert server in (0, 1) and messages.encode(message)
        assert 0 < client.ping_period_s <= 1.0
        if not client.is_pushing:
            how = {"weight": 1.0, "is_finite": True, "is_compressed": False}
            client.push(client.known, **how)
        if not client.is_pulling:
            client.pull(after=0, now_s=now_s)
        # Whatever it says can be said again.
        messages.decode(messages.encode(client._pushing.push), messages.to_server)
    return num_good


class _Socket:
    """A socket of a server whose peers are the fuzzer and one honest worker."""

    def __init__(self):
        self.sent = []

    def send(self, route, header, payload=None):
        if route == b"honest":
            self.sent.append((header, payload))


def make_service(mode=None):
    """A server whose messages are given by hand."""
    place = parameter_server.Place(role="server", index=0, addresses=("a:1",))
    import jax

    updater = updates.Updater(PARAMS, optax.sgd(1.0), PLAN, 0, jax.local_devices()[0])
    socket = _Socket()
    made = service.Service(
        place,
        PLAN,
        service.ServiceParts(socket, updater, None, saving.Saver(0, updater, None)),
        LeaderOptions(mode=mode or parameter_server.asynchronous(), lease_s=1e6),
        service.ServiceOptions(hook_name="", report="", keys=None),
    )
    made._decide()
    return made, socket


def fuzz_service(rng, num_messages):
    """A whole server, with an honest worker beside: its updates, and no others."""
    made, socket = make_service()
    hello = WorkerHello(b"honest", 0, 0, 1, LEAVES, "", Version(), None)
    client = Client([hello])
    ones = np.ones(LAYOUT.num_bytes, np.uint8)
    for view in LAYOUT.views(ones):
        view[...] = 1.0
    pulled, num_pushes, num_good = None, 0, 0

    def say(sent):
        for _, message in sent:
            payload = memoryview(ones) if isinstance(message, Push) else None
            made._hear(Message(b"honest", messages.encode(message), payload))
        made._decide()

    for i in range(num_messages):
        payload = rng.choice([None, None, b"", bytes(5), bytes(LAYOUT.num_bytes + 64)])
        frame = draw_frame(rng, TO_SERVER)
        made._hear(Message(b"fuzz", frame, payload, rng.random() < 0.5))
        if i % 20 == 0:
            made._decide()
        if i % 100:
            continue
        now_s = time.monotonic()
        if client.is_welcome and not client.is_pushing and not client.is_pulling:
            if pulled is None:
                say(client.pull(after=0, now_s=now_s))
            else:
                how = {"weight": 1.0, "is_finite": True, "is_compressed": False}
                say(client.push(pulled, **how))
                pulled = None
        say(client.tick(now_s=now_s))
        sent, socket.sent = socket.sent, []
        for header, payload in sent:
            found = messages.decode(header, messages.to_worker)
            if isinstance(found, Params):
                pulled = found.version
                for view in LAYOUT.views(payload):
                    assert (view == -pulled.count).all(), "not the honest sum"
            was_pushing = client.is_pushing
            say(client.receive(0, found, now_s=now_s))
            num_pushes += was_pushing and not client.is_pushing
    assert made._follower.version == Version(1, num_pushes), made._follower.version
    assert client.counts["applied"] == num_pushes > num_messages // 1000
    num_good = num_messages - made._refusals.count
    return num_good


DECODERS = {
    "to a server": lambda rng, n: fuzz_decoder(rng, n, messages.to_server, TO_SERVER),
    "to a worker": lambda rng, n: fuzz_decoder(rng, n, messages.to_worker, TO_WORKER),
    "to a follower": lambda rng, n: fuzz_decoder(
        rng, n, messages.to_follower, ["LeaderLog"]
    ),
    "keys": fuzz_keys,
    "report": fuzz_report,
    "manifest": fuzz_manifest,
    "progress": fuzz_progress,
    "attendance": fuzz_attendance,
}
MACHINES = {
    "server 0's decisions": fuzz_lead,
    "follower": fuzz_follower,
    "client": fuzz_client,
    "a whole server": fuzz_service,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for name, fuzz in {**DECODERS, **MACHINES}.items():
        if args.only not in name:
            continue
        start_s = time.monotonic()
        num_good = fuzz(random.Random(args.seed), args.messages)
        print(
            f"{name}: {args.messages} messages, {num_good} of them good, "
            f"{time.monotonic() - start_s:.0f} s: refused by name, or taken",
            flush=True,
        )


if __name__ == "__main__":
    main()
