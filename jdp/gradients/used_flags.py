"""Usage flags: parameters that were used on any replica."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.trees import tree_paths
from jdp.types import PyTree


def check_used(used: PyTree, grads: PyTree) -> list[Any]:
    """Returns the leaves of `used`, which must be booleans in the structure of `grads`.

    Raises:
      ValueError: another structure.
      TypeError: a leaf is not one boolean.
    """
    tree_paths.check_same_structure(used, "`used`", grads, "the gradients")
    flags = jax.tree.leaves(used)
    for i, flag in enumerate(flags):
        if is_static(flag):
            continue
        if isinstance(flag, jax.Array | np.ndarray | np.generic):
            if flag.dtype == np.bool_ and flag.shape == ():
                continue
            found = f"{flag.dtype} of shape {flag.shape}"
        else:
            found = repr(flag)
        raise TypeError(
            f"`used` must hold one boolean for each parameter, but has {found} for "
            f"`{tree_paths.leaf_paths(used)[i]}`."
        )
    return flags


def is_static(flag: Any) -> bool:
    """Whether a leaf of `used` was decided by the program."""
    return isinstance(flag, bool | np.bool_)


def find_decided(used: PyTree | None, grads: PyTree) -> list[jax.Array]:
    """Returns the leaves of `used` that control flow decides; see `check_used`."""
    flags = [] if used is None else check_used(used, grads)
    return [flag for flag in flags if not is_static(flag)]


def as_rider(decided: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Returns flags as an array that travels with gradients of `dtype`: shape (n,)."""
    return jnp.stack(decided).astype(dtype)


def from_rider(used: PyTree, mean: jax.Array) -> PyTree:
    """Returns `used` over all replicas, from the mean of `as_rider`."""
    # A mean of zeros and ones is positive if there is a one, in any floating dtype.
    return with_decided(used, list(mean.real > 0))


def with_decided(used: PyTree, decided: Sequence[jax.Array]) -> PyTree:
    """Puts `decided` in the place of the leaves that control flow decides."""
    return outline(used)[1](decided)


def outline(used: PyTree) -> tuple[list[jax.Array], Callable[..., PyTree]]:
    """Returns the leaves that control flow decides, and a function that replaces them.

    The function outlives the trace. Classes of users get only flags as their fields.
    """
    leaves, treedef = jax.tree.flatten(used)
    flags = [x if is_static(x) else None for x in leaves]

    def fill(decided: Sequence[jax.Array]) -> PyTree:
        left = iter(decided)
        return treedef.unflatten([next(left) if x is None else x for x in flags])

    return [x for x in leaves if not is_static(x)], fill
