"""Metric objects: how do the objects of `clu.metrics` and Flax nnx merge over replicas?

An object holds what a metric needs to go on, such as a total and a count. A class of
clu says in `reduce` how its objects become one. In nnx, the totals and counts of
`Average` are added up, and the moments of `Welford` are combined.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp import compat, types
from jdp.collectives import base
from jdp.gradients import buffers, step_trace, weighted_mean
from jdp.gradients.weighted_mean import Weighting
from jdp.replicas import axes
from jdp.replicas.per_replica import PerReplica
from jdp.trees import tree_paths
from jdp.types import AxisName, PyTree


def merge_metrics(
    metrics: PyTree,
    *,
    weight: jax.typing.ArrayLike | None = None,
    axis_name: AxisName | None = None,
) -> PyTree:
    """Merges the metric objects of all replicas, in one collective.

    `jdp.data_parallel` and `jdp.replicated` do so with the metrics that a function
    returns. In a step, this function is for metric objects in the state:

        update = Metrics.single_from_model_output(logits=logits, labels=labels)
        metrics = metrics.merge(jdp.merge_metrics(update))

    Args:
      metrics: pytree of `Metric`s and `Collection`s of `clu.metrics`, or of
        `nnx.MultiMetric`s, `nnx.metrics.Average`s and `nnx.metrics.Welford`s and
        classes derived from them, of this replica.
      weight: number of samples of this replica, which does not count if it is 0. None:
        all count, except for replicas without data in a `jdp.Join`.
      axis_name: the axis, or axes, over which replicas lie; None: the world's.

    Returns:
      The same tree with the metrics of all replicas, the same on all of them.

    Raises:
      TypeError: a leaf is in no such object, or a class of nnx is not known to merge.
      ValueError: the axis is not bound.
    """
    leaves = jax.tree.leaves(metrics, is_leaf=is_metric_object)
    for i, leaf in enumerate(leaves):
        if not is_metric_object(leaf):
            path = tree_paths.format_paths(_paths(metrics))[i]
            raise TypeError(
                f"`jdp.merge_metrics` takes objects of `clu.metrics` and of "
                f"`nnx.metrics`, but `{path}` is a {type(leaf).__name__}. Use "
                "`jdp.average` or `jdp.sum_over_replicas` for arrays."
            )
    axis_name = axes.find(axis_name)
    compat.axis_size(axis_name)  # It raises if the axis is not bound.
    weighting = step_trace.current().resolve(weight, "weight")
    return merge_over_replicas(metrics, axis_name, weighting)


def is_metric_object(node: Any) -> bool:
    """Returns whether a part of a tree is a metric of clu or nnx."""
    return _is_of_clu(node) or _is_of_nnx(node)


def has_metric_objects(tree: PyTree) -> bool:
    """Returns whether there are metric objects in a tree, outside of a `PerReplica`."""
    return any(map(is_metric_object, jax.tree.leaves(tree, is_leaf=_is_node)))


def merge_over_replicas(
    tree: PyTree, axis_name: AxisName, weighting: Weighting | None
) -> PyTree:
    """Merges the metric objects of a tree; other leaves stay what they are.

    Args:
      tree: any pytree; what is in a `PerReplica` stays, too.
      axis_name: the axis, or axes, over which replicas lie.
      weighting: weight of this replica; None: all count.
    """
    nodes, treedef = jax.tree.flatten(tree, is_leaf=_is_node)
    places = [i for i, node in enumerate(nodes) if is_metric_object(node)]
    for i in places:
        _check_merges(nodes[i])
    if not places or (weighting is None and compat.is_alone(axis_name)):
        return tree
    is_counted = jnp.ones((), bool)
    if weighting is not None:
        is_counted = weighted_mean.has_data(weighting.amount)
    chosen = [nodes[i] for i in places]
    rows, are_counted = _gather((chosen, is_counted), axis_name)
    for i, of_all in zip(places, rows, strict=True):
        nodes[i] = merge_rows(of_all, None if weighting is None else are_counted)
    return jax.tree.unflatten(treedef, nodes)


def merge_rows(rows: Any, are_counted: jax.Array | None) -> Any:
    """Merges objects that are stacked into one.

    Args:
      rows: a metric object whose leaves have shape (n, ...).
      are_counted: bool (n,): which of the n count; None: all. Without any, the result
        has zeros. Floats narrower than 32 bits are merged in float32, since a sum of
        ones stops at 256 in bfloat16.
    """
    if is_collecting(rows):
        return rows.reduce()
    if is_collection(rows):
        parts = {k: merge_rows(v, are_counted) for k, v in vars(rows).items()}
        return type(rows)(**parts)
    merged = _merge_wide(jax.tree.map(_widen, rows), are_counted)
    return jax.tree.map(lambda x, row: x.astype(row.dtype), merged, rows)


def _widen(x: jax.Array) -> jax.Array:
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if is_narrow else x


def _merge_wide(rows: Any, are_counted: jax.Array | None) -> Any:
    """Merges objects whose dtypes keep the digits of sums."""
    if _is_of_nnx(rows):
        return _merge_rows_of_nnx(rows, are_counted)
    if are_counted is None:
        return rows.reduce()
    first = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), rows)

    def merge(found: Any, row: Any) -> Any:
        (is_any, merged), (is_counted, one) = found, row
        both = _stack(merged, one).reduce()

        def choose(both: jax.Array, one: jax.Array, old: jax.Array) -> jax.Array:
            new = jnp.where(is_any, both, one)
            return jnp.where(is_counted, new, old).astype(old.dtype)

        return (is_any | is_counted, jax.tree.map(choose, both, one, merged)), None

    (_, merged), _ = lax.scan(merge, (jnp.zeros((), bool), first), (are_counted, rows))
    return merged


def merge_two(first: Any, second: Any) -> Any:
    """Merges two metric objects, of two batches, the second one later."""
    if _is_of_nnx(first):
        return _merge_rows_of_nnx(_stack(first, second), None)
    return first.merge(second)


def is_collecting(node: Any) -> bool:
    """Returns whether a metric collects the outputs of samples, on the host."""
    module: Any = sys.modules.get("clu.metrics")
    return module is not None and isinstance(node, module.CollectingMetric)


def is_collection(node: Any) -> bool:
    """Returns whether an object is a collection of metrics of clu, by name."""
    module: Any = sys.modules.get("clu.metrics")
    return module is not None and isinstance(node, module.Collection)


def refuse_collecting(node: Any, what: str, advice: str) -> None:
    """Raises TypeError for an object of clu that collects outputs of samples."""
    for metric in [node, *vars(node).values()]:
        if is_collecting(metric):
            raise TypeError(
                f"{what} a `{type(metric).__name__}`, which collects the outputs of "
                f"samples, padding too. {advice}"
            )


def _is_of_clu(node: Any) -> bool:
    module: Any = sys.modules.get("clu.metrics")  # Without it there are no objects.
    return module is not None and isinstance(node, module.Metric | module.Collection)


def _is_of_nnx(node: Any) -> bool:
    module: Any = sys.modules.get("flax.nnx")
    return module is not None and isinstance(node, module.metrics.Metric)


def _is_node(node: Any) -> bool:
    return isinstance(node, PerReplica) or is_metric_object(node)


def _paths(tree: PyTree) -> Iterator[Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_metric_object)
    return (path for path, _ in flat)


def _stack(first: Any, second: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second)


def _gather(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Gathers a tree of every replica, shape (...) -> (replicas, ...)."""
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(x) for x in leaves]
    parts = [buffers.as_bytes(x) for x in leaves]
    words = lax.bitcast_convert_type(
        base.pad(jnp.concatenate(parts), 4).reshape(-1, 4), jnp.uint32
    )
    names = types.as_axis_names(axis_name)
    words = base.cast_varying(words, axis_name)
    rows = base.replicated(lax.all_gather(words, names), axis_name)

    def unpack(words: jax.Array) -> list[jax.Array]:
        flat = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)
        found, start = [], 0
        for x, part in zip(leaves, parts, strict=True):
            found.append(buffers.from_bytes(flat[start : start + part.size], x))
            start += part.size
        return found

    return jax.tree.unflatten(treedef, jax.vmap(unpack)(rows))


def _parts(node: Any) -> Iterator[Any]:
    """Yields the metrics of nnx in a `MultiMetric`, or the metric itself."""
    module: Any = sys.modules["flax.nnx"]
    if not isinstance(node, module.MultiMetric):
        yield node
        return
    for value in vars(node).values():
        if isinstance(value, module.metrics.Metric):
            yield from _parts(value)


def _check_merges(node: Any) -> None:
    """Raises TypeError for a metric of nnx that has other state than known classes."""
    if not _is_of_nnx(node):
        return
    module: Any = sys.modules["flax.nnx"]
    known = {
        module.metrics.Average: {"total", "count"},
        module.metrics.Welford: {"count", "mean", "m2"},
    }
    for part in _parts(node):
        names = {k for k, v in vars(part).items() if isinstance(v, module.Variable)}
        if not any(isinstance(part, c) and names == known[c] for c in known):
            raise TypeError(
                f"It is not known how objects of `{type(part).__name__}` of all "
                f"replicas become one; their state is {sorted(names)}. Derive the "
                "class from `nnx.metrics.Average` or `nnx.metrics.Welford` without "
                "adding state, or return arrays from `jdp.sum_over_replicas`."
            )


def _merge_rows_of_nnx(rows: Any, are_counted: jax.Array | None) -> Any:
    out = jax.tree.map(lambda x: x[0], rows)
    for part, of_all in zip(_parts(out), _parts(rows), strict=True):
        if _is_average(part):
            part.total[...] = _sum(of_all.total[...], are_counted)
            part.count[...] = _sum(of_all.count[...], are_counted)
            continue
        counts, means = of_all.count[...], of_all.mean[...]
        count = _sum(counts, are_counted)
        divisor = jnp.where(count == 0, 1, count)
        mean = _sum(means * counts, are_counted) / divisor
        apart = of_all.m2[...] + counts * jnp.square(means - mean)
        part.count[...], part.mean[...] = count, mean
        part.m2[...] = _sum(apart, are_counted)
    return out


def _is_average(part: Any) -> bool:
    return isinstance(part, sys.modules["flax.nnx"].metrics.Average)


def _sum(x: jax.Array, are_counted: jax.Array | None) -> jax.Array:
    if are_counted is not None:
        shape = (len(x),) + (1,) * (x.ndim - 1)
        x = jnp.where(are_counted.reshape(shape), x, jnp.zeros((), x.dtype))
    return x.sum(axis=0, dtype=x.dtype)
