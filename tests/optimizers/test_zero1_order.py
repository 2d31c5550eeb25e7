"""Mutable arrays in an optimizer that runs in pieces: the order of the program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jdp
from tests import harness

GRADS = {
    "a": np.arange(1.0, 6.0, dtype=np.float32),
    "b": np.linspace(-2, 1, 6, dtype=np.float32).reshape(2, 3),
}


def _leaves(grads):
    return jax.tree.leaves(grads)


def _norm_in_a_sum(grads):
    total = jax.new_ref(jnp.zeros(()))
    for g in _leaves(grads):
        total[...] += jnp.sum(g * g)
    return jax.tree.map(lambda g: g / jnp.sqrt(total[...]), grads)


def _read_before_it_is_overwritten(grads):
    kept = jax.new_ref(jnp.zeros(()))
    kept[...] = jnp.max(grads["a"])
    first = kept[...]
    kept[...] = jnp.zeros(())
    kept[...] += jnp.sum(grads["b"])
    return jax.tree.map(lambda g: g * first + kept[...], grads)


def _overwritten_before_it_waits(grads):
    kept = jax.new_ref(jnp.ones(()))
    old = kept[...] * jnp.sum(grads["a"])
    kept[...] = old
    kept[...] = kept[...] + 1.0  # Needs nothing of others, but comes after.
    return jax.tree.map(lambda g: g + kept[...], grads)


def _whole_arrays(grads):
    kept = jax.new_ref(jnp.zeros(5))
    kept[...] = grads["a"]
    kept[0] = jnp.sort(grads["a"])[-1]
    found = kept[...]
    kept[...] = jnp.zeros(5)
    return {"a": found + kept[...], "b": grads["b"]}


def _in_a_loop(grads):
    kept = jax.new_ref(jnp.zeros(5))

    def body(i, carry):
        kept[i] = grads["a"][i] * i
        return carry

    lax.fori_loop(0, 5, body, 0)
    return {"a": kept[...], "b": grads["b"] * kept[...].sum()}


def _in_a_branch(grads):
    kept = jax.new_ref(jnp.zeros(()))
    kept[...] = jnp.sum(grads["b"])

    def more(g):
        kept[...] += jnp.sum(g)
        return g * 2.0

    a = lax.cond(jnp.sum(grads["a"]) > 0, more, lambda g: g, grads["a"])
    return {"a": a, "b": grads["b"] * kept[...]}


def _in_a_function(grads):
    kept = jax.new_ref(jnp.zeros(()))

    @jax.jit
    def add(ref, g):
        ref[...] += jnp.sum(g)

    add(kept, grads["a"])
    before = kept[...]
    add(kept, grads["b"])
    return jax.tree.map(lambda g: g * kept[...] + before, grads)


def _two_at_once(grads):
    one, two = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.zeros(()))
    one[...] += jnp.sum(grads["a"])
    two[...] += one[...] * jnp.min(grads["b"])
    one[...] += two[...]
    return jax.tree.map(lambda g: g * one[...] + two[...], grads)


@pytest.mark.parametrize(
    "update",
    [
        _norm_in_a_sum,
        _read_before_it_is_overwritten,
        _overwritten_before_it_waits,
        _whole_arrays,
        _in_a_loop,
        _in_a_branch,
        _in_a_function,
        _two_at_once,
    ],
)
def test_mutable_arrays_are_read_and_written_in_order(update):
    world = harness.local_world(2)
    tx = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda g, state, params=None: (update(g), state),
    )
    zero = jdp.zero1(tx, world=world)

    @jdp.data_parallel(world=world)
    def step(state, x):
        grads = jax.tree.map(lambda p: p * x.mean(), state[0])
        updates, opt = zero.update(grads, state[1], state[0])
        return (updates, opt), {}

    params = jdp.replicate(world, GRADS)
    state, _ = step((params, zero.init(params)), np.ones(4, np.float32))
    expected = jax.jit(update)(GRADS)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), state[0], expected
    )


def test_a_branch_on_an_own_sample_that_was_written_to_a_mutable_array_is_refused():
    world = harness.local_world(2)

    def update(grads, state, params=None, *, value_fn):
        kept = jax.new_ref(jnp.zeros(()))
        kept[...] = value_fn(0.0)
        return jax.tree.map(lambda g: g * kept[...], grads), state

    tx = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )
    zero = jdp.zero1(tx, world=world)

    @jdp.data_parallel(world=world)
    def step(state, x):
        grads = jax.tree.map(lambda p: p * x.mean(), state[0])
        updates, opt = zero.update(
            grads, state[1], state[0], value_fn=lambda _: x.mean()
        )
        return (updates, opt), {}

    params = jdp.replicate(world, GRADS)
    with pytest.raises(ValueError, match="may differ between the replicas"):
        step((params, zero.init(params)), np.arange(4, dtype=np.float32))


def test_padding_of_pieces_is_finite():
    world = harness.local_world(2)

    def update(grads, state, params=None):
        new = jax.tree.map(lambda g, s: g / jnp.sqrt(s + g * g), grads, state)
        return new, new  # 0 / 0 where all is 0.

    tx = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )
    zero = jdp.zero1(tx, world=world)

    @jdp.data_parallel(world=world)
    def step(state, x):
        grads = jax.tree.map(lambda p: jnp.ones_like(p) * x.mean(), state[0])
        updates, opt = zero.update(grads, state[1], state[0])
        return (updates, opt), {}

    params = jdp.replicate(world, GRADS)
    with jax.debug_nans(True):
        state, _ = step((params, zero.init(params)), np.ones(4, np.float32))
    for x in jax.tree.leaves(state):
        assert np.isfinite(x).all()
