"""Collectives by name, as functions of pytrees of arrays."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, overload

import jax
import numpy as np

from jdp.eager import argument_types, gradients, session, submission
from jdp.eager.process_set import ProcessSet, global_process_set
from jdp.eager.submission import Handle
from jdp.types import PyTree

T = TypeVar("T")
Number = complex | np.generic  # its result is a numpy array; others keep their type.

Op = Literal["average", "sum", "min", "max", "product", "adasum"]


@overload
def all_reduce(
    tree: Number,
    *,
    name: str | None = ...,
    op: Op = ...,
    prescale: float = ...,
    postscale: float = ...,
    wire_dtype: jax.typing.DTypeLike | None = ...,
    process_set: ProcessSet = ...,
) -> np.ndarray: ...
@overload
def all_reduce(
    tree: T,
    *,
    name: str | None = ...,
    op: Op = ...,
    prescale: float = ...,
    postscale: float = ...,
    wire_dtype: jax.typing.DTypeLike | None = ...,
    process_set: ProcessSet = ...,
) -> T: ...
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


@overload
def all_reduce_async(
    tree: Number,
    *,
    name: str | None = ...,
    op: Op = ...,
    prescale: float = ...,
    postscale: float = ...,
    wire_dtype: jax.typing.DTypeLike | None = ...,
    process_set: ProcessSet = ...,
) -> Handle[np.ndarray]: ...
@overload
def all_reduce_async(
    tree: T,
    *,
    name: str | None = ...,
    op: Op = ...,
    prescale: float = ...,
    postscale: float = ...,
    wire_dtype: jax.typing.DTypeLike | None = ...,
    process_set: ProcessSet = ...,
) -> Handle[T]: ...
def all_reduce_async(
    tree: PyTree,
    *,
    name: str | None = None,
    op: Op = "average",
    prescale: float = 1.0,
    postscale: float = 1.0,
    wire_dtype: jax.typing.DTypeLike | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
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
    tree: T,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
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
    tree: T,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begins `all_gather`; the arrays must not change until it is done."""
    options = submission.find_options(
        session.current_engine(), "all_gather", process_set
    )
    return submission.submit_tree(options, name, tree)


@overload
def broadcast(
    tree: Number,
    *,
    root: int = ...,
    name: str | None = ...,
    process_set: ProcessSet = ...,
) -> np.ndarray: ...
@overload
def broadcast(
    tree: T,
    *,
    root: int = ...,
    name: str | None = ...,
    process_set: ProcessSet = ...,
) -> T: ...
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


@overload
def broadcast_async(
    tree: Number,
    *,
    root: int = ...,
    name: str | None = ...,
    process_set: ProcessSet = ...,
) -> Handle[np.ndarray]: ...
@overload
def broadcast_async(
    tree: T,
    *,
    root: int = ...,
    name: str | None = ...,
    process_set: ProcessSet = ...,
) -> Handle[T]: ...
def broadcast_async(
    tree: PyTree,
    *,
    root: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Begins `broadcast`; the arrays must not change until it is done."""
    nothing = ("", 1.0, 1.0, None)
    root = argument_types.check_integer(root, "root")  # `True` would be found as 1.
    options = submission.find_options(
        session.current_engine(), "broadcast", process_set, *nothing, root
    )
    return submission.submit_tree(options, name, tree)


def reduce_scatter(
    tree: T,
    *,
    name: str | None = None,
    op: Op = "average",
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> T:
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
    tree: T,
    *,
    name: str | None = None,
    op: Op = "average",
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
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


def waiting(begin: Callable[..., Handle[Any]]) -> Callable[..., Any]:
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
