"""Per replica: the parts of a train state of which every replica has its own."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdp.trees import tree_paths
from jdp.types import PyTree


class PerReplica(NamedTuple):
    """A part of a train state that differs between the replicas.

    What the optimizer state of a shard is, or a replica's own rounding errors. Inside
    of a step `value` is what this replica has. Outside of it every array has one more
    dimension in front, of length num_replicas, over which it is split: row i is that of
    replica i. `jdp.data_parallel` takes it from one form to the other.

    Attributes:
      value: pytree of arrays.
    """

    value: PyTree


def specs(tree: PyTree, axis_names: tuple[str, ...]) -> list[PartitionSpec]:
    """Returns how each leaf of a state, outside of a step, lies over the replicas."""
    kinds = PartitionSpec(), PartitionSpec(axis_names)
    return [kinds[is_own] for is_own in are_own(tree)]


def enter(tree: PyTree) -> PyTree:
    """Takes a state from the form outside of a step to that of one replica."""
    return map_parts(tree, lambda x: x, lambda x: x.reshape(x.shape[1:]))


def leave(tree: PyTree) -> PyTree:
    """The inverse of `enter`.

    Raises:
      TypeError: a class in it refuses one more dimension in front of its arrays.
    """

    def visit(node: Any) -> Any:
        if not _is_own(node):
            return node
        leaves, treedef = jax.tree.flatten(node)
        return _unflatten_rows(treedef, [jnp.asarray(x)[None] for x in leaves])

    return jax.tree.map(visit, tree, is_leaf=_is_own)


def explain_rows(found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Advice for an array that, inside of a step, still has the rows of all replicas.

    Args:
      found: shape of the array.
      expected: shape of what one replica has.

    Returns:
      A sentence that begins with a space; "" if this is not what is wrong.
    """
    if len(found) < 1 or found[1:] != tuple(expected):
        return ""
    return (
        f" It has {found[0]} rows, as of all replicas: something took the "
        "`jdp.PerReplica` that holds it apart, such as `nnx.split` of an "
        "`nnx.Optimizer`. Let the modules be the state of the step, `(model, "
        "optimizer)`, and split the model alone, inside of it."
    )


def are_own(tree: PyTree) -> list[bool]:
    """Returns by leaf of a tree whether it is a replica's own."""
    # The tree is not rebuilt: the user's classes may refuse leaves that are no arrays.
    nodes = jax.tree.leaves(tree, is_leaf=_is_own)
    return [_is_own(node) for node in nodes for _ in jax.tree.leaves(node)]


def split_leaves(tree: PyTree) -> tuple[list[Any], list[Any]]:
    """Returns the leaves that all replicas share, and those of their own."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for leaf, is_own in zip(jax.tree.leaves(tree), are_own(tree), strict=True):
        parts[is_own].append(leaf)
    return parts


def merge_leaves(
    are_own: Sequence[bool], shared: Sequence[Any], own: Sequence[Any]
) -> list[Any]:
    """The inverse of `split_leaves`; returns the leaves of a tree, given `are_own`."""
    left = iter(shared), iter(own)
    return [next(left[is_own]) for is_own in are_own]


class Outline(NamedTuple):
    """A tree without its arrays, by leaf: a class may refuse what is no array."""

    treedef: Any
    paths: list[str]
    are_own: list[bool]
    leaves: list[Any]  # `jax.ShapeDtypeStruct`s, and what was no `jax.Array`.

    @property
    def num_shared(self) -> int:
        """Leaves that all replicas share."""
        return self.are_own.count(False)

    def unflatten(self, leaves: list[Any]) -> PyTree:
        """Returns the tree with other leaves."""
        unflatten = _unflatten_rows if any(self.are_own) else jax.tree.unflatten
        return unflatten(self.treedef, leaves)


def outline(tree: PyTree) -> Outline:
    """Returns what outlives the trace of a tree."""
    leaves, treedef = jax.tree.flatten(tree)
    avals = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x
        for x in leaves
    ]
    return Outline(treedef, tree_paths.leaf_paths(tree), are_own(tree), avals)


def map_parts(
    tree: PyTree, of_shared: Callable[[Any], Any], of_own: Callable[[Any], Any]
) -> PyTree:
    """Maps the leaves that all replicas share, and those of their own."""

    def visit(node: Any) -> Any:
        return jax.tree.map(of_own, node) if _is_own(node) else of_shared(node)

    return jax.tree.map(visit, tree, is_leaf=_is_own)


def _unflatten_rows(treedef: Any, leaves: list[Any]) -> PyTree:
    """Returns a tree with parts of the form outside of a step."""
    try:
        return jax.tree.unflatten(treedef, leaves)
    except Exception as error:
        raise TypeError(
            "A `jdp.PerReplica` has, outside of a step, a row for each replica: one "
            "more dimension in front of every array. A class in it refuses that, with "
            f"{type(error).__name__}: {error}. Let the class check its fields when it "
            "is made by hand, not when JAX unflattens it, or put a dict of them in its "
            "place."
        ) from error


def _is_own(node: Any) -> bool:
    return isinstance(node, PerReplica)
