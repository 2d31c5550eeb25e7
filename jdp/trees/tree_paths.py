"""Tree paths: names for the leaves of pytrees, for errors and logs."""

from collections.abc import Iterable
from typing import Any

import jax

from jdp.types import PyTree

KeyPath = tuple[Any, ...]  # JAX's keys from the root of a tree to a leaf.


def leaf_paths(tree: PyTree) -> list[str]:
    """Returns the path of each leaf, in the format of `jax.tree_util.keystr`.

    A tree that consists of one leaf has the path "(root)".
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return format_paths(path for path, _ in flat)


def format_paths(paths: Iterable[KeyPath]) -> list[str]:
    """Returns paths of JAX as texts, in the format of `leaf_paths`."""
    return [jax.tree_util.keystr(path) or "(root)" for path in paths]


def check_same_structure(tree: PyTree, name: str, other: PyTree, other_name: str):
    """Raises ValueError, naming a path, if two trees differ in structure."""
    found, expected = jax.tree.structure(tree), jax.tree.structure(other)
    if found == expected:
        return
    difference = first_difference(leaf_paths(tree), leaf_paths(other), name, other_name)
    raise ValueError(
        f"{name} does not have the structure of {other_name}.\n{difference}"
        f"  {name}: {found}\n  {other_name}: {expected}"
    )


def first_difference(a: list[str], b: list[str], a_name: str, b_name: str) -> str:
    """Returns a line that names the first difference between two lists of paths."""
    # Below, the line names the first extra path of the longer list.
    for x, y in zip(a, b, strict=False):
        if x != y:
            return (
                f"The first path that differs: `{x}` in {a_name}, `{y}` in {b_name}.\n"
            )
    longer, name = (a, a_name) if len(a) > len(b) else (b, b_name)
    extra = longer[min(len(a), len(b)) :]
    return f"`{extra[0]}` is only in {name}.\n" if extra else ""
