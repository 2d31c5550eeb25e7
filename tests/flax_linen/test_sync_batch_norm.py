"""`SyncBatchNorm` for linen: Flax's own, on the samples of all replicas."""

import dataclasses
import functools
import warnings

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jdp
from jdp import batch_norm, flax_linen
from jdp.flax_linen import SyncBatchNorm
from tests import harness, rarely
from tests.transforms import COMPILED_FAST, transforms_compiled_fast

COUNTS = [3, 0, 6, 1]  # samples of each replica, of at most 6.


def _data(shape=(6, 3), n=4, dtype=np.float32):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(n, *shape)) * 2 + 1).astype(dtype)
    weight = np.float32([[k < c for k in range(shape[0])] for c in COUNTS[:n]])
    return x, weight


def _fields(layer):
    return {f.name: (f.type, f.default) for f in dataclasses.fields(layer)}


def test_it_has_the_arguments_of_flax():
    ours, flax = _fields(SyncBatchNorm), _fields(nn.BatchNorm)
    assert list(ours) == list(flax)
    assert ours.pop("axis_name")[1] == "auto" and flax.pop("axis_name")[1] is None
    assert {k: v[1] for k, v in ours.items()} == {k: v[1] for k, v in flax.items()}


ARGUMENTS = {
    "2-D": ((6, 3), {}),
    "3-D": ((6, 4, 3), {"momentum": 0.5, "epsilon": 0.1}),
    "4-D": ((6, 2, 4, 3), {"use_bias": False}),
    "channels first": ((6, 3, 2, 4), {"axis": 1}),
    "a negative axis": ((6, 3, 4), {"axis": -2, "use_scale": False}),
    "two feature axes": ((6, 4, 2, 3), {"axis": (1, -1)}),
    "initialisers": ((6, 3), {"scale_init": nn.initializers.normal()}),
    "bfloat16": ((6, 4, 3), {"dtype": jnp.bfloat16}),
    "parameters": ((6, 3), {"param_dtype": jnp.bfloat16}),
}
# Moments and their products, each rounded, of values of order 10.
ATOL = {np.float32: 1e-5, jnp.bfloat16: 2**-7 * 8}


@pytest.mark.parametrize("shape, arguments", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("one_pass", rarely.cases([True, False], often=(True,)))
def test_on_one_device_it_is_that_of_flax(shape, arguments, one_pass):
    x = _data(shape)[0][0]
    made = {}
    for kind in (SyncBatchNorm, nn.BatchNorm):
        layer = kind(use_fast_variance=one_pass, **arguments)
        init = functools.partial(layer.init, use_running_average=False)
        variables = harness.jit_fast(init)(jax.random.key(0), x)

        def loss(variables, x, layer=layer):
            y, updated = layer.apply(variables, x, False, mutable=["batch_stats"])
            return (y.astype(jnp.float32) ** 3).mean(), (y, updated)

        grad_fn = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, (y, updated)), grads = harness.jit_fast(grad_fn)(variables, x)
        running = {"params": variables.get("params", {}), **updated}
        evaluated = layer.apply(running, x, use_running_average=True)
        made[kind] = variables, y, updated, grads, evaluated
    chex.assert_trees_all_equal_shapes_and_dtypes(*made.values())
    chex.assert_trees_all_equal(*(m[0] for m in made.values()))
    dtype = arguments.get("dtype", np.float32)
    found, expected = (
        jax.tree.map(lambda v: np.asarray(v, np.float32), m) for m in made.values()
    )
    chex.assert_trees_all_close(found, expected, atol=ATOL[dtype])


@pytest.mark.parametrize("arguments", [{}, {"dtype": jnp.bfloat16}])
def test_bfloat16_inputs_have_statistics_in_float32(arguments):
    x, weight = _data((64, 3), dtype=jnp.bfloat16)
    layer = SyncBatchNorm(momentum=0.0, **arguments)
    variables = layer.init(jax.random.key(0), x[0], False)

    def fn(variables, x):
        updated = layer.apply(variables, x, False, mutable=["batch_stats"])[1]
        return updated["batch_stats"]

    found = COMPILED_FAST["vmap"](fn, 4, variables, x)
    flat = x.reshape(-1, 3).astype(np.float64)
    assert found["mean"].dtype == found["var"].dtype == jnp.float32
    # 256 terms; bfloat16 could not even count them.
    np.testing.assert_allclose(found["mean"], flat.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found["var"], flat.var(0), rtol=1e-5)
    y = jax.eval_shape(lambda v, x: layer.apply(v, x, True), variables, x[0])
    assert y.dtype == (arguments.get("dtype") or jnp.float32)


def test_statistics_may_be_kept_in_a_narrow_dtype():
    x = _data((6, 3), dtype=jnp.bfloat16)[0][0]
    narrow = {"force_float32_reductions": False, "param_dtype": jnp.bfloat16}
    made = []
    for kind in (SyncBatchNorm, nn.BatchNorm):
        layer = kind(**narrow)
        variables = layer.init(jax.random.key(0), x, False)
        y, updated = layer.apply(variables, x, False, mutable=["batch_stats"])
        made.append((variables, y, updated, layer.apply(variables, x, True)))
    chex.assert_trees_all_equal_shapes_and_dtypes(*made)
    found, expected = (jax.tree.map(lambda v: np.float32(v), m) for m in made)
    # Flax sums squares of up to 25 in bfloat16.
    chex.assert_trees_all_close(found, expected, atol=25 * 2**-8 * 2)


# --- models -----------------------------------------------------------------------


class _Model(nn.Module):
    """Batch norms made where they are called; hands weights on if it is to."""

    norm: type = nn.BatchNorm
    takes_weight: bool = False

    @nn.compact
    def __call__(self, x, weight=None, *, train=True):
        options = {"momentum": 0.9, "use_fast_variance": False}
        norm = functools.partial(self.norm, not train, **options)
        given = {"weight": weight} if self.takes_weight else {}
        x = nn.tanh(norm(name="first")(nn.Dense(4)(x), **given))
        return nn.Dense(2)(norm(name="second")(nn.Dense(5)(x), **given))


def _with_arguments(variables, x, weight):
    model = _Model(SyncBatchNorm, takes_weight=True)
    return model.apply(variables, x, weight, mutable=["batch_stats"])


def _converted(variables, x, weight):
    with batch_norm.sample_weights(weight):
        model = flax_linen.convert_batch_norm(_Model())
        return model.apply(variables, x, mutable=["batch_stats"])


def _in_context(variables, x, weight):
    with batch_norm.sample_weights(weight), flax_linen.sync_batch_norms():
        return _Model().apply(variables, x, mutable=["batch_stats"])


def _flax(variables, x, weight):
    return _Model().apply(variables, x, mutable=["batch_stats"])


WAYS = pytest.mark.parametrize(
    "apply",
    rarely.cases(
        [_with_arguments, _converted, _in_context],
        often=(_converted, _in_context),
    ),
)


@functools.cache
def _variables():
    return harness.jit_fast(_Model().init)(jax.random.key(0), jnp.zeros((2, 3)))


def _loss(apply, params, stats, x, weight):
    """Of what counts, as most would write it; nothing divides by nothing."""
    y, updated = apply({"params": params, **stats}, x, weight)
    targets = jnp.sin(jnp.where(jnp.isnan(x), 0, x))[..., :2]
    losses = jnp.where(weight > 0, ((y - targets) ** 2).sum(-1), 0)
    return (losses * weight).sum() / weight.sum(), updated


def _replica(apply, variables, local, **options):
    x, weight = local
    params, stats = variables["params"], {"batch_stats": variables["batch_stats"]}
    loss = lambda p: _loss(apply, p, stats, x, weight)  # noqa: E731
    options = {"weight": weight.sum(), **options}
    return jdp.value_and_grad(loss, has_aux=True, **options)(params)


def _alone(variables, x):
    return _compiled_alone()(variables, x)


@functools.cache  # made when called: processes must not choose their devices before.
def _compiled_alone():
    def alone(variables, x):
        params, stats = variables["params"], {"batch_stats": variables["batch_stats"]}
        loss = lambda p: _loss(_flax, p, stats, x, jnp.ones(len(x)))  # noqa: E731
        return jax.value_and_grad(loss, has_aux=True)(params)

    return harness.jit_fast(alone)


# Two layers whose deviations are of order 1, on 10 samples.
CLOSE = {"atol": 2e-6, "rtol": 1e-5}


@transforms_compiled_fast
@WAYS
def test_replicas_train_as_one_device_on_all_samples(run, apply):
    x, weight = _data()
    x[weight == 0] = 1e3
    x[1] = np.nan  # has no samples at all
    fn = functools.partial(_replica, apply)
    found = run(fn, 4, _variables(), (x, weight))
    expected = _alone(_variables(), x[weight > 0])
    chex.assert_trees_all_close(found, expected, **CLOSE)


def test_flax_does_not():
    x, weight = _data()
    layer = nn.BatchNorm(False, axis_name="data", momentum=0.0)
    variables = layer.init(jax.random.key(0), x[0])

    def fn(variables, local):
        x, weight = local
        mask = weight[:, None] > 0
        updated = layer.apply(variables, x, mask=mask, mutable=["batch_stats"])[1]
        return updated["batch_stats"]["mean"]

    found = COMPILED_FAST["vmap"](fn, 4, variables, (x, weight))
    assert np.isnan(found).all()  # of the replica without samples
    filled = np.maximum(weight, np.eye(6)[0]).astype(np.float32)
    found = COMPILED_FAST["vmap"](fn, 4, variables, (x, filled))
    truth = x[filled > 0].mean(0)
    assert np.all(abs(found - truth) > 0.05)


def test_the_average_of_a_loss_in_float16_is_that_of_all_samples_too():
    # Not by multiplying gradients afterwards: what went through the statistics came
    # from the losses of all replicas.
    x, weight = _data()

    def in_float16(variables, x, weight):
        y, updated = _with_arguments(variables, x, weight)
        return y.astype(jnp.float16).astype(jnp.float32), updated

    fn = functools.partial(_replica, in_float16)
    (_, found) = COMPILED_FAST["vmap"](fn, 4, _variables(), (x, weight))
    (_, expected) = _alone(_variables(), x[weight > 0])
    chex.assert_trees_all_close(found, expected, atol=5e-3)


@pytest.mark.parametrize("divide_by", ["active", "world"])
def test_equal_replicas_may_be_divided_otherwise(divide_by):
    x, weight = _data()
    weight[2, 2:] = weight[0, 2:] = 0  # two samples on each of two replicas
    weight[3] = 0
    fn = functools.partial(_replica, _with_arguments, divide_by=divide_by)
    (_, found) = COMPILED_FAST["vmap"](fn, 4, _variables(), (x, weight))
    (_, expected) = _alone(_variables(), x[weight > 0])
    share = {"active": 1.0, "world": 2 / 4}[divide_by]
    expected = jax.tree.map(lambda g: share * g, expected)
    chex.assert_trees_all_close(found, expected, **CLOSE)


@pytest.mark.parametrize("divide_by", ["weight", "active"])
def test_micro_batches_are_weighed_before_their_statistics_mix(divide_by):
    x, weight = _data()
    apply, variables = _with_arguments, _variables()
    stats = {"batch_stats": variables["batch_stats"]}
    if divide_by == "active":  # so that each sample counts the same
        weight = weight * np.float32([2, 1, 1, 6])[:, None]

    def fn(params, local):
        accumulate = jdp.accumulate_gradients(
            lambda p, x, w: _loss(apply, p, stats, x, w)[0],
            2,
            weight=local[1],
            divide_by=divide_by,
        )
        return accumulate(params, *local)

    _, found = COMPILED_FAST["vmap"](fn, 4, variables["params"], (x, weight))

    def loss_of_all(params):
        """Of the k-th micro-batches of all replicas together."""
        total = 0.0
        for k in (slice(0, 3), slice(3, 6)):
            part, w = x[:, k].reshape(-1, 3), weight[:, k].reshape(-1)
            loss, _ = _loss(apply, params, stats, part, w)
            total += loss * w.sum()
        return total / weight.sum()

    expected = harness.jit_fast(jax.grad(loss_of_all))(variables["params"])
    chex.assert_trees_all_close(found, expected, **CLOSE)


def _messages(fn):
    x, weight = _data()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mapped = jax.vmap(fn, in_axes=(None, 0), axis_name="data")
        jax.make_jaxpr(mapped)(_variables(), (x, weight))
    return [str(w.message) for w in caught]


def test_weights_that_come_after_the_backward_pass_are_warned_of():
    def late(variables, local):
        stats = {"batch_stats": variables["batch_stats"]}
        loss = lambda p: _loss(_with_arguments, p, stats, *local)  # noqa: E731
        fn = jdp.value_and_grad(
            lambda p: loss(jdp.sync_in_backward(p, weight=local[1].sum())),
            has_aux=True,
            weight=local[1].sum(),
        )
        return fn(variables["params"])[1]

    (message,) = _messages(late)
    assert "Gradients are weighted after the backward pass" in message
    assert _messages(functools.partial(_replica, _with_arguments)) == []
    assert _messages(functools.partial(_replica, _in_context, weight=None)) == []


@pytest.mark.parametrize("is_weighted", [True, False])
def test_a_step_that_weighs_gradients_itself_is_warned_of(is_weighted):
    @jdp.data_parallel(world=harness.local_world(4), donate_state=False)
    def step(variables, x, weight):
        stats = {"batch_stats": variables["batch_stats"]}
        loss = lambda p: _loss(_with_arguments, p, stats, x, weight)  # noqa: E731
        fn = jdp.local_gradients(loss, has_aux=True)
        (_, stats), grads = fn(variables["params"])
        given = weight.sum() if is_weighted else None
        grads = jdp.sync_gradients(grads, weight=given)
        params = optax.apply_updates(variables["params"], grads)
        return {"params": params, **stats}, {}

    x, weight = (v.reshape(-1, *v.shape[2:]) for v in _data())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(_variables(), x, weight)
    messages = [str(w.message) for w in caught]
    assert len(messages) == is_weighted
    assert all("weighted after the backward pass" in m for m in messages)


def test_a_step_keeps_running_statistics_as_state():
    model = _Model(SyncBatchNorm)

    @jdp.data_parallel(world=harness.local_world(4))
    def step(variables, x):
        stats = {"batch_stats": variables["batch_stats"]}
        apply = lambda v, x, _: model.apply(v, x, mutable=["batch_stats"])  # noqa: E731
        loss = lambda p: _loss(apply, p, stats, x, jnp.ones(len(x)))  # noqa: E731
        (loss, stats), grads = jdp.value_and_grad(loss, has_aux=True)(
            variables["params"]
        )
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        return {"params": params, **stats}, {"loss": loss}

    x = _data()[0].reshape(24, 3)
    found = expected = _variables()
    for _ in range(3):
        found, metrics = step(found, x)
        (loss, stats), grads = _alone(expected, x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, expected["params"], grads)
        expected = {"params": params, **stats}
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    chex.assert_trees_all_close(found, expected, atol=6e-6, rtol=3e-5)


@pytest.mark.parametrize("is_weighed_after", [False, True])
def test_in_a_join_a_replica_without_data_does_not_count(is_weighed_after):
    model = _Model(SyncBatchNorm)

    @jdp.data_parallel(world=harness.local_world(2), donate_state=False)
    def step(variables, x):
        stats = {"batch_stats": variables["batch_stats"]}
        apply = lambda v, x, _: model.apply(v, x, mutable=["batch_stats"])  # noqa: E731
        loss = lambda p: _loss(apply, p, stats, x, jnp.ones(len(x)))  # noqa: E731
        if is_weighed_after:  # by 0 and 1, which is as right, and not warned of
            fn = jdp.local_gradients(loss, has_aux=True)
            (loss, stats), grads = fn(variables["params"])
            grads = jdp.sync_gradients(grads)
        else:
            fn = jdp.value_and_grad(loss, has_aux=True)
            (loss, stats), grads = fn(variables["params"])
        return {"params": grads, **stats}, {"loss": loss}

    x = _data()[0].reshape(24, 3)[:12]
    step.join_hook()
    amounts = np.float32([1, 0])  # as of a process that has joined
    found, metrics = step._program.compiled("weight")(
        *step._place(_variables(), (amounts, x))
    )
    (loss, stats), grads = _alone(_variables(), x[:6])
    found = found.to_tree()
    chex.assert_trees_all_close(found, {"params": grads, **stats}, **CLOSE)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)


# --- conversion -------------------------------------------------------------------


class _Block(nn.Module):
    """Batch norms in `setup`, inline, in a class that derives, and behind `remat`."""

    def setup(self):
        self.norm = nn.BatchNorm(use_running_average=False)
        self.dense = nn.Dense(3)
        self.again = nn.remat(_Inline)()
        self.doubled = _Doubled(use_running_average=False)

    def __call__(self, x):
        return self.doubled(self.again(self.norm(self.dense(x))))

    def first(self, x):
        return self.norm(self.dense(x))


class _Inline(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(x)


class _Doubled(nn.BatchNorm):
    @nn.compact
    def __call__(self, x):
        return 2 * super().__call__(x)


def test_conversion_finds_batch_norms_wherever_they_are_made():
    x, weight = _data()
    model = _Block()
    variables = harness.jit_fast(model.init)(jax.random.key(0), x[0])
    converted = flax_linen.convert_batch_norm(model)
    made = harness.jit_fast(converted.init)(jax.random.key(0), x[0])
    chex.assert_trees_all_equal(made, variables)

    def fn(variables, local):
        x, weight = local
        with batch_norm.sample_weights(weight):
            y, updated = converted.apply(variables, x, mutable=["batch_stats"])
        squares = (y**2 * weight[:, None]).sum(0)
        return updated, lax.psum(squares, "data") / lax.psum(weight.sum(), "data")

    found, squares = COMPILED_FAST["vmap"](fn, 4, variables, (x, weight))
    y, expected = model.apply(variables, x[weight > 0], mutable=["batch_stats"])
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(squares, (y**2).mean(0), rtol=1e-5)


def test_other_methods_are_called_in_the_context():
    x, _ = _data()
    variables = _Block().init(jax.random.key(0), x[0])

    def fn(variables, x):
        options = {"method": "first", "mutable": ["batch_stats"]}
        with flax_linen.sync_batch_norms():
            return _Block().apply(variables, x, **options)[1]

    found = COMPILED_FAST["vmap"](fn, 4, variables, x)["batch_stats"]["norm"]
    dense = x.reshape(24, 3) @ variables["params"]["dense"]["kernel"]
    expected = {"mean": 0.01 * dense.mean(0), "var": 0.99 + 0.01 * dense.var(0)}
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_converted_model_may_be_a_part_of_another():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(self.inner(x))

    x = _data()[0]
    variables = Outer(_Inline()).init(jax.random.key(0), x[0])
    outer = Outer(flax_linen.convert_batch_norm(_Inline()))
    fn = lambda v, x: outer.apply(v, x, mutable=["batch_stats"])[1]  # noqa: E731
    found = COMPILED_FAST["vmap"](fn, 4, variables, x)
    expected = Outer(_Inline()).apply(
        variables, x.reshape(24, 3), mutable=["batch_stats"]
    )[1]
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_converted_model_evaluates_as_before():
    x = _data()[0][0]
    converted = flax_linen.convert_batch_norm(_Model())
    found = converted.apply(_variables(), x, train=False)
    np.testing.assert_array_equal(found, _Model().apply(_variables(), x, train=False))


def test_evaluation_communicates_nothing():
    x = _data()[0]
    model = _Model(SyncBatchNorm)

    def fn(variables, x, train):
        return model.apply(variables, x, train=train, mutable=["batch_stats"])[0]

    for train in (True, False):
        mapped = jax.vmap(
            functools.partial(fn, train=train), (None, 0), axis_name="data"
        )
        assert ("psum" in str(jax.make_jaxpr(mapped)(_variables(), x))) == train


# --- bad input --------------------------------------------------------------------


def test_what_cannot_be_done_is_named():
    x = _data()[0][0]

    def run(**arguments):
        layer = SyncBatchNorm(**arguments)
        variables = layer.init(jax.random.key(0), x, False)  # needs no axis
        layer.apply(variables, x, True)  # nor does this
        layer.apply(variables, x, False, mutable=["batch_stats"])

    with pytest.raises(ValueError, match="`axis_name='replica'` is not bound here"):
        run(axis_name="replica")
    run(axis_name=None)
    run(axis_name="auto")
    groups = {"axis_index_groups": [[0, 1], [2, 3]]}
    with pytest.raises(ValueError, match="`axis_index_groups` would leave each group"):
        SyncBatchNorm(False, **groups).init(jax.random.key(0), x)
    with pytest.raises(TypeError, match="must be a linen module, got Linear"):
        flax_linen.convert_batch_norm(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    layer = SyncBatchNorm(use_running_average=False)
    variables = layer.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="`weight` must hold one number"):
        layer.apply(variables, x, weight=jnp.ones(7), mutable=["batch_stats"])


# --- processes --------------------------------------------------------------------

NUM_SAMPLES = (11, 0, 5)  # of each process, in batches of at most 4.


def _samples(process):
    rng = np.random.default_rng(process)
    return rng.normal(size=(NUM_SAMPLES[process], 3)).astype(np.float32) + process


def _train_unevenly():
    world = jdp.init()

    @jdp.data_parallel
    def step(variables, x, weight):
        (loss, stats), grads = _replica(_with_arguments, variables, (x, weight))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        return {"params": params, **stats}, {"loss": loss}

    x = _samples(world.process_index)
    batches = [x[k : k + 4] for k in range(0, len(x), 4)]
    variables, losses = jdp.replicate(world, _variables()), []
    for batch, weight in jdp.join_batches(batches, world=world, like=x[:1]):
        variables, metrics = step(variables, batch, weight)
        losses.append(float(metrics["loss"].addressable_data(0)))
    jdp.check_replicas(variables, world=world)
    host = jax.tree.map(lambda v: np.asarray(v.addressable_data(0)), variables)
    return host, losses


@pytest.mark.multiprocess
@pytest.mark.slow
def test_processes_with_uneven_data_train_as_one_device_on_all_of_it():
    results = harness.run_checked(_train_unevenly, len(NUM_SAMPLES))
    expected, losses = _variables(), []
    for k in range(0, max(NUM_SAMPLES), 4):
        union = np.concatenate([_samples(p)[k : k + 4] for p in range(3)])
        (loss, stats), grads = _alone(expected, union)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, expected["params"], grads)
        expected = {"params": params, **stats}
        losses.append(float(loss))
    for found, found_losses in results:
        chex.assert_trees_all_close(found, expected, atol=6e-6, rtol=3e-5)
        np.testing.assert_allclose(found_losses, losses, rtol=1e-5)


# --- torch ------------------------------------------------------------------------


@functools.cache
def _torch():
    return np.load(harness.REFERENCE / "torch_2_13_batch_norm.npz")


@pytest.mark.parametrize("name", ["2d", "4d", "no_affine"])
def test_a_layer_gives_the_numbers_of_torch(name):
    case = {k: _torch()[f"{name}.{k}"] for k in ("x", "c", "y", "dx", "running_var")}
    is_affine = name != "no_affine"
    affine = {"use_bias": is_affine, "use_scale": is_affine}
    layer = SyncBatchNorm(False, axis=1, momentum=0.9, **affine)
    params = {}
    if is_affine:
        params = {k: _torch()[f"{name}.{k}"] for k in ("scale", "bias")}
    stats = {"mean": np.zeros(3, np.float32), "var": np.ones(3, np.float32)}
    # Of two replicas, the first has the first two samples.
    num_samples = len(case["x"])
    size = num_samples - 2
    rows = [[*range(2), *[0] * (size - 2)], [*range(2, num_samples)]]
    weight = np.float32([[1] * 2 + [0] * (size - 2), [1] * size])

    def fn(shared, local):
        x, c, weight = local

        def loss(params, x):
            variables = {"params": params, "batch_stats": stats}
            y, updated = layer.apply(
                variables, x, weight=weight, mutable=["batch_stats"]
            )
            each = weight.reshape(-1, *[1] * (x.ndim - 1))
            return (c * y**3 * each).sum(), (y, updated["batch_stats"])

        grads, (y, updated) = jax.grad(loss, argnums=(0, 1), has_aux=True)(shared, x)
        return grads[0], grads[1], y, updated

    mapped = jax.vmap(fn, in_axes=(None, 0), axis_name="data")
    local = case["x"][np.array(rows)], case["c"][np.array(rows)], weight
    of_params, dx, y, updated = harness.jit_fast(mapped)(params, local)
    counts = weight > 0
    np.testing.assert_allclose(y[counts], case["y"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx[counts], case["dx"], rtol=1e-4, atol=2e-5)
    for key, grads in of_params.items():
        expected = _torch()[f"{name}.d{key}"]
        np.testing.assert_allclose(grads.sum(0), expected, rtol=1e-5, atol=1e-4)
    mean = _torch()[f"{name}.running_mean"]
    np.testing.assert_allclose(updated["mean"][0], mean, rtol=1e-5, atol=1e-6)
    # That of torch is unbiased: n / (n - 1) times ours.
    count = case["x"].size // 3
    unbiased = 0.9 + (updated["var"][0] - 0.9) * count / (count - 1)
    np.testing.assert_allclose(unbiased, case["running_var"], rtol=1e-5)


class _TorchModel(nn.Module):
    @nn.compact
    def __call__(self, x, weight):
        x = SyncBatchNorm(False, momentum=0.9)(nn.Dense(16)(x), weight=weight)
        return nn.Dense(1)(nn.tanh(x))


def test_replicas_of_three_and_five_samples_train_as_torch_on_eight():
    case = _torch()
    model = _TorchModel()
    w0, b0, scale, bias, w1, b1 = (
        case[f"init.{k}"] for k in ("W0", "b0", "scale", "bias", "W1", "b1")
    )
    params = {
        "Dense_0": {"kernel": w0.T, "bias": b0},
        "SyncBatchNorm_0": {"scale": scale, "bias": bias},
        "Dense_1": {"kernel": w1.T, "bias": b1},
    }
    stats = {"mean": np.zeros(16, np.float32), "var": np.ones(16, np.float32)}
    stats = {"SyncBatchNorm_0": stats}

    @jdp.data_parallel(world=harness.local_world(2))
    def step(state, x, y, weight):
        params, stats = state

        def loss(params):
            variables = {"params": params, "batch_stats": stats}
            out, updated = model.apply(variables, x, weight, mutable=["batch_stats"])
            squares = ((out - y) ** 2)[:, 0]
            return (squares * weight).sum() / weight.sum(), updated["batch_stats"]

        fn = jdp.value_and_grad(loss, has_aux=True, weight=weight.sum())
        (loss, stats), grads = fn(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), stats), loss

    state = params, stats
    rows = np.array([0, 1, 2, 0, 0, *range(3, 8)])
    weight = np.float32([1, 1, 1, 0, 0] + [1] * 5)
    for k, (x, y) in enumerate(zip(case["X"], case["Y"], strict=True)):
        state, loss = step(state, x[rows], y[rows], weight)
        np.testing.assert_allclose(loss, case["sgd.losses"][k], rtol=1e-5)
        dense, norm, last = (
            state[0][name] for name in ("Dense_0", "SyncBatchNorm_0", "Dense_1")
        )
        arrays = dense["kernel"].T, dense["bias"], norm["scale"], norm["bias"]
        arrays = *arrays, last["kernel"].T, last["bias"]
        flat = np.concatenate([np.ravel(a) for a in arrays])
        np.testing.assert_allclose(flat, case["sgd.traj"][k + 1], atol=2e-6)
    mean = state[1]["SyncBatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, case["sgd.running_mean"], atol=2e-6)
