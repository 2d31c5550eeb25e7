"""Roll call: is everybody there, once each, before `jax.distributed` starts?

`jax.distributed.initialize` aborts the process when the coordinator cannot be reached,
a process is missing, or two claim one id. So the processes first meet at the same
address over a short-lived socket, and each gets an exception that says what is wrong.

Plain sockets, a line of JSON each way: whatever else connects is dropped. (A ROUTER of
libzmq 4.3 aborts the process when a stranger speaks to it while it closes, and the gRPC
client of `jax.distributed`, at the same address, is such a stranger.)
"""

import logging
import os
import platform
import selectors
import socket
import time
import uuid
from collections.abc import Mapping
from typing import NamedTuple

import jax
import msgspec

PROTOCOL = "jdp-roll-call-1"
_MAX_MESSAGE_BYTES = 1 << 14
_TELL_TIMEOUT_S = 5.0
_RETRY_S = 0.05
_logger = logging.getLogger("jdp")


class Hello(msgspec.Struct, frozen=True):
    """How a process introduces itself."""

    protocol: str
    process_id: int
    num_processes: int
    instance: str  # unique to this start of this process.
    host: str  # name of the machine, for errors.
    pid: int
    node: str  # equal for processes of one machine.
    jax_version: str


class Verdict(msgspec.Struct, frozen=True):
    """The end of the roll call: an error for all, or the node of each process."""

    error: str | None = None
    nodes: list[str] = []


class RollCall(NamedTuple):
    """Who has come so far."""

    num_processes: int
    deadline_s: float
    present: Mapping[int, Hello]  # by process id.
    error: str | None = None


def open_roll(own: Hello, *, deadline_s: float) -> RollCall:
    """Starts a roll call at process 0."""
    return RollCall(own.num_processes, deadline_s, {own.process_id: own})


def receive(roll: RollCall, hello: Hello) -> RollCall:
    """Enters `hello`; pure. A repeated message of one process changes nothing."""
    known = roll.present.get(hello.process_id)
    if roll.error or (known and known.instance == hello.instance):
        return roll
    reference = roll.present[0]
    error = None
    if hello.num_processes != roll.num_processes:
        error = (
            f"`num_processes` is {roll.num_processes} in process 0 "
            f"({_where(reference)}) and {hello.num_processes} in process "
            f"{hello.process_id} ({_where(hello)}). Start all with the same number."
        )
    elif not 0 <= hello.process_id < roll.num_processes:
        error = (
            f"`process_id` must be below {roll.num_processes}, got "
            f"{hello.process_id} ({_where(hello)})."
        )
    elif known:
        error = (
            f"`process_id={hello.process_id}` was given twice: {_where(known)} and "
            f"{_where(hello)}. Give each process its own."
        )
    elif hello.jax_version != reference.jax_version:
        error = (
            f"jax is {reference.jax_version} in process 0 ({_where(reference)}) and "
            f"{hello.jax_version} in process {hello.process_id} ({_where(hello)}). "
            "Install the same version everywhere."
        )
    if error:
        return roll._replace(error=error)
    return roll._replace(present={**roll.present, hello.process_id: hello})


def judge(roll: RollCall, *, now_s: float) -> Verdict | None:
    """Returns the verdict, or None while there is still somebody to wait for; pure."""
    if roll.error:
        return Verdict(error=roll.error)
    missing = [i for i in range(roll.num_processes) if i not in roll.present]
    if not missing:
        return Verdict(nodes=[roll.present[i].node for i in range(roll.num_processes)])
    if now_s < roll.deadline_s:
        return None
    shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
    return Verdict(
        error=f"{len(missing)} of {roll.num_processes} processes did not come in time: "
        f"{shown}. Look at their logs, and at whether they can reach the coordinator."
    )


def make_hello(process_id: int, num_processes: int, *, node: str | None) -> Hello:
    """Describes this process; `node` overrides how machines are told apart."""
    return Hello(
        protocol=PROTOCOL,
        process_id=process_id,
        num_processes=num_processes,
        instance=uuid.uuid4().hex,
        host=platform.node(),
        pid=os.getpid(),
        node=node or _machine(),
        jax_version=jax.__version__,
    )


def call_roll(own: Hello, address: str, *, timeout_s: float) -> list[str]:
    """Meets the other processes at `address`; every process calls it once.

    Args:
      own: this process.
      address: "host:port" at which process 0 listens, and nobody afterwards.
      timeout_s: how long to wait for the others, in seconds.

    Returns:
      The node of each process, by process id.

    Raises:
      RuntimeError: a process is missing, came twice or does not fit; the address is
        taken; or process 0 cannot be reached. On every process that could be told.
    """
    run = _serve if own.process_id == 0 else _attend
    verdict = run(own, address, timeout_s)
    if verdict.error is not None:
        raise RuntimeError(verdict.error)
    return verdict.nodes


def is_loopback(host: str) -> bool:
    """Returns whether `host` names this machine only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _serve(own: Hello, address: str, timeout_s: float) -> Verdict:
    """Process 0: hears everybody, and tells them how it ended."""
    deadline_s = time.monotonic() + timeout_s
    roll = open_roll(own, deadline_s=deadline_s)
    heard: list[socket.socket] = []
    with selectors.DefaultSelector() as selector:
        server = _listen(address)
        server.setblocking(False)  # who has called may have gone before `accept`.
        selector.register(server, selectors.EVENT_READ, _Guest(server))
        try:
            while (verdict := judge(roll, now_s=time.monotonic())) is None:
                left_s = max(0.0, deadline_s - time.monotonic())
                for key, _ in selector.select(left_s):
                    if key.fileobj is server:
                        try:
                            guest, _ = server.accept()
                        except OSError:
                            continue
                        guest.setblocking(False)
                        selector.register(guest, selectors.EVENT_READ, _Guest(guest))
                        continue
                    hello = _hear(key.data, selector)
                    if hello is not None:
                        heard.append(key.data.line)
                        roll = receive(roll, hello)
            # The others go on to `jax.distributed` at this address: free it first.
            selector.unregister(server)
            server.close()
            for line in heard:
                _tell(line, verdict)
        finally:
            for key in list(selector.get_map().values()):
                key.data.line.close()
            for line in heard:
                line.close()
    return verdict


class _Guest:
    """Somebody who has connected, and what it has said so far."""

    def __init__(self, line: socket.socket):
        self.line = line
        self.said = bytearray()


def _hear(guest: _Guest, selector: selectors.BaseSelector) -> Hello | None:
    """Reads on; returns a hello once it is whole. Who says anything else is dropped."""
    try:
        data = guest.line.recv(_MAX_MESSAGE_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        data = b""
    guest.said += data
    is_whole = guest.said.endswith(b"\n")
    if data and not is_whole and len(guest.said) <= _MAX_MESSAGE_BYTES:
        return None
    selector.unregister(guest.line)
    try:
        hello = msgspec.json.decode(guest.said, type=Hello)
        if hello.protocol == PROTOCOL:
            return hello
    except msgspec.MsgspecError:
        pass
    _logger.warning("Dropped a connection that did not begin with %s.", PROTOCOL)
    guest.line.close()
    return None


def _tell(line: socket.socket, verdict: Verdict) -> None:
    try:
        line.settimeout(_TELL_TIMEOUT_S)
        line.sendall(msgspec.json.encode(verdict) + b"\n")
    except OSError:
        _logger.warning("A process left before the end of the roll call.")


def _listen(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if host == "::1" else socket.AF_INET
            return socket.create_server((host, int(port)), family=family, backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", int(port)),
                family=socket.AF_INET6,
                dualstack_ipv6=True,
                backlog=1024,
            )
        return socket.create_server(("", int(port)), backlog=1024)
    except OSError as error:
        raise RuntimeError(
            f"Process 0 cannot listen at the coordinator address {address!r}: "
            f"{error.strerror}. Another program, or another process 0, may have the "
            "port; choose a free one."
        ) from None


def _attend(own: Hello, address: str, timeout_s: float) -> Verdict:
    """The others: introduce themselves to process 0 until it answers."""
    deadline_s = time.monotonic() + timeout_s
    host, port = address.rsplit(":", 1)
    reason = "nobody listens"
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, int(port)), timeout=left_s) as line:
                line.sendall(msgspec.json.encode(own) + b"\n")
                line.settimeout(max(0.001, deadline_s - time.monotonic()))
                with line.makefile("rb") as file:
                    answer = file.readline()
            return msgspec.json.decode(answer, type=Verdict)
        except msgspec.MsgspecError:
            reason = "something else than jdp answers there"
        except TimeoutError:
            reason = "it did not answer"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(_RETRY_S, max(0.0, deadline_s - time.monotonic())))
    raise RuntimeError(
        f"Process {own.process_id} of {own.num_processes} had no answer from the "
        f"coordinator at {address!r} within {timeout_s:g} s: {reason}. Is process 0 "
        "running there, is the address right, and can this machine "
        f"({platform.node()}) reach it?"
    )


def _where(hello: Hello) -> str:
    return f"{hello.host}, pid {hello.pid}"


def _machine() -> str:
    """Names this machine; the boot id tells apart machines with one name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{platform.node()}/{file.read().strip()}"
    except OSError:
        return platform.node()
