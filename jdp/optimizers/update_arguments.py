"""Update arguments: checks of an optimizer and of the arguments of its `update`."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jdp import types
from jdp.compat import annotations
from jdp.trees import tree_paths
from jdp.types import AxisName, PyTree


def check_optimizer(tx: Any, wrapper: str, *, argument: str = "tx") -> None:
    """Raises TypeError if `tx` is not an optax optimizer, such as `optax.adam` itself.

    Args:
      tx: the argument.
      wrapper: function of jdp that was called.
      argument: name of the argument.
    """
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return
    name = getattr(tx, "__name__", None)
    got = repr(tx) if name is None else f"the function `{name}`"
    advice = ", such as `optax.adam(1e-3)`."
    if name is not None:
        advice = f". Call it: `jdp.{wrapper}(..., {argument}=optax.{name}(...))`."
        if argument == "tx":
            advice = f". Call it: `jdp.{wrapper}(optax.{name}(...))`."
    raise TypeError(
        f"`{argument}` of `jdp.{wrapper}` must be an optimizer of optax, a pair of "
        f"`init` and `update`, got {got}{advice}"
    )


def check_shapes(grads: PyTree, params: PyTree | None) -> None:
    """Raises ValueError where a gradient has another shape than its parameter.

    Where the structures differ, as for `optax.lookahead`, nothing is compared.
    """
    if params is None or jax.tree.structure(grads) != jax.tree.structure(params):
        return
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)
    for i, (grad, param) in enumerate(pairs):
        if jnp.shape(grad) == jnp.shape(param):
            continue
        path = tree_paths.leaf_paths(grads)[i]
        raise ValueError(
            f"The gradient `{path}` has shape {list(jnp.shape(grad))}, but its "
            f"parameter has {list(jnp.shape(param))}. A mean over the replicas would "
            "mix gradients of single samples, which "
            "`optax.contrib.differentially_private_aggregate` and `dpsgd` are to see "
            "one by one: run that part on each replica's own samples, with a key of "
            "its own, and wrap the optimizer that takes the result."
        )


def check_extra(
    extra_args: dict[str, Any],
    tx: Any,
    wrapper: Callable[..., Any],
    axis_name: AxisName,
) -> dict[str, Any]:
    """Returns extra arguments of `update`; arrays must be the same on all replicas.

    Args:
      extra_args: further arguments of `update`, by name.
      tx: the optimizer that gets them.
      wrapper: function of jdp that made `update`.
      axis_name: the axis, or axes, over which replicas lie.

    Raises:
      TypeError: one is an option of `wrapper`, which `tx` itself does not name.
      ValueError: an array may differ between the replicas; it is named.
    """
    options = inspect.signature(wrapper).parameters
    for name in options.keys() & extra_args.keys():
        if name not in inspect.signature(tx.update).parameters:
            raise TypeError(
                f"`{name}` is an option of `jdp.{wrapper.__name__}`, not of its "
                f"`update`. Pass it there: `jdp.{wrapper.__name__}(tx, {name}=...)`."
            )
    names = types.as_axis_names(axis_name)
    flat, treedef = jax.tree_util.tree_flatten_with_path(extra_args)
    leaves = []
    for path, leaf in flat:
        if isinstance(leaf, jax.core.Tracer):
            name = jax.tree_util.keystr(path[:1], simple=True)
            rest = jax.tree_util.keystr(path[1:])
            near = difflib.get_close_matches(name, ("weight", "used"), n=1)
            advice = f"Did you mean `{near[0]}`? Else average" if near else "Average"
            leaf = annotations.expect_same(
                leaf,
                names,
                f"The extra argument `{name}{rest}` of `update` may differ between "
                f"the replicas of {axis_name!r}, so that they would take different "
                f"steps. {advice} it first, with `jdp.average(...)` or, for gradients, "
                "`jdp.sync_gradients`. Close over a batch that is for a function: "
                "`value_fn=lambda params: jdp.mean_loss(loss_fn)(params, batch)`.",
            )
        leaves.append(leaf)
    return jax.tree.unflatten(treedef, leaves)


def split_arrays(
    tree: PyTree,
) -> tuple[list[Any], Callable[[list[Any]], PyTree]]:
    """Separates the arrays in a tree from functions, flags and Python numbers.

    Returns:
      The arrays, and a function that puts other arrays in their place.
    """
    leaves, treedef = jax.tree.flatten(tree)

    def merge(arrays: list[Any]) -> PyTree:
        left = iter(arrays)
        found = [next(left) if is_array(x) else x for x in leaves]
        return jax.tree.unflatten(treedef, found)

    return [x for x in leaves if is_array(x)], merge


def is_array(x: Any) -> bool:
    """Whether an argument is an array, of JAX or of numpy; `np.bool_` is a flag."""
    return isinstance(x, jax.Array | np.ndarray)
