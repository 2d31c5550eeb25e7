"""Resharding: a state that was saved on another number of replicas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp import buckets
from jdp.per_replica import PerReplica
from jdp.types import PyTree
from jdp.zero import ZeroState


def saved_like(state: PyTree, *, num_replicas: int) -> PyTree:
    """Returns what a state is like that was saved on another number of replicas.

    For the target of a checkpoint's `restore`; `jdp.reshard` then brings what was
    restored to the replicas that are here.

    Args:
      state: a new one, of the replicas that are here; values are not read.
      num_replicas: of the job that saved it.

    Returns:
      The same tree of numpy arrays, which take no memory and hold nothing.
    """

    def like(x: Any, shape: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(np.zeros((), x.dtype), shape)

    def piece(x: Any, size: int) -> np.ndarray:
        return like(x, (num_replicas, -(-size // num_replicas)))

    def row(x: Any) -> np.ndarray:
        return like(x, (num_replicas, *x.shape[1:]))

    def shared(x: Any) -> np.ndarray:
        return like(x, x.shape)

    return _map(state, shared, piece, row)


def reshard(saved: PyTree, *, like: PyTree) -> PyTree:
    """Brings a state to another number of replicas.

    Every process calls it with the whole of what was saved. Pieces of `jdp.zero1` are
    cut anew, bit for bit. Of what else replicas had for themselves, such as what hooks
    have not sent, each gets the mean: what they send together stays the same in the
    mean over the replicas.

    Args:
      saved: the state as it was saved, of host arrays; see `saved_like`.
      like: a new state of the replicas that are here; where its arrays lie is kept.

    Returns:
      The saved values in the shapes of `like`.

    Raises:
      ValueError: `saved` is not one of these parameters; the leaf is named.
      TypeError: a replica's own array of integers or keys would have to be averaged.
    """
    paths = buckets.leaf_paths(saved)
    if paths != buckets.leaf_paths(like):
        buckets.check_same_structure(saved, "What was saved", like, "`like`")
    found = iter(zip(paths, jax.tree.leaves(saved), strict=True))

    def take(x: Any) -> tuple[str, np.ndarray]:
        path, value = next(found)
        value = np.asarray(value)
        if value.dtype != x.dtype:
            raise ValueError(
                f"`{path}` was saved as {value.dtype}, but is {x.dtype} here."
            )
        return path, value

    def shared(x: Any) -> jax.Array:
        path, value = take(x)
        if value.shape != x.shape:
            raise _misfit(path, value.shape, x.shape)
        return _place(value, x)

    def piece(x: Any, size: int) -> jax.Array:
        path, value = take(x)
        if value.ndim != 2 or value.shape[1] != -(-size // value.shape[0]):
            raise _misfit(path, value.shape, x.shape)
        flat = np.zeros(x.shape, x.dtype).reshape(-1)
        flat[:size] = value.reshape(-1)[:size]
        return _place(flat.reshape(x.shape), x)

    def row(x: Any) -> jax.Array:
        path, value = take(x)
        if value.shape[1:] != x.shape[1:]:
            raise _misfit(path, value.shape, x.shape)
        if value.shape[0] == x.shape[0]:
            return _place(value, x)
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            raise TypeError(
                f"`{path}`, {value.dtype}, is of each of {value.shape[0]} replicas; it "
                f"cannot be averaged for {x.shape[0]} others."
            )
        wide = np.promote_types(value.dtype, np.float32)
        mean = value.astype(wide).mean(0).astype(value.dtype)
        return _place(np.broadcast_to(mean, x.shape), x)

    new = _map(like, shared, piece, row)
    # Shapes of another model may come to the same pieces.
    buckets.check_same_structure(saved, "What was saved", like, "`like`")
    return new


def _map(
    tree: PyTree,
    of_shared: Callable[[Any], Any],
    of_piece: Callable[[Any, int], Any],
    of_row: Callable[[Any], Any],
) -> PyTree:
    """Maps shared leaves, pieces with the size of the whole, and rows of replicas."""

    def visit(node: Any) -> Any:
        if isinstance(node, PerReplica):
            return jax.tree.map(of_row, node)
        if not isinstance(node, ZeroState):
            return of_shared(node)
        sizes = [int(np.prod(s)) for s in node.shapes if s is not None]
        shared = [of_shared(x) for x in node.shared]
        own = [of_piece(x, n) for x, n in zip(node.own.value, sizes, strict=True)]
        hook = _map(node.hook, of_shared, of_piece, of_row)
        return ZeroState(shared, PerReplica(own), hook, node.treedef, node.shapes)

    def is_special(node: Any) -> bool:
        return isinstance(node, PerReplica | ZeroState)

    return jax.tree.map(visit, tree, is_leaf=is_special)


def _place(value: np.ndarray, like: Any) -> jax.Array:
    sharding = like.sharding if isinstance(like, jax.Array) else None
    if sharding is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])


def _misfit(path: str, saved: Any, here: Any) -> ValueError:
    return ValueError(
        f"`{path}` was saved with shape {list(saved)}, which does not become "
        f"{list(here)}: it is of a model of another shape."
    )
