"""Results: what does a replicated function return, and how do batches add up?"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.core
import numpy as np

from jdp.gradients import metric_objects
from jdp.gradients.reduced_values import Kind
from jdp.gradients.step_trace import StepTrace
from jdp.replicas.per_replica import PerReplica
from jdp.trees import tree_paths
from jdp.types import PyTree


class ResultFacts:
    """Facts about the results of one program; compared by identity."""

    def __init__(self, kinds: list[Kind | None], trace: StepTrace):
        """Notes what is known before the whole program is traced.

        Args:
          kinds: by leaf: how the function reduced it; None: it did not.
          trace: the trace of the program, which learns which results differ.
        """
        self._kinds = kinds
        self._trace = trace

    def kinds(self) -> list[Kind | None]:
        """Returns by leaf how batches add up; None: they must be equal."""
        differing = self._trace.differing
        assert differing is not None
        return [
            kind or ("mean" if differs else None)
            for kind, differs in zip(self._kinds, differing, strict=False)
        ]


class _NoKey:
    """Key of the values, so that paths in errors are paths in what was returned."""

    def __str__(self) -> str:
        return ""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Results of a replicated function on one batch."""

    values: PyTree  # as the function returns them.
    total: jax.Array | None  # float32 (): weight of all samples; None: not weighted.
    facts: ResultFacts


def _join(facts: ResultFacts, children: Iterable[Any]) -> Evaluated:
    values, total = children
    return Evaluated(values, total, facts)


jax.tree_util.register_pytree_with_keys(
    Evaluated, lambda x: (((_NoKey(), x.values), ("total", x.total)), x.facts), _join
)


def take_local(values: PyTree) -> PyTree:
    """Returns values as arrays of this process alone.

    Operations on them need no other process. What is in a `jdp.PerReplica` stays spread
    over the replicas.
    """

    def visit(x: Any) -> Any:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            return x.addressable_data(0)
        return x

    return jax.tree.map(
        lambda x: x if isinstance(x, PerReplica) else visit(x),
        values,
        is_leaf=lambda x: isinstance(x, PerReplica),
    )


class Totals:
    """Results of several batches, added up."""

    def __init__(self, name: str):
        """Starts without a batch.

        Args:
          name: name of the function, for errors.
        """
        self._name = name
        self._treedef: Any = None
        self._nodes: list[Any] = []
        self._kinds: list[Any] = []
        self._paths: list[str] = []
        self._weight: Any = 0.0
        self._fixed: dict[int, list[Any]] = {}  # by part: the value in each batch.

    def add(self, result: Evaluated) -> None:
        """Adds the results of a batch, whose `total` is set."""
        flat, treedef = jax.tree_util.tree_flatten_with_path(
            take_local(result.values), is_leaf=_is_node
        )
        nodes = [node for _, node in flat]
        assert result.total is not None
        weight = take_local(result.total)
        if self._treedef is None:
            self._treedef, self._nodes, self._weight = treedef, nodes, weight
            self._paths = tree_paths.format_paths(path for path, _ in flat)
            self._kinds = _kinds_of_nodes(nodes, result.facts.kinds())
            self._fixed = {
                i: [node]
                for i, node in enumerate(nodes)
                if self._kinds[i] is None and not metric_objects.is_metric_object(node)
            }
            return
        self._weight = self._weight + weight
        # All weights may be 0 so far.
        share = np.float32(1) * weight / _nonzero(self._weight)
        for i, node in enumerate(nodes):
            self._nodes[i] = self._join(i, node, share)

    def _join(self, i: int, node: Any, share: Any) -> Any:
        old = self._nodes[i]
        if metric_objects.is_metric_object(node):
            return metric_objects.merge_two(old, node)
        match self._kinds[i]:
            case "sum":
                return old + node
            case "mean":
                return old + (node - old) * share.astype(node.dtype)
        self._fixed[i].append(node)
        return old

    def finish(self) -> PyTree:
        """Returns the results of all batches.

        Raises:
          ValueError: there was no batch; or a number that the function reduced itself
            is not the same in all batches.
        """
        if self._treedef is None:
            raise ValueError(
                f"`{self._name}.over` got no batch, on no process, so that there are "
                "no results."
            )
        for i, values in jax.device_get(self._fixed).items():
            if any(not np.array_equal(x, values[0], equal_nan=True) for x in values):
                raise ValueError(
                    f"The metric `{self._paths[i]}` of `{self._name}` is the same on "
                    "all replicas, but not in all batches, so that it is not known "
                    "how batches add up. Return the mean over the samples of one "
                    "replica, or what `jdp.sum_over_replicas` returns, or a metric "
                    "object of clu or nnx."
                )
        return jax.tree.unflatten(self._treedef, self._nodes)


def _nonzero(x: Any) -> Any:
    return x + (x == 0)


def _is_node(node: Any) -> bool:
    return isinstance(node, PerReplica) or metric_objects.is_metric_object(node)


def _kinds_of_nodes(nodes: Iterable[Any], kinds: list[Kind | None]) -> list[Any]:
    """Returns the kind of each part, given the kinds of all leaves in order."""
    found, start = [], 0
    for node in nodes:
        num_leaves = jax.tree.structure(node).num_leaves
        found.append(kinds[start] if num_leaves == 1 else None)
        start += num_leaves
    return found
