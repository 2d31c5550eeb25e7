"""Fuzz: malformed messages at every decoder between processes, signed ones too.

`python -m tests.wire_fuzz --messages 1000000 --seed 1`
"""

import argparse
import functools
import random
import time
import zlib

import msgspec
import zmq

from jdp.collectives import Curve, measurement, measurement_cache
from jdp.collectives.host import links
from jdp.collectives.pallas import gpu_topology
from jdp.collectives.shared_memory import shared_segment
from jdp.elastic import quorum
from jdp.elastic.messages import MemberId
from jdp.elastic.roster import QuorumOptions
from jdp.fingerprints import fingerprint
from jdp.join import early_exit, lockstep, progress_exchange
from jdp.launch import endings, launcher_link
from jdp.replicas import comparison, cores, differences, meeting, progress, wire
from jdp.runtime import job_key, store
from jdp.runtime.lifeline import rules, star_codec
from jdp.runtime.transport import datagram_link, rendezvous, transport
from jdp.watch import job_watch, messages
from jdp.watch.job_watch import JobWatch
from jdp.watch.local_processes import LocalProcesses
from jdp.watch.process_report import Awaited, ProcessReport
from jdp.watch.record import Entry
from jdp.watch.shares import StepSample
from jdp.watch.status import JobStatus, ProcessStatus
from jdp.watch.stragglers import StepShares
from tests.elastic import elastic_messages
from tests.replicas import comparison_fuzz
from tests.runtime.transport_fuzz import mutate

_PEER = shared_segment.Peer(7, "11", cores.UsableCores((0, 3), 1.5))
_OPTIONS = transport.LinkOptions()
_OFFER = rendezvous._LinkOffer(zmq.curve_keypair()[0], _OPTIONS)
_LANE_OFFER = datagram_link._LaneOffer(b"\0jdp-" + b"5e" * 16, b"t" * 16)
_WAITING = ProcessReport(
    *(1, 1, "program", 9.0), wait=Awaited("step", 4, "train", 9.0), begun=4, reached=4
)
_LATE = ProcessReport(2, 1, "python", 9.0, begun=3, reached=3, name="train")
_SAMPLE = StepSample(4, 10**12 + 10**7, 10**6, 10**6, 10**5, 10**6, 10**6, 1, True)
_ROW = ProcessStatus(
    process=1,
    host="a host",
    place="program",
    place_s=0.5,
    state="well",
    step=7,
    recent=StepShares(0.5, 0.25, 0.125, 0.125, 0.0),
    last_100=StepShares(),
    slow_since=3,
)
_WATCH = "Reports Samples Ask Part Lines Rows Stop Ping Pong".split()
# A message of each kind that processes send each other by way of the store.
MESSAGES = {
    "meeting.MeetingRecord": meeting.MeetingRecord("a topic", b"body", "why"),
    "meeting.MeetingOutcome": meeting.MeetingOutcome(b"body", "why"),
    "shared_segment.SegmentOffer": shared_segment.SegmentOffer(
        _PEER, "/proc/7/fd/3", b"t" * 16, 8192
    ),
    "shared_segment.Peer": _PEER,
    **{f"elastic.{type(each).__name__}": each for each in elastic_messages.ALL},
    "links.LinkPlace": links.LinkPlace("10.0.0.1", 4321),
    "a list of links.LinkPlace": [links.LinkPlace("::1", 1), links.LinkPlace("", 0)],
    "a list of shared_segment.Peer": [_PEER, _PEER],
    "rendezvous._Offer": _OFFER,
    "endpoints of a link": ("a", "b"),
    "datagram_link._Offer": _LANE_OFFER,
    "lockstep.Announcement": lockstep.Announcement((1, 2)),
    "lockstep.Decision": lockstep.Decision(error="why"),
    "progress_exchange.ProcessProgress": progress_exchange.ProcessProgress(
        3, is_joined=True
    ),
    "gpu_topology.GpuFacts": gpu_topology.GpuFacts(platform="cpu", host="a"),
    "measurement.Seconds": [measurement.Seconds("ring", 8, [0.5])],
    "measurement_cache.Machine": measurement_cache.Machine("a", "b", 2, ["cpu"]),
    "measurement_cache.StoredTimes": measurement_cache.StoredTimes(
        1e-5, 1e9, 0.0, (Curve("psum", 2, ((1024, 1e-4),)),)
    ),
    "early_exit.DepartureNotice": early_exit.DepartureNotice(1, 3, "why"),
    "lifeline.Left": rules.Left({"train": 3}, "why", 1),
    "lifeline.AtEnd": rules.AtEnd(may_begin=True),
    "lifeline.LeftJax": rules.LeftJax(),
    "lifeline.Stuck": rules.Stuck(1, "why"),
    "endings.Exit": endings.Exit(1, -9, 0.5, 0, None, "why"),
    "star_codec.Frame": star_codec.Frame("say", 1, b"body"),
    "messages.Reports": messages.Reports(1, "a host", (_WAITING, _LATE)),
    "messages.Samples": messages.Samples(1, 5, (StepSample(3, 10**12), _SAMPLE)),
    "messages.Ask": messages.Ask(),
    "messages.Part": messages.Part(1, 5, "a stack", (Entry(10**12, 3, 7, "train"),)),
    "messages.Lines": messages.Lines(("a line", "another"), True),
    "messages.Rows": messages.Rows((_ROW,)),
    "messages.Stop": messages.Stop(1, "why"),
    "messages.Ping": messages.Ping(1, 10**12),
    "messages.Pong": messages.Pong(1, 10**12, 10**11, 10**11 + 5, "boot"),
    "comparison.Difference": comparison.Difference(1, 0),
    "comparison digests": [b"d" * 16, b"e" * 16],
    "comparison array": ("float32[2]", 0),
    "comparison block": 3,
    "comparison._CapturedArray": [
        comparison._CapturedArray("float32[2]", b"d" * 16, True)
    ]
    * 2,
    "samples of shared replicas": {0: [b"d" * 16, b"e" * 16], 3: []},
    "differences.Details": differences.Details([("a", "f")], zlib.compress(b"a b")),
    "fingerprint._Record": fingerprint._Record(b"h" * 16, b"s" * 64),
    "a list of gpu_topology.GpuFacts": [gpu_topology.GpuFacts(platform="cpu", host="a")]
    * 2,
}
# Of those that are no class of their own.
KINDS = {
    "measurement.Seconds": list[measurement.Seconds],
    "lifeline.Left": rules.Message,
    "lifeline.AtEnd": rules.Message,
    "lifeline.LeftJax": rules.Message,
    "lifeline.Stuck": rules.Message,
    "a list of shared_segment.Peer": list[shared_segment.Peer],
    "a list of links.LinkPlace": list[links.LinkPlace],
    "endpoints of a link": tuple[str, str],
    **{f"messages.{name}": messages.Message for name in _WATCH},
    **{f"elastic.{type(x).__name__}": quorum.Message for x in elastic_messages.ALL},
    "comparison digests": list[bytes],
    "comparison array": tuple[str, int],
    "comparison._CapturedArray": list[comparison._CapturedArray],
    "samples of shared replicas": dict[int, list[bytes]],
    "a list of gpu_topology.GpuFacts": list[gpu_topology.GpuFacts],
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
    return msgspec.msgpack.encode(_change(rng, msgspec.msgpack.decode(data), kind))


def _change(rng: random.Random, fields, kind: int):
    """Puts something odd into the fields of a message, or of one in a list."""
    if not isinstance(fields, dict | list):
        return rng.choice((fields, -1, *_ODD))
    if isinstance(fields, list) and fields and rng.random() < 0.5:
        at = rng.randrange(len(fields))
        if isinstance(fields[at], dict | list):
            fields[at] = _change(rng, fields[at], kind)
            return fields
    names = sorted(fields) if isinstance(fields, dict) else range(len(fields))
    for name in rng.sample(list(names), rng.randint(0, min(2, len(names)))):
        fields[name] = rng.choice(_ODD)
    if kind == 5 and isinstance(fields, dict):
        fields["\x00unknown"] = rng.choice(_ODD)
    elif kind == 5:
        fields *= rng.choice((0, 2, 3))
    return fields


def fuzz_decoder(name: str, num_messages: int, *, seed: int) -> int:
    """Decodes; returns how many were messages, for which what is done next is tried."""
    rng, message = random.Random(seed), MESSAGES[name]
    good, count = msgspec.msgpack.encode(message), 0
    kind = KINDS.get(name, type(message))
    check = NEXT.get(name, lambda data, found: None)
    assert wire.decode(good, kind, what="It") == message
    check(good, message)
    for _ in range(num_messages):
        data = mangle(rng, good)
        found = _try(wire.decode, data, kind, what="It")
        if name == "early_exit.DepartureNotice":  # Any bytes are a notice.
            notice = early_exit._decode(data, 1)
            assert notice.process == 1 and notice.num_begun >= 0
            assert (notice.reason or "").isprintable()
        if found is not None:
            check(data, found)
            count += 1
    return count


def _try(decode, *args, **kwargs):
    try:
        return decode(*args, **kwargs)
    except wire.Malformed as error:
        assert str(error).encode()
        return None


def _open(offer: shared_segment.SegmentOffer) -> None:
    """No path that is not memory of this user is opened, and none raises."""
    mapped, error = shared_segment._open([8192], offer, 0)
    assert mapped is None and error is not None


def _combine(data: bytes) -> None:
    found = _try(gpu_topology.decode, data, 2)
    if found is not None:
        gpu_topology.combine(found)


def _judge_gone(data: bytes, found: rules.Message) -> None:
    """What another process says of its end has a verdict that can be shown."""
    del data
    try:
        checked = rules.check(found, 2)
    except wire.DecodeError:
        return
    if isinstance(checked, rules.Stuck):
        assert checked.culprit in (0, 1) and checked.text.isprintable()
        return
    if isinstance(checked, rules.AtEnd | rules.LeftJax):
        return
    gone = rules.Gone(1, 0.0, checked.steps, checked.error, checked.culprit)
    now = progress.Snapshot({"train": 4}, "train", None, 0.0)
    for has_ended in (False, True):
        verdict = rules.judge(0, has_ended, now, [gone], now_s=9.0)
        assert verdict is None or verdict.text.isprintable()


def _show_end(data: bytes, found: endings.Exit) -> None:
    del data
    try:
        end = launcher_link.check(found)
    except wire.DecodeError:
        return
    assert endings.describe_exit(end).isprintable()
    assert 0 <= endings.exit_code(end.returncode) < 256


def _vote(data: bytes, found: quorum.Message) -> None:
    """Whatever a member says, a group only stays in its slot, and answers."""
    del data
    slots = (0, 1, 2)
    group = quorum.Quorum(QuorumOptions(slots=slots), MemberId(0, 1), now_s=0.0)
    for k, sender in enumerate((MemberId(1, 1), MemberId(2, 5), MemberId(1, 2))):
        sent = group.receive(sender, found, k / 10) + group.tick(k + 0.05)
        assert {to for to, _ in sent} <= {1, 2}
        assert group.own.slot == 0


def _act_on_watch(data: bytes, found: messages.Message) -> None:
    """Other hosts can make a watch show printable lines, and nothing else."""
    del data
    shown: list[str] = []
    options = job_watch.WatchOptions(stall_s=1.0, folder="/dev/null/none")
    for host in (0, 1):
        outlets = job_watch.Outlets(shown.append, _check_status, tell=len)
        local = LocalProcesses(host)
        watch = JobWatch(options, local, outlets, num_processes=3, host=host)
        now_s = time.monotonic()
        some = messages.Reports(1, "a host", (_WAITING,)), messages.Ask()
        for message in (some[0], found, *some, found):
            watch._act_on(message, 10**12)
        for late_s in (0.1, 0.2, 9.0):
            if host == 0:
                watch._judge(now_s + late_s)
        assert abs(watch.offset_ns) < 1 << 64
    assert all(map(str.isprintable, shown)), shown


def _check_status(found: JobStatus) -> None:
    assert msgspec.json.decode(msgspec.json.encode(found), type=JobStatus) == found
    assert all(row.host.isprintable() for row in found.processes)


NEXT = {
    **{f"messages.{name}": _act_on_watch for name in _WATCH},
    **{f"elastic.{type(x).__name__}": _vote for x in elastic_messages.ALL},
    "datagram_link._Offer": lambda data, found: _try(datagram_link._decode_offer, data),
    "endpoints of a link": lambda data, found: _try(rendezvous._check_endpoints, found),
    "shared_segment.SegmentOffer": lambda data, found: _open(found),
    "gpu_topology.GpuFacts": lambda data, found: gpu_topology.combine([found] * 2),
    "a list of gpu_topology.GpuFacts": lambda data, found: _combine(data),
    "measurement.Seconds": lambda data, found: _try(measurement.make_links, found, 4),
    "measurement_cache.StoredTimes": lambda data, found: measurement_cache._decode(
        data, ("psum",)
    ),
    "differences.Details": lambda data, found: _try(differences.unpack, found.program),
    "lifeline.Left": _judge_gone,
    "lifeline.AtEnd": _judge_gone,
    "lifeline.LeftJax": _judge_gone,
    "lifeline.Stuck": _judge_gone,
    "endings.Exit": _show_end,
}


def fuzz_star(num_messages: int, *, seed: int) -> int:
    """Bytes of strangers, and signed frames that make no sense, at a line of a star."""
    rng, key, count = random.Random(seed), job_key.make(), 0
    good = msgspec.msgpack.encode(MESSAGES["star_codec.Frame"])
    center = member = None
    for _ in range(num_messages):
        if center is None or member is None:
            center = star_codec.Codec(key, "x", "center")
            member = star_codec.Codec(key, "x", "member")
            greeting = member.greet()
            if rng.random() < 0.2:
                greeting = mutate(rng, greeting)
            member.feed(center.greet())
            if not _feed(center, greeting):
                center = None
            continue
        body = mangle(rng, good)[: 1 << 14]
        topic = f"member {member._num_sent}"
        assert member._session is not None
        sealed = job_key.sign(member._session, topic, body)
        line = star_codec._LENGTH.pack(len(sealed)) + sealed
        if rng.random() < 0.3:
            line = mutate(rng, line)
        member._num_sent += 1
        found = _feed(center, line)
        if not found:
            center = None
        count += found == 2
    return count


def _feed(codec: star_codec.Codec, data: bytes) -> int:
    """Returns 0 if it was refused, 2 if there were frames, else 1."""
    try:
        frames, _ = codec.feed(data)
    except star_codec.FrameRefused as error:
        assert str(error).isprintable()
        return 0
    assert all(isinstance(frame, star_codec.Frame) for frame in frames)
    return 2 if frames else 1


def fuzz_judge(num_messages: int, *, seed: int) -> int:
    """Any records that can be decoded have an outcome that can be sent."""
    rng, count = random.Random(seed), 0
    good = msgspec.msgpack.encode(MESSAGES["meeting.MeetingRecord"])
    records = [meeting.MeetingRecord("a topic")] * 3
    for _ in range(num_messages):
        found = _try(wire.decode, mangle(rng, good), meeting.MeetingRecord, what="It")
        if found is not None:
            records = [*records[1:], found]
            count += 1
        outcome = meeting.judge(records, b"".join, range(3))
        assert msgspec.msgpack.encode(outcome)
    return count


def fuzz_store(num_messages: int, *, seed: int) -> int:
    """Only what this job has signed for a key is ever read there."""
    rng, key, client, count = random.Random(seed), job_key.make(), Client(), 0
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
        count += len(expected)
        for name in client.values:
            assert ours.try_get(name) == expected.get(name)
        listed = ours.list_directory("d")
        assert listed == {
            name[2:]: v for name, v in expected.items() if name.startswith("d/")
        }
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a name")
    args = parser.parse_args()
    fuzzes = {name: functools.partial(fuzz_decoder, name) for name in MESSAGES}
    fuzzes |= {"line of a star": fuzz_star, "outcome of a meeting": fuzz_judge}
    fuzzes |= {"store": fuzz_store} | comparison_fuzz.make_fuzzes(mangle)
    for name, fuzz in fuzzes.items():
        if args.only and args.only not in name:
            continue
        start_s = time.monotonic()
        count = fuzz(args.messages, seed=args.seed)
        seconds = time.monotonic() - start_s
        print(
            f"{name}: {args.messages} in {seconds:.1f} s, {count} were messages",
            flush=True,
        )


if __name__ == "__main__":
    main()
