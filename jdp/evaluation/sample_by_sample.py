"""Sample by sample: how does a function without weights leave out the padding?

It runs on each sample as a batch of one, all at once under `jax.vmap`. Every sample is
a replica of its own, so jdp's reductions in the function go over all samples of all
replicas, and samples of weight 0 do not count.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from jdp import compat
from jdp.backward import exchange
from jdp.compat import primitives
from jdp.gradients import metric_objects, reduced_values, step_trace, weighted_mean
from jdp.gradients.reduced_values import Kind
from jdp.gradients.step_trace import StepTrace
from jdp.replicas import axes
from jdp.replicas.per_replica import PerReplica
from jdp.step import replica_program
from jdp.step.sameness import SamenessAnalysis
from jdp.trees import tree_paths
from jdp.types import PyTree

SAMPLES = "jdp_samples"  # the axis along which the samples of a replica lie.
# Draws of numbers; others make keys.
_NUMBERS = frozenset({"random_bits", "random_gamma"})
_ADVICE = (
    "Give the function a parameter `weight`, one number per sample with 0 for padding, "
    "or pass batches that divide among the replicas, without `weight`."
)


class SampleResults(NamedTuple):
    """Results of a function on all samples of a replica, together or one by one."""

    values: PyTree  # numbers averaged, and metric objects merged, over the samples.
    kinds: Sequence[Kind | None]  # by leaf: how values become one; None: all are equal.
    draw: Any = (
        None  # an equation that draws the same numbers for all samples, or None.
    )

    def check_draws(self, name: str) -> None:
        """Raises ValueError for random numbers that all samples would share.

        Args:
          name: name of the function, for errors.
        """
        if self.draw is not None:
            raise ValueError(
                f"`{name}` has no parameter `weight` and runs sample by sample, but it "
                f"draws random numbers{exchange.line_of(self.draw)} from a key that is "
                "the same for all samples, so that every sample would get the same "
                "numbers. Give the function a parameter `weight`, one number per "
                "sample with 0 for padding, or pass a key per sample in the batch. "
                "Dropout is left out of an evaluation: `deterministic=True`, "
                "`model.eval()`."
            )


class _Traced(NamedTuple):
    """Program of a function on one sample."""

    jaxpr: Any  # closed: leaves of the sample -> leaves of the results.
    nodes: list[Any]  # metric objects, `jdp.PerReplica`s and other leaves, as avals.
    treedef: Any  # of the results.
    paths: list[str]  # by part.
    noted: list[Kind | None]  # by leaf of all parts: how it was reduced.
    are_rows: list[bool]  # by leaf of all parts: whether it has a row per sample.


def run(
    fn: Callable[[PyTree], PyTree],
    batch: PyTree,
    weight: jax.Array,
    axis_names: Sequence[str],
    name: str,
) -> SampleResults:
    """Runs `fn` on the samples of this replica; called while a step is traced.

    Args:
      fn: batch -> results, for a batch of one sample.
      batch: pytree of arrays, shape (n, ...).
      weight: float (n,).
      axis_names: the axes along which the replicas lie.
      name: name of the function, for errors.

    Raises:
      ValueError: the function reduces over the axes of the replicas alone, returns a
        row per sample, or returns a `jdp.PerReplica`.
      TypeError: it returns an object that collects outputs.
    """
    traced = _trace(fn, batch, weight, axis_names)
    _check(traced, axis_names, name)
    are_mapped: list[list[bool]] = []

    def run_one(sample: PyTree, own: jax.Array) -> list[jax.Array]:
        body, consts = traced.jaxpr.jaxpr, traced.jaxpr.consts
        out = jax.core.eval_jaxpr(body, consts, *jax.tree.leaves((sample, own)))
        are_mapped.append([compat.is_mapped(x) for x in out])
        return out

    rows = jax.vmap(run_one, axis_name=SAMPLES)(batch, weight)
    return _join(traced, rows, are_mapped[-1], weight, name)


def _trace(
    fn: Callable[[PyTree], PyTree],
    batch: PyTree,
    weight: jax.Array,
    axis_names: Sequence[str],
) -> _Traced:
    found: list[_Traced] = []

    def run_on(samples: PyTree, own: jax.Array) -> list[jax.Array]:
        weighting = weighted_mean.as_weighting(own, "weight")
        with (
            step_trace.running(StepTrace(), weighting),
            axes.inside_step((*axis_names, SAMPLES)),
            reduced_values.collected() as noted,
        ):
            out = fn(samples)
        flat, treedef = jax.tree_util.tree_flatten_with_path(out, is_leaf=_is_node)
        leaves = jax.tree.leaves([node for _, node in flat])
        for path, leaf in jax.tree_util.tree_flatten_with_path(out)[0]:
            replica_program.check_is_array(jax.tree_util.keystr(path) or "(root)", leaf)
        kinds: list[Kind | None] = [reduced_values.kind_of(x, noted) for x in leaves]
        arrays = [jnp.asarray(x) for x in leaves]
        nodes = jax.tree.map(jax.typeof, [node for _, node in flat])
        paths = tree_paths.format_paths(path for path, _ in flat)
        found.append(_Traced(None, nodes, treedef, paths, kinds, []))
        return arrays

    def one(sample: PyTree, own: jax.Array) -> list[jax.Array]:
        return run_on(jax.tree.map(lambda x: x[None], sample), own)

    def trace(run: Callable[..., Any], samples: PyTree) -> Any:
        env = [(SAMPLES, len(weight))]
        return jax.make_jaxpr(run, axis_env=env)(samples, weight[0])

    jaxpr = trace(one, jax.tree.map(lambda x: x[0], batch))
    traced = found[-1]
    are_rows = [x.shape[:1] == (1,) for x in jaxpr.out_avals]
    if any(are_rows):  # Or of another dimension of size 1.
        two = jax.tree.map(lambda x: jnp.stack([x[0]] * 2), batch)
        pairs = zip(are_rows, trace(run_on, two).out_avals, strict=True)
        are_rows = [is_row and x.shape[:1] == (2,) for is_row, x in pairs]
    return traced._replace(jaxpr=jaxpr, are_rows=are_rows)


def _join(
    traced: _Traced,
    rows: list[jax.Array],
    are_mapped: list[bool],
    weight: jax.Array,
    name: str,
) -> SampleResults:
    """Joins the results of all samples, shape (n, ...) each, into one."""
    left = iter(zip(rows, are_mapped, traced.noted, traced.are_rows, strict=True))
    values: list[Any] = []
    kinds: list[Kind | None] = []
    for node, path in zip(traced.nodes, traced.paths, strict=True):
        treedef = jax.tree.structure(node)
        parts = [next(left) for _ in range(treedef.num_leaves)]
        if metric_objects.is_metric_object(node):
            of_all = jax.tree.unflatten(treedef, [x for x, *_ in parts])
            counted = weighted_mean.has_data(weight)
            values.append(metric_objects.merge_rows(of_all, counted))
            kinds += [None] * len(parts)
            continue
        ((x, is_mapped, noted, is_row),) = parts
        if not is_mapped:
            values.append(x[0])
            kinds.append(noted)
            continue
        if is_row:
            raise ValueError(
                f"The metric `{path}` of `{name}` seems to have a row per sample: it "
                f"has shape {x.shape[1:]} for one sample. Return a mean over the "
                "samples."
            )
        values.append(_mean(x, weight))
        kinds.append("mean")
    out = jax.tree.unflatten(traced.treedef, values)
    return SampleResults(out, kinds, _find_shared_draw(traced.jaxpr))


def _mean(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the mean of the rows of `x`, by weight; 0 without any."""
    dtype = weighted_mean.as_inexact(x).dtype
    wide = weighted_mean.wide_dtype(dtype)
    amount = weight.reshape(weight.shape + (1,) * (x.ndim - 1)).astype(wide)
    x = jnp.where(amount == 0, jnp.zeros((), wide), x.astype(wide))
    total = amount.sum()
    mean = (x * amount).sum(axis=0) / jnp.where(total == 0, 1, total)
    return mean.astype(dtype)


def _is_node(node: Any) -> bool:
    return isinstance(node, PerReplica) or metric_objects.is_metric_object(node)


def _check(traced: _Traced, axis_names: Sequence[str], name: str) -> None:
    where = f"`{name}` has no parameter `weight` and runs sample by sample, but"
    reduction = _find_reduction(traced.jaxpr.jaxpr, frozenset(axis_names))
    if reduction is not None:
        raise ValueError(
            f"{where} it reduces over {tuple(axis_names)} itself, by "
            f"{exchange.describe(reduction)}, which mixes samples and padding. Use "
            f"`jdp.average` or `jdp.sum_over_replicas` without `axis_name`. {_ADVICE}"
        )
    for node, path in zip(traced.nodes, traced.paths, strict=True):
        if isinstance(node, PerReplica):
            raise ValueError(
                f"{where} `{path}` is a `jdp.PerReplica`, with rows of padding. "
                f"{_ADVICE}"
            )
        if metric_objects.is_metric_object(node):
            metric_objects.refuse_collecting(node, f"{where} `{path}` has", _ADVICE)


def _find_shared_draw(jaxpr: Any) -> Any:
    """Returns a draw of numbers whose key is the same for all samples, or None."""
    analysis = SamenessAnalysis(
        (SAMPLES,), refuse_divided=False, observed=primitives.DRAWS
    )
    analysis.follow(jaxpr, (analysis.mask((SAMPLES,)),) * len(jaxpr.in_avals))

    def find(jaxpr: Any) -> Any:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in _NUMBERS:
                if not analysis.observed.get(id(eqn), [False])[0]:
                    return eqn
            elif eqn.primitive.name not in primitives.KERNELS:
                inside = (getattr(x, "jaxpr", x) for x in jaxprs_in_params(eqn.params))
                found = next(filter(None, map(find, inside)), None)
                if found is not None:  # JAX keeps no lines within its own functions.
                    return found if exchange.line_of(found) else eqn
        return None

    return find(jaxpr.jaxpr)


def _find_reduction(jaxpr: Any, axis_names: frozenset[str]) -> Any:
    """Returns a collective over the replicas that leaves out the samples, or None."""
    names = primitives.UNITING | primitives.MOVING
    for eqn in jaxpr.eqns:
        over = set(exchange.axes_of(eqn))
        if exchange.stem(eqn) in names and over & axis_names and SAMPLES not in over:
            return eqn
        for inner in jaxprs_in_params(eqn.params):
            found = _find_reduction(getattr(inner, "jaxpr", inner), axis_names)
            if found is not None:
                return found
    return None
