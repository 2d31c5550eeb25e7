"""Handles: is an operation done, and what is its result?"""

from typing import Any, TypeVar

from jdp.eager.submission import Handle

T = TypeVar("T")


def poll(handle: Handle[Any]) -> bool:
    """Whether an operation is done, so that `synchronize` does not wait.

    Args:
      handle: returned by a function whose name ends in `_async`.

    Returns:
      False while the operation is under way. True also if `synchronize` would raise.

    Raises:
      TypeError: `handle` is not a `Handle`.
    """
    _check_handle(handle)
    return handle.is_done()


def synchronize(handle: Handle[T], *, timeout_s: float | None = None) -> T:
    """Waits for an operation and returns its result.

    Args:
      handle: returned by a function whose name ends in `_async`.
      timeout_s: longest wait, in seconds; None or infinite: until the operation is
        done or the engine ends.

    Returns:
      The result of the function without `_async`; later calls return the same object.

    Raises:
      TimeoutError: the operation is not done in time. The message names the ranks that
        are missing; the operation is still under way.
      ValueError: `timeout_s` is negative or NaN.
      TypeError: `timeout_s` is not a number, or `handle` is not a `Handle`.
      RuntimeError: on all ranks, if they asked for different things under this name,
        or a process is gone or late.
    """
    _check_handle(handle)
    return handle.result(timeout_s)


def _check_handle(handle: Any) -> None:
    if not isinstance(handle, Handle):
        raise TypeError(
            "`handle` must come from a function whose name ends in `_async`, "
            f"got {type(handle).__name__}. Pass several handles one at a time, as "
            "in `jax.tree.map(eager.synchronize, handles)`."
        )
