"""Startup: do all processes go by the same options? And what process 0 makes."""

import dataclasses
import time
from typing import Any

import msgspec

from jdp.eager import controller
from jdp.eager.controller import Coordinator
from jdp.eager.options import EagerOptions
from jdp.mesh import World
from jdp.runtime.transport import Event, Link, Lost

# Options that a process may have for itself.
_OWN = {"timeline", "flight_recorder_capacity", "flight_recorder_dir", "autotune_log"}


def compare_options(link: Link, world: World, options: EagerOptions) -> list[Event]:
    """Compares the options of all processes with those of process 0.

    Every process calls it, first of all that use the link.

    Returns:
      What came early, of what follows.

    Raises:
      RuntimeError: they differ, or a process is lost or late; on every process.
    """
    if world.process_count == 1:
        return []
    own = {k: v for k, v in dataclasses.asdict(options).items() if k not in _OWN}
    encode = msgspec.msgpack.encode
    if world.process_index > 0:
        link.send(0, encode(own))
        found, early = _collect(link, 1, world.timeout_s)
        error = msgspec.msgpack.decode(found[0], type=str)
    else:
        found, early = _collect(link, world.process_count - 1, world.timeout_s)
        theirs = {peer: msgspec.msgpack.decode(found[peer]) for peer in sorted(found)}
        error = _find_difference(own, theirs)
        for peer in found:
            link.send(peer, encode(error))
    if error:
        raise RuntimeError(error)
    return early


def make_coordinator(size: int, options: EagerOptions) -> Coordinator:
    """Makes what rank 0 of `size` ranks decides with."""
    return Coordinator(
        size,
        controller.Options(
            fusion_bytes=options.fusion_bytes,
            cache_capacity=options.cache_capacity,
            fuse_groups=options.fuse_groups,
        ),
    )


def _find_difference(own: dict[str, Any], theirs: dict[int, dict[str, Any]]) -> str:
    for peer, other in theirs.items():
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
    """Waits for a message of each of `count` peers; returns them, and what is more."""
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
