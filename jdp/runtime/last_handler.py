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

    def __init__(self) -> None:
        self.run: Callable[[], None] | None = None
        self.is_registered = False


_handler = _Handler()


def reserve() -> None:
    """Takes the place of the handler in the order, if JAX is imported."""
    if "jax" in sys.modules:
        _register()


def run_last(fn: Callable[[], None]) -> Callable[[], None]:
    """Makes `fn` the handler; returns it."""
    _handler.run = fn
    _register()
    return fn


def _register() -> None:
    if not _handler.is_registered:
        _handler.is_registered = True
        atexit.register(_run)


def _run() -> None:
    if _handler.run is not None:
        _handler.run()
