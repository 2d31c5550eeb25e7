"""Batches add up without loss, whatever the dtype of a result."""

import itertools

import clu.metrics
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdp
from tests import harness, rarely

N = 2
ONES_AND_TWOS = [np.full(2, x, np.float32) for x in [1] * 300 + [2] * 300]


def _replicated(fn, **options):
    return jdp.replicated(
        fn,
        world=harness.local_world(N),
        compiler_options=harness.fast_options(),
        **options,
    )


@pytest.mark.parametrize(
    "dtype",
    rarely.cases([jnp.bfloat16, jnp.float16, jnp.float32], often=(jnp.bfloat16,)),
)
def test_means_and_sums_of_many_batches_do_not_stop_moving(dtype):
    evaluate = _replicated(
        lambda p, x: {
            "mean": x.astype(dtype).mean(),
            "sum": jdp.sum_over_replicas(x.astype(dtype).sum()),
        }
    )
    found = evaluate.over(None, ONES_AND_TWOS)
    assert float(found["mean"]) == 1.5
    assert float(found["sum"]) == float(jnp.asarray(1800, dtype))
    assert found["mean"].dtype == found["sum"].dtype == dtype


def _of_clu(x):
    return clu.metrics.Average.from_model_output(x)


def _of_nnx(x):
    found = nnx.metrics.Average("x")
    found.total = nnx.metrics.MetricState(x.sum())  # Of this dtype.
    found.count[...] = jnp.asarray(x.size)
    return found


@pytest.mark.parametrize(
    ("make", "num_batches"),
    rarely.cases(
        itertools.product([_of_clu, _of_nnx], [1, 300]),
        often=[(_of_clu, 300), (_of_nnx, 1)],
    ),
)
def test_metric_objects_of_narrow_numbers_do_not_stop_moving(make, num_batches):
    """Nor over the samples of one batch, which are merged sample by sample."""
    evaluate = _replicated(lambda p, x: make(x.astype(jnp.bfloat16)))
    batches = np.ones((num_batches, 600 // num_batches), np.float32)
    found = evaluate.over(None, [*batches, *(2 * batches)])
    assert float(found.total[...]) == float(jnp.asarray(1800, jnp.bfloat16))
    assert found.total.dtype == jnp.bfloat16 and int(found.count[...]) == 1200
    assert isinstance(found.total[...], jax.Array)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_of_integers_that_its_dtype_does_not_hold_is_wide(sign):
    evaluate = _replicated(lambda p, x: jdp.sum_over_replicas(x.sum()))
    x = np.array([sign * 2**30], np.int32)
    found = evaluate.over(None, [x, x, x])
    assert isinstance(found, np.ndarray) and found.dtype == np.int64
    assert found == sign * 3 * 2**30
    small = evaluate.over(None, [x, -x, x])
    assert isinstance(small, jax.Array) and small.dtype == jnp.int32
    assert int(small) == sign * 2**30


def test_a_count_in_a_metric_object_that_its_dtype_does_not_hold_is_wide():
    evaluate = _replicated(
        lambda p, x: clu.metrics.Average(x.mean(), jnp.where(x[0] > 0, 2**30, 1))
    )
    found = evaluate.over(None, [np.ones(1, np.float32)] * 3)
    assert found.count == 3 * 2**30 and found.count.dtype == np.int64


def test_a_count_in_float32_is_exact_beyond_its_digits():
    evaluate = _replicated(lambda p, x: jdp.sum_over_replicas(x.sum()))
    batches = [np.array([2**25], np.float32), *[np.ones(1, np.float32)] * 4]
    assert float(evaluate.over(None, batches)) == 2**25 + 4


def test_complex_numbers_are_averaged():
    evaluate = _replicated(lambda p, x: x.mean().astype(jnp.complex64) * (1 + 2j))
    found = evaluate.over(None, [np.ones(2, np.float32), np.full(2, 3, np.float32)])
    assert complex(found) == 2 + 4j and found.dtype == jnp.complex64


def test_a_batch_without_samples_does_not_count():
    evaluate = _replicated(
        lambda p, x, weight: {"m": x.sum() / weight.sum(), "last": _last(x, weight)}
    )
    found = evaluate.over(None, [np.ones(2, np.float32), np.ones(0, np.float32)])
    assert float(found["m"]) == 1 and float(found["last"].compute()) == 1


def _last(x, weight):
    return clu.metrics.LastValue(total=x.sum(), count=weight.sum())


def test_a_mean_of_no_samples_is_refused():
    empty = [np.ones((0, 3), np.float32)]
    evaluate = _replicated(lambda p, x: {"m": x.mean()})
    with pytest.raises(ValueError, match=r"batches without samples.*`\['m'\]` has no"):
        evaluate.over(None, empty)
    total = _replicated(lambda p, x: jdp.sum_over_replicas(x.sum()))
    assert float(total.over(None, empty)) == 0


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, x: {"m": x.mean(), "s": jdp.sum_over_replicas(x.sum()), "c": 3},
        lambda p, x, weight: {
            "m": (x * weight).sum() / jnp.maximum(weight.sum(), 1),
            "s": jdp.sum_over_replicas((x * weight).sum()),
            "c": 3,
        },
    ],
)
def test_a_mean_over_samples_of_weight_zero_is_not_a_number(fn):
    evaluate, x = _replicated(fn), np.ones(4, np.float32)
    found = evaluate(None, x, weight=np.zeros(4))
    assert np.isnan(found["m"]) and float(found["s"]) == 0 and int(found["c"]) == 3
    assert float(evaluate(None, x, weight=np.array([0, 0, 1, 0]))["m"]) == 1
    with pytest.raises(ValueError, match="was called with a batch without samples"):
        evaluate(None, x[:0])


def test_rows_of_replicas_do_not_add_up():
    evaluate = _replicated(lambda p, x, weight: {"r": jdp.PerReplica(x)})
    assert evaluate.over(None, [np.ones(2)])["r"].value.shape == (2, 1)
    with pytest.raises(ValueError, match=r"`\['r'\]` of .* has rows of its own"):
        evaluate.over(None, [np.ones(2)] * 2)
