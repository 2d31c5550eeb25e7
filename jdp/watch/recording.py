"""Recording: how does this process write its record, and its stacks when asked?

A thread notes that Python code runs, and which steps have ended. It polls: a thread
that waits inside JAX when the interpreter ends would abort the process.
"""

import atexit
import contextlib
import faulthandler
import os
import signal
import threading
from typing import Any

import jax.monitoring

from jdp.replicas import progress, sealed_memory, stamps
from jdp.replicas.sealed_memory import MemoryOffer
from jdp.watch.record import NUM_BYTES, RecordWriter

# A look costs 20 to 70 us, nearly all of it to wake the thread: less than 0.1 % of a
# core. The next call of a step looks too, so that the end of a step is not seen later.
_PERIOD_S = 0.1
# JAX records when it begins to lower or compile a program, and how long that took.
_COMPILE_EVENTS = {
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
}
_NUM_SIGNALS = 8  # that are tried, from the last one down.


class _Recording:
    """The record of this process."""

    writer: RecordWriter | None = None
    listens: bool = False
    end: threading.Event = threading.Event()


def begin(text: str) -> None:
    """Begins the record of this process, unless it has one; main thread.

    Args:
      text: text of `record.describe_memory`; "", or memory that cannot be opened: no
        record.
    """
    if not text or _Recording.writer is not None:
        return
    token, path, stacks = text.split(" ", 2)
    try:
        offer = MemoryOffer(path, bytes.fromhex(token))
        memory = sealed_memory.open_memory(offer, NUM_BYTES)
    except OSError:  # Another namespace of processes, as in a container of its own.
        return
    writer = RecordWriter(memory, dump_signal=_write_stacks_on_signal(stacks))
    _Recording.writer = writer
    stamps.set_record(writer.write)
    os.register_at_fork(after_in_child=lambda: stamps.set_record(None))
    if not _Recording.listens:
        _Recording.listens = True
        jax.monitoring.register_scalar_listener(_hear_begin)
        jax.monitoring.register_event_duration_secs_listener(_hear_end)
    thread = threading.Thread(target=_look, args=(writer,), name="jdp-watch")
    thread.daemon = True
    thread.start()
    atexit.register(_end)


def _write_stacks_on_signal(path: str) -> int:
    """Makes a signal write the stacks of all threads to a file; returns the signal.

    The handler is in C and needs no lock of Python, so it works while C code holds it.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return 0
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMAX - 1 - _NUM_SIGNALS, -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                faulthandler.register(number, file=fd, all_threads=True)
                return number
    os.close(fd)
    return 0


def _look(writer: RecordWriter) -> None:
    while not _Recording.end.wait(_PERIOD_S):
        writer.beat()
        progress.note_finished()


def _hear_begin(event: str, value: float, **details: Any) -> None:
    del value
    if event in _COMPILE_EVENTS:
        stamps.stamp(stamps.COMPILE_BEGUN, 0, str(details.get("fun_name", "")))


def _hear_end(event: str, duration_secs: float, **details: Any) -> None:
    del duration_secs
    if event in _COMPILE_EVENTS:
        stamps.stamp(stamps.COMPILE_ENDED, 0, str(details.get("fun_name", "")))


def _end() -> None:
    if _Recording.writer is not None and os.getpid() == _Recording.writer.pid:
        stamps.stamp(stamps.PROGRAM_ENDED)
        _Recording.end.set()
