"""Startup: do the options of all processes agree, and which share a host and cores?"""

import dataclasses
import pathlib
import platform
from typing import Any, NamedTuple

import msgspec

from jdp.eager import messages
from jdp.eager.messages import ProtocolError
from jdp.eager.options import EagerOptions
from jdp.replicas import agreement, cores
from jdp.replicas.cores import UsableCores
from jdp.replicas.mesh import World

_TOPIC = "start of the eager engine"
_SENT = "While the eager engine started, process {} sent a message that no engine sends"
# Options that may differ between processes.
_OWN = {"timeline", "flight_recorder_capacity", "flight_recorder_dir", "autotune_log"}


class Hosts(NamedTuple):
    """Hosts of the processes of a job."""

    names: tuple[str, ...]  # by process, a text that identifies its host.
    has_cores: bool  # whether each process of this host can have a core of its own.


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """The options of one process, its host and its cores."""

    options: dict[str, bool | int | float | str]
    host: str
    cores: UsableCores


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer of process 0: why the engine does not start, and all hosts."""

    error: str
    hosts: tuple[str, ...]
    hosts_with_cores: frozenset[str]  # Each process there can have a core of its own.


_hello = msgspec.msgpack.Decoder(_Hello)
_answer = msgspec.msgpack.Decoder(_Answer)


def agree(world: World, options: EagerOptions) -> Hosts:
    """Compares the options of all processes with the options of process 0.

    Raises:
      RuntimeError: on every process, if the options differ, or a process does not come.
    """
    own = {k: v for k, v in dataclasses.asdict(options).items() if k not in _OWN}
    host = _host()
    if world.process_count == 1:
        return Hosts((host,), has_cores=True)
    hello = messages.encode(_Hello(own, host, cores.find_usable()))
    said = agreement.meet(world, _TOPIC, hello, _compare)
    answer = _decode(_answer, 0, said)
    if answer.error:
        # Process 0 holds the store, and stays until all have read the answer.
        agreement.meet(world, _TOPIC, b"", lambda _: b"", then_raises=True)
        raise RuntimeError(answer.error)
    if len(answer.hosts) != world.process_count:
        raise RuntimeError(f"{_SENT.format(0)}: {len(answer.hosts)} hosts.")
    return Hosts(answer.hosts, has_cores=host in answer.hosts_with_cores)


def _compare(bodies: list[bytes]) -> bytes:
    """Returns the encoded `_Answer` to an encoded `_Hello` of each process."""
    try:
        hellos = [_decode(_hello, peer, body) for peer, body in enumerate(bodies)]
    except RuntimeError as fault:
        return messages.encode(_Answer(str(fault), (), frozenset()))
    own = hellos[0].options
    found = (_find_difference(own, p, x.options) for p, x in enumerate(hellos))
    error = next(filter(None, found), "")
    hosts = tuple(hello.host for hello in hellos)
    with_cores = frozenset(
        host
        for host in set(hosts)
        if cores.are_enough([hello.cores for hello in hellos if hello.host == host])
    )
    return messages.encode(_Answer(error, hosts, with_cores))


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
