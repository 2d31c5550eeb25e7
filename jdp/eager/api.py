"""Collectives by name, as functions of pytrees of arrays."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np

from jdp.eager import argument_types, gradients, results, session, submission
from jdp.eager.process_set import ProcessSet, global_process_set
from jdp.eager.submission import Handle
from jdp.types import PyTree

Op = Literal["average", "sum", "min", "max", "product", "adasum"]


def poll(handle: Handle) -> bool:
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


def synchronize(handle: Handle, *, timeout_s: float | None = None) -> Any:
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


def all_reduce(
    tree: PyTree,
    *,
    name: str | None = None,
    op: Op = "average",
    prescale: float = 1.0,
    postscale: float = 1.0,
    wire_dtype: jax.typing.DTypeLike | None = None,
    process_set: ProcessSet = global_process_set,
) -> PyTree:
    """Reduces arrays over the processes, element by element.

    Every process of the set calls it, in any order relative to other names. A process
    that has called `join` contributes the neutral element (zeros in a sum), and an
    average still divides by the number of processes.

    Args:
      tree: pytree of numpy or JAX arrays or numbers, any shapes, the same on all
        processes.
      name: the same on all processes, and not in use by another operation under way;
        each leaf of a tree has its path appended. None: numbered in the order of calls.
      op: "average", "sum", "min", "max", "product", or "adasum" (see
        `jdp.collectives.adasum`). The average of integers is rounded towards zero.
      prescale: factor applied before the reduction. Integers are scaled in float64 and
        truncated, floats of 16 bits and less in float32.
      postscale: factor applied to the result, in the same way. The sum of an average
        of integers is multiplied by `postscale / n`, and so rounded only once: 4, 0 and
        -2 with `postscale=3` give 2.
      wire_dtype: dtype in which wider floats are sent, such as "float16"; None: as
        they are.
      process_set: the processes that take part.

    Returns:
      The same tree of new arrays, bitwise the same on all processes: numpy arrays for
      numpy arrays and numbers, JAX arrays on the same device for JAX arrays.

    Raises:
      ValueError: an argument is out of range, the name is in use, or this process is
        not in the set.
      TypeError: a leaf is not an array of numbers.
      NotImplementedError: adasum of a process set, or of a number of processes that is
        not a power of two.
      RuntimeError: see `synchronize`; or the engine does not run.
    """
    begin = functools.partial(
        all_reduce_async,
        op=op,
        prescale=prescale,
        postscale=postscale,
        wire_dtype=wire_dtype,
        process_set=process_set,
    )
    if argument_types.is_traced(tree):
        with named(name, "all_reduce", process_set) as name:
            return gradients.all_reduce(waiting(begin), op, tree, name)
    return begin(tree, name=name).result()


def all_reduce_async(
    tree: PyTree,
    *,
    name: str | None = None,
    op: Op = "average",
    prescale: float = 1.0,
    postscale: float = 1.0,
    wire_dtype: jax.typing.DTypeLike | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins `all_reduce`; the arrays must not change until it is done."""
    options = submission.find_options(
        session.current_engine(),
        "all_reduce",
        process_set,
        op,
        prescale,
        postscale,
        wire_dtype,
    )
    return submission.submit_tree(options, name, tree)


def all_gather(
    tree: PyTree,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> PyTree:
    """Concatenates the arrays of the processes along dimension 0, in rank order.

    Args:
      tree: pytree of arrays, shape (n, ...), where n may differ between processes.
      name: see `all_reduce`.
      process_set: the processes that take part.

    Returns:
      The same tree, shape (sum of n, ...), the same on all processes.

    Raises:
      RuntimeError: see `synchronize`; also if an array is a scalar, or a process has
        called `join`.
    """
    begin = functools.partial(all_gather_async, process_set=process_set)
    if argument_types.is_traced(tree):
        average = functools.partial(all_reduce, process_set=process_set)
        place = submission.find_place("all_gather", process_set)
        with named(name, "all_gather", process_set) as name:
            return gradients.all_gather(begin, average, place, tree, name)
    return begin(tree, name=name).result()


def all_gather_async(
    tree: PyTree,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins `all_gather`; the arrays must not change until it is done."""
    options = submission.find_options(
        session.current_engine(), "all_gather", process_set
    )
    return submission.submit_tree(options, name, tree)


def broadcast(
    tree: PyTree,
    *,
    root: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> PyTree:
    """Copies the arrays of one process to all of them.

    Args:
      tree: pytree of arrays, the same shapes and dtypes on all processes; only the
        values of the root are read.
      root: rank of the source among all processes.
      name: see `all_reduce`.
      process_set: the processes that take part.

    Returns:
      The same tree with the values of the root.

    Raises:
      ValueError: `root` is not in the set; see also `all_reduce`.
      RuntimeError: see `synchronize`; also if a process has called `join`.
    """
    begin = functools.partial(broadcast_async, root=root, process_set=process_set)
    if argument_types.is_traced(tree):
        average = functools.partial(all_reduce, process_set=process_set)
        is_root = session.rank() == root
        with named(name, "broadcast", process_set) as name:
            return gradients.broadcast(waiting(begin), average, is_root, tree, name)
    return begin(tree, name=name).result()


def broadcast_async(
    tree: PyTree,
    *,
    root: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins `broadcast`; the arrays must not change until it is done."""
    nothing = ("", 1.0, 1.0, None)
    root = argument_types.check_integer(root, "root")  # `True` would be found as 1.
    options = submission.find_options(
        session.current_engine(), "broadcast", process_set, *nothing, root
    )
    return submission.submit_tree(options, name, tree)


def reduce_scatter(
    tree: PyTree,
    *,
    name: str | None = None,
    op: Op = "average",
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> PyTree:
    """Reduces arrays and gives each process some rows of the result.

    With n rows on k processes, the first n % k processes get one row more.

    Args:
      tree: pytree of arrays, shape (n, ...), the same on all processes.
      name: see `all_reduce`.
      op: "average" or "sum".
      prescale: see `all_reduce`.
      postscale: see `all_reduce`.
      process_set: the processes that take part.

    Returns:
      The same tree with the rows of this process; they follow the rows of lower ranks.

    Raises:
      ValueError: another `op`; see also `all_reduce`.
      RuntimeError: see `synchronize`; also if an array is a scalar, or a process has
        called `join`.
    """
    begin = functools.partial(
        reduce_scatter_async,
        op=op,
        prescale=prescale,
        postscale=postscale,
        process_set=process_set,
    )
    if argument_types.is_traced(tree):
        gather = functools.partial(all_gather, process_set=process_set)
        factor = submission.gradient_factor(op, prescale, postscale, process_set)
        with named(name, "reduce_scatter", process_set) as name:
            return gradients.reduce_scatter(waiting(begin), gather, factor, tree, name)
    return begin(tree, name=name).result()


def reduce_scatter_async(
    tree: PyTree,
    *,
    name: str | None = None,
    op: Op = "average",
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins `reduce_scatter`; the arrays must not change until it is done."""
    options = submission.find_options(
        session.current_engine(),
        "reduce_scatter",
        process_set,
        op,
        prescale,
        postscale,
    )
    return submission.submit_tree(options, name, tree)


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
    with named(name, "all_to_all", process_set) as name:
        result = gradients.all_to_all(waiting(begin), x, given, name)
    return result[0] if splits is None else result


def all_to_all_async(
    x: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
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


def waiting(begin: Callable[..., Handle]) -> Callable[..., Any]:
    """Returns a function that begins a collective with `begin` and waits for it."""
    return lambda *args, **kwargs: begin(*args, **kwargs).result()


@contextlib.contextmanager
def named(name: str | None, kind: str, process_set: ProcessSet) -> Iterator[str]:
    """Yields the name of a collective with a derivative.

    None is numbered together with the other unnamed calls of this kind and set.
    """
    submission.check_set(process_set)
    if name is None:
        set_id = process_set.process_set_id or 0
        with session.numbered(kind, set_id) as number:
            yield number
    else:
        yield argument_types.check_name(name)
