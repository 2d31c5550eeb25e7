"""NaN search: is JAX calling a step again to find where a NaN arises?"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jdp import compat
from jdp.types import PyTree


def check_is_tracing(step: str, arguments: dict[str, PyTree]) -> None:
    """Raises FloatingPointError if JAX calls a step to look for a NaN.

    With `jax_debug_nans` or `jax_debug_infs`, JAX runs the step again on the arguments
    of the call, operation by operation. `shard_map` would then call itself endlessly.

    Args:
      step: the name of the step.
      arguments: the arguments of the call, by name.
    """
    if not compat.searches_for_nan():
        return
    leaves = jax.tree.leaves(arguments)
    if not leaves or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return
    before = [
        name + jax.tree_util.keystr(path)
        for name, tree in arguments.items()
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        if _has_nonfinite(leaf)
    ]
    found = (
        f"`{before[0]}` held one before the step."
        if before
        else "The arguments that were not donated, such as the batches, held none."
    )
    raise FloatingPointError(
        f"The step `{step}` returned a NaN or an infinity, which `jax_debug_nans` or "
        f"`jax_debug_infs` refuses. {found} To find where it arises, run the loss of "
        "one replica without `jdp.data_parallel`, or print with `jax.debug.print`."
    )


def _has_nonfinite(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or leaf.is_deleted():
        return False
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return False
    shards = (np.asarray(shard.data) for shard in leaf.addressable_shards)
    return any(not np.isfinite(x.astype(np.complex128)).all() for x in shards)
