"""Micro-weights: how much a micro-batch counts in the mean over all samples."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdp import compat
from jdp.gradients import loss_weighting, weighted_mean
from jdp.gradients.loss_weighting import Seed
from jdp.gradients.step_trace import StepTrace
from jdp.gradients.weighted_mean import DivideBy, Weighting
from jdp.types import AxisName


class SampleWeights(NamedTuple):
    """Weights of the samples of one replica."""

    of_samples: jax.Array | None  # shape (n,); None: equal weights.
    total: jax.Array | None  # (): their sum.
    weighting: Weighting | None  # weight of the replica; None: equal weights.
    # Whether a micro-batch counts by its weight among the samples of all replicas.
    of_all: bool

    def find_objective(
        self, of_samples: jax.Array | None, trace: StepTrace
    ) -> Weighting | None:
        """Returns how much the loss of a micro-batch counts; None: the ambient weight.

        Args:
          of_samples: weights of the samples of the micro-batch.
          trace: the trace of the step.
        """
        if of_samples is None:
            return None
        amount = of_samples.sum()
        if not self.of_all:
            amount = amount / _divisor(self.total)
        return trace.resolve(amount, "weight")

    def weigh(
        self, share: float, of_samples: jax.Array | None, x: jax.Array
    ) -> jax.Array:
        """Returns `x` times the share of its micro-batch in the mean of the replica.

        Args:
          share: share of the samples, for equal weights.
          of_samples: weights of the samples of the micro-batch.
          x: loss, gradient or metric of the micro-batch.
        """
        if of_samples is None or self.total is None:
            return share * x
        amount = of_samples.sum() / _divisor(self.total)
        weighed = weighted_mean.weigh(x, Weighting(amount, "weight")).astype(x.dtype)
        return weighted_mean.zero_unless(weighted_mean.has_data(amount), weighed)

    def find_seeded(
        self, objective: Weighting, seed: Seed, axis_name: AxisName
    ) -> Callable[[jax.Array], jax.Array]:
        """Returns the function that weights gradients of a loss weighted by `seed`."""
        return functools.partial(
            _weigh_seeded,
            weighted_mean.has_data(objective.amount),
            _share_of_all(seed, self.weighting if self.of_all else None, axis_name),
        )

    def seed_of_sum(self, seed: Seed | None, axis_name: AxisName) -> Seed | None:
        """Returns the seed of the sum over micro-batches, given the seed of each."""
        weighting = self.weighting
        if seed is None or weighting is None:
            return seed
        if seed.totals is None:
            return Seed(weighting.amount) if self.of_all else None
        totals = weighted_mean.sum_over_replicas(weighting.amount, axis_name)
        if weighting.divide_by == "world":
            size = jnp.asarray(compat.axis_size(axis_name), totals.amount.dtype)
            divisor = jnp.where(jnp.isnan(totals.amount), jnp.nan, size)
            return Seed(weighting.amount, totals, divisor)
        return loss_weighting.seed_of(weighting.amount, totals, totals.amount.dtype)[1]


def find_weights(
    weight: jax.typing.ArrayLike | None,
    divide_by: DivideBy,
    num_samples: int,
    trace: StepTrace,
) -> SampleWeights:
    """Returns the weights of the samples of one replica.

    Args:
      weight: one number per sample; None: equal weights.
      divide_by: see `jdp.sync_gradients`.
      num_samples: samples of this replica.
      trace: the trace of the step.

    Raises:
      ValueError: `weight` has another shape, or a negative constant in it.
    """
    of_samples = _check_weight(weight, num_samples)
    total = None if of_samples is None else of_samples.sum()
    weighting = trace.resolve(total, divide_by)
    of_all = of_samples is not None and divide_by == "weight"
    return SampleWeights(of_samples, total, weighting, of_all)


def _check_weight(
    weight: jax.typing.ArrayLike | None, num_samples: int
) -> jax.Array | None:
    if weight is None:
        return None
    of_samples = weighted_mean.as_real(weight)
    if of_samples.shape != (num_samples,):
        raise ValueError(
            f"`weight` has shape {of_samples.shape}; it must hold one number for each "
            f"of the {num_samples} samples, to be cut as the batches are."
        )
    return weighted_mean.nan_if_negative(of_samples)


def _weigh_seeded(
    has_data: jax.Array, share: jax.Array | None, x: jax.Array
) -> jax.Array:
    """Returns gradients of a weighted loss, times the share of their micro-batch."""
    if share is not None:
        wide = weighted_mean.wide_dtype(x.dtype)
        x = (x.astype(wide) * share.astype(jnp.finfo(wide).dtype)).astype(x.dtype)
    return weighted_mean.zero_unless(has_data, x)


def _share_of_all(
    seed: Seed, weighting: Weighting | None, axis_name: AxisName
) -> jax.Array | None:
    """Returns the factor of a micro-batch whose losses were weighted over the largest.

    The factor is that largest weight of a replica. With `weighting`, the weight of
    each replica with all its samples, it is divided by the largest of those weights.
    """
    if seed.totals is None:
        return None
    largest = seed.totals.largest
    if weighting is None:
        return largest
    of_all = weighted_mean.sum_over_replicas(weighting.amount, axis_name)
    return weighted_mean.ratio(largest, of_all.largest, largest.dtype)


def _divisor(total: jax.Array | None) -> jax.Array:
    assert total is not None
    return jnp.where(weighted_mean.has_data(total), total, jnp.ones((), total.dtype))
