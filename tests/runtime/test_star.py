import collections
import contextlib
import os
import secrets
import socket
import struct
import threading
import time

import hypothesis
import pytest
from hypothesis import strategies

from jdp.runtime.lifeline import star, star_codec, star_line
from jdp.runtime.lifeline.star_codec import (
    Codec,
    Frame,
    FrameRefused,
    OtherJob,
    OtherKey,
)

KEY = bytes(range(32))
TIMEOUT_S = 20.0


class Member:
    """One member, and what it has heard."""

    def __init__(self, number, count, place, *, key=KEY, is_told=False):
        self.heard, self.lost, self.told = [], [], []
        options = (
            {"listener": place}
            if number == 0
            else {"address": place.getsockname()[:2], "connect_timeout_s": TIMEOUT_S}
        )
        self.star = star.Star(
            number,
            count,
            key=key,
            purpose="test",
            heard=lambda member, body: self.heard.append((member, body)),
            lost=lambda member, has_died: self.lost.append((member, has_died)),
            told=(lambda *message: self.told.append(message)) if is_told else None,
            **options,
        )


@pytest.fixture
def members():
    """Makes the members of a star; they are closed with the test."""
    made = []
    listener = star_line.listen("127.0.0.1", 0)

    def make(number, count, **options):
        made.append(Member(number, count, listener, **options))
        return made[-1]

    yield make
    for member in reversed(made):
        member.star.close()
    listener.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "jdp-star-test" not in names


def wait_until(condition):
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.01)


def make_whole(members, count):
    made = [members(i, count) for i in range(count)]
    for member in made:
        assert member.star.wait_until_whole(timeout_s=TIMEOUT_S)
    return made


def test_all_hear_what_one_says(members):
    made = make_whole(members, 3)
    for i, member in enumerate(made):
        member.star.say(b"%d" % i)
    for i, member in enumerate(made):
        expected = collections.Counter((j, b"%d" % j) for j in range(3) if j != i)
        wait_until(lambda m=member, e=expected: collections.Counter(m.heard) == e)


def test_who_comes_later_hears_what_was_said_before(members):
    first = members(0, 3)
    second = members(1, 3)
    assert second.star.wait_until_whole(timeout_s=TIMEOUT_S)
    first.star.say(b"a")
    second.star.say(b"b")
    wait_until(lambda: first.heard)
    third = members(2, 3)
    wait_until(lambda: len(third.heard) == 2)
    assert sorted(third.heard) == [(0, b"a"), (1, b"b")]


def test_a_line_that_breaks_is_a_loss_and_a_goodbye_is_none(members):
    made = make_whole(members, 4)
    made[3].star.close()
    for sock in list(made[1].star._lines):
        sock.shutdown(socket.SHUT_RDWR)  # As the kernel does for a process that dies.
    for i in (0, 2):
        wait_until(lambda i=i: made[i].lost == [(1, True)])
    made[0].star.close()
    time.sleep(0.1)
    assert made[2].lost == [(1, True)]


def test_a_line_that_is_reset_is_not_the_end_of_a_process(members):
    made = make_whole(members, 3)
    for sock in list(made[1].star._lines):
        # As after a failure of the network.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    for i in (0, 2):
        wait_until(lambda i=i: made[i].lost == [(1, False)])


def test_a_descriptor_raises_an_alarm_once():
    read_fd, write_fd = os.pipe()
    alarms = []
    listener = star_line.listen("127.0.0.1", 0)
    alone = star.Star(
        *(0, 1),
        key=KEY,
        purpose="test",
        listener=listener,
        heard=print,
        lost=print,
        alarm=(read_fd, lambda: alarms.append(1)),
    )
    alone.wake()
    time.sleep(0.1)
    assert not alarms
    os.close(write_fd)
    wait_until(lambda: alarms)
    time.sleep(0.1)
    assert alarms == [1]
    alone.close()
    os.close(read_fd)


def test_when_the_centre_dies_all_others_know(members):
    made = make_whole(members, 3)
    for sock in list(made[0].star._lines):
        sock.shutdown(socket.SHUT_RDWR)
    for i in (1, 2):
        wait_until(lambda i=i: (0, True) in made[i].lost)


def test_who_has_another_key_is_not_heard(members):
    first = members(0, 2)
    stranger = members(1, 2, key=secrets.token_bytes(32))
    stranger.star.say(b"garbage")
    assert not stranger.star.wait_until_whole(timeout_s=1.0)
    assert (first.heard, first.lost) == ([], [])


def test_strangers_keep_no_member_out(members):
    first = members(0, 2)
    place = first.star._listener.getsockname()
    with contextlib.ExitStack() as stack:
        for i in range(star._MAX_GUESTS + 20):
            guest = stack.enter_context(socket.create_connection(place))
            guest.send([b"", b"jdp-star-2\n", b"GET / HTTP/1.1\r\n\r\n"][i % 3])
        second = members(1, 2)
        assert second.star.wait_until_whole(timeout_s=TIMEOUT_S)
        second.star.say(b"here")
        wait_until(lambda: first.heard == [(1, b"here")])


def make_pair(key=KEY, purpose="x"):
    """Both ends of a line that have greeted each other."""
    center, member = Codec(key, purpose, "center"), Codec(key, purpose, "member")
    assert center.feed(member.greet()) == ([], b"")
    assert member.feed(center.greet()) == ([], b"")
    return center, member


def test_frames_arrive_as_they_were_sent_in_any_pieces():
    center, member = make_pair()
    frames = [Frame("say", i, os.urandom(10 * i)) for i in range(20)]
    data = b"".join(map(member.encode, frames))
    found = []
    for i in range(0, len(data), 7):
        found += center.feed(data[i : i + 7])[0]
    assert found == frames


@pytest.mark.parametrize(
    "key,purpose,error", [(bytes(32), "x", OtherKey), (KEY, "y", OtherJob)]
)
def test_both_ends_say_what_differs(key, purpose, error):
    center, member = Codec(KEY, "x", "center"), Codec(key, purpose, "member")
    for one, other in ((center, member), (member, center)):
        with pytest.raises(OtherJob) as found:
            one.feed(other.greet())
        assert type(found.value) is error


def test_frames_before_the_greeting_are_sent_after_it():
    center = Codec(KEY, "x", "center")
    member = Codec(KEY, "x", "member")
    assert member.encode(Frame("hello", 1)) == b""
    assert member.has_held
    _, answer = member.feed(center.greet())
    center.feed(member.greet())
    assert center.feed(answer)[0] == [Frame("hello", 1)]


@pytest.mark.parametrize("change", ["replay", "drop", "reflect", "flip", "session"])
def test_a_changed_stream_is_refused(change):
    center, member = make_pair()
    first, second = (member.encode(Frame("say", 1, b"a")) for _ in range(2))
    if change == "replay":
        data = first + first
    elif change == "drop":
        data = second
    elif change == "reflect":
        data = center.encode(Frame("say", 0, b"a"))
    elif change == "flip":
        data = first[:-1] + bytes([first[-1] ^ 1])
    else:
        data = make_pair()[1].encode(Frame("say", 1, b"a"))
    with pytest.raises(FrameRefused, match="without the key"):
        center.feed(data)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(strategies.binary(max_size=200), strategies.booleans())
def test_garbage_is_refused_and_nothing_else(body, has_key):
    center, member = make_pair()
    if has_key:  # Of a holder of the key, that is.
        center._session = session = bytes(32)
        body = star_codec.job_key.sign(session, "member 0", body)
        body = star_codec._LENGTH.pack(len(body)) + body
    with contextlib.suppress(FrameRefused):
        center.feed(body)
    with contextlib.suppress(FrameRefused):
        Codec(KEY, "x", "center").feed(body)
    del member


@pytest.mark.parametrize("speech", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_what_has_proved_nothing_at_the_address_is_not_member_zero(speech, monkeypatch):
    monkeypatch.setattr(star, "_GUEST_TIMEOUT_S", 0.5)
    heard, lost = [], []
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = stranger.getsockname()
        options = dict(key=KEY, purpose="test")
        second = star.Star(
            *(1, 2),
            address=address,
            heard=print,
            lost=lambda *loss: lost.append(loss),
            **options,
        )
        second.say(b"before all")
        line, _ = stranger.accept()
        if speech is not None:  # Else it holds the line, and says nothing.
            line.sendall(speech)
            line.close()
    first = star.Star(
        *(0, 2),
        listener=star_line.listen(*address),
        heard=lambda *said: heard.append(said),
        lost=print,
        **options,
    )
    assert second.wait_until_whole(timeout_s=TIMEOUT_S)
    wait_until(lambda: heard == [(1, b"before all")])
    assert not lost
    second.close()
    first.close()
    line.close()


def test_a_member_that_is_never_proved_is_lost_at_the_deadline():
    lost = []
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        options = dict(key=KEY, purpose="test", connect_timeout_s=0.5)
        address = stranger.getsockname()
        member = star.Star(
            *(1, 2),
            address=address,
            heard=print,
            lost=lambda *loss: lost.append(loss),
            **options,
        )
        stranger.settimeout(0.1)
        while not lost:
            with contextlib.suppress(TimeoutError):
                stranger.accept()[0].close()
    assert lost == [(0, False)]
    member.close()


def test_what_is_kept_of_a_member_is_bounded_however_often_it_comes_back(members):
    first = members(0, 2)
    for _ in range(4):
        second = members(1, 2)
        assert second.star.wait_until_whole(timeout_s=TIMEOUT_S)
        for _ in range(30):
            second.star.say(b"x")
        second.star.close()
        wait_until(lambda: not first.star._lines)
    assert len(first.star._history) <= star._MAX_SAID + 1


def test_messages_that_are_not_kept_go_to_member_zero_or_from_it_to_all(members):
    made = [members(i, 3, is_told=True) for i in range(3)]
    for member in made:
        assert member.star.wait_until_whole(timeout_s=TIMEOUT_S)
    count = 3 * star._MAX_SAID  # As many as one likes.
    for i in range(count):
        made[1].star.say(b"%d" % i, is_kept=False)
    made[0].star.say(b"to all", is_kept=False)
    wait_until(lambda: len(made[0].told) == count)
    assert made[0].told == [(1, b"%d" % i) for i in range(count)]
    for member in made[1:]:
        wait_until(lambda m=member: m.told)
        assert member.told == [(0, b"to all")]
    assert made[0].star._history == []
    assert not any(member.heard or member.lost for member in made)


def test_where_nothing_may_be_told_the_line_of_the_teller_is_closed(members):
    first, second = make_whole(members, 2)
    second.star.say(b"x", is_kept=False)
    wait_until(lambda: first.lost)
    assert first.lost == [(1, False)]
