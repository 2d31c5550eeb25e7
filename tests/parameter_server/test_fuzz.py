"""Senseless messages of peers that have the keys; `fuzz.py` is the long form."""

import random
import threading

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

from jdp import parameter_server
from jdp.parameter_server import keys, messages, shards
from jdp.parameter_server.messages import FollowerStatus, Push, Version, WorkerHello
from jdp.parameter_server.sockets import ClientSockets
from tests.parameter_server import fuzz
from tests.parameter_server.jobs import ThreadJob, run_workers, wait_for

PARAMS = fuzz.PARAMS


@pytest.mark.parametrize("name", [*fuzz.DECODERS, *fuzz.MACHINES])
def test_whatever_comes_is_refused_by_name_or_taken(name):
    num_good = {**fuzz.DECODERS, **fuzz.MACHINES}[name](random.Random(1), 4000)
    assert 0 < num_good < 4000


@pytest.mark.parametrize("data", fuzz.BOMBS, ids=range(len(fuzz.BOMBS)))
def test_bombs_are_no_messages(data):
    head = bytes((messages.VERSION, messages.MESSAGE))
    decoders = (messages.to_server, messages.to_worker, messages.to_follower)
    for decoder in decoders:
        with pytest.raises(messages.MessageError, match="sent a malformed message"):
            messages.decode(head + data, decoder)


def _is_sense(frame, is_server):
    """Whether a worker comes, or a server says that it begins anew."""
    try:
        found = messages.decode(frame, messages.to_server)
    except (messages.MessageError, messages.RefusedError):
        return False
    return isinstance(found, WorkerHello) or (
        is_server and isinstance(found, FollowerStatus)
    )


def _attack(job, is_over):
    """Sends what a server with two sorts of keys may hear, without an end."""
    found = keys.read_keys(job.key_file)
    rng = random.Random(0)
    lines = [
        ClientSockets(job.addresses, found, most_bytes=0, is_server=is_server)
        for is_server in (False, True)
    ]
    num_sent = 0
    while not is_over.is_set():
        for line in lines:
            for server in range(len(job.addresses)):
                frame = fuzz.draw_frame(rng, fuzz.TO_SERVER)
                if not _is_sense(frame, is_server=line is lines[1]):
                    payload = rng.choice([None, b"", bytes(7)])
                    line.send(server, frame, payload)
                    num_sent += 1
            line.poll(0.001)
            line.receive()
    for line in lines:
        line.close()
    return num_sent


def _train(folder, mode, num_servers, is_attacked):
    rng = np.random.default_rng(0)
    grads = [
        jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), PARAMS)
        for _ in range(20)
    ]

    def work(worker, index):
        for i in range(10):
            worker.pull()
            worker.push(grads[2 * i + index])
            assert worker.flush() == "applied"
        return worker.pull(), worker.version

    num_workers = 2 if isinstance(mode, type(parameter_server.sync())) else 1
    folder.mkdir()
    job = ThreadJob(
        folder,
        PARAMS,
        optax.adam(0.1),
        mode=mode,
        num_servers=num_servers,
        num_workers=num_workers,
    )
    is_over, sent = threading.Event(), []
    with job:
        attacker = threading.Thread(
            target=lambda: sent.append(_attack(job, is_over)), name="attacker"
        )
        if is_attacked:
            attacker.start()
        try:
            if is_attacked:
                service = job.servers[0]._service
                wait_for(lambda: service._refusals.count > 50)
            results = run_workers(job, work, num_workers, timeout_s=30.0)
        finally:
            is_over.set()
        if is_attacked:
            attacker.join(10.0)
            assert job.servers[0].metrics["refused"] > 50
    assert not job.errors
    return results


@pytest.mark.parametrize(
    "mode,num_servers",
    [(parameter_server.sync(), 2), (parameter_server.asynchronous(), 1)],
    ids=str,
)
def test_a_job_beside_a_peer_that_sends_nonsense_is_that_job_bit_for_bit(
    tmp_path, mode, num_servers
):
    alone = _train(tmp_path / "alone", mode, num_servers, False)
    beside = _train(tmp_path / "beside", mode, num_servers, True)
    for (found, version), (expected, other) in zip(beside, alone, strict=True):
        assert version == other == (1, 10)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert jnp.array_equal(x, y)


HELLO = WorkerHello(b"me", 0, 0, 1, fuzz.LEAVES, "", Version(), None)
PUSH = Push(b"me", 1, Version(1, 0), 1.0, True, False, False)
GOOD = bytes(fuzz.LAYOUT.num_bytes)


@pytest.mark.parametrize(
    "message,payload,reason",
    [
        (PUSH, bytes(64 + len(GOOD)), "pushed 128 bytes instead of 64"),
        (PUSH, bytes(1), "pushed 1 bytes"),
        (PUSH, None, "pushed 0 bytes"),
        (
            {"version": Version(1, 9)},
            GOOD,
            "of version 1.9, but the newest version is 1.0",
        ),
        ({"version": Version(2, 0)}, GOOD, "of version 2.0"),
        ({"version": Version(1, -1)}, GOOD, r"Expected `int` >= 0"),
        ({"version": Version(1, -(2**63))}, GOOD, "Expected `int` >= 0"),
        ({"is_compressed": True}, GOOD, "compressed a push, but the servers have no"),
        ({"weight": 0.0}, GOOD, "Expected `float` >= 1e-30"),
        ({"weight": -1.0}, GOOD, "Expected `float`"),
        ({"weight": float("nan")}, GOOD, "Expected `float`"),
        ({"weight": 1e31}, GOOD, "Expected `float` <= 1e"),
        ({"sequence": 0}, GOOD, "Expected `int` >= 1"),
        ({"sequence": 1 << 63}, GOOD, "Expected `int` <="),
        ({"session": b""}, GOOD, "Expected `bytes` of length >= 1"),
        ({"session": bytes(65)}, GOOD, "Expected `bytes` of length <= 64"),
        (FollowerStatus(1, b"i", b"", 0, 0, (0,), ()), None, "without the key of one"),
    ],
    ids=lambda x: None if isinstance(x, bytes) else str(x)[:40],
)
def test_each_senseless_field_is_named_to_its_sender(message, payload, reason):
    made, socket = fuzz.make_service()

    def say(sent, payload=None):
        encoded = messages.encode(sent)
        made._hear(fuzz.Message(b"honest", encoded, payload))
        made._decide()

    say(HELLO)
    if isinstance(message, dict):
        message = msgspec.structs.replace(PUSH, **message)
    say(message, payload)
    with pytest.raises(messages.RefusedError, match=reason):
        messages.decode(socket.sent[-1][0], messages.to_worker)
    assert made.summarize()["refused"] == 1 and made.summarize()["updates"] == 0
    say(PUSH, GOOD)
    assert made.summarize()["updates"] == 1


def test_a_second_push_before_the_first_is_settled_is_not_taken():
    made, _ = fuzz.make_service(parameter_server.sync())

    def say(route, sent, payload=None):
        made._hear(fuzz.Message(route, messages.encode(sent), payload))
        made._decide()

    other = msgspec.structs.replace(HELLO, session=b"other", worker=1)
    say(b"me", HELLO)
    say(b"other", other)
    say(b"me", PUSH, GOOD)
    say(b"me", msgspec.structs.replace(PUSH, sequence=2), GOOD)
    assert made.summarize()["updates"] == 0
    say(b"other", msgspec.structs.replace(PUSH, session=b"other"), GOOD)
    assert made.summarize()["updates"] == 1
    settled = made._follower.settled[b"me"]
    assert (settled.sequence, settled.outcome) == (1, "applied")


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe\x00",
        b"",
        b'{"server_public":"x","server_secret":"y","worker_public":"z",'
        b'"worker_secret":"w"}',
        b"[" * 100_000,
        b'{"server_public":"\xff"}',
    ],
    ids=["garbage", "empty", "no keys", "nested", "bad UTF-8"],
)
def test_a_file_without_keys_is_named(tmp_path, text):
    path = tmp_path / "keys"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(RuntimeError, match="`key_file` '.*keys' has no keys: "):
        keys.read_keys(str(path))


def test_paths_of_a_model_are_shown_in_one_line(tmp_path, caplog):
    leaves = [("a\n\x1b[2J" * 500, "float32[1]"), *fuzz.LEAVES[1:]]
    made, socket = fuzz.make_service()
    hello = WorkerHello(b"me", 0, 0, 1, leaves, "", Version(), None)
    made._hear(fuzz.Message(b"honest", messages.encode(hello), None))
    assert "Worker 0 is refused" in caplog.records[-1].getMessage()
    assert caplog.records[-1].getMessage().isprintable()
    assert len(socket.sent[-1][0]) < 10_000
    assert shards.find_difference(fuzz.LEAVES, leaves, "x")
