import contextlib
import dataclasses
import gc
import itertools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

import jdp
from jdp.replicas.meeting import StoreMeeting
from jdp.runtime.transport import rendezvous, transport, zmq_sockets
from jdp.runtime.transport.transport import LinkOptions, Lost, Received
from tests import harness, rarely
from tests.runtime import strangers, transport_fuzz

_SMALL = LinkOptions(max_message_bytes=1 << 20, heartbeat_timeout_s=5.0)


def _make_memory(num):
    links = transport.make_memory_links(num, options=_SMALL)
    return links, links[0].lose


def _open_sockets(world):
    return rendezvous.open_sockets(world, key="link", options=_SMALL)[0]


def _make_path(num):
    links = harness.run_threads(_open_sockets, num)
    return links, lambda rank: _cut(links[rank])


def _make_zmq(num):
    """Links at an abstract name, as without a folder: strangers can reach it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_enter_folder", lambda *_: "")
        return _make_path(num)


def _make_lane(num):
    links = harness.run_threads(_open, num)
    return links, lambda rank: _cut(links[rank]._link)


def _cut(link):
    """Ends a link as the kernel ends those of a killed process."""
    link._socket.setsockopt(zmq.LINGER, 0)
    link._is_closed = True
    link._end()


def _endpoint(hub):
    """Where it listens; "ipc://@name" or "tcp://[address]:port"."""
    return hub._socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _make_tcp(num):
    with pytest.MonkeyPatch.context() as patch:
        endpoints = ["tcp://127.0.0.1:*"]
        patch.setattr(rendezvous, "find_endpoints", lambda *_: endpoints)
        return _make_zmq(num)


HELLO = transport.encode(transport.HELLO)
# One table for all kinds of links: each makes the links of `num` processes, and a
# function that makes a process end without a word.
_KINDS = {
    "memory": _make_memory,
    "path": _make_path,
    "ipc": _make_zmq,
    "tcp": _make_tcp,
    "lane": _make_lane,
}


@pytest.fixture(params=_KINDS)
def star(request):
    with contextlib.ExitStack() as stack:

        def make(num):
            links, lose = _KINDS[request.param](num)
            for link in reversed(links):
                stack.callback(_close_unless_lost, link)
            return links, lose

        yield make


def _close_unless_lost(link):
    with contextlib.suppress(RuntimeError):
        link.close()


def _collect(link, num_events, timeout_s=10.0):
    """Waits until `num_events` have come, and returns them."""
    deadline_s = time.monotonic() + timeout_s
    events = []
    while len(events) < num_events and (left_s := deadline_s - time.monotonic()) > 0:
        events += link.wait(left_s)
    return events


def test_hub_and_spoke_hear_each_other(star):
    (hub, *spokes), _ = star(3)
    for rank, spoke in enumerate(spokes, start=1):
        spoke.send(0, b"from %d" % rank)
        assert _collect(hub, 1) == [Received(rank, b"from %d" % rank)]
        hub.send(rank, b"to %d" % rank)
        assert _collect(spoke, 1) == [Received(0, b"to %d" % rank)]


@pytest.mark.parametrize("payload", [b"", b"\0", bytes(range(256)), b"x" * (1 << 20)])
def test_a_payload_arrives_as_it_was_sent(star, payload):
    (hub, spoke), _ = star(2)
    spoke.send(0, payload)
    assert _collect(hub, 1) == [Received(1, payload)]
    hub.send(1, payload)
    assert _collect(spoke, 1) == [Received(0, payload)]


def test_the_order_of_one_sender_is_kept(star):
    (hub, first, second), _ = star(3)
    for i in range(1000):
        first.send(0, b"%d" % i)
        second.send(0, b"%d" % i)
        hub.send(1, b"%d" % i)
    events = _collect(hub, 2000)
    for rank in (1, 2):
        expected = [Received(rank, b"%d" % i) for i in range(1000)]
        assert [event for event in events if event.peer == rank] == expected
    assert _collect(first, 1000) == [Received(0, b"%d" % i) for i in range(1000)]


def test_two_wakes_and_a_message_end_waits(star):
    (hub, spoke), _ = star(2)
    hub.wake()
    hub.wake()
    assert hub.wait(5.0) == []
    assert hub.wait(0.0) == []
    threading.Timer(0.1, hub.wake).start()
    start_s = time.monotonic()
    assert hub.wait(None) == []
    assert 0.05 < time.monotonic() - start_s < 2.0
    spoke.send(0, b"m")
    assert hub.wait(None) == [Received(1, b"m")]


def test_a_wait_ends_when_its_time_is_over(star):
    (hub, spoke), _ = star(2)
    for link in (hub, spoke):
        for timeout_s in (0.0, 0.2):
            start_s = time.monotonic()
            assert link.wait(timeout_s) == []
            assert timeout_s <= time.monotonic() - start_s < timeout_s + 0.15


def test_an_idle_wait_uses_no_cpu(star):
    (hub, spoke), _ = star(2)
    spoke.send(0, b"m")
    assert _collect(hub, 1)
    for link in (hub, spoke):
        start_s = time.process_time()
        assert link.wait(0.3) == []
        assert time.process_time() - start_s < 0.03


def test_a_payload_beyond_the_limit_is_refused_with_both_sizes(star):
    (hub, spoke), _ = star(2)
    for link, peer in ((hub, 1), (spoke, 0)):
        with pytest.raises(ValueError, match="1,048,577 bytes.* is 1,048,576"):
            link.send(peer, b"x" * (1 + (1 << 20)))


def test_a_spoke_sends_to_the_hub_only_and_the_hub_to_spokes(star):
    (hub, first, _), _ = star(3)
    with pytest.raises(ValueError, match="links to process 0 only; got 2"):
        first.send(2, b"")
    for peer in (0, 3, -1):
        with pytest.raises(ValueError, match=f"processes 1 to 2; got {peer}"):
            hub.send(peer, b"")


def test_the_hub_sees_the_loss_of_a_spoke_and_goes_on_with_the_rest(star):
    (hub, first, second), lose = star(3)
    first.send(0, b"last words")
    assert _collect(hub, 1) == [Received(1, b"last words")]
    lose(1)
    why = "process 1 has ended or its host is gone"
    assert _collect(hub, 1) == [Lost(1, why)]
    hub.send(1, b"into the void")
    second.send(0, b"here")
    assert _collect(hub, 1) == [Received(2, b"here")]
    hub.send(2, b"there")
    assert _collect(second, 1) == [Received(0, b"there")]
    assert hub.wait(0.1) == [] and second.wait(0.1) == []


def test_every_spoke_sees_the_loss_of_the_hub(star):
    (_, *spokes), lose = star(3)
    lose(0)
    for spoke in spokes:
        why = "process 0 has ended or its host is gone"
        assert _collect(spoke, 1) == [Lost(0, why)]
        spoke.send(0, b"into the void")
        assert spoke.wait(0.1) == []


# The longer one is longer than a link lingers.
@pytest.mark.parametrize(
    ("star", "delay_s"),
    rarely.cases(
        itertools.product(_KINDS, [0.0, 1.2]),
        often=[(kind, 0.0) for kind in _KINDS] + [("tcp", 1.2), ("path", 1.2)],
    ),
    indirect=["star"],
)
def test_what_was_sent_before_a_close_arrives_before_the_loss(star, delay_s):
    (hub, first, second), _ = star(3)
    messages = [b"%d" % i for i in range(5000)]  # more than one wait takes.
    for message in messages:
        first.send(0, message)
    first.close()
    time.sleep(delay_s)
    expected = [Received(1, message) for message in messages]
    closed = Lost(1, "process 1 has closed its link")
    assert _collect(hub, 5001) == [*expected, closed]
    for message in messages:
        hub.send(2, message)
    hub.close()
    time.sleep(delay_s)
    expected = [Received(0, message) for message in messages]
    closed = Lost(0, "process 0 has closed its link")
    assert _collect(second, 5001) == [*expected, closed]
    assert second.wait(0.1) == []


def test_a_closed_link_says_so(star):
    (hub, spoke), _ = star(2)
    spoke.close()
    spoke.close()
    spoke.wake()
    with pytest.raises(RuntimeError, match="This link is closed"):
        spoke.send(0, b"")
    with pytest.raises(RuntimeError, match="This link is closed"):
        spoke.wait(1.0)


def test_many_spokes(star):
    num = 9
    (hub, *spokes), _ = star(num)
    for i in range(20):
        for spoke in spokes:
            spoke.send(0, b"%d" % i)
        assert len(_collect(hub, num - 1)) == num - 1
        for rank in range(1, num):
            hub.send(rank, b"%d" % i)
    for spoke in spokes:
        assert _collect(spoke, 20) == [Received(0, b"%d" % i) for i in range(20)]


def test_a_process_alone_has_a_link_to_nobody():
    (alone,) = transport.make_memory_links(1)
    with pytest.raises(ValueError, match="links to no process: it is alone"):
        alone.send(1, b"")
    assert alone.wait(0.0) == []
    alone.close()


def test_limits_are_checked():
    with pytest.raises(ValueError, match="`max_message_bytes` must be .*, got 0"):
        LinkOptions(max_message_bytes=0)
    with pytest.raises(ValueError, match="`heartbeat_timeout_s` must be .*, got 0"):
        LinkOptions(heartbeat_timeout_s=0.0)


def test_a_process_that_is_busy_is_not_lost():
    options = LinkOptions(heartbeat_timeout_s=0.4)

    def run(world):
        link = transport.open_link(world, key="link", options=options)
        deadline_s = time.monotonic() + 1.2
        while time.monotonic() < deadline_s:  # far longer than `heartbeat_timeout_s`.
            pass
        link.send(1 - world.process_index, b"still here")
        events = _collect(link, 1)
        # Whoever closes first is lost to the other.
        done.wait()
        link.close()
        return events

    done = threading.Barrier(2)
    peers = [1, 0]
    expected = [[Received(peer, b"still here")] for peer in peers]
    assert harness.run_threads(run, 2) == expected


def test_a_link_that_is_forgotten_is_collected_and_its_loss_seen():
    hub, spoke = harness.run_threads(_open, 2)
    spoke.itself = spoke
    del spoke
    start_s = time.monotonic()
    gc.collect()
    assert time.monotonic() - start_s < 2.0
    assert _collect(hub, 1) == [Lost(1, "process 1 has ended or its host is gone")]
    hub.close()


def test_a_world_of_one_process_has_a_link_to_nobody():
    link = transport.open_link(harness.local_world(1), key="link", options=_SMALL)
    assert link.wait(0.0) == []
    link.close()


# Opening.


def _open(world):
    return transport.open_link(world, key="link", options=_SMALL)


def _texts(results):
    return [str(result) for result in results]


@pytest.mark.parametrize("missing", [0, 2])
def test_a_process_that_does_not_come_is_named_by_all_others(missing):
    def run(world):
        return None if world.process_index == missing else _open(world)

    results = harness.run_threads(run, 4, timeout_s=0.5)
    text = f"1 of 4 processes did not come to open a link within 0.5 s: {missing}. Look"
    for rank in {0, 1, 2, 3} - {missing}:
        assert isinstance(results[rank], RuntimeError)
        assert text in str(results[rank])


def _offer(world, *, version=transport.VERSION, options=_SMALL):
    """Publishes a key and options, and nothing more."""
    keys = zmq.curve_keypair()
    offer = rendezvous._LinkOffer(keys[0], options)
    data = bytes((version,)) + msgspec.msgpack.encode(offer)
    world.store.set(f"link/{world.process_index}", data)
    return keys


def test_a_process_that_comes_and_does_not_connect_is_named_by_all_others():
    def run(world):
        return _offer(world) if world.process_index == 1 else _open(world)

    results = harness.run_threads(run, 3, timeout_s=0.5)
    for rank in (0, 2):
        assert "1 of 3 processes did not come" in str(results[rank])
        assert "0.5 s: 1. Look" in str(results[rank])


@pytest.mark.parametrize("other", [0, 1])
def test_another_version_is_refused_everywhere(other):
    def run(world):
        if world.process_index == other:
            _offer(world, version=7)
            return None
        return _open(world)

    results = harness.run_threads(run, 3, timeout_s=0.5)
    for rank in {0, 1, 2} - {other}:
        by = rank if other == 0 else 0
        text = f"Process {other} speaks version 7 of the transport, process {by} versi"
        assert text in str(results[rank])


def test_other_options_are_refused_everywhere():
    def run(world):
        if world.process_index == 1:
            return transport.open_link(world, key="link", options=LinkOptions())
        return _open(world)

    for text in _texts(harness.run_threads(run, 3, timeout_s=0.5)):
        assert "`options` of a link differ" in text
        assert "1048576" in text and "67108864" in text


def _knock(world, keys, hello, **zmq_options):
    """Connects as the process that has published `keys`, by hand."""
    meeting = StoreMeeting(world.store, "link", world.process_index, 5.0)
    offers = rendezvous._hear_offers(world, meeting, _SMALL, [0])
    hub_key, endpoints = offers[0].public_key, rendezvous._hear_endpoints(meeting)
    context = zmq.Context()
    options = {
        "LINGER": 0,
        "CURVE_PUBLICKEY": keys[0],
        "CURVE_SECRETKEY": keys[1],
        "CURVE_SERVERKEY": hub_key,
        **zmq_options,
    }
    clients = []
    for endpoint in endpoints:
        client = context.socket(zmq.DEALER)
        for name, value in options.items():
            client.setsockopt(getattr(zmq, name), value)
        client.connect(endpoint.replace("*", "127.0.0.1"))
        client.send(HELLO if clients else hello)
        clients.append(client)
    return context, clients


def test_a_known_key_with_another_version_is_refused_everywhere():
    def run(world):
        if world.process_index != 1:
            return _open(world)
        context, clients = _knock(world, _offer(world), b"\x07\x01")
        with contextlib.suppress(TimeoutError):
            world.store.get("link/outcome", timeout_s=5.0)
        assert len(clients) == 2
        context.destroy(linger=0)

    results = harness.run_threads(run, 3)
    text = "process 1 sent version 7; this process speaks version 1"
    assert text in str(results[0]) and text in str(results[2])


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"\x07\x00late"], "sent version 7; this process speaks version 1"),
        ([b"\x01"], "sent 1 bytes, which are not a frame"),
        ([b"\x01\x09"], "sent a frame of an unknown kind, 9"),
        ([HELLO], "did not say hello first, and only then"),
        ([b"\x01\x00", b"\x01\x00"], "sent 2 frames at once"),
    ],
)
def test_a_process_that_breaks_the_protocol_is_lost_and_cut_off(
    frames, why, monkeypatch
):
    # The process knocks twice; a path is gone by then.
    monkeypatch.setattr(rendezvous, "_enter_folder", lambda *_: "")

    def run(world):
        if world.process_index == 1:
            # It claims to be process 2, which does not help.
            keys = _offer(world)
            context, clients = _knock(world, keys, HELLO, ROUTING_ID=b"2")
            world.store.get("link/outcome", timeout_s=5.0)
            client = clients[0]
            client.send(transport.encode(transport.DATA, b"good"))
            monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            client.send_multipart(frames)
            is_cut = monitor.poll(2000)
            context.destroy(linger=0)
            # Its key has been used.
            context, clients = _knock(world, keys, HELLO)
            monitor = clients[0].get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            is_refused = monitor.poll(2000)
            context.destroy(linger=0)
            return bool(is_cut), bool(is_refused)
        link = _open_sockets(world)
        if world.process_index == 2:
            link.send(0, b"good too")
        num_expected = 3 if world.process_index == 0 else 1
        events = _collect(link, num_expected)[:num_expected]
        if world.process_index == 0:
            link.wait(0.5)  # for the second knock.
            link.send(2, b"bye")
        link.close()
        return events

    heard, cut, second = harness.run_threads(run, 3)
    assert cut == (True, True)
    assert [e for e in heard if e.peer == 1] == [
        Received(1, b"good"),
        Lost(1, f"process 1 {why}"),
    ]
    assert [e for e in heard if e.peer == 2] == [Received(2, b"good too")]
    assert second == [Received(0, b"bye")]


# Strangers.


def _talk(hub, spokes, seconds):
    """Traffic of a job, for a while; every message arrives, in order."""
    deadline_s = time.monotonic() + seconds
    count = 0
    while time.monotonic() < deadline_s:
        payload = b"%d" % count
        for rank, spoke in enumerate(spokes, start=1):
            hub.send(rank, payload)
            assert _collect(spoke, 1) == [Received(0, payload)]
            spoke.send(0, payload)
            assert _collect(hub, 1) == [Received(rank, payload)]
        count += 1
    return count


@pytest.mark.parametrize("make", [_make_zmq, _make_tcp])
def test_strangers_are_dropped_and_logged_once_while_the_job_goes_on(
    make, caplog, monkeypatch
):
    # Once in a while: here that is longer than the slowest machine takes for the test.
    monkeypatch.setattr(zmq_sockets, "_LOG_PERIOD_S", 3600.0)
    (hub, *spokes), _ = make(3)
    with strangers.fire(_endpoint(hub)), caplog.at_level("WARNING", logger="jdp"):
        assert _talk(hub, spokes, 1.0) > 10
    for link in (hub, *spokes):
        link.close()
    (record,) = caplog.records
    assert "Connections dropped that are not of this job: 1; of the l" in record.message


@pytest.mark.parametrize("name", strangers.SPEECHES)
def test_each_stranger_is_hung_up_on_or_ignored(name):
    (hub, spoke), _ = _make_zmq(2)
    speech = strangers.SPEECHES[name]
    heard = strangers.speak(_endpoint(hub), speech, wait_s=0.05)
    # Nothing but the greeting of ZMTP, and how a handshake goes wrong.
    assert heard[:10] in (b"", strangers.GREETING[:10]) or heard[0] == 0xFF
    assert b"jdp" not in heard and len(heard) < 200
    _talk(hub, [spoke], 0.01)
    spoke.close()
    hub.close()


def test_strangers_that_come_while_nobody_waits_do_not_halt_the_job():
    (hub, spoke), _ = _make_zmq(2)
    spoke.send(0, b"first")
    assert _collect(hub, 1)
    # More than the events that libzmq keeps for a monitor, 1000 at either end, and the
    # connections that the kernel keeps, 4096.
    for _ in range(6000):
        strangers.dial(_endpoint(hub), timeout_s=20.0).close()
    spoke.send(0, b"x" * 1000)
    assert _collect(hub, 1) == [Received(1, b"x" * 1000)]
    spoke.close()
    hub.close()


def test_a_refusal_is_logged_once_in_a_while(monkeypatch, caplog):
    now_s = [100.0]
    monkeypatch.setattr(zmq_sockets.time, "monotonic", lambda: now_s[0])
    refusals = zmq_sockets.Refusals()
    with caplog.at_level("WARNING", logger="jdp"):
        for _ in range(7):
            refusals.note("it is odd")
        now_s[0] += 10.0
        refusals.note("it is late")
    first, second = [record.message for record in caplog.records]
    assert "job: 1; of the last one, it is odd" in first
    assert "job: 7; of the last one, it is late" in second


_CLOSE_UNDER_FIRE = """
import logging, time
logging.disable(logging.WARNING)
from tests.runtime import strangers, test_transport as t
for i in range(50):
    (hub, first, second), _ = (t._make_zmq, t._make_tcp)[i % 2](3)
    with strangers.fire(t._endpoint(hub), num_threads=3):
        time.sleep(0.005 * (i % 3))
        for k in range(100):
            hub.send(1, b"%d" % k)
        start_s = time.monotonic()
        hub.close()
        assert time.monotonic() - start_s < 2.0
    events = t._collect(first, 101)
    closed = t.Lost(0, "process 0 has closed its link")
    assert events == [*(t.Received(0, b"%d" % k) for k in range(100)), closed]
    first.close()
    second.close()
"""


@pytest.mark.multiprocess
def test_a_hub_closes_well_while_strangers_speak():
    # libzmq aborts the process where it does not.
    command = [sys.executable, "-c", _CLOSE_UNDER_FIRE]
    environ = {**os.environ, "PYTHONPATH": harness.python_path()}
    subprocess.run(command, check=True, timeout=60, env=environ)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_fuzz(kind):
    assert transport_fuzz.fuzz(kind, 20_000, seed=0) > 10


@given(st.binary(max_size=100))
def test_a_frame_is_what_would_be_written_or_an_error(data):
    try:
        kind, payload = transport.decode(memoryview(data))
    except transport.FrameError:
        return
    assert transport.encode(kind, payload) == data


# Where the hub listens.


@pytest.mark.parametrize(
    ("host", "addresses", "expected"),
    [
        ("127.0.0.1", None, "ipc:///tmp/jdp-x/jdp-"),
        ("localhost", None, "ipc:///tmp/jdp-x/jdp-"),
        ("a", ["10.0.0.7"], "tcp://10.0.0.7:* tcp://*:*"),
        ("a", ["fe80::7"], "tcp://[fe80::7]:* tcp://*:*"),
        ("a", ["127.0.1.1"], "tcp://*:*"),
        ("a", ["10.0.0.7", "10.0.0.8"], "tcp://*:*"),
    ],
)
def test_the_hub_listens_where_the_others_reach_it(
    host, addresses, expected, monkeypatch
):
    monkeypatch.setattr(rendezvous, "find_addresses", lambda host: addresses)
    found = " ".join(rendezvous.find_endpoints(host, "/tmp/jdp-x"))
    assert found.startswith(expected)


def test_a_host_without_an_address_is_an_error_everywhere():
    def run(world):
        return _open(dataclasses.replace(world, host="no.such.host.invalid"))

    for text in _texts(harness.run_threads(run, 2)):
        assert "`World.host` 'no.such.host.invalid' has no address" in text


# Real processes.


def _exchange():
    world = jdp.init()
    link = transport.open_link(world, key="link", options=_SMALL)
    if world.process_index:
        link.send(0, b"from %d" % world.process_index)
        events = _collect(link, 1)[:1]
    else:
        events = sorted(_collect(link, world.process_count - 1))
        for rank in range(1, world.process_count):
            link.send(rank, b"to %d" % rank)
    link.close()
    return events, world.host


@pytest.mark.multiprocess
def test_the_processes_of_a_job_are_linked():
    hub, first, second = harness.run_checked(_exchange, 3)
    assert hub == ([Received(1, b"from 1"), Received(2, b"from 2")], "127.0.0.1")
    assert first[0] == [Received(0, b"to 1")]
    assert second[0] == [Received(0, b"to 2")]


class _Star:
    """Processes that talk until they are stopped, see `transport_process`."""

    def __init__(self, folder, num, heartbeat_s):
        self._folder = folder
        environ = {**os.environ, "PYTHONPATH": harness.python_path()}
        arguments = [str(num), str(heartbeat_s)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.transport_process"]
                + [str(folder), str(rank), *arguments],
                stdout=subprocess.PIPE,
                text=True,
                env=environ,
            )
            for rank in range(num)
        ]

    def read(self, rank):
        """What process `rank` says next."""
        return json.loads(self.processes[rank].stdout.readline())

    def send_signal(self, rank, number):
        """Returns when it was sent."""
        now_s = time.monotonic()
        self.processes[rank].send_signal(number)
        return now_s

    def stop(self):
        pathlib.Path(self._folder, "stop").touch()

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture
def processes(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(num, heartbeat_s):
            star = _Star(tmp_path, num, heartbeat_s)
            stack.callback(star.end)
            for rank in range(num):
                assert star.read(rank)["event"] == "open"
            return star

        yield start


@pytest.mark.multiprocess
@pytest.mark.slow
def test_spokes_and_then_the_hub_are_killed_or_stopped(processes):
    heartbeat_s = 1.0
    star = processes(4, heartbeat_s)
    # Shorter than the heartbeat: nobody notices, or the next line was another.
    star.send_signal(1, signal.SIGSTOP)
    time.sleep(0.2)
    star.send_signal(1, signal.SIGCONT)
    time.sleep(0.5)
    at_s = star.send_signal(1, signal.SIGSTOP)
    lost = star.read(0)
    assert (lost["peer"], lost["why"]) == (
        1,
        "process 1 has not answered for 1 s (stopped, or its host is gone)",
    )
    assert 0.3 * heartbeat_s < lost["at_s"] - at_s < heartbeat_s + 0.5
    star.send_signal(1, signal.SIGCONT)
    assert star.read(1)["why"] == "process 0 has ended or its host is gone"
    at_s = star.send_signal(2, signal.SIGKILL)
    lost = star.read(0)
    assert lost["why"] == "process 2 has ended or its host is gone"
    assert lost["at_s"] - at_s < 0.5
    at_s = star.send_signal(0, signal.SIGKILL)
    lost = star.read(3)
    assert lost["why"] == "process 0 has ended or its host is gone"
    assert lost["at_s"] - at_s < 0.5
    assert star.read(3)["num_received"] > 10


@pytest.mark.multiprocess
def test_a_stopped_hub_is_lost_to_all_and_a_closed_one_says_so(processes):
    star = processes(3, 0.6)
    at_s = star.send_signal(0, signal.SIGSTOP)
    for rank in (1, 2):
        lost = star.read(rank)
        assert lost["why"].startswith("process 0 has not answered for 0.6 s (stopped")
        assert lost["at_s"] - at_s < 0.6 + 0.5
    star.send_signal(0, signal.SIGCONT)
    assert {star.read(0)["peer"], star.read(0)["peer"]} == {1, 2}


@pytest.mark.parametrize("message", [b"", b"abc", b"\xff\xff\xff\xffno offer"])
def test_a_message_without_a_number_is_the_end_of_its_sender(message):
    hub, spoke = harness.run_threads(_open, 2)
    spoke._link.send(0, message)
    (lost,) = _collect(hub, 1)
    assert lost == Lost(1, "process 1 sent what is not a numbered message")
    spoke.close()
    hub.close()


def test_datagrams_of_strangers_are_dropped():
    hub, spoke = harness.run_threads(_open, 2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for datagram in (b"", b"x" * 10, b"x" * 16 + b"\0\0\0\0forged", b"x" * 40_000):
            stranger.sendto(datagram, hub._address)
            spoke.send(0, b"true")
            assert _collect(hub, 1) == [Received(1, b"true")]
    assert hub.wait(0.0) == []
    spoke.close()
    hub.close()


def test_messages_of_both_ways_come_in_the_order_they_were_sent():
    hub, spoke = harness.run_threads(_open, 2)
    # Large ones go over ZeroMQ, and more small ones than the queue of datagrams holds.
    sizes = [10, 100_000, 10, 10, 500_000, *([20] * 100), 70_000, 10]
    sent = [bytes([i % 256]) * size for i, size in enumerate(sizes)]
    for payload in sent:
        spoke.send(0, payload)
    assert _collect(hub, len(sent)) == [Received(1, payload) for payload in sent]
    # A process that leaves has said all before.
    for payload in sent:
        spoke.send(0, payload)
    spoke.close()
    events = _collect(hub, len(sent) + 1)
    assert events[:-1] == [Received(1, payload) for payload in sent]
    assert events[-1] == Lost(1, "process 1 has closed its link")
    hub.close()
