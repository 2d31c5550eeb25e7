"""Candidates: which all-reduces can the replicas of a world take?"""

import functools
import logging
from collections.abc import Callable

import jax

from jdp.collectives.butterfly import butterfly_all_reduce
from jdp.collectives.halving_doubling import halving_doubling_all_reduce
from jdp.collectives.hierarchical import hierarchical_all_reduce
from jdp.collectives.host.tcp_all_reduce import default_links, tcp_all_reduce
from jdp.collectives.ring import ring_all_reduce
from jdp.collectives.shared_memory.all_reduce import (
    SHARED_MEMORY,
    default_buffer,
    shared_memory_all_reduce,
)
from jdp.collectives.xla import psum_all_reduce
from jdp.replicas import agreement
from jdp.replicas.mesh import World

_logger = logging.getLogger("jdp")


def find(world: World) -> dict[str, Callable[..., jax.Array]]:
    """Returns the functions that `fit_links` measures by default, by name.

    Every process calls it. Shared memory is included if all replicas are CPU processes
    of one host or, on a pair of axes, if the replicas along the inner axis are. TCP is
    included among CPU processes that do not share memory.
    """
    found: dict[str, Callable[..., jax.Array]] = {
        "psum": psum_all_reduce,
        "ring": ring_all_reduce,
        "halving_doubling": halving_doubling_all_reduce,
        "butterfly": butterfly_all_reduce,
    }
    is_shared = _shares_memory(world, world.axis_names)
    if is_shared:
        found["shared_memory"] = shared_memory_all_reduce
    elif _has_links(world):
        found["tcp"] = tcp_all_reduce
    if not is_shared and len(world.axis_names) == 2:
        if _shares_memory(world, world.axis_names[1:]):
            found["hierarchical"] = functools.partial(
                hierarchical_all_reduce, within=SHARED_MEMORY, across=psum_all_reduce
            )
        else:
            found["hierarchical"] = hierarchical_all_reduce
    return found


def _shares_memory(world: World, names: tuple[str, ...]) -> bool:
    """Makes the default buffer over these axes; returns whether all processes could."""
    make = functools.partial(default_buffer, world, names)
    return _can_all(world, make, "making of shared memory", "do not share memory")


def _has_links(world: World) -> bool:
    """Opens the default links over all axes; returns whether all processes could."""
    make = functools.partial(default_links, world, world.axis_names)
    return _can_all(world, make, "opening of TCP links", "are not linked over TCP")


def _can_all(
    world: World, make: Callable[[], object], topic: str, failure: str
) -> bool:
    try:
        make()
        is_made = True
    except (RuntimeError, ValueError) as error:
        is_made = False
        if world.is_main_process:
            _logger.info("The processes %s: %s", failure, error)
    verdict = agreement.meet(
        world,
        topic,
        bytes([is_made]),
        lambda made: bytes([all(m == b"\x01" for m in made)]),
    )
    return verdict == b"\x01"
