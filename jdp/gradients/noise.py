"""Gradient noise: how large can a batch become before it is wasted?

The gradient of a few samples is the gradient G of all plus noise: its squared norm, on
average, is |G|² + S / w with w samples. A replica's own gradient and the mean over all
replicas are gradients of two batch sizes, so their norms give |G|² and S. S / |G|² is
the simple noise scale (McCandlish et al., 2018: An Empirical Model of Large-Batch
Training, appendix A.1).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import compat, types
from jdp.gradients import weighted_mean
from jdp.gradients.reduce import Means
from jdp.gradients.weighted_mean import Weighting
from jdp.types import AxisName, PyTree


class GradientNorms(NamedTuple):
    """Squared norms of gradients, and the share of the noise in each.

    Samples are counted by the `weight` of a replica; without one, each replica's batch
    counts as one.
    """

    local: jax.Array  # float32 (): mean over the replicas' own gradients.
    mean: jax.Array  # float32 (): of the mean over the replicas with data.
    noise_in_local: jax.Array  # float32 (): 1 / samples, of equal batches.
    noise_in_mean: jax.Array  # float32 (): likewise.


class NoiseScaleState(NamedTuple):
    """Estimates smoothed over the steps; part of the train state."""

    square: jax.Array  # float32 (): of |G|².
    noise: jax.Array  # float32 (): of S, the variance of one sample's gradient.
    num_steps: jax.Array  # int32 (): steps that the estimates cover.


class NoiseScale(NamedTuple):
    """A pair of pure functions; see `jdp.noise_scale`."""

    init: Callable[[], NoiseScaleState]
    update: Callable[
        [GradientNorms, NoiseScaleState], tuple[jax.Array, NoiseScaleState]
    ]


def noise_scale(*, decay: float = 0.99) -> NoiseScale:
    """Returns a metric: the batch size up to which larger batches pay.

    Below the scale, twice as many samples make nearly twice the progress per step; far
    above it, hardly any more. It is measured where gradients are synchronised, and
    sends only two more numbers, in a bucket:

        noise = jdp.noise_scale()
        state = {"params": params, "noise": noise.init(), ...}

        @jdp.data_parallel
        def step(state, batch):
            grad_fn = jdp.value_and_grad(loss_fn, weight=..., find_norms=True)
            (loss, grads), norms = grad_fn(state["params"], batch)
            scale, state["noise"] = noise.update(norms, state["noise"])
            ...

    Both estimates are smoothed before they are divided: their ratio in a single step is
    mostly noise.

    Args:
      decay: decay of the moving averages, in [0, 1). The first steps are averaged
        evenly, so that the first does not dominate.

    Returns:
      `init() -> state` and `update(norms, state) -> (scale, state)`. The scale is
      float32 (), in samples where `weight` was given, otherwise in batches of one
      replica. It is infinite while the estimate of |G|² is not positive, and NaN before
      there is one. Steps with fewer than two replicas with data, or
      with norms that are not finite, are left out.

    Raises:
      TypeError: `decay` is not a number.
      ValueError: `decay` is out of range.
    """
    types.check_number(decay, "decay")
    if not 0 <= decay < 1:
        raise ValueError(f"`decay` must be at least 0 and less than 1, got {decay}.")

    def init() -> NoiseScaleState:
        return NoiseScaleState(jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))

    def update(
        norms: GradientNorms, state: NoiseScaleState
    ) -> tuple[jax.Array, NoiseScaleState]:
        spread = norms.noise_in_local - norms.noise_in_mean
        noise = (norms.local - norms.mean) / spread
        square = norms.mean - norms.noise_in_mean * noise
        is_known = (spread > 0) & jnp.isfinite(noise) & jnp.isfinite(square)
        num_steps = state.num_steps + 1
        share = jnp.maximum(1 - decay, 1 / num_steps)
        new = NoiseScaleState(
            state.square + share * (square - state.square),
            state.noise + share * (noise - state.noise),
            num_steps,
        )
        new = jax.tree.map(lambda x, old: jnp.where(is_known, x, old), new, state)
        unknown = jnp.where(new.num_steps > 0, jnp.inf, jnp.nan)
        scale = jnp.where(new.square > 0, new.noise / new.square, unknown)
        return scale, new

    return NoiseScale(init, update)


def count_samples(
    weight: jax.typing.ArrayLike | None, weighting: Weighting | None
) -> jax.Array:
    """Returns the number of samples of a replica, float32 (); 1 without a weight."""
    if weight is not None:
        return jnp.asarray(weight, jnp.float32)
    return jnp.ones(()) if weighting is None else weighting.amount


def as_rider(
    grads: PyTree, samples: jax.Array, dtype: Any, factor: jax.Array | None = None
) -> jax.Array:
    """Returns the squared norm of a replica's gradients, and 1 / samples.

    Args:
      grads: its own gradients, times `factor`.
      samples: float32 ().
      dtype: dtype of a bucket; float32 is used in place of 16 bits, which are too few.
      factor: float32 (); None: 1.

    Returns:
      Shape (2,).
    """
    square = _square(grads)
    if factor is not None:
        square = square / factor.astype(square.dtype) ** 2
    if jnp.finfo(dtype).bits < 32:
        dtype = jnp.float32
    return jnp.stack([square, 1 / samples]).astype(dtype)


def norms_of(
    means: Means, weighting: Weighting | None, axis_name: AxisName
) -> GradientNorms:
    """Returns the norms from a reduction whose last rider is from `as_rider`."""
    total = means.total
    local, inverse = means.riders[-1].real.astype(jnp.float32)
    square = _square(means.grads)
    divisor = jnp.where(jnp.equal(total, 0), 1, total).astype(jnp.float32)
    inverse_of_all = inverse / divisor
    if weighting is not None and weighting.divide_by == "weight":
        inverse_of_all = 1 / divisor
    if weighting is not None and weighting.divide_by == "world":
        # The sum was divided by the number of all replicas, not of those with data.
        square = square * (compat.axis_size(axis_name) / divisor) ** 2
    return GradientNorms(local, square, inverse, inverse_of_all)


def _square(grads: PyTree) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(grads) if x.dtype != jax.dtypes.float0]
    wide = [x.astype(weighted_mean.wide_dtype(x.dtype)) for x in leaves]
    squares = [jnp.sum(jnp.square(jnp.abs(x))) for x in wide]
    return sum(squares, jnp.zeros(())).astype(jnp.float32)
