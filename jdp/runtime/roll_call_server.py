"""Roll call server: how does process 0 hear all processes, and nothing else?"""

import errno
import logging
import os
import selectors
import socket
import time

from jdp.runtime import addresses, job_key, roll_call
from jdp.runtime.roll_call import (
    Challenge,
    Meeting,
    RollCallHello,
    RollCallRefused,
    RollCallVerdict,
)

_TELL_TIMEOUT_S = 5.0
_HELLO_TIMEOUT_S = 10.0  # A process sends it at once; if it is dropped, it calls again.
_MOST_GUESTS = 256  # connections without a hello, besides one per process.
_RESOLVE_S = 5.0  # A name server may be slow with the name of a new host.
_RESOLVE_PERIOD_S = 0.5
_PAUSE_S = 0.1  # without descriptors, until the next attempt.
_MOST_WARNINGS = 10
_MOST_ADDRESSES = 1000  # for which refused connections are counted.
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_logger = logging.getLogger("jdp")


class _Guest:
    """A connection, and the bytes received so far."""

    hello: RollCallHello  # set once it is complete.

    def __init__(self, line: socket.socket, challenge: Challenge, where: str):
        self.line = line
        self.challenge = challenge
        self.where = where  # address of the other end.
        self.said = bytearray()
        self.deadline_s = time.monotonic() + _HELLO_TIMEOUT_S


class RollCallServer:
    """Process 0: collects the hellos, and sends the verdict."""

    def __init__(
        self,
        own: RollCallHello,
        address: str,
        timeout_s: float,
        key: bytes | None,
        path: str,
    ):
        self._own, self._address, self._key = own, address, key
        self._job = job_key.name_job(address, os.environ)
        self._path = path
        self._deadline_s = time.monotonic() + timeout_s
        self._roll = roll_call.open_roll(own, deadline_s=self._deadline_s)
        self._guests: dict[socket.socket, _Guest] = {}  # in the order they came.
        self._heard: list[_Guest] = []  # connections with a valid hello.
        self._refused: dict[str, int] = {}  # connections, by address.
        self._paused_until_s = 0.0

    def serve(self) -> tuple[RollCallVerdict, Meeting]:
        """Runs the roll call to its end."""
        with selectors.DefaultSelector() as self._selector:
            server = listen(self._address)
            try:
                server.setblocking(False)  # A caller may leave before `accept`.
                self._selector.register(server, selectors.EVENT_READ)
                while (verdict := self._judge()) is None:
                    self._step(server)
            finally:
                # The others go on to `jax.distributed` at this address: free it first.
                server.close()
                for guest in self._guests.values():
                    guest.line.close()
            verdict, bind_host = self._complete(verdict)
            self._tell(verdict)
        session_key = roll_call.session_key(self._key, verdict.session)
        host = verdict.host
        found = Meeting(verdict.nodes, host, host, bind_host, session_key, verdict.path)
        return verdict, found

    def _judge(self) -> RollCallVerdict | None:
        verdict = roll_call.judge(self._roll, now_s=time.monotonic())
        if verdict is not None and verdict.error is not None and self._refused:
            shown = ", ".join(list(self._refused)[:10])
            count = sum(self._refused.values())
            wanted = "prove the key of this job" if self._key else "begin as they must"
            why = f"{count} connections were refused, which did not {wanted}: {shown}."
            if self._key:
                why += " Give all the same `--key-file` or `JDP_JOB_KEY`."
            error = f"{verdict.error} {why}"
            verdict = RollCallVerdict(error=error, missing=verdict.missing)
        return verdict

    def _step(self, server: socket.socket) -> None:
        now_s = time.monotonic()
        is_paused = self._paused_until_s > now_s
        wait_s = self._deadline_s - now_s
        for guest in list(self._guests.values()):
            if guest.deadline_s <= now_s:
                self._drop(guest, "said no hello in time")
            else:
                wait_s = min(wait_s, guest.deadline_s - now_s)
        if is_paused:
            wait_s = min(wait_s, self._paused_until_s - now_s)
            self._selector.unregister(server)
        for selected, _ in self._selector.select(max(0.0, wait_s)):
            if selected.fileobj is server:
                self._accept(server)
            elif selected.data in self._heard:
                self._listen_for_end(selected.data)
            elif selected.fileobj in self._guests:
                self._hear(selected.data)
        if is_paused:
            self._selector.register(server, selectors.EVENT_READ)

    def _accept(self, server: socket.socket) -> None:
        try:
            line, _ = server.accept()
        except OSError as error:
            if error.errno in _FULL:
                if not self._paused_until_s:
                    self._warn(
                        "There are no descriptors left for processes that connect. "
                        "Raise their number with `ulimit -n`."
                    )
                for guest in list(self._guests.values())[:1]:
                    self._drop(guest, "waited longest when descriptors ran out")
                self._paused_until_s = time.monotonic() + _PAUSE_S
            return
        try:
            line.setblocking(False)
            where = addresses.unmap(str(line.getpeername()[0]))
            challenge = roll_call.make_challenge(self._key, self._job)
            line.send(roll_call.encode_challenge(challenge))  # Fits into any queue.
        except OSError:
            line.close()
            return
        if len(self._guests) >= _MOST_GUESTS + self._own.num_processes:
            oldest = next(iter(self._guests.values()))
            self._drop(oldest, "has said nothing for longest of too many")
        guest = self._guests[line] = _Guest(line, challenge, where)
        self._selector.register(line, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> None:
        """Reads on; enters a complete hello, and drops anything else."""
        data = _receive(guest.line)
        if data is None:
            return
        guest.said += data
        is_whole = guest.said.endswith(b"\n")
        if data and not is_whole and len(guest.said) <= roll_call.MOST_HELLO_BYTES:
            return
        try:
            if len(guest.said) > roll_call.MOST_HELLO_BYTES:
                raise RollCallRefused("it is too long")
            said = bytes(guest.said)
            hello = roll_call.decode_hello(said, guest.challenge, self._key)
        except RollCallRefused as error:
            self._drop(guest, f"did not begin with {roll_call.PROTOCOL}: {error}")
            return
        del self._guests[guest.line]
        guest.hello = hello
        self._roll = roll_call.receive(self._roll, hello)
        self._heard.append(guest)

    def _listen_for_end(self, guest: _Guest) -> None:
        """Forgets a process that hangs up before the verdict; it sends nothing else."""
        if _receive(guest.line) != b"":
            return
        self._selector.unregister(guest.line)
        guest.line.close()
        self._heard.remove(guest)
        # If it has called again meanwhile, only the later connection counts.
        if all(other.hello != guest.hello for other in self._heard):
            self._roll = roll_call.forget(self._roll, guest.hello)

    def _drop(self, guest: _Guest, why: str) -> None:
        del self._guests[guest.line]
        self._selector.unregister(guest.line)
        guest.line.close()
        if guest.where not in self._refused:
            self._warn(f"Dropped a connection from {guest.where} that {why}.")
        if guest.where in self._refused or len(self._refused) < _MOST_ADDRESSES:
            self._refused[guest.where] = self._refused.get(guest.where, 0) + 1

    def _warn(self, text: str) -> None:
        if len(self._refused) < _MOST_WARNINGS:
            _logger.warning("Roll call: %s", text)

    def _complete(self, verdict: RollCallVerdict) -> tuple[RollCallVerdict, str]:
        """Adds the address of process 0 to the verdict; returns where to listen too."""
        reached = []
        for guest in self._heard:
            try:
                reached.append(addresses.unmap(str(guest.line.getsockname()[0])))
            except OSError:
                continue  # Its end is noticed soon.
        host, serves_all = addresses.choose_host(reached)
        if verdict.error is None:
            session = roll_call.make_challenge(None).nonce
            verdict = RollCallVerdict(
                nodes=verdict.nodes, host=host, session=session, path=self._path
            )
        return verdict, host if serves_all else ""

    def _tell(self, verdict: RollCallVerdict) -> None:
        deadline_s = time.monotonic() + _TELL_TIMEOUT_S
        for guest in self._heard:
            line = roll_call.encode_verdict(
                verdict, guest.challenge, guest.hello.instance, self._key
            )
            try:
                guest.line.settimeout(max(0.05, deadline_s - time.monotonic()))
                guest.line.sendall(line)
            except OSError:
                _logger.warning(
                    "Process %d left before the end of the roll call.",
                    guest.hello.process_id,
                )
            finally:
                guest.line.close()


def listen(address: str) -> socket.socket:
    """Listens for the roll call: on the loopback interface alone, or on all.

    Raises:
      RuntimeError: the address is taken, or its host name has no address here: the
        processes could not reach it, but strangers could.
    """
    host, port = addresses.split(address)
    _check_name(host, address)
    try:
        if addresses.is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise RuntimeError(
            f"Process 0 cannot listen at the coordinator address {address!r}: "
            f"{error.strerror}. Another program, or another process 0, may have the "
            "port; choose a free one."
        ) from None


def _check_name(host: str, address: str) -> None:
    deadline_s = time.monotonic() + _RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() < deadline_s:
                time.sleep(_RESOLVE_PERIOD_S)
                continue
            raise RuntimeError(
                f"Process 0 does not listen at the coordinator address {address!r}: "
                f"the name {host!r} has no address here ({error}). Give a name or an "
                "address of the host of process 0, the same to all processes."
            ) from None


def _receive(line: socket.socket) -> bytes | None:
    """Returns what has come, b"" where the other end is gone, None for nothing yet."""
    try:
        return line.recv(roll_call.MOST_HELLO_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""
