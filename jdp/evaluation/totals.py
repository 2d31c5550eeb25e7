"""Totals: how do the results of many batches add up?

Numbers are added up on the host in float64, complex128 or integers of 64 bits, and
metric objects in the same dtypes on the device. Results get the dtype that one batch
has, at the end.
"""

import collections
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.evaluation import wide
from jdp.evaluation.results import Evaluated, take_local
from jdp.gradients import metric_objects
from jdp.gradients.reduced_values import Kind
from jdp.replicas.per_replica import PerReplica
from jdp.trees import tree_paths
from jdp.types import PyTree

_NUM_AHEAD = 2  # batches that may run while the host adds up an earlier one.


class Totals:
    """Results of several batches, added up."""

    def __init__(self, name: str):
        """Starts without a batch.

        Args:
          name: name of the function, for errors.
        """
        self._name = name
        self._waiting: collections.deque[Evaluated] = collections.deque()
        self._treedef: Any = None
        self._paths: list[str] = []
        self._kinds: list[Kind | None] = []
        self._first: list[Any] = []  # by part: the result of the first batch.
        self._totals: list[Any] = []  # by part: wide sums, or a wide metric object.
        self._differs: set[int] = set()  # parts that must be the same, and are not.
        self._weight = 0.0

    def add(self, result: Evaluated) -> None:
        """Adds the results of a batch, whose `total` is set."""
        values, total = take_local((result.values, result.total))
        self._waiting.append(Evaluated(values, total, result.facts))
        if len(self._waiting) > _NUM_AHEAD:
            self._take(self._waiting.popleft())

    def finish(self) -> PyTree:
        """Returns the results of all batches.

        Raises:
          ValueError: there was no batch, or a mean has no samples; or a number that the
            function reduced itself is not the same in all batches.
        """
        while self._waiting:
            self._take(self._waiting.popleft())
        if self._treedef is None:
            raise ValueError(
                f"`{self._name}.over` got no batch, on no process, so that there are "
                "no results."
            )
        if "mean" in self._kinds and self._weight == 0:
            path = self._paths[self._kinds.index("mean")]
            raise ValueError(
                f"`{self._name}.over` got batches without samples, on all processes, "
                f"so that `{path}` has no mean."
            )
        for i in sorted(self._differs):
            found = "is the same on all replicas, but not in all batches"
            if isinstance(self._first[i], PerReplica):
                found = "has rows of its own in each batch"
            raise ValueError(
                f"The metric `{self._paths[i]}` of `{self._name}` {found}, so that it "
                "is not known how batches add up. Return the mean over the samples of "
                "one replica, or what `jdp.sum_over_replicas` returns, or a metric "
                "object of clu or nnx."
            )
        nodes = map(self._finish_part, range(len(self._first)))
        return jax.tree.unflatten(self._treedef, nodes)

    def _take(self, result: Evaluated) -> None:
        flat, treedef = jax.tree_util.tree_flatten_with_path(
            result.values, is_leaf=_is_node
        )
        nodes = [node for _, node in flat]
        if self._treedef is None:
            self._treedef, self._first = treedef, nodes
            self._paths = tree_paths.format_paths(path for path, _ in flat)
            self._kinds = _kinds_of_nodes(nodes, result.facts.kinds())
            self._totals = [None] * len(nodes)
        assert result.total is not None
        weight = float(np.asarray(result.total))
        self._weight += weight
        for i, node in enumerate(nodes):
            self._add_part(i, node, weight)

    def _add_part(self, i: int, node: Any, weight: float) -> None:
        old = self._totals[i]
        if metric_objects.is_metric_object(node):
            # Without samples, it would still be the last one.
            if old is None or weight != 0:
                self._totals[i] = wide.add_metrics(old, node)
            return
        match self._kinds[i]:
            case "sum":
                x = wide.widen(node)
                self._totals[i] = x if old is None else old + x
            case "mean":
                x = wide.widen(node)
                # Without samples, the mean is any number.
                x = x * weight if weight != 0 else np.zeros_like(x)
                self._totals[i] = x if old is None else old + x
            case None:
                if self._first[i] is not node and not _are_equal(self._first[i], node):
                    self._differs.add(i)

    def _finish_part(self, i: int) -> Any:
        first, total = self._first[i], self._totals[i]
        if metric_objects.is_metric_object(first):
            return wide.narrow_metrics(total, first)
        match self._kinds[i]:
            case "sum":
                return wide.as_dtype_of(total, first)
            case "mean":
                return wide.as_dtype_of(total / self._weight, first)
        return first


def _are_equal(first: Any, node: Any) -> bool:
    """Returns whether two batches gave one number; rows of replicas never do."""
    if isinstance(node, PerReplica):
        return False
    if jnp.issubdtype(node.dtype, jax.dtypes.prng_key):
        first, node = map(jax.random.key_data, (first, node))
    return np.array_equal(first, node, equal_nan=True)


def _is_node(node: Any) -> bool:
    return isinstance(node, PerReplica) or metric_objects.is_metric_object(node)


def _kinds_of_nodes(
    nodes: Iterable[Any], kinds: list[Kind | None]
) -> list[Kind | None]:
    """Returns the kind of each part, given the kinds of all leaves in order."""
    found, start = [], 0
    for node in nodes:
        num_leaves = jax.tree.structure(node).num_leaves
        found.append(kinds[start] if num_leaves == 1 else None)
        start += num_leaves
    return found
