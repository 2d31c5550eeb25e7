"""Launcher link: how does one launcher hear what fails on the other hosts of the job?

The launcher of host 0 listens one port above the coordinator; see `star`. Each launcher
sends its first failures to the others at once, so that all find the same culprit.
"""

import collections
import contextlib
import logging
import os
import threading
import time

import msgspec

from jdp.launch.endings import Exit
from jdp.replicas import wire
from jdp.runtime import addresses
from jdp.runtime.lifeline import star, star_codec, star_line
from jdp.watch.messages import Told

_PURPOSE = "launchers"
_MOST_PROCESSES = 1 << 31
_MOST_SIGNAL = 64  # of Linux.
_MOST_SAID = 40  # `star` limits the messages of one member.
_MOST_TOLD = 1000  # messages of watches that wait to be taken.
_POLL_S = 0.05
_MEET_S = 30.0  # A host that starts later than this does not hear of a failure.
_DECODER = msgspec.msgpack.Decoder(Exit)
_logger = logging.getLogger("jdp")


class LauncherLink:
    """The link of one launcher to all others, from the start of its job to its end.

    Attributes:
      node_rank: index of this host.
      fd: readable when `take` has something.
    """

    def __init__(
        self, node_rank: int, num_nodes: int, *, address: str, key: bytes, job: str = ""
    ):
        """Opens the link without waiting for the others.

        Args:
          node_rank: index of this host.
          num_nodes: number of hosts of the job.
          address: "host:port" of the coordinator of the job.
          key: key of the job, shape (32,).
          job: name of the job, which tells it from others with this key.

        Raises:
          OSError: host 0 cannot listen there.
        """
        host, port = addresses.split(address)
        place = host, find_port(port)
        self.node_rank = node_rank
        self._said: set[int] = set()
        self._heard: list[Exit] = []
        self._absent: dict[int, float] = {}
        self._refusals: list[str] = []
        self._told: collections.deque[Told] = collections.deque(maxlen=_MOST_TOLD)
        self._lock = threading.Lock()
        self._meet_by_s = time.monotonic() + _MEET_S
        listener = star_line.listen(*place) if node_rank == 0 else None
        self.fd, self._news_fd = os.pipe()
        os.set_blocking(self._news_fd, False)
        self._star = star.Star(
            node_rank,
            num_nodes,
            key=key,
            purpose=f"{_PURPOSE} {num_nodes} {job}".rstrip(),
            listener=listener,
            address=None if node_rank == 0 else place,
            connect_timeout_s=float("inf"),
            heard=self._hear,
            lost=self._lose,
            refused=self._refuse,
            told=self._note_told,
        )

    def say(self, end: Exit) -> None:
        """Reports a failure here to the others, once per process."""
        if end.node is not None or end.process_id in self._said:
            return
        if end.returncode != 0 and len(self._said) < _MOST_SAID:
            self._said.add(end.process_id)
            self._star.say(msgspec.msgpack.encode(end))

    def tell(self, body: bytes) -> None:
        """Sends a message of the watch to host 0, or from it to all; see `star`."""
        self._star.say(body, is_kept=False)

    def _note_told(self, node: int, body: bytes) -> None:
        del node  # Messages name it themselves.
        self._told.append(Told(body, time.monotonic_ns()))

    def take_told(self) -> list[Told]:
        """Returns the messages of other watches since the last call."""
        told = []
        while self._told:
            told.append(self._told.popleft())
        return told

    def say_absent(self, process_id: int) -> None:
        """Reports a process here that ended with 0 before `jdp.init`."""
        if process_id not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(process_id)
            self._star.say(msgspec.msgpack.encode(Exit(process_id, 0)))

    def say_failed(self, error: BaseException) -> None:
        """Reports that this launcher failed; waits for hosts that have not come yet.

        A launcher that leaves without a word leaves the others waiting for its
        processes.
        """
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        note = f"the launcher of node {self.node_rank} failed: {text.splitlines()[0]}"
        self._star.say(msgspec.msgpack.encode(Exit(-1, 1, note=note)))
        while self.meets_for_s():
            time.sleep(_POLL_S)

    def tell_end(self, end: Exit) -> None:
        """Takes a failure that all launchers hear of from elsewhere."""
        with self._lock:
            self._meet_by_s = 0.0  # No host has to hear of it from this one.
        self._add(check(end))

    def take(self) -> list[Exit]:
        """Returns the failures on other hosts since the last call."""
        with self._lock:
            heard, self._heard = self._heard, []
        return heard

    def take_absent(self) -> dict[int, float]:
        """Returns when processes on other hosts ended before `jdp.init`, by id."""
        with self._lock:
            return dict(self._absent)

    def take_refusals(self) -> list[str]:
        """Returns a line to show for each launcher refused since the last call."""
        with self._lock:
            refusals, self._refusals = self._refusals, []
        return refusals

    def meets_for_s(self) -> float:
        """Returns the seconds to wait for hosts that have not come; 0.0 if all have."""
        if self._star.has_met_all():
            return 0.0
        return max(0.0, self._meet_by_s - time.monotonic())

    def close(self) -> None:
        """Leaves the link; the others keep theirs."""
        self._star.close()
        os.close(self.fd)
        os.close(self._news_fd)

    def _hear(self, node: int, body: bytes) -> None:
        try:
            end = check(wire.decode_with(_DECODER.decode, body))
        except wire.DecodeError:
            _logger.warning(
                "The launcher of node %d has sent an invalid message.", node
            )
            return
        if end.returncode == 0:
            with self._lock:
                self._absent.setdefault(end.process_id, time.monotonic())
            return
        # Clocks of hosts differ: the time of arrival here counts.
        at_s = None if end.failed_at_s is None else time.monotonic()
        self._add(end._replace(node=node, failed_at_s=at_s))

    def _lose(self, node: int, has_died: bool) -> None:
        del has_died  # Its host may have failed as well.
        note = (
            f"the launcher of node {node} is gone: it was killed, or its host or the "
            "network failed"
        )
        self._add(Exit(-1, 1, node=node, note=note))

    def _refuse(self, where: str, error: star_codec.OtherJob) -> None:
        who = f"a launcher at {where}"
        if self.node_rank != 0:
            who = f"the launcher of node 0 at {where}"
        if isinstance(error, star_codec.OtherKey):
            todo = "give `--key-file` (or `JDP_JOB_KEY`) the same key on all hosts"
        elif isinstance(error, star_codec.Doubled):
            error = star_codec.Doubled(f"it has another node {self.node_rank}")
            todo = "`--node-rank` must be another one on each host"
        else:
            todo = "`--nodes`, `--coordinator` and `JDP_JOB_ID` must be the same on all"
        with self._lock:
            self._meet_by_s = 0.0  # It has come, but was refused.
            self._refusals.append(f"{who} was refused: {error}; {todo}")
        self._wake()

    def _add(self, end: Exit) -> None:
        with self._lock:
            self._heard.append(end)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._news_fd, b"n")


def say_refused(
    text: str, node_rank: int, num_nodes: int, *, address: str, key: bytes, job: str
) -> None:
    """Reports a launcher that does not begin; arguments are as for `LauncherLink`.

    Raises:
      OSError: host 0 cannot listen there.
      ValueError: `address` is not host:port.
    """
    link = LauncherLink(node_rank, num_nodes, address=address, key=key, job=job)
    try:
        link.say_failed(ValueError(text))
    finally:
        link.close()


def check(end: Exit) -> Exit:
    """Returns the end that another launcher reported, cleaned for a terminal.

    Raises:
      DecodeError: a process cannot end like that.
    """
    culprit = 0 if end.culprit is None else end.culprit
    if (
        not -1 <= end.process_id < _MOST_PROCESSES
        or not -_MOST_SIGNAL <= end.returncode < 256
        or (end.returncode == 0 and end != Exit(end.process_id, 0))
        or not 0 <= culprit < _MOST_PROCESSES
        or (end.process_id < 0 and not end.note)
    ):
        raise wire.DecodeError("no process ends like that")
    return end._replace(note=wire.printable(end.note))


def find_port(coordinator_port: int) -> int:
    """Returns the port of the link: one above the coordinator's, or below the last."""
    return coordinator_port + (1 if coordinator_port < 65535 else -1)
