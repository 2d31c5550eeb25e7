"""Results: what does a replicated function return?"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jdp.gradients.reduced_values import Kind
from jdp.gradients.step_trace import StepTrace
from jdp.replicas.per_replica import PerReplica
from jdp.types import PyTree


class ResultFacts:
    """Facts about the results of one program; compared by identity."""

    def __init__(self, kinds: Sequence[Kind | None], trace: StepTrace):
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


def nan_unless(
    has_samples: jax.Array, values: PyTree, kinds: Sequence[Kind | None]
) -> PyTree:
    """Returns results with NaN for means over no sample.

    Args:
      has_samples: bool (): whether there is any.
      values: the results.
      kinds: by leaf: see `ResultFacts.kinds`.
    """
    leaves, treedef = jax.tree.flatten(values)
    means = [
        jnp.where(has_samples, x, jnp.asarray(jnp.nan, x.dtype))
        if kind == "mean"
        else x
        for x, kind in zip(leaves, kinds, strict=True)
    ]
    return jax.tree.unflatten(treedef, means)
