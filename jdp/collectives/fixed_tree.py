"""Fixed tree: sums whose bits do not depend on where their terms are.

The tree over n leaves is split at the largest power of two below n, and so on. Parts of
it can be summed anywhere: each sum of two numbers is the same wherever it is computed,
and the tree says which two.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax

from jdp.collectives import base, xla
from jdp.collectives.base import Op
from jdp.types import AxisName

T = TypeVar("T")


class Subtree(NamedTuple):
    """The leaves `first` to `end - 1` of a tree, whose sum is one of its terms."""

    first: int
    end: int

    @property
    def children(self) -> "tuple[Subtree, Subtree]":
        """The two subtrees whose sum it is; a leaf has none."""
        size = self.end - self.first
        middle = self.first + (1 << (size - 1).bit_length() - 1)
        return Subtree(self.first, middle), Subtree(middle, self.end)

    def cover(self, first: int, end: int) -> "list[Subtree]":
        """Returns the largest subtrees of the leaves `first` to `end - 1`."""
        if first <= self.first and self.end <= end:
            return [self]
        if self.end <= first or end <= self.first:
            return []
        return [
            subtree for child in self.children for subtree in child.cover(first, end)
        ]

    def reduce(self, terms: "dict[Subtree, T]", combine: Callable[[T, T], T]) -> T:
        """Returns the sum of this subtree, from the sums of subtrees below it."""
        if self in terms:
            return terms[self]
        left, right = self.children
        return combine(left.reduce(terms, combine), right.reduce(terms, combine))


def whole_tree(num_leaves: int) -> Subtree:
    """Returns the tree over leaves 0 to `num_leaves - 1`."""
    return Subtree(0, num_leaves)


def reduce_in_order(terms: Sequence[T], combine: Callable[[T, T], T]) -> T:
    """Reduces one term per leaf in the order of the tree."""
    known = {Subtree(i, i + 1): x for i, x in enumerate(terms)}
    return whole_tree(len(terms)).reduce(known, combine)


def fixed_tree_all_reduce(
    x: jax.Array, axis_name: AxisName, *, op: Op = "sum"
) -> jax.Array:
    """Reduces in the order of a fixed binary tree, whose leaves are the replicas.

    Each replica gets one part of all buffers, sums it in the order of the tree, and
    sends the sum to all: an all-to-all and an all-gather, with the bytes of a ring. The
    result has the same bits as sums along the same tree of which each replica has
    computed a subtree; see `data_parallel(num_shards=)`.

    Args:
      x: shape (n,).
      axis_name: the axis, or axes, over which replicas lie.
      op: "sum", "mean", "min", "max" or "product".

    Returns:
      The reduction, shape (n,), dtype of `x`; see `jdp.collectives.base`.
    """
    x, group = base.enter(x, axis_name, op)
    if base.is_trivial(x, group):
        return base.replicated(x, axis_name)
    blocks = [[Subtree(rank, rank + 1)] for rank in range(group.size)]
    return reduce_blocks([x], axis_name, blocks, op=op)


def reduce_blocks(
    terms: Sequence[jax.Array],
    axis_name: AxisName,
    blocks: Sequence[Sequence[Subtree]],
    *,
    op: Op = "sum",
) -> jax.Array:
    """Reduces terms of a tree that lie on several replicas.

    Args:
      terms: this replica's terms, shape (n,) each; as many on all replicas. Terms
        beyond the subtrees of the replica do not count.
      axis_name: the axis, or axes, over which replicas lie.
      blocks: per replica the subtrees whose sums its terms are; together all leaves.
      op: as above; a mean is over the leaves.

    Returns:
      The reduction, shape (n,), dtype of the terms, the same on all replicas.
    """
    size, dtype, num_replicas = terms[0].size, terms[0].dtype, len(blocks)
    tree = whole_tree(max(subtree.end for subtrees in blocks for subtree in subtrees))
    received = [
        base.all_to_all(base.pad(x, num_replicas).reshape(num_replicas, -1), axis_name)
        for x in terms
    ]
    known = {
        subtree: received[k][rank]
        for rank, subtrees in enumerate(blocks)
        for k, subtree in enumerate(subtrees)
    }
    part = tree.reduce(known, lambda a, b: base.combine(op, a, b))
    part = base.finish(part, op, tree.end, dtype)
    whole = xla.psum_all_gather(part, axis_name)
    return base.replicated(whole[:size], axis_name)
