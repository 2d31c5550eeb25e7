"""Flag trees: a boolean per parameter, in the structure of the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.types import PyTree


def unflatten(treedef: Any, flags: list[Any]) -> PyTree:
    """Returns a tree of booleans.

    Raises:
      TypeError: a class of the tree does not hold booleans; the message names it.
    """
    try:
        tree = jax.tree.unflatten(treedef, flags)
        left = [x for x in jax.tree.leaves(tree) if not _is_flag(x)]
        made = ", ".join(str(getattr(x, "dtype", x)) for x in left)
        cause, error = f"it made {made} of them", None
    except Exception as e:
        tree, made = None, "nothing"
        cause, error = f"{type(e).__name__}: {e}", e
    if not made:
        return tree
    # The error names the innermost subtree that fails alone.
    start = 0
    for child in treedef.children():
        end = start + child.num_leaves
        unflatten(child, flags[start:end])
        start = end
    raise TypeError(
        "The usage flags are a tree like the parameters with one boolean per "
        f"parameter, but `{treedef.node_data()[0].__name__}` does not hold booleans: "
        f"{cause}. Let it check and convert its fields only if they are arrays of "
        "numbers, or when it is made, not when JAX unflattens it; or pass the "
        "parameters as a dict of its fields."
    ) from error


def _is_flag(x: Any) -> bool:
    is_bool = isinstance(x, bool | np.bool_) or getattr(x, "dtype", None) == np.bool_
    return is_bool and jnp.shape(x) == ()
