"""Star: how do the members of a job hear at once of each other's messages and ends?

Member 0 listens, the others connect to it, and it forwards each message to all. A line
that breaks without a goodbye is the loss of a member: the kernel closes it when a
process dies, and keep-alive probes, which the kernel answers, detect a lost host or
network. A process that is stopped or busy is never taken for dead. The job key
authenticates every message; see `star_codec`.
"""

import collections
import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Literal

from jdp.runtime.lifeline.star_codec import (
    Codec,
    Doubled,
    Frame,
    FrameRefused,
    OtherJob,
)
from jdp.runtime.lifeline.star_line import StarLine

_MAX_SAID = 64  # messages of one member, over all its connections.
_MAX_GUESTS = 256  # connections that are not authenticated yet.
_GUEST_TIMEOUT_S = 10.0
_MAX_WARNED = 10  # addresses that are logged, or passed to `refused`.
_READ_BYTES = 1 << 16
_RETRY_S = 0.1
_MOST_UNSENT = 1 << 18  # bytes of a line; above, it gets only what is kept.
_DIED = b"died"  # Body of a "lost" frame: the kernel of the member closed its line.
_logger = logging.getLogger("jdp")


class Star:
    """One member of the star, served by a thread of its own.

    `heard` and `lost` are called in that thread, one at a time.
    """

    def __init__(
        self,
        member: int,
        num_members: int,
        *,
        key: bytes,
        purpose: str,
        listener: socket.socket | None = None,
        address: tuple[str, int] | None = None,
        connect_timeout_s: float = 30.0,
        heard: Callable[[int, bytes], None],
        lost: Callable[[int, bool], None],
        tick: Callable[[], float | None] | None = None,
        alarm: tuple[int, Callable[[], None]] | None = None,
        refused: Callable[[str, OtherJob], None] | None = None,
        told: Callable[[int, bytes], None] | None = None,
    ):
        """Starts the thread.

        Args:
          member: index of this member.
          num_members: number of members of the job.
          key: key of the job, shape (32,).
          purpose: use of the star; stars of another purpose are refused.
          listener: listening socket of member 0; closed with the star.
          address: address at which the others reach member 0.
          connect_timeout_s: how long the others try to reach it.
          heard: called with the index of a member and its message.
          lost: called with the index of a member whose line broke without a goodbye, or
            with 0 if member 0 was never reached; and with whether its process has
            ended. False: it is not known, and the network may have failed.
          tick: called after each event, and again after the seconds that it returned;
            None: not before the next event.
          alarm: a descriptor, and a function that is called once when it is readable.
          told: called like `heard` with messages that are not kept; None: refused.
          refused: called once per address with the address and the error, if the other
            end has another key or is of another job. None: the log has it.
        """
        self._member, self._num_members = member, num_members
        self._key, self._purpose = key, purpose
        self._listener, self._address = listener, address
        self._connect_timeout_s = connect_timeout_s
        self._heard, self._lost, self._tick = heard, lost, tick
        self._selector = selectors.DefaultSelector()
        self._lines: dict[socket.socket, StarLine] = {}
        self._history: list[Frame] = []  # for members that connect later.
        self._num_said = collections.Counter[int]()  # by member.
        self._outbox: collections.deque[Frame] = collections.deque()
        self._is_closing = False
        self._refused, self._told, self._alarm = refused, told, alarm
        self._warned: set[str] = set()  # addresses that were refused.
        self._is_welcome = False  # Member 0 has answered.
        self._met: set[int] = set()  # by member 0, also if they have left.
        self._unheard: list[Frame] = []  # said before that.
        self._reconnect_s: float | None = None
        self._connect_by_s = time.monotonic() + connect_timeout_s
        self._sent = threading.Condition()
        self._wake_fd, self._woken_fd = socket.socketpair()
        self._wake_fd.setblocking(False)
        self._woken_fd.setblocking(False)
        self._thread = threading.Thread(
            target=self._serve, name=f"jdp-star-{purpose}", daemon=True
        )
        self._thread.start()

    def say(self, body: bytes, *, is_kept: bool = True) -> None:
        """Sends to all other members; any thread may call it.

        A message that is not kept goes to `told` of member 0, or from it to all.
        """
        self._outbox.append(Frame("say" if is_kept else "tell", self._member, body))
        self.wake()

    def wait_until_whole(self, *, timeout_s: float) -> bool:
        """Waits until this member is linked: member 0 to all others, others to it."""
        with self._sent:
            return self._sent.wait_for(self._is_whole, timeout_s)

    def has_met_all(self) -> bool:
        """Whether member 0 has met all others, or this member has met member 0."""
        if self._member == 0:
            return len(self._met) == self._num_members - 1
        return self._is_welcome

    def say_now(self, body: bytes, *, timeout_s: float = 0.5) -> None:
        """Sends to all other members before it returns; in the thread of the star."""
        self._spread(Frame("say", self._member, body))
        deadline_s = time.monotonic() + timeout_s
        self._flush_lines()
        while not self._is_flushed() and time.monotonic() < deadline_s:
            time.sleep(0.01)
            self._flush_lines()

    def wake(self) -> None:
        """Makes the thread call `tick` soon."""
        with contextlib.suppress(OSError):
            self._wake_fd.send(b"w")

    def flush(self, *, timeout_s: float) -> bool:
        """Waits until all messages are sent; returns whether they are."""
        with self._sent:
            return self._sent.wait_for(self._is_flushed, timeout_s)

    def close(self, *, timeout_s: float = 1.0) -> None:
        """Says goodbye and ends the thread; the other members stay linked."""
        self._outbox.append(Frame("bye", self._member))
        self._is_closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def abandon_in_child(self) -> None:
        """Closes the sockets that a forked child has inherited, without a goodbye."""
        for sock in [*self._lines, self._wake_fd, self._woken_fd, self._listener]:
            if sock is not None:
                sock.close()

    def _is_flushed(self) -> bool:
        lines = list(self._lines.values())
        return not self._outbox and not any(
            line.unsent or line.codec.has_held for line in lines
        )

    def _is_whole(self) -> bool:
        members = {line.member for line in list(self._lines.values())} - {None}
        if self._member == 0:
            return len(members) == self._num_members - 1
        return self._is_welcome

    def _serve(self) -> None:
        self._selector.register(self._woken_fd, selectors.EVENT_READ)
        try:
            if self._listener is not None:
                self._listener.setblocking(False)
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._connect()
            if self._alarm is not None:
                with contextlib.suppress(OSError):  # The program has closed it.
                    self._selector.register(self._alarm[0], selectors.EVENT_READ)
            self._loop()
        finally:
            for sock in [*self._lines, self._listener, self._wake_fd, self._woken_fd]:
                if sock is not None:
                    sock.close()
            self._selector.close()

    def _loop(self) -> None:
        wait_s: float | None = None
        close_by_s = None
        while True:
            for key, _ in self._selector.select(wait_s):
                self._handle(key.fileobj)
            while self._outbox:
                self._spread(self._outbox[0])
                self._outbox.popleft()
            self._flush_lines()
            wait_s = None if self._tick is None else self._tick()
            if self._reconnect_s is not None and not self._is_closing:
                if time.monotonic() >= self._reconnect_s:
                    self._connect()
                else:
                    wait_s = min(wait_s or _RETRY_S, _RETRY_S)
            if self._guests():
                wait_s = min(wait_s or _GUEST_TIMEOUT_S, _GUEST_TIMEOUT_S)
            if self._is_closing:
                close_by_s = close_by_s or time.monotonic() + 0.5
                if self._is_flushed() or time.monotonic() > close_by_s:
                    return
                wait_s = 0.05

    def _handle(self, sock: object) -> None:
        if sock is self._woken_fd:
            with contextlib.suppress(OSError):
                self._woken_fd.recv(4096)
        elif self._alarm is not None and sock == self._alarm[0]:
            self._selector.unregister(self._alarm[0])
            self._alarm[1]()
        elif sock is self._listener:
            self._accept()
        else:
            assert isinstance(sock, socket.socket)
            line = self._lines.get(sock)
            if line is not None:
                self._read(line)

    def _guests(self) -> list[StarLine]:
        """Returns lines that are not authenticated yet; drops the overdue ones."""
        guests = [line for line in self._lines.values() if line.member is None]
        oldest_s = time.monotonic() - _GUEST_TIMEOUT_S
        for line in guests:
            if line.began_s < oldest_s:
                self._drop(line)
        return guests

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:  # It left, or descriptors ran out: others come back.
            time.sleep(0.01)
            return
        guests = self._guests()
        if len(guests) >= _MAX_GUESTS:  # Members authenticate at once.
            self._drop(guests[0])
        self._add(sock, "center")

    def _connect(self) -> None:
        """Connects to the address; the other end is not authenticated yet."""
        assert self._address is not None
        self._reconnect_s = None
        while not self._is_closing and time.monotonic() < self._connect_by_s:
            try:
                sock = socket.create_connection(self._address, timeout=2.0)
            except OSError:
                time.sleep(_RETRY_S)
                continue
            line = self._add(sock, "member")
            line.is_center = True
            for frame in [Frame("hello", self._member), *self._unheard]:
                line.unsent += line.codec.encode(frame)
            self._flush_lines()
            return
        if not self._is_closing:
            self._lost(0, False)

    def _add(self, sock: socket.socket, side: Literal["center", "member"]) -> StarLine:
        line = StarLine(sock, Codec(self._key, self._purpose, side))
        self._lines[sock] = line
        self._selector.register(sock, selectors.EVENT_READ)
        return line

    def _read(self, line: StarLine) -> None:
        try:
            data = line.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # After a failure of the network, a reset may come as well.
            self._drop(line)
            return
        if not data:
            self._drop(line, has_died=True)
            return
        try:
            frames, answer = line.codec.feed(data)
            line.unsent += answer
            for frame in frames:
                self._take(line, frame)
        except FrameRefused as error:
            self._warn(line, error)
            self._drop(line)

    def _warn(self, line: StarLine, error: FrameRefused) -> None:
        if line.where in self._warned or len(self._warned) >= _MAX_WARNED:
            return
        self._warned.add(line.where)
        if self._refused is not None and isinstance(error, OtherJob):
            self._refused(line.where, error)
        else:
            _logger.warning(
                "Dropped a connection with %s on the link of the job (%s): %s.",
                *(line.where, self._purpose, error),
            )

    def _take(self, line: StarLine, frame: Frame) -> None:
        if not 0 <= frame.member < self._num_members:
            raise FrameRefused(f"it names member {frame.member} of {self._num_members}")
        if frame.kind == "tell":
            if self._told is None or frame.member != line.member:
                raise FrameRefused(f"member {frame.member} must not tell this")
            self._told(frame.member, frame.body)
            return
        if self._member != 0:
            if line.member is None and frame.kind == "doubled":
                raise Doubled(f"it has another member {self._member}")
            if line.member is None and frame.kind != "hello":
                raise FrameRefused("member 0 does not begin with a hello")
            if frame.kind == "say":
                self._heard(frame.member, frame.body)
            elif frame.kind == "lost":
                self._lost(frame.member, frame.body == _DIED)
            elif frame.kind == "bye":
                line.has_said_bye = True
            elif frame.member != 0:
                raise FrameRefused(f"member {frame.member} answers for member 0")
            else:
                line.member = 0
                self._is_welcome = True
                self._unheard.clear()
            return
        if line.member is None:
            known = {other.member for other in self._lines.values()}
            if frame.kind != "hello" or frame.member in known | {0}:
                line.unsent += line.codec.encode(Frame("doubled", 0))
                with contextlib.suppress(OSError):
                    line.flush()
                raise FrameRefused(f"it begins as member {frame.member}, which is here")
            line.member = frame.member
            line.unsent += line.codec.encode(Frame("hello", 0))
            line.unsent += b"".join(map(line.codec.encode, self._history))
            self._met.add(frame.member)
            return
        if frame.member != line.member or frame.kind not in ("say", "bye"):
            raise FrameRefused(f"member {line.member} speaks for member {frame.member}")
        self._num_said[frame.member] += 1
        if self._num_said[frame.member] > _MAX_SAID:
            raise FrameRefused(f"member {line.member} says too much")
        if frame.kind == "bye":
            line.has_said_bye = True
        else:
            self._spread(frame, but=line)
            self._heard(frame.member, frame.body)

    def _spread(self, frame: Frame, but: StarLine | None = None) -> None:
        is_kept = frame.kind == "say" or (
            frame.kind == "lost" and frame not in self._history
        )
        if self._member == 0 and is_kept:
            self._history.append(frame)
        if self._member != 0 and not self._is_welcome and frame.kind == "say":
            self._unheard.append(frame)  # Sent again if this line is not authenticated.
        for line in self._lines.values():
            if frame.kind == "tell" and len(line.unsent) > _MOST_UNSENT:
                continue
            if line is not but and (line.member is not None or line.is_center):
                line.unsent += line.codec.encode(frame)

    def _flush_lines(self) -> None:
        for line in list(self._lines.values()):
            try:
                line.flush()
                events = selectors.EVENT_READ
                if line.unsent:
                    events |= selectors.EVENT_WRITE
                self._selector.modify(line.sock, events)
            except OSError:
                self._drop(line)
        with self._sent:
            self._sent.notify_all()

    def _drop(self, line: StarLine, *, has_died: bool = False) -> None:
        if self._lines.pop(line.sock, None) is None:
            return
        self._selector.unregister(line.sock)
        line.sock.close()
        if line.is_center and line.member is None:
            # A stranger, or member 0 was too busy.
            self._reconnect_s = time.monotonic() + _RETRY_S
            return
        if line.member is None or line.has_said_bye:
            return
        if self._member == 0:
            self._spread(Frame("lost", line.member, _DIED if has_died else b""))
        if not self._is_closing:
            self._lost(line.member, has_died)
