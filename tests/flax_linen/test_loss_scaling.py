"""`flax_linen.DynamicScale`: Flax's own, on the samples of all replicas."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training import dynamic_scale
from jax import lax

import jdp
from jdp import flax_linen
from tests import harness

N = 4
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(3, 8)).astype(np.float32) * 0.5,
    "v": RNG.normal(size=8).astype(np.float32) * 0.5,
}


def _batches():
    """Sixteen samples each; in the second, a sample of replica 2 overflows."""
    found = [RNG.normal(size=(16, 3)).astype(np.float32) for _ in range(6)]
    found[1][9] = 3e4
    return found


BATCHES = _batches()


def _loss(params, x):
    w, v = (params[k].astype(jnp.float16) for k in ("w", "v"))
    y = jnp.tanh(x.astype(jnp.float16) @ w) @ v + (x[:, 0] * 0.1).astype(jnp.float16)
    return (y.astype(jnp.float32) ** 2).mean(), {"count": jnp.ones(())}


def _advance(kind, axis_name, params, scale, x):
    grad_fn = kind.value_and_grad(scale, _loss, has_aux=True, **axis_name)
    scale, is_finite, (loss, _), grads = grad_fn(params, x)

    def descend(p, g):
        return jnp.where(is_finite, p - 0.1 * g, p)

    params = jax.tree.map(descend, params, grads)
    return (params, scale), {"loss": loss, "is_finite": is_finite, "grads": grads}


def _train(step, kind):
    scale = kind(growth_interval=2, scale=2.0**14)
    state, found = (PARAMS, scale), []
    for x in BATCHES:
        state, metrics = step(state, x)
        found.append((float(state[1].scale), int(state[1].fin_steps), metrics))
    return jax.device_get((found, state[0]))


def test_the_scale_is_that_of_one_device_whichever_replica_overflows():
    @jdp.data_parallel(
        world=harness.local_world(N), compiler_options=harness.fast_options()
    )
    def step(state, x):
        return _advance(flax_linen.DynamicScale, {}, *state, x)

    @harness.jit_fast
    def alone(state, x):
        return _advance(dynamic_scale.DynamicScale, {}, *state, x)

    found = _train(step, flax_linen.DynamicScale)
    expected = _train(alone, dynamic_scale.DynamicScale)
    finite = [bool(metrics["is_finite"]) for *_, metrics in found[0]]
    assert finite == [True, False, True, True, True, True]
    scales = [scale for scale, *_ in found[0]]
    assert scales[1] == scales[0] / 2 and scales[-1] > scales[1]
    for a, b in zip(found[0], expected[0], strict=True):
        assert a[:2] == b[:2] and a[2]["is_finite"] == b[2]["is_finite"]
        if a[2]["is_finite"]:
            # float16 has 11 bits, and gradients are sums of 16 samples.
            chex.assert_trees_all_close(a[2], b[2], atol=2e-4, rtol=2e-3)
    chex.assert_trees_all_close(found[1], expected[1], atol=2e-4)


def _on_replicas(fn, x):
    return harness.jit_fast(jax.vmap(fn, axis_name="data"))(x)


def test_all_replicas_agree_and_gradients_are_float32_for_any_parameters():
    params = jax.tree.map(lambda p: p.astype(np.float16), PARAMS)

    def fn(x):
        scale = flax_linen.DynamicScale()
        result = scale.value_and_grad(_loss, has_aux=True)(params, x)
        return result.finite, result.dynamic_scale.scale, result.grad

    finite, scale, grads = _on_replicas(fn, BATCHES[0].reshape(N, 4, 3))
    assert finite.all() and {g.dtype for g in jax.tree.leaves(grads)} == {
        np.dtype(np.float32)
    }
    bad = np.float32([1, 1, np.inf, 1])[:, None, None] * BATCHES[0].reshape(N, 4, 3)
    finite, scale, _ = _on_replicas(fn, bad)
    assert not finite.any()
    np.testing.assert_array_equal(scale, [2.0**15] * N)


def test_the_scale_neither_vanishes_nor_overflows():
    def fn(x):
        least = flax_linen.DynamicScale(scale=2.0, minimum_scale=1.5)
        largest = jnp.asarray(jnp.finfo(jnp.float32).max)
        most = flax_linen.DynamicScale(scale=largest, growth_interval=0)
        loss = lambda p, x: (p * x).sum()  # noqa: E731
        return (
            least.value_and_grad(loss)(jnp.ones(()), x * jnp.inf)[0].scale,
            most.value_and_grad(loss)(jnp.ones(()), x * 0)[0].scale,
        )

    least, most = _on_replicas(fn, BATCHES[0].reshape(N, 4, 3))
    assert set(least.tolist()) == {1.5}
    assert set(most.tolist()) == {float(np.finfo(np.float32).max)}


def test_weights_and_places_are_those_of_value_and_grad():
    weight = np.float32([1, 0, 2, 3])
    x = BATCHES[0].reshape(N, 4, 3)

    def loss(x, params, *, power):
        return (_loss(params, x)[0]) ** power

    def fn(x, value_and_grad):
        own = jnp.asarray(weight)[lax.axis_index("data")]
        return value_and_grad(loss, (1,), weight=own)(x, PARAMS, power=1)

    def scaled(x):
        scale = flax_linen.DynamicScale(scale=2.0**10)
        _, _, loss, grads = fn(x, scale.value_and_grad)
        return loss, grads

    found = _on_replicas(scaled, x)
    expected = _on_replicas(lambda x: fn(x, jdp.value_and_grad), x)
    chex.assert_trees_all_close(found, expected, rtol=2e-3, atol=2e-4)


def test_where_there_are_no_replicas_it_is_that_of_flax():
    found = flax_linen.DynamicScale().value_and_grad(_loss, has_aux=True)
    expected = dynamic_scale.DynamicScale().value_and_grad(_loss, has_aux=True)
    a, b = (fn(PARAMS, BATCHES[0]) for fn in (found, expected))
    chex.assert_trees_all_equal(a[1:], b[1:])
    assert type(a[0]) is flax_linen.DynamicScale
    with pytest.raises(ValueError, match="`axis_name='replica'` is not bound here"):
        fn = flax_linen.DynamicScale().value_and_grad(
            _loss, has_aux=True, axis_name="replica"
        )
        fn(PARAMS, BATCHES[0])


def test_the_scale_of_flax_without_an_axis_is_refused_in_a_step():
    @jdp.data_parallel(world=harness.local_world(N))
    def step(state, x):
        return _advance(dynamic_scale.DynamicScale, {}, *state, x)

    with pytest.raises(ValueError, match="may differ between the replicas"):
        step.trace((PARAMS, dynamic_scale.DynamicScale()), BATCHES[0])
