"""Leader: which pushes make an update, and when does a worker get parameters?

Server 0 decides for all servers, and writes what it decides to a log. Every server
executes the log in order (see `follower`), so all servers pass through the same
versions. Therefore a pull is one snapshot of all servers, a checkpoint lies at one
version, and no old parameters are kept.

A push is ready once all servers hold their part. A server that was killed has lost
parts and updates that the others still have. Then all servers return to the newest
checkpoint that all have: a new log with a higher epoch begins, with a `Restore` as its
first entry.
"""

import logging

from jdp.parameter_server import members, push_selection
from jdp.parameter_server.attendance import Attendance, Gathering
from jdp.parameter_server.checkpoint_schedule import CheckpointSchedule
from jdp.parameter_server.decision_log import DecisionLog
from jdp.parameter_server.leader_options import LeaderOptions
from jdp.parameter_server.members import Member
from jdp.parameter_server.messages import (
    Discard,
    DropSession,
    FollowerStatus,
    HandOut,
    KeepCheckpoint,
    LeaderLog,
    LogEntry,
    MessageError,
    Outcome,
    Pull,
    Push,
    SaveCheckpoint,
    Settled,
    Stop,
    Version,
)
from jdp.parameter_server.modes import Sync
from jdp.parameter_server.worker_indices import WorkerIndices

_MOST_EPOCH = 1 << 40  # that another server may report.
_logger = logging.getLogger("jdp")


class Leader:
    """State machine of server 0; pure, without clocks and sockets.

    Report events, then call `decide` and execute the entries that it returns; the
    state of this class is already the state after them. After a `Restore`, call
    `restored` with the settled pushes of the checkpoint before anything else.
    """

    def __init__(self, options: LeaderOptions, incarnation: bytes):
        """Begins before the first epoch.

        Args:
          options: options of server 0.
          incarnation: random bytes that identify this process.
        """
        self.options = options
        self.is_running = False
        self.counts: dict[Outcome, int] = {"applied": 0, "late": 0, "rejected": 0}
        self._incarnation = incarnation
        self._followers: dict[int, FollowerStatus] = {}
        self._members: dict[bytes, Member] = {}
        self._round: dict[bytes, Push] = {}  # of `sync`: pushes for this version.
        self._ready: list[bytes] = []  # sessions whose push all servers hold.
        self._settled: dict[bytes, Settled] = {}
        self.attendance = Attendance(options)
        self.worker_indices = WorkerIndices(options.lease_s)
        self._gathering = Gathering(options)
        self._log = DecisionLog(incarnation)
        self._schedule = CheckpointSchedule(options.checkpoint_every)

    @property
    def version(self) -> Version:
        """The version after the last decision."""
        return self._log.version

    def set_checkpoints(
        self, counts: tuple[int, ...], epoch: int, runs: tuple[bytes, ...] = ()
    ) -> None:
        """Sets the checkpoints that this server has; call it whenever they change.

        Args:
          counts: update counts of the checkpoints.
          epoch: the highest epoch that this server knows.
          runs: the run of each checkpoint; (): unknown.
        """
        self._schedule.set_own(counts, epoch, runs)

    def update_follower(self, status: FollowerStatus) -> None:
        """Takes the status of another server.

        Raises:
          MessageError: the status is impossible.
        """
        if (
            not 0 < status.server < self.options.num_servers
            or status.epoch > _MOST_EPOCH
            or self._log.find_next_index(status) > self._log.end
            or len(status.runs) not in (0, len(status.checkpoints))
        ):
            raise MessageError("sent the status of a server that cannot be")
        before = self._followers.get(status.server)
        self._followers[status.server] = status
        if not self.is_running:
            return
        is_new = before is None or before.incarnation != status.incarnation
        is_elsewhere = (
            status.leader not in (b"", self._incarnation)
            and status.epoch >= self.version.epoch
        )
        if is_new or is_elsewhere:
            _logger.warning(
                "Server %d started again: all servers return to a checkpoint.",
                status.server,
            )
            self.start_over()
            return
        if status.is_stopping:
            self._schedule.request()
        self._find_ready()

    def join(
        self,
        session: bytes,
        worker: int,
        *,
        now_s: float,
        has_seen: bool = False,
        process: str = "",
    ) -> bool:
        """Takes a hello, perhaps a repeated one; returns whether the worker takes part.

        Args:
          session: session of the worker.
          worker: index of the worker.
          now_s: the time.
          has_seen: whether the worker has had parameters of these servers before.
          process: host and process of the worker, as text.
        """
        if not self.is_running or self.is_over:
            return False
        may_come, lost = self.worker_indices.take(worker, session, process, now_s=now_s)
        if lost in self._members:
            self._remove(lost)
        if not may_come:
            return False
        self.attendance.come(worker, session, has_seen=has_seen)
        if session in self._members:
            self.renew_lease(session, now_s=now_s)
            return True
        clock = members.find_clock(self._members)
        lease_end_s = now_s + self.options.lease_s
        self._members[session] = Member(worker, lease_end_s, clock, self._log.end)
        self._gathering.begin(now_s=now_s)
        return True

    def renew_lease(self, session: bytes, *, now_s: float) -> bool:
        """Notes a message of a worker; returns whether the worker takes part."""
        member = self._members.get(session)
        if member is None:
            return False
        member.lease_end_s = now_s + self.options.lease_s
        self.worker_indices.hear(member.worker, session, now_s=now_s)
        return True

    def leave(self, session: bytes, *, now_s: float = 0.0) -> None:
        """Takes the goodbye of a worker."""
        member = self._members.get(session)
        self.renew_lease(session, now_s=now_s)
        self.attendance.leave(session, None if member is None else member.worker)
        if member is not None:
            self._remove(session)

    def push(self, push: Push) -> None:
        """Notes that server 0 holds its part of a push."""
        member = self._members.get(push.session)
        if member is None or push.sequence <= self._last_sequence(push.session):
            return
        # One at a time: the previous push may be part of a round already.
        if member.push is None:
            member.push = push
            self._find_ready()

    def pull(self, pull: Pull) -> None:
        """Takes the request of a worker for parameters."""
        member = self._members.get(pull.session)
        if member is not None:
            member.pull = pull

    def request_checkpoint(self) -> None:
        """Asks for a checkpoint of the current version, for example at SIGTERM."""
        self._schedule.request()

    def pop_objection(self, session: bytes) -> str:
        """Returns why a worker cannot have its index, once; "" if it can."""
        text = self.worker_indices.pop_objection(session)
        self.attendance.has_rivals |= bool(text)
        return text

    def find_awaited(self) -> tuple[int, ...]:
        """Returns the indices of the workers that pushes wait for."""
        is_sync = isinstance(self.options.mode, Sync)
        is_gathering = is_sync and not self._gathering.has_ended
        return members.find_awaited(
            self._members,
            self._round if is_sync else None,
            num_expected=self.options.num_workers or 0 if is_gathering else 0,
        )

    @property
    def num_waiting(self) -> int:
        """Number of pushes that are not settled."""
        return sum(m.push is not None for m in self._members.values())

    def decide(self, *, now_s: float) -> list[LogEntry]:
        """Returns the entries that follow from the events so far.

        Raises:
          NoCheckpointError: there were checkpoints, and none is left that all have.
        """
        if not self.is_running:
            self._begin_epoch()
        elif not self.is_over:
            self._decide(now_s)
        return self._log.take(self._followers.values()) if self.is_running else []

    def restored(self, settled: dict[bytes, Settled]) -> None:
        """Takes the settled pushes of the checkpoint after a `Restore`."""
        self._settled = dict(settled)

    def find_log(self, server: int) -> LeaderLog | None:
        """Returns the entries that another server has not executed; None if none.

        They are sent again until the status of that server shows that it has them.
        """
        status = self._followers.get(server)
        if not self.is_running or status is None:
            return None
        return self._log.find_unsent(status)

    def has_all(self) -> bool:
        """Whether all servers have executed the whole log."""
        return self._log.find_least_index(self._followers.values()) >= self._log.end

    @property
    def is_over(self) -> bool:
        """Whether the log has ended because all workers have left."""
        return self._log.is_over

    def start_over(self) -> None:
        """Drops all workers; the next decision restores a checkpoint in a new epoch."""
        self.is_running = False
        self._members.clear()
        self.worker_indices.clear()
        self._round.clear()
        self._ready.clear()
        self._gathering = Gathering(self.options)

    def _decide(self, now_s: float) -> None:
        count = self._schedule.take_common(self._log, self._followers)
        if count is not None:
            self._append(KeepCheckpoint(count))
        self._end_leases(now_s)
        if isinstance(self.options.mode, Sync):
            self._fill_round()
            self._close_round(self.options.mode, now_s)
        else:
            while self._apply_one():
                pass
        self._hand_out()
        self._save_if_due()
        if self.attendance.is_over(is_empty=not self._members, now_s=now_s):
            self._end()

    def _begin_epoch(self) -> None:
        """Begins an epoch, once the checkpoints of all servers are known."""
        has_all = len(self._followers) >= self.options.num_servers - 1
        version = self._schedule.begin_epoch(self._followers) if has_all else None
        if version is not None:
            self.is_running = True
            self._log.begin(version)

    def _save_if_due(self) -> None:
        if self._schedule.take_save(self._log, self._followers):
            self._append(SaveCheckpoint())

    def _last_sequence(self, session: bytes) -> int:
        settled = self._settled.get(session)
        return 0 if settled is None else settled.sequence

    def _find_ready(self) -> None:
        """Queues the pushes that all servers hold by now."""
        held = self._log.find_held(self._followers.values())
        for session in members.find_held(self._members, held):
            if session not in self._ready and session not in self._round:
                self._ready.append(session)

    def _end_leases(self, now_s: float) -> None:
        for session, member in list(self._members.items()):
            if now_s >= member.lease_end_s:
                _logger.warning(
                    "Worker %d has been silent for %g s; it is left out until it "
                    "comes back.",
                    *(member.worker, self.options.lease_s),
                )
                self._remove(session)

    def _remove(self, session: bytes) -> None:
        self.worker_indices.release(self._members.pop(session).worker, session)
        if session in self._ready:
            self._ready.remove(session)
        # A push that came in time counts in its round although its worker is gone.
        if session not in self._round:
            self._append(DropSession(session))

    def _fill_round(self) -> None:
        """Adds ready pushes for this version to the round, and discards late ones."""
        in_time, late = push_selection.split_ready(
            self._ready, self._members, self.version
        )
        self._ready.clear()
        self._round.update((push.session, push) for push in in_time)
        for push in late:
            self._append(Discard(push.session, push.sequence, "late"))

    def _close_round(self, mode: Sync, now_s: float) -> None:
        num_missing = len(self._members.keys() - self._round.keys())
        may_start = self._may_start(now_s)
        if not may_start or not self._round or num_missing > mode.backup:
            return
        pushes = push_selection.sort_round([*self._round.values()], self._members)
        self._round.clear()
        good = [p for p in pushes if not self._is_rejected(p)]
        if good:
            self._apply(good)
        for push in pushes:
            if push not in good:
                self._append(Discard(push.session, push.sequence, "rejected"))
            if push.session not in self._members:
                self._append(DropSession(push.session))

    def _may_start(self, now_s: float) -> bool:
        here = {m.worker for m in self._members.values()}
        # After a restore the workers still run and come back soon, or never.
        is_first = self.version == Version(1, 0)
        return self._gathering.is_over(len(here), is_first=is_first, now_s=now_s)

    def _apply_one(self) -> bool:
        """Settles one ready push; False if every ready push must wait."""
        found = push_selection.find_next(self._ready, self._members, self.options.mode)
        if found is None:
            return False
        session, push = found
        self._ready.remove(session)
        # The clock advances whatever the outcome: others must not wait for it.
        self._members[session].clock += 1
        if self._is_rejected(push):
            self._append(Discard(push.session, push.sequence, "rejected"))
        else:
            self._apply([push])
        return True

    def _is_rejected(self, push: Push) -> bool:
        return self.options.nonfinite == "reject" and not push.is_finite

    def _apply(self, pushes: list[Push]) -> None:
        self._append(push_selection.make_update(pushes, self.version))
        if self._schedule.note_update(self.version):
            self._save_if_due()

    def _hand_out(self) -> None:
        for session, member in self._members.items():
            pull = member.pull
            if pull is not None and pull.after <= self._last_sequence(session):
                member.pull = None
                self._append(HandOut(session, pull.pull))

    def _end(self) -> None:
        """Ends the log, with a checkpoint of the last version.

        Also if an earlier attempt failed on some server: it may succeed now.
        """
        if not self._schedule.is_saved_everywhere(self.version, self._followers):
            self._append(SaveCheckpoint())
        self._append(Stop())

    def _append(self, entry: LogEntry) -> None:
        """Adds an entry to the log, and updates the state accordingly."""
        for session, settled in self._log.append(entry).items():
            self._settled[session] = settled
            self.counts[settled.outcome] += 1
            member = self._members.get(session)
            if member is not None:
                member.push = None
        if isinstance(entry, SaveCheckpoint):
            self._schedule.note_save(self._log)
