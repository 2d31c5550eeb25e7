"""Objects: Python values and training state, sent from one rank to the others."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar, overload

import jax
import numpy as np

from jdp.eager import api, argument_types, session, submission
from jdp.eager.encoding import decode, encode
from jdp.eager.messages import ProtocolError
from jdp.eager.process_set import ProcessSet, global_process_set
from jdp.trees import tree_paths
from jdp.types import PyTree

T = TypeVar("T")


@overload
def broadcast_object(
    value: None,
    *,
    root: int = ...,
    name: str | None = ...,
    process_set: ProcessSet = ...,
) -> Any: ...
@overload
def broadcast_object(
    value: T | None,
    *,
    root: int = ...,
    name: str | None = ...,
    process_set: ProcessSet = ...,
) -> T: ...
def broadcast_object(
    value: Any,
    *,
    root: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Copies a Python value of one process to all of them.

    Args:
      value: None, bools, ints, floats, strings, bytes, lists, tuples, dicts, sets,
        datetimes in UTC, arrays, scalars of numpy; only the value of the root is read.
      root: rank of the source.
      name: see `all_reduce`.
      process_set: the processes that take part.

    Returns:
      The decoded value of the root, on the root too: equal and of the same types,
      except that JAX arrays become numpy arrays.

    Raises:
      TypeError: on all processes, if a part of the value cannot be sent, such as an
        instance of a subclass, which would be decoded as another type.
      ValueError: see `broadcast`.
      RuntimeError: see `synchronize`.
    """
    root = argument_types.check_integer(root, "root")
    with _named(name, "broadcast_object", process_set) as name:
        return _broadcast(value, root, name, process_set)


def _broadcast(value: Any, root: int, name: str, process_set: ProcessSet) -> Any:
    engine = session.current_engine()
    data, error = b"", None
    if engine.rank == root:
        data, error = _try_encode(value)
    # An error is sent like a value; its length is negative.
    length = -len(data) if error is not None else len(data)
    found = api.broadcast(
        np.array(length), root=root, name=f"{name}.length", process_set=process_set
    )
    buffer = np.zeros(abs(int(found)), np.uint8)
    if engine.rank == root:
        buffer = np.frombuffer(data, np.uint8)
    buffer = api.broadcast(
        buffer, root=root, name=f"{name}.data", process_set=process_set
    )
    if error is not None:
        raise error
    if found < 0:
        raise TypeError(f"rank {root}: {_text(buffer)}")
    return _decode(root, buffer)


def _decode(rank: int, data: np.ndarray) -> Any:
    try:
        return decode(data.tobytes())
    except ProtocolError as error:
        raise RuntimeError(
            f"rank {rank} sent data that is not a value: {error}."
        ) from None


def _text(data: np.ndarray) -> str:
    return data.tobytes().decode(errors="replace")


def _try_encode(value: Any) -> tuple[bytes, TypeError | None]:
    try:
        return encode(value), None
    except TypeError as error:
        return str(error).encode(), error


def all_gather_object(
    value: T,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """Gathers a Python value from each process to all of them.

    Args:
      value: see `broadcast_object`; sizes may differ between processes.
      name: see `all_reduce`.
      process_set: the processes that take part.

    Returns:
      The decoded values in rank order.

    Raises:
      TypeError: on all processes, if a part of a value cannot be sent.
      RuntimeError: see `synchronize`.
    """
    with _named(name, "all_gather_object", process_set) as name:
        return _gather(value, name, process_set)


def _gather(value: Any, name: str, process_set: ProcessSet) -> list[Any]:
    data, error = _try_encode(value)
    length = -len(data) if error is not None else len(data)
    lengths = api.all_gather(
        np.array([length]), name=f"{name}.length", process_set=process_set
    )
    whole = api.all_gather(
        np.frombuffer(data, np.uint8), name=f"{name}.data", process_set=process_set
    )
    if error is not None:
        raise error
    parts = np.split(whole, np.cumsum(np.abs(lengths))[:-1])
    for rank, size, part in zip(process_set.ranks, lengths, parts, strict=True):
        if size < 0:
            raise TypeError(f"rank {rank}: {_text(part)}")
    by_rank = zip(process_set.ranks, parts, strict=True)
    return [_decode(rank, part) for rank, part in by_rank]


def broadcast_parameters(
    params: T,
    *,
    root: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Copies the parameters of one process to all of them.

    Args:
      params: pytree of arrays, keys of `jax.random` and Python values, with the same
        structure on all processes.
      root: rank of the source.
      name: see `all_reduce`.
      process_set: the processes that take part.

    Returns:
      The same tree with the values of the root; Python numbers, bools and strings keep
      their types.

    Raises:
      RuntimeError: on all processes, if structures, shapes or dtypes differ.
      ValueError, TypeError: see `broadcast` and `broadcast_object`.
    """
    root = argument_types.check_integer(root, "root")
    with _named(name, "broadcast_parameters", process_set) as name:
        return _broadcast_tree(params, root, name, process_set)


def _broadcast_tree(
    params: PyTree, root: int, name: str, process_set: ProcessSet
) -> PyTree:
    # Errors of this process must be raised before the others hear of the tree.
    nothing = ("", 1.0, 1.0, None)
    engine = session.current_engine()
    submission.find_options(engine, "broadcast", process_set, *nothing, root)
    leaves, treedef = jax.tree.flatten(params)
    paths = tree_paths.leaf_paths(params)
    keys = [
        jax.random.key_impl(x) if argument_types.is_key(x) else None for x in leaves
    ]
    leaves = [
        x if key is None else jax.random.key_data(x)
        for x, key in zip(leaves, keys, strict=True)
    ]
    is_array = [isinstance(x, np.ndarray | np.generic | jax.Array) for x in leaves]
    for path, x, a in zip(paths, leaves, is_array, strict=True):
        if a:
            argument_types.check_array(x, path)
    layout = [
        [path, a if key is None else f"keys of {key}"]
        for path, a, key in zip(paths, is_array, keys, strict=True)
    ]
    values = [x for x, a in zip(leaves, is_array, strict=True) if not a]
    theirs = all_gather_object(layout, name=f"{name}.tree", process_set=process_set)
    for rank, other in zip(process_set.ranks, theirs, strict=True):
        if other != theirs[0]:
            raise RuntimeError(_explain(process_set.ranks[0], theirs[0], rank, other))
    values = broadcast_object(
        values, root=root, name=f"{name}.values", process_set=process_set
    )
    arrays = api.broadcast(
        {path: x for path, x, a in zip(paths, leaves, is_array, strict=True) if a},
        root=root,
        name=name,
        process_set=process_set,
    )
    kept = iter(values)
    leaves = [
        arrays[path] if a else next(kept)
        for path, a in zip(paths, is_array, strict=True)
    ]
    leaves = [
        x if key is None else jax.random.wrap_key_data(x, impl=key)
        for x, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def broadcast_optimizer_state(
    state: T,
    *,
    root: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Copies the optimizer state of one process to all of them.

    Args:
      state: returned by `tx.init` or `tx.update`; the same structure on all processes.
      root: rank of the source.
      name: see `all_reduce`.
      process_set: the processes that take part.

    Returns:
      See `broadcast_parameters`.

    Raises:
      RuntimeError: see `broadcast_parameters`.
    """
    root = argument_types.check_integer(root, "root")
    with _named(name, "broadcast_optimizer_state", process_set) as name:
        return _broadcast_tree(state, root, name, process_set)


@contextlib.contextmanager
def _named(name: str | None, kind: str, process_set: ProcessSet) -> Iterator[str]:
    submission.check_set(process_set)
    if name is None or name == "":
        set_id = process_set.process_set_id or 0
        with session.numbered(kind, set_id) as number:
            yield number
    else:
        yield argument_types.check_name(name)


def _explain(a: int, ours: list[Any], b: int, theirs: list[Any]) -> str:
    # One list may be a prefix of the other; the last line says so.
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return (
                f"The trees differ: rank {a} has {_leaf(mine)}, but rank {b} has "
                f"{_leaf(other)}."
            )
    return f"The trees differ: rank {a} has {len(ours)} leaves, rank {b} {len(theirs)}."


def _leaf(item: list[Any]) -> str:
    path, kind = item
    if not isinstance(kind, str):
        kind = "an array" if kind else "a value"
    return f"{kind} at `{path}`"
