"""Metric objects and sums of all replicas are those of all samples on one device."""

import chex
import clu.metrics
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdp
from tests import harness

N = 3
_RNG = np.random.default_rng(0)
LOGITS = _RNG.normal(size=(12, 4)).astype(np.float32)
LABELS = _RNG.integers(0, 4, 12).astype(np.int32)
LOSSES = _RNG.normal(size=12).astype(np.float32) + np.float32(3)
BATCH = {"logits": LOGITS, "labels": LABELS, "loss": LOSSES}


@flax.struct.dataclass
class Largest(clu.metrics.Metric):
    """A metric that only says how two become one."""

    value: jax.Array

    @classmethod
    def from_model_output(cls, loss, **_):
        return cls(loss.max())

    def merge(self, other):
        return Largest(jnp.maximum(self.value, other.value))

    def compute(self):
        return self.value


@flax.struct.dataclass
class Metrics(clu.metrics.Collection):
    accuracy: clu.metrics.Accuracy
    loss: clu.metrics.Average.from_output("loss")
    last: clu.metrics.LastValue.from_output("loss")
    largest: Largest


class Labels(clu.metrics.Collection):
    seen: clu.metrics.CollectingMetric.from_outputs(("labels",))


Labels = flax.struct.dataclass(Labels)


def of_clu(batch, mask=None):
    more = {} if mask is None else {"mask": mask}
    return Metrics.single_from_model_output(**batch, **more)


def of_nnx(batch):
    metrics = nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(),
        spread=nnx.metrics.Welford("loss"),
        inner=nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
    )
    metrics.update(**batch)
    return metrics


def _step(fn, num_replicas=N):
    return jdp.data_parallel(
        fn,
        world=harness.local_world(num_replicas),
        donate_state=False,
        compiler_options=harness.fast_options(),
    )


def _on_one(make, batch=BATCH):
    return jax.device_get(make(jax.tree.map(jnp.asarray, batch)).compute())


def check_alike(metrics, expected):
    chex.assert_trees_all_close(jax.device_get(metrics.compute()), expected, rtol=1e-6)


@pytest.mark.parametrize("num_replicas", [1, N])
@pytest.mark.parametrize("make", [of_clu, of_nnx])
def test_metrics_of_a_step_are_those_of_all_samples(make, num_replicas):
    step = _step(lambda state, batch: (state, {"m": make(batch)}), num_replicas)
    _, metrics = step(np.zeros(()), BATCH)
    check_alike(metrics["m"], _on_one(make))


def test_collected_outputs_of_a_step_are_those_of_all_samples():
    def step(state, batch):
        return state, Labels.single_from_model_output(**batch)

    _, metrics = _step(step)(np.zeros(()), BATCH)
    np.testing.assert_array_equal(metrics.compute()["seen"]["labels"], LABELS)


def test_counts_stay_integers():
    step = _step(lambda state, batch: (state, [of_clu(batch), of_nnx(batch)]))
    _, (clu_metrics, nnx_metrics) = step(np.zeros(()), BATCH)
    counts = clu_metrics.loss.count, nnx_metrics.spread.count[...]
    assert [(x.dtype, int(x)) for x in counts] == [(jnp.int32, 12)] * 2


def test_all_metric_objects_travel_in_one_collective():
    def step(state, batch):
        return state, [of_clu(batch), of_nnx(batch), of_clu(batch)]

    text = _step(step).fingerprint(np.zeros(()), BATCH)
    assert text.count(" all_gather[") == 1 and " psum" not in text


@pytest.mark.parametrize("make", [of_clu, of_nnx])
def test_a_replica_of_weight_zero_does_not_count(make):
    """The weights are those of the gradients; the samples of weight 0 are NaN."""
    batch = {**BATCH, "loss": LOSSES.copy(), "weight": np.ones(12, np.float32)}
    batch["loss"][4:8], batch["weight"][4:8] = np.nan, 0

    def step(state, batch):
        weight = batch.pop("weight")
        jdp.value_and_grad(lambda p: p * 2.0, weight=weight.sum())(state)
        return state, {"m": make(batch)}

    _, metrics = _step(step)(np.zeros(()), batch)
    kept = jax.tree.map(lambda x: np.delete(x, np.s_[4:8], axis=0), BATCH)
    check_alike(metrics["m"], _on_one(make, kept))


@pytest.mark.parametrize("make", [of_clu, of_nnx])
def test_without_any_data_metrics_are_empty(make):
    def step(state, batch):
        return state, jdp.merge_metrics(make(batch), weight=0.0)

    _, metrics = _step(step)(np.zeros(()), BATCH)
    leaves = jax.tree.leaves(metrics)
    assert leaves and all((np.asarray(x) == 0).all() for x in leaves)


def test_metrics_in_the_state_of_clu_are_merged_by_the_step():
    def step(state, batch):
        update = jdp.merge_metrics(of_clu(batch))
        return (update if state is None else state.merge(update)), {}

    state = None
    for half in (0, 1):
        part = jax.tree.map(lambda x, h=half: x[6 * h : 6 * h + 6], BATCH)
        state, _ = _step(step)(state, part)
    expected = _on_one(of_clu)
    expected["last"] = LOSSES[6:].mean()
    check_alike(state, expected)


class Extended(nnx.metrics.Average):
    def __init__(self):
        super().__init__("loss")
        self.more = nnx.metrics.MetricState(jnp.zeros(()))


def test_a_metric_that_is_not_known_is_refused_by_name():
    with pytest.raises(TypeError, match=r"`Extended`.*\['count', 'more', 'total'\]"):
        _step(lambda state, batch: (state, Extended()))(np.zeros(()), BATCH)


def test_what_is_no_metric_is_refused_by_path():
    def merge(batch):
        return jdp.merge_metrics({"a": of_clu(batch), "b": batch["loss"]})

    with pytest.raises(TypeError, match=r"but `\['b'\]` is a .*jdp.sum_over_replicas"):
        jax.vmap(merge, axis_name="data")(jax.tree.map(lambda x: x[:, None], BATCH))


# Sums.


def test_sums_are_those_of_one_device():
    values = {
        "float": LOSSES,
        "bfloat16": LOSSES.astype(jnp.bfloat16),
        "bool": LABELS > 1,
        "int8": np.full(12, 100, np.int8),
        "uint8": np.full(12, 200, np.uint8),
        "complex": LOSSES + 1j,
    }

    def step(state, x):
        return state, jdp.sum_over_replicas(jax.tree.map(jnp.sum, x))

    _, sums = _step(step)(np.zeros(()), values)
    for name, x in values.items():
        expected = jnp.sum(x)
        assert sums[name].dtype == expected.dtype, name
        rtol = 1e-2 if name == "bfloat16" else 1e-6
        np.testing.assert_allclose(
            np.asarray(sums[name], np.complex64),
            np.asarray(expected, np.complex64),
            rtol=rtol,
        )


def test_numbers_and_booleans_are_counted():
    step = _step(lambda state, x: (state, jdp.sum_over_replicas((True, 2, 0.5))))
    _, (count, twos, halves) = step(np.zeros(()), LOSSES)
    assert (int(count), int(twos), float(halves)) == (N, 2 * N, 0.5 * N)


def test_one_collective_is_sent_per_dtype():
    def step(state, x):
        return state, jdp.sum_over_replicas({"a": x.sum(), "b": x, "c": 1, "d": x > 0})

    text = _step(step).fingerprint(np.zeros(()), LOSSES)
    assert text.count(" psum[") == 2


def test_a_replica_that_has_joined_does_not_count():
    """As in a `jdp.Join`: the step runs on zeros."""

    def step(state, x):
        return state, {"n": jdp.sum_over_replicas(1 / x.sum()), "m": of_clu(BATCH)}

    step = _step(step)
    step.join_hook()
    marks = np.float32([1, 0, 1])
    x = np.float32([1, 0, 2])
    _, metrics = step.run("weight", np.zeros(()), (marks, x))
    assert float(metrics["n"]) == 1.5
    assert int(metrics["m"].loss.count) == 2 * 12


@pytest.mark.parametrize("leaf", ["text", object(), "key"])
def test_what_has_no_sum_is_refused_by_path(leaf):
    leaf = jax.random.key(0) if leaf == "key" else leaf

    def run(x):
        return jdp.sum_over_replicas({"x": x, "y": leaf})

    with pytest.raises(TypeError, match=r"but the leaf `\['y'\]` is"):
        jax.vmap(run, axis_name="data")(LOSSES)


def test_a_sum_under_types_that_vary_counts_equal_values_n_times():
    world = harness.local_world(N)
    mapped = jax.shard_map(
        lambda x: jdp.sum_over_replicas({"same": jnp.ones(()), "own": x.sum()}),
        mesh=world.mesh,
        in_specs=world.split.spec,
        out_specs=world.replicated.spec,
    )
    sums = jax.jit(mapped)(LOSSES)
    assert float(sums["same"]) == N
    np.testing.assert_allclose(sums["own"], LOSSES.sum(), rtol=1e-6)
    with pytest.raises(ValueError, match="`axis_name='data'` is not bound"):
        jdp.sum_over_replicas(1)
