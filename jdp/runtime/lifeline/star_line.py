"""Star line: one connection of a `star`, and the listener where lines begin."""

import contextlib
import socket
import time

from jdp.runtime import addresses
from jdp.runtime.lifeline.star_codec import Codec

# A lost host is detected after IDLE + COUNT * INTERVAL seconds, or, with unacknowledged
# data, after USER_TIMEOUT milliseconds.
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 3,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 9000,
}


class StarLine:
    """One connection, its codec and its unsent bytes."""

    def __init__(self, sock: socket.socket, codec: Codec):
        sock.setblocking(False)
        _keep_alive(sock)
        self.sock = sock
        self.where = _where(sock)  # address of the other end, for messages.
        self.codec = codec
        self.unsent = bytearray(codec.greet())
        self.member: int | None = None  # the other end, once authenticated.
        self.is_center = False  # whether the other end should be member 0.
        self.has_said_bye = False
        self.began_s = time.monotonic()

    def flush(self) -> None:
        """Sends as many bytes as the other end takes now."""
        while self.unsent:
            try:
                num_bytes = self.sock.send(self.unsent)
            except (BlockingIOError, InterruptedError):
                return
            del self.unsent[:num_bytes]


def listen(host: str, port: int) -> socket.socket:
    """Opens the listener of member 0 at an address of this host.

    Args:
      host: name or address by which the others reach this host.
      port: 0 for any free port.

    Raises:
      OSError: `host` has no address here, or the port is taken.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not addresses.is_loopback(host) and any(
        addresses.is_loopback(str(address[0])) for *_, address in found
    ):
        # Debian's default: only on this host its name is 127.0.1.1.
        passive = socket.AI_PASSIVE
        found = socket.getaddrinfo(None, port, type=socket.SOCK_STREAM, flags=passive)
    problem: OSError | None = None
    for family, _, _, _, address in found:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1024)
            return sock
        except OSError as error:
            sock.close()
            problem = error
    raise problem or OSError(f"{host!r} has no address")


def _where(sock: socket.socket) -> str:
    try:
        return addresses.unmap(str(sock.getpeername()[0]))
    except OSError:  # It has left already.
        return "an address that is gone"


def _keep_alive(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # Not on every system.
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
