"""Links: TCP connections among processes, over which they reduce.

The processes meet in the store of the job. Each listens at the address by which others
reach it, and hangs up on strangers. The one of higher rank calls.
"""

import contextlib
import hmac
import ipaddress
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec

from jdp.replicas import meeting, wire
from jdp.replicas.meeting import MeetingRecord, StoreMeeting
from jdp.replicas.mesh import World

_TOPIC = "opening of links"
_MAGIC = b"jdp-tcp1"
_NONCE_BYTES, _CODE_BYTES = 32, 32
_GREETING = struct.Struct(f"<8sI{_NONCE_BYTES}s")  # magic, rank, nonce.
_HANDSHAKE_S = 5.0
_MOST_CALLERS = 64  # of which it is not known yet whether they are strangers.


class LinkPlace(msgspec.Struct, frozen=True):
    """Where a process listens."""

    host: str  # a numeric address.
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


def open_links(
    world: World, processes: Sequence[int], *, key: str
) -> dict[int, socket.socket]:
    """Connects this process with all others of `processes`, which call it too.

    Args:
      world: the world.
      processes: processes to be linked, including this one.
      key: key in the store, used for these links only.

    Returns:
      Non-blocking connections by rank, the place in `processes`.

    Raises:
      RuntimeError: on every process, if one cannot listen or be reached, or did not
        arrive within `world.timeout_s`.
    """
    store = world.store
    if store is None:  # There is one process.
        return {}
    rank = list(processes).index(world.process_index)
    secret = store.derive_secret(f"links {key}")
    deadline_s = time.monotonic() + world.timeout_s
    with contextlib.ExitStack() as stack:
        error, listener, place = None, None, LinkPlace("", 0)
        try:
            listener, place = _listen(world.host)
            stack.callback(listener.close)
        except OSError as failure:
            error = f"process {world.process_index} cannot listen: {failure}."
        body = msgspec.msgpack.encode(place)
        places = _meet(world, processes, f"{key}/places", body, error)
        assert listener is not None
        links: dict[int, socket.socket] = {}
        stack.callback(lambda: [link.close() for link in links.values()])
        try:
            for other in range(rank):
                links[other] = _call(places[other], secret, (rank, other), deadline_s)
            _accept(listener, secret, rank, len(processes), links, deadline_s)
        except OSError as failure:
            error = f"process {world.process_index} was not linked: {failure}."
        _meet(world, processes, f"{key}/linked", body, error)
        for link in links.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setblocking(False)
        stack.pop_all()
        listener.close()
        return links


def all_are(
    world: World, processes: Sequence[int], is_so: bool, *, key: str, topic: str
) -> bool:
    """Returns whether something is so on all of `processes`, which call it too.

    Args:
      world: the world.
      processes: processes that meet, including this one.
      is_so: whether it is so on this process.
      key: key in the store, used for this meeting only.
      topic: the subject of the meeting, in words.

    Raises:
      RuntimeError: a process did not come.
    """
    assert world.store is not None
    outcome = meeting.hold(
        StoreMeeting(world.store, key, world.process_index, world.timeout_s),
        MeetingRecord(topic, bytes([is_so])),
        lambda found: bytes([all(each == b"\x01" for each in found)]),
        processes=tuple(processes),
    )
    if outcome.error is not None:
        raise RuntimeError(outcome.error)
    return outcome.body == b"\x01"


def _meet(
    world: World,
    processes: Sequence[int],
    key: str,
    body: bytes,
    error: str | None,
) -> list[LinkPlace]:
    """Returns the places of all processes; raises RuntimeError if one has an error."""
    assert world.store is not None
    store_meeting = StoreMeeting(world.store, key, world.process_index, world.timeout_s)
    outcome = meeting.hold(
        store_meeting,
        MeetingRecord(_TOPIC, body, error),
        _list_places,
        processes=tuple(processes),
    )
    if outcome.error is not None:
        raise RuntimeError(outcome.error)
    what = f"The outcome of the {_TOPIC}"
    places = wire.decode(outcome.body, list[LinkPlace], what=what)
    if len(places) != len(processes):
        raise wire.Malformed(f"{what} leaves processes out.")
    for place in places:
        try:
            ipaddress.ip_address(place.host)
        except ValueError as flaw:
            raise wire.Malformed(f"{what} has no address: {flaw}.") from None
    return places


def _list_places(bodies: list[bytes]) -> bytes:
    what = f"A message in the {_TOPIC}"
    return msgspec.msgpack.encode(
        [wire.decode(body, LinkPlace, what=what) for body in bodies]
    )


def _listen(host: str) -> tuple[socket.socket, LinkPlace]:
    """Listens at the address from which this host reaches process 0, at `host`."""
    found = socket.getaddrinfo(host.strip("[]"), 1, type=socket.SOCK_DGRAM)
    family, _, _, _, address = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # Sends nothing.
        own = probe.getsockname()[0]
    listener = socket.create_server((own, 0), family=family, backlog=128)
    return listener, LinkPlace(own, listener.getsockname()[1])


def _call(
    place: LinkPlace, secret: bytes, ranks: tuple[int, int], deadline_s: float
) -> socket.socket:
    """Connects with a process of lower rank, the second of `ranks`.

    Raises:
      OSError: it cannot be reached, or another program answers.
    """
    while True:
        try:
            return _call_once(place, secret, *ranks)
        except ConnectionRefusedError:
            raise
        except (TimeoutError, ConnectionError):
            if time.monotonic() > deadline_s:  # Its queue may be full of strangers.
                raise


def _call_once(place: LinkPlace, secret: bytes, rank: int, other: int) -> socket.socket:
    link = socket.create_connection((place.host, place.port), timeout=_HANDSHAKE_S)
    try:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        link.sendall(_GREETING.pack(_MAGIC, rank, nonce))
        magic, found, theirs = _GREETING.unpack(_receive(link, _GREETING.size))
        code = _receive(link, _CODE_BYTES)
        context = struct.pack("<II", other, rank) + theirs + nonce
        right = hmac.digest(secret, b"called" + context, "sha256")
        if (magic, found) != (_MAGIC, other) or not hmac.compare_digest(code, right):
            raise ConnectionRefusedError(
                f"at {place.host} port {place.port} answers another program than "
                f"rank {other} of this job"
            )
        link.sendall(hmac.digest(secret, b"caller" + context, "sha256"))
    except BaseException:
        link.close()
        raise
    return link


class _Caller:
    """A connection that has come in, and what it has said."""

    def __init__(self, link: socket.socket, secret: bytes, rank: int):
        self.link, self.came_s = link, time.monotonic()
        self._secret, self._rank = secret, rank
        self._heard = bytearray()
        self._other: int | None = None
        self._right = b""

    def hear(self) -> int | None:
        """Reads what there is; returns the rank of the caller once it is proven.

        Raises:
          OSError: it is a stranger.
        """
        due = _CODE_BYTES if self._right else _GREETING.size
        more = self.link.recv(due - len(self._heard))
        self._heard += more
        if not more:
            raise ConnectionResetError("a stranger has hung up")
        if len(self._heard) < due:
            return None
        heard, self._heard = bytes(self._heard), bytearray()
        if self._right:
            if not hmac.compare_digest(heard, self._right):
                raise ConnectionRefusedError("a stranger has no key")
            return self._other
        magic, self._other, theirs = _GREETING.unpack(heard)
        if magic != _MAGIC:
            raise ConnectionRefusedError("a stranger greets otherwise")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        context = struct.pack("<II", self._rank, self._other) + nonce + theirs
        code = hmac.digest(self._secret, b"called" + context, "sha256")
        self._right = hmac.digest(self._secret, b"caller" + context, "sha256")
        self.link.sendall(_GREETING.pack(_MAGIC, self._rank, nonce) + code)
        return None


def _accept(
    listener: socket.socket,
    secret: bytes,
    rank: int,
    count: int,
    links: dict[int, socket.socket],
    deadline_s: float,
) -> None:
    """Waits for the calls of all processes of higher rank.

    Raises:
      OSError: one of them has not called in time.
    """
    listener.setblocking(False)
    callers: dict[int, _Caller] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [caller.link.close() for caller in callers.values()])
        while missing := [i for i in range(rank + 1, count) if i not in links]:
            if time.monotonic() > deadline_s:
                raise OSError(f"ranks {missing} have not called")
            poll = select.poll()
            poll.register(listener, select.POLLIN)
            for descriptor in callers:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(200):
                if descriptor == listener.fileno():
                    _let_in(listener, callers, secret, rank)
                    continue
                try:
                    other = callers[descriptor].hear()
                except BlockingIOError:
                    continue
                except OSError:
                    callers.pop(descriptor).link.close()
                    continue
                if other is not None:
                    link = callers.pop(descriptor).link
                    if other in missing and other not in links:
                        links[other] = link
                    else:
                        link.close()
            _drop_old(callers)


def _let_in(
    listener: socket.socket, callers: dict[int, _Caller], secret: bytes, rank: int
) -> None:
    with contextlib.suppress(OSError):
        for _ in range(_MOST_CALLERS):
            link = listener.accept()[0]
            link.setblocking(False)
            callers[link.fileno()] = _Caller(link, secret, rank)


def _drop_old(callers: dict[int, _Caller]) -> None:
    """Hangs up on callers that have not proven their rank in time."""
    oldest_s = time.monotonic() - _HANDSHAKE_S
    by_age = sorted(callers, key=lambda descriptor: callers[descriptor].came_s)
    for i, descriptor in enumerate(by_age):
        if callers[descriptor].came_s < oldest_s or len(by_age) - i > _MOST_CALLERS:
            callers.pop(descriptor).link.close()


def _receive(link: socket.socket, num_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        more = link.recv(num_bytes - len(found))
        if not more:
            raise ConnectionResetError("the other end has hung up")
        found += more
    return bytes(found)
