"""Grouped collectives: the leaves of a tree run together, or not at all."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jdp.eager import argument_types, gradients, session, submission
from jdp.eager.api import Op, named, waiting
from jdp.eager.diagnosis.flight_recorder import Record
from jdp.eager.entries import Entry
from jdp.eager.messages import Kind, Request, Spec, encode_spec
from jdp.eager.process_set import ProcessSet, global_process_set
from jdp.eager.submission import Handle
from jdp.types import PyTree

T = TypeVar("T")


def grouped_all_reduce(
    tree: T,
    *,
    name: str | None = None,
    op: Op = "average",
    prescale: float = 1.0,
    postscale: float = 1.0,
    wire_dtype: jax.typing.DTypeLike | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Reduces arrays like `all_reduce`, all of them or none.

    Args:
      tree: pytree of arrays; all are ready before any is reduced.
      name: see `all_reduce`; also the name of the group, unique while it is under way.
      op: see `all_reduce`.
      prescale: see `all_reduce`.
      postscale: see `all_reduce`.
      wire_dtype: see `all_reduce`.
      process_set: see `all_reduce`.

    Returns:
      See `all_reduce`.

    Raises:
      RuntimeError: a leaf has failed, so none was reduced; see `synchronize`.
    """
    begin = functools.partial(
        grouped_all_reduce_async,
        op=op,
        prescale=prescale,
        postscale=postscale,
        wire_dtype=wire_dtype,
        process_set=process_set,
    )
    if argument_types.is_traced(tree):
        with named(name, "group", process_set) as name:
            return gradients.all_reduce(waiting(begin), op, tree, name)
    return begin(tree, name=name).result()


def grouped_all_reduce_async(
    tree: T,
    *,
    name: str | None = None,
    op: Op = "average",
    prescale: float = 1.0,
    postscale: float = 1.0,
    wire_dtype: jax.typing.DTypeLike | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begins `grouped_all_reduce`; the arrays must not change until it is done."""
    return _submit(
        "all_reduce",
        tree,
        name,
        process_set,
        op,
        prescale,
        postscale,
        wire_dtype,
    )


def grouped_all_gather(
    tree: T,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Gathers arrays like `all_gather`, all of them or none.

    Args:
      tree: pytree of arrays, shape (n, ...); all are ready before any is gathered.
      name: see `all_reduce`; also the name of the group, unique while it is under way.
      process_set: see `all_reduce`.

    Returns:
      See `all_gather`.

    Raises:
      RuntimeError: a leaf has failed, so none was gathered; see `all_gather`.
    """
    begin = functools.partial(grouped_all_gather_async, process_set=process_set)
    if argument_types.is_traced(tree):
        average = functools.partial(grouped_all_reduce, process_set=process_set)
        place = submission.find_place("all_gather", process_set)
        with named(name, "group", process_set) as name:
            return gradients.all_gather(begin, average, place, tree, name)
    return begin(tree, name=name).result()


def grouped_all_gather_async(
    tree: T,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begins `grouped_all_gather`; the arrays must not change until it is done."""
    return _submit("all_gather", tree, name, process_set, "", 1.0, 1.0, None)


def grouped_reduce_scatter(
    tree: T,
    *,
    name: str | None = None,
    op: Op = "average",
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Reduces arrays like `reduce_scatter`, all of them or none.

    Args:
      tree: pytree of arrays, shape (n, ...); all are ready before any is reduced.
      name: see `all_reduce`; also the name of the group, unique while it is under way.
      op: "average" or "sum".
      prescale: see `all_reduce`.
      postscale: see `all_reduce`.
      process_set: see `all_reduce`.

    Returns:
      See `reduce_scatter`.

    Raises:
      RuntimeError: a leaf has failed, so none was reduced; see `reduce_scatter`.
    """
    begin = functools.partial(
        grouped_reduce_scatter_async,
        op=op,
        prescale=prescale,
        postscale=postscale,
        process_set=process_set,
    )
    if argument_types.is_traced(tree):
        gather = functools.partial(grouped_all_gather, process_set=process_set)
        factor = submission.gradient_factor(op, prescale, postscale, process_set)
        with named(name, "group", process_set) as name:
            return gradients.reduce_scatter(waiting(begin), gather, factor, tree, name)
    return begin(tree, name=name).result()


def grouped_reduce_scatter_async(
    tree: T,
    *,
    name: str | None = None,
    op: Op = "average",
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begins `grouped_reduce_scatter`; the arrays must not change until it is done."""
    return _submit(
        "reduce_scatter", tree, name, process_set, op, prescale, postscale, None
    )


def _submit(
    kind: Kind,
    tree: PyTree,
    name: str | None,
    process_set: ProcessSet,
    *factors: Any,
) -> Handle[Any]:
    """Submits a group; `factors` are `CollectiveArguments` up to `root`."""
    submission.check_set(process_set)
    if name is None or name == "":  # No group has the name "".
        with session.numbered("group", process_set.process_set_id or 0) as name:
            return _submit(kind, tree, name, process_set, *factors)
    leaves, treedef = jax.tree.flatten(tree)
    options = submission.find_options(
        session.current_engine(), kind, process_set, *factors, -1, name, len(leaves)
    )
    if leaves:
        return submission.submit_tree(options, name, tree)
    return _submit_none(options, lambda _: jax.tree.unflatten(treedef, []))


def _submit_none(
    options: submission.CallOptions, finish: Callable[[list[Any]], Any]
) -> Handle[Any]:
    """Submits a group without leaves, for ranks whose group has leaves to see."""
    group, set_id = options.arguments.group, options.set_id
    name = f"{group} without leaves"
    spec = encode_spec(Spec("barrier", group=group, group_size=1))
    record = submission.started(Record(name, "barrier", process_set=set_id))
    entry = Entry(Request(name, spec, set_id), record, group=options.group)
    options.engine.submit([entry])
    return Handle([entry], finish)
