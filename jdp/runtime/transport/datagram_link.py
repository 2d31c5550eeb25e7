"""Datagram link: how do small messages between processes on one host get faster?

A message over ZeroMQ passes two more threads, each of which has to be woken. A datagram
between two Unix sockets passes none: a round trip takes a third of the time. Messages
are numbered and delivered in the order they were sent, whichever way they came. A
message that does not fit, or finds the other queue full, is sent over ZeroMQ, which
also reports lost processes.
"""

import re
import secrets
import socket
import struct
import time
import weakref

import msgspec

from jdp.replicas import wire
from jdp.runtime.transport import transport
from jdp.runtime.transport.transport import Event, Lost, Received
from jdp.runtime.transport.zmq_link import ZmqLink

_MOST_BYTES = 32 << 10  # of a datagram.
_MOST_AT_ONCE = 4096  # datagrams per wait, so that it returns.
_NUMBER = struct.Struct("<I")
_MOST_EARLY = 1 << 14  # messages that wait for an earlier one.
_OFFER = 0xFFFFFFFF  # in place of a number: the message is an offer.
_TOKEN_BYTES = 16


class _LaneOffer(msgspec.Struct, frozen=True):
    address: bytes
    token: bytes  # the first bytes of every datagram to this peer.


_ADDRESS = re.compile(rb"\0jdp-[0-9a-f]{32}")


def _decode_offer(payload: bytes) -> _LaneOffer:
    offer = wire.decode(payload, _LaneOffer, what="The offer of a lane")
    if not _ADDRESS.fullmatch(offer.address) or len(offer.token) != _TOKEN_BYTES:
        raise wire.Malformed("The offer of a lane has no address of a lane.")
    return offer


class LaneLink:
    """A link that also has a socket for datagrams; see `Link`."""

    def __init__(
        self,
        link: ZmqLink,
        rank: int,
        num_processes: int,
        *,
        gap_timeout_s: float = 30.0,
    ):
        """Adds a lane to `link`; all processes do so, and are on one host.

        A message that is missing for `gap_timeout_s` seconds, though later messages of
        its process came, ends the link to that process.
        """
        self._link = link
        self._peers = [0] if rank else list(range(1, num_processes))
        self._address = b"\0jdp-" + secrets.token_hex(16).encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self._address)
        self._end = weakref.finalize(self, self._socket.close)
        self._end.atexit = (
            False  # Links are closed at exit, and must be awake until then.
        )
        self._buffer = bytearray(_TOKEN_BYTES + _NUMBER.size + _MOST_BYTES)
        self._offers: dict[int, _LaneOffer] = {}  # by peer.
        self._tokens = {secrets.token_bytes(_TOKEN_BYTES): p for p in self._peers}
        self._sent = dict.fromkeys(self._peers, 0)
        self._due = dict.fromkeys(self._peers, 0)  # number of the next message.
        self._early: dict[int, dict[int, bytes]] = {p: {} for p in self._peers}
        self._gap_timeout_s = gap_timeout_s
        self._gaps: dict[int, float] = {}  # by peer: since when a message is missing.
        link.watch(self._socket.fileno(), self._receive)
        for token, peer in self._tokens.items():
            offer = msgspec.msgpack.encode(_LaneOffer(self._address, token))
            self._send_around(peer, _NUMBER.pack(_OFFER) + offer)

    def send(self, peer: int, payload: bytes) -> None:
        """See `Link`."""
        self._link.check(peer, payload)
        number = self._sent[peer]
        message = _NUMBER.pack(number) + payload
        offer = self._offers.get(peer)
        if offer is None or len(payload) > _MOST_BYTES:
            self._send_around(peer, message)
        else:
            try:
                self._socket.sendto(offer.token + message, offer.address)
            except OSError:  # Its queue is full, or it is gone.
                self._send_around(peer, message)
        self._sent[peer] = (number + 1) % _OFFER

    def _send_around(self, peer: int, message: bytes) -> None:
        self._link.send_frame(peer, transport.encode(transport.DATA, message))

    def wait(self, timeout_s: float | None) -> list[Event]:
        """See `Link`."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            wait_s = self._until_gap(timeout_s)
            came = self._link.wait(wait_s)
            # Messages on the lane come before the loss of their process.
            lost = [event for event in came if isinstance(event, Lost)]
            messages = [event for event in came if isinstance(event, Received)]
            if lost:
                self._receive(messages)
            events: list[Event] = []
            for message in messages:
                self._take(message, events)
            for event in lost:
                self._offers.pop(event.peer, None)
                self._early[event.peer].clear()
                self._gaps.pop(event.peer, None)
                events.append(event)
            self._check_gaps(events)
            is_over = not came and wait_s == timeout_s
            if events or self._link.is_woken or is_over:
                return events
            # No event can be delivered yet; the wait continues.
            if deadline_s is not None:
                timeout_s = max(0.0, deadline_s - time.monotonic())

    def _until_gap(self, timeout_s: float | None) -> float | None:
        """Returns `timeout_s`, or the time until the oldest gap is too old."""
        if not self._gaps:
            return timeout_s
        left_s = min(self._gaps.values()) + self._gap_timeout_s - time.monotonic()
        left_s = max(0.0, left_s)
        return left_s if timeout_s is None else min(left_s, timeout_s)

    def _check_gaps(self, events: list[Event]) -> None:
        now_s = time.monotonic()
        for peer, since_s in list(self._gaps.items()):
            if now_s - since_s >= self._gap_timeout_s:
                self._lose_gap(peer, events)

    def _lose_gap(self, peer: int, events: list[Event]) -> None:
        missing, count = self._due[peer], len(self._early[peer])
        why = (
            f"process {peer} never sent message {missing} of the lane, but {count} "
            "after it"
        )
        self._gaps.pop(peer, None)
        self._early[peer].clear()
        self._offers.pop(peer, None)
        self._link.lose(peer, why, events)

    def wake(self) -> None:
        """See `Link`."""
        self._link.wake()

    def close(self) -> None:
        """See `Link`."""
        self._link.close()
        self._end()

    def _receive(self, events: "list[Received] | list[Event]") -> None:
        """Receives all datagrams; drops datagrams with a wrong token."""
        for _ in range(_MOST_AT_ONCE):
            try:
                size = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                break
            datagram = memoryview(self._buffer)[:size]
            peer = self._tokens.get(bytes(datagram[:_TOKEN_BYTES]))
            if peer is not None:
                events.append(Received(peer, bytes(datagram[_TOKEN_BYTES:])))

    def _take(self, event: Received, events: list[Event]) -> None:
        """Delivers a message once all earlier ones are delivered."""
        peer, message = event
        try:
            (number,) = _NUMBER.unpack_from(message)
            payload = message[_NUMBER.size :]
            if number == _OFFER:
                self._offers[peer] = _decode_offer(payload)
                return
        except (struct.error, wire.Malformed):
            why = f"process {peer} sent what is not a numbered message"
            self._link.lose(peer, why, events)
            return
        if number != self._due[peer]:
            self._early[peer][number] = payload
            self._gaps.setdefault(peer, time.monotonic())
            if len(self._early[peer]) > _MOST_EARLY:
                self._lose_gap(peer, events)
            return
        events.append(Received(peer, payload))
        self._due[peer] = (number + 1) % _OFFER
        self._gaps.pop(peer, None)
        early = self._early[peer]
        while self._due[peer] in early:
            events.append(Received(peer, early.pop(self._due[peer])))
            self._due[peer] = (self._due[peer] + 1) % _OFFER
        if early:  # The next message is missing.
            self._gaps[peer] = time.monotonic()
