"""Transport: how process 0 and the others talk while a job runs.

A star: process 0 is the hub, every other process a spoke that talks to it only. Over
sockets (`open_link`), or between threads of one process (`make_memory_links`).
"""

import dataclasses
import threading
from typing import NamedTuple, Protocol

from jdp.replicas.mesh import World

VERSION = 1  # of what travels; the first byte of every frame.
DATA, HELLO, GOODBYE = range(3)  # the second byte; then follows the payload.
HEADER_BYTES = 2
CLOSED = "This link is closed."


class Received(NamedTuple):
    """A message has come."""

    peer: int  # index of the process that sent it.
    payload: bytes


class Lost(NamedTuple):
    """A process is gone for good; nothing of it follows."""

    peer: int
    why: str  # a sentence without its full stop, such as "process 3 has ended ...".


Event = Received | Lost


class Link(Protocol):
    """The end of the star that one process holds.

    Messages of one process to another arrive in the order they were sent, whole, once.
    None is dropped but those that a lost process had not read. A lost process
    stays lost: the hub sees the loss of any spoke, a spoke only the address of the hub.

    One thread uses it; any thread may call `wake`.
    """

    def send(self, peer: int, payload: bytes) -> None:
        """Sends to process `peer`, at once and without waiting.

        The hub sends to any spoke, a spoke to process 0. What is sent to a lost process
        is dropped.

        Raises:
          ValueError: there is no way to `peer`, or `payload` is longer than
            `LinkOptions.max_message_bytes`.
          RuntimeError: this link is closed.
        """
        ...

    def wait(self, timeout_s: float | None) -> list[Event]:
        """Waits until something has come, and returns all that has.

        Args:
          timeout_s: longest wait, in seconds; None: until something comes.

        Returns:
          In the order of arrival; empty after `wake`, or when the time is over.

        Raises:
          RuntimeError: this link is closed.
        """
        ...

    def wake(self) -> None:
        """Makes the wait that is under way return, or else the next one."""
        ...

    def close(self) -> None:
        """Leaves the star; what was sent before still leaves, within about a second."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """Limits of a link; the same in every process.

    Attributes:
      max_message_bytes: longest payload.
      heartbeat_timeout_s: how long a process may be silent, in seconds, before it is
        lost. One that computes is not silent: a thread of the sockets answers for it.
    """

    max_message_bytes: int = 64 << 20
    heartbeat_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Checks what one process can check alone."""
        if self.max_message_bytes < 1:
            raise ValueError(
                f"`max_message_bytes` must be at least 1, got {self.max_message_bytes}."
            )
        # libzmq counts in whole milliseconds, in an int.
        if not 0.01 <= self.heartbeat_timeout_s <= 1e6:
            raise ValueError(
                "`heartbeat_timeout_s` must be from 0.01 to 1e6 seconds, got "
                f"{self.heartbeat_timeout_s}."
            )


def open_link(world: World, *, key: str, options: LinkOptions) -> Link:
    """Opens the link of this process; every process of the job calls it once a key.

    Returns once all are connected. A single process is connected to none.

    Args:
      world: the job.
      key: where the processes meet in the store; one key, one star.
      options: the same in every process.

    Raises:
      RuntimeError: a process did not come within `world.timeout_s`, or speaks another
        version; on every process.
    """
    if world.process_count == 1:
        return make_memory_links(1, options=options)[0]
    # Here: users of the types alone must not wait for zmq.
    from jdp.runtime.transport import rendezvous

    return rendezvous.open_link(world, key=key, options=options)


def make_memory_links(
    num: int, *, options: LinkOptions | None = None
) -> list["MemoryLink"]:
    """Makes the links of `num` processes that are threads of this one."""
    links: list[MemoryLink] = []
    for rank in range(num):
        links.append(MemoryLink(links, rank, options or LinkOptions()))
    return links


class MemoryLink:
    """The in-memory twin of a link; see `Link`."""

    def __init__(self, links: list["MemoryLink"], rank: int, options: LinkOptions):
        """Use `make_memory_links`."""
        self._links = links
        self._rank = rank
        self._options = options
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._lost: set[int] = set()
        self._is_woken = False
        self._end = ""  # why nothing goes on here.

    def send(self, peer: int, payload: bytes) -> None:
        """See `Link`."""
        self._check_open()
        check_route(self._rank, peer, len(self._links))
        check_size(payload, self._options)
        self._links[peer]._deliver(Received(self._rank, payload))

    def wait(self, timeout_s: float | None) -> list[Event]:
        """See `Link`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._events or self._is_woken or self._end, timeout_s
            )
            self._check_open()
            events, self._events = self._events, []
            self._is_woken = False
        return events

    def wake(self) -> None:
        """See `Link`."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """See `Link`."""
        if not self._end:
            self._leave(CLOSED, describe_closed(self._rank))

    def lose(self, rank: int) -> None:
        """A scripted death: process `rank` is gone, and its own calls raise."""
        self._links[rank]._leave(
            f"Process {rank} was lost, as a test wanted.", describe_ended(rank)
        )

    def _leave(self, end: str, why: str) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()
        # Spokes know nothing of each other.
        seen_by = self._links[:1] if self._rank else self._links[1:]
        for link in seen_by:
            link._deliver(Lost(self._rank, why))

    def _deliver(self, event: Event) -> None:
        with self._changed:
            if self._end or event.peer in self._lost:
                return
            if isinstance(event, Lost):
                self._lost.add(event.peer)
            self._events.append(event)
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._end:
            raise RuntimeError(self._end)


class FrameError(Exception):
    """A message is not a frame; the text says what the process did, as "sent ..."."""


def encode(kind: int, payload: bytes = b"") -> bytes:
    """Returns the frame in which `payload` travels."""
    return bytes((VERSION, kind)) + payload


def decode(frame: memoryview) -> tuple[int, bytes]:
    """Returns the kind and the payload of a frame.

    Raises:
      FrameError: it is not a frame, or has another version.
    """
    if len(frame) < HEADER_BYTES:
        raise FrameError(f"sent {len(frame)} bytes, which are not a frame")
    if frame[0] != VERSION:
        raise FrameError(
            f"sent version {frame[0]}; this process speaks version {VERSION}"
        )
    kind, payload = frame[1], bytes(frame[HEADER_BYTES:])
    if kind > GOODBYE or (kind != DATA and payload):
        raise FrameError(f"sent a frame of an unknown kind, {kind}")
    return kind, payload


def describe_closed(peer: int) -> str:
    """Says that a process has left on purpose."""
    return f"process {peer} has closed its link"


def describe_ended(peer: int) -> str:
    """Says that the connection to a process was cut at its end."""
    return f"process {peer} has ended or its host is gone"


def describe_refused(peer: int, options: LinkOptions) -> str:
    """Says that libzmq ended a connection because of what came."""
    return (
        f"process {peer} sent what is not of this protocol, or is longer than "
        f"`max_message_bytes`, {options.max_message_bytes:,}"
    )


def describe_silent(peer: int, options: LinkOptions) -> str:
    """Says that a process does not answer, though its connection is there."""
    return (
        f"process {peer} has not answered for {options.heartbeat_timeout_s:g} s "
        "(stopped, or its host is gone)"
    )


def check_route(rank: int, peer: int, num_processes: int) -> None:
    """Raises ValueError unless process `rank` can send to `peer`."""
    if rank == 0 and 0 < peer < num_processes or rank > 0 and peer == 0:
        return
    linked = f"processes 1 to {num_processes - 1}" if rank == 0 else "process 0 only"
    if num_processes == 1:
        linked = "no process: it is alone"
    raise ValueError(
        f"`peer` must be linked to process {rank}, which has links to {linked}; "
        f"got {peer}."
    )


def check_size(payload: bytes, options: LinkOptions) -> None:
    """Raises ValueError where `payload` is too long."""
    if len(payload) > options.max_message_bytes:
        raise ValueError(
            f"`payload` has {len(payload):,} bytes; `max_message_bytes` is "
            f"{options.max_message_bytes:,}. Send it in parts, or raise the limit."
        )
