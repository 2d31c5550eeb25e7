"""Sockets: how do many workers and many servers exchange messages?

A server has a ROUTER. A worker has one DEALER per server; a server has a DEALER for
server 0. CURVE encrypts; only holders of the key file may connect. A broken connection
is opened again automatically. Pending messages are lost, and the protocol repeats them.
"""

import os
import socket as stream
import time
from collections.abc import Sequence
from typing import NamedTuple

import zmq
from zmq.utils import z85

from jdp.parameter_server import messages
from jdp.parameter_server.keys import Keys
from jdp.runtime import descriptors
from jdp.runtime.transport import zmq_security, zmq_sockets

_MONITORED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_BACKLOG = 4096  # all workers may connect at once.
_LINGER_MS = 500
_RECONNECT_MS = 50
_MOST_RECONNECT_MS = 1000
_SMALLEST_LIMIT = 4 << 20  # bytes of a frame; headers describe all parameters.
_MOST_FRAMES = 3  # a route, a header, arrays.
_MOST_AT_ONCE = 256
_MOST_QUEUED = 1000  # messages per peer; the protocol repeats dropped ones.
_REFUSE_S = 1.0
_PROBE_S = 0.5
_WORKER, _SERVER = "worker", "server"  # user ids of ZAP, by key.


class Message(NamedTuple):
    """A received message."""

    source: bytes | int  # the route to a worker, or the index of a server.
    header: memoryview
    payload: memoryview | None
    is_server: bool = False  # whether the sender has proved to be a server.


class ServerSocket:
    """The listening socket of a server."""

    def __init__(self, address: str, keys: Keys, *, most_bytes: int):
        """Starts to listen.

        Args:
          address: "host:port".
          keys: keys of the job.
          most_bytes: the longest payload; a peer that sends more is cut off.

        Raises:
          RuntimeError: the address is taken, or belongs to another host.
        """
        self._context = zmq.Context()
        self._refusals = zmq_sockets.Refusals()
        admitted = {
            z85.decode(keys.worker_public): _WORKER.encode(),
            z85.decode(keys.server_public): _SERVER.encode(),
        }
        self._admission = zmq_security.ZapAdmission(
            self._context,
            admit=lambda domain, key: admitted.get(key),
            refused=self._note_refused,
        )
        self._socket = self._context.socket(zmq.ROUTER)
        for name, value in {
            zmq.LINGER: _LINGER_MS,
            # Per peer: a peer that floods, or does not read, cannot fill the memory.
            zmq.SNDHWM: _MOST_QUEUED,
            zmq.RCVHWM: _MOST_QUEUED,
            zmq.IPV6: 1,
            zmq.BACKLOG: _BACKLOG,
            zmq.MAXMSGSIZE: max(most_bytes, _SMALLEST_LIMIT) + 4096,
            zmq.ROUTER_HANDOVER: 1,
        }.items():
            self._socket.setsockopt(name, value)
        zmq_security.secure_listener(
            self._socket, keys.server_secret.encode(), domain=b"jdp"
        )
        self._monitor = zmq_sockets.open_monitor(self._socket, _MONITORED)
        self._guests = zmq_sockets.Guests(descriptors.most_guests(64))
        self._proved: set[int] = set()  # descriptors of authenticated connections.
        # Peers without the servers' public key fail before ZAP.
        self._last_failure: tuple[int, int] | None = None
        try:
            self._socket.bind(f"tcp://{_bind_address(address)}")
        except (zmq.ZMQError, RuntimeError) as error:
            self._context.destroy(linger=0)
            raise RuntimeError(
                f"This server cannot listen at {address}: {error}. `addresses` must "
                "have a free port of its own host for each server."
            ) from None
        self._poller = zmq.Poller()
        self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)

    @property
    def _sockets(self) -> tuple[zmq.Socket, ...]:
        return self._socket, self._admission.socket, self._monitor

    def poll(self, timeout_s: float, others: "ClientSockets | None" = None) -> None:
        """Waits until a message arrives, here or at `others`."""
        poller = self._poller
        if others is not None:
            poller = zmq.Poller()
            for socket in (*self._sockets, *others.sockets):
                poller.register(socket, zmq.POLLIN)
        poller.poll(int(1000 * timeout_s))
        self._watch_guests()
        self._admission.answer()

    def receive(self) -> list[Message]:
        """Returns the messages that have arrived; drops those with too many frames."""
        found = []
        for _ in range(_MOST_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            fd = frames[0].get(zmq.SRCFD)
            self._proved.add(fd)
            self._guests.remove(fd)
            if not 2 <= len(frames) <= _MOST_FRAMES:
                self.note(f"it sent {len(frames)} frames at once")
                continue
            payload = frames[2].buffer if len(frames) == _MOST_FRAMES else None
            found.append(
                Message(
                    frames[0].bytes, frames[1].buffer, payload, _is_server(frames[1])
                )
            )
        return found

    def send(self, route: bytes, header: bytes, payload: object = None) -> None:
        """Sends without waiting; drops the message if the peer is gone."""
        frames = [route, header] if payload is None else [route, header, payload]
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=payload is None)
        except zmq.ZMQError:  # EHOSTUNREACH, or EAGAIN: it will ask again.
            pass

    def note(self, reason: str) -> None:
        """Counts a dropped message or connection; logs it now and then."""
        self._refusals.note(reason)

    def refuse_all(self, text: str) -> None:
        """Answers with a refusal for a moment, then closes."""
        deadline_s = time.monotonic() + _REFUSE_S
        while time.monotonic() < deadline_s:
            self.poll(0.1)
            for message in self.receive():
                assert isinstance(message.source, bytes)
                self.send(message.source, messages.encode_refusal(text))
        self.close()

    def close(self) -> None:
        """Ends; what was sent still leaves, for half a second."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._admission.socket.close()
        self._socket.close()
        self._context.term()

    def _watch_guests(self) -> None:
        """Cuts unauthenticated connections if there are too many."""
        for event, value in zmq_sockets.read_changes(self._monitor):
            if event == zmq.EVENT_DISCONNECTED:
                self._guests.remove(value)
                self._note_end(value)
            elif event != zmq.EVENT_ACCEPTED:
                self._last_failure = event, value
            elif value not in self._proved:  # A message may arrive before this event.
                self._guests.add(value, (self._endpoint,))

    def _note_end(self, descriptor: int) -> None:
        """Notes the end of a connection that was never authenticated."""
        # A failed handshake ends at once: its two events are adjacent.
        failure, self._last_failure = self._last_failure, None
        has_proved = descriptor in self._proved
        self._proved.discard(descriptor)
        if has_proved and failure is None:
            return
        if failure is None or failure[0] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            crypto = zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
            self.note(
                "it does not have the keys of this job"
                if failure is not None and failure[1] == crypto
                else "it speaks another protocol, or ended before it identified itself"
            )

    def _note_refused(self, address: str) -> None:
        self.note(f"it does not have the keys of this job ({address})")


class ClientSockets:
    """Connections to servers, of one thread; any thread may call `wake`."""

    def __init__(
        self,
        addresses: Sequence[str],
        keys: Keys,
        *,
        most_bytes: int,
        is_server: bool = False,
    ):
        """Starts to connect, without a deadline.

        Args:
          addresses: "host:port" of each server.
          keys: keys of the job.
          most_bytes: the longest payload.
          is_server: whether this process is a server, not a worker.
        """
        pair = keys.worker_public.encode(), keys.worker_secret.encode()
        if is_server:
            pair = keys.server_public.encode(), keys.server_secret.encode()
        # The same for all connections, so that answers find their way.
        identity = b"jdp" + os.urandom(16)
        self._context = zmq.Context()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self.sockets: list[zmq.Socket] = []
        self._poller = zmq.Poller()
        self._poller.register(self._wake_out, zmq.POLLIN)
        for address in addresses:
            socket = self._context.socket(zmq.DEALER)
            for name, value in {
                zmq.LINGER: _LINGER_MS,
                zmq.SNDHWM: 0,
                zmq.RCVHWM: 0,
                zmq.IPV6: 1,
                # The protocol repeats unsent messages: they must not pile up.
                zmq.IMMEDIATE: 1,
                zmq.MAXMSGSIZE: max(most_bytes, _SMALLEST_LIMIT) + 4096,
                zmq.RECONNECT_IVL: _RECONNECT_MS,
                zmq.RECONNECT_IVL_MAX: _MOST_RECONNECT_MS,
                zmq.ROUTING_ID: identity,
            }.items():
                socket.setsockopt(name, value)
            zmq_security.secure_client(socket, keys.server_public.encode(), pair)
            try:
                socket.connect(f"tcp://{address}")
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                os.close(self._wake_in)
                os.close(self._wake_out)
                raise RuntimeError(
                    f"`addresses` has {address!r}, to which this process cannot "
                    f"connect: {error}. Give the host and port of each server."
                ) from None
            self.sockets.append(socket)
            self._poller.register(socket, zmq.POLLIN)

    def poll(self, timeout_s: float) -> None:
        """Waits until a message arrives, or `wake` is called."""
        for ready, _ in self._poller.poll(int(1000 * timeout_s)):
            if ready == self._wake_out:
                os.read(self._wake_out, 1 << 16)

    def receive(self) -> list[Message]:
        """Returns the messages that have arrived, without waiting."""
        found = []
        for server, socket in enumerate(self.sockets):
            for _ in range(_MOST_AT_ONCE):
                try:
                    frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
                except zmq.Again:
                    break
                payload = frames[1].buffer if len(frames) > 1 else None
                found.append(Message(server, frames[0].buffer, payload))
        return found

    def send(self, server: int, header: bytes, payload: object = None) -> None:
        """Sends to a server without waiting; drops the message if it is unreachable."""
        frames = [header] if payload is None else [header, payload]
        try:
            self.sockets[server].send_multipart(
                frames, zmq.DONTWAIT, copy=payload is None
            )
        except zmq.Again:
            pass

    def wake(self) -> None:
        """Makes the current wait return, or the next one if none is running."""
        try:
            os.write(self._wake_in, b"x")
        except BlockingIOError:  # The pipe is full: it is awake already.
            pass

    def close(self) -> None:
        """Ends; what was sent still leaves, for half a second."""
        for socket in self.sockets:
            socket.close()
        self._context.term()
        os.close(self._wake_in)
        os.close(self._wake_out)


def is_listening(address: str) -> bool:
    """Whether a process accepts connections at "host:port", within half a second."""
    host, _, port = address.rpartition(":")
    try:
        with stream.create_connection((host.strip("[]"), int(port)), _PROBE_S):
            return True
    except OSError:
        return False


def _is_server(frame: zmq.Frame) -> bool:
    """Whether a frame came over a connection with the key of a server."""
    return frame.get("User-Id") == _SERVER


def _bind_address(address: str) -> str:
    """Resolves the host: ZeroMQ binds only to numeric addresses and interfaces."""
    from jdp.runtime.transport import rendezvous

    host, _, port = address.rpartition(":")
    if host in ("*", "0.0.0.0", "[::]"):
        return f"*:{port}"
    try:
        found = rendezvous.find_addresses(host)[0]
    except RuntimeError as error:
        reason = error.__cause__ or error.__context__ or error
        raise RuntimeError(f"{host!r} has no address here ({reason})") from None
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"
