"""Last handler: which exit handler runs after all of the program's?

Python runs exit handlers in the reverse order of their registration. So this one is
registered when jdp is imported, before the program registers its own. It must also run
before JAX's, which leaves the other processes, so JAX comes first.
"""

import atexit
import sys
from collections.abc import Callable


class _Handler:
    """The handler of this process."""

    run: Callable[[], None] | None = None
    is_registered: bool = False


def reserve() -> None:
    """Takes the place of the handler in the order, if JAX is imported."""
    if "jax" in sys.modules:
        _register()


def run_last(fn: Callable[[], None]) -> Callable[[], None]:
    """Makes `fn` the handler; returns it."""
    _Handler.run = fn
    _register()
    return fn


def _register() -> None:
    if not _Handler.is_registered:
        _Handler.is_registered = True
        atexit.register(_run)


def _run() -> None:
    if _Handler.run is not None:
        _Handler.run()
