"""Service: how does one server connect sockets, protocol and parameters?"""

import dataclasses
import secrets
import time

from jdp.parameter_server import (
    admission,
    messages,
    metrics,
    shards,
    shared_memory_lane,
)
from jdp.parameter_server.entry_execution import EntryExecutor
from jdp.parameter_server.follower import Follower
from jdp.parameter_server.keys import Keys, Place
from jdp.parameter_server.leader import Leader
from jdp.parameter_server.leader_options import LeaderOptions
from jdp.parameter_server.messages import (
    Ended,
    Farewell,
    FollowerStatus,
    Leave,
    LogEntry,
    MessageError,
    Ping,
    Pong,
    Pull,
    Push,
    Restore,
    SaveCheckpoint,
    Version,
    Welcome,
    WorkerHello,
)
from jdp.parameter_server.modes import Sync
from jdp.parameter_server.push_hook import Compressor
from jdp.parameter_server.refusals import PeerRefusals
from jdp.parameter_server.saving import Saver
from jdp.parameter_server.sessions import WorkerSession, WorkerSessions
from jdp.parameter_server.shards import Shards
from jdp.parameter_server.sockets import ClientSockets, Message, ServerSocket
from jdp.parameter_server.updates import Updater
from jdp.replicas import wire

_TICK_S = 0.1
_STATUS_PERIOD_S = 0.2  # servers repeat status and log: messages may be lost.
_REPORT_PERIOD_S = 1.0
_STOP_TIMEOUT_S = 3.0  # less than the grace period of `jdp launch`.
_END_TIMEOUT_S = 30.0  # for the last checkpoints of the other servers.


@dataclasses.dataclass(frozen=True)
class ServiceParts:
    """Resources of one server."""

    socket: ServerSocket
    updater: Updater
    compressor: Compressor | None
    saver: Saver


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options beside the options of the leader."""

    hook_name: str
    report: metrics.Report
    keys: Keys


class Service:
    """One running server; one thread runs it."""

    def __init__(
        self,
        place: Place,
        plan: Shards,
        parts: ServiceParts,
        leader_options: LeaderOptions,
        options: ServiceOptions,
    ):
        self._index = place.index
        self._shard = plan.of_server[place.index]
        self._socket, self._saver = parts.socket, parts.saver
        compressor = parts.compressor
        self._compressed_layout = None if compressor is None else compressor.layout
        self._refusals = PeerRefusals(f"Server {self._index}")
        self._leader_options, self._options = leader_options, options
        self._admission = admission.Admission(
            place.index,
            len(place.addresses),
            shards.describe_leaves(plan.plan),
            options.hook_name,
            parts.saver.has_checkpoints,
            place.num_workers,
        )
        self._incarnation = secrets.token_bytes(8)
        self._follower = Follower()
        self._sessions = WorkerSessions(parts.socket)
        self._metrics = metrics.Metrics()
        self._must_save = Version()
        self._status_at_s = self._report_at_s = 0.0
        self._stop_at_s = float("inf")
        self._is_told = self._is_ending = False
        self._leader: Leader | None = None
        self._upstream: ClientSockets | None = None
        self._routes: dict[int, bytes] = {}  # to the other servers.
        if place.index == 0:
            self._leader = Leader(leader_options, self._incarnation)
            self._leader.attendance.load(self._saver.read_attendance())
        else:
            self._upstream = ClientSockets(
                [place.addresses[0]], options.keys, most_bytes=0, is_server=True
            )
        self._executor = EntryExecutor(
            self._shard,
            *(parts.updater, compressor, parts.saver),
            *(self._sessions, self._follower, self._leader, self._metrics),
        )
        self._executor.report_checkpoints()

    def stop(self) -> None:
        """Asks the loop to end; any thread may call it."""
        self._is_told = True

    def summarize(self) -> metrics.ReportLine:
        """Returns one line of the report."""
        leader = self._leader
        return self._metrics.summarize(
            version=str(self._follower.version),
            counts={} if leader is None else dict(leader.counts),
            num_workers=len(self._sessions),
            num_waiting=0 if leader is None else leader.num_waiting,
            num_refused=self._refusals.count,
            now_s=time.monotonic(),
        )

    def run(self) -> None:
        """Serves until the job is over, `stop` is called, or an error."""
        reporter = None
        if self._index == 0:
            reporter = metrics.open_reporter(self._options.report)
        try:
            while not self._is_done():
                self._socket.poll(_TICK_S, self._upstream)
                # All messages first: they renew leases that the decision may end.
                for message in self._socket.receive():
                    self._hear(message)
                self._follow()
                self._decide()
                if reporter is not None and time.monotonic() >= self._report_at_s:
                    self._report_at_s = time.monotonic() + _REPORT_PERIOD_S
                    reporter.show(self.summarize())
            if reporter is not None:
                reporter.show(self.summarize())
            self._sessions.tell_all(Ended(self._executor.is_over))
            if self._executor.is_over:
                self._saver.note_attendance(b"")
        except BaseException as error:
            self._sessions.tell_failure(f"Server {self._index} has failed: {error}")
            raise
        finally:
            if reporter is not None:
                reporter.close()
            self._close()

    def _is_done(self) -> bool:
        """Whether the loop ends; after `stop`, once a checkpoint is written."""
        now_s = time.monotonic()
        leader, is_over = self._leader, self._executor.is_over
        has_all = leader is None or leader.has_all()
        if is_over:
            self._stop_at_s = min(self._stop_at_s, now_s + _END_TIMEOUT_S)
        if self._is_told and not self._is_ending:
            self._is_ending = True
            self._stop_at_s = min(self._stop_at_s, now_s + _STOP_TIMEOUT_S)
            self._status_at_s = 0.0
            self._must_save = self._follower.version
            if leader is not None:
                leader.request_checkpoint()
        has_saved = self._is_ending and self._saver.has_saved(self._must_save)
        return has_all and (is_over or has_saved) or now_s >= self._stop_at_s

    def _close(self) -> None:
        self._socket.close()
        self._saver.close()
        if self._upstream is not None:
            self._upstream.close()

    def _hear(self, message: Message) -> None:
        """Handles a message of a worker or another server; refuses malformed ones."""
        route = message.source
        assert isinstance(route, bytes)
        try:
            found = messages.decode(message.header, messages.to_server)
            self._handle(route, found, message)
        except MessageError as error:
            self._refusals.note(str(error))
            text = f"Server {self._index} refuses this worker, which {error}."
            self._socket.send(route, messages.encode_refusal(text))
        except messages.RefusedError:
            self._refusals.note("sent a refusal to a server")

    def _handle(self, route: bytes, found: messages.ToServer, message: Message) -> None:
        if isinstance(found, FollowerStatus):
            if self._leader is None or not message.is_server:
                raise MessageError("claims to be a server without the key of one")
            self._leader.update_follower(found)
            self._routes[found.server] = route
        elif isinstance(found, WorkerHello):
            self._welcome(route, found)
        elif isinstance(found, Leave) and self._leader is not None:
            # Also from a worker that was left out: it will not come back.
            self._leader.leave(found.session, now_s=time.monotonic())
            self._note_attendance(self._leader)
            self._socket.send(route, messages.encode(Farewell()))
        elif (session := self._find_session(found.session, route)) is not None:
            self._serve(session, found, message.payload)
        else:
            self._socket.send(route, messages.encode(messages.SessionUnknown()))

    def _find_session(self, name: bytes, route: bytes) -> WorkerSession | None:
        session, leader = self._sessions.get(name), self._leader
        if session is None:
            return None
        if leader is not None and not leader.renew_lease(name, now_s=time.monotonic()):
            return None
        session.route = route
        return session

    def _serve(
        self,
        session: WorkerSession,
        message: Ping | Push | Pull | Leave,
        payload: memoryview | None,
    ) -> None:
        """Handles a message of a worker that takes part."""
        match message:
            case Ping():
                self._answer(session, message)
            case Push():
                self._take(session, message, payload)
            case Pull() if self._leader is not None:
                self._leader.pull(message)

    def _answer(self, session: WorkerSession, ping: Ping) -> None:
        """Answers a ping: with the outcome of a push, or a request to resend it."""
        settled = self._follower.settled.get(ping.session)
        wants = 0
        if ping.push and self._follower.wants(ping.session, ping.push):
            wants = ping.push
        elif ping.push and settled is not None and settled.sequence == ping.push:
            self._sessions.send(session, settled)
        leader = self._leader
        self._sessions.send(
            session, Pong(wants, leader.find_awaited() if leader else ())
        )

    def _take(
        self, session: WorkerSession, push: Push, payload: memoryview | None
    ) -> None:
        """Takes this server's part of a push."""
        layout = admission.check_push(
            push, self._follower.version, self._shard.layout, self._compressed_layout
        )
        if push.is_in_shared_memory:
            if session.shared_memory is None:  # The worker knows: see `Welcome`.
                return
            payload = session.shared_memory.pushed[: layout.num_bytes]
        rejects = self._leader_options.nonfinite == "reject"
        admission.check_arrays(push, payload, layout, rejects=rejects)
        if self._follower.hold(push, payload):
            self._metrics.num_pushed_bytes += layout.num_bytes
            self._status_at_s = 0.0
            if self._leader is not None:
                self._leader.push(push)

    def _welcome(self, route: bytes, hello: WorkerHello) -> None:
        """Handles a hello; a worker repeats it until it is welcome."""
        version = Version() if self._leader is None else self._leader.version
        if text := admission.find_objection(hello, self._admission, version):
            self._refuse(route, hello, text)
            return
        if self._executor.is_over:
            self._socket.send(route, messages.encode(Ended(True)))
            return
        if self._follower.version.epoch == 0 or not self._join(hello):
            if self._leader and (text := self._leader.pop_objection(hello.session)):
                self._refuse(route, hello, text)
                return
            # Not before the checkpoint to begin with is known.
            self._sessions.note_outside(route)
            return
        known = self._sessions.get(hello.session)
        if known is None:
            self._refusals.note_come(hello.worker)
            least, offer = self._shard.layout.num_bytes, hello.shared_memory
            shared = offer and shared_memory_lane.open_lane(offer, least_bytes=least)
            known = WorkerSession(route, hello.worker, shared)
        known.route = route
        self._sessions.add(hello.session, known)
        mode = self._leader_options.mode
        self._sessions.send(
            known,
            Welcome(
                self._follower.version,
                str(mode),
                isinstance(mode, Sync),
                self._leader_options.lease_s,
                known.shared_memory is not None,
            ),
        )

    def _refuse(self, route: bytes, hello: WorkerHello, text: str) -> None:
        text = wire.printable(text, most=2000)
        self._refusals.note_worker(hello.worker, text)
        self._socket.send(route, messages.encode_refusal(text))

    def _join(self, hello: WorkerHello) -> bool:
        """Whether server 0 lets a worker take part; other servers let all."""
        if self._leader is None:
            return True
        return self._leader.join(
            hello.session,
            hello.worker,
            now_s=time.monotonic(),
            has_seen=hello.known.epoch > 0,
            process=hello.process,
        )

    def _follow(self) -> None:
        """Executes the log of server 0, and sends it the status of this server."""
        if self._upstream is None:
            return
        for message in self._upstream.receive():
            try:
                found = messages.decode(message.header, messages.to_follower)
                self._execute(self._follower.receive(found))
                self._status_at_s = 0.0
            except messages.RefusedError as error:
                raise RuntimeError(f"Server 0 refuses this server: {error}") from None
            except MessageError as error:
                # Server 0 sends its log again.
                self._refusals.note(str(error))
        now_s = time.monotonic()
        if now_s >= self._status_at_s:
            self._status_at_s = now_s + _STATUS_PERIOD_S
            follower = self._follower
            status = FollowerStatus(
                self._index,
                self._incarnation,
                follower.leader,
                max(follower.version.epoch, self._saver.find_epoch()),
                follower.next_index,
                self._saver.find_counts(),
                follower.find_held(),
                self._is_told,
                self._saver.find_runs(),
            )
            self._upstream.send(0, messages.encode(status))

    def _decide(self) -> None:
        """Decides on server 0, and sends the log to the other servers."""
        leader = self._leader
        if leader is None:
            return
        now_s = time.monotonic()
        entries = leader.decide(now_s=now_s)
        if entries and isinstance(entries[0], Restore):
            self._follower.leader, self._follower.next_index = self._incarnation, 0
        is_due = now_s >= self._status_at_s
        if entries or is_due:
            self._status_at_s = now_s + _STATUS_PERIOD_S
            # First: the other servers execute it at the same time.
            for server, route in self._routes.items():
                log = leader.find_log(server)
                if log is not None:
                    self._socket.send(route, messages.encode(log))
        self._execute(entries)
        self._note_attendance(leader)

    def _note_attendance(self, leader: Leader) -> None:
        if leader.attendance.has_changed:
            self._saver.note_attendance(leader.attendance.encode())

    def _execute(self, entries: list[LogEntry]) -> None:
        if any(isinstance(entry, Restore | SaveCheckpoint) for entry in entries):
            self._status_at_s = 0.0
        if self._executor.execute(entries):
            return
        # Without that checkpoint, this server counts as newly started.
        if self._leader is not None:
            self._leader.start_over()
        else:
            self._incarnation, self._follower.leader = secrets.token_bytes(8), b""
