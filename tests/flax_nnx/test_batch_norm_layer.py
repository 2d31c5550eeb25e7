"""`SyncBatchNorm` for nnx: Flax's own, on the samples of all replicas."""

import functools
import inspect

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdp
from jdp import batch_norm, flax_nnx
from jdp.flax_nnx import SyncBatchNorm
from tests import harness, rarely
from tests.transforms import COMPILED_FAST, transforms_compiled_fast

COUNTS = [3, 0, 6, 1]  # samples of each replica, of at most 6.


def _data(shape=(6, 3), n=4, dtype=np.float32):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(n, *shape)) * 2 + 1).astype(dtype)
    weight = np.float32([[k < c for k in range(shape[0])] for c in COUNTS[:n]])
    return x, weight


@pytest.mark.parametrize("method", ["__init__", "__call__"])
def test_it_has_the_arguments_of_flax(method):
    ours, flax = (
        dict(inspect.signature(getattr(kind, method)).parameters)
        for kind in (SyncBatchNorm, nnx.BatchNorm)
    )
    if method == "__init__":
        assert ours.pop("axis_name").default == "auto"
        assert flax.pop("axis_name").default is None
    else:
        assert ours.pop("weight").default is None
    assert [(p.name, p.kind) for p in ours.values()] == [
        (p.name, p.kind) for p in flax.values()
    ]
    for name in ours.keys() - {"bias_init", "scale_init"}:  # made for each class
        assert ours[name].default == flax[name].default, name


ARGUMENTS = {
    "2-D": ((6, 3), {}),
    "3-D": ((6, 4, 3), {"momentum": 0.5, "epsilon": 0.1}),
    "4-D": ((6, 2, 4, 3), {"use_bias": False}),
    "channels first": ((6, 3, 2, 4), {"axis": 1, "use_scale": False}),
    "initialisers": ((6, 3), {"scale_init": nnx.initializers.normal()}),
    "bfloat16": ((6, 4, 3), {"dtype": jnp.bfloat16}),
    "parameters": ((6, 3), {"param_dtype": jnp.bfloat16}),
}
# Moments and their products, each rounded, of values of order 10.
ATOL = {np.float32: 1e-5, jnp.bfloat16: 2**-7 * 8}


@pytest.mark.parametrize(
    "shape, arguments",
    rarely.cases(ARGUMENTS.values(), often=list(ARGUMENTS.values())[1::2]),
    ids=ARGUMENTS,
)
def test_on_one_device_it_is_that_of_flax(shape, arguments):
    x = _data(shape)[0][0]
    made = []
    for kind in (SyncBatchNorm, nnx.BatchNorm):
        layer = kind(3, use_fast_variance=False, rngs=nnx.Rngs(0), **arguments)
        graph, params, stats = nnx.split(layer, nnx.Param, ...)

        def loss(params, x, graph=graph, stats=stats):
            model = nnx.merge(graph, params, jax.tree.map(jnp.array, stats))
            y = model(x)
            updated = nnx.state(model, nnx.BatchStat)
            evaluated = model(x, use_running_average=True)
            return (y.astype(jnp.float32) ** 3).mean(), (y, updated, evaluated)

        grad_fn = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, out), grads = harness.jit_fast(grad_fn)(params, x)
        made.append(nnx.to_pure_dict(nnx.State({"p": params, "g": grads[0]})))
        made[-1] = made[-1], out[0], nnx.to_pure_dict(out[1]), out[2], grads[1]
    chex.assert_trees_all_equal_shapes_and_dtypes(*made)
    found, expected = (jax.tree.map(lambda v: np.asarray(v, float), m) for m in made)
    dtype = arguments.get("dtype", np.float32)
    chex.assert_trees_all_close(found, expected, atol=ATOL[dtype])


def test_bfloat16_inputs_have_statistics_in_float32():
    x, _ = _data((64, 3), dtype=jnp.bfloat16)
    layer = SyncBatchNorm(3, momentum=0.0, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)

    def fn(state, x):
        model = nnx.merge(graph, jax.tree.map(jnp.array, state))
        assert model(x).dtype == jnp.bfloat16
        return model.mean[...], model.var[...]

    found = COMPILED_FAST["vmap"](fn, 4, state, x)
    flat = x.reshape(-1, 3).astype(np.float64)
    assert {v.dtype for v in found} == {np.dtype(np.float32)}
    chex.assert_trees_all_close(found, (flat.mean(0), flat.var(0)), rtol=1e-5)


# --- models -----------------------------------------------------------------------


class _Model(nnx.Module):
    """Layers in a list, and one of them in two places."""

    def __init__(self, norm=nnx.BatchNorm):
        rngs = nnx.Rngs(0)
        make = functools.partial(norm, momentum=0.9, use_fast_variance=False, rngs=rngs)
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norms = nnx.List([make(4), make(2)])
        self.last = nnx.Linear(4, 2, rngs=rngs)
        self.shared = self.norms[0]

    def __call__(self, x, weight=None):
        given = {} if weight is None else {"weight": weight}
        x = nnx.tanh(self.shared(self.dense(x), **given))
        return self.norms[1](self.last(x), **given)


def _loss(params, graph, stats, x, weight, *, way):
    model = nnx.merge(graph, params, jax.tree.map(jnp.asarray, stats))
    if way == "context":
        with batch_norm.sample_weights(weight):
            y = model(x)
    else:
        y = model(x, weight) if way == "argument" else model(x)
    targets = jnp.sin(jnp.where(jnp.isnan(x), 0, x))[..., :2]
    losses = jnp.where(weight > 0, ((y - targets) ** 2).sum(-1), 0)
    return (losses * weight).sum() / weight.sum(), nnx.state(model, nnx.BatchStat)


def _pure(out):
    (loss, stats), grads = out
    return loss, nnx.to_pure_dict(stats), nnx.to_pure_dict(grads)


def _alone(x, state=None):
    """Of a model that is new, or has that `(params, stats)`."""
    graph, *made = nnx.split(_Model(), nnx.Param, ...)
    params, stats = state or made
    loss = lambda p: _loss(p, graph, stats, x, jnp.ones(len(x)), way="")  # noqa: E731
    return harness.jit_fast(jax.value_and_grad(loss, has_aux=True))(params)


def _descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@transforms_compiled_fast
@pytest.mark.parametrize(
    "way", rarely.cases(["argument", "context"], often=["context"])
)
def test_replicas_train_as_one_device_on_all_samples(run, way):
    x, weight = _data()
    x[weight == 0] = 1e3
    x[1] = np.nan  # has no samples at all
    made = {
        "argument": lambda: _Model(SyncBatchNorm),
        "context": lambda: flax_nnx.convert_batch_norm(_Model()),
    }
    graph, params, stats = nnx.split(made[way](), nnx.Param, ...)

    def fn(shared, local):
        x, weight = local
        params, stats = shared
        loss = lambda p: _loss(p, graph, stats, x, weight, way=way)  # noqa: E731
        return jdp.value_and_grad(loss, has_aux=True, weight=weight.sum())(params)

    found = _pure(run(fn, 4, (params, stats), (x, weight)))
    expected = _pure(_alone(x[weight > 0]))
    chex.assert_trees_all_close(found, expected, atol=2e-6, rtol=1e-5)


def test_a_step_keeps_running_statistics_as_state():
    graph, params, stats = nnx.split(_Model(SyncBatchNorm), nnx.Param, ...)

    @jdp.data_parallel(world=harness.local_world(4), donate_state=False)
    def step(state, x):
        params, stats = state
        fn = jdp.value_and_grad(_loss, has_aux=True)
        (loss, stats), grads = fn(params, graph, stats, x, jnp.ones(len(x)), way="")
        return (grads, stats), {"loss": loss}

    x = _data()[0].reshape(24, 3)
    (grads, stats), metrics = step((params, stats), x)
    found = _pure(((metrics["loss"], stats), grads))
    chex.assert_trees_all_close(found, _pure(_alone(x)), atol=2e-6, rtol=1e-5)


NUM_SAMPLES = (9, 0, 5)  # of each process, in batches of at most 4.


def _samples(process):
    rng = np.random.default_rng(process)
    return rng.normal(size=(NUM_SAMPLES[process], 3)).astype(np.float32) + process


def _train_unevenly():
    world = jdp.init()
    model = flax_nnx.convert_batch_norm(_Model())
    graph, params, stats = nnx.split(model, nnx.Param, ...)

    @jdp.data_parallel
    def step(state, x, weight):
        params, stats = state
        loss_fn = functools.partial(_loss, way="context")
        fn = jdp.value_and_grad(loss_fn, has_aux=True, weight=weight.sum())
        (loss, stats), grads = fn(params, graph, stats, x, weight)
        return (_descend(params, grads), stats), {"loss": loss}

    x = _samples(world.process_index)
    batches = [x[k : k + 4] for k in range(0, len(x), 4)]
    state, losses = jdp.replicate(world, (params, stats)), []
    for batch, weight in jdp.join_batches(batches, world=world, like=x[:1]):
        state, metrics = step(state, batch, weight)
        losses.append(float(metrics["loss"].addressable_data(0)))
    jdp.check_replicas(state, world=world)
    return [np.asarray(v.addressable_data(0)) for v in jax.tree.leaves(state)], losses


@pytest.mark.multiprocess
@pytest.mark.slow
def test_processes_with_uneven_data_train_as_one_device_on_all_of_it():
    results = harness.run_checked(_train_unevenly, len(NUM_SAMPLES))
    _, *state = nnx.split(_Model(), nnx.Param, ...)
    losses = []
    for k in range(0, max(NUM_SAMPLES), 4):
        union = np.concatenate([_samples(p)[k : k + 4] for p in range(3)])
        (loss, stats), grads = _alone(union, state)
        state = _descend(state[0], grads), stats
        losses.append(float(loss))
    for found, found_losses in results:
        expected = jax.tree.leaves(state)
        chex.assert_trees_all_close(found, expected, atol=6e-6, rtol=3e-5)
        np.testing.assert_allclose(found_losses, losses, rtol=1e-5)


# --- conversion -------------------------------------------------------------------


def test_conversion_keeps_state_sharing_and_attributes():
    model = _Model()
    model.norms[0].mean[...] = jnp.arange(4.0)
    model.norms[1].use_running_average = True
    model.norms[1].note = "kept"
    before = nnx.to_pure_dict(nnx.state(model))
    scale = model.norms[0].scale
    assert flax_nnx.convert_batch_norm(model, axis_name="replica") is model
    assert all(type(norm) is SyncBatchNorm for norm in model.norms)
    assert {norm.axis_name for norm in model.norms} == {"replica"}
    assert model.shared is model.norms[0] and model.norms[0].scale is scale
    assert model.norms[0].momentum == 0.9 and model.norms[1].note == "kept"
    assert model.norms[1].use_running_average
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(model)), before)


def test_conversion_takes_a_layer_alone_and_one_that_was_converted():
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    assert type(flax_nnx.convert_batch_norm(layer)) is SyncBatchNorm
    assert flax_nnx.convert_batch_norm(layer, axis_name="replica") is layer
    assert layer.axis_name == "replica"


class _Derived(nnx.BatchNorm):
    pass


def test_conversion_refuses_what_derives_and_changes_nothing():
    model = _Model()
    model.norms.append(_Derived(2, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="`norms.2` is a `_Derived`, which derives"):
        flax_nnx.convert_batch_norm(model)
    assert type(model.norms[0]) is nnx.BatchNorm


def test_what_cannot_be_done_is_named():
    x = _data()[0][0]
    make = functools.partial(SyncBatchNorm, 3, rngs=nnx.Rngs(0))
    layer = make(axis_name="replica")
    layer(x, use_running_average=True)
    with pytest.raises(ValueError, match="`axis_name='replica'` is not bound here"):
        layer(x)
    make(axis_name=None)(x)
    with pytest.raises(TypeError, match="must be an nnx module, got Dense"):
        flax_nnx.convert_batch_norm(nn.Dense(1))
    with pytest.raises(ValueError, match="`axis_index_groups` would leave each group"):
        make(axis_index_groups=[[0, 1]])(x)
    with pytest.raises(ValueError, match="`weight` must hold one number"):
        make()(x, weight=jnp.ones(7))
    with pytest.raises(ValueError, match="Pass `use_running_average` to"):
        make(use_running_average=None)(x)
