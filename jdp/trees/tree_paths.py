"""Tree paths: names for the leaves of pytrees, for errors and logs."""

import jax

from jdp.types import PyTree


def leaf_paths(tree: PyTree) -> list[str]:
    """Path of each leaf of `tree`, as `jax.tree_util.keystr` writes it.

    A tree that is a leaf itself has the path "(root)".
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path) or "(root)" for path, _ in flat]


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
    """Returns a line that names the first of two lists of paths that differs."""
    # What the longer one has more is named below.
    for x, y in zip(a, b, strict=False):
        if x != y:
            return (
                f"The first path that differs: `{x}` in {a_name}, `{y}` in {b_name}.\n"
            )
    longer, name = (a, a_name) if len(a) > len(b) else (b, b_name)
    extra = longer[min(len(a), len(b)) :]
    return f"`{extra[0]}` is only in {name}.\n" if extra else ""
