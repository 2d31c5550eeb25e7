"""World end: what has to be closed before a process leaves its world?"""

import atexit
import traceback
from collections.abc import Callable

import jax

from jdp.replicas import mesh
from jdp.replicas.mesh import World


class _State:
    """State of this process."""

    # Functions that close something, in the order of their registration.
    closers: list[Callable[[], object]] = []
    num_ended: int = 0  # worlds.


def register(close: Callable[[], object]) -> None:
    """Runs `close` before this process leaves its world, or else at its exit.

    The function registered last runs first. JAX and its store are still there.
    """
    _State.closers.append(close)
    atexit.register(close)


def unregister(close: Callable[[], object]) -> None:
    """Takes back `register`; does nothing for an unknown function."""
    _State.closers = [other for other in _State.closers if other != close]
    atexit.unregister(close)


def close_all() -> None:
    """Runs all registered functions; shows their errors, as Python does at exit."""
    while _State.closers:
        close = _State.closers[-1]
        unregister(close)
        try:
            close()
        except Exception:
            traceback.print_exc()


def end() -> None:
    """Forgets the current world; what was made for it is not used any more."""
    mesh.set_current_world(None)
    _State.num_ended += 1


def count_ended() -> int:
    """Returns how many worlds of this process have ended."""
    return _State.num_ended


def check_is_alive(world: World) -> None:
    """Raises RuntimeError for a world whose devices JAX has given up."""
    if _State.num_ended and world.local_devices[0] not in jax.local_devices():
        raise RuntimeError(
            "The world has ended with `jdp.shutdown`, and its devices with it. Pass "
            "the world of the next `jdp.init`."
        )
