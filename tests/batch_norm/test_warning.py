"""Flax's own `BatchNorm` counts padding: a weighted step says so."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdp
from jdp import flax_linen, flax_nnx
from tests import harness

X = np.arange(24, dtype=np.float32).reshape(8, 3) % 5
WEIGHT = np.array([1, 1, 1, 0, 1, 1, 1, 0], np.float32)


class _Linen(nn.Module):
    norm: str
    use_running_average: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        if self.norm == "BatchNorm":
            return nn.BatchNorm(self.use_running_average, name="middle")(x)
        if self.norm == "SyncBatchNorm":
            return flax_linen.SyncBatchNorm(self.use_running_average)(x)
        return nn.LayerNorm()(x)


def _linen(norm, **options):
    model = _Linen(norm, **options)
    variables = model.init(jax.random.key(0), X)
    stats = {k: v for k, v in variables.items() if k != "params"}

    def apply(params, x):
        return model.apply({"params": params, **stats}, x, mutable=["batch_stats"])[0]

    return variables["params"], apply


def _nnx(norm, **options):
    module = flax_nnx if norm == "SyncBatchNorm" else nnx
    layer = getattr(module, norm)(3, rngs=nnx.Rngs(0), **options)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def apply(params, x):
        fresh = jax.tree.map(lambda leaf: leaf, rest)  # which this trace may change.
        return nnx.merge(graph, params, fresh)(x)

    return params, apply


def _messages(make, *, weighted=True, accumulate=False, runs=1):
    params, apply = make

    def loss_fn(params, x, weight):
        return ((apply(params, x) ** 2).mean(-1) * weight).sum() / weight.sum()

    @jdp.data_parallel(world=harness.local_world(2), donate_state=False)
    def step(params, x, weight):
        if accumulate:
            fn = jdp.accumulate_gradients(loss_fn, 2, weight=weight)
        else:
            fn = jdp.value_and_grad(loss_fn, weight=weight.sum() if weighted else None)
        loss, grads = fn(params, x, weight)
        return jax.tree.map(jnp.subtract, params, grads), {"loss": loss}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(runs):
            step(params, X, WEIGHT)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("make", [_linen, _nnx])
def test_a_weighted_step_with_batch_norm_is_warned_of_once(make, accumulate):
    (message,) = _messages(make("BatchNorm"), accumulate=accumulate, runs=2)
    assert "A weighted step runs Flax's `BatchNorm`" in message
    assert "count padding as data" in message
    assert "use `SyncBatchNorm` of `jdp.flax_linen` or `jdp.flax_nnx`" in message
    if make is _linen:  # nnx leaves no names in the program.
        assert "`_Linen/middle`" in message


@pytest.mark.parametrize(
    "made, weighted",
    [
        (lambda: _linen("LayerNorm"), True),
        (lambda: _nnx("LayerNorm"), True),
        (lambda: _linen("SyncBatchNorm"), True),
        (lambda: _nnx("SyncBatchNorm"), True),
        (lambda: _linen("BatchNorm", use_running_average=True), True),
        (lambda: _nnx("BatchNorm", use_running_average=True), True),
        (lambda: _linen("BatchNorm"), False),
        (lambda: _nnx("BatchNorm"), False),
    ],
)
def test_no_other_step_is_warned_of(made, weighted):
    assert _messages(made(), weighted=weighted) == []


def test_a_hand_written_step_is_warned_of():
    params, apply = _linen("BatchNorm")

    def fn(params, x, weight):
        loss_fn = lambda p: (apply(p, x) ** 2).mean()  # noqa: E731
        return jdp.value_and_grad(loss_fn, weight=weight.sum())(params)

    split = X.reshape(2, 4, 3), WEIGHT.reshape(2, 4)
    with pytest.warns(UserWarning, match="Flax's `BatchNorm`"):
        jax.vmap(fn, in_axes=(None, 0, 0), axis_name="data")(params, *split)


def test_a_join_is_a_weighted_step():
    params, apply = _linen("BatchNorm")

    @jdp.data_parallel(world=harness.local_world(2), donate_state=False)
    def step(params, x):
        loss, grads = jdp.value_and_grad(lambda p: (apply(p, x) ** 2).mean())(params)
        return jax.tree.map(jnp.subtract, params, grads), {"loss": loss}

    with pytest.warns(UserWarning, match="Flax's `BatchNorm`"):
        with jdp.Join([step]):
            step(params, X)


def test_a_converted_model_is_not_warned_of():
    model = flax_linen.convert_batch_norm(_Linen("BatchNorm"))
    variables = model.init(jax.random.key(0), X)
    stats = {"batch_stats": variables["batch_stats"]}

    def apply(params, x):
        return model.apply({"params": params, **stats}, x, mutable=["batch_stats"])[0]

    assert _messages((variables["params"], apply)) == []
