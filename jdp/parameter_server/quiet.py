"""Quiet: what orbax logs while it fails is dropped; one line of ours says it."""

import contextlib
import gc
import logging
import sys
import traceback
from collections.abc import Iterator

# Where orbax, and the event loops that it runs, log tracebacks.
_LOGGERS = ("asyncio", "absl")


@contextlib.contextmanager
def quiet_failures() -> Iterator[None]:
    """Holds back warnings of `asyncio` and `absl`, and drops them at an exception.

    Without one, they are logged at the end. A task of orbax that has failed may say so
    at any time, when it is collected: that is dropped from now on.
    """
    held: list[tuple[logging.Logger, logging.LogRecord]] = []
    loggers = [logging.getLogger(name) for name in _LOGGERS]

    def make_filter(logger: logging.Logger):
        def hold(record: logging.LogRecord) -> bool:
            if record.levelno >= logging.WARNING:
                held.append((logger, record))
                return False
            return True

        return hold

    logging.getLogger("asyncio").addFilter(_is_not_of_orbax)  # Once, if repeated.
    filters = [make_filter(logger) for logger in loggers]
    for logger, hold in zip(loggers, filters, strict=True):
        logger.addFilter(hold)
    try:
        yield
    except BaseException:
        held.clear()
        _collect()
        held.clear()
        raise
    finally:
        for logger, hold in zip(loggers, filters, strict=True):
            logger.removeFilter(hold)
        for logger, record in held:
            logger.handle(record)


def _collect() -> None:
    """Collects event loops that were half made, which say so on stderr."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    if not record.exc_info or record.exc_info[2] is None:
        return True
    frames = traceback.walk_tb(record.exc_info[2])
    names = (frame.f_globals.get("__name__", "") for frame, _ in frames)
    return not any(name.startswith("orbax.") for name in names)
