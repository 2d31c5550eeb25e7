"""Transfer: one collective over links, all its sends and receives at once.

One thread moves the bytes of all links, as the kernel takes and has them. A piece that
has come may cause further sends, so a collective is pipelined over its pieces.
"""

import collections
import select
import struct
import time
from collections.abc import Callable, Mapping
from socket import socket
from typing import Any

import numpy as np

_HEADER = struct.Struct("<4sIQ")  # before the first bytes to each peer.
_MAGIC = b"jdp\n"
_PERIOD_S = 0.05  # between looks at an abort and the deadline.
# A peer may end after its part of a collective, while others are still in it.
_MOST_AFTER_END_S = 1.0


class LinkBroken(RuntimeError):
    """A peer has ended, is silent, or does something else.

    Attributes:
      rank: rank of the peer.
      why: "ended", "silent" or "other".
    """

    def __init__(self, rank: int, why: str):
        super().__init__(f"the link to rank {rank}: {why}")
        self.rank, self.why = rank, why


class Aborted(RuntimeError):
    """This process has given up the collective."""


class Transfer:
    """Sends and receives of one collective."""

    def __init__(
        self,
        sockets: Mapping[int, socket],
        call: int,
        number: int,
        *,
        timeout_s: float,
        is_aborted: Callable[[], bool],
    ):
        """Begins without a send.

        Args:
          sockets: non-blocking connections by the rank of the peer.
          call: identifier of the operation, equal on all ranks.
          number: number of earlier collectives over these links.
          timeout_s: longest time without a byte to or from any peer.
          is_aborted: returns whether to give up; asked every 0.05 s.
        """
        self._sockets = sockets
        self._header = _HEADER.pack(_MAGIC, call, number)
        self._timeout_s, self._is_aborted = timeout_s, is_aborted
        self._sends: dict[int, collections.deque[memoryview]] = {}
        self._receives: dict[
            int, collections.deque[tuple[memoryview, Callable[[], None] | None]]
        ] = {}
        self.waited_ns = 0

    def send(self, rank: int, x: np.ndarray) -> None:
        """Sends the bytes of a contiguous array, after earlier sends to `rank`."""
        queue = self._sends.get(rank)
        if queue is None:
            queue = self._sends[rank] = collections.deque()
            queue.append(memoryview(self._header))
        if x.nbytes:
            queue.append(_bytes_of(x))

    def receive(
        self, rank: int, x: np.ndarray, then: Callable[[], None] | None = None
    ) -> None:
        """Receives into a contiguous array, after earlier receives from `rank`.

        Args:
          rank: the peer.
          x: array to fill.
          then: called when it is full.
        """
        queue = self._receives.get(rank)
        if queue is None:
            queue = self._receives[rank] = collections.deque()
            header = bytearray(_HEADER.size)
            queue.append((memoryview(header), lambda: self._check(rank, header)))
        if x.nbytes:
            queue.append((_bytes_of(x), then))
        elif then is not None:
            queue.append((memoryview(b""), then))

    def run(self) -> None:
        """Moves all bytes.

        Raises:
          LinkBroken: a peer has ended, is silent, or is in another collective.
          Aborted: `is_aborted` returned True.
        """
        moved_s = time.monotonic()
        while True:
            has_moved = any([self._flush(rank) for rank in list(self._sends)])
            has_moved |= any([self._fill(rank) for rank in list(self._receives)])
            sending = [rank for rank, queue in self._sends.items() if queue]
            receiving = [rank for rank, queue in self._receives.items() if queue]
            if not sending and not receiving:
                return
            if has_moved:
                moved_s = 0.0
                continue
            now_s = time.monotonic()
            moved_s = moved_s or now_s
            self._wait(sending, receiving, now_s - moved_s)
            self.waited_ns += int((time.monotonic() - now_s) * 1e9)

    def _flush(self, rank: int) -> bool:
        """Sends to a peer as much as the kernel takes now; returns whether any."""
        queue, has_moved = self._sends[rank], False
        while queue:
            try:
                count = self._sockets[rank].send(queue[0])
            except (BlockingIOError, InterruptedError):
                return has_moved
            except OSError as error:
                raise LinkBroken(rank, "ended") from error
            has_moved = True
            if count < len(queue[0]):
                queue[0] = queue[0][count:]
            else:
                queue.popleft()
        return has_moved

    def _fill(self, rank: int) -> bool:
        """Receives from a peer as much as the kernel has now; returns whether any."""
        queue, has_moved = self._receives[rank], False
        while queue:
            x, then = queue[0]
            count = 0
            if len(x):
                try:
                    count = self._sockets[rank].recv_into(x)
                except (BlockingIOError, InterruptedError):
                    return has_moved
                except OSError as error:
                    raise LinkBroken(rank, "ended") from error
                if count == 0:
                    raise LinkBroken(rank, "ended")
            has_moved = True
            if count < len(x):
                queue[0] = x[count:], then
                continue
            queue.popleft()
            if then is not None:
                then()
        return has_moved

    def _wait(self, sending: list[int], receiving: list[int], silent_s: float) -> None:
        """Waits until bytes can be moved, or until it is time to look again."""
        events = {rank: select.POLLIN for rank in receiving}
        for rank in sending:
            events[rank] = events.get(rank, 0) | select.POLLOUT
        others = []
        if silent_s > _MOST_AFTER_END_S:
            others = [rank for rank in self._sockets if rank not in events]
            events |= dict.fromkeys(others, select.POLLRDHUP)
        poll, rank_of = select.poll(), {}
        for rank, event in events.items():
            connection = self._sockets[rank]
            rank_of[connection.fileno()] = rank
            poll.register(connection, event)
        for descriptor, _ in poll.poll(1e3 * _PERIOD_S):
            if rank_of[descriptor] in others:
                raise LinkBroken(rank_of[descriptor], "ended")
        if self._is_aborted():
            raise Aborted("the collective was given up")
        if silent_s > self._timeout_s:
            raise LinkBroken((receiving or sending)[0], "silent")

    def _check(self, rank: int, header: bytearray) -> None:
        if header != self._header:
            raise LinkBroken(rank, "other")


def _bytes_of(x: np.ndarray) -> memoryview:
    flat: Any = x.reshape(-1).view(np.uint8)
    return memoryview(flat)
