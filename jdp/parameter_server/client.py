"""Client: which messages does a worker send, and when is a push or a pull done?"""

import dataclasses

from msgspec import structs

from jdp.parameter_server.messages import (
    Ended,
    Failed,
    Farewell,
    Leave,
    Outcome,
    Params,
    Ping,
    Pong,
    Pull,
    Push,
    SessionUnknown,
    Settled,
    ToServer,
    ToWorker,
    Version,
    Welcome,
    WorkerHello,
)

_HELLO_PERIOD_S = 0.3
_FIRST_RETRY_S = 1.0  # of an unanswered pull; doubles.
_MOST_RETRY_S = 8.0
_PINGS_PER_LEASE = 8
_LONGEST_PING_S = 1.0
_OVER = (
    "The job is over: all other workers have left. This worker came too late, or it "
    "was silent for longer than `lease_s`, and the servers waited `start_timeout_s` "
    "for it to come back."
)
_MOST_TEXT = 10_000  # characters of the text of `Failed`.


@dataclasses.dataclass
class _ServerPeer:
    """A server, as seen by a worker."""

    is_welcome: bool = False
    heard_s: float | None = None  # time of its last message.
    has_ended: bool = False  # its last message was `Ended`.
    send_s: float = 0.0  # time of the next hello or ping.


@dataclasses.dataclass
class _Pushing:
    """A push that is not settled."""

    push: Push
    settled: dict[int, Settled] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Pulling:
    """A pull that is not answered."""

    after: int
    pull: int
    retry_at_s: float
    retry_s: float = _FIRST_RETRY_S
    versions: dict[int, Version] = dataclasses.field(default_factory=dict)


class Client:
    """State machine of a worker; pure, without clocks, sockets and arrays.

    There is at most one unsettled push and one unanswered pull. Methods return messages
    to send, each with the index of its server. A lost message does no harm: unanswered
    messages are sent again.
    """

    def __init__(self, hellos: list[WorkerHello]):
        """Takes the first message to each server."""
        self.hellos = hellos
        self.session = hellos[0].session
        self.known = Version()  # the newest version seen.
        self.welcome: Welcome | None = None  # the last one of server 0.
        self.outcome: Outcome | None = None  # of the last push.
        self.failure = ""
        self.awaited: tuple[int, ...] = ()  # indices, from the last pong of server 0.
        self.counts: dict[Outcome, int] = {"applied": 0, "late": 0, "rejected": 0}
        self.sequence = 0
        self.is_leaving = False  # until server 0 has answered the goodbye.
        self._peers = [_ServerPeer() for _ in hellos]
        self._pushing: _Pushing | None = None
        self._pulling: _Pulling | None = None
        self._last_pull = 0

    @property
    def is_pushing(self) -> bool:
        """Whether a push is not settled."""
        return self._pushing is not None

    @property
    def is_pulling(self) -> bool:
        """Whether a pull is not answered."""
        return self._pulling is not None

    @property
    def is_welcome(self) -> bool:
        """Whether all servers know this worker."""
        return all(peer.is_welcome for peer in self._peers)

    def find_silent(self, *, since_s: float) -> list[int]:
        """Returns the servers without a message since then."""
        return [
            i
            for i, peer in enumerate(self._peers)
            if peer.heard_s is None or peer.heard_s < since_s
        ]

    def has_ended(self, server: int) -> bool:
        """Whether the last message of a server said that it was told to end."""
        return self._peers[server].has_ended

    def push(
        self,
        version: Version,
        *,
        weight: float,
        is_finite: bool,
        is_compressed: bool,
    ) -> list[tuple[int, ToServer]]:
        """Begins a push; the previous push must be settled."""
        assert self._pushing is None
        self.sequence += 1
        self._pushing = _Pushing(
            Push(
                self.session,
                self.sequence,
                version,
                weight,
                is_finite,
                is_compressed,
                False,
            )
        )
        self.outcome = None
        return [
            (i, self._pushing.push) for i, p in enumerate(self._peers) if p.is_welcome
        ]

    def pull(self, *, after: int, now_s: float) -> list[tuple[int, ToServer]]:
        """Begins a pull of the parameters after push number `after` is settled."""
        assert self._pulling is None
        self._pulling = _Pulling(after, 0, 0.0)
        return self._ask(now_s)

    def leave(self) -> list[tuple[int, ToServer]]:
        """Says goodbye, repeatedly until server 0 answers."""
        self.is_leaving = True
        self._peers[0].send_s = 0.0
        leave = Leave(self.session)
        return [(i, leave) for i in range(1, len(self._peers))]

    def receive(
        self, server: int, message: ToWorker, *, now_s: float
    ) -> list[tuple[int, ToServer]]:
        """Handles a message of a server; returns the replies."""
        peer = self._peers[server]
        peer.heard_s, peer.has_ended = now_s, False
        match message:
            case Farewell():
                self.is_leaving = False
            case SessionUnknown():
                peer.is_welcome, peer.send_s = False, now_s
            case Ended():
                peer.is_welcome, peer.has_ended = False, True
                if message.is_over:
                    self.failure = _OVER
            case Welcome():
                return self._enter(server, message, now_s)
            case Pong():
                if server == 0:
                    self.awaited = message.awaited
                return self._send_part(server, message.wants)
            case Settled():
                self._settle(server, message)
            case Params():
                return self._take(server, message, now_s)
            case Failed():
                self.failure = message.text[:_MOST_TEXT]
        return []

    def tick(self, *, now_s: float) -> list[tuple[int, ToServer]]:
        """Returns what is to be said since time has passed."""
        sent: list[tuple[int, ToServer]] = []
        if self.is_leaving:
            peer = self._peers[0]
            if now_s >= peer.send_s:
                peer.send_s = now_s + _HELLO_PERIOD_S
                sent.append((0, Leave(self.session)))
            return sent
        for i, peer in enumerate(self._peers):
            if now_s < peer.send_s:
                continue
            if peer.is_welcome:
                sent.append((i, Ping(self.session, self._pending_sequence())))
                peer.send_s = now_s + self.ping_period_s
            else:
                hello = structs.replace(self.hellos[i], known=self.known)
                sent.append((i, hello))
                peer.send_s = now_s + _HELLO_PERIOD_S
        pulling = self._pulling
        if pulling is not None and now_s >= pulling.retry_at_s:
            sent += self._ask(now_s)
        return sent

    @property
    def lease_s(self) -> float:
        """Longest silence that servers allow; infinite before the first welcome."""
        return float("inf") if self.welcome is None else self.welcome.lease_s

    @property
    def ping_period_s(self) -> float:
        """Longest silence of this worker."""
        if self.welcome is None:
            return _HELLO_PERIOD_S
        return min(_LONGEST_PING_S, self.welcome.lease_s / _PINGS_PER_LEASE)

    def is_current(self, message: Params) -> bool:
        """Whether parameters answer the newest request."""
        return self._pulling is not None and message.pull == self._pulling.pull

    def _pending_sequence(self) -> int:
        return 0 if self._pushing is None else self._pushing.push.sequence

    def _enter(
        self, server: int, welcome: Welcome, now_s: float
    ) -> list[tuple[int, ToServer]]:
        peer = self._peers[server]
        was_welcome, peer.is_welcome = peer.is_welcome, True
        if server == 0:
            self.welcome = welcome
        if was_welcome:
            return []
        peer.send_s = now_s + self.ping_period_s
        # If the server knows that the push is settled, it answers so.
        sent: list[tuple[int, ToServer]] = [
            (server, Ping(self.session, self._pending_sequence()))
        ]
        if self._pulling is not None and self.is_welcome:
            sent += self._ask(now_s)
        return sent

    def _send_part(self, server: int, sequence: int) -> list[tuple[int, ToServer]]:
        pushing = self._pushing
        if pushing is None or pushing.push.sequence != sequence:
            return []
        return [(server, pushing.push)]

    def _settle(self, server: int, settled: Settled) -> None:
        self.known = max(self.known, settled.version)
        pushing = self._pushing
        if pushing is None or pushing.push.sequence != settled.sequence:
            return
        pushing.settled[server] = settled
        # Servers that returned to a checkpoint settle it again, at another version.
        if len(pushing.settled) == len(self._peers):
            if len(set(map(_version_of, pushing.settled.values()))) == 1:
                self.outcome = settled.outcome
                self.counts[settled.outcome] += 1
                self._pushing = None

    def _take(
        self, server: int, params: Params, now_s: float
    ) -> list[tuple[int, ToServer]]:
        pulling = self._pulling
        if pulling is None or not self.is_current(params):
            return []
        pulling.versions[server] = params.version
        if len(pulling.versions) < len(self._peers):
            return []
        if len(set(pulling.versions.values())) > 1:
            return self._ask(now_s)
        self.known = max(self.known, params.version)
        self._pulling = None
        return []

    def _ask(self, now_s: float) -> list[tuple[int, ToServer]]:
        """Asks for parameters; answers to earlier requests are ignored."""
        pulling = self._pulling
        assert pulling is not None
        self._last_pull += 1
        pulling.pull = self._last_pull
        pulling.versions.clear()
        pulling.retry_at_s = now_s + pulling.retry_s
        # In synchronous mode, the answer comes when the slowest worker does.
        pulling.retry_s = min(2 * pulling.retry_s, _MOST_RETRY_S)
        if not self.is_welcome:
            return []
        # After a return to a checkpoint, servers might not know the settled push.
        after = pulling.after if self._pending_sequence() == pulling.after else 0
        return [(0, Pull(self.session, pulling.pull, after))]


def _version_of(settled: Settled) -> Version:
    return settled.version
