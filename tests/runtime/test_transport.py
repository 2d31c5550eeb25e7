import contextlib
import threading
import time

import pytest
import zmq

from jdp.runtime import transport, transport_meeting
from jdp.runtime.transport import LinkOptions, Lost, Received
from tests import harness

_SMALL = LinkOptions(max_message_bytes=1 << 20, heartbeat_timeout_s=5.0)


def _make_memory(num):
    links = transport.make_memory_links(num, options=_SMALL)
    return links, links[0].lose


def _make_zmq(num):
    links = harness.run_threads(
        lambda world: transport.open_link(world, key="link", options=_SMALL), num
    )
    return links, lambda rank: _cut(links[rank])


def _cut(link):
    """Ends a link as the kernel ends those of a killed process."""
    link._context.destroy(linger=0)
    for _, line in link._lines.values():
        line.close()
    link._is_closed = True


def _endpoint(hub):
    """Where it listens; "ipc://@name" or "tcp://[address]:port"."""
    return hub._socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _make_tcp(num):
    with pytest.MonkeyPatch.context() as patch:
        endpoints = ["tcp://127.0.0.1:*"]
        patch.setattr(transport_meeting, "find_endpoints", lambda host: endpoints)
        return _make_zmq(num)


# One table for all kinds of links: each makes the links of `num` processes, and a
# function that makes a process end without a word.
_KINDS = {"memory": _make_memory, "ipc": _make_zmq, "tcp": _make_tcp}


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


# Longer than a link lingers.
@pytest.mark.parametrize("delay_s", [0.0, 1.2])
def test_what_was_sent_before_a_close_arrives_before_the_loss(star, delay_s):
    (hub, first, second), _ = star(3)
    messages = [b"%d" % i for i in range(300)]
    for message in messages:
        first.send(0, message)
    first.close()
    time.sleep(delay_s)
    expected = [Received(1, message) for message in messages]
    closed = Lost(1, "process 1 has closed its link")
    assert _collect(hub, 301) == [*expected, closed]
    for message in messages:
        hub.send(2, message)
    hub.close()
    time.sleep(delay_s)
    expected = [Received(0, message) for message in messages]
    closed = Lost(0, "process 0 has closed its link")
    assert _collect(second, 301) == [*expected, closed]
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
    with pytest.raises(ValueError, match="links to nobody: it is alone"):
        alone.send(1, b"")
    assert alone.wait(0.0) == []
    alone.close()


def test_limits_are_checked():
    with pytest.raises(ValueError, match="`max_message_bytes` must be .*, got 0"):
        LinkOptions(max_message_bytes=0)
    with pytest.raises(ValueError, match="`heartbeat_timeout_s` must be .*, got 0"):
        LinkOptions(heartbeat_timeout_s=0.0)
