"""Loss weighting: the factor of a loss in its backward pass."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import compat
from jdp.backward.loss import LossProgram
from jdp.gradients import weighted_mean
from jdp.gradients.step_facts import LossFacts
from jdp.gradients.step_trace import StepTrace
from jdp.gradients.weighted_mean import Totals, Weighting
from jdp.types import AxisName


class Seed(NamedTuple):
    """Factor that weighted a loss before its backward pass."""

    factor: jax.Array  # floating (): the cotangent of the loss.
    # None: `factor` is the weight of the replica; else the weight over the largest.
    totals: Totals | None = None
    # Divides the sum of the gradients; None: the total weight.
    divisor: jax.Array | None = None


def find_seed(
    program: LossProgram,
    facts: LossFacts,
    weighting: Weighting | None,
    known: Weighting,
    trace: StepTrace,
    axis_name: AxisName,
) -> tuple[jax.Array | None, Seed | None]:
    """Returns the factor of the loss, None for 1, and the seed if it weights the loss.

    Multiplying the loss costs nothing; multiplying all gradients costs a fifth of a
    step on CPU. But gradients are weighted after the backward pass where it is not
    linear, has a dtype whose range ends before float32's, or reduces itself.

    Where gradients go through a collective, they belong to the losses of several
    replicas. There each loss is multiplied by its weight over the largest weight. That
    factor is exactly 1 where all replicas with data have equal weights, and never
    larger, so weights make nothing overflow. The sum is then divided in float32 or
    wider.

    Args:
      program: the loss.
      facts: the facts about it.
      weighting: weight that the gradients get; None: they stay unweighted.
      known: `weighting`, or else the ambient weighting.
      trace: the trace of the step.
      axis_name: the axis, or axes, over which replicas lie.
    """
    amount = compat.cast_tree_varying(known.amount, axis_name)
    if facts.has_exchanges:
        is_binary = known.divide_by != "weight" or trace.is_ambient(known)
        if is_binary or program.markers:
            return jnp.sign(amount), None
        totals = weighted_mean.sum_over_replicas(amount, axis_name)
        return seed_of(amount, totals, program.jaxpr.out_avals[0].dtype)
    if weighting is None or weighting.divide_by != "weight" or program.markers:
        return None, None
    if not program.is_scalable or program.has_custom_backward:
        return None, None
    return amount, Seed(amount)


def seed_of(amount: jax.Array, totals: Totals, dtype: Any) -> tuple[jax.Array, Seed]:
    """Returns this replica's weight over the largest weight, and the seed.

    Both are in `dtype`, the dtype of the loss, or in float32 if that is narrower.
    """
    factor = weighted_mean.ratio(amount, totals.largest, dtype)
    divisor = weighted_mean.ratio(totals.amount, totals.largest, dtype)
    return factor, Seed(factor, totals, divisor)
