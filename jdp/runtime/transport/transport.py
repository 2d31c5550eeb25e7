"""Transport: how do process 0 and the others exchange messages while a job runs?

A star: process 0 is the hub; every other process is a spoke, linked to the hub only.
The links are sockets (`open_link`), or queues between threads (`make_memory_links`).
"""

import dataclasses
import threading
from typing import NamedTuple, Protocol

from jdp.replicas.mesh import World

VERSION = 1  # of the protocol; the first byte of every frame.
DATA, HELLO, GOODBYE = range(3)  # the second byte; the payload follows.
HEADER_BYTES = 2
CLOSED = "This link is closed."


class Received(NamedTuple):
    """A message that has arrived."""

    peer: int  # index of the process that sent it.
    payload: bytes


class Lost(NamedTuple):
    """The loss of a process, which is final: no message of it follows."""

    peer: int
    why: str  # a sentence without its full stop, such as "process 3 has ended ...".


Event = Received | Lost


class Link(Protocol):
    """The end of the star that one process holds.

    Messages of one process to another arrive whole, once and in the order they were
    sent. Only messages that a lost process had not read are dropped. A lost process
    stays lost. The hub sees the loss of any spoke, a spoke only the loss of the hub.

    One thread uses it; any thread may call `wake`.
    """

    def send(self, peer: int, payload: bytes) -> None:
        """Sends to process `peer`, at once and without waiting.

        The hub sends to any spoke, a spoke to process 0. Messages to a lost process are
        dropped.

        Raises:
          ValueError: this process is not linked to `peer`, or `payload` is longer than
            `LinkOptions.max_message_bytes`.
          RuntimeError: this link is closed.
        """
        ...

    def wait(self, timeout_s: float | None) -> list[Event]:
        """Waits for an event, and returns all events that have arrived.

        Args:
          timeout_s: longest wait, in seconds; None: until an event arrives.

        Returns:
          The events in order of arrival; empty after `wake` or a timeout.

        Raises:
          RuntimeError: this link is closed.
        """
        ...

    def wake(self) -> None:
        """Makes the current wait return, or the next one if none is running."""
        ...

    def close(self) -> None:
        """Leaves the star; earlier messages are still sent, within about a second."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """Limits of a link; the same in every process.

    Attributes:
      max_message_bytes: longest payload.
      heartbeat_timeout_s: how long a process may be silent, in seconds, before it is
        lost. A busy process is not silent: a thread of the sockets answers for it.
    """

    max_message_bytes: int = 64 << 20
    heartbeat_timeout_s: float = 30.0

    def __post_init__(self) -> None:
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
    """Opens the link of this process; every process calls it once per key.

    Returns once all are connected. A single process has nothing to connect to.

    Args:
      world: the job.
      key: key in the store at which the processes meet; one star per key.
      options: the same in every process.

    Raises:
      RuntimeError: a process did not come within `world.timeout_s`, or speaks another
        version; on every process.
    """
    if world.process_count == 1:
        return make_memory_links(1, options=options)[0]
    # Imported here: users of the types alone must not wait for zmq.
    from jdp.runtime.transport import rendezvous

    return rendezvous.open_link(world, key=key, options=options)


def make_memory_links(
    num: int, *, options: LinkOptions | None = None
) -> list["MemoryLink"]:
    """Makes the links of `num` processes that are threads of this process."""
    links: list[MemoryLink] = []
    for rank in range(num):
        links.append(MemoryLink(links, rank, options or LinkOptions()))
    return links


class MemoryLink:
    """A link between threads of one process; see `Link`."""

    def __init__(self, links: list["MemoryLink"], rank: int, options: LinkOptions):
        """Use `make_memory_links`."""
        self._links = links
        self._rank = rank
        self._options = options
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._lost: set[int] = set()
        self._is_woken = False
        self._end = ""  # the reason why this link is unusable.

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
        """Simulates the death of process `rank`, whose own calls then raise."""
        self._links[rank]._leave(
            f"Process {rank} was disconnected by a test.", describe_ended(rank)
        )

    def _leave(self, end: str, why: str) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()
        # Spokes are not linked to each other.
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
    """A message is not a frame; the text is a verb phrase, such as "sent ..."."""


def encode(kind: int, payload: bytes = b"") -> bytes:
    """Returns the frame that carries `payload`."""
    return bytes((VERSION, kind)) + payload


def decode(frame: memoryview) -> tuple[int, bytes]:
    """Returns the kind and the payload of a frame.

    Raises:
      FrameError: `frame` is malformed, or has another version.
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
    """Describes a process that has left on purpose."""
    return f"process {peer} has closed its link"


def describe_ended(peer: int) -> str:
    """Describes a process whose end has cut the connection."""
    return f"process {peer} has ended or its host is gone"


def describe_refused(peer: int, options: LinkOptions) -> str:
    """Describes a process that sent bytes for which libzmq ended the connection."""
    return (
        f"process {peer} sent what is not of this protocol, or is longer than "
        f"`max_message_bytes`, {options.max_message_bytes:,}"
    )


def describe_silent(peer: int, options: LinkOptions) -> str:
    """Describes a process that is connected but does not answer."""
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
    """Raises ValueError if `payload` is too long."""
    if len(payload) > options.max_message_bytes:
        raise ValueError(
            f"`payload` has {len(payload):,} bytes; `max_message_bytes` is "
            f"{options.max_message_bytes:,}. Send it in parts, or raise the limit."
        )
