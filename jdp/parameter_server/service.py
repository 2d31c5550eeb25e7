"""Service: the loop of one server, between sockets, protocol and parameters."""

import dataclasses
import logging
import secrets
import time
from typing import Any

import numpy as np

from jdp.parameter_server import admission, lane, messages, metrics, shards
from jdp.parameter_server.checkpoints import Checkpoints
from jdp.parameter_server.compression import Compressor
from jdp.parameter_server.keys import Keys, Place
from jdp.parameter_server.lane import Lane
from jdp.parameter_server.messages import (
    Apply,
    Ended,
    Failed,
    Follow,
    Forget,
    Hand,
    Hello,
    Leave,
    Log,
    Params,
    Ping,
    Pong,
    Pull,
    Push,
    Restore,
    Save,
    Stop,
    Version,
    Welcome,
    Who,
)
from jdp.parameter_server.modes import Sync
from jdp.parameter_server.protocol import Lead, LeadOptions
from jdp.parameter_server.replica import Part, Replica
from jdp.parameter_server.shards import Shards
from jdp.parameter_server.sockets import ClientSockets, Message, ServerSocket
from jdp.parameter_server.updates import Updater

_TICK_S = 0.1
_STATUS_PERIOD_S = 0.2  # of what servers tell each other again, lest it was lost.
_REPORT_PERIOD_S = 1.0
_STOP_TIMEOUT_S = 3.0  # less than what `jdp launch` gives from SIGTERM to SIGKILL.
_FAREWELL_S = 0.5
_logger = logging.getLogger("jdp")


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a service works with."""

    socket: ServerSocket
    updater: Updater
    compressor: Compressor | None
    checkpoints: Checkpoints | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What is not for the protocol."""

    hook_name: str
    report: metrics.Report
    keys: Keys


@dataclasses.dataclass
class _Session:
    """A worker that has said hello."""

    route: bytes
    worker: int
    lane: Lane | None


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
        self._compressor, self._checkpoints = parts.compressor, parts.checkpoints
        self._lead_options, self._options = lead_options, options
        self._admission = admission.Admission(
            place.index,
            len(place.addresses),
            shards.describe_leaves(plan.plan),
            options.hook_name,
        )
        self._incarnation = secrets.token_bytes(8)
        self._replica = Replica()
        self._sessions: dict[bytes, _Session] = {}
        self._metrics = metrics.Metrics()
        self._packed: tuple[Version, np.ndarray] | None = None
        self._saved = self._must_save = Version()
        self._status_at_s = self._report_at_s = 0.0
        self._stop_at_s: float | None = None
        self._is_told = self._is_over = False
        self._lead: Lead | None = None
        self._upstream: ClientSockets | None = None
        self._followers: dict[int, bytes] = {}  # routes.
        if place.index == 0:
            self._lead = Lead(lead_options, self._incarnation)
            self._note_checkpoints()
        else:
            self._upstream = ClientSockets(
                [place.addresses[0]], options.keys, most_bytes=0
            )

    def stop(self) -> None:
        """Asks for the end; see `Server.stop`."""
        self._is_told = True

    def summarize(self) -> dict[str, Any]:
        """Returns a line of the report."""
        lead = self._lead
        return self._metrics.summarize(
            version=str(self._replica.version),
            counts={} if lead is None else dict(lead.counts),
            num_workers=len(self._sessions),
            num_waiting=0 if lead is None else lead.num_waiting,
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
            self._tell_all(Ended())
        except BaseException as error:
            self._tell_all(Failed(f"Server {self._index} has failed: {error}"))
            # A worker forgets what it has not read when the connection ends.
            time.sleep(_FAREWELL_S)
            raise
        finally:
            if reporter is not None:
                reporter.close()
            self._close()

    def _is_done(self) -> bool:
        """Whether it is the end; at SIGTERM, once there is a checkpoint."""
        now_s = time.monotonic()
        lead = self._lead
        if self._is_over:
            if lead is None or lead.has_all():
                return True
            self._stop_at_s = self._stop_at_s or now_s + _STOP_TIMEOUT_S
        if self._is_told and self._stop_at_s is None:
            self._stop_at_s = now_s + _STOP_TIMEOUT_S
            self._status_at_s = 0.0
            self._must_save = self._replica.version
            if lead is not None:
                lead.save()
        if self._stop_at_s is None:
            return False
        has_saved = self._checkpoints is None or self._saved >= self._must_save
        if self._is_told and has_saved and (lead is None or lead.has_all()):
            return True
        return now_s >= self._stop_at_s

    def _close(self) -> None:
        self._socket.close()
        if self._upstream is not None:
            self._upstream.close()

    def _hear(self, message: Message) -> None:
        """A worker or another server said something."""
        route = message.source
        assert isinstance(route, bytes)
        try:
            found = messages.decode(message.header, messages.to_server)
        except messages.MessageError as error:
            self._socket.note(f"it {error}")
            text = f"Server {self._index} refuses this worker, which {error}."
            self._socket.send(route, messages.encode_refusal(text))
            return
        except messages.RefusedError:
            return
        if isinstance(found, Follow):
            if self._lead is not None and found.server < len(self._plan.of_server):
                self._followers[found.server] = route
                self._lead.follow(found)
        elif isinstance(found, Hello):
            self._welcome(route, found)
        elif (session := self._find_session(found.session, route)) is not None:
            self._serve(session, found, message.payload)
        else:
            self._socket.send(route, messages.encode(Who()))

    def _find_session(self, name: bytes, route: bytes) -> _Session | None:
        session = self._sessions.get(name)
        if session is None:
            return None
        if self._lead is not None:
            if not self._lead.hear(name, now_s=time.monotonic()):
                return None
        session.route = route
        return session

    def _serve(
        self,
        session: _Session,
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
            case Leave() if self._lead is not None:
                self._lead.leave(message.session)

    def _answer(self, session: _Session, ping: Ping) -> None:
        """Says what became of a push, or asks for it again."""
        settled = self._replica.settled.get(ping.session)
        wants = 0
        if ping.push and self._replica.wants(ping.session, ping.push):
            wants = ping.push
        elif ping.push and settled is not None and settled.sequence == ping.push:
            self._send(session, settled)
        self._send(session, Pong(wants))

    def _take(self, session: _Session, push: Push, payload: memoryview | None) -> None:
        """Takes this server's part of a push."""
        layout = self._shard.layout
        if push.is_compressed:
            if self._compressor is None:
                self._socket.note("it compressed a push, and there is no hook")
                return
            layout = self._compressor.layout
        if push.is_in_lane:
            payload = None if session.lane is None else session.lane.pushed
        if payload is not None and len(payload) < layout.num_bytes:
            payload = None
        if payload is None or not 0 < push.weight < float("inf"):
            self._socket.note("it sent a push that is not of this model")
            return
        if self._replica.hold(push, payload):
            self._metrics.num_pushed_bytes += layout.num_bytes
            self._status_at_s = 0.0
            if self._lead is not None:
                self._lead.push(push)

    def _welcome(self, route: bytes, hello: Hello) -> None:
        """A worker comes, or comes back."""
        if text := admission.find_objection(
            hello, self._admission, self._lead_version()
        ):
            _logger.warning("Worker %d is refused: %s", hello.worker, text)
            self._socket.send(route, messages.encode_refusal(text))
            return
        if self._replica.version.epoch == 0:
            return  # Not before it is known which checkpoint counts; it says it again.
        now_s = time.monotonic()
        lead = self._lead
        if lead is not None:
            if not lead.join(hello.session, hello.worker, now_s=now_s):
                return
        known = self._sessions.get(hello.session)
        if known is None:
            _logger.info("Worker %d has come.", hello.worker)
            shared = None
            if hello.lane is not None:
                least = self._shard.layout.num_bytes
                shared = lane.open_lane(hello.lane, least_bytes=least)
            known = _Session(route, hello.worker, shared)
            self._sessions[hello.session] = known
        known.route = route
        mode = self._lead_options.mode
        self._send(
            known,
            Welcome(
                self._replica.version,
                str(mode),
                isinstance(mode, Sync),
                self._lead_options.lease_s,
                known.lane is not None,
            ),
        )

    def _lead_version(self) -> Version:
        return Version() if self._lead is None else self._lead.version

    def _follow(self) -> None:
        """Hears server 0, and tells it where this one is."""
        if self._upstream is None:
            return
        for message in self._upstream.receive():
            try:
                found = messages.decode(message.header, messages.to_follower)
            except (messages.MessageError, messages.RefusedError) as error:
                raise RuntimeError(f"Server 0 and this one differ: {error}") from None
            if isinstance(found, Log):
                self._execute(self._replica.receive(found))
                self._status_at_s = 0.0
        now_s = time.monotonic()
        if now_s >= self._status_at_s:
            self._status_at_s = now_s + _STATUS_PERIOD_S
            replica = self._replica
            status = Follow(
                self._index,
                self._incarnation,
                replica.lead,
                max(replica.version.epoch, self._find_epoch()),
                replica.next_index,
                self._find_checkpoints(),
                replica.find_held(),
                self._is_told,
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

    def _execute(self, entries: list[messages.Entry]) -> None:
        for entry in entries:
            before = self._replica.version
            done = self._replica.execute(entry)
            match entry:
                case Apply():
                    self._apply(entry, done.parts)
                case Restore():
                    self._restore(entry.version, before)
                case Save():
                    self._save()
                case Forget():
                    self._sessions.pop(entry.session, None)
                case Hand():
                    self._hand(entry)
                case Stop():
                    self._is_over = True
            for name, settled in done.settled.items():
                if (session := self._sessions.get(name)) is not None:
                    self._send(session, settled)

    def _apply(self, entry: Apply, parts: list[Part]) -> None:
        self._updater.apply(
            [self._unpack(part) for part in parts], entry.weights, entry.staleness
        )
        self._metrics.note_update(entry.staleness, now_s=time.monotonic())
        if self._checkpoints is not None:
            self._checkpoints.note(self._replica.version)

    def _unpack(self, part: Part) -> list[Any]:
        """Returns the buckets of a part, without a copy where they are not packed."""
        if not part.push.is_compressed:
            return list(self._shard.layout.views(part.payload))
        assert self._compressor is not None
        sent = self._compressor.layout.views(part.payload)
        return self._compressor.unpack(sent)

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
            self._send(session, Params(entry.pull, version, True))
            return
        if self._packed is None or self._packed[0] != version:
            packed = np.zeros(layout.num_bytes, np.uint8)
            self._updater.copy_into(layout.views(packed))
            self._packed = version, packed
        self._send(session, Params(entry.pull, version, False), self._packed[1])

    def _save(self) -> None:
        if self._checkpoints is None:
            return
        replica = self._replica
        count = replica.version.count
        self._checkpoints.save(count, self._updater.save(), replica.settled)
        self._saved = replica.version
        self._note_checkpoints()
        self._status_at_s = 0.0

    def _restore(self, version: Version, before: Version) -> None:
        """Goes back to a checkpoint that all servers have."""
        self._sessions.clear()
        settled = {}
        if self._checkpoints is not None:
            before = max(before, self._checkpoints.last)
            self._checkpoints.drop_after(version.count)
        if version.count and self._checkpoints is not None:
            arrays, settled = self._checkpoints.load(version.count)
            self._updater.load(arrays)
        elif version.epoch > 1:
            self._updater.reset()
        self._replica.restore(settled)
        if self._lead is not None:
            self._lead.restored(settled)
        self._saved, self._packed = version, None
        if self._checkpoints is not None:
            self._checkpoints.note(version)
            self._checkpoints.last = version
        self._note_checkpoints()
        if version.epoch > 1:
            _logger.warning(
                "Server %d goes on from %s: of %d updates, %d are lost.",
                self._index,
                f"the checkpoint of update {version.count}"
                if version.count
                else "the parameters that it was given",
                max(before.count, version.count),
                max(0, before.count - version.count),
            )

    def _note_checkpoints(self) -> None:
        if self._lead is not None:
            self._lead.begin(self._find_checkpoints(), self._find_epoch())

    def _find_checkpoints(self) -> tuple[int, ...]:
        found = () if self._checkpoints is None else self._checkpoints.find_counts()
        return (0, *found)

    def _find_epoch(self) -> int:
        return 0 if self._checkpoints is None else self._checkpoints.last.epoch

    def _send(self, session: _Session, message: Any, payload: Any = None) -> None:
        self._socket.send(session.route, messages.encode(message), payload)

    def _tell_all(self, message: Any) -> None:
        for session in self._sessions.values():
            self._send(session, message)
