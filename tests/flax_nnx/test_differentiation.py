"""`flax_nnx.value_and_grad`: `nnx.value_and_grad` on the samples of all replicas."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdp
from jdp import flax_nnx
from tests import harness

N = 4
X = np.random.default_rng(0).normal(size=(N, 2, 3)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(3, 4, rngs=rngs)
        self.b = nnx.Linear(4, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.b(jnp.tanh(self.a(x)))[..., 0]


def _loss(model, x, scale=1.0):
    return (model(x) ** 2).mean() * scale


def _on_replicas(fn):
    """What `fn(x)` gives each replica; all results are the same."""
    found = harness.jit_fast(jax.vmap(fn, axis_name="data"))(X)
    return jax.tree.map(lambda x: np.asarray(x[0]), found)


def _close(found, expected):
    chex.assert_trees_all_close(
        jax.tree.leaves(found), jax.tree.leaves(expected), atol=1e-6
    )


ARGNUMS = {
    "a model": (0, 0),
    "as a tuple": ((0,), (0,)),
    "from the end": (-3, 0),
    "some of its parameters": (nnx.DiffState(0, nnx.PathContains("b")),) * 2,
    "a model and an array": ((0, 1), (0, 1)),
    "an array": (1, 1),
}


@pytest.mark.parametrize("name", ARGNUMS)
def test_gradients_are_those_of_flax_on_all_samples(name):
    ours, flax = ARGNUMS[name]

    def loss(model, scale, x):
        return (model(x) ** 2).mean() * scale

    def fn(x):
        model = Net()
        grad_fn = flax_nnx.value_and_grad(loss, argnums=ours)
        return *grad_fn(model, 2.0, x), model.calls[...]

    value, grads, calls = _on_replicas(fn)
    model = Net()
    grad_fn = nnx.value_and_grad(loss, argnums=flax)
    expected = grad_fn(model, 2.0, X.reshape(-1, 3))
    _close((value, grads), expected)
    assert jax.tree.structure(grads) == jax.tree.structure(expected[1])
    assert calls == 1


def test_what_a_loss_returns_beside_its_value_stays_local():
    def fn(x):
        @flax_nnx.value_and_grad(has_aux=True)
        def grad_fn(model, x):
            model.note = nnx.Variable(x.sum())
            return _loss(model, x), {"mean": x.mean(), "text": "kept"}

        model = Net()
        (_, aux), _ = grad_fn(model, x=x)
        assert aux["text"] == "kept"
        return aux["mean"], model.note[...]

    mean, total = harness.jit_fast(jax.vmap(fn, axis_name="data"))(X)
    np.testing.assert_allclose(mean, X.mean(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_allclose(total, X.sum(axis=(1, 2)), rtol=1e-5)


def test_models_in_a_tree_get_gradients_in_that_tree():
    def loss(models, x):
        return sum(_loss(m, x) for m in models.values())

    def fn(x):
        one, two = Net(), Net()
        _, grads = flax_nnx.value_and_grad(loss)({"one": one, "two": two}, x)
        return grads, two.calls[...]

    grads, calls = _on_replicas(fn)
    expected = nnx.grad(_loss)(Net(), X.reshape(-1, 3))
    _close(grads["one"], expected)
    _close(grads["two"], expected)
    assert calls == 1


def test_options_of_jdp_are_those_of_jdp():
    weight = np.float32([1, 0, 2, 1])

    def loss(model, x):
        jax.lax.cond(x.sum() > 100, lambda: model.b.bias[...], lambda: jnp.zeros(1))
        return _loss(model, x), x.sum()

    def fn(x):
        index = jax.lax.axis_index("data")
        grad_fn = flax_nnx.value_and_grad(
            loss,
            has_aux=True,
            find_unused=True,
            find_norms=True,
            weight=jnp.asarray(weight)[index],
        )
        (((value, _), grads), used), norms = grad_fn(Net(), x)
        assert used["a"]["kernel"].get_raw_value() is True
        return value, grads, norms

    def plain(x):
        graph, params, rest = nnx.split(Net(), nnx.Param, ...)
        index = jax.lax.axis_index("data")
        grad_fn = jdp.value_and_grad(
            lambda p, x: _loss(nnx.merge(graph, p, rest, copy=True), x),
            find_norms=True,
            weight=jnp.asarray(weight)[index],
        )
        (value, grads), norms = grad_fn(params, x)
        return value, grads, norms

    _close(_on_replicas(fn), _on_replicas(plain))


def _trace(fn):
    return jax.make_jaxpr(lambda x: jax.vmap(fn, axis_name="data")(x))(X)


def test_wrong_arguments_are_named():
    value_and_grad = flax_nnx.value_and_grad
    with pytest.raises(TypeError, match="`loss_fn` must be a function"):
        value_and_grad(3)
    with pytest.raises(TypeError, match="`argnums` must be places .* got 'model'"):
        value_and_grad(_loss, argnums="model")
    with pytest.raises(ValueError, match="names the argument 0 twice"):
        value_and_grad(_loss, argnums=(0, nnx.DiffState(0, nnx.Param)))
    with pytest.raises(ValueError, match="`argnums` has 2, but the loss got 2 posi"):
        _trace(lambda x: value_and_grad(_loss, argnums=2)(Net(), x)[0])
    with pytest.raises(TypeError, match=r"returns an nnx object, `\['m'\]` \(Net\)"):
        loss = lambda m, x: (_loss(m, x), {"m": m})  # noqa: E731
        _trace(lambda x: value_and_grad(loss, has_aux=True)(Net(), x)[0][0])
    with pytest.raises(TypeError, match="must return a pair"):
        _trace(lambda x: value_and_grad(_loss, has_aux=True)(Net(), x)[0][0])


def test_a_model_from_outside_the_trace_is_not_emptied():
    model = Net()
    with pytest.raises(Exception, match="Cannot mutate .* from a different trace"):
        _trace(lambda x: flax_nnx.value_and_grad(_loss)(model, x)[0])
    assert model(X[0]).shape == (2,)


def _in_shard_map(fn):
    mesh = harness.local_world(N).mesh
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    return jax.make_jaxpr(mapped)(X.reshape(-1, 3))


def test_an_rng_stream_that_no_replica_has_for_itself_is_refused_by_name():
    def loss(model, dropout, x):
        return _loss(model, dropout(x))

    def fn(x, *, folds, rate=0.5):
        dropout = nnx.Dropout(rate, rngs=nnx.Rngs(0))
        if folds:
            key = dropout.rngs.key
            key[...] = jax.random.fold_in(key[...], jax.lax.axis_index("data"))
        return flax_nnx.value_and_grad(loss)(Net(), dropout, x)[0]

    message = (
        r"The rng stream `rngs` is the same on all replicas.*one of "
        r"`jdp.flax_nnx.data_parallel`.*`stream.key\[...\] = jax.random.fold_in"
    )
    with pytest.raises(ValueError, match=message):
        _in_shard_map(lambda x: fn(x, folds=False))
    _in_shard_map(lambda x: fn(x, folds=True))
    _in_shard_map(lambda x: fn(x, folds=False, rate=0.0))  # draws nothing.
