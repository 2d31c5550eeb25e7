"""Objects: values of Python, and states of training, as one rank has them."""

from typing import Any

import jax
import numpy as np

from jdp import buckets
from jdp.eager import calls, session
from jdp.eager.encoding import decode, encode
from jdp.eager.messages import ProtocolError
from jdp.eager.process_set import ProcessSet, global_process_set
from jdp.types import PyTree


def broadcast_object(
    value: Any,
    *,
    root: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives all processes a value of one of them.

    Args:
      value: None, bools, numbers, strings, bytes, lists, dicts, sets, arrays and so
        on; of other processes than the root it is not read.
      root: rank of the process whose value it is.
      name: see `all_reduce`.
      process_set: who takes part.

    Returns:
      The value of the root, on the root itself too as it was decoded: tuples are lists,
      arrays are numpy's.

    Raises:
      TypeError: on all processes: the value holds something that cannot be sent.
      ValueError: see `broadcast`.
      RuntimeError: see `synchronize`.
    """
    engine = session.current_engine()
    name = name or session.next_name(
        "broadcast_object", process_set.process_set_id or 0
    )
    data, error = b"", None
    if engine.rank == root:
        data, error = _try_encode(value)
    # An error is sent like a value; its length is negative.
    length = -len(data) if error is not None else len(data)
    found = calls.broadcast(
        np.array(length), root=root, name=f"{name}.length", process_set=process_set
    )
    buffer = np.zeros(abs(int(found)), np.uint8)
    if engine.rank == root:
        buffer = np.frombuffer(data, np.uint8)
    buffer = calls.broadcast(
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
        raise RuntimeError(f"rank {rank} sent what is no value: {error}.") from None


def _text(data: np.ndarray) -> str:
    return data.tobytes().decode(errors="replace")


def _try_encode(value: Any) -> tuple[bytes, TypeError | None]:
    try:
        return encode(value), None
    except TypeError as error:
        return str(error).encode(), error


def all_gather_object(
    value: Any,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gives all processes the values of all.

    Args:
      value: see `broadcast_object`; those of the processes may differ in size.
      name: see `all_reduce`.
      process_set: who takes part.

    Returns:
      The values, decoded, in the order of the ranks.

    Raises:
      TypeError: on all processes: a value holds something that cannot be sent.
      RuntimeError: see `synchronize`.
    """
    set_id = process_set.process_set_id or 0
    name = name or session.next_name("all_gather_object", set_id)
    data, error = _try_encode(value)
    length = -len(data) if error is not None else len(data)
    lengths = calls.all_gather(
        np.array([length]), name=f"{name}.length", process_set=process_set
    )
    whole = calls.all_gather(
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
    params: PyTree,
    *,
    root: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> PyTree:
    """Gives all processes the parameters of one of them.

    Args:
      params: pytree of arrays and Python values, of the same structure on all.
      root: rank of the process whose parameters they are.
      name: see `all_reduce`.
      process_set: who takes part.

    Returns:
      The same tree with the values of the root; Python numbers, bools and strings keep
      their type.

    Raises:
      RuntimeError: the structures, shapes or dtypes differ; on all processes.
      ValueError, TypeError: see `broadcast` and `broadcast_object`.
    """
    set_id = process_set.process_set_id or 0
    name = name or session.next_name("broadcast_parameters", set_id)
    leaves, treedef = jax.tree.flatten(params)
    paths = buckets.leaf_paths(params)
    is_array = [isinstance(x, np.ndarray | np.generic | jax.Array) for x in leaves]
    layout = [[path, a] for path, a in zip(paths, is_array, strict=True)]
    values = [x for x, a in zip(leaves, is_array, strict=True) if not a]
    theirs = all_gather_object(layout, name=f"{name}.tree", process_set=process_set)
    for rank, other in zip(process_set.ranks, theirs, strict=True):
        if other != theirs[0]:
            raise RuntimeError(_explain(process_set.ranks[0], theirs[0], rank, other))
    values = broadcast_object(
        values, root=root, name=f"{name}.values", process_set=process_set
    )
    arrays = calls.broadcast(
        {path: x for path, x, a in zip(paths, leaves, is_array, strict=True) if a},
        root=root,
        name=name,
        process_set=process_set,
    )
    kept = iter(values)
    leaves = [
        arrays[path] if a else _as_before(next(kept), x)
        for path, x, a in zip(paths, leaves, is_array, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def broadcast_optimizer_state(
    state: PyTree,
    *,
    root: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> PyTree:
    """Gives all processes the optimizer state of one of them.

    Args:
      state: what `tx.init` or `tx.update` returned, of the same structure on all.
      root: rank of the process whose state it is.
      name: see `all_reduce`.
      process_set: who takes part.

    Returns:
      See `broadcast_parameters`.

    Raises:
      RuntimeError: see `broadcast_parameters`.
    """
    set_id = process_set.process_set_id or 0
    name = name or session.next_name("broadcast_optimizer_state", set_id)
    return broadcast_parameters(state, root=root, name=name, process_set=process_set)


def _as_before(value: Any, given: Any) -> Any:
    """The value of the root; where MessagePack has fewer types, that of before."""
    return tuple(value) if isinstance(given, tuple) else value


def _explain(a: int, ours: list[Any], b: int, theirs: list[Any]) -> str:
    # One list may be the beginning of the other, which the end of this says.
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return (
                f"The trees differ: rank {a} has {_leaf(mine)}, but rank {b} has "
                f"{_leaf(other)}."
            )
    return f"The trees differ: rank {a} has {len(ours)} leaves, rank {b} {len(theirs)}."


def _leaf(item: list[Any]) -> str:
    path, is_array = item
    return f"{'an array' if is_array else 'a value'} at `{path}`"
