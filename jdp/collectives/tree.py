"""Tree: reduce to a root and broadcast from it, along a star, a tree or a chain."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jdp.collectives import base
from jdp.collectives.base import Op, ReplicaGroup
from jdp.compat import annotations
from jdp.types import AxisName

Pattern = Literal["star", "tree", "chain"]


def reduce_broadcast_all_reduce(
    x: jax.Array,
    axis_name: AxisName,
    *,
    op: Op = "sum",
    pattern: Pattern = "star",
    root: int = 0,
    num_chunks: int = 1,
) -> jax.Array:
    """Reduces to a root and broadcasts from it.

    Patterns:
      "star": the root receives the buffers of the replicas one after another, as a
        parameter server does, and answers one after another: 2(n - 1) rounds. Each
        round is an operation of its own in the program, so use it for few replicas.
      "tree": a binomial tree, 2 ceil(log2(n)) rounds with the whole buffer.
      "chain": from the last replica to the root and back. The buffer travels in
        `num_chunks` chunks, one behind the other: 2(n - 2 + num_chunks) rounds, each
        with 1 / num_chunks of the buffer.

    Args:
      x: shape (n,).
      axis_name: the axis, or axes, over which replicas lie.
      op: "sum", "mean", "min", "max" or "product".
      pattern: "star", "tree" or "chain".
      root: rank of the replica that has the result first.
      num_chunks: number of chunks of "chain"; must be 1 for other patterns.

    Returns:
      The reduction, shape (n,), dtype of `x`; see `jdp.collectives.base`.

    Raises:
      ValueError: `pattern`, `root` or `num_chunks` is out of range.
    """
    x, group = base.enter(x, axis_name, op)
    _check(pattern, root, num_chunks, group.size)
    if base.is_trivial(x, group):
        return base.replicated(x, axis_name)
    if pattern == "chain":
        y = _along_chain(x, group, root, op, min(num_chunks, x.size))
    else:
        reduce, broadcast = _PATTERNS[pattern]
        y = base.finish(reduce(x, group, root, op), op, group.size, x.dtype)
        y = broadcast(y, group, root)
    return base.replicated(y, axis_name)


def _check(pattern: str, root: int, num_chunks: int, num_replicas: int) -> None:
    if pattern not in get_args(Pattern):
        raise ValueError(
            f"`pattern` must be one of {', '.join(get_args(Pattern))}, got {pattern!r}."
        )
    if not 0 <= root < num_replicas:
        raise ValueError(f"`root` must be a rank, 0 to {num_replicas - 1}, got {root}.")
    if num_chunks < 1 or (num_chunks > 1 and pattern != "chain"):
        raise ValueError(
            "`num_chunks` must be at least 1, and 1 unless `pattern='chain'`, got "
            f"{num_chunks} with `pattern={pattern!r}`."
        )


def _send(x: jax.Array, group: ReplicaGroup, root: int, pairs: base.Pairs) -> jax.Array:
    """`base.exchange` with ranks counted from the root."""
    n = group.size
    return base.exchange(x, group, [((a + root) % n, (b + root) % n) for a, b in pairs])


def _rank_from(root: int, group: ReplicaGroup) -> jax.Array:
    return (group.rank - root) % group.size


def _reduce_star(x: jax.Array, group: ReplicaGroup, root: int, op: Op) -> jax.Array:
    """Reduces to the root; the results of other replicas are not used."""
    y = x
    for k in range(1, group.size):
        # In sequence; otherwise n - 1 buffers could be in memory at once.
        (sent,), (y,) = annotations.order_after([x], [y])
        y = base.combine(op, y, _send(sent, group, root, [(k, 0)]))
    return y


def _broadcast_star(y: jax.Array, group: ReplicaGroup, root: int) -> jax.Array:
    rank = _rank_from(root, group)
    for k in range(1, group.size):
        y = jnp.where(rank == k, _send(y, group, root, [(0, k)]), y)
    return y


def _reduce_tree(x: jax.Array, group: ReplicaGroup, root: int, op: Op) -> jax.Array:
    rank, y = _rank_from(root, group), x
    for distance in _distances(group.size):
        pairs = [(b, a) for a, b in _branches(group.size, distance)]
        both = base.combine(op, y, _send(y, group, root, pairs))
        has_child = (rank % (2 * distance) == 0) & (rank + distance < group.size)
        y = jnp.where(has_child, both, y.astype(both.dtype))
    return y


def _broadcast_tree(y: jax.Array, group: ReplicaGroup, root: int) -> jax.Array:
    rank = _rank_from(root, group)
    for distance in reversed(_distances(group.size)):
        got = _send(y, group, root, _branches(group.size, distance))
        y = jnp.where(rank % (2 * distance) == distance, got, y)
    return y


_PATTERNS = {
    "star": (_reduce_star, _broadcast_star),
    "tree": (_reduce_tree, _broadcast_tree),
}


def _distances(num_replicas: int) -> list[int]:
    return [1 << k for k in range((num_replicas - 1).bit_length())]


def _branches(num_replicas: int, distance: int) -> list[tuple[int, int]]:
    """Returns (parent, child) for all children at `distance`."""
    children = range(distance, num_replicas, 2 * distance)
    return [(child - distance, child) for child in children]


def _along_chain(
    x: jax.Array, group: ReplicaGroup, root: int, op: Op, num_chunks: int
) -> jax.Array:
    n, rank = group.size, _rank_from(root, group)
    num_rounds = n - 2 + num_chunks
    y = base.pad(x, num_chunks).astype(base.accumulator(x.dtype, op))
    length = y.size // num_chunks

    def take(y: jax.Array, c: jax.Array) -> jax.Array:
        start = jnp.clip(c, 0, num_chunks - 1) * length
        return lax.dynamic_slice(y, (start,), (length,))

    def put_if(
        condition: jax.Array, y: jax.Array, value: jax.Array, c: jax.Array
    ) -> jax.Array:
        start = jnp.clip(c, 0, num_chunks - 1) * length
        value = jnp.where(condition, value, take(y, c))
        return lax.dynamic_update_slice(y, value, (start,))

    def towards_root(t: jax.Array, y: jax.Array) -> jax.Array:
        # Chunk c leaves the last replica in round c, and its neighbour a round later.
        c = t - (n - 2 - rank)
        pairs = [(k, k - 1) for k in range(1, n)]
        got = _send(take(y, c - 1), group, root, pairs)
        both = base.combine(op, take(y, c), got)
        return put_if((c >= 0) & (c < num_chunks) & (rank < n - 1), y, both, c)

    def from_root(t: jax.Array, y: jax.Array) -> jax.Array:
        c = t - (rank - 1)
        pairs = [(k - 1, k) for k in range(1, n)]
        got = _send(take(y, c - 1), group, root, pairs)
        return put_if((c >= 0) & (c < num_chunks) & (rank > 0), y, got, c)

    y = lax.fori_loop(0, num_rounds, towards_root, y)
    y = base.finish(y, op, n, x.dtype)
    return lax.fori_loop(0, num_rounds, from_root, y)[: x.size]
