"""ZeroMQ security: how do sockets encrypt, and which keys may connect?

CURVE encrypts, and proves which public key the other end has. A listening socket asks
at the ZAP endpoint of its context whether to admit that key (ZeroMQ RFC 27).
"""

from collections.abc import Callable

import zmq

from jdp.runtime.transport import zmq_sockets

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class ZapAdmission:
    """The ZAP endpoint of a context, which admits or refuses the key of a connection.

    Attributes:
      socket: readable when `answer` has something to do.
    """

    def __init__(
        self,
        context: zmq.Context,
        *,
        admit: Callable[[bytes, bytes], bytes | None],
        refused: Callable[[str], None],
    ):
        """Opens the endpoint; call it before a socket of `context` listens.

        Args:
          context: context of the listening sockets.
          admit: returns the user id of a connection, from the domain of the socket and
            the public key of the other end, 32 bytes; None refuses it.
          refused: called with the address of each refused connection.
        """
        self._admit, self._refused = admit, refused
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answers all pending requests."""
        while zmq_sockets.has_message(self.socket):
            request = self.socket.recv_multipart(zmq.DONTWAIT)
            _, request_id, domain, address, _, mechanism, *credentials = request
            user_id = None
            if mechanism == b"CURVE" and len(credentials) == 1:
                user_id = self._admit(domain, credentials[0])
            if user_id is None:
                self._refused(address.decode(errors="replace"))
                answer = (b"400", b"refused", b"", b"")
            else:
                answer = (b"200", b"", user_id, b"")
            self.socket.send_multipart((b"1.0", request_id, *answer))


def secure_listener(socket: zmq.Socket, secret_key: bytes, *, domain: bytes) -> None:
    """Makes a listening socket encrypt, and ask for admission in `domain`."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)


def secure_client(
    socket: zmq.Socket, listener_key: bytes, keys: tuple[bytes, bytes]
) -> None:
    """Makes a connecting socket encrypt.

    Args:
      socket: socket that is not connected yet.
      listener_key: public key of the other end.
      keys: public and secret key of this end.
    """
    socket.setsockopt(zmq.CURVE_SERVERKEY, listener_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys[0])
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys[1])
