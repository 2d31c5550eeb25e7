"""Accumulation: one synchronised gradient of many micro-batches."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import compat, types
from jdp.gradients import (
    accumulate_signature,
    differentiation,
    micro_weights,
    noise,
    reduce_options,
    step_trace,
    used_flags,
    weighted_mean,
)
from jdp.gradients.differentiation import LocalGradients, LossCall
from jdp.gradients.micro_metrics import MicroMetrics
from jdp.gradients.micro_weights import SampleWeights
from jdp.gradients.step_trace import StepTrace
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.hooks.base import CommHook
from jdp.trees import tree_paths
from jdp.trees.buckets import BucketPlan, Packing
from jdp.types import AllReduceOption, AxisName, PyTree


@accumulate_signature.of_accumulate_gradients
def accumulate_gradients(
    loss_fn: Callable[..., Any],
    num_micro_batches: int,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    find_unused: bool = False,
    allow_int: bool = False,
    dtype: Any = None,
    weight: jax.typing.ArrayLike | None = None,
    divide_by: DivideBy = "weight",
    axis_name: AxisName | None = None,
    plan: BucketPlan | None = None,
    packing: Packing | None = None,
    all_reduce: AllReduceOption = "auto",
    hook: CommHook | None = None,
    hook_state: PyTree = None,
    find_norms: bool = False,
) -> Callable[..., Any]:
    """`jdp.value_and_grad` in the memory of a smaller batch.

    A replica's samples are cut into micro-batches that differ by one sample at most.
    Their gradients are added up in a loop, each weighted by its number of samples, and
    synchronised once, after it: loss and gradients are the means over all samples, as
    for the whole batch. To write the loop yourself, add up what
    `jdp.local_gradients` returns and call `jdp.sync_gradients` at the end.

    Args:
      loss_fn: `loss_fn(params, *batches, **kwargs)` returns the mean loss over its
        samples, or with `has_aux` a pair of it and a pytree of metrics.
      num_micro_batches: how many; at least 1.
      argnums: see `value_and_grad`; the other positional arguments are batches.
      has_aux: whether `loss_fn` returns a pair. Metrics are averaged as the loss is,
        integers and booleans in float32; they stay local, also means of values that all
        replicas share, such as synchronised statistics. For the state, average these:
        `jdp.average(stats, weight=weight.sum())`. A metric with a row per
        sample is refused; in a `jdp.PerReplica` it becomes the rows of all samples, in
        the order of the batch, of any dtype and not weighted.
      find_unused: whether to return which parameters any micro-batch used, on any
        replica.
      allow_int: see `value_and_grad`.
      dtype: floating dtype of the sums, of the reduction and of the gradients that
        are returned, such as float32 for bfloat16 parameters; None keeps the dtype of
        each parameter. Complex parameters keep theirs.
      weight: shape (n,), one number per sample, cut as the batches are: 1 for a true
        sample, 0 for padding. Micro-batches and replicas count by the sum of their
        weights; with a sum of 0 they do not count, whatever they hold. A weight of NaN
        or below zero makes loss and gradients NaN; a negative constant is refused.
      divide_by: see `sync_gradients`, as for the other options.
      axis_name: see `sync_gradients`.
      plan: see `sync_gradients`; it has the dtypes of the sums.
      packing: see `sync_gradients`.
      all_reduce: see `sync_gradients`.
      hook: see `value_and_grad`.
      hook_state: see `sync_gradients`; made of gradients in `dtype`.
      find_norms: see `value_and_grad`; a local gradient is of a whole batch.

    Returns:
      A function `(params, *batches, **kwargs)` that returns what
      `jdp.value_and_grad` does. Batches are pytrees of arrays, shape (n, ...), cut on
      dimension 0; keyword arguments go whole to every micro-batch.

    Raises:
      ValueError: here: `num_micro_batches` is below 1; from a call: fewer samples than
        micro-batches, or leaves or `weight` with different numbers of them; a metric
        that has a row per sample, or not one shape for micro-batches of both sizes;
        and what `value_and_grad` raises.
      TypeError: here: `loss_fn` is not a function, a flag is not a bool,
        `num_micro_batches` is not an integer, or `dtype` is not a floating dtype; from
        a call: a metric has no mean, such as a PRNG key.
    """
    differentiation.check_loss(loss_fn)
    flags = {"has_aux": has_aux, "find_unused": find_unused, "allow_int": allow_int}
    types.check_flags(find_norms=find_norms, **flags)
    num_micro_batches = types.as_count(num_micro_batches, "num_micro_batches", least=1)
    if dtype is not None:
        dtype = types.as_floating(dtype, "dtype")
    options = reduce_options.make_options(axis_name, plan, packing, all_reduce, hook)

    def wrapped(*args: PyTree, **kwargs: Any) -> Any:
        here = options.here()
        compat.axis_size(here.axis_name)  # It raises if the axis is not bound.
        trace = step_trace.current()
        call = differentiation.pick_params(loss_fn, argnums, args)
        num_samples = _count_samples(call.rest, num_micro_batches)
        weights = micro_weights.find_weights(weight, divide_by, num_samples, trace)
        loss = _MicroLoss(call, kwargs, flags, here.axis_name, trace)
        local = _accumulate(loss, weights, num_samples, num_micro_batches, dtype)
        weighting, samples = weights.weighting, None
        if find_norms:
            samples = noise.count_samples(weights.total, weighting)
        return differentiation.sync_local(
            local, here, weighting, trace, has_aux, hook_state, samples
        )

    return wrapped


class _MicroLoss(NamedTuple):
    """The loss, as a function of a micro-batch."""

    call: LossCall
    kwargs: dict[str, Any]
    flags: dict[str, bool]  # of `differentiate`.
    axis_name: AxisName
    trace: StepTrace

    def run(self, batch: tuple[PyTree, ...]) -> Any:
        """Returns what the loss returns."""
        own = compat.cast_tree_varying(self.call.params, self.axis_name)
        return self.call.loss_fn(own, *batch, **self.kwargs)

    def differentiate(
        self, batch: tuple[PyTree, ...], weighting: Weighting | None
    ) -> LocalGradients:
        """Returns loss and gradients of a micro-batch."""
        local = differentiation.differentiate(
            self.call._replace(rest=batch),
            self.kwargs,
            self.axis_name,
            self.trace,
            **self.flags,
            weighting=weighting,
        )
        local.facts.check_is_local("accumulate_gradients")
        return local


def _accumulate(
    loss: _MicroLoss,
    weights: SampleWeights,
    num_samples: int,
    num_micro_batches: int,
    dtype: Any,
) -> LocalGradients:
    """Returns loss and gradients of all micro-batches of this replica."""
    # Leaves are stacked: a class of the user's may check their dimensions.
    batches = loss.call.rest, weights.of_samples
    leaves, treedef = jax.tree.flatten(batches)

    def run_on(size: int) -> Any:
        batch, _ = jax.tree.unflatten(treedef, [_repeat(x, size) for x in leaves])
        return loss.run(batch)

    groups = _groups(leaves, num_samples, num_micro_batches)
    metrics = MicroMetrics(
        run_on,
        [micro_batches[0].shape[1] for _, micro_batches in groups],
        num_micro_batches,
        is_weighed=weights.of_samples is not None,
    )
    micro_step = _MicroStep(loss, weights, metrics, treedef)
    sums = _zeros(loss.call.params, dtype, loss.axis_name)
    parts = []
    for share, micro_batches in groups:
        step = functools.partial(micro_step, share)
        sums, part = _loop(step, sums, micro_batches)
        parts.append(part)
    mean_loss, aux = metrics.join([found for found, _ in parts])
    decided = [
        jnp.any(jnp.concatenate(xs)) for xs in zip(*(d for _, d in parts), strict=True)
    ]
    told, fill_used = micro_step.traced[-1]
    return LocalGradients(
        mean_loss,
        aux,
        jax.tree.map(_without_integers, sums),
        fill_used(decided),
        dataclasses.replace(told.facts, timeline=told.facts.timeline.at_the_end()),
        weights.seed_of_sum(told.seed, loss.axis_name),
    )


class _MicroStep:
    """Adds the gradients of one micro-batch to the sums; the body of the loop."""

    def __init__(
        self,
        loss: _MicroLoss,
        weights: SampleWeights,
        metrics: MicroMetrics,
        treedef: Any,
    ):
        self._loss = loss
        self._weights = weights
        self._metrics = metrics
        self._treedef = treedef  # of the batches and the weights of samples.
        # Facts without arrays, and a function that makes a tree of usage flags.
        self.traced: list[tuple[LocalGradients, Callable[..., PyTree]]] = []

    def __call__(self, share: float, sums: PyTree, leaves: list[jax.Array]) -> Any:
        """Returns the next sums; the metrics, and usage flags that are decided.

        Args:
          share: share of the samples that the micro-batch has.
          sums: sums of gradients.
          leaves: leaves of the micro-batch.
        """
        batch, of_samples = jax.tree.unflatten(self._treedef, leaves)
        objective = self._weights.find_objective(of_samples, self._loss.trace)
        local = self._loss.differentiate(batch, objective)
        decided, fill_used = used_flags.outline(local.used)
        self.traced.append((_without_arrays(local), fill_used))
        weigh = functools.partial(self._weights.weigh, share, of_samples)
        weigh_grads = weigh
        if local.seed is not None:
            assert objective is not None
            weigh_grads = self._weights.find_seeded(
                objective, local.seed, self._loss.axis_name
            )
        sums = jax.tree.map(functools.partial(_add, weigh_grads), sums, local.grads)
        size = leaves[0].shape[0]
        found = self._metrics.leaves((local.loss, local.aux), size, weigh)
        if of_samples is not None:
            decided = [x & weighted_mean.has_data(of_samples.sum()) for x in decided]
        return sums, (found, decided)


def _add(weigh: Callable[..., jax.Array], total: jax.Array, grad: Any) -> jax.Array:
    if grad.dtype == jax.dtypes.float0:  # an integer; see `_without_integers`.
        return total
    return total + weigh(grad.astype(total.dtype))


def _without_integers(total: jax.Array) -> Any:
    """Puts the gradient of an integer in the place of its sum."""
    if jnp.issubdtype(total.dtype, jnp.inexact):
        return total
    return np.zeros(total.shape, jax.dtypes.float0)


def _without_arrays(local: LocalGradients) -> LocalGradients:
    """Returns the facts, which outlive the trace of the loop."""
    # The seed keeps its structure.
    seed = jax.tree.map(lambda _: None, local.seed)
    return local._replace(loss=None, aux=None, grads=None, used=None, seed=seed)


def _count_samples(batches: tuple[PyTree, ...], num_micro_batches: int) -> int:
    sizes = {
        path: jnp.shape(leaf)[0] if jnp.ndim(leaf) else None
        for path, leaf in zip(
            tree_paths.leaf_paths(batches), jax.tree.leaves(batches), strict=True
        )
    }
    if not sizes:
        raise ValueError("There is no batch to cut into micro-batches.")
    (first, num_samples), *others = sizes.items()
    for path, size in [(first, num_samples), *others]:
        if size is None:
            raise ValueError(
                f"`batches{path}` is a scalar; a batch is cut on its first dimension. "
                "Pass what is not per sample as a keyword argument."
            )
        if size != num_samples:
            raise ValueError(
                f"`batches{path}` has {size} samples, but `batches{first}` has "
                f"{num_samples}. Pass what is not per sample as a keyword argument."
            )
    assert num_samples is not None
    if num_samples < num_micro_batches:
        raise ValueError(
            f"A replica has {num_samples} samples, fewer than the "
            f"{num_micro_batches} micro-batches."
        )
    return num_samples


def _groups(
    batches: list[Any], num_samples: int, num_micro_batches: int
) -> list[tuple[float, list[jax.Array]]]:
    """Cuts arrays into micro-batches; micro-batches of one size are stacked.

    Returns:
      Per size, the larger first: the share of the samples that one micro-batch has,
      and the batches, shape (count, size, ...).
    """
    least, num_larger = divmod(num_samples, num_micro_batches)
    sizes = ((num_larger, least + 1), (num_micro_batches - num_larger, least))
    groups = []
    start = 0
    for count, size in sizes:
        if count == 0:
            continue
        end = start + count * size
        cut = functools.partial(_cut, start=start, end=end, count=count)
        groups.append((size / num_samples, [cut(x) for x in batches]))
        start = end
    return groups


def _cut(x: Any, *, start: int, end: int, count: int) -> jax.Array:
    part = jnp.asarray(x)[start:end]
    return part.reshape(count, (end - start) // count, *part.shape[1:])


def _repeat(x: Any, size: int) -> jax.Array:
    """Returns `size` copies of the first sample."""
    x = jnp.asarray(x)
    return jnp.broadcast_to(x[:1], (size, *x.shape[1:]))


def _loop(step: Callable[..., Any], sums: PyTree, stacked: list[jax.Array]) -> Any:
    """`lax.scan`; without a loop for one iteration."""
    if stacked[0].shape[0] > 1:
        return lax.scan(step, sums, stacked)
    sums, found = step(sums, [x[0] for x in stacked])
    return sums, jax.tree.map(lambda x: x[None], found)


def _zeros(params: PyTree, dtype: Any, axis_name: AxisName) -> PyTree:
    def zeros(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        is_real = jnp.issubdtype(x.dtype, jnp.floating)
        made = jnp.zeros(x.shape, dtype if dtype is not None and is_real else x.dtype)
        # The carry of a loop has one type, the type of the gradients.
        return compat.cast_varying(made, sorted(compat.varying_axes(x)))

    return jax.tree.map(zeros, compat.cast_tree_varying(params, axis_name))
