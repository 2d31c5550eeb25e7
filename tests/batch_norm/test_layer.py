"""Statistics of n replicas are those of one device on the samples that count."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from jdp.batch_norm import layer, sample_weights
from jdp.batch_norm.global_moments import Moments
from jdp.gradients import step_trace
from jdp.gradients.step_trace import StepTrace
from jdp.gradients.weighted_mean import Weighting
from tests import harness
from tests.transforms import AXIS, COMPILED_FAST, transforms_compiled_fast

# Samples of each replica, of at most 6; those without any hold NaN.
COUNTS = {1: [4], 2: [6, 2], 4: [3, 0, 6, 1]}
RUNNING = Moments(np.float32([3.0, 4.0, 5.0]), np.float32([2.0, 2.0, 3.0]))
MOMENTUM = 0.9
# Of a sum of up to 24 terms of order 10, each rounded.
RTOL = 24 * 1.2e-7


def _uneven(n, features=3, mean=1.0, size=6):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, size, features)).astype(np.float32) + np.float32(mean)
    weight = np.float32([[k < c for k in range(size)] for c in COUNTS[n]])
    x[weight == 0] = np.nan
    return x, weight


def _options(x, axis_name=layer.DEFAULT_AXIS, *, axis=-1, one_pass=True):
    return layer.make_options(
        x,
        axis=axis,
        axis_name=axis_name,
        axis_index_groups=None,
        use_fast_variance=one_pass,
        epsilon=1e-5,
        momentum=MOMENTUM,
    )


def _layer(
    affine, x, *, weight=None, mask=None, axis_name=layer.DEFAULT_AXIS, one_pass=True
):
    options = _options(x, axis_name, one_pass=one_pass)
    inputs = layer.count_samples(x, options, weight=weight, mask=mask)
    running = jax.tree.map(jnp.asarray, RUNNING)
    taken, updated = layer.take_moments(inputs, running, options, jnp.float32)
    y = layer.normalize(inputs, taken, affine["scale"], affine["bias"], options)
    return y, taken, updated


AFFINE = {
    "scale": np.float32([0.5, 1.0, 2.0]),
    "bias": np.float32([1.0, -1.0, 0.5]),
}


def _moments(x):
    x = x.reshape(-1, x.shape[-1]).astype(np.float64)
    return Moments(x.mean(0), x.var(0))


def _blend(moments):
    return Moments(
        *(
            MOMENTUM * r + (1 - MOMENTUM) * m
            for r, m in zip(RUNNING, moments, strict=True)
        )
    )


@transforms_compiled_fast
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("one_pass", [True, False])
def test_statistics_are_those_of_all_samples(run, n, one_pass):
    x, weight = _uneven(n)

    def fn(affine, local):
        return _layer(affine, local[0], weight=local[1], one_pass=one_pass)[1:]

    found = run(fn, n, AFFINE, (x, weight))
    expected = _moments(x[weight > 0])
    chex.assert_trees_all_close(found, (expected, _blend(expected)), rtol=RTOL)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_a_large_mean_does_not_hide_the_variance(one_pass, is_weighted):
    n, rng = 8, np.random.default_rng(0)
    # Replicas whose own means differ by a deviation of all.
    x = rng.normal(size=(n, 32, 3)) + rng.normal(size=(n, 1, 3)) + 1e4
    x = x.astype(np.float32)
    weight = np.ones((n, 32), np.float32)
    if is_weighted:  # the first sample is not one to reduce the others around
        x[:, 0], weight[:, 0] = 0, 0

    def fn(affine, local):
        weight = local[1] if is_weighted else None
        return _layer(affine, local[0], weight=weight, one_pass=one_pass)[1]

    found = COMPILED_FAST["vmap"](fn, n, AFFINE, (x, weight))
    truth = x[weight > 0]
    expected = _moments(truth)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=2 * 1.2e-7)
    # A replica's mean is rounded by up to 5e-4, of a deviation of 1.4.
    np.testing.assert_allclose(found.var, expected.var, rtol=1e-3)
    naive = (truth * truth).mean(0) - truth.mean(0) ** 2
    assert np.all(abs(naive - expected.var) > 0.1 * expected.var)


def test_a_first_sample_far_off_costs_no_more_than_it_must():
    x = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    # At worst it is sqrt(1000) deviations away, and 1000 times the variance cancels.
    for first in (1e5, 50.0):
        x[0] = first
        found = _layer(AFFINE, x, axis_name=None)[1]
        expected = _moments(x).var
        np.testing.assert_allclose(found.var, expected, rtol=1000 * 4 * 1.2e-7)


def _plain(affine, x):
    """Flax's own, of one device."""
    layer = nn.BatchNorm(use_running_average=False, use_fast_variance=False)
    stats = {"mean": RUNNING.mean, "var": RUNNING.var}
    variables = {"params": affine, "batch_stats": stats}
    return layer.apply(variables, x, mutable=["batch_stats"])[0]


def _loss(y, coefficients):
    return (coefficients * y**3).sum(-1)


def _grads_alone(fn, affine, x, coefficients):
    loss = lambda *a: _loss(fn(*a), coefficients).sum()  # noqa: E731
    return harness.jit_fast(jax.grad(loss, argnums=(0, 1)))(affine, x)


def _local_grads(affine, local, **options):
    """As `jdp.local_gradients`: of this replica's copy of scale and bias, summed."""
    x, weight, coefficients = local
    affine = jax.tree.map(
        lambda a: lax.pcast(a, AXIS, to="varying") if jax.typeof(x).mat.varying else a,
        affine,
    )

    def loss(affine, x):
        losses = _loss(_layer(affine, x, weight=weight, **options)[0], coefficients)
        # 0 / 0 on a replica without samples, as most would write it.
        return (losses * weight).sum() / weight.sum() * weight.sum()

    of_affine, of_x = jax.grad(loss, argnums=(0, 1))(affine, x)
    of_affine = jax.tree.map(
        lambda g: lax.psum(jnp.where(weight.sum() > 0, g, 0), AXIS), of_affine
    )
    return of_affine, lax.psum(
        jnp.where(jnp.arange(4)[:, None, None] == lax.axis_index(AXIS), of_x, 0), AXIS
    )


@transforms_compiled_fast
@pytest.mark.parametrize(
    "one_pass, padding", [(True, np.nan), (False, np.inf), (True, 3e38)]
)
def test_gradients_are_those_of_all_samples(run, one_pass, padding):
    x, weight = _uneven(4)
    x[weight == 0] = padding
    coefficients = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    fn = functools.partial(_local_grads, one_pass=one_pass)
    of_affine, of_x = run(fn, 4, AFFINE, (x, weight, coefficients))
    truth = weight > 0
    expected = _grads_alone(_plain, AFFINE, x[truth], coefficients[truth])
    found = of_affine, np.asarray(of_x)[truth]
    # Sums of 10 terms that cancel, of the third power of what is of order 2.
    chex.assert_trees_all_close(found, expected, atol=10 * 8 * 1.2e-7, rtol=1e-5)
    assert np.all(np.asarray(of_x)[~truth] == 0)


def _collectives(jaxpr):
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            yield from _collectives(getattr(inner, "jaxpr", inner))
        if eqn.primitive.name.startswith(("psum", "all_gather", "all_reduce")):
            yield sum(v.aval.size for v in eqn.outvars)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_one_collective_forwards_and_one_backwards(check_vma, is_weighted):
    n = 4
    x, weight = _uneven(n)

    def replica(x, weight):
        def loss(x):
            given = weight[0] if is_weighted else None
            y = _layer(AFFINE, x, weight=given)[0]
            return (y**3).sum()

        value, grads = jax.value_and_grad(loss)(x[0])
        return value[None], grads[None]

    mapped = jax.shard_map(
        replica,
        mesh=harness.local_world(n).mesh,
        in_specs=P(AXIS),
        out_specs=P(AXIS),
        check_vma=check_vma,
    )
    forwards = (n + 1) * 3 + (n if is_weighted else 0)
    jaxpr = jax.make_jaxpr(mapped)(x, weight).jaxpr
    backwards = 2 * 3 if check_vma else forwards
    assert list(_collectives(jaxpr)) == [forwards, backwards]


def test_a_replica_alone_sends_nothing():
    x, weight = _uneven(1)
    fn = jax.vmap(lambda x: _layer(AFFINE, x)[0], axis_name=AXIS)
    assert list(_collectives(jax.make_jaxpr(fn)(x).jaxpr)) == []


def test_derivatives_of_derivatives_are_those_of_all_samples():
    x, weight = _uneven(2)
    truth = weight > 0
    x = np.where(truth[..., None], x, 5).astype(np.float32)
    v = np.random.default_rng(3).normal(size=x.shape).astype(np.float32)

    def ours(x):
        layer = lambda x, w: _layer(AFFINE, x, weight=w)[0]  # noqa: E731
        y = jax.vmap(layer, axis_name=AXIS)(x, weight)
        return (y**3 * truth[..., None]).sum()

    def both_ways(fn):  # a product with the Hessian, forwards over backwards
        return harness.jit_fast(lambda x, v: jax.jvp(jax.grad(fn), (x,), (v,)))

    grads, product = both_ways(ours)(x, v)
    plain = both_ways(lambda x: (_plain(AFFINE, x) ** 3).sum())
    expected = plain(x[truth], v[truth])
    found = np.asarray(grads)[truth], np.asarray(product)[truth]
    # Sums of 8 terms that cancel, of up to 6 * 4 * 2**3.
    chex.assert_trees_all_close(found, expected, atol=8 * 200 * 1.2e-7, rtol=1e-5)


def test_a_sample_of_weight_two_counts_twice():
    x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    weight = np.float32([[2, 1, 0, 1], [1, 0.5, 0.5, 3]])
    fn = lambda affine, local: _layer(affine, local[0], weight=local[1])[1]  # noqa: E731
    found = COMPILED_FAST["vmap"](fn, 2, AFFINE, (x, weight))
    flat, w = x.reshape(-1, 3), weight.reshape(-1, 1)
    mean = (w * flat).sum(0) / w.sum()
    expected = Moments(mean, (w * (flat - mean) ** 2).sum(0) / w.sum())
    chex.assert_trees_all_close(found, expected, rtol=RTOL, atol=1e-7)


@pytest.mark.parametrize("strange", [-1.0, np.nan])
def test_weights_below_zero_and_nan_count_as_none(strange):
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    weight = np.float32([1, strange, 1, 1])
    found = _layer(AFFINE, x, weight=weight)[1]
    expected = _moments(x[[0, 2, 3]])
    chex.assert_trees_all_close(found, expected, rtol=RTOL, atol=1e-7)


@transforms_compiled_fast
def test_where_nothing_counts_running_statistics_stay_and_normalise(run):
    x = np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32)

    def fn(affine, x):
        y, _, updated = _layer(affine, x, weight=jnp.zeros(6))
        return updated, lax.psum(y, AXIS)

    updated, y = run(fn, 2, AFFINE, x)
    chex.assert_trees_all_equal(updated, RUNNING)
    expected = (x - RUNNING.mean) / np.sqrt(RUNNING.var + 1e-5) * AFFINE["scale"]
    expected = expected.sum(0) + 2 * AFFINE["bias"]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_an_empty_batch_is_one_where_nothing_counts():
    y, _, updated = _layer(AFFINE, jnp.zeros((0, 3)))
    assert y.shape == (0, 3)
    chex.assert_trees_all_equal(updated, RUNNING)


def test_a_pair_of_axes_is_one_set_of_replicas():
    names, x = ("node", AXIS), np.random.default_rng(0).normal(size=(2, 2, 5, 3))
    x = x.astype(np.float32)

    def replica(x):
        return _layer(AFFINE, x[0, 0], axis_name=names)[1]

    mapped = jax.shard_map(
        replica,
        mesh=harness.local_world(4, names, num_nodes=2).mesh,
        in_specs=P(*names),
        out_specs=P(),
    )
    found = harness.jit_fast(mapped)(x)
    chex.assert_trees_all_close(found, _moments(x), rtol=RTOL, atol=1e-7)


def test_a_step_that_knows_who_has_data_needs_no_weights():
    x = np.random.default_rng(0).normal(size=(3, 5, 3)).astype(np.float32)
    x[1] = np.nan  # a process that has joined runs on whatever is there.

    def fn(affine, local):
        x, amount = local
        with step_trace.running(StepTrace(), Weighting(amount, "weight")):
            y, taken, _ = _layer(affine, x)
            grads = jax.grad(lambda x: _layer(affine, x)[0].sum() * jnp.log(amount))(x)
        return taken, lax.pmax(jnp.isnan(grads).any(), AXIS)

    found, any_nan = COMPILED_FAST["vmap"](fn, 3, AFFINE, (x, np.float32([1, 0, 1])))
    chex.assert_trees_all_close(found, _moments(x[[0, 2]]), rtol=RTOL, atol=1e-7)
    assert not any_nan


@pytest.mark.parametrize("shape", [(4, 1, 1), (4, 5, 1), (5, 3), (3,), (4, 5, 3)])
def test_masks_are_those_of_flax(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 5, 3)).astype(np.float32)
    mask = rng.random(shape) < 0.6
    mask[..., 0] |= True
    coefficients = rng.normal(size=x.shape).astype(np.float32)
    if shape == (3,):
        mask[:] = True  # Flax has NaN for a feature without values.

    def flax(affine, x):
        layer = nn.BatchNorm(False, momentum=MOMENTUM, use_fast_variance=False)
        variables = {"params": affine, "batch_stats": RUNNING._asdict()}
        return layer.apply(variables, x, mask=mask, mutable=["batch_stats"])

    def ours(affine, x):
        y, _, updated = _layer(affine, x, mask=mask)
        return y, {"batch_stats": updated._asdict()}

    found, expected = (harness.jit_fast(fn)(AFFINE, x) for fn in (ours, flax))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    # Also through the outputs that do not count.
    found, expected = (
        _grads_alone(lambda a, x, fn=fn: fn(a, x)[0], AFFINE, x, coefficients)
        for fn in (ours, flax)
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-4)


@transforms_compiled_fast
def test_masks_weigh_between_replicas(run):
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 3)).astype(np.float32)
    mask = np.random.default_rng(1).random((3, 4, 5, 1)) < 0.5
    mask[1] = False
    x = np.where(mask, x, np.nan).astype(np.float32)

    def fn(affine, local):
        x, mask = local

        def loss(x):
            losses = _layer(affine, x, mask=mask)[0] ** 3
            return (losses * mask).sum() / mask.sum()  # 0 / 0 without any

        found = _layer(affine, x, mask=mask)[1]
        return found, lax.pmax(jnp.isnan(jax.grad(loss)(x)).any(), AXIS)

    found, any_nan = run(fn, 3, AFFINE, (x, mask))
    expected = _moments(x[mask[..., 0]])
    chex.assert_trees_all_close(found, expected, rtol=RTOL, atol=1e-6)
    assert not any_nan


def test_weights_and_masks_multiply():
    x = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    mask = np.random.default_rng(1).random((4, 5, 1)) < 0.5
    weight = np.float32([1, 0, 2, 1])
    found = _layer(AFFINE, x, weight=weight, mask=mask)[1]
    twice = np.concatenate([x[2][mask[2, :, 0]]] * 2)
    expected = _moments(np.concatenate([x[[0, 3]][mask[[0, 3], :, 0]], twice]))
    chex.assert_trees_all_close(found, expected, rtol=RTOL, atol=1e-7)


def test_complex_inputs_have_complex_means():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(2, 5, 3)) + 1j * rng.normal(size=(2, 5, 3))).astype("c8")

    def fn(x):
        options = _options(x)
        inputs = layer.count_samples(x, options)
        taken, _ = layer.take_moments(inputs, None, options, x.dtype)
        return taken, layer.normalize(inputs, taken, None, None, options)

    found, y = harness.jit_fast(jax.vmap(fn, axis_name=AXIS))(x)
    flat = x.reshape(-1, 3)
    expected = Moments(flat.mean(0), flat.var(0))
    for k in range(2):
        one = jax.tree.map(lambda v, k=k: v[k], found)
        chex.assert_trees_all_close(one, expected, rtol=RTOL, atol=1e-7)
    np.testing.assert_allclose((abs(y) ** 2).mean((0, 1)), 1.0, rtol=1e-4)


def test_weights_of_a_block_of_code_are_for_layers_given_none():
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    with sample_weights(np.float32([1, 1, 0, 1])):
        found = _layer(AFFINE, x)[1]
        own = _layer(AFFINE, x, weight=np.float32([1, 1, 1, 0]))[1]
    chex.assert_trees_all_close(found, _moments(x[[0, 1, 3]]), rtol=RTOL, atol=1e-7)
    chex.assert_trees_all_close(own, _moments(x[:3]), rtol=RTOL, atol=1e-7)
    chex.assert_trees_all_close(_layer(AFFINE, x)[1], _moments(x), rtol=RTOL, atol=1e-7)


def _error(kind, text, x, **options):
    with pytest.raises(kind, match=text):
        _layer(AFFINE, x, **options)


def test_bad_input_is_named():
    x = np.zeros((4, 3), np.float32)
    _error(ValueError, r"`weight` must hold one number.* \(4, 3\)", x, weight=[1.0] * 3)
    _error(ValueError, "`weight` must hold one", x, weight=np.ones((4, 1)))
    _error(TypeError, "must be real numbers, got complex", x, weight=np.ones(4, "c8"))
    _error(ValueError, r"`mask` of shape \(4,\) does not", x, mask=np.ones(4, bool))
    _error(ValueError, "`mask` of shape", x, mask=np.ones((1, 4, 3), bool))
    _error(ValueError, "`axis_name='model'` is not bound", x, axis_name="model")
    _error(ValueError, "not bound", x, axis_name=("node", AXIS))
    _error(ValueError, "must be one name or a pair", x, axis_name=())
    _error(ValueError, "has none left to take statistics over", np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"`axis=2` must name dimensions.*\(4, 3\)"):
        _options(x, axis=2)
    options = _options(x, axis=0)
    with pytest.raises(ValueError, match="is a feature axis here"):
        layer.count_samples(x, options, weight=np.ones(4))


def test_one_sample_a_replica_is_enough_where_an_axis_is_bound():
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    found = COMPILED_FAST["vmap"](lambda a, x: _layer(a, x)[1], 5, AFFINE, x)
    chex.assert_trees_all_close(found, _moments(x), rtol=RTOL, atol=1e-7)
