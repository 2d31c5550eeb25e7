"""ZeroMQ sockets: how are they made, monitored and ended, and strangers kept out?"""

import contextlib
import logging
import math
import os
import socket
import struct
import sys
import time

import zmq

from jdp.runtime.transport.transport import LinkOptions

_LINGER_MS = 1000
_BACKLOG = 4096  # all spokes may connect at once.
# A frame of CURVE is 33 bytes longer than ours; its handshake sends one of about 320.
_OVERHEAD_BYTES = 1024
# In effect never. With -1, which means never, libzmq drops the unread messages at the
# end of a connection. libzmq may double the value, in an int.
_NEVER_MS = 1_000_000_000
_LOG_PERIOD_S = 5.0
_PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT
_READABLE = (zmq.POLLIN, zmq.POLLIN | zmq.POLLOUT)
_logger = logging.getLogger("jdp")


def make_socket(
    context: zmq.Context, options: LinkOptions, *, is_hub: bool, is_pulse: bool
) -> zmq.Socket:
    """Makes a socket for messages, or a socket for heartbeats only."""
    values = {
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.LINGER: _LINGER_MS,
        zmq.MAXMSGSIZE: options.max_message_bytes + _OVERHEAD_BYTES,
        zmq.IPV6: 1,
    }
    if is_pulse:
        # A stopped process leaves a ping unanswered, which is sent at most `ping_ms`
        # after it stops; the timeout covers the rest.
        timeout_ms = math.ceil(1000 * options.heartbeat_timeout_s)
        ping_ms = math.ceil(timeout_ms / 3)
        values |= {
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: _OVERHEAD_BYTES,
            zmq.HEARTBEAT_IVL: ping_ms,
            zmq.HEARTBEAT_TIMEOUT: timeout_ms - ping_ms,
        }
    if is_hub:
        values |= {zmq.ROUTER_MANDATORY: 1, zmq.BACKLOG: _BACKLOG}
        if sys.platform == "linux":
            # Other accounts can reach the name of this Unix socket; they are dropped at
            # once. Without descriptors for them, libzmq would abort the process.
            values |= {zmq.IPC_FILTER_UID: os.geteuid()}
    else:
        values |= {zmq.RECONNECT_IVL: _NEVER_MS}
    made = context.socket(zmq.ROUTER if is_hub else zmq.DEALER)
    for name, value in values.items():
        made.setsockopt(name, value)
    return made


def open_monitor(watched: zmq.Socket, events: int) -> zmq.Socket:
    """Makes a socket that reports connections of `watched`; see `read_changes`."""
    endpoint = f"inproc://monitor-{id(watched)}"
    watched.monitor(endpoint, events)
    monitor = watched.context.socket(zmq.PAIR)
    # Unlimited: at a limit, libzmq's thread would wait, and with it the messages and
    # heartbeats of all processes.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(endpoint)
    # libzmq signals only after a read that found nothing.
    assert not has_message(monitor)
    return monitor


def read_changes(monitor: zmq.Socket) -> list[tuple[int, int]]:
    """Returns (event, descriptor) pairs since the last call."""
    changes = []
    while has_message(monitor):
        head, _ = monitor.recv_multipart(zmq.DONTWAIT)
        changes.append(struct.unpack("=hi", head))
    return changes


def receive_frame(source: zmq.Socket) -> tuple[zmq.Frame, int]:
    """Receives a message; returns its first frame and its number of frames."""
    first = last = source.recv(zmq.DONTWAIT, copy=False)
    num_frames = 1
    while last.more:
        last = source.recv(zmq.DONTWAIT, copy=False)
        num_frames += 1
    return first, num_frames


def get_descriptor(source: zmq.Socket) -> int:
    """Returns the descriptor that becomes readable when `source` may have a message."""
    fd = source.getsockopt(zmq.FD)
    assert isinstance(fd, int)
    return fd


def has_message(source: zmq.Socket) -> bool:
    """Returns whether a message is there; clears the signal of the descriptor."""
    return source.getsockopt(zmq.EVENTS) in _READABLE


def end(
    context: zmq.Context,
    sockets: list[zmq.Socket],
    monitors: list[zmq.Socket],
    lines: dict[int, tuple[int, "ConnectionHandle"]],
    pipe: tuple[int, int],
) -> None:
    """Closes everything; unsent messages are sent first, within a time limit."""
    for _, line in lines.values():
        line.close()
    # An unread monitor would block libzmq's thread. `unbind` is not called: it drops
    # unsent messages.
    for watched in sockets:
        watched.disable_monitor()
    for any_socket in (*sockets, *monitors):
        any_socket.close()
    for fd in pipe:
        os.close(fd)
    context.term()


class ConnectionHandle:
    """A second handle on a connection, to close it and to see how it ended.

    libzmq reports that a connection is gone, but not why, and cannot drop one peer.
    """

    def __init__(self, fd: int, endpoints: tuple[str, str]):
        """Duplicates `fd`, libzmq's descriptor of a connection to an endpoint."""
        self._socket: socket.socket | None = None
        try:
            copy = os.dup(fd)
        except OSError:  # It has gone already.
            return
        try:
            found = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return
        # It may be closed, and another file have its number.
        if _find_endpoints(found).isdisjoint(map(_shorten, endpoints)):
            found.close()
        else:
            self._socket = found

    def has_ended(self) -> bool:
        """Whether the other end closed it; if not, and it is gone, libzmq closed it."""
        try:
            return self._socket is None or not self._socket.recv(1, _PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def hang_up(self) -> None:
        """Shuts the connection down, for all its handles."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Closes this handle."""
        if self._socket is not None:
            self._socket.close()


def _shorten(endpoint: str) -> str:
    """Returns the port of an endpoint, or the name or path of a Unix socket."""
    if endpoint.startswith("ipc://"):
        return endpoint.removeprefix("ipc://").removeprefix("@")
    return endpoint.rpartition(":")[2]


def _find_endpoints(line: socket.socket) -> set[str]:
    """Returns the ports, or the names, of both ends of `line`."""
    found = set()
    for find in (line.getsockname, line.getpeername):
        with contextlib.suppress(OSError):
            name = find()
            is_unix = line.family == socket.AF_UNIX
            found.add(os.fsdecode(name).lstrip("\0") if is_unix else str(name[1]))
    return found


class Guests:
    """Connections that are not authenticated yet; the oldest are cut if too many.

    libzmq accepts every connection, until the process runs out of descriptors.
    """

    def __init__(self, most: int):
        """Starts empty.

        Args:
          most: largest number of such connections.
        """
        self._most = most
        self._fds: dict[int, None] = {}  # in order of arrival.

    def add(self, fd: int, endpoints: tuple[str, ...]) -> None:
        """Adds a connection that libzmq has accepted at an endpoint."""
        self._fds.pop(fd, None)
        self._fds[fd] = None
        while len(self._fds) > self._most:
            oldest = next(iter(self._fds))
            del self._fds[oldest]
            _cut(oldest, endpoints)

    def remove(self, fd: int) -> None:
        """Removes a connection that is authenticated, or has ended."""
        self._fds.pop(fd, None)


def _cut(fd: int, endpoints: tuple[str, ...]) -> None:
    """Ends a connection of libzmq's, which closes the descriptor itself."""
    try:
        found = socket.socket(
            fileno=fd
        )  # Not a duplicate: descriptors may have run out.
    except OSError:  # It has gone already.
        return
    try:
        # It may be closed, and another connection have its number.
        if not _find_endpoints(found).isdisjoint(map(_shorten, endpoints)):
            found.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        found.detach()


class Refusals:
    """Counts dropped strangers, and logs them at a limited rate."""

    def __init__(self) -> None:
        self._num_dropped = 0
        self._quiet_until_s = -1.0

    def note(self, reason: str) -> None:
        """Counts a stranger, and logs it unless another was logged a moment ago."""
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
