"""Connection: how does a worker talk to the servers while its program computes?"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import structs

from jdp.parameter_server import messages, sockets
from jdp.parameter_server.client import Client
from jdp.parameter_server.keys import Keys
from jdp.parameter_server.messages import (
    Outcome,
    Params,
    Push,
    ToServer,
    Version,
    Welcome,
)
from jdp.parameter_server.shared_memory_lane import SharedMemoryLane
from jdp.parameter_server.sockets import ClientSockets, Message

_TICK_S = 0.05
_JOIN_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 3.0  # for the answer to a goodbye.
_HEARD_S = 3.0  # a server that was silent for so long may be gone.


class Connection:
    """A client with a thread of its own; only that thread uses the sockets.

    Pings, pushes and pulls are sent while the program computes.
    """

    def __init__(
        self,
        client: Client,
        shared_memory_lanes: Sequence[SharedMemoryLane | None],
        addresses: Sequence[str],
        keys: Keys,
        *,
        num_pulled_bytes: Sequence[int],
        timeout_s: float,
        wait_timeout_s: float,
    ):
        """Starts the thread.

        Args:
          client: a new client.
          shared_memory_lanes: per server; None: arrays go through the socket.
          addresses: "host:port" of each server.
          keys: keys of the job.
          num_pulled_bytes: bytes of the parameters of each server.
          timeout_s: as in `WorkerOptions`.
          wait_timeout_s: as in `WorkerOptions`.
        """
        self._client, self._shared_memory_lanes = client, shared_memory_lanes
        self._num_pulled_bytes = num_pulled_bytes
        self._addresses = addresses
        self._timeout_s, self._wait_timeout_s = timeout_s, wait_timeout_s
        self._sockets = ClientSockets(addresses, keys, most_bytes=max(num_pulled_bytes))
        self._changed = threading.Condition()
        self._outbox: list[tuple[int, ToServer]] = []
        self._payloads: list[memoryview] = []  # of the push, by server.
        self._has_shared_memory = [False] * len(addresses)
        self._pulled: dict[int, Any] = {}  # by server, of the pull.
        self._has_asked = False  # for parameters that were not taken yet.
        self._failure = ""
        self._longest_gap_s = 0.0  # between two ticks of the thread.
        self._is_closing = False
        self._leave_end_s = 0.0
        self._started_s = time.monotonic()
        self._process_id = os.getpid()
        self._thread = threading.Thread(
            target=self._run, name="jdp parameter-server worker", daemon=True
        )
        self._thread.start()

    def await_welcome(self) -> Welcome:
        """Waits until all servers know this worker.

        Raises:
          RuntimeError: a server does not answer, or refuses this worker.
        """
        self._wait(lambda: self._client.is_welcome, "all servers say welcome")
        assert self._client.welcome is not None
        return self._client.welcome

    def push(self, payloads: list[memoryview], version: Version, **what: Any) -> int:
        """Begins a push; returns its sequence number.

        Args:
          payloads: per server; they must not change until the push is settled.
          version: version of the parameters that the gradient was computed at.
          **what: keyword arguments of `Client.push`.
        """
        with self._acting():
            self._payloads = payloads
            self._outbox += self._client.push(version, **what)
            return self._client.sequence

    def pull(self, *, after: int) -> None:
        """Begins a pull, unless the result of an earlier pull was not taken yet."""
        with self._acting():
            if not self._has_asked:
                self._has_asked = True
                self._pulled.clear()
                now_s = time.monotonic()
                self._outbox += self._client.pull(after=after, now_s=now_s)

    def await_push(self) -> Outcome | None:
        """Waits until the last push is settled; returns its outcome."""
        self._wait(lambda: not self._client.is_pushing, "a push is settled")
        return self._client.outcome

    def await_pull(self) -> tuple[list[Any], Version]:
        """Waits for parameters; returns their memory per server, and the version."""
        self._wait(lambda: not self._client.is_pulling, "parameters come")
        with self._changed:
            self._has_asked = False
            ordered = [self._pulled[i] for i in range(len(self._addresses))]
            return [payload for payload, _ in ordered], ordered[0][1]

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called."""
        return not self._is_closing

    @property
    def counts(self) -> dict[Outcome, int]:
        """Pushes by outcome."""
        return dict(self._client.counts)

    def close(self) -> None:
        """Says goodbye, and ends the thread; in a forked child it does nothing."""
        if os.getpid() != self._process_id:
            return
        with self._changed:
            if self._is_closing:
                return
            self._outbox += self._client.leave()
            # No wait for a silent server: it may never come back.
            is_heard = not self._client.find_silent(since_s=time.monotonic() - _HEARD_S)
            wait_s = _LEAVE_TIMEOUT_S if is_heard and not self._failure else 0.0
            self._leave_end_s = time.monotonic() + wait_s
            self._is_closing = True
        self._sockets.wake()
        self._thread.join(_JOIN_TIMEOUT_S)

    @contextlib.contextmanager
    def _acting(self) -> Iterator[None]:
        self._check_is_not_forked()
        with self._changed:
            self._check()
            yield
        self._sockets.wake()

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        self._check_is_not_forked()
        start_s = time.monotonic()
        with self._changed:
            while not is_done():
                self._check()
                now_s = time.monotonic()
                self._check_is_heard(now_s)
                if now_s - start_s > self._wait_timeout_s:
                    raise RuntimeError(self._explain_wait(what))
                self._changed.wait(_TICK_S)
            self._check()

    def _explain_wait(self, what: str) -> str:
        client = self._client
        others = [w for w in client.awaited if w != client.hellos[0].worker]
        names = ", ".join(map(str, others))
        return (
            f"This worker has waited {self._wait_timeout_s:g} s until {what}. The "
            "servers answer"
            + (f", and wait for worker {names}: look at its log" if names else "")
            + ". They wait for workers that are stuck, and at the start up to "
            "`start_timeout_s` for workers that have not come. `wait_timeout_s` of "
            "`WorkerOptions` limits the wait of this worker."
        )

    def _check_is_not_forked(self) -> None:
        """Raises RuntimeError in a forked child, whose locks may be held for ever."""
        if os.getpid() != self._process_id:
            raise RuntimeError(
                "This process was forked from a worker, whose thread and connections "
                "belong to the parent. Pull and push in the parent, or start the child "
                'with `multiprocessing.get_context("spawn")`.'
            )

    def _check(self) -> None:
        if self._failure:
            raise RuntimeError(self._failure)
        if self._is_closing:
            raise RuntimeError("This worker is closed.")

    def _check_is_heard(self, now_s: float) -> None:
        if now_s - self._started_s <= self._timeout_s:
            return
        silent = self._client.find_silent(since_s=now_s - self._timeout_s)
        if not silent:
            return
        names = {i: f"{i} at {self._addresses[i]}" for i in silent}
        deaf = [i for i in silent if not sockets.is_listening(self._addresses[i])]
        if told := [names[i] for i in silent if self._client.has_ended(i)]:
            raise RuntimeError(
                f"Servers that were told to end (SIGTERM, or `Server.stop`): "
                f"{', '.join(told)}. They wrote a checkpoint, if they have a "
                f"`checkpoint_dir`, and were not started again within "
                f"{self._timeout_s:g} s. Start the job again to go on from there."
            )
        stood = ""
        if len(deaf) == len(silent):
            stood = (
                " Nothing listens there now: the job is over, or it has not begun, or "
                "the address belongs to another host."
            )
        if self._longest_gap_s > self._client.lease_s:
            stood += (
                f" This worker itself stood still for {self._longest_gap_s:.1f} s, "
                f"longer than `lease_s`: the job may have ended without it."
            )
        raise RuntimeError(
            f"Servers that have not answered for {self._timeout_s:g} s: "
            f"{', '.join(names.values())}. Look at their logs, whether the address is "
            "right and can be reached from here, and whether they have the key file of "
            f"this worker.{stood}"
        )

    def _run(self) -> None:
        last_s = time.monotonic()
        try:
            while not self._is_closing or self._outbox or self._is_leaving():
                now_s = time.monotonic()
                self._longest_gap_s = max(self._longest_gap_s, now_s - last_s)
                last_s = now_s
                with self._changed:
                    outbox, self._outbox = self._outbox, []
                    outbox += self._client.tick(now_s=time.monotonic())
                self._send(outbox)
                self._sockets.poll(_TICK_S)
                for message in self._sockets.receive():
                    self._hear(message)
        except Exception as error:
            with self._changed:
                self._failure = f"The connection to the servers has failed: {error!r}"
                self._changed.notify_all()
        finally:
            self._sockets.close()

    def _is_leaving(self) -> bool:
        """Whether the goodbye is still unanswered and repeated."""
        return self._client.is_leaving and time.monotonic() < self._leave_end_s

    def _send(self, outbox: list[tuple[int, ToServer]]) -> None:
        for server, message in outbox:
            payload = None
            if isinstance(message, Push):
                if self._has_shared_memory[server]:
                    message = structs.replace(message, is_in_shared_memory=True)
                else:
                    payload = self._payloads[server]
            self._sockets.send(server, messages.encode(message), payload)

    def _hear(self, message: Message) -> None:
        server = message.source
        assert isinstance(server, int)
        with self._changed:
            try:
                found = messages.decode(message.header, messages.to_worker)
                if isinstance(found, Welcome):
                    self._has_shared_memory[server] = found.has_shared_memory
                if isinstance(found, Params) and self._client.is_current(found):
                    self._keep(server, found, message.payload)
                now_s = time.monotonic()
                self._outbox += self._client.receive(server, found, now_s=now_s)
                self._failure = self._failure or self._client.failure
            except messages.RefusedError as error:
                self._failure = str(error)
            except messages.MessageError as error:
                where = self._addresses[server]
                self._failure = f"Server {server} at {where} {error}."
            self._changed.notify_all()

    def _keep(self, server: int, params: Params, payload: memoryview | None) -> None:
        num_bytes = self._num_pulled_bytes[server]
        if params.is_in_shared_memory:
            shared_memory = self._shared_memory_lanes[server]
            if shared_memory is None:
                raise messages.MessageError("sent parameters without shared memory")
            payload = shared_memory.pulled[:num_bytes]
        found = 0 if payload is None else len(payload)
        if found != num_bytes:
            raise messages.MessageError(
                f"sent {found} bytes of parameters instead of {num_bytes}"
            )
        self._pulled[server] = payload, params.version
