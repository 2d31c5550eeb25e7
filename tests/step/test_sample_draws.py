"""Sample draws: replicas draw what one device draws for all samples."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdp
from tests import harness

N = 4
KEY = jax.random.key(5)
X = np.random.default_rng(0).uniform(1, 3, size=(8, 3)).astype(np.float32)


def _step(fn, **options):
    @jdp.data_parallel(
        world=harness.local_world(N),
        donate_state=False,
        compiler_options=harness.fast_options(),
        **options,
    )
    def step(key, x):
        return key, jdp.PerReplica(fn(key, x))

    return step


def _normal(key, x):
    return jax.random.normal(key, x.shape)


def _in_vmap(key, x):
    keys = jax.random.split(key, x.shape[0])
    return jax.vmap(_normal)(keys, x)


def _in_scan(key, x):
    keys = jax.random.split(key, x.shape[0])
    return lax.scan(lambda c, kx: (c, _normal(*kx)), 0, (keys, x))[1]


def _in_layers(key, x):
    def layer(x, key):
        return x * jax.random.bernoulli(key, 0.7, x.shape), None

    return lax.scan(jax.checkpoint(layer), x, jax.random.split(key, 3))[0]


def _in_branch(key, x):
    return lax.cond(jax.random.uniform(key) < 2, _normal, lambda k, x: x, key, x)


def _in_backward(key, x):
    def fn(x):
        return (jax.random.bernoulli(key, 0.5, x.shape) * jnp.sin(x)).sum()

    return jax.grad(jax.checkpoint(fn))(x)


def _by_sample(key, x):
    def one(x):
        return _normal(jax.random.fold_in(key, (100 * x[0]).astype(int)), x)

    return jax.vmap(one)(x)


# Of each sample, by row.
DRAWS = {
    "bernoulli": lambda k, x: jax.random.bernoulli(k, 0.5, x.shape),
    "dropout": lambda k, x: jnp.where(jax.random.uniform(k, x.shape) < 0.3, 0, x),
    "all dimensions in one": lambda k, x: _normal(k, x.ravel()).reshape(x.shape),
    "samples last": lambda k, x: _normal(k, x.T).T,
    "a key per sample": _in_vmap,
    "a loop over samples": _in_scan,
    "a key folded from data": _by_sample,
    "a loop over layers": _in_layers,
    "a branch": _in_branch,
    "a backward pass": _in_backward,
    "integers": lambda k, x: jax.random.randint(k, (len(x),), 0, 100),
    "a category": lambda k, x: jax.random.categorical(k, x),
    "gamma": lambda k, x: jax.random.gamma(k, x),
}
# The same on all replicas.
SHARED = {
    "a parameter": lambda k, x: jax.random.normal(k, (3,)),
    "as large as the samples of a replica": lambda k, x: jax.random.normal(k, (2, 3)),
    "a scalar": lambda k, x: jax.random.uniform(k),
    "keys": lambda k, x: jax.random.key_data(jax.random.split(k, 2)),
}


def _draw_all(key, x):
    cases = DRAWS | SHARED
    keys = jax.random.split(key, len(cases))
    return {name: fn(k, x) for (name, fn), k in zip(cases.items(), keys, strict=True)}


def test_replicas_draw_what_one_device_draws():
    _, metrics = _step(_draw_all)(KEY, X)
    expected = harness.jit_fast(_draw_all)(KEY, X)
    for name, found in metrics.value.items():
        if name in SHARED:
            chex.assert_trees_all_equal(found, np.stack([expected[name]] * N))
        else:
            rows = np.asarray(found).reshape(expected[name].shape)
            np.testing.assert_allclose(rows, expected[name], rtol=1e-6, err_msg=name)


def test_a_key_of_the_old_kind_and_another_generator_draw_alike():
    for key in (jax.random.PRNGKey(3), jax.random.key(3, impl="rbg")):
        _, metrics = _step(_normal)(key, X)
        found = np.asarray(metrics.value).reshape(X.shape)
        np.testing.assert_array_equal(found, _normal(key, X))


FROM_KEYS = {
    "a key per sample": _in_vmap,
    "a key folded from data": _by_sample,
}


@pytest.mark.parametrize("name", FROM_KEYS)
def test_a_generator_that_uses_the_first_of_many_keys_is_warned_of(name):
    match = "a key per sample.* and the keys are of the implementation 'rbg'"
    with pytest.warns(UserWarning, match=match) as caught:
        _, metrics = _step(FROM_KEYS[name])(jax.random.key(3, impl="rbg"), X)
    assert len(caught) == 1
    first = np.asarray(metrics.value)[:, 0]
    assert len(np.unique(first[:, 0])) == N  # No two replicas draw the same.


def test_a_generator_is_not_warned_of_where_it_draws_what_one_device_draws(recwarn):
    key = jax.random.key(3, impl="rbg")

    def own(key, x):
        return _in_vmap(jax.random.fold_in(key, lax.axis_index("data")), x)

    def members(key, x):
        draw = jax.vmap(lambda key: _normal(key, x))
        return draw(jax.random.split(key, 2)).swapaxes(0, 1)

    def shared(key, x):
        return members(key, x), _in_scan(key, x)

    _, metrics = _step(lambda k, x: (own(k, x), *shared(k, x)))(key, X)
    for found, expected in zip(metrics.value[1:], shared(key, X), strict=True):
        rows = np.asarray(found).reshape(expected.shape)
        np.testing.assert_allclose(rows, expected, rtol=1e-6)
    assert not recwarn.list


def test_replicas_on_two_axes_draw_in_their_order():
    names = ("node", "data")

    @jdp.data_parallel(
        world=harness.local_world(N, axis_name=names, num_nodes=2),
        compiler_options=harness.fast_options(),
    )
    def step(key, x):
        return key, jdp.PerReplica(_normal(key, x))

    _, metrics = step(KEY, X)
    found = np.asarray(metrics.value).reshape(X.shape)
    np.testing.assert_array_equal(found, _normal(KEY, X))


def test_a_key_of_each_replica_draws_as_before():
    def fn(key, x):
        return _normal(jax.random.fold_in(key, lax.axis_index("data")), x)

    _, metrics = _step(fn)(KEY, X)
    expected = [_normal(jax.random.fold_in(KEY, i), X[:2]) for i in range(N)]
    np.testing.assert_array_equal(metrics.value, np.stack(expected))


def test_micro_batches_of_all_replicas_draw_together():
    def loss_fn(scale, x, *, key):
        noise = _normal(key, x)
        return (scale * x * noise).mean(), jdp.PerReplica(noise)

    @jdp.data_parallel(
        world=harness.local_world(2), compiler_options=harness.fast_options()
    )
    def step(state, x):
        grad_fn = jdp.accumulate_gradients(loss_fn, 2, has_aux=True)
        (_, noise), _ = grad_fn(state["scale"], x, key=state["key"])
        return state, noise

    _, noise = step({"scale": jnp.ones(()), "key": KEY}, X)
    drawn = _normal(KEY, X[:4])  # by each micro-batch: two samples of each replica
    expected = [np.concatenate([drawn[2 * r :][:2]] * 2) for r in range(2)]
    np.testing.assert_array_equal(noise.value, np.stack(expected))


def test_a_replicated_argument_is_a_key_too():
    @jdp.data_parallel(
        world=harness.local_world(N),
        replicated_argnames="key",
        compiler_options=harness.fast_options(),
    )
    def step(state, x, weight, *, key):
        return state, jdp.PerReplica(_normal(key, x) + weight[0])

    # The weights, one per replica, do not grow with the samples.
    _, metrics = step(jnp.zeros(()), X, np.zeros(N, np.float32), key=KEY)
    found = np.asarray(metrics.value).reshape(X.shape)
    np.testing.assert_array_equal(found, _normal(KEY, X))


def _step_of_two(fn, **options):
    @jdp.data_parallel(
        world=harness.local_world(N),
        donate_state=False,
        compiler_options=harness.fast_options(),
        **options,
    )
    def step(key, batch):
        return key, jdp.PerReplica(fn(key, batch["x"], batch["y"]))

    return step


@pytest.mark.parametrize("shape", [(N,), (N, 3)], ids=str)
def test_samples_one_per_replica_beside_more_are_samples(shape):
    y = np.zeros(shape, np.float32)
    step = _step_of_two(lambda key, x, y: _normal(key, y))
    _, metrics = step(KEY, {"x": X, "y": y})
    found = np.asarray(metrics.value).reshape(shape)
    np.testing.assert_array_equal(found, _normal(KEY, y))


@pytest.mark.parametrize("shape", [(N,), (N, 1)], ids=str)
def test_weights_one_per_replica_may_fit_one_row_alone(shape):
    step = _step_of_two(lambda key, x, weight: _normal(key, x) * weight.reshape(()))
    _, metrics = step(KEY, {"x": X, "y": np.ones(shape, np.float32)})
    found = np.asarray(metrics.value).reshape(X.shape)
    np.testing.assert_array_equal(found, _normal(KEY, X))


def test_the_step_is_traced_twice_only_if_it_draws_for_samples():
    calls = []

    def step(fn):
        def traced(key, x):
            calls.append(len(x))
            return fn(key, x)

        return _step(traced)

    step(lambda k, x: x).trace(KEY, X)
    step(lambda k, x: _normal(jax.random.fold_in(k, lax.axis_index("data")), x)).trace(
        KEY, X
    )
    assert calls == [2, 2]
    step(_normal).trace(KEY, X)
    assert calls == [2, 2, 2, 8]


def _positions_folded(key, x):
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(x)))
    return jax.vmap(_normal)(keys, x)


def _in_loop(key, x):
    def body(key, x):
        key, own = jax.random.split(key)
        return key, _normal(own, x)

    return lax.scan(body, key, x)[1]


def _loop_from(first):
    """Returns a loop over samples, a `while` if its first position is traced."""

    def run(key, x):
        def body(i, out):
            noise = jax.random.normal(jax.random.fold_in(key, i), x.shape[1:])
            return out.at[i].add(noise)

        return lax.fori_loop(first(), len(x), body, x)

    return run


def _while_loop(key, x):
    def body(carry):
        i, key, out = carry
        key, own = jax.random.split(key)
        return i + 1, key, out.at[i].add(_normal(own, x[0]))

    start = jnp.zeros((), int), key, x
    return lax.while_loop(lambda carry: carry[0] < len(x), body, start)[2]


def _while_loop_with_keys(key, x):
    keys = jax.random.split(key, len(x))

    def body(carry):
        i, out = carry
        return i + 1, out.at[i].add(_normal(keys[i], x[0]))

    start = jnp.zeros((), int), jnp.zeros_like(x)
    return lax.while_loop(lambda carry: carry[0] < len(x), body, start)[1]


def test_a_while_loop_over_samples_with_keys_of_their_own_draws_alike():
    _, metrics = _step(_while_loop_with_keys)(KEY, X)
    found = np.asarray(metrics.value).reshape(X.shape)
    np.testing.assert_array_equal(found, _while_loop_with_keys(KEY, X))


def test_a_while_loop_that_does_not_count_samples_draws_the_same_everywhere():
    def fn(key, x):
        def body(carry):
            i, out = carry
            return i + 1, out + jax.random.normal(jax.random.fold_in(key, i), (3,))

        start = jnp.zeros((), int), jnp.zeros(3)
        return lax.while_loop(lambda c: c[0] < 2, body, start)[1] + _normal(key, x)

    _, metrics = _step(fn)(KEY, X)
    found = np.asarray(metrics.value).reshape(X.shape)
    np.testing.assert_allclose(found, fn(KEY, X), rtol=1e-6)


REFUSED = {
    "for pairs of samples": (
        lambda k, x: jax.random.normal(k, (len(x), len(x))),
        r"has shape \[2, 2\] for the samples of a replica and \[8, 8\] for the "
        "samples of all 4 replicas",
    ),
    "one more than samples": (
        lambda k, x: jax.random.normal(k, (len(x) + 1,))[1:],
        r"has shape \[3\] for the samples of a replica and \[9\]",
    ),
    "one key more than samples": (
        lambda k, x: _normal(jax.random.split(k, len(x) + 1)[0], x),
        "makes keys of samples and keys that belong to no sample at once. .* "
        r"Split off the others first: `key, sub = jax.random.split\(key\)`, then "
        r"`jax.random.split\(sub, x.shape\[0\]\)` for a key per sample, or give",
    ),
    "positions": (
        _positions_folded,
        "folds positions of samples, as every replica counts them, into a key.* "
        r"Use `jax.random.split\(key, x.shape\[0\]\)` for a key per sample, or give",
    ),
    "a loop": (_in_loop, "is in a loop that has more iterations for more samples"),
    "a while loop": (_while_loop, "is in a loop that has more iterations for more"),
    "a fori_loop from a traced position": (
        _loop_from(lambda: lax.axis_index("data") * 0),
        "is in a loop that has more iterations for more samples",
    ),
    "a fori_loop in jit": (
        jax.jit(_loop_from(lambda: lax.psum(0, "data") + jnp.zeros((), int))),
        "is in a loop that has more iterations for more samples",
    ),
    "a fixed number of samples": (
        lambda k, x: _normal(k, x.reshape(2, 3)),
        "must be compared with the draw for the samples of all replicas, and the step "
        "fails with so many .TypeError: cannot reshape",
    ),
    "another program": (
        lambda k, x: _normal(k, x) if len(x) < 8 else x,
        "is one of other draws for the samples of a replica than for the samples of",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_belongs_to_no_sample_is_refused_with_the_remedy(name):
    fn, message = REFUSED[name]
    step = _step(fn)
    with pytest.raises(ValueError, match=message) as caught:
        step.trace(KEY, X)
    text = str(caught.value)
    assert "from a key that is the same on all replicas" in text
    assert "`key = jax.random.fold_in(key, jax.lax.axis_index('data'))`." in text


def test_a_step_of_a_fixed_size_may_draw_what_belongs_to_no_sample():
    def fn(key, x):
        return jax.random.normal(key, (3, 5)) + x.reshape(2, 3).sum()

    _step(fn).trace(KEY, X)  # No dimension is a multiple of the two samples.


def test_equal_draws_share_their_program():
    def fn(key, x):
        for own in jax.random.split(key, 3):
            x = x + jax.random.bits(own, x.shape)
        return x

    text = _step(fn).lower(KEY, X).as_text()
    assert text.count("func private @random_bits_of_replica") == 1
    assert text.count("call @random_bits_of_replica") == 3


def test_the_draws_of_a_hook_are_not_for_samples():
    calls = []

    @jdp.data_parallel(world=harness.local_world(2))
    def step(w, x):
        calls.append(len(x))
        hook = jdp.hooks.power_sgd(1, start_step=0, warm_start=False)
        state = jdp.hooks.init_state(hook, w)
        (_, grads), _ = jdp.value_and_grad(
            lambda w, x: (x @ w).mean(), hook=hook, hook_state=state
        )(w, x)
        return grads, {}

    step.trace(jnp.ones((3, 40)), X)
    assert calls == [4]


def test_the_line_of_a_refused_draw_is_named():
    def fn(key, x):
        return jax.random.bits(key, (len(x), len(x)))

    with pytest.raises(ValueError, match=r"\(test_sample_draws.py:\d+\)"):
        _step(fn).trace(KEY, X)
