"""The noise of gradients is found where they are synchronised, and sends nothing."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jdp
from tests import harness
from tests.transforms import AXIS, COMPILED_FAST, transforms_compiled_fast

# Samples of each replica; a batch has six, and what is behind them is padding.
COUNTS = np.array([3, 0, 6, 2])
DIM = 5
# Sums of up to 24 terms of order 1, squared, in another order.
RTOL = 2 * 24 * 1.2e-7


def _loss(params, batch, weight):
    """Its gradient is `params` minus the mean of the samples."""
    squares = 0.5 * jnp.sum((params["p"] - batch) ** 2, -1)
    return (squares * weight).sum() / weight.sum()


def _uneven():
    batch = np.random.default_rng(0).normal(size=(4, 6, DIM)).astype(np.float32)
    weight = (np.arange(6) < COUNTS[:, None]).astype(np.float32)
    return np.where(weight[..., None] > 0, batch, np.nan), weight


def _padded(loss_fn):
    """A loss that the NaN in the padding does not reach."""

    def wrapped(params, batch, weight):
        return loss_fn(params, jnp.where(weight[:, None] > 0, batch, 0.0), weight)

    return wrapped


PARAMS = {"p": np.full(DIM, 0.3, np.float32)}


def _expected(divide_by):
    """(mean |g|², |mean g|², what of a sample's variance is in each), in numpy."""
    batch, weight = _uneven()
    has_data = COUNTS > 0
    sums = np.where(weight[..., None] > 0, batch, 0).sum(1)
    counts = np.where(has_data, COUNTS, 1)
    grads = PARAMS["p"] - sums / counts[:, None]
    amounts = COUNTS if divide_by == "weight" else has_data.astype(float)
    shares = amounts / amounts.sum()
    inverse = 1 / counts
    return (
        (shares * (grads**2).sum(1)).sum(),
        ((shares[:, None] * grads).sum(0) ** 2).sum(),
        (shares * inverse).sum(),
        (shares**2 * inverse).sum(),
    )


@transforms_compiled_fast
@pytest.mark.parametrize("divide_by", ["weight", "active", "world"])
def test_norms_are_those_of_the_gradients_of_those_with_data(run, divide_by):
    def step(params, local):
        batch, weight = local
        options = dict(weight=weight.sum(), divide_by=divide_by, find_norms=True)
        both = jdp.value_and_grad(_padded(_loss), **options)(params, batch, weight)
        _, grads = jdp.local_gradients(_padded(_loss))(params, batch, weight)
        alone = jdp.sync_gradients(grads, **options)
        pieces = jdp.accumulate_gradients(
            _padded(_loss), 3, **(options | {"weight": weight})
        )
        return both, alone, pieces(params, batch, weight)

    found = run(step, 4, PARAMS, _uneven())
    ((_, grads), norms), (alone, of_alone), ((_, _), of_pieces) = found
    expected = _expected(divide_by)
    for one in (norms, of_alone, of_pieces):
        assert isinstance(one, jdp.GradientNorms)
        np.testing.assert_allclose(one, expected, rtol=RTOL)
    chex.assert_trees_all_close(grads, alone, rtol=RTOL, atol=1e-7)


def test_without_weights_a_batch_of_a_replica_counts_as_one():
    batch = np.random.default_rng(1).normal(size=(4, 6, DIM)).astype(np.float32)

    def step(params, batch):
        grad_fn = jdp.value_and_grad(_loss, find_norms=True)
        return grad_fn(params, batch, jnp.ones(6))[1]

    norms = COMPILED_FAST["vmap"](step, 4, PARAMS, batch)
    assert (norms.noise_in_local, norms.noise_in_mean) == (1.0, 0.25)
    # |G|² and S are unbiased: the variance of the replicas' gradients is S.
    grads = PARAMS["p"] - batch.mean(1)
    _, state = jdp.noise_scale().update(norms, jdp.noise_scale().init())
    np.testing.assert_allclose(state.noise, grads.var(0, ddof=1).sum(), rtol=1e-5)
    rest = (grads.mean(0) ** 2).sum() - state.noise / 4
    np.testing.assert_allclose(state.square, rest, rtol=1e-4)


@pytest.mark.parametrize("is_even", [True, False])
def test_the_scale_is_the_one_that_is_known(is_even):
    """Samples of variance 4 in five dimensions, at a distance of 2 from the optimum."""
    params = {"p": jnp.zeros(DIM).at[0].set(2.0)}
    counts = jnp.array([4] * 8 if is_even else [1, 6, 0, 2, 6, 5, 3, 4])
    metric = jdp.noise_scale(decay=0.999)

    def replica(key, count):
        batch = 2 * jax.random.normal(key, (6, DIM))
        weight = (jnp.arange(6) < count).astype(jnp.float32)
        grad_fn = jdp.value_and_grad(_loss, weight=weight.sum(), find_norms=True)
        return grad_fn(params, batch, weight)[1]

    @harness.jit_fast
    def train(key):
        def step(state, key):
            keys = jax.random.split(key, 8)
            norms = jax.vmap(replica, axis_name=AXIS)(keys, counts)
            scale, state = metric.update(jax.tree.map(lambda x: x[0], norms), state)
            return state, scale

        return jax.lax.scan(step, metric.init(), jax.random.split(key, 4000))

    state, scales = train(jax.random.key(0))
    # Four standard errors of a mean over some 1000 steps or more.
    np.testing.assert_allclose(state.square, 4.0, rtol=0.05)
    np.testing.assert_allclose(state.noise, 20.0, rtol=0.05)
    np.testing.assert_allclose(scales[-1], 5.0, rtol=0.08)


def _collectives(dtype, **options):
    """How many collectives a step has, as StableHLO."""
    params = {"a": jnp.ones(3, dtype), "b": jnp.ones(2, dtype)}

    def step(params, x):
        def loss_fn(params):
            total = sum(jnp.sum(p * x[0].astype(dtype)) for p in params.values())
            return total.astype(jnp.float32)

        return jdp.value_and_grad(loss_fn, **options)(params)

    mapped = jax.shard_map(
        step, mesh=harness.local_world(2).mesh, in_specs=(P(), P(AXIS)), out_specs=P()
    )
    text = jax.jit(mapped).lower(params, jnp.ones(2)).as_text()
    return text.count("all_reduce") + text.count("all_gather")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("hook", [None, jdp.hooks.cast(jnp.bfloat16)])
def test_norms_cost_no_collective(dtype, hook):
    plain = _collectives(dtype, hook=hook)
    assert _collectives(dtype, hook=hook, find_norms=True) == plain > 0


def test_norms_stand_between_what_was_used_and_the_state_of_a_hook():
    hook = jdp.hooks.top_k(0.5)

    def replica(params, x):
        grad_fn = jdp.value_and_grad(
            lambda p: (
                jax.lax.cond(x > 0, lambda: p["p"], lambda: p["p"] * 1) * x
            ).sum(),
            find_unused=True,
            find_norms=True,
            hook=hook,
            hook_state=jdp.hooks.init_state(hook, params),
        )
        ((_, used), norms), _ = grad_fn(params)
        return used, norms

    params = {"p": np.ones(DIM, np.float32)}
    used, norms = COMPILED_FAST["vmap"](replica, 2, params, np.float32([1, 3]))
    assert np.all(used["p"])
    # Their own gradients are exact, whatever the hook sends of them.
    assert norms.local == DIM * 5.0


def test_gradients_that_were_averaged_in_the_backward_pass_have_no_norms_left():
    def loss_fn(params):
        return jdp.sync_in_backward(params)["p"].sum()

    grad_fn = jdp.value_and_grad(loss_fn, find_norms=True)
    with pytest.raises(ValueError, match="`find_norms` keeps gradients local"):
        jax.vmap(lambda x: grad_fn({"p": x}), axis_name=AXIS)(jnp.ones((2, 3)))


def _norms(local, mean, in_local=1.0, in_mean=0.5):
    return jdp.GradientNorms(*map(jnp.float32, (local, mean, in_local, in_mean)))


def test_steps_that_say_nothing_are_left_out():
    metric = jdp.noise_scale()
    state = metric.init()
    scale, state = metric.update(_norms(2.0, 2.0, 1.0, 1.0), state)  # of one replica.
    assert np.isnan(scale) and state.num_steps == 0
    scale, state = metric.update(_norms(4.0, 3.0), state)
    assert (scale, state.square, state.noise, state.num_steps) == (1.0, 2.0, 2.0, 1)
    for strange in (np.nan, np.inf):
        scale, after = metric.update(_norms(strange, 3.0), state)
        assert scale == 1.0 and after == state


def test_first_steps_count_the_same_and_later_ones_by_the_decay():
    metric = jdp.noise_scale(decay=0.75)
    state = metric.init()
    squares = [1.0, 4.0, 2.0, 7.0, 3.0, 8.0]
    for square in squares:
        _, state = metric.update(_norms(square + 1, square + 0.5), state)
    mean = functools.reduce(lambda a, x: 0.75 * a + 0.25 * x, squares[4:], 3.5)
    np.testing.assert_allclose(state.square, mean, rtol=1e-6)
    np.testing.assert_allclose(state.noise, 1.0, rtol=1e-6)


def test_without_a_gradient_under_the_noise_the_scale_is_infinite():
    metric = jdp.noise_scale()
    scale, _ = metric.update(_norms(1.0, 0.4), metric.init())
    assert scale == np.inf


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match=r"`decay` must be at least 0 and less than 1"):
        jdp.noise_scale(decay=decay)
