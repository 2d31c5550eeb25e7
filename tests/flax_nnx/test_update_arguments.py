"""Arguments of metric updates: samples, and values that are the same everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jdp
from jdp import flax_nnx
from tests import harness, rarely

N, B, F = 4, 8, 6


class State(nnx.metrics.Metric):
    """Applies a function to its state and the arguments of an update."""

    def __init__(self, fn, value, name="State"):
        self.fn = fn
        self.value = nnx.metrics.MetricState(jnp.asarray(value))

    def update(self, **kwargs):
        self.value[...] = self.fn(self.value[...], **kwargs)


def _batch(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(N * B, F)).astype(np.float32),
        "y": rng.integers(0, F, N * B).astype(np.int32),
    }


def _data_parallel(fn, **options):
    return flax_nnx.data_parallel(
        fn,
        world=harness.local_world(N),
        compiler_options=harness.fast_options(),
        **options,
    )


def _one_hot(y):
    return jax.nn.one_hot(y, F)


_VECTOR, _MATRIX = np.zeros(F, np.float32), np.zeros((F, F), np.float32)
_COUNTS = np.zeros((F, F), np.int32)
# Per update: its function, the state before, and whether nothing is gathered.
_UPDATES = {
    "counts updates": (lambda s, x, y: s + 1, 0, True),
    "counts samples": (lambda s, x, y: s + len(x), 0, True),
    "counts both": (lambda s, x, y: s + jnp.array([1, x.size]), [0, 0], True),
    "mean over batch": (lambda s, x, y: s + x.mean(0), _VECTOR, True),
    "scaled by size": (lambda s, x, y: s - x.sum() / len(x) ** 0.5, 0.0, True),
    "batch accuracy": (lambda s, x, y: s + (x.argmax(-1) == y).mean(), 0.0, True),
    "sum of squares": (lambda s, x, y: s + (x**2).sum(), 0.0, True),
    "products": (lambda s, x, y: s + x.T @ x, _MATRIX, True),
    "one-hot counts": (lambda s, x, y: s + _one_hot(y).T @ x, _MATRIX, True),
    "confusion": (lambda s, x, y: s.at[y, x.argmax(-1)].add(1), _COUNTS, True),
    "decay": (lambda s, x, y: 0.9 * s + 0.1 * x.mean(), 1.0, True),
    "last": (lambda s, x, y: x.mean(), 1.0, True),
    "flat": (lambda s, x, y: s + x.reshape(-1).T.sum(), 0.0, True),
    "position": (lambda s, x, y: s + (x.sum(1) * jnp.arange(len(x))).sum(), 0.0, True),
    "nested": (lambda s, x, y: jax.jit(lambda s, x: s + x.sum())(s, x), 0.0, True),
    "square of mean": (lambda s, x, y: s + jnp.sum(x.mean(0) ** 2), 0.0, False),
    "spread": (lambda s, x, y: s + x.std(), 0.0, False),
    "largest": (lambda s, x, y: s + x.max(), 0.0, False),
    "rounded mean": (lambda s, x, y: s + (10 * x.mean()).astype(int), 0, False),
    "sum by halves": (lambda s, x, y: s + y.sum() // 2, 0, False),
    "power by size": (lambda s, x, y: s + (x / 3 ** (len(x) / 8)).sum(), 0.0, True),
    "sorted": (lambda s, x, y: s + jnp.sort(x, 0)[-2], _VECTOR, False),
    "other branch": (
        lambda s, x, y: s + (x.sum() if len(x) < 10 else x.max()),
        0.0,
        False,
    ),
    "other power": (lambda s, x, y: s + (x ** (len(x) // 8)).sum(), 0.0, False),
    "of labels": (
        lambda s, x, y: s + jnp.take_along_axis(x, y[:, None], 1).mean(),
        0.0,
        True,
    ),
    "embedded": (lambda s, x, y: s + jnp.eye(F)[y].sum(0), _VECTOR, True),
    "entropy": (lambda s, x, y: s - jax.nn.log_softmax(x).mean(), 0.0, True),
    "histogram": (lambda s, x, y: s + jnp.bincount(y, length=F), [0] * F, True),
    "one sample": (lambda s, x, y: s + x[0], _VECTOR, False),
    "differences": (lambda s, x, y: s + (x[1:] - x[:-1]).max(0), _VECTOR, False),
    "pairs": (lambda s, x, y: s + (x @ x.T).sum(), 0.0, False),
    "samples last": (lambda s, x, y: s + x.T.sum(1), _VECTOR, True),
    "from the state": (lambda s, x, y: s + jnp.where(s > 1, 1, x).sum(), 0.0, True),
}


@pytest.mark.parametrize("name", rarely.cases(_UPDATES, often=list(_UPDATES)[::4]))
def test_an_update_is_that_of_one_device(name):
    fn, before, is_cheap = _UPDATES[name]
    found, expected = State(fn, before), State(fn, before)
    step = _data_parallel(lambda metric, batch: metric.update(**batch))
    for seed in range(2):
        step(found, _batch(seed))
        expected.update(**_batch(seed))
    np.testing.assert_allclose(
        found.value[...], expected.value[...], rtol=1e-5, atol=1e-4
    )
    text = step.lower(found, _batch()).as_text()
    assert ("all_gather" not in text) == is_cheap


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.linspace(-1, 1, F))


def _loss_fn(model, batch):
    return ((batch["x"] @ model.w[...]) ** 2).mean()


def _counts(batch):
    return jnp.zeros((F, F), jnp.int32).at[batch["y"], batch["x"].argmax(-1)].add(1)


@pytest.mark.parametrize("check_vma", [True, False])
def test_arguments_that_are_the_same_on_all_replicas_are_left_alone(check_vma):
    def run(wrap, value_and_grad, total, mean):
        model = Model()
        counts = State(lambda s, counts: s + counts, _COUNTS)
        grads = State(lambda s, g: s + g, _VECTOR)
        last = State(lambda s, v: v, _VECTOR)
        number = State(lambda s, k: s + k, 0)
        spread = nnx.metrics.Welford()
        all_values = State(lambda s, v: s + v.max(), 0.0)
        objects = model, counts, grads, last, number, spread, all_values

        def step(model, counts, grads, last, number, spread, all_values, batch):
            loss, g = value_and_grad(_loss_fn)(model, batch)
            counts.update(counts=total(_counts(batch)))
            grads.update(g=g["w"][...])
            last.update(v=mean(batch["x"].mean(0)))
            number.update(k=total(batch["y"].sum()))
            spread.update(values=loss[None])
            all_values.update(v=mean(_loss_fn(model, batch))[None] * jnp.arange(3))

        step = wrap(step)
        for seed in range(3):
            step(*objects, _batch(seed))
        return [jax.device_get(jax.tree.leaves(nnx.state(x))) for x in objects]

    found = run(
        lambda fn: _data_parallel(fn, check_vma=check_vma),
        flax_nnx.value_and_grad,
        lambda x: lax.psum(x, "data"),
        jdp.average,
    )
    expected = run(lambda fn: fn, nnx.value_and_grad, lambda x: x, lambda x: x)
    for ours, flax in zip(found, expected, strict=True):
        for x, y in zip(ours, flax, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
            assert x.dtype == y.dtype


def test_samples_may_lie_along_any_dimension():
    metric = State(lambda s, v: jnp.maximum(s, v.max(1)), _VECTOR)
    _data_parallel(lambda m, x: m.update(v=x.T))(metric, _batch()["x"])
    expected = np.maximum(0, _batch()["x"].max(0))
    np.testing.assert_array_equal(metric.value[...], expected)


def test_an_argument_that_is_neither_is_refused_by_name():
    metric = State(lambda s, counts: s + counts, _COUNTS)
    step = _data_parallel(lambda m, batch: m.update(counts=_counts(batch)))
    with pytest.raises(ValueError, match=r"`\['counts'\]` \[6, 6\].*lax\.psum") as info:
        step(metric, _batch())
    assert "jdp.average(x)" in str(info.value)


def test_rows_that_are_the_same_are_those_of_all_samples_or_refused():
    metric = nnx.metrics.Average()

    @_data_parallel
    def gathered(metric, x):
        metric.update(values=lax.all_gather(x, "data", tiled=True))

    gathered(metric, _batch()["x"])
    np.testing.assert_allclose(metric.compute(), _batch()["x"].mean(), rtol=1e-5)
    assert int(metric.count[...]) == N * B * F

    @_data_parallel
    def of_positions(metric, x):
        metric.update(values=x[:, 0], mask=jnp.arange(len(x)) < 3)

    with pytest.raises(ValueError, match=r"`\['mask'\]` \[8\].*are unknown"):
        of_positions(metric, _batch()["x"])


def test_numbers_that_are_drawn_for_samples_are_those_of_all_samples():
    # The scores of generated samples, in a GAN.
    def run(wrap, total):
        metrics = nnx.metrics.Welford(), State(lambda s, k: s + k, 0)

        def step(rngs, scores, number, x):
            z = rngs.noise.normal((len(x), F))
            scores.update(values=jnp.tanh(z).sum(1))
            number.update(k=total((z > 0).sum()))

        wrap(step)(nnx.Rngs(noise=3), *metrics, _batch()["x"])
        return [jax.device_get(jax.tree.leaves(nnx.state(x))) for x in metrics]

    found = run(_data_parallel, lambda x: lax.psum(x, "data"))
    expected = run(lambda fn: fn, lambda x: x)
    for ours, flax in zip(found, expected, strict=True):
        for x, y in zip(ours, flax, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5)


def test_a_sum_over_drawn_samples_is_refused_by_name():
    metric = State(lambda s, v: s + v, _VECTOR)

    @_data_parallel
    def step(rngs, metric, x):
        metric.update(v=rngs.noise.normal(x.shape).sum(0))

    with pytest.raises(ValueError, match=r"`\['v'\]` \[6\].*lax\.psum"):
        step(nnx.Rngs(noise=3), metric, _batch()["x"])


def test_an_argument_that_is_not_used_is_not_refused():
    metric = State(lambda s, x, counts: s + x.sum(), 0.0)
    step = _data_parallel(lambda m, b: m.update(x=b["x"], counts=_counts(b)))
    step(metric, _batch())
    np.testing.assert_allclose(metric.value[...], _batch()["x"].sum(), rtol=1e-5)


def test_a_step_for_one_number_of_samples_is_told_by_lengths():
    metric = State(lambda s, v: s + v.sum(), 0.0)
    step = _data_parallel(lambda m, x: m.update(v=x.reshape(B, 2, F // 2)))
    step(metric, _batch()["x"])
    np.testing.assert_allclose(metric.value[...], _batch()["x"].sum(), rtol=1e-5)


def test_updates_in_a_branch_and_in_a_nested_function_count_all_samples():
    metric = nnx.metrics.Average()

    @_data_parallel
    def step(metric, x):
        nnx.jit(lambda m, x: m.update(values=x))(metric, x)
        nnx.cond(
            x.shape[0] > 0,
            lambda m, x: m.update(values=x),
            lambda m, x: None,
            metric,
            x,
        )

    step(metric, _batch()["x"])
    assert int(metric.count[...]) == 2 * N * B * F
    np.testing.assert_allclose(metric.compute(), _batch()["x"].mean(), rtol=1e-5)


def test_a_function_that_is_called_with_samples_and_with_means_is_refused():
    @nnx.jit
    def update(metric, x):
        metric.update(values=x)

    @_data_parallel
    def step(metric, x):
        update(metric, x)
        update(metric, jdp.average(x))

    with pytest.raises(ValueError, match="in some calls"):
        step(nnx.metrics.Average(), _batch()["x"])


def test_a_part_that_is_updated_twice_counts_twice():
    class Twice(nnx.MultiMetric):
        def update(self, values):
            self.a.update(values=values)
            self.a.update(values=-2 * values)

    metric = Twice(a=nnx.metrics.Average())
    _data_parallel(lambda m, x: m.update(x))(metric, _batch()["x"])
    np.testing.assert_allclose(metric.a.total[...], -_batch()["x"].sum(), rtol=1e-5)
    assert int(metric.a.count[...]) == 2 * N * B * F


def test_numbers_are_averaged_by_weight_beside_samples():
    metrics = nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), values=nnx.metrics.Average()
    )
    weights = np.repeat(np.arange(1, N + 1), B).astype(np.float32)

    @_data_parallel
    def step(model, metrics, batch, weights):
        value_and_grad = flax_nnx.value_and_grad(_loss_fn, weight=weights[0])
        value_and_grad(model, batch)
        metrics.update(loss=_loss_fn(model, batch), values=batch["x"])

    batch = _batch()
    step(Model(), metrics, batch, weights)
    losses = (batch["x"] @ np.linspace(-1, 1, F)) ** 2
    expected = (losses * weights).sum() / weights.sum()
    np.testing.assert_allclose(metrics.loss.compute(), expected, rtol=1e-5)
    np.testing.assert_allclose(metrics.values.compute(), batch["x"].mean(), rtol=1e-5)
    assert int(metrics.loss.count[...]) == 1
