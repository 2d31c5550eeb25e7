"""Draws that a step makes for the samples of all replicas itself stay as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdp
from tests import harness, rarely

N = 4
KEY = jax.random.key(5)
X = np.random.default_rng(0).uniform(1, 3, size=(8, 3)).astype(np.float32)
W = np.linspace(0.5, 1.5, 3, dtype=np.float32)


def _compute(fn, w=W, key=KEY, x=X):
    """Returns the loss and the gradient of a step on four replicas."""

    @jdp.data_parallel(world=harness.local_world(N), donate_state=False)
    def step(state, x):
        loss, grad = jdp.value_and_grad(fn)(state[0], state[1], x)
        return state, (loss, grad)

    return step((w, key), x)[1]


def _expect(fn, reference):
    found = _compute(fn)
    expected = harness.jit_fast(jax.value_and_grad(reference))(W, KEY, X)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def _mask(key, x):
    return x * jax.random.bernoulli(key, 0.5, x.shape)


_remade = jax.checkpoint(_mask)
_with_rule = jax.custom_vjp(_mask)
_with_rule.defvjp(lambda k, x: (_mask(k, x), k), lambda k, g: (None, _mask(k, g)))


def _layers(fn):
    def run(key, x):
        keys = jax.random.split(key, 3)
        return lax.scan(lambda x, k: (fn(k, jnp.sin(x)), None), x, keys)[0]

    return run


def _layers_with_a_carried_key(key, x):
    def layer(carry, _):
        x, key = carry
        key, own = jax.random.split(key)
        return (_remade(own, jnp.sin(x)), key), None

    return lax.scan(layer, (x, key), None, length=3)[0][0]


def _in_branch(fn):
    def run(key, x):
        return lax.cond(jax.random.uniform(key) < 2, fn, lambda k, x: x, key, x)

    return run


def _key_per_sample(key, x):
    def one(key, x):
        return x * jax.random.normal(key, x.shape)

    return jax.vmap(one)(jax.random.split(key, len(x)), x)


# As on local samples, too.
LAYERS = {
    "plain": _mask,
    "jit": jax.jit(_mask),
    "checkpoint": _remade,
    "checkpoint in jit": jax.jit(lambda k, x: _remade(k, jnp.sin(x))),
    "custom_vjp": _with_rule,
    "scan": _layers(_mask),
    "checkpoint in scan": _layers(_remade),
    "a carried key": _layers_with_a_carried_key,
    "cond": _in_branch(_mask),
    "checkpoint in cond": _in_branch(_remade),
    "a key per sample": _key_per_sample,
    "a key per sample, again": jax.checkpoint(_key_per_sample),
}


def _positions(key, x):
    folded = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(x)))
    return jax.vmap(_mask)(folded, x)


def _loop_over_samples(key, x):
    def body(key, x):
        return jax.random.split(key)[0], _mask(key, jnp.sin(x))

    return lax.scan(body, key, x)[1]


def _while_over_samples(key, x):
    def body(carry):
        i, key, out = carry
        key, own = jax.random.split(key)
        return i + 1, key, out.at[i].add(_mask(own, x[i]))

    x = lax.stop_gradient(x)
    start = jnp.zeros((), int), key, jnp.zeros_like(x)
    return lax.while_loop(lambda c: c[0] < len(x), body, start)[2]


# Of all samples. On the samples of a replica, they are refused or others.
OF_ALL = {
    "positions": _positions,
    "a loop over samples": _loop_over_samples,
    "a while loop over samples": _while_over_samples,
    "choice": lambda k, x: jax.random.choice(k, x, (4,), replace=False),
    "permutation": lambda k, x: x[jax.random.permutation(k, len(x))],
    "pairs": lambda k, x: jnp.sin(x @ x.T) * jax.random.normal(k, (len(x), len(x))),
    "gamma": lambda k, x: x * jax.random.gamma(k, jnp.abs(lax.stop_gradient(x))),
}


@pytest.mark.parametrize(
    "name",
    rarely.cases(LAYERS | OF_ALL, often=[*list(LAYERS)[1::4], *list(OF_ALL)[:-1:2]]),
)
def test_a_draw_for_gathered_samples_is_complete(name):
    layer = (LAYERS | OF_ALL)[name]

    def loss(w, key, x, gather):
        z = jnp.sin(x * w)
        out = layer(key, gather(z))
        weights = jnp.arange(1.0, 1 + out[..., 0].size)[:, None]
        return ((z.mean(-1)[:, None, None] - weights * out) ** 2).mean()

    _expect(
        lambda *args: loss(*args, lambda x: lax.all_gather(x, "data", tiled=True)),
        lambda *args: loss(*args, lambda x: x),
    )


@pytest.mark.parametrize("name", rarely.cases(LAYERS, often=list(LAYERS)[::3]))
def test_the_same_layer_draws_for_local_samples(name):
    def loss(w, key, x):
        return jnp.cos(LAYERS[name](key, jnp.sin(x * w))).mean()

    _expect(loss, loss)


def _noise(key, x):
    return jax.random.normal(key, (N * len(x), 3))


def _first(x):
    return lax.axis_index("data") * len(x)


def _own_keys(key, x):
    keys = jax.random.split(key, N * len(x))
    own = lax.dynamic_slice_in_dim(keys, _first(x), len(x))
    return jax.vmap(lambda k: jax.random.normal(k, (3,)))(own)


TAKEN = {
    "dynamic_slice": lambda k, x: lax.dynamic_slice_in_dim(
        _noise(k, x), _first(x), len(x)
    ),
    "rows": lambda k, x: _noise(k, x).reshape(N, -1, 3)[lax.axis_index("data")],
    "take": lambda k, x: jnp.take(
        jnp.abs(_noise(k, x)) + 1, _first(x) + jnp.arange(len(x)), axis=0
    ),
    "in jit": lambda k, x: jax.jit(lambda a, i: a[i + jnp.arange(len(x))])(
        _noise(k, x), _first(x)
    ),
    "keys": _own_keys,
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_draw_for_all_of_which_the_step_takes_its_part_is_complete(name):
    def whole(key):
        if name == "keys":
            keys = jax.random.split(key, len(X))
            return jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)
        noise = _noise(key, X[:2])
        return jnp.abs(noise) + 1 if name == "take" else noise

    _expect(
        lambda w, key, x: jnp.sin(w * x + TAKEN[name](key, x)).mean(),
        lambda w, key, x: jnp.sin(w * x + whole(key)).mean(),
    )


def test_a_mixup_of_the_whole_batch_is_that_of_one_device():
    def own(w, key, x):
        gathered = lax.all_gather(x, "data", tiled=True)
        order = jax.random.permutation(key, len(gathered))
        order = lax.dynamic_slice_in_dim(order, _first(x), len(x))
        return jnp.sin(w * (x + gathered[order])).mean()

    def whole(w, key, x):
        return jnp.sin(w * (x + x[jax.random.permutation(key, len(x))])).mean()

    _expect(own, whole)


def test_a_choice_of_gathered_samples_is_the_same_on_all_replicas():
    @jdp.data_parallel(world=harness.local_world(N), donate_state=False)
    def step(key, x):
        x = lax.all_gather(x, "data", tiled=True)
        return key, jdp.PerReplica(jax.random.choice(key, x, (4,), replace=False))

    # For 512 samples jax.random shuffles once, for 2048 twice.
    x = np.arange(512 * 3, dtype=np.float32).reshape(512, 3)
    expected = jax.random.choice(KEY, x, (4,), replace=False)
    np.testing.assert_array_equal(step(KEY, x)[1].value, np.stack([expected] * N))


def _spread(x):
    return jnp.sqrt(((x - x.mean(0)) ** 2).mean(0))


STATISTICS = {
    "pmean": lambda x, of_all: lax.pmean(x.mean(0), "data") if of_all else x.mean(0),
    "all_gather": lambda x, of_all: _spread(
        lax.all_gather(x, "data", tiled=True) if of_all else x
    ),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_noise_scaled_by_a_statistic_of_all_samples_is_for_local_samples(name):
    def loss(w, key, x, of_all):
        scale = lax.stop_gradient(STATISTICS[name](x, of_all))
        return jnp.sin(w * x + scale * jax.random.normal(key, x.shape)).mean()

    _expect(lambda *args: loss(*args, True), lambda *args: loss(*args, False))


def test_a_program_has_draws_of_both_kinds():
    def loss(w, key, x, gather):
        z = _mask(jax.random.fold_in(key, 0), x * w)
        out = _mask(jax.random.fold_in(key, 1), gather(z))
        return ((z[:, None] - out) ** 2).mean()

    _expect(
        lambda *args: loss(*args, lambda x: lax.all_gather(x, "data", tiled=True)),
        lambda *args: loss(*args, lambda x: x),
    )


def test_a_sum_over_a_local_mask_may_divide_gathered_samples():
    def loss(w, key, x):
        mask = jax.random.bernoulli(key, 0.5, (len(x), 1))
        gathered = lax.all_gather(x * w, "data", tiled=True)
        ratio = lax.stop_gradient((gathered / mask.sum()).sum()) * 0
        return jnp.sin(w * x * mask).mean() + ratio

    def reference(w, key, x):
        return jnp.sin(w * x * jax.random.bernoulli(key, 0.5, (len(x), 1))).mean()

    found = _compute(loss, x=np.concatenate([X] * 4))
    x = np.concatenate([X] * 4)
    expected = harness.jit_fast(jax.value_and_grad(reference))(W, KEY, x)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)


def test_a_key_that_the_step_captures_draws_for_gathered_samples():
    def loss(w, _, x, gather):
        z = gather(x * w)
        return jnp.sin(_mask(KEY, z) - x.mean(-1)[:, None, None]).mean()

    _expect(
        lambda *args: loss(*args, lambda x: lax.all_gather(x, "data", tiled=True)),
        lambda *args: loss(*args, lambda x: x),
    )
