"""Attendance: which workers have come, can they begin, and is the job over?

Workers are counted by index: a worker that is started again has another session, and is
the same worker.
"""

import logging

import msgspec

from jdp.parameter_server.leader_options import LeaderOptions
from jdp.parameter_server.messages import Identity, Index
from jdp.replicas import wire

_MOST_WORKERS = 1 << 16
_logger = logging.getLogger("jdp")


class AttendanceRecord(msgspec.Struct, frozen=True):
    """The part of an attendance that outlives server 0.

    Attributes:
      launch: id of the launcher that started the server; "" for none.
      came: the last session of each worker that has come.
      left: workers that have said goodbye.
    """

    launch: str
    came: dict[Index, Identity]
    left: tuple[Index, ...]


_decoder = msgspec.msgpack.Decoder(AttendanceRecord)


class Attendance:
    """Workers that have come and left; without clocks and files.

    The job is over when `num_workers` workers have come, at least one has said goodbye,
    and none takes part. Servers wait for workers that left without a goodbye. If a
    process was refused for its index, they also wait for workers that never came.
    """

    def __init__(self, options: LeaderOptions):
        self.has_changed = False  # since `encode`.
        self.has_rivals = (
            False  # an index was used twice, so another worker never comes.
        )
        self._num_workers = options.num_workers
        self._wait_s, self._launch = options.start_timeout_s, options.launch
        self._came: dict[int, bytes] = {}
        self._left: set[int] = set()
        self._earlier: AttendanceRecord | None = None
        self._empty_since_s: float | None = None

    def load(self, data: bytes) -> None:
        """Takes the record that server 0 wrote before it was killed.

        The record counts at once if the same launcher started both processes. Otherwise
        it counts once a worker of that run comes: it may belong to a finished run.
        """
        try:
            record = wire.decode_with(_decoder.decode, data)
        except wire.DecodeError:
            return
        self._earlier = record
        if record.launch and record.launch == self._launch:
            self._go_on()

    def encode(self) -> bytes:
        """Returns the record for `load`."""
        self.has_changed = False
        left = tuple(sorted(self._left))
        return msgspec.msgpack.encode(AttendanceRecord(self._launch, self._came, left))

    def come(self, worker: int, session: bytes, *, has_seen: bool) -> None:
        """Notes a worker; `has_seen`: it had parameters of these servers before."""
        self._empty_since_s = None
        earlier = self._earlier
        if earlier is not None and (has_seen or earlier.came.get(worker) == session):
            self._go_on()
        if self._came.get(worker) == session and worker not in self._left:
            return
        if worker in self._came or len(self._came) < _MOST_WORKERS:
            self._came[worker] = session
            self._left.discard(worker)
            self.has_changed = True

    def leave(self, session: bytes, worker: int | None = None) -> None:
        """Notes a goodbye; `worker` is None if the session is unknown."""
        earlier = self._earlier
        if earlier is not None and session in earlier.came.values():
            self._go_on()
        found = [w for w, known in self._came.items() if known == session]
        for each in found if worker is None else [worker]:
            if each in self._came and each not in self._left:
                self._left.add(each)
                self.has_changed = True

    def is_over(self, *, is_empty: bool, now_s: float) -> bool:
        """Whether the job is over; `is_empty`: no worker takes part."""
        if not is_empty:
            self._empty_since_s = None
            return False
        if self._empty_since_s is None:
            self._empty_since_s = now_s
        if self._num_workers is None or not self._left:
            return False
        has_all = len(self._came) >= self._num_workers
        if not has_all and not self.has_rivals:
            return False
        if has_all and not self._came.keys() - self._left:
            return True
        is_over = now_s >= self._empty_since_s + self._wait_s
        if is_over and not has_all:
            _logger.warning(
                "%d of %d workers have never come, and others had the same index: the "
                "job is over without them.",
                self._num_workers - len(self._came),
                self._num_workers,
            )
        return is_over

    def _go_on(self) -> None:
        """Continues with the earlier record."""
        earlier, self._earlier = self._earlier, None
        assert earlier is not None
        self._left |= set(earlier.left) - self._came.keys()
        self._came = {**earlier.came, **self._came}
        self.has_changed = True


class Gathering:
    """Wait for workers at the beginning of an epoch."""

    def __init__(self, options: LeaderOptions):
        self._options = options
        self._start_s: float | None = None  # when the first one came.
        self._is_over = False

    @property
    def has_ended(self) -> bool:
        """Whether the servers have stopped waiting for workers."""
        return self._is_over

    def begin(self, *, now_s: float) -> None:
        """Notes that a worker has come."""
        if self._start_s is None:
            self._start_s = now_s

    def is_over(self, num_here: int, *, is_first: bool, now_s: float) -> bool:
        """Whether the workers that take part can go on.

        Args:
          num_here: number of different workers that take part.
          is_first: whether there was no update and no restart of a server yet.
          now_s: the time.
        """
        if self._is_over or self._start_s is None:
            return self._is_over
        options = self._options
        wait_s = options.start_timeout_s if is_first else options.lease_s
        num_missing = (options.num_workers or 1) - num_here
        self._is_over = num_missing <= 0
        if num_missing > 0 and now_s >= self._start_s + wait_s:
            self._is_over = True
            _logger.warning(
                "%d of %d workers have not come within %g s; the others go on "
                "without them.",
                num_missing,
                options.num_workers,
                wait_s,
            )
        return self._is_over
