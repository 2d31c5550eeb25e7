"""Nested functions, which JAX traces once: what they take from the step around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import jdp
from jdp import batch_norm
from jdp.flax_linen import SyncBatchNorm
from tests import harness

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
WEIGHT = np.array([1, 0, 0, 0, 1, 1, 1, 1], np.float32)
PARAMS = np.full(3, 0.1, np.float32)


def _loss(p, x, weight):
    return (((x @ p - 1.0) ** 2) * weight).sum() / weight.sum()


def _weighted(p, x, weight):
    return jdp.value_and_grad(_loss, weight=weight.sum())(p, x, weight)


def _scanned(p, x, weight):
    def body(carry, batch):
        loss, grads = _weighted(carry, *batch)
        return carry - 0.0 * grads, (loss, grads)

    _, (losses, grads) = lax.scan(body, p, (x[None], weight[None]))
    return losses[0], grads[0]


NESTED = {"jit": jax.jit, "checkpoint": jax.checkpoint, "scan": lambda fn: _scanned}


def _step(grad_fn, **options):
    def step(p, x, weight):
        loss, grads = grad_fn(p, x, weight)
        return p - 0.1 * grads, {"loss": loss, "own": _loss(p, x, weight)}

    options = {"donate_state": False, "world": harness.local_world(2), **options}
    return jdp.data_parallel(step, **options)


@pytest.mark.parametrize("nested", NESTED)
def test_a_weight_inside_of_a_nested_function_is_missed_in_every_trace(nested):
    grad_fn = NESTED[nested](_weighted)
    for step in (_step(grad_fn), _step(grad_fn)):
        for _ in range(2):
            with pytest.raises(ValueError, match="inside of a `scan`, a `cond` or a"):
                step(PARAMS, X, WEIGHT)


def test_a_graph_with_a_nested_function_stays_the_same_in_every_trace():
    @jax.jit
    def grad_fn(p, x, weight):
        del weight
        return jdp.value_and_grad(lambda p: jnp.mean((x @ p) ** 2))(p)

    step = _step(grad_fn, static_graph=True)
    step(PARAMS, X, WEIGHT)
    wide = np.ones((16, 3), np.float32), np.ones(16, np.float32)
    step(PARAMS, *wide)
    found = jdp.describe(step, PARAMS, *wide)
    assert len(found.synchronizations) == 1


@pytest.mark.parametrize("nested", [lambda fn: fn, jax.checkpoint, jax.jit])
def test_each_call_of_a_nested_model_has_the_sample_weights_around_it(nested):
    net = SyncBatchNorm(use_running_average=False)
    variables = net.init(jax.random.key(0), X)

    @nested
    def find_mean(x):
        _, updated = net.apply(variables, x, mutable=["batch_stats"])
        return updated["batch_stats"]["mean"]

    def step(state, x, first, second):
        del state
        with batch_norm.sample_weights(first):
            a = find_mean(x)
        with batch_norm.sample_weights(second):
            b = find_mean(x)
        return {"a": a, "b": b}, {}

    step = jdp.data_parallel(step, world=harness.local_world(2), donate_state=False)
    weights = WEIGHT, WEIGHT[::-1].copy()
    found, _ = step({"a": 0.0, "b": 0.0}, X, *weights)
    for mean, weight in zip((found["a"], found["b"]), weights, strict=True):
        np.testing.assert_allclose(mean, X[weight > 0].mean(0) * 0.01, rtol=1e-5)


class _Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return SyncBatchNorm(use_running_average=False)(x)


def _join_after_a_step():
    """Runs steps outside of a Join, in it while process 1 ends early, and outside."""
    world = jdp.init()
    net = _Net()
    variables = net.init(jax.random.key(0), X)

    def gradient(x):
        return jdp.value_and_grad(lambda p: jnp.mean((x @ p - 1.0) ** 2))(PARAMS)[1]

    def average(x):
        return jdp.average(x.mean(0))

    def statistics(x):
        _, updated = net.apply(variables, x, mutable=["batch_stats"])
        return jax.tree.leaves(updated)[0]

    found = {}
    for fn in (gradient, average, statistics):
        for nested in (jax.jit, jax.checkpoint, lambda fn: fn):
            inner = nested(fn)

            def step(state, x, inner=inner):
                return state * 0.0 + inner(x), {}

            step = jdp.data_parallel(step, donate_state=False)
            state, _ = step(jnp.zeros(3), X[:4])
            with jdp.Join([step]):
                for i in range(2 - world.process_index):
                    state, _ = step(state, X[4 * i :][:4])
            joined = np.asarray(step.last_state.addressable_data(0))
            after, _ = step(step.last_state, X[4 * world.process_index :][:4])
            after = np.asarray(after.addressable_data(0))
            found.setdefault(fn.__name__, []).append((joined, after))
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_nested_function_counts_only_processes_with_data_in_a_join():
    for found in harness.run_checked(_join_after_a_step, 2):
        for name, (jitted, checkpointed, plain) in found.items():
            for values in (jitted, checkpointed):
                np.testing.assert_allclose(values, plain, rtol=1e-6, err_msg=name)
        # The last batch of the Join is of process 0 alone.
        np.testing.assert_allclose(
            found["average"][0][0], X[4:].mean(0), rtol=1e-5, atol=1e-6
        )
