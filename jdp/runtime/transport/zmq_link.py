"""ZeroMQ link: how does a link deliver messages and detect losses over sockets?

The hub has a ROUTER, each spoke a DEALER. CURVE encrypts and proves identities: public
keys are exchanged through the store, and the hub admits each of them once. A lost
connection is not opened again, so a message is either delivered or its sender is lost.

A second pair of sockets, the pulse, carries heartbeats only. libzmq sends none while a
connection is full, so it would not notice a process that has stopped reading. And
while a long message is sent, it would take a healthy process for lost.

Events of the sockets come over edge-triggered file descriptors: a change is signaled
once, and any call on the socket may swallow the signal. So a wait first empties the
sockets, and only then sleeps.
"""

import contextlib
import functools
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable

import zmq

from jdp.runtime import descriptors
from jdp.runtime.transport import transport, zmq_security, zmq_sockets
from jdp.runtime.transport.transport import Event, LinkOptions, Lost, Received
from jdp.runtime.transport.zmq_sockets import has_message

_MOST_AT_ONCE = 4096  # messages per wait, so that it returns.
_MORE = int(zmq.SNDMORE | zmq.DONTWAIT)  # computed once: `|` takes a microsecond.
_DATA, _PULSE = b"data", b"pulse"  # ZAP domains, one per socket.
_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_HUB_EVENTS = _EVENTS | zmq.EVENT_ACCEPTED
_SPOKE_EVENTS = (
    _EVENTS | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED
)


class ZmqLink:
    """A link over sockets; see `jdp.runtime.transport.transport.Link`."""

    def __init__(
        self,
        rank: int,
        num_processes: int,
        options: LinkOptions,
        *,
        admitted: dict[bytes, int] | None = None,
    ):
        """Makes the sockets; use `jdp.runtime.transport.transport.open_link`.

        Args:
          rank: index of this process.
          num_processes: number of processes of the job.
          options: limits.
          admitted: at the hub, the process of each public key, 32 bytes.
        """
        self._rank = rank
        self._num_processes = num_processes
        self._options = options
        self._lost: set[int] = set()
        # By socket, public keys that have not opened a connection yet.
        self._keys_left = {k: dict(admitted or {}) for k in (_DATA, _PULSE)}
        self._routes: dict[int, bytes] = {}  # at the hub, by spoke.
        self._pulses: set[int] = set()  # at the hub, spokes with a connected pulse.
        # By descriptor in libzmq.
        self._lines: dict[int, tuple[int, zmq_sockets.ConnectionHandle]] = {}
        self._endpoints = ("", "")
        self._refusals = zmq_sockets.Refusals()
        most = descriptors.most_guests(2 * num_processes)
        self._guests = zmq_sockets.Guests(most)
        self._ahead: list[Event] = []  # events from before the first wait.
        self._is_closed = False
        self.is_woken = False  # whether a wake ended the last wait.
        # So that a wake never writes to a closed pipe; signal handlers wake, too.
        self._wake_lock = threading.RLock()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._make_sockets()

    def _make_sockets(self) -> None:
        context = zmq.Context()
        is_hub = self._rank == 0
        make, options = zmq_sockets.make_socket, self._options
        self._socket = make(context, options, is_hub=is_hub, is_pulse=False)
        self._pulse = make(context, options, is_hub=is_hub, is_pulse=True)
        self._admission = zmq_security.ZapAdmission(
            # Without a reference to this link, which would be a cycle.
            context,
            admit=functools.partial(_admit, self._keys_left),
            refused=functools.partial(_note_refused, self._refusals),
        )
        events = _HUB_EVENTS if is_hub else _SPOKE_EVENTS
        sockets = [self._socket, self._pulse]
        monitors = [zmq_sockets.open_monitor(s, events) for s in sockets]
        self._monitor, self._pulse_monitor = monitors
        # Callbacks of readable descriptors. The sockets for messages are read anyway.
        find = zmq_sockets.get_descriptor
        self._calls: dict[int, Callable[[ZmqLink, list[Event]], None]] = {
            self._wake_out: ZmqLink._clear_wake,
            find(self._admission.socket): lambda link, _: link._admission.answer(),
            find(self._pulse): ZmqLink._take_pulses,
            find(self._monitor): ZmqLink._observe,
            find(self._pulse_monitor): ZmqLink._observe_pulse,
        }
        self._poll = select.poll()
        for fd in (find(self._socket), *self._calls):
            self._poll.register(fd, select.POLLIN)
        # A context that Python collects before its sockets would wait for ever.
        self._end = weakref.finalize(
            self,
            zmq_sockets.end,
            context,
            sockets,
            [*monitors, self._admission.socket],
            self._lines,
            (self._wake_in, self._wake_out),
        )
        self._end.atexit = False

    def watch(self, fd: int, receive: Callable[[list[Event]], None]) -> None:
        """Makes waits call `receive(events)` when a descriptor is readable."""
        self._calls[fd] = lambda _, events: receive(events)
        self._poll.register(fd, select.POLLIN)

    def listen(self, endpoint: str, secret_key: bytes) -> tuple[str, str]:
        """Starts to admit spokes, at the hub.

        Returns:
          The endpoints with their ports: for messages, and for the pulse.
        """
        for hub, domain in ((self._socket, _DATA), (self._pulse, _PULSE)):
            zmq_security.secure_listener(hub, secret_key, domain=domain)
        self._socket.bind(endpoint)
        is_tcp = endpoint.startswith("tcp://")
        self._pulse.bind(endpoint if is_tcp else f"{endpoint}-pulse")
        # A descriptor signals only after a read that found nothing.
        self._take_pulses([])
        self._endpoints = (
            self._socket.getsockopt_string(zmq.LAST_ENDPOINT),
            self._pulse.getsockopt_string(zmq.LAST_ENDPOINT),
        )
        return self._endpoints

    def connect(
        self, endpoints: tuple[str, str], hub_key: bytes, keys: tuple[bytes, bytes]
    ) -> None:
        """Starts to connect a spoke with the CURVE keys `keys` to the hub."""
        self._endpoints = endpoints
        spokes = self._socket, self._pulse
        for spoke, endpoint in zip(spokes, endpoints, strict=True):
            zmq_security.secure_client(spoke, hub_key, keys)
            spoke.connect(endpoint)
            spoke.send(transport.encode(transport.HELLO), zmq.DONTWAIT)

    def hold_connections(self) -> None:
        """Opens handles on the connections of a spoke, while they surely exist."""
        self._observe(self._ahead)
        self._observe_pulse(self._ahead)

    def find_missing(self) -> list[int]:
        """Returns the spokes that have not sent a hello on both sockets."""
        here = self._pulses.intersection(self._routes)
        return [i for i in range(1, self._num_processes) if i not in here]

    def send(self, peer: int, payload: bytes) -> None:
        """See `jdp.runtime.transport.transport.Link`."""
        self.check(peer, payload)
        self.send_frame(peer, transport.encode(transport.DATA, payload))

    def check(self, peer: int, payload: bytes) -> None:
        """Raises if `payload` cannot be sent to `peer`; see `send`."""
        self._check_open()
        transport.check_route(self._rank, peer, self._num_processes)
        transport.check_size(payload, self._options)

    def wait(self, timeout_s: float | None) -> list[Event]:
        """See `jdp.runtime.transport.transport.Link`."""
        self._check_open()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        events, self._ahead = self._ahead, []
        self.is_woken = False
        self._receive(events)
        # A wake and the monitor are served even if messages never end.
        ready = self._poll.poll(0 if events else _left_ms(deadline_s))
        while ready:
            is_announced = False
            for fd, _ in ready:
                if fd in self._calls:
                    self._calls[fd](self, events)
                else:
                    is_announced = True
            self._receive(events, is_announced=is_announced)
            if events or self.is_woken:
                break
            ready = self._poll.poll(_left_ms(deadline_s))
        return events

    def wake(self) -> None:
        """See `jdp.runtime.transport.transport.Link`."""
        with self._wake_lock:
            if not self._is_closed:
                with contextlib.suppress(BlockingIOError):  # full: it is awake already.
                    os.write(self._wake_in, b"\0")

    def close(self) -> None:
        """See `jdp.runtime.transport.transport.Link`."""
        if self._is_closed:
            return
        self._observe([])  # Without a connection, no message can linger.
        goodbye = transport.encode(transport.GOODBYE)
        for peer in list(self._routes) if self._rank == 0 else [0]:
            self.send_frame(peer, goodbye)
        if 0 in self._lost:
            self._socket.setsockopt(zmq.LINGER, 0)
        with self._wake_lock:
            self._is_closed = True
        self._end()

    def send_frame(self, peer: int, frame: bytes) -> None:
        """Sends a frame of `transport.encode`; drops it if `peer` is lost."""
        if peer in self._lost:
            return
        try:
            if self._rank == 0:
                self._socket.send(self._routes[peer], _MORE)
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            # It has just left, and the monitor is about to report it.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def _receive(self, events: list[Event], *, is_announced: bool = False) -> bool:
        """Receives messages from the socket; returns whether there may be more.

        Polling takes as long as receiving, so an announced message is received without
        polling first.
        """
        source, is_hub = self._socket, self._rank == 0
        for _ in range(_MOST_AT_ONCE):
            if not is_announced and not has_message(source):
                return False
            is_announced = False
            try:
                route = source.recv(zmq.DONTWAIT) if is_hub else b""
                frame, num_frames = zmq_sockets.receive_frame(source)
            except zmq.Again:
                return False
            self._take(route, frame, num_frames, events)
        return True

    def _take(
        self, route: bytes, frame: zmq.Frame, num_frames: int, events: list[Event]
    ) -> None:
        # The sender is the process that has proved the key.
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
            self.lose(peer, f"process {peer} {error}", events)
            return
        if kind == transport.DATA:
            events.append(Received(peer, payload))
        elif kind == transport.HELLO:
            self.wake()  # for callers of `find_missing`.
        elif kind == transport.GOODBYE:
            self.lose(peer, transport.describe_closed(peer), events)

    def _hold(self, fd: int, peer: int) -> None:
        self._guests.remove(fd)
        self._lines[fd] = (peer, zmq_sockets.ConnectionHandle(fd, self._endpoints))

    def lose(self, peer: int, why: str, events: list[Event]) -> None:
        """Closes the connection to a process, and adds its loss to `events`."""
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
        """Handles the monitor's events of the connections for messages."""
        changes = zmq_sockets.read_changes(self._monitor)
        # A process's last messages arrived before these events.
        while self._receive(events):
            pass
        for event, fd in changes:
            if event == zmq.EVENT_CONNECTED:
                self._hold(fd, 0)
            elif event == zmq.EVENT_DISCONNECTED and fd in self._lines:
                peer, line = self._lines[fd]
                why = (
                    transport.describe_ended(peer)
                    if line.has_ended()
                    else transport.describe_refused(peer, self._options)
                )
                self.lose(peer, why, events)
            elif self._rank == 0:
                self._note_guest(event, fd)
            else:
                why = "process 0 cannot be reached, or refused this process"
                self.lose(0, why, events)

    def _observe_pulse(self, events: list[Event]) -> None:
        """Handles the monitor's events of the connections for heartbeats."""
        changes = zmq_sockets.read_changes(self._pulse_monitor)
        while self._receive(events):
            pass
        for event, fd in changes:
            if event == zmq.EVENT_CONNECTED:
                self._hold(fd, 0)
            elif event == zmq.EVENT_DISCONNECTED and fd in self._lines:
                peer, line = self._lines.pop(fd)
                # If the process has ended, the other connection reports it, after the
                # last messages.
                if not line.has_ended():
                    why = transport.describe_silent(peer, self._options)
                    self.lose(peer, why, events)
                line.hang_up()
            elif self._rank == 0:
                self._note_guest(event, fd)

    def _take_pulses(self, events: list[Event]) -> None:
        """Receives the hellos of spokes that have connected their pulse."""
        while has_message(self._pulse):
            if self._rank == 0:
                self._pulse.recv(zmq.DONTWAIT)  # the route; it is not needed.
            frame, num_frames = zmq_sockets.receive_frame(self._pulse)
            peer = int(frame.get("User-Id")) if self._rank == 0 else 0
            hello = transport.encode(transport.HELLO)
            is_first = self._rank == 0 and peer not in self._pulses
            if is_first and num_frames == 1 and frame.bytes == hello:
                if peer not in self._lost:
                    self._hold(frame.get(zmq.SRCFD), peer)
                self._pulses.add(peer)
                self.wake()  # for callers of `find_missing`.
            else:
                why = f"process {peer} sent a message in place of heartbeats"
                self.lose(peer, why, events)

    def _note_guest(self, event: int, fd: int) -> None:
        """Tracks a connection that is not authenticated yet."""
        if event == zmq.EVENT_ACCEPTED:
            if fd not in self._lines:  # Its hello may have arrived before this event.
                self._guests.add(fd, self._endpoints)
        elif event == zmq.EVENT_DISCONNECTED:
            self._guests.remove(fd)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._refusals.note("it speaks another protocol")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._refusals.note("it did not complete the handshake")

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(transport.CLOSED)


def _admit(
    keys_left: dict[bytes, dict[bytes, int]], domain: bytes, key: bytes
) -> bytes | None:
    # A key opens a socket once: a process that is lost stays lost.
    peer = keys_left[domain].pop(key, None)
    return None if peer is None else b"%d" % peer


def _note_refused(refusals: zmq_sockets.Refusals, address: str) -> None:
    refusals.note(f"its key is not of this job, or in use ({address})")


def _left_ms(deadline_s: float | None) -> int | None:
    if deadline_s is None:
        return None
    return max(0, math.ceil(1000 * (deadline_s - time.monotonic())))
