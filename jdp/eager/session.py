"""Session: the engine of this process, from `init` to `shutdown`."""

import atexit
import collections
from collections.abc import Sequence
from typing import Any

from jdp import mesh
from jdp.eager.engine import Engine
from jdp.eager.entry import Entry
from jdp.eager.messages import UNNAMED
from jdp.eager.options import EagerOptions
from jdp.mesh import World

_EXIT_TIMEOUT_S = 5.0


class _Session:
    """Like the world, there is one engine; and what its names are counted by."""

    engine: Engine | None = None
    why_ended = ""
    counts: collections.Counter[tuple[str, int]] = collections.Counter()


def init(world: World | None = None, options: EagerOptions | None = None) -> None:
    """Starts the eager engine; every process of the world calls it once.

    Args:
      world: the processes; by default what `jdp.init` made.
      options: the same on all processes; None: from the variables `JDP_EAGER_...`.

    Raises:
      RuntimeError: there is no world, the engine runs already, a process did not come
        within `world.timeout_s`, or has other options; the last two on every process.
    """
    if _Session.engine is not None and not _Session.engine.why_dead:
        raise RuntimeError("`jdp.eager.init` was called before; call `shutdown` first.")
    world = mesh.current_world() if world is None else world
    options = EagerOptions.from_environ() if options is None else options
    _Session.counts.clear()
    _Session.engine = Engine(world, options)


def shutdown() -> None:
    """Ends the engine on all processes; nothing happens where it does not run.

    Operations that all processes have submitted are executed first. Others raise
    RuntimeError on the processes that wait for them.
    """
    engine, _Session.engine = _Session.engine, None
    if engine is not None:
        engine.shutdown(timeout_s=engine.options.timeout_s)
        _Session.why_ended = engine.why_dead


def is_initialized() -> bool:
    """Whether the engine runs."""
    return _Session.engine is not None and not _Session.engine.why_dead


def find_engine() -> Engine | None:
    """Returns the engine, or None before `init` and after `shutdown`."""
    return _Session.engine


def current_engine() -> Engine:
    """Returns the engine.

    Raises:
      RuntimeError: it does not run.
    """
    engine = _Session.engine
    if engine is None:
        if _Session.why_ended:
            raise RuntimeError(
                f"The eager engine has ended: {_Session.why_ended}. Call "
                "`jdp.eager.init` on all processes to start it again."
            )
        raise RuntimeError(
            "The eager engine does not run. Call `jdp.eager.init()` once, after "
            "`jdp.init()`, on all processes."
        )
    return engine


def rank() -> int:
    """Returns the number of this process."""
    return current_engine().rank


def size() -> int:
    """Returns the number of processes."""
    return current_engine().size


def next_name(kind: str, set_id: int) -> str:
    """Names what nobody has named: by kind and set, in the order of the calls."""
    count = _Session.counts[kind, set_id]
    _Session.counts[kind, set_id] = count + 1
    return f"{UNNAMED}{kind} {count}"


def wait_for(entries: Sequence[Entry], timeout_s: float | None = None) -> list[Any]:
    """Waits for requests; returns their values.

    Raises:
      TimeoutError: they are not done after `timeout_s` seconds.
      RuntimeError: an operation has failed, on all its ranks, or the engine has ended.
      Exception: what a submitted program raised.
    """
    values = [entry.value for entry in entries if entry.is_done and not entry.error]
    if len(values) == len(entries):
        return values
    engine = current_engine()
    if not engine.wait(entries, timeout_s):
        names = [entry.request.name for entry in entries if not entry.is_done]
        reason = (
            f"{', '.join(names[:6])}{' ...' if names[6:] else ''}: not done within "
            f"{timeout_s:g} s. {engine.ask_who_waits()}"
        )
        engine.dump(reason)
        raise TimeoutError(reason)
    for entry in entries:
        if entry.error is not None:
            # Several callers may wait for one failure; each gets a traceback.
            if type(entry.error) is RuntimeError:
                raise RuntimeError(str(entry.error))
            raise entry.error
    return [entry.value for entry in entries]


def start_timeline(path: str, *, mark_cycles: bool = False) -> None:
    """Begins to write a trace of this process, as `EagerOptions.timeline` does.

    Args:
      path: file; `trace.json` becomes `trace.rank0.json`.
      mark_cycles: whether each cycle of the engine is shown.

    Raises:
      OSError: the file cannot be written.
    """
    current_engine().start_timeline(path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Ends the trace; the file is whole then. Nothing happens if there is none."""
    current_engine().stop_timeline()


def _leave() -> None:
    engine = _Session.engine
    if engine is not None and not engine.why_dead:
        engine.shutdown(timeout_s=_EXIT_TIMEOUT_S)


atexit.register(_leave)
