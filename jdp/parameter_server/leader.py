"""Protocol: what server 0 decides, for all servers.

It keeps a log: which pushes make an update, who is handed parameters, when a checkpoint
is written. Every server executes the log in its order (see `replica`), so that they
have the same version wherever it matters: a pull is one snapshot of all servers, a
checkpoint lies at one version, and no old parameters are kept for that.

A push has come when all servers have their part. A server that was killed has lost what
others still have, so all go back to the newest checkpoint that all have: a new log,
whose first entry says so, with a higher epoch.
"""

import logging

from jdp.parameter_server import members
from jdp.parameter_server.attendance import Attendance, Gathering
from jdp.parameter_server.leader_options import LeadOptions
from jdp.parameter_server.members import Member
from jdp.parameter_server.messages import (
    Apply,
    Discard,
    Entry,
    Follow,
    Forget,
    Hand,
    Keep,
    Log,
    MessageError,
    Outcome,
    Pull,
    Push,
    Restore,
    Save,
    Settled,
    Stop,
    Version,
)
from jdp.parameter_server.modes import Sync
from jdp.parameter_server.restoring import find_common, settle
from jdp.parameter_server.worker_numbers import WorkerNumbers

_MOST_SENT = 256  # entries of the log in one message.
_MOST_SAVES = 2  # checkpoints that not all servers have written or failed to write.
_MOST_EPOCH = 1 << 40  # that another server may know of.
_MOST_STALENESS = (1 << 31) - 1  # the optimizer gets an int32.
_logger = logging.getLogger("jdp")


class Lead:
    """State machine of server 0; pure, without clocks and sockets.

    Call what has happened, then `decide`, then execute what it returns: entries of the
    log, each of which this state already goes by. After a `Restore`, call `restored`
    with what the checkpoint has, before anything else.
    """

    def __init__(self, options: LeadOptions, incarnation: bytes):
        """Begins before the first epoch.

        Args:
          options: of the job.
          incarnation: random, of this process.
        """
        self.options = options
        self.version = Version()
        self.is_running = False
        self.counts: dict[Outcome, int] = {"applied": 0, "late": 0, "rejected": 0}
        self._incarnation = incarnation
        self._own: tuple[tuple[int, ...], int] | None = None
        self._own_runs: tuple[bytes, ...] = ()
        self._common = 0  # count of the newest checkpoint that all servers have.
        self._followers: dict[int, Follow] = {}
        self._members: dict[bytes, Member] = {}
        self._round: dict[bytes, Push] = {}  # of `sync`: what came for this version.
        self._ready: list[bytes] = []  # sessions whose push all servers have.
        self._settled: dict[bytes, Settled] = {}
        self.attendance = Attendance(options)
        self.numbers = WorkerNumbers(options.lease_s)
        self._gathering = Gathering(options)
        self._log: list[Entry] = []
        self._first_index = 0  # of what `_log` still has.
        self._num_returned = 0  # entries of the log that `decide` has returned.
        self._wants_save = False  # somebody does, now.
        self._is_due = False  # a checkpoint, once the last ones are written.
        self._saved = Version()
        self._saves: list[int] = []  # indices in the log, not executed by all.
        self._highest_epoch = 0

    def begin(
        self, checkpoints: tuple[int, ...], epoch: int, runs: tuple[bytes, ...] = ()
    ) -> None:
        """Says which checkpoints this server has, and the highest epoch it knows.

        At first, and whenever it has others.
        """
        self._own = (checkpoints, epoch)
        self._own_runs = runs

    def follow(self, status: Follow) -> None:
        """Another server says where it is.

        Raises:
          MessageError: it cannot be there.
        """
        end = self._first_index + len(self._log)
        if (
            not 0 < status.server < self.options.num_servers
            or status.epoch > _MOST_EPOCH
            or self._next_index(status) > end
            or len(status.runs) not in (0, len(status.checkpoints))
        ):
            raise MessageError("says that a server is where it cannot be")
        before = self._followers.get(status.server)
        self._followers[status.server] = status
        if not self.is_running:
            return
        is_new = before is None or before.incarnation != status.incarnation
        is_elsewhere = (
            status.lead not in (b"", self._incarnation)
            and status.epoch >= self.version.epoch
        )
        if is_new or is_elsewhere:
            _logger.warning(
                "Server %d began anew: all servers go back to a checkpoint.",
                status.server,
            )
            self.start_over()
            return
        if status.is_stopping:
            self._wants_save = True
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
        """A worker says hello, maybe again; returns whether it may come in."""
        if not self.is_running or self.is_over:
            return False
        may_come, lost = self.numbers.take(worker, session, process, now_s=now_s)
        if lost in self._members:
            self._remove(lost)
        if not may_come:
            return False
        self.attendance.come(worker, session, has_seen=has_seen)
        if session in self._members:
            self.hear(session, now_s=now_s)
            return True
        clock = members.find_clock(self._members)
        lease_end_s = now_s + self.options.lease_s
        self._members[session] = Member(
            worker, lease_end_s, clock, self._first_index + len(self._log)
        )
        self._gathering.begin(now_s=now_s)
        return True

    def hear(self, session: bytes, *, now_s: float) -> bool:
        """A worker said something; returns whether it is known."""
        member = self._members.get(session)
        if member is None:
            return False
        member.lease_end_s = now_s + self.options.lease_s
        self.numbers.hear(member.worker, session, now_s=now_s)
        return True

    def leave(self, session: bytes, *, now_s: float = 0.0) -> None:
        """A worker goes on purpose."""
        member = self._members.get(session)
        self.hear(session, now_s=now_s)
        self.attendance.leave(session, None if member is None else member.worker)
        if member is not None:
            self._remove(session)

    def push(self, push: Push) -> None:
        """Server 0 has its part of a push."""
        member = self._members.get(push.session)
        if member is None or push.sequence <= self._last_sequence(push.session):
            return
        # One at a time: the one before may be in a round by now.
        if member.push is None:
            member.push = push
            self._find_ready()

    def pull(self, pull: Pull) -> None:
        """A worker asks for parameters."""
        member = self._members.get(pull.session)
        if member is not None:
            member.pull = pull

    def save(self) -> None:
        """Asks for a checkpoint, such as at SIGTERM."""
        self._wants_save = True

    def find_rivalry(self, session: bytes) -> str:
        """Returns why a worker cannot have its number, once; "" if it may."""
        text = self.numbers.pop_objection(session)
        self.attendance.has_rivals |= bool(text)
        return text

    def find_awaited(self) -> tuple[int, ...]:
        """Returns the workers that pushes wait for, by number."""
        is_sync = isinstance(self.options.mode, Sync)
        is_gathering = is_sync and not self._gathering.has_ended
        return members.find_awaited(
            self._members,
            self._round if is_sync else None,
            num_expected=self.options.num_workers or 0 if is_gathering else 0,
        )

    @property
    def num_waiting(self) -> int:
        """Pushes that are not settled."""
        return sum(m.push is not None for m in self._members.values())

    def decide(self, *, now_s: float) -> list[Entry]:
        """Returns the entries that follow from what has happened.

        Raises:
          NoCheckpointError: there were checkpoints, and none is left that all have.
        """
        if not self.is_running:
            return self._restore()
        if self.is_over:
            return self._take()
        self._keep()
        self._end_leases(now_s)
        if isinstance(self.options.mode, Sync):
            self._fill_round()
            self._close_round(self.options.mode, now_s)
        else:
            while self._apply_one():
                pass
        self._hand_out()
        self._save_if_due()
        is_empty = not self._members
        if self.attendance.is_over(is_empty=is_empty, now_s=now_s):
            self._end()
        return self._take()

    def restored(self, settled: dict[bytes, Settled]) -> None:
        """A `Restore` was executed; `settled` is what the checkpoint has of pushes."""
        self._settled = dict(settled)

    def find_log(self, server: int) -> Log | None:
        """Returns what another server has not executed yet; None if there is nothing.

        It is sent until the server says that it has it.
        """
        status = self._followers.get(server)
        if not self.is_running or status is None:
            return None
        first = max(self._next_index(status), self._first_index)
        entries = self._log[first - self._first_index :][:_MOST_SENT]
        if not entries:
            return None
        return Log(self._incarnation, self.version.epoch, first, tuple(entries))

    def has_all(self) -> bool:
        """Whether all servers have all of the log."""
        end = self._first_index + len(self._log)
        return all(self._next_index(f) >= end for f in self._followers.values())

    def _restore(self) -> list[Entry]:
        """Begins an epoch, once it is known which checkpoints all servers have."""
        if self._own is None or len(self._followers) < self.options.num_servers - 1:
            return []
        common = find_common(self._own[0], self._followers, self._own_runs)
        known = [f.epoch for f in self._followers.values()]
        epoch = 1 + max(self._own[1], self._highest_epoch, *known, 0)
        self.version = self._saved = Version(epoch, common)
        self._common = common
        self._highest_epoch = epoch
        self.is_running = True
        self._log, self._first_index, self._num_returned = [], 0, 0
        self._saves, self._is_due = [], False
        self._append(Restore(self.version))
        return self._take()

    def start_over(self) -> None:
        """Goes back to what all servers have now, in another epoch."""
        self.is_running = False
        self._members.clear()
        self.numbers.clear()
        self._round.clear()
        self._ready.clear()
        self._gathering = Gathering(self.options)

    def _save_if_due(self) -> None:
        """Lets all write a checkpoint, unless they have not written the last ones.

        So a server has few that others lack, and there are always some that all have.
        """
        end = self._first_index + len(self._log)
        done = min(map(self._next_index, self._followers.values()), default=end)
        self._saves = [i for i in self._saves if i >= done]
        if self._wants_save or self._is_due and len(self._saves) < _MOST_SAVES:
            self._wants_save = self._is_due = False
            if self._saved != self.version:
                self._append(Save())

    def _keep(self) -> None:
        """Tells all servers when there is a newer checkpoint that all have."""
        assert self._own is not None
        counts = [c for c in self._own[0] if c > self._common]
        # Not those that say what they had before they executed the `Restore`.
        if not counts or not all(map(self._next_index, self._followers.values())):
            return
        for count in reversed(counts):
            if all(count in f.checkpoints for f in self._followers.values()):
                self._common = count
                self._append(Keep(count))
                return

    def _last_sequence(self, session: bytes) -> int:
        settled = self._settled.get(session)
        return 0 if settled is None else settled.sequence

    def _find_ready(self) -> None:
        """Queues the pushes that all servers have by now."""
        held = [(self._next_index(f), set(f.held)) for f in self._followers.values()]
        for session in members.find_held(self._members, held):
            if session not in self._ready and session not in self._round:
                self._ready.append(session)

    def _end_leases(self, now_s: float) -> None:
        for session, member in list(self._members.items()):
            if now_s >= member.lease_end_s:
                _logger.warning(
                    "Worker %d has been silent for %g s; it is left out until it "
                    "comes back.",
                    member.worker,
                    self.options.lease_s,
                )
                self._remove(session)

    def _remove(self, session: bytes) -> None:
        self.numbers.release(self._members.pop(session).worker, session)
        if session in self._ready:
            self._ready.remove(session)
        # What a worker has pushed in time counts in its round, though it is gone.
        if session not in self._round:
            self._append(Forget(session))

    def _fill_round(self) -> None:
        """Takes what came for this version; what is late is dropped."""
        for session in self._ready:
            push = self._members[session].push
            assert push is not None
            if push.version != self.version:
                self._discard(push, "late")
            else:
                self._round[session] = push
        self._ready.clear()

    def _close_round(self, mode: Sync, now_s: float) -> None:
        num_missing = len(self._members.keys() - self._round.keys())
        if not self._may_start(now_s) or not self._round:
            return
        if num_missing > mode.backup:
            return
        # In one order, that of the workers: a sum of floats depends on it.
        numbers = {s: m.worker for s, m in self._members.items()}
        pushes = sorted(
            self._round.values(), key=lambda p: (numbers.get(p.session, 0), p.session)
        )
        self._round.clear()
        good = [p for p in pushes if not self._is_rejected(p)]
        if good:
            self._apply(good)
        for push in pushes:
            if push not in good:
                self._discard(push, "rejected")
            if push.session not in self._members:
                self._append(Forget(push.session))

    def _may_start(self, now_s: float) -> bool:
        here = {m.worker for m in self._members.values()}
        # After a restore the workers are there and come back soon, or never.
        is_first = self.version == Version(1, 0)
        return self._gathering.is_over(len(here), is_first=is_first, now_s=now_s)

    def _apply_one(self) -> bool:
        """Settles one push, unless all that are here have to wait."""
        for session in self._ready:
            member = self._members[session]
            push = member.push
            assert push is not None
            if members.is_too_far_ahead(member, self._members, self.options.mode):
                continue
            self._ready.remove(session)
            # A turn, whatever its outcome: no worker waits for one that pushes.
            member.clock += 1
            if self._is_rejected(push):
                self._discard(push, "rejected")
            else:
                self._apply([push])
            return True
        return False

    def _is_rejected(self, push: Push) -> bool:
        return self.options.nonfinite == "reject" and not push.is_finite

    def _apply(self, pushes: list[Push]) -> None:
        # Of an epoch that is gone, a count says nothing but that it is not newer.
        oldest = min(p.version.count for p in pushes)
        staleness = min(max(0, self.version.count - oldest), _MOST_STALENESS)
        self._append(
            Apply(
                tuple((p.session, p.sequence) for p in pushes),
                tuple(p.weight for p in pushes),
                staleness,
            )
        )
        every = self.options.checkpoint_every
        if every and self.version.count % every == 0:
            self._is_due = True
            self._save_if_due()

    def _discard(self, push: Push, outcome: Outcome) -> None:
        self._append(Discard(push.session, push.sequence, outcome))

    def _hand_out(self) -> None:
        for session, member in self._members.items():
            pull = member.pull
            if pull is not None and pull.after <= self._last_sequence(session):
                member.pull = None
                self._append(Hand(session, pull.pull))

    @property
    def is_over(self) -> bool:
        """Whether the log ends: all workers have left."""
        return self._log[-1:] == [Stop()]

    def _end(self) -> None:
        """Ends the log, with a checkpoint of what was trained.

        Also where one of this version could not be written everywhere: now it may be.
        """
        assert self._own is not None
        has = [self._own[0], *(f.checkpoints for f in self._followers.values())]
        if not all(self.version.count in counts for counts in has):
            self._append(Save())
        self._append(Stop())

    def _append(self, entry: Entry) -> None:
        """Adds to the log, and goes by it."""
        self._log.append(entry)
        self.version, settled = settle(self.version, entry)
        for session, found in settled.items():
            self._settled[session] = found
            self.counts[found.outcome] += 1
            member = self._members.get(session)
            if member is not None:
                member.push = None
        if isinstance(entry, Save):
            self._saved = self.version
            self._saves.append(self._first_index + len(self._log) - 1)

    def _take(self) -> list[Entry]:
        """Returns what is new in the log, and drops what all servers have executed."""
        end = self._first_index + len(self._log)
        entries = self._log[self._num_returned - self._first_index :]
        self._num_returned = end
        least = min(map(self._next_index, self._followers.values()), default=end)
        # Its end stays, to be looked at.
        keep = max(0, min(least - self._first_index, len(self._log) - 1))
        del self._log[:keep]
        self._first_index += keep
        return entries

    def _next_index(self, status: Follow) -> int:
        follows = (
            status.lead == self._incarnation and status.epoch == self.version.epoch
        )
        return status.next_index if follows else 0
