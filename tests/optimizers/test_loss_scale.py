"""Loss scale: float16 gradients that neither vanish nor ruin the parameters."""

import collections
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from tests import harness

N = 2
PARAMS = harness.oracle_params()
BATCHES = harness.oracle_batches(3)


def _half(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float16), tree)


def _loss(params, batch):
    """Of a network in float16; its gradients are below 6e-8."""
    return harness.oracle_loss(_half(params), _half(batch)).astype(jnp.float32) * 1e-7


def _scaled_step(tx, loss_fn=_loss):
    def step(params, opt_state, batch):
        def scaled(params, batch):
            return loss_fn(params, batch) * opt_state.scale

        loss, grads = jdp.value_and_grad(scaled)(params, batch)
        loss = loss / opt_state.scale
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jdp.data_parallel(
        step,
        num_states=2,
        world=harness.local_world(N),
        donate_state=False,
        compiler_options=harness.fast_options(),
    )


def _train(tx, batches, loss_fn=_loss):
    step = _scaled_step(tx, loss_fn)
    params, opt_state = PARAMS, tx.init(PARAMS)
    for batch in batches:
        params, opt_state, _ = step(params, opt_state, batch)
    return params, opt_state


def test_gradients_too_small_for_float16_train_as_in_float32():
    # Adam divides by the size of the gradient; its epsilon must be smaller.
    adam = optax.adam(0.01, eps=1e-14)
    params, opt_state = _train(
        jdp.dynamic_loss_scale(adam, init_scale=2.0**20), BATCHES
    )
    expected, _ = harness.train_alone(PARAMS, BATCHES, adam)
    # Half precision has 11 bits: a direction may be off by that, of a step of 0.01.
    chex.assert_trees_all_close(params, expected, atol=2e-3)
    assert int(opt_state.num_finite) == 3 and float(opt_state.scale) == 2.0**20
    unscaled, _ = _train(jdp.dynamic_loss_scale(adam, init_scale=1.0), BATCHES)
    chex.assert_trees_all_equal(unscaled, PARAMS)  # All gradients are zero.


def test_a_step_that_is_not_finite_changes_nothing_but_the_factor():
    """The overflow is in the samples of one replica; both leave the step out."""
    tx = jdp.dynamic_loss_scale(optax.adam(0.01), init_scale=2.0**10)
    bad = jax.tree.map(np.array, BATCHES[1])
    bad["x"][-1] = np.inf
    params, opt_state = _train(tx, [BATCHES[0], bad])
    expected, before = _train(tx, [BATCHES[0]])
    chex.assert_trees_all_equal(params, expected)
    chex.assert_trees_all_equal(opt_state.inner, before.inner)
    assert float(opt_state.scale) == 2.0**9 and int(opt_state.num_finite) == 0
    assert int(opt_state.inner[0].count) == 1


def _updates(tx, grads):
    state = tx.init(PARAMS)
    found = []
    for grad in grads:
        tree = jax.tree.map(lambda x, g=grad: jnp.full_like(x, g), PARAMS)
        updates, state = tx.update(tree, state, PARAMS)
        found.append((float(state.scale), int(state.num_finite)))
    return found, updates


def test_the_factor_grows_after_some_finite_steps():
    tx = jdp.dynamic_loss_scale(
        optax.sgd(1.0),
        init_scale=8,
        growth_interval=2,
        growth_factor=4,
        backoff_factor=0.25,
    )
    found, updates = _updates(tx, [1, 1, 1, np.nan, 1, 1])
    expected = [(8, 1), (32, 0), (32, 1), (8, 0), (8, 1), (32, 0)]
    assert found == expected
    assert float(updates["b0"][0]) == -1 / 8


def test_the_factor_stays_a_positive_number():
    tx = jdp.dynamic_loss_scale(optax.sgd(1.0), init_scale=2.0**127, growth_interval=1)
    assert _updates(tx, [1.0])[0] == [(2.0**127, 0)]
    tiny = float(np.finfo(np.float32).tiny)
    tx = jdp.dynamic_loss_scale(optax.sgd(1.0), init_scale=tiny)
    assert _updates(tx, [np.inf])[0] == [(tiny, 0)]


@pytest.mark.parametrize("wrap", [jdp.distributed_optimizer, jdp.zero1])
def test_it_goes_inside_an_optimizer_that_averages(wrap):
    tx = wrap(jdp.dynamic_loss_scale(optax.adam(0.01), growth_interval=2))

    def step(params, opt_state, batch):
        scale = jdp.loss_scale(opt_state)
        _, grads = jdp.local_gradients(harness.oracle_loss)(params, batch)
        grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    world = harness.local_world(N)
    step = jdp.data_parallel(
        step,
        num_states=2,
        world=world,
        donate_state=False,
        compiler_options=harness.fast_options(),
    )
    if wrap is jdp.zero1:
        tx = jdp.zero1(
            jdp.dynamic_loss_scale(optax.adam(0.01), growth_interval=2), world=world
        )
    params, opt_state = PARAMS, tx.init(PARAMS)
    bad = jax.tree.map(np.array, BATCHES[1])
    bad["x"][-1] = np.nan
    for batch in [*BATCHES, bad]:
        params, opt_state = step(params, opt_state, batch)
    expected, _ = harness.train_alone(PARAMS, BATCHES, optax.adam(0.01))
    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)
    # It has grown once, after two of three finite steps, and shrunk once.
    assert float(jdp.loss_scale(opt_state)) == 2.0**15


def _with_scale_of_its_own():
    """An optimizer whose state has a field of this name, and is no loss scale."""
    State = collections.namedtuple("State", ["scale"])
    return optax.GradientTransformation(
        lambda params: State(jnp.float32(3)), lambda g, state, params=None: (g, state)
    )


@pytest.mark.parametrize("wrap", [lambda tx: tx, jdp.zero1])
def test_the_scale_is_found_in_a_state_of_several_parts(wrap):
    world = harness.local_world(N)
    wrap = functools.partial(wrap, world=world) if wrap is jdp.zero1 else wrap
    inner = optax.chain(_with_scale_of_its_own(), optax.adam(0.1))
    scaled = jdp.dynamic_loss_scale(inner, init_scale=8.0)
    chained = optax.chain(_with_scale_of_its_own(), scaled)
    scale = jdp.loss_scale({"opt": wrap(chained).init(PARAMS), "step": 0})
    assert float(scale) == 8.0 and scale.dtype == jnp.float32
    with pytest.raises(ValueError, match="got 0"):
        jdp.loss_scale(wrap(inner).init(PARAMS))
    with pytest.raises(ValueError, match="got 2"):
        jdp.loss_scale(wrap(optax.chain(scaled, scaled)).init(PARAMS))


def test_gradients_that_are_not_averaged_are_refused():
    tx = jdp.dynamic_loss_scale(jdp.distributed_optimizer(optax.sgd(0.1)))

    @jdp.data_parallel(num_states=2, world=harness.local_world(N))
    def step(params, opt_state, batch):
        _, grads = jdp.local_gradients(harness.oracle_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with pytest.raises(ValueError, match="may differ between the replicas"):
        step(PARAMS, tx.init(PARAMS), BATCHES[0])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"init_scale": 0}, "`init_scale` must be above 0, got 0"),
        ({"growth_factor": 0.5}, "`growth_factor` must be at least 1, got 0.5"),
        ({"backoff_factor": 1}, "`backoff_factor` must be above 0 and below 1, got 1"),
        ({"growth_interval": 0}, "`growth_interval` must be at least 1, got 0"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        jdp.dynamic_loss_scale(optax.sgd(0.1), **options)


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="`init_scale` must be a number, got 'a'"):
        jdp.dynamic_loss_scale(optax.sgd(0.1), init_scale="a")
    with pytest.raises(TypeError, match="Call it: `jdp.dynamic_loss_scale"):
        jdp.dynamic_loss_scale(optax.sgd)
