"""`rows` is exact, with few rows and with too many, on every replica alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jdp
from jdp import hooks
from jdp.hooks import base
from tests import harness

R, C = 24, 5
TREE = {"table": (R, C), "other": (2 * R, C), "kernel": (3, 4), "b": (7,)}


def _sum(hook, grads, **options):
    """Sums gradients, (n, ...) each, over n replicas; what every replica gets."""
    n = len(jax.tree.leaves(grads)[0])
    mean = harness.jit_fast(
        jax.vmap(
            lambda g: jdp.sync_gradients(g, hook=hook, **options), axis_name="data"
        )
    )(grads)
    return jax.tree.map(lambda x: x * np.asarray(n, x.dtype), mean)


def _grads(counts, dtype=np.float32, seed=0):
    """Gradients of which replica i has `counts[i]` rows of a table."""
    rng = np.random.default_rng(seed)
    grads = {}
    for name, shape in TREE.items():
        x = rng.integers(-8, 9, size=(len(counts), *shape)) / 4 + 0.125
        if name in ("table", "other"):
            for i, count in enumerate(counts):
                x[i, rng.permutation(shape[0])[count:]] = 0
        grads[name] = x.astype(dtype)
    return grads


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, R), min_size=2, max_size=2), st.integers(0, 9))
def test_every_number_of_rows_sums_exactly(counts, seed):
    """Eighths add up without rounding, so that the order does not matter."""
    grads = _grads(counts, seed=seed)
    found = _CHECKED(grads)
    for name, x in grads.items():
        for i in range(len(counts)):
            np.testing.assert_array_equal(found[name][i], x.sum(0))


_CHECKED = harness.jit_fast(
    lambda grads: jax.tree.map(
        lambda x: 2 * x,
        jax.vmap(lambda g: jdp.sync_gradients(g, hook=hooks.rows(4)), axis_name="data")(
            grads
        ),
    )
)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("counts", [[2, 0, 1], [2, 0, 9]], ids=["few", "many"])
def test_three_replicas_in_every_dtype(dtype, counts):
    grads = _grads(counts, dtype)
    found = _sum(hooks.rows(2), grads)
    for name, x in grads.items():
        expected = x.astype(np.float32).sum(0)
        # The mean is rounded once, and times 3 once more.
        rtol = 2 * float(jnp.finfo(dtype).eps)
        assert found[name].dtype == dtype
        for row in np.asarray(found[name], np.float32):
            np.testing.assert_allclose(row, expected, rtol=rtol)


def test_a_nan_counts_as_a_row():
    grads = _grads([1, 1])
    grads["table"][:] = 0
    grads["table"][0, 7, 2] = np.nan
    found = _sum(hooks.rows(1), grads)["table"]
    assert np.isnan(found[:, 7, 2]).all()
    assert np.isfinite(np.delete(found, 7, axis=1)).all()


def test_rows_are_what_is_sent_where_they_fit():
    aval = jdp.trees.buckets.BucketAval(list(TREE.values()), np.dtype("float32"))
    n, k = 2, 2
    found = base.measure(hooks.rows(k), [aval], n).num_bytes
    rest = 2 * (n - 1) / n * 4 * (7 + 1)  # one number says whether they fit.
    of_tables = k * (2 * (C * 4 + 4) + (4 * 4 + 4))
    assert found == pytest.approx(rest + (n - 1) * of_tables)


def test_a_table_that_would_not_become_smaller_travels_whole():
    aval = jdp.trees.buckets.BucketAval([(R, C)], np.dtype("float32"))
    found = base.measure(hooks.rows(R), [aval], 4).num_bytes
    assert found == 2 * 3 / 4 * R * C * 4


@pytest.mark.parametrize("wrap", ["value_and_grad", "distributed_optimizer", "zero1"])
def test_an_embedding_trains_as_without_it(wrap):
    world = harness.local_world(4)
    tokens = np.random.default_rng(0).integers(0, 5, size=(6, 8, 3)).astype(np.int32)
    tokens[3] += np.arange(24).reshape(8, 3)  # more than fit, in one step.
    rng = np.random.default_rng(1)
    params = {
        "table": rng.normal(size=(64, 4)).astype(np.float32),
        "out": rng.normal(size=(4,)).astype(np.float32),
    }

    def loss(p, tokens):
        return jnp.mean(jnp.tanh(p["table"][tokens].mean(1) @ p["out"]) ** 2)

    def train(hook):
        options = {"hook": hook} if hook else {}
        if wrap == "zero1":
            tx = jdp.zero1(optax.sgd(0.5), world=world, **options)
        elif wrap == "distributed_optimizer":
            tx = jdp.distributed_optimizer(optax.sgd(0.5), world=world, **options)
        else:
            tx = optax.sgd(0.5)

        @jdp.data_parallel(world=world, donate_state=False)
        def step(state, tokens):
            weight = (tokens[0, 0] + 1).astype(jnp.float32)
            if wrap == "value_and_grad":
                grad_fn = jdp.value_and_grad(loss, weight=weight, **options)
            else:
                grad_fn = jdp.local_gradients(loss)
            _, grads = grad_fn(state[0], tokens)
            updates, opt = tx.update(grads, state[1], state[0])
            return (optax.apply_updates(state[0], updates), opt), {}

        state = params, tx.init(params)
        for batch in tokens:
            state, _ = step(state, batch)
        return state[0]

    found, expected = train(hooks.rows(8)), train(None)
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-6)
        assert np.abs(x - params[name]).max() > 1e-3
