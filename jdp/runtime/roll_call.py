"""Roll call: is everybody there, once each, before `jax.distributed` starts?

`jax.distributed.initialize` aborts the process when the coordinator cannot be reached,
a process is missing, or two claim one id. So the processes first meet at the same
address over a short-lived socket, and each gets an exception that says what is wrong.
"""

import logging
import os
import platform
import socket
import time
import uuid
from collections.abc import Mapping
from typing import NamedTuple

import jax
import msgspec
import zmq

PROTOCOL = "jdp-roll-call-1"
_MAX_MESSAGE_BYTES = 1 << 14
_LINGER_MS = 2000
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
    context = zmq.Context()
    try:
        run = _serve if own.process_id == 0 else _attend
        verdict = run(context, own, address, timeout_s)
    finally:
        context.term()
    if verdict.error is not None:
        raise RuntimeError(verdict.error)
    return verdict.nodes


def is_loopback(host: str) -> bool:
    """Returns whether `host` names this machine only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _serve(context: zmq.Context, own: Hello, address: str, timeout_s: float) -> Verdict:
    host, port = address.rsplit(":", 1)
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, _LINGER_MS)
    router.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    try:
        try:
            router.bind(f"tcp://{'127.0.0.1' if is_loopback(host) else '*'}:{port}")
        except zmq.ZMQError as error:
            raise RuntimeError(
                f"Process 0 cannot listen at the coordinator address {address!r}: "
                f"{error.strerror}. Another program, or another process 0, has the "
                "port; choose a free one."
            ) from None
        roll = open_roll(own, deadline_s=time.monotonic() + timeout_s)
        senders: set[bytes] = set()
        while (verdict := judge(roll, now_s=time.monotonic())) is None:
            left_s = roll.deadline_s - time.monotonic()
            if not router.poll(max(0, int(1000 * left_s))):
                continue
            sender, *frames = router.recv_multipart()
            hello = _decode(frames)
            if hello is not None:
                senders.add(sender)
                roll = receive(roll, hello)
        reply = msgspec.msgpack.encode(verdict)
        for sender in senders:
            router.send_multipart([sender, reply])
        return verdict
    finally:
        router.close()


def _attend(
    context: zmq.Context, own: Hello, address: str, timeout_s: float
) -> Verdict:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IPV6, 1)
    dealer.setsockopt(zmq.MAXMSGSIZE, 1 << 24)
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    try:
        dealer.connect(f"tcp://{address}")
        dealer.send(msgspec.msgpack.encode(own))
        # Process 0 waits `timeout_s` from when it began; it may have begun later.
        if dealer.poll(int(1000 * timeout_s)):
            return msgspec.msgpack.decode(dealer.recv(), type=Verdict)
        raise RuntimeError(
            f"Process {own.process_id} of {own.num_processes} had no answer from the "
            f"coordinator at {address!r} within {timeout_s:.0f} s. Is process 0 "
            "running there, is the address right, and can this machine "
            f"({socket.gethostname()}) reach it?"
        )
    except zmq.ZMQError as error:
        raise RuntimeError(
            f"The coordinator address {address!r} cannot be used: {error.strerror}."
        ) from None
    finally:
        dealer.close()


def _decode(frames: list[bytes]) -> Hello | None:
    try:
        hello = msgspec.msgpack.decode(frames[-1], type=Hello)
    except (IndexError, msgspec.MsgspecError):
        hello = None
    if hello is None or hello.protocol != PROTOCOL:
        _logger.warning("Dropped a message that is no %s hello.", PROTOCOL)
        return None
    return hello


def _where(hello: Hello) -> str:
    return f"{hello.host}, pid {hello.pid}"


def _machine() -> str:
    """Names this machine; the boot id tells apart machines with one name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{platform.node()}/{file.read().strip()}"
    except OSError:
        return platform.node()
