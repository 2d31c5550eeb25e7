"""Session: the engine of this process, from `init` to `shutdown`."""

import collections
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from jdp.eager.engine import Engine
from jdp.eager.entries import Entry
from jdp.eager.messages import UNNAMED
from jdp.eager.options import EagerOptions
from jdp.replicas import forked, mesh, progress, world_end
from jdp.replicas.mesh import World
from jdp.runtime import program_end

_EXIT_TIMEOUT_S = 5.0
_FAILED_TIMEOUT_S = 1.0


class _Session:
    """State of the one engine of this process."""

    engine: Engine | None = None
    # Whether this process was forked from one with an engine, or in a job of several.
    is_forked = False
    why_ended = ""
    # By kind and set: the next number, and smaller ones returned by refused calls.
    counts: collections.Counter[tuple[str, int]] = collections.Counter()
    returned: collections.defaultdict[tuple[str, int], set[int]]
    returned = collections.defaultdict(set)
    num_joins = 0
    # For `counts`, `returned` and `num_joins`; signal handlers take it again.
    lock = threading.RLock()


def start(world: World | None, options: EagerOptions | None) -> Engine:
    """Starts the engine, or returns the running one; see `jdp.eager.init`.

    Raises:
      RuntimeError: the engine runs with another world or other options, this process
        was forked from a process of a job, or `Engine` raised it.
    """
    _check_is_not_forked()
    engine = _Session.engine
    if engine is not None and not engine.why_dead:
        for name, given, has in (
            ("world", world, engine.world),
            ("options", options, engine.options),
        ):
            if given is not None and given != has:
                raise RuntimeError(
                    f"`jdp.eager.init` was called before, with other `{name}`:\n"
                    f"  before: {has}\n  now: {given}\n"
                    "Call `jdp.eager.shutdown` first."
                )
        return engine
    world = mesh.current_world() if world is None else world
    options = EagerOptions.from_environ() if options is None else options
    _reset_names(num_joins=0)
    engine = _Session.engine = Engine(world, options)
    # The last function registered runs first, before the engine's resources close.
    world_end.unregister(_leave)
    world_end.register(_leave)
    program_end.close_before_staying(_leave_after_failure)
    return engine


def shutdown() -> None:
    """Ends the engine on all processes; does nothing if it does not run.

    Operations that all processes have submitted run first. Others raise RuntimeError on
    the processes that wait for them. In a forked child it does nothing: the engine
    belongs to the parent.
    """
    if _Session.is_forked:
        return
    engine = _Session.engine
    if engine is not None:
        own = f"rank {engine.rank} has shut the engine down"
        _Session.why_ended = engine.why_dead or own  # For other threads, meanwhile.
        _Session.engine = None
        engine.shutdown(timeout_s=engine.options.timeout_s)
        _Session.why_ended = engine.why_dead or own


def is_initialized() -> bool:
    """Whether this process has called `init`, and not `shutdown` since.

    True also if the engine has ended because another process shut it down or is gone;
    calls raise RuntimeError then, and `init` starts it again. False in a child that was
    forked after `init`.
    """
    return _Session.engine is not None and not _Session.is_forked


def is_running() -> bool:
    """Whether the engine was started and has not ended."""
    return _Session.engine is not None and not _Session.engine.why_dead


def find_engine() -> Engine | None:
    """Returns the engine, or None before `init` and after `shutdown`."""
    return _Session.engine


def current_engine() -> Engine:
    """Returns the engine.

    Raises:
      RuntimeError: it does not run, or this process was forked from a process of a
        job.
    """
    engine = _Session.engine
    if engine is not None and not _Session.is_forked:
        return engine
    _check_is_not_forked()
    return _known_engine()


def _known_engine() -> Engine:
    """Returns the engine; in a forked child, the parent's."""
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


def is_forked() -> bool:
    """Whether the engine or the world belongs to the parent of this forked process."""
    return _Session.is_forked


def _check_is_not_forked() -> None:
    """Raises RuntimeError in a forked child, where no thread runs the engine."""
    if _Session.is_forked:
        raise RuntimeError(
            "This process was forked from a process of a job. The thread and the "
            "connections of the eager engine belong to the parent, and a child can "
            "neither use them nor start an engine of its own. Call collectives in the "
            'parent, or start the child with `multiprocessing.get_context("spawn")`.'
        )


def _note_fork() -> None:
    _Session.is_forked = _Session.engine is not None or forked.is_child()


os.register_at_fork(after_in_child=_note_fork)


def rank() -> int:
    """Returns the rank of this process."""
    return _known_engine().rank


def size() -> int:
    """Returns the number of processes."""
    return _known_engine().size


def local_rank() -> int:
    """Returns the position of this process among the processes of its host."""
    engine = _known_engine()
    return _local_ranks(engine.hosts)[engine.rank]


def local_size() -> int:
    """Returns the number of processes on this host."""
    engine = _known_engine()
    return engine.hosts.count(engine.hosts[engine.rank])


def cross_rank() -> int:
    """Returns the position of this process among those with its `local_rank`.

    If all hosts have the same number of processes, it is the number of the host; hosts
    are ordered by their first ranks.
    """
    engine = _known_engine()
    locals_ = _local_ranks(engine.hosts)
    return locals_[: engine.rank].count(locals_[engine.rank])


def cross_size() -> int:
    """Returns the number of processes with the `local_rank` of this one."""
    engine = _known_engine()
    locals_ = _local_ranks(engine.hosts)
    return locals_.count(locals_[engine.rank])


def _local_ranks(hosts: Sequence[str]) -> list[int]:
    """Returns by rank its position among the processes of its host."""
    return [hosts[:rank].count(host) for rank, host in enumerate(hosts)]


@contextlib.contextmanager
def numbered(kind: str, set_id: int) -> Iterator[str]:
    """Numbers calls without a name: by kind and set, in the order of the calls.

    A call that fails before it has submitted anything does not count: other processes
    have not heard of it, and wait for the next call. Once something is submitted the
    call counts, whatever it raises.

    Args:
      kind: the operation.
      set_id: number of the process set.

    Raises:
      RuntimeError: nothing can be submitted.
    """
    engine = current_engine()
    engine.intake.check_is_open()
    num_before = engine.intake.submitted.count
    count, joins = -1, 0
    try:
        with _Session.lock:
            joins, returned = _Session.num_joins, _Session.returned[kind, set_id]
            if returned:
                count = min(returned)
                returned.remove(count)
            else:
                count = _Session.counts[kind, set_id]
                _Session.counts[kind, set_id] = count + 1
        yield f"{UNNAMED}{kind} {f'{joins} ' if joins else ''}{count}"
    except BaseException:
        with _Session.lock:
            is_heard = engine.intake.submitted.count != num_before
            if count >= 0 and joins == _Session.num_joins and not is_heard:
                _Session.returned[kind, set_id].add(count)
        raise


def count_names_anew() -> None:
    """Restarts the counts of `numbered`, as all ranks do when they join.

    A rank that has joined does not count the operations of the others.
    """
    _reset_names(num_joins=_Session.num_joins + 1)


def forget_counts(set_id: int) -> None:
    """Forgets the count of calls without a name in a removed set."""
    with _Session.lock:
        for counts in (_Session.counts, _Session.returned):
            for key in [key for key in counts if key[1] == set_id]:
                del counts[key]


def _reset_names(*, num_joins: int) -> None:
    with _Session.lock:
        _Session.counts.clear()
        _Session.returned.clear()
        _Session.num_joins = num_joins


def wait_for(entries: Sequence[Entry], timeout_s: float | None = None) -> list[Any]:
    """Waits for requests; returns their values.

    Raises:
      TimeoutError: they are not done after `timeout_s` seconds.
      RuntimeError: an operation has failed, on all its ranks, or the engine has ended.
      Exception: raised by a submitted program.
    """
    values = [entry.value for entry in entries if entry.is_done and not entry.error]
    if len(values) == len(entries):
        return values
    has_failed = any([entry.error is not None for entry in entries])
    # A failed entry has its own error, even if the engine has ended since.
    engine = None if has_failed else current_engine()
    if engine is not None and not engine.wait(entries, timeout_s):
        names = [entry.request.name for entry in entries if not entry.is_done]
        reason = (
            f"{', '.join(names[:6])}{' ...' if names[6:] else ''}: not done within "
            f"{timeout_s:g} s. {engine.ask_who_waits()}"
        )
        if not all(entry.was_late for entry in entries):  # It may ask in a loop.
            engine.dump(reason)
        for entry in entries:
            entry.was_late = True
        raise TimeoutError(reason)
    for entry in entries:
        if entry.error is not None:
            # Several callers may wait for one failure; each needs its own traceback.
            if type(entry.error) is RuntimeError:
                culprit = progress.culprit_of(entry.error)
                raise progress.blame(RuntimeError(str(entry.error)), culprit)
            raise entry.error
    return [entry.value for entry in entries]


def start_timeline(path: str, *, mark_cycles: bool = False) -> None:
    """Starts to write a trace of this process, as `EagerOptions.timeline` does.

    Args:
      path: file; `trace.json` becomes `trace.rank0.json`.
      mark_cycles: whether each cycle of the engine is shown.

    Raises:
      OSError: the file cannot be written.
    """
    current_engine().start_timeline(path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Ends the trace and completes its file; does nothing without a trace."""
    current_engine().stop_timeline()


def _leave() -> None:
    """Shuts the engine down at the end of a program, or of its world."""
    engine = _Session.engine
    if engine is None or _Session.is_forked:
        return
    if not engine.why_dead:
        # The others may be a moment late with operations that this process has
        # submitted. After an exception this process does not wait for them.
        if not hasattr(sys, "last_value"):
            engine.finish_own(timeout_s=_EXIT_TIMEOUT_S)
        engine.shutdown(timeout_s=_EXIT_TIMEOUT_S)
    _Session.why_ended = engine.why_dead or "its world has ended"
    _Session.engine = None


def _leave_after_failure() -> None:
    """Shuts the engine down where the program has failed and its process stays."""
    engine = _Session.engine
    if engine is not None and not engine.why_dead and not _Session.is_forked:
        engine.shutdown(timeout_s=_FAILED_TIMEOUT_S)
