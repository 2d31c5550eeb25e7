"""Loss values: which parameters and results may a loss have?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.trees import tree_paths
from jdp.types import PyTree


def check_are_parameters(params: PyTree) -> None:
    """Raises TypeError, by path, for a parameter that has no gradient."""
    for i, leaf in enumerate(jax.tree.leaves(params)):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            dtype = jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jnp.inexact):
            continue
        path = tree_paths.leaf_paths(params)[i]
        what = "a PRNG key"
        if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            what = f"{dtype}, which has no gradient"
        raise TypeError(
            f"The parameter `{path}` is {what}. Parameters are floating or complex "
            "arrays; pass the rest as a further argument of the loss, close over it, "
            "or pass `allow_int=True`."
        )


def split_loss(
    loss_fn: Callable[..., Any], out: Any, has_aux: bool
) -> tuple[jax.Array, PyTree]:
    """Returns the loss and aux, from the result of `loss_fn`.

    Raises:
      TypeError: it is not what `has_aux` says, or the loss is not a real number.
      ValueError: the loss is not a scalar.
    """
    name = getattr(loss_fn, "__name__", "loss_fn")
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(
                f"With `has_aux=True`, `{name}` must return a pair `(loss, aux)`, got "
                f"{type(out).__name__}."
            )
        loss, aux = out
    else:
        loss, aux = out, None
    leaves = jax.tree.leaves(loss)
    if len(leaves) != 1 or leaves[0] is not loss or not hasattr(loss, "dtype"):
        if not isinstance(loss, float):
            is_pair = isinstance(loss, tuple) and not has_aux
            hint = " Pass `has_aux=True` if it is `(loss, aux)`." if is_pair else ""
            raise TypeError(
                f"`{name}` must return a scalar loss, got {type(loss).__name__}.{hint}"
            )
    loss = jnp.asarray(loss)
    if loss.shape != ():
        raise ValueError(
            f"`{name}` must return a scalar loss, got shape {loss.shape}. Take the "
            "mean, or the sum, over samples."
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"`{name}` must return a real loss, got {loss.dtype}.")
    return loss, aux


def partition(
    tree: PyTree, kind: type
) -> tuple[list[Any], Callable[[list[Any]], PyTree]]:
    """Takes the leaves of a type out of a tree; the function puts others in place."""
    leaves, treedef = jax.tree.flatten(tree)
    is_taken = [isinstance(x, kind) for x in leaves]
    # The function outlives the trace, so it must not hold its arrays.
    rest = [None if a else x for x, a in zip(leaves, is_taken, strict=True)]

    def unflatten(arrays: list[Any]) -> PyTree:
        left = iter(arrays)
        mixed = [next(left) if a else x for x, a in zip(rest, is_taken, strict=True)]
        return jax.tree.unflatten(treedef, mixed)

    return [x for x, a in zip(leaves, is_taken, strict=True) if a], unflatten


def unflatten_flags(treedef: Any, flags: list[Any]) -> PyTree:
    """Returns a tree of booleans; TypeError names a class that does not hold them."""
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
    # The innermost that fails by itself is to blame.
    start = 0
    for child in treedef.children():
        end = start + child.num_leaves
        unflatten_flags(child, flags[start:end])
        start = end
    raise TypeError(
        "Which parameters were used is a tree like the parameters with a boolean for "
        f"each, but `{treedef.node_data()[0].__name__}` does not hold booleans: "
        f"{cause}. Let it check and convert its fields only where they are arrays of "
        "numbers, or when it is made, not when JAX unflattens it; or let the "
        "parameters be a dict of its fields."
    ) from error


def _is_flag(x: Any) -> bool:
    is_bool = isinstance(x, bool | np.bool_) or getattr(x, "dtype", None) == np.bool_
    return is_bool and jnp.shape(x) == ()
