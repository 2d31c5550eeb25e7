"""Updates of leaves: cut from one program, they are what the optimizer does alone."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.optimizers import leaf_updates
from tests import rarely

PARAMS = {
    "a": [jnp.float32([[1, 2], [3, 4]]), jnp.float32([5, 6])],
    "b": {"c": jnp.float32([[1, 0], [0, 1]]), "d": jnp.arange(3, dtype=jnp.bfloat16)},
    "e": jnp.float32(2),
}
GRADS = jax.tree.map(lambda x: (x * 0.5 + 1).astype(x.dtype), PARAMS)
USED = {"a": [True, False], "b": {"c": jnp.bool_(True), "d": True}, "e": jnp.bool_(0)}


def _scaled_by(value_name):
    def update(updates, state, params=None, **extra):
        del params
        factor = extra[value_name]
        if jax.tree.structure(factor) != jax.tree.structure(updates):
            factor = jax.tree.map(lambda _: factor, updates)
        return jax.tree.map(
            lambda g, f: (g * f).astype(g.dtype), updates, factor
        ), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _a_pair_for_each():
    """A state with two arrays for each parameter, which is no column."""

    def init(params):
        return jax.tree.map(lambda x: (jnp.zeros_like(x), jnp.ones_like(x)), params)

    def update(updates, state, params=None):
        del params
        new = jax.tree.map(lambda g, s: (s[0] + g, s[1]), updates, state)
        return jax.tree.map(lambda g, s: s[0] * s[1], updates, new), new

    return optax.GradientTransformation(init, update)


TXS = {
    "adamw": optax.adamw(optax.cosine_decay_schedule(0.1, 5), weight_decay=0.1),
    "masked": optax.masked(optax.adam(0.1), {"a": [True, False], "b": True, "e": True}),
    "labels": optax.multi_transform(
        {"x": optax.sgd(0.1, momentum=0.9), "y": optax.rmsprop(0.1)},
        {"a": ["x", "y"], "b": {"c": "y", "d": "x"}, "e": "y"},
    ),
    "labels of a prefix": optax.multi_transform(
        {"x": optax.sgd(0.1, momentum=0.9), "y": optax.rmsprop(0.1)},
        {"a": "x", "b": "y", "e": "y"},
    ),
    "by rank": optax.masked(
        optax.lion(0.1), functools.partial(jax.tree.map, lambda x: jnp.ndim(x) > 1)
    ),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "hyperparams": optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(
        0.1
    ),
    "a value for all": _scaled_by("value"),
    "a value for each": _scaled_by("values"),
    "every second step": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "a pair for each": _a_pair_for_each(),
}
EXTRA = {
    "value": np.float32(3),
    "values": jax.tree.map(lambda x: x[..., None].sum(-1), GRADS),
}
# These cannot be cut.
WHOLE = {"every second step", "a pair for each", "labels of a prefix"}


def _run(tx, used=USED, num_steps=3):
    tx = jdp.skip_unused(tx)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(num_steps):
        updates, state = tx.update(GRADS, state, params, used=used, **EXTRA)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", rarely.cases(TXS, often=list(TXS)[::3]))
def test_they_are_what_the_optimizer_does_with_each_parameter_alone(name, monkeypatch):
    found = []
    trace = leaf_updates.trace
    monkeypatch.setattr(
        leaf_updates, "trace", lambda *args: found.append(trace(*args)) or found[-1]
    )
    params, state = _run(TXS[name])
    assert (not found or found[0] is None) == (name in WHOLE)
    monkeypatch.setattr(leaf_updates, "find_layout", lambda *_: None)
    expected, expected_state = _run(TXS[name])
    chex.assert_trees_all_equal(params, expected)
    chex.assert_trees_all_equal(state, expected_state)
    chex.assert_trees_all_equal_dtypes(state, expected_state)


def test_the_optimizer_is_traced_as_often_for_many_parameters_as_for_few():
    calls = []

    def update(updates, state, params=None):
        calls.append(len(jax.tree.leaves(updates)))
        return optax.adam(0.1).update(updates, state, params)

    def trace(num):
        calls.clear()
        tx = jdp.skip_unused(optax.GradientTransformation(optax.adam(0.1).init, update))
        params = {f"p{i}": np.ones((2, 2 + i % 2), np.float32) for i in range(num)}
        used = dict.fromkeys(params, jnp.bool_(True))
        jaxpr = jax.make_jaxpr(functools.partial(tx.update, used=used))(
            params, tx.init(params), params
        )
        return jaxpr, len(calls)

    _, few = trace(2)
    jaxpr, many = trace(40)
    assert many == few
    programs = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if "jaxpr" in eqn.params]
    assert len(programs) == 40
    assert len(set(map(id, programs))) == 2  # one for each shape.


def test_parameters_of_other_programs_do_not_share_one():
    """Learning rates of the program, which differ in a number alone."""
    rates = {"a": 0.5, "b": -0.0, "c": 0.0, "d": 0.5}
    tx = optax.multi_transform(
        {name: optax.scale(rate) for name, rate in rates.items()},
        {name: name for name in rates},
    )
    tx = jdp.skip_unused(tx)
    grads = dict.fromkeys(rates, jnp.ones(2))
    used = dict.fromkeys(rates, True)
    update = jax.jit(functools.partial(tx.update, used=used))
    updates, _ = update(grads, tx.init(grads))
    for name, rate in rates.items():
        assert np.asarray(updates[name]).tobytes() == np.float32([rate] * 2).tobytes()


def test_what_a_scan_hands_on_and_a_gradient_through_an_update():
    tx = jdp.skip_unused(optax.adam(0.1))
    used = jax.tree.map(jnp.bool_, USED)

    def train(rate):
        def step(carry, _):
            params, state = carry
            grads = jax.tree.map(lambda g: (g * rate).astype(g.dtype), GRADS)
            updates, state = tx.update(grads, state, params, used=used)
            return (optax.apply_updates(params, updates), state), None

        start = jax.tree.map(jnp.asarray, PARAMS)
        (params, _), _ = jax.lax.scan(step, (start, tx.init(PARAMS)), length=2)
        return params["a"][0].sum()

    value, grad = jax.value_and_grad(train)(1.0)
    expected = _run(optax.adam(0.1), num_steps=2)[0]["a"][0].sum()
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert np.isfinite(grad)


def _count():
    """A state that is one array, between two that are none."""
    return optax.GradientTransformation(
        lambda _: jnp.zeros([], jnp.int32), lambda g, n, p=None: (g, n + 1)
    )


@pytest.mark.parametrize("around", [lambda tx: tx, lambda tx: optax.MultiSteps(tx, 1)])
def test_a_chain_as_long_as_a_tuple_of_parameters_is_no_tree_of_them(around):
    params = (jnp.ones(2), jnp.ones(3), jnp.ones(4))
    tx = jdp.skip_unused(around(optax.chain(optax.clip(1.0), _count(), optax.sgd(1.0))))
    updates, state = tx.update(params, tx.init(params), used=(True, True, False))
    chex.assert_trees_all_equal(updates, (-params[0], -params[1], 0 * params[2]))
    tx.update(params, state, used=(True, True, True))


@pytest.mark.parametrize("flag", [True, np.bool_(True), np.int32(1)])
def test_flags_and_numbers_of_numpy_stay_what_they_are(flag):
    def update(updates, state, params=None, *, flip):
        del params
        return (jax.tree.map(jnp.negative, updates) if flip else updates), state

    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = jdp.skip_unused(tx)
    grads = {"a": jnp.ones(2), "b": jnp.ones(3)}
    used = {"a": True, "b": jnp.bool_(True)}
    updates, _ = tx.update(grads, tx.init(grads), used=used, flip=flag)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.negative, grads))


def test_where_nothing_is_traced_an_optimizer_may_look_at_its_state():
    def update(updates, count, params=None):
        del params
        rate = 1.0 if count == 0 else 2.0
        return jax.tree.map(lambda g: rate * g, updates), count + 1

    tx = jdp.skip_unused(optax.GradientTransformation(lambda _: 0, update))
    grads = {"a": jnp.ones(2), "b": jnp.ones(3)}
    state = tx.init(grads)
    for is_used in False, True:
        used = {"a": True, "b": jnp.bool_(is_used)}
        updates, state = tx.update(grads, state, used=used)
    chex.assert_trees_all_equal(updates, {"a": 2 * jnp.ones(2), "b": jnp.ones(3)})


def test_under_a_vmap_of_its_own_nothing_is_compiled_for_each_call():
    tx = jdp.skip_unused(optax.sgd(0.1))
    grads = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 4))}
    used = {"a": jnp.ones(3, bool), "b": jnp.zeros(3, bool)}
    state = jax.vmap(tx.init)(grads)

    def step():
        return jax.vmap(lambda g, s, u: tx.update(g, s, used=u))(grads, state, used)

    step()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event)
    )
    try:
        updates, _ = step()
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [event for event in compiled if "backend_compile" in event]
    chex.assert_trees_all_close(updates["a"], -0.1 * grads["a"])
    chex.assert_trees_all_equal(updates["b"], 0 * grads["b"])


def test_a_state_of_another_type_of_one_parameter_stays_its_own():
    """A weak type of the first would change what the others compute with."""
    tx = optax.GradientTransformation(
        lambda _: jnp.float32(0.1),
        lambda g, rate, p=None: (jax.tree.map(lambda x: -rate * x, g), rate),
    )
    tx = jdp.skip_unused(tx)
    grads = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.full(2, 1.305, jnp.bfloat16)}
    state = tx.init(grads)
    used = {"a": True, "b": True}
    expected, _ = tx.update(grads, state, used=used)
    state.leaf_states["['a']"] = 0.1
    updates, _ = tx.update(grads, state, used=used)
    chex.assert_trees_all_equal(updates["b"], expected["b"])
    assert updates["b"].dtype == expected["b"].dtype
