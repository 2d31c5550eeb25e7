"""Exchange: rows of an array that each process sends to each."""

import functools
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jdp.eager import api, argument_types, gradients, results, session, submission
from jdp.eager.process_set import ProcessSet, global_process_set
from jdp.eager.submission import Handle

T = TypeVar("T")


@overload
def all_to_all(
    x: T,
    splits: None = ...,
    *,
    name: str | None = ...,
    process_set: ProcessSet = ...,
) -> T: ...
@overload
def all_to_all(
    x: T,
    splits: ArrayLike,
    *,
    name: str | None = ...,
    process_set: ProcessSet = ...,
) -> tuple[T, NDArray[np.int32]]: ...
def all_to_all(
    x: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of an array to each process, and receives rows from each.

    Args:
      x: shape (n, ...), where n may differ between processes.
      splits: integers, shape (k,) for k processes: number of rows sent to each, from
        the first row on; the remaining rows are not sent. None: an equal number.
      name: see `all_reduce`.
      process_set: the processes that take part.

    Returns:
      The received rows in rank order, shape (m, ...). With `splits` also the number of
      rows from each process, int32 (k,).

    Raises:
      ValueError: `splits` does not fit the array or the number of processes, or it is
        None and the rows do not divide evenly; see also `all_reduce`.
      RuntimeError: see `synchronize`; also if an array is a scalar, or a process has
        called `join`.
    """
    begin = functools.partial(all_to_all_async, process_set=process_set)
    if not argument_types.is_traced(x):
        return begin(x, splits, name=name).result()
    submission.check_set(process_set)
    count = len(process_set.ranks)
    given = argument_types.check_splits(x, splits, count) or [0] * count
    with api.named(name, "all_to_all", process_set) as name:
        result = gradients.all_to_all(api.waiting(begin), x, given, name)
    return result[0] if splits is None else result


@overload
def all_to_all_async(
    x: T,
    splits: None = ...,
    *,
    name: str | None = ...,
    process_set: ProcessSet = ...,
) -> Handle[T]: ...
@overload
def all_to_all_async(
    x: T,
    splits: ArrayLike,
    *,
    name: str | None = ...,
    process_set: ProcessSet = ...,
) -> Handle[tuple[T, NDArray[np.int32]]]: ...
def all_to_all_async(
    x: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Begins `all_to_all`; the arrays must not change until it is done."""
    engine = session.current_engine()
    options = submission.find_options(engine, "all_to_all", process_set)
    if name is None:
        with session.numbered("all_to_all", options.set_id) as name:
            return all_to_all_async(x, splits, name=name, process_set=process_set)
    name = argument_types.check_name(name)
    array = argument_types.check_array(x, name)
    kind = results.kind_of(array)
    entry = submission.make_entry(
        options,
        name,
        array,
        argument_types.check_splits(array, splits, len(process_set.ranks)),
    )
    engine.submit([entry])

    def finish(values: list[Any]) -> Any:
        ((received, counts),) = values
        received = results.restore(received, kind)
        if splits is None:
            return received
        return received, np.array(counts, np.int32)

    return Handle([entry], finish)
