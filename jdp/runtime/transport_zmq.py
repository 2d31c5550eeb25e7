"""Transport over ZeroMQ: the sockets behind a link.

The hub has a ROUTER, each spoke a DEALER. CURVE encrypts, and proves who is who: public
keys are exchanged through the store, the hub admits each of them once, and nobody else.
There is no reconnecting, so that a message is either delivered or its sender is lost.

Events of the sockets come over file descriptors that are edge-triggered: one says once
that something has changed, and any call on its socket may swallow that. So a wait first
takes what a socket has, and only then sleeps.
"""

import contextlib
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

import zmq

from jdp.runtime import transport
from jdp.runtime.transport import Event, LinkOptions, Lost, Received

_LINGER_MS = 1000
# As good as never. With -1, which means never, libzmq forgets at the end of a
# connection what it had brought and nobody had read. libzmq may double it, in an int.
_NEVER_MS = 1_000_000_000
_BACKLOG = 4096  # all spokes connect at once.
_OVERHEAD_BYTES = 256  # of CURVE and ZMTP around a frame; they need 33.
_MOST_AT_ONCE = 4096  # messages that one wait takes, lest it never returns.
_LOG_PERIOD_S = 5.0
_PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_MONITOR_ENDPOINT = "inproc://monitor"
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_READABLE = (zmq.POLLIN, zmq.POLLIN | zmq.POLLOUT)
_logger = logging.getLogger("jdp")


class ZmqLink:
    """A link over sockets; see `jdp.runtime.transport.Link`."""

    def __init__(
        self,
        rank: int,
        num_processes: int,
        options: LinkOptions,
        *,
        admitted: dict[bytes, int] | None = None,
    ):
        """Makes the sockets; use `open_link`.

        Args:
          rank: index of this process.
          num_processes: of the job.
          options: limits.
          admitted: at the hub, the process that has each public key, 32 bytes.
        """
        self._rank = rank
        self._lost: set[int] = set()
        self._num_processes = num_processes
        self._options = options
        self._keys_left = dict(admitted or {})
        self._routes: dict[int, bytes] = {}  # at the hub, by spoke.
        self._lines: dict[int, tuple[int, _Line]] = {}  # by descriptor in libzmq.
        self._refusals = _Refusals()
        self._is_closed = False
        self.is_woken = False  # whether the last wait was.
        self._wake_lock = threading.Lock()  # a wake must not meet a closed pipe.
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._context = zmq.Context()
        is_hub = rank == 0
        self._socket = self._context.socket(zmq.ROUTER if is_hub else zmq.DEALER)
        _set_options(self._socket, options, is_hub=is_hub)
        self._zap = self._context.socket(zmq.REP) if is_hub else None
        if self._zap is not None:
            self._zap.bind(_ZAP_ENDPOINT)
        self._monitor = _open_monitor(self._context, self._socket)
        # What to call when a descriptor has something; the socket itself comes last.
        self._poll = select.poll()
        self._calls: dict[int, Callable[[list[Event]], None]] = {
            self._wake_out: self._clear_wake,
            _descriptor(self._monitor): self._observe,
        }
        if self._zap is not None:
            self._calls[_descriptor(self._zap)] = self._answer_zap
        for fd in (_descriptor(self._socket), *self._calls):
            self._poll.register(fd, select.POLLIN)

    def watch(self, fd: int, receive: Callable[[list[Event]], None]) -> None:
        """Lets waits also call `receive(events)` when a descriptor can be read."""
        self._calls[fd] = receive
        self._poll.register(fd, select.POLLIN)

    def listen(self, endpoint: str, secret_key: bytes) -> str:
        """Begins to admit spokes, at the hub; returns the endpoint, with its port."""
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, b"jdp")
        self._socket.bind(endpoint)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(
        self, endpoint: str, hub_key: bytes, public_key: bytes, secret_key: bytes
    ) -> None:
        """Begins to connect a spoke to the hub."""
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, hub_key)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        self._socket.connect(endpoint)
        self._socket.send(transport.encode(transport.HELLO), zmq.DONTWAIT)

    def find_missing(self) -> list[int]:
        """Returns the spokes that have not said hello to this hub."""
        return [i for i in range(1, self._num_processes) if i not in self._routes]

    def send(self, peer: int, payload: bytes) -> None:
        """See `jdp.runtime.transport.Link`."""
        self._check_open()
        transport.check_route(self._rank, peer, self._num_processes)
        transport.check_size(payload, self._options)
        self._send_frame(peer, transport.encode(transport.DATA, payload))

    def wait(self, timeout_s: float | None) -> list[Event]:
        """See `jdp.runtime.transport.Link`."""
        self._check_open()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        events: list[Event] = []
        self.is_woken = False
        self._receive(events)
        # A wake and the monitor have their turn even when messages never end.
        ready = self._poll.poll(0 if events else _left_ms(deadline_s))
        while ready:
            for fd, _ in ready:
                if fd in self._calls:
                    self._calls[fd](events)
            self._receive(events)
            if events or self.is_woken:
                break
            ready = self._poll.poll(_left_ms(deadline_s))
        return events

    def wake(self) -> None:
        """See `jdp.runtime.transport.Link`."""
        with self._wake_lock:
            if not self._is_closed:
                with contextlib.suppress(BlockingIOError):  # full: it is awake.
                    os.write(self._wake_in, b"\0")

    def close(self) -> None:
        """See `jdp.runtime.transport.Link`."""
        if self._is_closed:
            return
        self._observe([])  # To whom there is no way, nothing can linger.
        goodbye = transport.encode(transport.GOODBYE)
        for peer in list(self._routes) if self._rank == 0 else [0]:
            self._send_frame(peer, goodbye)
        with self._wake_lock:
            self._is_closed = True
            os.close(self._wake_in)
            os.close(self._wake_out)
        # Not `unbind`, which drops what has not left yet.
        self._socket.disable_monitor()
        self._monitor.close(0)
        for _, line in self._lines.values():
            line.close()
        self._socket.close(0 if 0 in self._lost else _LINGER_MS)
        if self._zap is not None:
            self._zap.close(0)
        self._context.term()

    def _send_frame(self, peer: int, frame: bytes) -> None:
        if peer in self._lost:
            return
        try:
            if self._rank == 0:
                self._socket.send(self._routes[peer], zmq.SNDMORE | zmq.DONTWAIT)
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            # It went a moment ago, and the monitor is about to say so.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def _receive(self, events: list[Event]) -> bool:
        """Takes what the socket has; returns whether there may be more."""
        for _ in range(_MOST_AT_ONCE):
            if not _has_message(self._socket):
                return False
            route = self._socket.recv(zmq.DONTWAIT) if self._rank == 0 else b""
            frame = self._socket.recv(zmq.DONTWAIT, copy=False)
            num_frames, last = 1, frame
            while last.more:
                last = self._socket.recv(zmq.DONTWAIT, copy=False)
                num_frames += 1
            self._take(route, frame, num_frames, events)
        return True

    def _take(
        self, route: bytes, frame: zmq.Frame, num_frames: int, events: list[Event]
    ) -> None:
        # Who has sent it is who proved to have the key, whatever else it says.
        peer = int(frame.get("User-Id")) if self._rank == 0 else 0
        if peer in self._lost:
            return
        is_first = self._rank == 0 and peer not in self._routes
        if is_first:
            self._routes[peer] = route
            self._hold(frame.get(zmq.SRCFD), peer)
        try:
            if num_frames > 1:
                raise transport.FrameError(f"sent {num_frames} frames at once")
            kind, payload = transport.decode(frame.buffer)
            if (kind == transport.HELLO) != is_first:
                raise transport.FrameError("did not say hello first, and only then")
        except transport.FrameError as error:
            self._lose(peer, f"process {peer} {error}", events)
            return
        if kind == transport.DATA:
            events.append(Received(peer, payload))
        elif kind == transport.HELLO:
            self.wake()  # for who asks `find_missing`.
        elif kind == transport.GOODBYE:
            self._lose(peer, transport.describe_closed(peer), events)

    def _hold(self, fd: int, peer: int) -> None:
        self._lines[fd] = (peer, _Line(fd))

    def _lose(self, peer: int, why: str, events: list[Event]) -> None:
        if peer in self._lost:
            return
        self._lost.add(peer)
        events.append(Lost(peer, why))
        for fd, (holder, line) in list(self._lines.items()):
            if holder == peer:
                line.hang_up()
                del self._lines[fd]

    def _clear_wake(self, events: list[Event]) -> None:
        os.read(self._wake_out, 1 << 16)
        self.is_woken = True

    def _observe(self, events: list[Event]) -> None:
        """Takes what the monitor says of connections."""
        changes = []
        while _has_message(self._monitor):
            head, _ = self._monitor.recv_multipart(zmq.DONTWAIT)
            changes.append(struct.unpack("=hi", head))
        # What a process had sent before its end has come before these news.
        while self._receive(events):
            pass
        for event, value in changes:
            if self._rank == 0:
                self._observe_spoke(event, value, events)
            else:
                self._observe_hub(event, value, events)

    def _observe_spoke(self, event: int, fd: int, events: list[Event]) -> None:
        if event == zmq.EVENT_DISCONNECTED and fd in self._lines:
            peer, line = self._lines[fd]
            self._lose(peer, line.explain_end(peer, self._options), events)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._refusals.note("it speaks another protocol")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._refusals.note("it did not complete the handshake")

    def _observe_hub(self, event: int, fd: int, events: list[Event]) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._hold(fd, 0)
        elif event == zmq.EVENT_DISCONNECTED and fd in self._lines:
            _, line = self._lines[fd]
            self._lose(0, line.explain_end(0, self._options), events)
        else:
            self._lose(0, "process 0 cannot be reached, or refused this one", events)

    def _answer_zap(self, events: list[Event]) -> None:
        """Says who may connect, by the rules of ZeroMQ RFC 27."""
        assert self._zap is not None
        while _has_message(self._zap):
            request = self._zap.recv_multipart(zmq.DONTWAIT)
            _, request_id, _, address, _, mechanism, *credentials = request
            # A key opens one connection: who is lost stays lost.
            peer = None
            if mechanism == b"CURVE":
                peer = self._keys_left.pop(credentials[0], None)
            if peer is None:
                who = address.decode(errors="replace")
                self._refusals.note(f"its key is not of this job, or in use ({who})")
                answer = (b"400", b"refused", b"", b"")
            else:
                answer = (b"200", b"", b"%d" % peer, b"")
            self._zap.send_multipart((b"1.0", request_id, *answer))

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(transport.CLOSED)


class _Line:
    """A second handle on a connection: to hang up, and to see how it has ended.

    libzmq says that a connection is gone, but not why, and cannot drop one peer.
    """

    def __init__(self, fd: int):
        self._socket: socket.socket | None = None
        try:
            copy = os.dup(fd)
        except OSError:  # It has gone already.
            return
        try:
            self._socket = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)

    def explain_end(self, peer: int, options: LinkOptions) -> str:
        """Says why libzmq has let go of the connection."""
        try:
            left = self._socket.recv(1, _PEEK) if self._socket else b""
        except BlockingIOError:  # It has not ended: libzmq gave up.
            return transport.describe_silent(peer, options)
        except OSError:
            left = b""
        if left:  # Nor has libzmq read it all.
            return (
                f"process {peer} sent what is not of this protocol, or is longer than "
                f"`max_message_bytes`, {options.max_message_bytes:,}"
            )
        return transport.describe_ended(peer)

    def hang_up(self) -> None:
        """Ends the connection, whoever else holds it."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Lets go of this handle."""
        if self._socket is not None:
            self._socket.close()


class _Refusals:
    """Strangers that were dropped, and a log of them that they cannot flood."""

    def __init__(self) -> None:
        self._num_dropped = 0
        self._quiet_until_s = -1.0

    def note(self, reason: str) -> None:
        """Counts one, and logs it unless another was logged a moment ago."""
        self._num_dropped += 1
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            return
        _logger.warning(
            "Connections dropped that are not of this job: %d; of the last one, %s.",
            self._num_dropped,
            reason,
        )
        self._num_dropped = 0
        self._quiet_until_s = now_s + _LOG_PERIOD_S


def _set_options(zmq_socket: zmq.Socket, options: LinkOptions, *, is_hub: bool) -> None:
    # A process that stops answers neither this ping, sent at most `ping_ms` after it
    # stopped, nor any within the rest of the time.
    timeout_ms = math.ceil(1000 * options.heartbeat_timeout_s)
    ping_ms = math.ceil(timeout_ms / 3)
    values = {
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.LINGER: _LINGER_MS,
        zmq.MAXMSGSIZE: options.max_message_bytes + _OVERHEAD_BYTES,
        zmq.HEARTBEAT_IVL: ping_ms,
        zmq.HEARTBEAT_TIMEOUT: timeout_ms - ping_ms,
        zmq.IPV6: 1,
    }
    if is_hub:
        values |= {zmq.ROUTER_MANDATORY: 1, zmq.BACKLOG: _BACKLOG}
    else:
        values |= {zmq.RECONNECT_IVL: _NEVER_MS}
    for name, value in values.items():
        zmq_socket.setsockopt(name, value)


def _open_monitor(context: zmq.Context, zmq_socket: zmq.Socket) -> zmq.Socket:
    events = zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
    if zmq_socket.getsockopt(zmq.TYPE) == zmq.DEALER:
        events |= zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED
    zmq_socket.monitor(_MONITOR_ENDPOINT, events)
    monitor = context.socket(zmq.PAIR)
    # Without a limit: where it is reached, libzmq's thread waits, and so do the
    # messages and heartbeats of all.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(_MONITOR_ENDPOINT)
    # libzmq signals only who has looked, and found nothing.
    assert not _has_message(monitor)
    return monitor


def _descriptor(zmq_socket: zmq.Socket) -> int:
    fd = zmq_socket.getsockopt(zmq.FD)
    assert isinstance(fd, int)
    return fd


def _has_message(zmq_socket: zmq.Socket) -> bool:
    return zmq_socket.getsockopt(zmq.EVENTS) in _READABLE


def _left_ms(deadline_s: float | None) -> int | None:
    if deadline_s is None:
        return None
    return max(0, math.ceil(1000 * (deadline_s - time.monotonic())))
