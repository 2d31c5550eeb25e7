"""Service: the loop of one server, between sockets, protocol and parameters."""

import dataclasses
import secrets
import time

import numpy as np

from jdp.parameter_server import (
    admission,
    messages,
    metrics,
    push_hook,
    shards,
    shared_memory_lane,
)
from jdp.parameter_server.follower import Part, Replica
from jdp.parameter_server.keys import Keys, Place
from jdp.parameter_server.leader import Lead
from jdp.parameter_server.leader_options import LeadOptions
from jdp.parameter_server.messages import (
    Apply,
    Ended,
    Farewell,
    Follow,
    Forget,
    Hand,
    Hello,
    Leave,
    MessageError,
    Params,
    Ping,
    Pong,
    Pull,
    Push,
    Restore,
    Version,
    Welcome,
)
from jdp.parameter_server.modes import Sync
from jdp.parameter_server.push_hook import Compressor
from jdp.parameter_server.refusals import Refusals
from jdp.parameter_server.saving import Saver
from jdp.parameter_server.sessions import Session, Sessions
from jdp.parameter_server.shards import Shards
from jdp.parameter_server.sockets import ClientSockets, Message, ServerSocket
from jdp.parameter_server.updates import Updater
from jdp.replicas import wire

_TICK_S = 0.1
_STATUS_PERIOD_S = 0.2  # of what servers tell each other again, lest it was lost.
_REPORT_PERIOD_S = 1.0
_STOP_TIMEOUT_S = 3.0  # less than what `jdp launch` gives from SIGTERM to SIGKILL.
_END_TIMEOUT_S = 30.0  # for the last checkpoints of the others.


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts that a service works with."""

    socket: ServerSocket
    updater: Updater
    compressor: Compressor | None
    saver: Saver


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Work that the protocol does not do."""

    hook_name: str
    report: metrics.Report
    keys: Keys


class Service:
    """One server at work; one thread runs it."""

    def __init__(
        self,
        place: Place,
        plan: Shards,
        parts: Parts,
        lead_options: LeadOptions,
        options: ServiceOptions,
    ):
        """Begins before the first epoch."""
        self._index = place.index
        self._plan = plan
        self._shard = plan.of_server[place.index]
        self._socket, self._updater = parts.socket, parts.updater
        self._compressor, self._saver = parts.compressor, parts.saver
        self._refusals = Refusals(f"Server {self._index}")
        self._lead_options, self._options = lead_options, options
        self._admission = admission.Admission(
            place.index,
            len(place.addresses),
            shards.describe_leaves(plan.plan),
            options.hook_name,
            parts.saver.has_checkpoints,
            place.num_workers,
        )
        self._incarnation = secrets.token_bytes(8)
        self._replica = Replica()
        self._sessions = Sessions(parts.socket)
        self._metrics = metrics.Metrics()
        self._packed: tuple[Version, np.ndarray] | None = None
        self._must_save = Version()
        self._status_at_s = self._report_at_s = 0.0
        self._stop_at_s = float("inf")
        self._is_told = self._is_ending = self._is_over = False
        self._lead: Lead | None = None
        self._upstream: ClientSockets | None = None
        self._followers: dict[int, bytes] = {}  # routes.
        if place.index == 0:
            self._lead = Lead(lead_options, self._incarnation)
            self._lead.attendance.load(self._saver.read_attendance())
            self._note_checkpoints()
        else:
            self._upstream = ClientSockets(
                [place.addresses[0]], options.keys, most_bytes=0, is_server=True
            )

    def stop(self) -> None:
        """Asks for the end; see `Server.stop`."""
        self._is_told = True

    def summarize(self) -> metrics.Line:
        """Returns a line of the report."""
        lead = self._lead
        return self._metrics.summarize(
            version=str(self._replica.version),
            counts={} if lead is None else dict(lead.counts),
            num_workers=len(self._sessions),
            num_waiting=0 if lead is None else lead.num_waiting,
            num_refused=self._refusals.count,
            now_s=time.monotonic(),
        )

    def run(self) -> None:
        """Serves to the end."""
        reporter = None
        if self._index == 0:
            reporter = metrics.open_reporter(self._options.report)
        try:
            while not self._is_done():
                self._socket.poll(_TICK_S, self._upstream)
                # All that has come, before it is decided who was silent.
                for message in self._socket.receive():
                    self._hear(message)
                self._follow()
                self._decide()
                if reporter is not None and time.monotonic() >= self._report_at_s:
                    self._report_at_s = time.monotonic() + _REPORT_PERIOD_S
                    reporter.show(self.summarize())
            if reporter is not None:
                reporter.show(self.summarize())
            self._sessions.tell_all(Ended(self._is_over))
            if self._is_over:
                self._saver.note_attendance(b"")
        except BaseException as error:
            self._sessions.tell_failure(f"Server {self._index} has failed: {error}")
            raise
        finally:
            if reporter is not None:
                reporter.close()
            self._close()

    def _is_done(self) -> bool:
        """Whether it is the end; at SIGTERM, once there is a checkpoint."""
        now_s = time.monotonic()
        lead = self._lead
        has_all = lead is None or lead.has_all()
        if self._is_over:
            self._stop_at_s = min(self._stop_at_s, now_s + _END_TIMEOUT_S)
        if self._is_told and not self._is_ending:
            self._is_ending = True
            self._stop_at_s = min(self._stop_at_s, now_s + _STOP_TIMEOUT_S)
            self._status_at_s = 0.0
            self._must_save = self._replica.version
            if lead is not None:
                lead.save()
        has_saved = self._is_ending and self._saver.has_saved(self._must_save)
        return has_all and (self._is_over or has_saved) or now_s >= self._stop_at_s

    def _close(self) -> None:
        self._socket.close()
        self._saver.close()
        if self._upstream is not None:
            self._upstream.close()

    def _hear(self, message: Message) -> None:
        """A worker or another server said something; what makes no sense is refused."""
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
        if isinstance(found, Follow):
            if self._lead is None or not message.is_server:
                raise MessageError("says that it is a server, and is not known as one")
            self._lead.follow(found)
            self._followers[found.server] = route
        elif isinstance(found, Hello):
            self._welcome(route, found)
        elif isinstance(found, Leave) and self._lead is not None:
            # Of a worker that was left out too: it will not come back.
            self._lead.leave(found.session, now_s=time.monotonic())
            self._note_attendance(self._lead)
            self._socket.send(route, messages.encode(Farewell()))
        elif (session := self._find_session(found.session, route)) is not None:
            self._serve(session, found, message.payload)
        else:
            self._socket.send(route, messages.encode(messages.Who()))

    def _find_session(self, name: bytes, route: bytes) -> Session | None:
        session, lead = self._sessions.get(name), self._lead
        if session is None:
            return None
        if lead is not None and not lead.hear(name, now_s=time.monotonic()):
            return None
        session.route = route
        return session

    def _serve(
        self,
        session: Session,
        message: Ping | Push | Pull | Leave,
        payload: memoryview | None,
    ) -> None:
        """A worker that is known said something."""
        match message:
            case Ping():
                self._answer(session, message)
            case Push():
                self._take(session, message, payload)
            case Pull() if self._lead is not None:
                self._lead.pull(message)

    def _answer(self, session: Session, ping: Ping) -> None:
        """Says what became of a push, or asks for it again."""
        settled = self._replica.settled.get(ping.session)
        wants = 0
        if ping.push and self._replica.wants(ping.session, ping.push):
            wants = ping.push
        elif ping.push and settled is not None and settled.sequence == ping.push:
            self._sessions.send(session, settled)
        lead = self._lead
        self._sessions.send(session, Pong(wants, lead.find_awaited() if lead else ()))

    def _take(self, session: Session, push: Push, payload: memoryview | None) -> None:
        """Takes this server's part of a push."""
        layout = self._shard.layout
        if push.is_compressed:
            if self._compressor is None:
                raise MessageError("compressed a push, and the servers have no hook")
            layout = self._compressor.layout
        if push.version > self._replica.version:
            raise MessageError(
                f"pushed a gradient of version {push.version}, and there is "
                f"{self._replica.version}"
            )
        if push.is_in_lane:
            if session.lane is None:  # It could not be opened; the worker is told.
                return
            payload = session.lane.pushed[: layout.num_bytes]
        rejects = self._lead_options.nonfinite == "reject"
        admission.check_arrays(push, payload, layout, rejects=rejects)
        if self._replica.hold(push, payload):
            self._metrics.num_pushed_bytes += layout.num_bytes
            self._status_at_s = 0.0
            if self._lead is not None:
                self._lead.push(push)

    def _welcome(self, route: bytes, hello: Hello) -> None:
        """A worker comes, or comes back."""
        version = Version() if self._lead is None else self._lead.version
        if text := admission.find_objection(hello, self._admission, version):
            self._refuse(route, hello, text)
            return
        if self._is_over:
            self._socket.send(route, messages.encode(Ended(True)))
            return
        if self._replica.version.epoch == 0 or not self._join(hello):
            if self._lead and (text := self._lead.find_rivalry(hello.session)):
                self._refuse(route, hello, text)
                return
            # Not before it is known which checkpoint counts; it says it again.
            self._sessions.note_outside(route)
            return
        known = self._sessions.get(hello.session)
        if known is None:
            self._refusals.note_come(hello.worker)
            least, offer = self._shard.layout.num_bytes, hello.lane
            shared = offer and shared_memory_lane.open_lane(offer, least_bytes=least)
            known = Session(route, hello.worker, shared)
        known.route = route
        self._sessions.add(hello.session, known)
        mode = self._lead_options.mode
        self._sessions.send(
            known,
            Welcome(
                self._replica.version,
                str(mode),
                isinstance(mode, Sync),
                self._lead_options.lease_s,
                known.lane is not None,
            ),
        )

    def _refuse(self, route: bytes, hello: Hello, text: str) -> None:
        text = wire.printable(text, most=2000)
        self._refusals.note_worker(hello.worker, text)
        self._socket.send(route, messages.encode_refusal(text))

    def _join(self, hello: Hello) -> bool:
        """Whether server 0 lets a worker in."""
        if self._lead is None:
            return True
        return self._lead.join(
            hello.session,
            hello.worker,
            now_s=time.monotonic(),
            has_seen=hello.known.epoch > 0,
            process=hello.process,
        )

    def _follow(self) -> None:
        """Hears server 0, and tells it where this one is."""
        if self._upstream is None:
            return
        for message in self._upstream.receive():
            try:
                found = messages.decode(message.header, messages.to_follower)
                self._execute(self._replica.receive(found))
                self._status_at_s = 0.0
            except messages.RefusedError as error:
                raise RuntimeError(f"Server 0 and this one differ: {error}") from None
            except MessageError as error:
                # Server 0 sends its log until this one has it.
                self._refusals.note(str(error))
        now_s = time.monotonic()
        if now_s >= self._status_at_s:
            self._status_at_s = now_s + _STATUS_PERIOD_S
            replica = self._replica
            status = Follow(
                self._index,
                self._incarnation,
                replica.lead,
                max(replica.version.epoch, self._saver.find_epoch()),
                replica.next_index,
                self._saver.find_counts(),
                replica.find_held(),
                self._is_told,
                self._saver.find_runs(),
            )
            self._upstream.send(0, messages.encode(status))

    def _decide(self) -> None:
        """Lets server 0 decide, and tells the others."""
        lead = self._lead
        if lead is None:
            return
        now_s = time.monotonic()
        entries = lead.decide(now_s=now_s)
        if entries and isinstance(entries[0], Restore):
            self._replica.lead, self._replica.next_index = self._incarnation, 0
        is_due = now_s >= self._status_at_s
        if entries or is_due:
            self._status_at_s = now_s + _STATUS_PERIOD_S
            # The others work while this one does.
            for server, route in self._followers.items():
                log = lead.find_log(server)
                if log is not None:
                    self._socket.send(route, messages.encode(log))
        self._execute(entries)
        self._note_attendance(lead)

    def _note_attendance(self, lead: Lead) -> None:
        if lead.attendance.has_changed:
            self._saver.note_attendance(lead.attendance.encode())

    def _execute(self, entries: list[messages.Entry]) -> None:
        for entry in entries:
            before = self._replica.version
            done = self._replica.execute(entry)
            match entry:
                case Apply():
                    self._apply(entry, done.parts)
                case Restore():
                    self._is_over = False
                    if not self._restore(entry.version, before):
                        return
                case messages.Save():
                    self._save()
                case messages.Keep():
                    self._saver.keep(entry.count)
                case Forget():
                    self._sessions.remove(entry.session)
                case Hand():
                    self._hand(entry)
                case messages.Stop():
                    self._is_over = True
            for name, settled in done.settled.items():
                if (session := self._sessions.get(name)) is not None:
                    self._sessions.send(session, settled)

    def _apply(self, entry: Apply, parts: list[Part]) -> None:
        layout, made = self._shard.layout, self._compressor
        opened = [
            push_hook.open_payload(p.payload, p.push.is_compressed, layout, made)
            for p in parts
        ]
        self._updater.apply(opened, entry.weights, entry.staleness)
        self._metrics.note_update(entry.staleness, now_s=time.monotonic())
        self._saver.note(self._replica.version)

    def _hand(self, entry: Hand) -> None:
        """Hands this server's parameters to a worker."""
        session = self._sessions.get(entry.session)
        if session is None:
            return
        layout, version = self._shard.layout, self._replica.version
        self._metrics.num_pulls += 1
        self._metrics.num_pulled_bytes += layout.num_bytes
        if session.lane is not None:
            self._updater.copy_into(layout.views(session.lane.pulled))
            self._sessions.send(session, Params(entry.pull, version, True))
            return
        if self._packed is None or self._packed[0] != version:
            packed = np.zeros(layout.num_bytes, np.uint8)
            self._updater.copy_into(layout.views(packed))
            self._packed = version, packed
        self._sessions.send(
            session, Params(entry.pull, version, False), self._packed[1]
        )

    def _save(self) -> None:
        replica = self._replica
        self._saver.save(replica.version, replica.settled, replica.lead)
        self._note_checkpoints()
        self._status_at_s = 0.0

    def _restore(self, version: Version, before: Version) -> bool:
        """Goes back to a checkpoint that all servers have; returns whether it is one.

        If not, this server counts as one that begins anew: without that checkpoint.
        """
        self._sessions.clear()
        self._packed = None
        settled = self._saver.restore(version, before)
        self._note_checkpoints()
        self._status_at_s = 0.0
        if settled is None:
            if self._lead is not None:
                self._lead.start_over()
            else:
                self._incarnation, self._replica.lead = secrets.token_bytes(8), b""
            return False
        self._replica.restore(settled)
        if self._lead is not None:
            self._lead.restored(settled)
        return True

    def _note_checkpoints(self) -> None:
        if self._lead is not None:
            saver = self._saver
            self._lead.begin(
                saver.find_counts(), saver.find_epoch(), runs=saver.find_runs()
            )
