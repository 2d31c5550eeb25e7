"""JAX distributed: the coordination service, at the end of a job and after a fork."""

import atexit
import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator

from jax._src import api, distributed, xla_bridge
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]


@contextlib.contextmanager
def patient_client(timeout_s: int) -> Iterator[None]:
    """Makes clients that are created in this context wait `timeout_s` at shutdown.

    `jax.distributed.initialize` passes its timeout only to the service. A client has
    its own timeout of 300 s, after which it aborts its process.
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


def call_between_ends(leave: Callable[[], None]) -> None:
    """Calls `leave` after the client of this process has ended, before the service.

    All clients leave together, and process 0 then ends the service at once. A client
    that has not noticed yet that it may leave takes this for a failure of the service,
    and aborts its process (seen on a busy machine, jax 0.10.2).
    """
    state = distributed.global_state

    def shutdown() -> None:
        service, state.service = state.service, None
        is_client = state.client is not None
        try:
            type(state).shutdown(state)
        except BaseException:
            state.service = service
            raise
        if is_client:
            leave()
        if service is not None:
            service.shutdown()

    vars(state)["shutdown"] = shutdown  # `jax.distributed.shutdown` looks there first.


def abandon() -> None:
    """Lets a forked child end without contacting the service of its parent's job.

    JAX's exit handler would contact it in the parent's name. The objects are never
    freed: their destructors wait for threads that a child does not have.
    """
    state = distributed.global_state
    for held in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.service = state.preemption_sync_manager = None
    atexit.unregister(api.clean_up)


def end() -> None:
    """Ends JAX now, as its exit handler would."""
    api.clean_up()


def abandon_at_end() -> None:
    """Lets this process end without JAX's shutdown, which needs all processes."""
    abandon()
    # Its destructor waits for programs, which wait for other processes.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(xla_bridge._backends))
