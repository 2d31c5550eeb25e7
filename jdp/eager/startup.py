"""Startup: do all processes have the same options, and which of them share a host?"""

import dataclasses
import pathlib
import platform
from typing import Any

import msgspec

from jdp.eager import messages
from jdp.eager.messages import ProtocolError
from jdp.eager.options import EagerOptions
from jdp.replicas import agreement
from jdp.replicas.mesh import World

_TOPIC = "start of the eager engine"
_SENT = "While the eager engine started, process {} sent a message that no engine sends"
# Options that may differ between processes.
_OWN = {"timeline", "flight_recorder_capacity", "flight_recorder_dir", "autotune_log"}


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """The options of one process, and its host."""

    options: dict[str, bool | int | float | str]
    host: str


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer of process 0: why the engine does not start, and all hosts."""

    error: str
    hosts: tuple[str, ...]


_hello = msgspec.msgpack.Decoder(_Hello)
_answer = msgspec.msgpack.Decoder(_Answer)


def agree(world: World, options: EagerOptions) -> tuple[str, ...]:
    """Compares the options of all processes with the options of process 0.

    Returns:
      By process, a text that identifies its host.

    Raises:
      RuntimeError: on every process, if the options differ, or a process does not come.
    """
    own = {k: v for k, v in dataclasses.asdict(options).items() if k not in _OWN}
    if world.process_count == 1:
        return (_host(),)
    hello = messages.encode(_Hello(own, _host()))
    said = agreement.meet(world, _TOPIC, hello, _compare)
    answer = _decode(_answer, 0, said)
    if answer.error:
        # Process 0 holds the store, and stays until all have read the answer.
        agreement.meet(world, _TOPIC, b"", lambda _: b"", then_raises=True)
        raise RuntimeError(answer.error)
    if len(answer.hosts) != world.process_count:
        raise RuntimeError(f"{_SENT.format(0)}: {len(answer.hosts)} hosts.")
    return answer.hosts


def _compare(bodies: list[bytes]) -> bytes:
    """Returns the encoded `_Answer` to an encoded `_Hello` of each process."""
    try:
        hellos = [_decode(_hello, peer, body) for peer, body in enumerate(bodies)]
    except RuntimeError as fault:
        return messages.encode(_Answer(str(fault), ()))
    own = hellos[0].options
    found = (_find_difference(own, p, x.options) for p, x in enumerate(hellos))
    error = next(filter(None, found), "")
    return messages.encode(_Answer(error, tuple(hello.host for hello in hellos)))


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
