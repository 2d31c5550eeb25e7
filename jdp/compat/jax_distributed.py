"""Compat, distributed: how is JAX's coordination held to the end of a job?"""

import atexit
import contextlib
import ctypes
import functools
from collections.abc import Iterator

from jax._src import api, distributed, xla_bridge
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]


@contextlib.contextmanager
def patient_client(timeout_s: int) -> Iterator[None]:
    """Has a client that is made meanwhile wait so long for the others at its end.

    `jax.distributed.initialize` gives its limit to the service alone; a client has its
    own, of 300 s, and aborts its process after that.
    """
    make = _jax.get_distributed_runtime_client
    patient = functools.partial(make, shutdown_timeout=timeout_s)
    _jax.get_distributed_runtime_client = patient
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = make


def is_connected() -> bool:
    """Returns whether this process has not yet left the coordination service."""
    return distributed.global_state.client is not None


def abandon() -> None:
    """Has a forked child end without a word to the service of its parent's job.

    JAX's exit handler would speak to it in the name of the parent. The objects are
    never freed: their destructors wait for threads that a child does not have.
    """
    state = distributed.global_state
    for held in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.service = state.preemption_sync_manager = None
    atexit.unregister(api.clean_up)


def end() -> None:
    """Ends JAX as its exit handler does, which has nothing to do then."""
    api.clean_up()


def abandon_at_end() -> None:
    """Has this process end without JAX's own end, which needs all processes."""
    abandon()
    # Its destructor waits for programs, and they for other processes.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(xla_bridge._backends))
