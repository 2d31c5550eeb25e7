"""Startup: do all processes have the same options, and which of them share a host?"""

import dataclasses
import pathlib
import platform
import time
from typing import Any

import msgspec

from jdp.eager import messages
from jdp.eager.messages import ProtocolError
from jdp.eager.options import EagerOptions
from jdp.replicas.mesh import World
from jdp.runtime.transport.transport import Event, Link, Lost

# Options that may differ between processes.
_OWN = {"timeline", "flight_recorder_capacity", "flight_recorder_dir", "autotune_log"}


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a process."""

    options: dict[str, bool | int | float | str]
    host: str


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer of process 0: why the engine does not start, and all hosts."""

    error: str
    hosts: tuple[str, ...]


_hello = msgspec.msgpack.Decoder(_Hello)
_answer = msgspec.msgpack.Decoder(_Answer)


def meet(
    link: Link, world: World, options: EagerOptions
) -> tuple[tuple[str, ...], list[Event]]:
    """Compares the options of all processes with the options of process 0.

    Every process calls it, before anything else uses the link.

    Returns:
      By process, a text that identifies its host; and later events that came early.

    Raises:
      RuntimeError: on every process, if the options differ, or a process is lost, late
        or sends something else.
    """
    own = {k: v for k, v in dataclasses.asdict(options).items() if k not in _OWN}
    size = world.process_count
    if size == 1:
        return (_host(),), []
    if world.process_index > 0:
        link.send(0, messages.encode(_Hello(own, _host())))
        found, early = _collect(link, 1, world.timeout_s)
        answer = _decode(_answer, 0, found[0])
        if not answer.error and len(answer.hosts) != size:
            raise RuntimeError(f"{_SENT.format(0)}: {len(answer.hosts)} hosts.")
    else:
        found, early = _collect(link, size - 1, world.timeout_s)
        hosts, error = [_host()], ""
        for peer in range(1, size):
            try:
                hello = _decode(_hello, peer, found[peer])
            except RuntimeError as fault:
                error = error or str(fault)
                continue
            hosts.append(hello.host)
            error = error or _find_difference(own, peer, hello.options)
        answer = _Answer(error, tuple(hosts))
        for peer in found:
            link.send(peer, messages.encode(answer))
    if answer.error:
        raise RuntimeError(answer.error)
    return answer.hosts, early


_SENT = "While the eager engine started, process {} sent a message that no engine sends"


def _decode(decoder: msgspec.msgpack.Decoder[Any], peer: int, payload: bytes) -> Any:
    try:
        return messages.decode_as(decoder, payload)
    except ProtocolError as error:
        raise RuntimeError(f"{_SENT.format(peer)}: {error}.") from None


def _host() -> str:
    """Identifies this host; the boot id tells hosts with the same name apart."""
    try:
        boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""
    return f"{platform.node()} {boot_id}"


def _find_difference(own: dict[str, Any], peer: int, other: dict[str, Any]) -> str:
    for name, value in own.items():
        if other.get(name) != value:
            return (
                f"`{name}` is {value!r} on process 0 and {other.get(name)!r} on "
                f"process {peer}; the options must be the same on all processes."
            )
    return ""


def _collect(
    link: Link, count: int, timeout_s: float
) -> tuple[dict[int, bytes], list[Event]]:
    """Waits for one message from each of `count` peers; returns later events too."""
    first: dict[int, bytes] = {}
    more: list[Event] = []
    deadline_s = time.monotonic() + timeout_s
    while len(first) < count:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise RuntimeError(
                f"{count - len(first)} of the other processes did not say which "
                f"options they have within {timeout_s:g} s."
            )
        for event in link.wait(left_s):
            if event.peer in first:
                more.append(event)
            elif isinstance(event, Lost):
                raise RuntimeError(f"While the eager engine started: {event.why}.")
            else:
                first[event.peer] = event.payload
    return first, more
