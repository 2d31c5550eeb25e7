"""Rendezvous: how do hub and spokes of a link find and trust each other?"""

import contextlib
import logging
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterable

import msgspec
import zmq
from zmq.utils import z85

from jdp.replicas import wire
from jdp.replicas.meeting import OUTCOME, MeetingOutcome, StoreMeeting
from jdp.replicas.mesh import World
from jdp.runtime import addresses, forks, private_folder
from jdp.runtime.transport.datagram_link import LaneLink
from jdp.runtime.transport.transport import VERSION, Link, LinkOptions, Lost
from jdp.runtime.transport.zmq_link import ZmqLink

_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85
_ENDPOINT = re.compile(
    r"tcp://(\*|[0-9.]+|\[[0-9a-f:.]+\]):[0-9]{1,5}"
    r"|ipc://(?:@|(?P<folder>/[^\0\n]+)/)jdp-[0-9a-f]{16}(-pulse)?",
    re.ASCII,
)
# The stage before the outcome: where the hub listens for messages and for heartbeats,
# at "tcp://*:port", "ipc:///path" or the abstract "ipc://@name".
_ENDPOINTS = "endpoints"
_logger = logging.getLogger("jdp")


class _LinkOffer(msgspec.Struct, frozen=True):
    """First message of a process, after a byte with the version."""

    public_key: bytes  # of CURVE, in Z85.
    options: LinkOptions


def open_link(world: World, *, key: str, options: LinkOptions) -> Link:
    """Implements `transport.open_link` for several processes."""
    link, endpoint = open_sockets(world, key=key, options=options)
    if endpoint.startswith("ipc://"):
        return LaneLink(
            link,
            world.process_index,
            world.process_count,
            gap_timeout_s=options.heartbeat_timeout_s,
        )
    return link


def open_sockets(
    world: World, *, key: str, options: LinkOptions
) -> tuple[ZmqLink, str]:
    """Opens a link over ZeroMQ only; returns it and the endpoint of the hub."""
    assert world.store is not None
    meeting = StoreMeeting(world.store, key, world.process_index, world.timeout_s)
    public_key, secret_key = zmq.curve_keypair()
    offer = bytes((VERSION,)) + msgspec.msgpack.encode(_LinkOffer(public_key, options))
    meeting.leave_record(offer)
    if world.process_index == 0:
        return _open_hub(world, meeting, options, secret_key)
    return _open_spoke(world, meeting, options, (public_key, secret_key))


def _open_hub(
    world: World, meeting: StoreMeeting, options: LinkOptions, secret_key: bytes
) -> tuple[ZmqLink, str]:
    deadline_s = time.monotonic() + world.timeout_s
    link, stage = None, _ENDPOINTS
    stack = contextlib.ExitStack()
    try:
        admitted = _gather_keys(world, meeting, options)
        link = ZmqLink(0, world.process_count, options, admitted=admitted)
        folder = _enter_folder(world.host, stack)
        endpoints = _listen(link, world.host, folder, secret_key)
        if folder:
            for path in (endpoint.removeprefix("ipc://") for endpoint in endpoints):
                stack.callback(forks.only_here(private_folder.remove_socket), path)
        # Others connect only once all keys are known: a handshake has its own deadline.
        _announce(meeting, _ENDPOINTS, body=msgspec.msgpack.encode(endpoints))
        stage = OUTCOME
        _await_hellos(world, link, deadline_s)
    except BaseException as error:
        _announce(meeting, stage, error=str(error) or repr(error))
        if link is not None:
            link.close()
        raise
    finally:
        stack.close()  # Either all are connected, or the link has failed.
    _announce(meeting, OUTCOME)
    return link, endpoints[0]


def _open_spoke(
    world: World,
    meeting: StoreMeeting,
    options: LinkOptions,
    keys: tuple[bytes, bytes],
) -> tuple[ZmqLink, str]:
    hub_key = _hear_offers(world, meeting, options, [0])[0].public_key
    data, pulse = _hear_endpoints(meeting)
    if data.startswith("tcp://*:"):
        address = addresses.bracket(find_addresses(world.host)[0])
        data, pulse = (e.replace("*", address, 1) for e in (data, pulse))
    link = ZmqLink(world.process_index, world.process_count, options)
    try:
        link.connect((data, pulse), hub_key, keys)
        _hear(meeting, OUTCOME)
        link.hold_connections()
    except BaseException:
        link.close()
        raise
    return link, data


def _gather_keys(
    world: World, meeting: StoreMeeting, options: LinkOptions
) -> dict[bytes, int]:
    """Returns the process of each public key of the others."""
    offers = _hear_offers(world, meeting, options, range(1, world.process_count))
    return {z85.decode(offer.public_key): p for p, offer in offers.items()}


def _await_hellos(world: World, link: ZmqLink, deadline_s: float) -> None:
    while missing := link.find_missing():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise RuntimeError(_describe_missing(world, missing))
        for event in link.wait(left_s):
            if isinstance(event, Lost):
                raise RuntimeError(f"While a link was opened: {event.why}.")


def _enter_folder(host: str, stack: contextlib.ExitStack) -> str:
    """Returns a private folder for the sockets; "" if it cannot be made."""
    if sys.platform != "linux" or not addresses.is_loopback(host):
        return ""
    try:
        return stack.enter_context(private_folder.enter())
    except OSError as error:
        _logger.warning(
            "There is no folder of this user alone (%s), so process 0 listens for "
            "the others at a name that other accounts of this host can reach, and "
            "drops them. Set TMPDIR to a folder with a short path.",
            error,
        )
        return ""


def _listen(
    link: ZmqLink, host: str, folder: str, secret_key: bytes
) -> tuple[str, str]:
    """Binds the hub where the others can reach it; returns its endpoints."""
    error = None
    for endpoint in find_endpoints(host, folder):
        try:
            data, pulse = link.listen(endpoint, secret_key)
        except zmq.ZMQError as failure:
            error = failure
            continue
        return _hide_address(data), _hide_address(pulse)
    raise RuntimeError(f"Process 0 cannot listen for the others at {host!r}: {error}.")


def _hide_address(endpoint: str) -> str:
    # Each process resolves the address of the host on its own.
    if endpoint.startswith("tcp://"):
        return "tcp://*:" + endpoint.rpartition(":")[2]
    return endpoint


def find_endpoints(host: str, folder: str) -> list[str]:
    """Returns where the hub of a job may listen, best first.

    Args:
      host: name or address by which the processes reach process 0, the caller.
      folder: private folder of this user for Unix sockets; or "".
    """
    if addresses.is_loopback(host):
        # All processes are on one host: Unix sockets take a sixth off a round trip.
        # Without a folder, other accounts can reach their name.
        if sys.platform == "linux":
            place = f"{folder}/" if folder else "@"
            return [f"ipc://{place}jdp-{secrets.token_hex(8)}"]
        return [f"tcp://{addresses.bracket(find_addresses(host)[0])}:*"]
    found = find_addresses(host)
    # On a machine itself, its name often resolves to 127.x.x.x. A name with several
    # addresses may resolve to another one elsewhere.
    if len(found) == 1 and not addresses.is_loopback(found[0]):
        return [f"tcp://{addresses.bracket(found[0])}:*", "tcp://*:*"]
    return ["tcp://*:*"]


def find_addresses(host: str) -> list[str]:
    """Returns the numeric addresses of `host`, IPv4 first.

    Raises:
      RuntimeError: it has no address here.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RuntimeError(
            f"`World.host` {host!r} has no address here: {error}."
        ) from None
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def _hear_offers(
    world: World, meeting: StoreMeeting, options: LinkOptions, processes: Iterable[int]
) -> dict[int, _LinkOffer]:
    found = meeting.gather(processes) or {}
    missing = [p for p in processes if p not in found]
    if missing:
        raise RuntimeError(_describe_missing(world, missing))
    own = world.process_index
    return {p: _check_offer(p, found[p], own, options) for p in processes}


def _check_offer(
    process: int, offer: bytes, own: int, options: LinkOptions
) -> _LinkOffer:
    version = offer[0] if offer else None
    if version != VERSION:
        raise RuntimeError(
            f"Process {process} speaks version {version} of the transport, process "
            f"{own} version {VERSION}. Install the same jdp everywhere."
        )
    found = wire.decode(offer[1:], _LinkOffer, what=f"The offer of process {process}")
    if not _KEY.fullmatch(found.public_key):
        raise wire.Malformed(f"The offer of process {process} holds no key of CURVE.")
    if found.options != options:
        raise RuntimeError(
            "`options` of a link differ:\n"
            f"  process {own}: {options}\n  process {process}: {found.options}\n"
            "Give all processes the same."
        )
    return found


def _check_endpoints(endpoints: tuple[str, str]) -> tuple[str, str]:
    """Returns `endpoints` if `_listen` could have made them; refuses all others."""
    for endpoint in endpoints:
        found = _ENDPOINT.fullmatch(endpoint)
        if not found:
            raise wire.Malformed(f"Process 0 cannot listen at {endpoint[:200]!r}.")
        folder = found["folder"]
        if folder is not None and not private_folder.is_private(folder):
            raise RuntimeError(
                f"Process 0 listens in {folder!r}, which is not a folder of this user "
                "alone here. The processes of a job on one host must be of one user "
                "and see the same files; give them one TMPDIR."
            )
    return endpoints


def _announce(
    meeting: StoreMeeting, stage: str, *, body: bytes = b"", error: str | None = None
) -> None:
    outcome = MeetingOutcome(body, error)
    meeting.announce(msgspec.msgpack.encode(outcome), stage)


def _hear_endpoints(meeting: StoreMeeting) -> tuple[str, str]:
    what = "The addresses of process 0"
    found = wire.decode(_hear(meeting, _ENDPOINTS), tuple[str, str], what=what)
    return _check_endpoints(found)


def _hear(meeting: StoreMeeting, stage: str) -> bytes:
    # The hub may come later, and then waits as long for the others.
    try:
        found = meeting.hear(stage)
    except TimeoutError:
        raise RuntimeError(
            "Process 0 began to open a link and did not go on within "
            f"{meeting.answer_timeout_s:g} s. Look at its log."
        ) from None
    assert found is not None
    what = "The notice of process 0 about a link"
    outcome = wire.decode(found, MeetingOutcome, what=what)
    if outcome.error is not None:
        raise RuntimeError(outcome.error)
    return outcome.body


def _describe_missing(world: World, missing: list[int]) -> str:
    shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
    return (
        f"{len(missing)} of {world.process_count} processes did not come to open a "
        f"link within {world.timeout_s:g} s: {shown}. Look at their logs, and at "
        "whether they can reach process 0."
    )
