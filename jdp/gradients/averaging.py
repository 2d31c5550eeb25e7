"""Averaging: the mean of small values, such as metrics, over the replicas."""

from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp

from jdp import compat
from jdp.collectives import xla
from jdp.gradients import reduce, reduced_values, step_trace, weighted_mean
from jdp.gradients.reduce import ReduceOptions
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.replicas import axes
from jdp.trees import tree_paths
from jdp.types import AllReduce, AxisName, HostLeaf, PyTree

K = TypeVar("K")
T = TypeVar("T")
Leaf = TypeVar("Leaf", bound=HostLeaf)


@overload
def average(
    tree: HostLeaf,
    *,
    weight: jax.typing.ArrayLike | None = ...,
    divide_by: DivideBy = ...,
    axis_name: AxisName = ...,
) -> jax.Array: ...
@overload
def average(
    tree: dict[K, Leaf],
    *,
    weight: jax.typing.ArrayLike | None = ...,
    divide_by: DivideBy = ...,
    axis_name: AxisName = ...,
) -> dict[K, jax.Array]: ...
@overload
def average(
    tree: T,
    *,
    weight: jax.typing.ArrayLike | None = ...,
    divide_by: DivideBy = ...,
    axis_name: AxisName = ...,
) -> T: ...
def average(
    tree: PyTree,
    *,
    weight: jax.typing.ArrayLike | None = None,
    divide_by: DivideBy = "weight",
    axis_name: AxisName | None = None,
) -> PyTree:
    """Averages small values, such as metrics, over the replicas in one collective.

    As with `lax.pmean`, `jax.grad` of an average is the gradient of one replica. For a
    loss that is differentiated by a function outside jdp, use `jdp.mean_loss`.

    Integers and booleans are averaged in JAX's default float: float32, or float64 with
    `jax_enable_x64`. Under a `shard_map` with `check_vma=True`, a leaf that is the same
    on all replicas is returned as it is.

    Args:
      tree: pytree of arrays or numbers.
      weight: see `sync_gradients`. Values of a replica without data do not count,
        whatever they are. The average of no data is zero; with a weight of NaN or below
        zero it is NaN. A negative constant is refused.
      divide_by: "weight" averages by weight; with "active" and "world" each replica
        with data counts the same.
      axis_name: the axis, or axes, over which replicas lie; None: the world's.

    Returns:
      A pytree of the same shapes, the same on all replicas; averaged leaves are
      floating or complex.

    Raises:
      TypeError: a leaf is neither an array of numbers nor a number.
    """
    weighting = step_trace.current().resolve(weight, divide_by)
    means = average_weighted(tree, axes.find(axis_name), lambda: weighting)
    reduced_values.note(jax.tree.leaves(means), "mean")
    return means


def average_weighted(
    tree: PyTree,
    axis_name: AxisName,
    find_weighting: Callable[[], Weighting | None],
    all_reduce: AllReduce = xla.PLAIN,
) -> PyTree:
    """`average`; calls `find_weighting` only if there is something to average."""
    compat.axis_size(axis_name)  # It raises if the axis is not bound.
    tracked = compat.tracked_axes(axis_name)
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [_as_array(tree, i, x) for i, x in enumerate(leaves)]
    local = [
        i
        for i, x in enumerate(leaves)
        if not tracked or tracked & compat.varying_axes(x)
    ]
    if not local:
        return jax.tree.unflatten(treedef, leaves)
    weighting = find_weighting()
    groups: dict[Any, list[int]] = {}
    for i in local:
        if jnp.issubdtype(leaves[i].dtype, jax.dtypes.prng_key):
            raise TypeError(_no_mean(tree, i, "a PRNG key"))
        leaves[i] = weighted_mean.as_inexact(leaves[i])
        kind = leaves[i].dtype, compat.varying_axes(leaves[i]) - tracked
        groups.setdefault(kind, []).append(i)
    parts = [
        [compat.cast_tree_varying(leaves[i], axis_name) for i in group]
        for group in groups.values()
    ]
    if weighting is not None:
        weighting = weighted_mean.cast_amount(weighting, axis_name)
        parts = [[weighted_mean.weigh(x, weighting) for x in part] for part in parts]
    options = ReduceOptions(axis_name, packing="flat", all_reduce=all_reduce)
    sums, total = reduce.sum_groups(parts, options, weighting)
    dtypes = [[leaves[i].dtype for i in members] for members in groups.values()]
    means = reduce.divide_sums(sums, total, dtypes)
    for members, group in zip(groups.values(), means, strict=True):
        for i, x in zip(members, group, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def _as_array(tree: PyTree, index: int, leaf: Any) -> jax.Array:
    x = weighted_mean.try_as_array(leaf)
    if x is None:
        raise TypeError(_no_mean(tree, index, repr(leaf)))
    return x


def _no_mean(tree: PyTree, index: int, found: str) -> str:
    path = tree_paths.leaf_paths(tree)[index]
    return (
        f"`jdp.average` takes arrays and numbers, but the leaf `{path}` is {found}, "
        "which has no mean. Leave it out."
    )
