"""Per replica: which parts of a train state does every replica have for itself?"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from typing_extensions import TypeVar

from jdp.trees import tree_paths
from jdp.types import PyTree

T = TypeVar("T", default=Any)


class PerReplica(NamedTuple, Generic[T]):
    """A part of a train state that differs between the replicas.

    For example a shard of the optimizer state, or error-feedback residuals. Inside a
    step, `value` belongs to this replica. Outside, every array has one more dimension
    in front, of length num_replicas, over which it is split: row i belongs to replica
    i. `jdp.data_parallel` converts between the two forms.

    Attributes:
      value: pytree of arrays.
    """

    value: T


def specs(tree: PyTree, axis_names: tuple[str, ...]) -> list[PartitionSpec]:
    """Returns the partition of each leaf of a state outside a step."""
    kinds = PartitionSpec(), PartitionSpec(axis_names)
    return [kinds[is_own] for is_own in are_own(tree)]


def enter(tree: PyTree) -> PyTree:
    """Converts a state from its form outside a step to its form on one replica."""
    return map_parts(tree, lambda x: x, lambda x: x.reshape(x.shape[1:]))


def leave(tree: PyTree) -> PyTree:
    """Converts a state from its form on one replica to its form outside a step.

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
    """Explains an array that still has the rows of all replicas inside a step.

    Args:
      found: shape of the array.
      expected: shape of the array on one replica.

    Returns:
      Sentences that begin with a space; "" if this is not the mistake.
    """
    if len(found) < 1 or found[1:] != tuple(expected):
        return ""
    return (
        f" It has {found[0]} rows, one per replica: its `jdp.PerReplica` was taken "
        "apart, for example by `nnx.split` of an `nnx.Optimizer`. Let a step of "
        "`jdp.flax_nnx.data_parallel` take the optimizer as an argument."
    )


def are_own(tree: PyTree) -> list[bool]:
    """Returns per leaf of a tree whether it is in a `PerReplica`."""
    # The tree is not rebuilt: a class may refuse leaves that are not arrays.
    nodes = jax.tree.leaves(tree, is_leaf=_is_own)
    return [_is_own(node) for node in nodes for _ in jax.tree.leaves(node)]


def split_leaves(tree: PyTree) -> tuple[list[Any], list[Any]]:
    """Returns the shared leaves, and the leaves of `PerReplica` parts."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for leaf, is_own in zip(jax.tree.leaves(tree), are_own(tree), strict=True):
        parts[is_own].append(leaf)
    return parts


def merge_leaves(
    are_own: Sequence[bool], shared: Sequence[Any], own: Sequence[Any]
) -> list[Any]:
    """Returns the leaves of a tree, given `are_own`; the inverse of `split_leaves`."""
    left = iter(shared), iter(own)
    return [next(left[is_own]) for is_own in are_own]


class Outline(NamedTuple):
    """Description of a tree by leaf; its classes may refuse leaves but arrays."""

    treedef: Any
    paths: list[str]
    are_own: list[bool]
    leaves: list[Any]  # `jax.ShapeDtypeStruct`s, and leaves other than `jax.Array`s.

    @property
    def num_shared(self) -> int:
        """Number of leaves that all replicas share."""
        return self.are_own.count(False)

    def unflatten(self, leaves: list[Any]) -> PyTree:
        """Returns the tree with other leaves."""
        unflatten = _unflatten_rows if any(self.are_own) else jax.tree.unflatten
        return unflatten(self.treedef, leaves)


def outline(tree: PyTree) -> Outline:
    """Returns the description of a tree, which outlives its trace."""
    leaves, treedef = jax.tree.flatten(tree)
    avals = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x
        for x in leaves
    ]
    return Outline(treedef, tree_paths.leaf_paths(tree), are_own(tree), avals)


def map_parts(
    tree: PyTree, of_shared: Callable[[Any], Any], of_own: Callable[[Any], Any]
) -> PyTree:
    """Maps the shared leaves, and the leaves of `PerReplica` parts."""

    def visit(node: Any) -> Any:
        return jax.tree.map(of_own, node) if _is_own(node) else of_shared(node)

    return jax.tree.map(visit, tree, is_leaf=_is_own)


def _unflatten_rows(treedef: Any, leaves: list[Any]) -> PyTree:
    """Returns a tree whose `PerReplica` parts have their form outside a step."""
    try:
        return jax.tree.unflatten(treedef, leaves)
    except Exception as error:
        raise TypeError(
            "A `jdp.PerReplica` has, outside of a step, a row for each replica: one "
            "more dimension in front of every array. A class in it refuses that, with "
            f"{type(error).__name__}: {error}. Let the class check its fields when "
            "user code makes it, not when JAX unflattens it, or replace it by a dict "
            "of its fields."
        ) from error


def _is_own(node: Any) -> bool:
    return isinstance(node, PerReplica)
