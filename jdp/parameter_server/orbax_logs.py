"""Orbax logs: how is a failure of orbax logged in one line, without tracebacks?"""

import contextlib
import gc
import logging
import sys
import traceback
import types
import warnings
from collections.abc import Iterator

# Loggers to which orbax and its event loops write tracebacks.
_LOGGERS = ("asyncio", "absl")


@contextlib.contextmanager
def quiet_failures() -> Iterator[None]:
    """Holds warnings of `asyncio` and `absl`, and drops them after an exception.

    Otherwise they are logged at the end. A failed task of orbax logs a warning when it
    is garbage-collected, possibly later: such warnings are dropped from now on.
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

    logging.getLogger("asyncio").addFilter(
        _is_not_of_orbax
    )  # Has no effect the second time.
    filters = [make_filter(logger) for logger in loggers]
    for logger, hold in zip(loggers, filters, strict=True):
        logger.addFilter(hold)
    try:
        with _quiet_loops():
            try:
                yield
            except BaseException:
                held.clear()
                gc.collect()
                held.clear()
                raise
    finally:
        for logger, hold in zip(loggers, filters, strict=True):
            logger.removeFilter(hold)
        for logger, record in held:
            logger.handle(record)


@contextlib.contextmanager
def _quiet_loops() -> Iterator[None]:
    """Drops the warnings of half-made event loops and coroutines at collection.

    While it is active, this affects other threads too.
    """
    hook = sys.unraisablehook

    def drop_loops(args: "sys.UnraisableHookArgs") -> None:
        is_coroutine = isinstance(args.object, types.CoroutineType)
        module = getattr(args.object, "__module__", "")
        if not is_coroutine and module != "asyncio.base_events":
            hook(args)

    sys.unraisablehook = drop_loops
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited")
            yield
    finally:
        sys.unraisablehook = hook


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    if not record.exc_info or record.exc_info[2] is None:
        return True
    frames = traceback.walk_tb(record.exc_info[2])
    names = (frame.f_globals.get("__name__", "") for frame, _ in frames)
    return not any(name.startswith("orbax.") for name in names)
