"""Metrics of nnx in a step: what one device counts on all samples."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jdp import flax_nnx
from tests import harness

N = 4


class Largest(nnx.metrics.Metric):
    """Not a sum over samples."""

    def __init__(self):
        self.value = nnx.metrics.MetricState(jnp.array(-jnp.inf))

    def update(self, *, values, **_):
        self.value[...] = jnp.maximum(self.value[...], values.max())

    def compute(self):
        return self.value[...]


class Confusion(nnx.metrics.Metric):
    """Adds to places of an array."""

    def __init__(self):
        self.counts = nnx.metrics.MetricState(jnp.zeros((3, 3), jnp.int32))

    def update(self, *, logits, labels, **_):
        found = logits.argmax(-1)
        self.counts[...] = self.counts[...].at[labels, found].add(1)

    def compute(self):
        return self.counts[...]


class NumSamples(nnx.metrics.Metric):
    """Depends on the shape alone."""

    def __init__(self):
        self.count = nnx.metrics.MetricState(jnp.zeros((), jnp.int32))

    def update(self, *, labels, **_):
        self.count[...] += labels.shape[0]

    def compute(self):
        return self.count[...]


class MeanOfMeans(nnx.metrics.Average):
    """Derives from a metric of Flax."""

    def update(self, *, values, **_):
        super().update(values=values.mean())


class OwnSum(nnx.metrics.Metric):
    """Communicates itself where there are replicas."""

    axis_name = None

    def __init__(self):
        self.total = nnx.metrics.MetricState(jnp.zeros(()))

    def update(self, *, values, **_):
        total = values.sum()
        if self.axis_name:
            total = lax.psum(total, self.axis_name)
        self.total[...] += total

    def compute(self):
        return self.total[...]


class SumOnReplicas(OwnSum):
    axis_name = "data"


def _make(own_sum=OwnSum):
    return nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(),
        loss=nnx.metrics.Average("loss"),
        values=nnx.metrics.Average(),
        spread=nnx.metrics.Welford(),
        spread_of_loss=nnx.metrics.Welford("loss"),
        largest=Largest(),
        confusion=Confusion(),
        samples=NumSamples(),
        sum=own_sum(),
    )


def _batch(seed):
    rng = np.random.default_rng(seed)
    return {
        "logits": rng.normal(size=(8, 3)).astype(np.float32),
        "labels": rng.integers(0, 3, 8).astype(np.int32),
        "values": (rng.normal(size=8) * 3 + 1).astype(np.float32),
        "mask": rng.integers(0, 2, 8).astype(np.float32),
    }


def _update(metrics, batch):
    mask = {"accuracy": batch["mask"]}
    given = {k: batch[k] for k in ("logits", "labels", "values")}
    metrics.update(loss=(batch["values"] ** 2).mean(), mask=mask, **given)
    return metrics.loss.compute()


def _data_parallel(fn):
    return flax_nnx.data_parallel(
        fn,
        world=harness.local_world(N),
        compiler_options=harness.fast_options(),
    )


def test_every_kind_of_metric_counts_the_samples_of_all_replicas():
    ours, flax = _make(SumOnReplicas), _make()
    step = _data_parallel(_update)
    for seed in range(3):
        found, expected = step(ours, _batch(seed)), _update(flax, _batch(seed))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    chex.assert_trees_all_close(
        jax.device_get(ours.compute()), jax.device_get(flax.compute()), rtol=1e-5
    )
    assert int(ours.values.count[...]) == 24 and int(ours.loss.count[...]) == 3
    assert type(ours.accuracy) is nnx.metrics.Accuracy


def test_a_mean_of_means_adds_the_means_of_all_replicas():
    metric = MeanOfMeans()
    batch = _batch(0)
    _data_parallel(lambda m, v: m.update(values=v))(metric, batch["values"])
    np.testing.assert_allclose(metric.compute(), batch["values"].mean(), rtol=1e-6)


def test_a_metric_may_be_reset_and_read_in_the_step():
    metric = nnx.metrics.Average()

    @_data_parallel
    def step(metric, values):
        metric.reset()
        metric.update(values=values)
        metric.update(values=values.mean())
        return metric.compute()

    batch = _batch(0)["values"]
    found = step(metric, batch)
    np.testing.assert_allclose(found, (batch.sum() + batch.mean()) / 9, rtol=1e-6)


def test_a_loss_that_is_averaged_already_costs_no_collective():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(3))

    def step(model, metric, x):
        loss, _ = flax_nnx.value_and_grad(lambda m, x: (x * m.w).mean())(model, x)
        metric.update(loss=loss)

    def num_collectives(fn):
        x = np.ones((8, 3), np.float32)
        arguments = Model(), nnx.metrics.Average("loss"), x
        text = _data_parallel(fn).lower(*arguments).as_text()
        return text.count('"stablehlo.all_reduce"')

    def with_own(model, metric, x):
        step(model, metric, x)
        metric.update(loss=x.mean())

    assert num_collectives(step) == 1  # of the loss, with the gradients.
    assert num_collectives(with_own) == 2


def test_several_metrics_are_summed_together():
    metrics = nnx.MultiMetric(
        a=nnx.metrics.Average(), b=nnx.metrics.Average(), c=nnx.metrics.Accuracy()
    )

    @_data_parallel
    def step(metrics, batch):
        given = {k: batch[k] for k in ("logits", "labels", "values")}
        metrics.update(**given)

    text = step.lower(metrics, _batch(0)).as_text()
    # The float32 totals; the program of the update has the counts.
    assert text.count('"stablehlo.all_reduce"') == 1
    assert "all_gather" not in text
