"""`flax_linen.TrainState`: a step of linen trains as on one device with all samples."""

import functools
import zlib
from typing import Any

import chex
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

import jdp
from jdp import flax_linen
from tests import harness, rarely

N = 4
KEY = jax.random.key(1)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, *, training=True):
        x = nn.BatchNorm(use_running_average=not training)(nn.Dense(8)(x))
        x = nn.Dropout(0.4, deterministic=not training)(nn.relu(x))
        return nn.Dense(1)(x)[..., 0]


NET = Net()
_BATCH = np.random.default_rng(0).normal(size=(3, 16, 4)).astype(np.float32)
BATCHES = [{"x": b[:, :3], "y": b[:, 3]} for b in _BATCH]
VARIABLES = NET.init(jax.random.key(0), BATCHES[0]["x"], training=False)


def _loss(state, batch, rngs, params):
    y, updates = state.apply_fn(
        {"params": params, **state.collections}
        if isinstance(state, flax_linen.TrainState)
        else {"params": params, "batch_stats": state.batch_stats},
        batch["x"],
        mutable=["batch_stats"],
        rngs=rngs,
    )
    return ((y - batch["y"]) ** 2).mean(), updates


class FlaxState(train_state.TrainState):
    batch_stats: Any


def _alone(tx):
    """Of Flax, on one device."""
    state = FlaxState.create(
        apply_fn=NET.apply,
        params=VARIABLES["params"],
        batch_stats=VARIABLES["batch_stats"],
        tx=tx,
    )

    @harness.jit_fast
    def step(state, batch):
        key = jax.random.fold_in(KEY, state.step)
        rngs = {"dropout": jax.random.fold_in(key, zlib.crc32(b"dropout"))}
        loss_fn = functools.partial(_loss, state, batch, rngs)
        (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
        return state, loss

    losses = []
    for batch in BATCHES:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, state.params, state.batch_stats, int(state.step)


def _create(tx, **kwargs):
    return flax_linen.TrainState.create(
        apply_fn=NET.apply,
        params=VARIABLES["params"],
        tx=tx,
        collections={"batch_stats": VARIABLES["batch_stats"], "other": {}},
        key=KEY,
        **kwargs,
    )


def _train(state, value_and_grad, **update_args):
    @jdp.data_parallel(
        world=harness.local_world(N), compiler_options=harness.fast_options()
    )
    def step(state, batch):
        loss_fn = functools.partial(_loss, state, batch, state.rngs("dropout"))
        (loss, updates), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
        given = {k: fn(grads) for k, fn in update_args.items()}
        state = state.apply_gradients(
            grads=grads, collections=updates, update_args=given
        )
        return state, {"loss": loss}

    losses = []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert state.collections.keys() == {"batch_stats", "other"}
    return losses, state.params, state.collections["batch_stats"], int(state.step)


def _all_used(grads):
    return jax.tree.map(lambda _: True, grads)


SGD = optax.sgd(0.1, momentum=0.9)
WORLD = harness.local_world(N)
OPTIMIZERS = {
    "optax": (SGD, jdp.value_and_grad, {}),
    "distributed_optimizer": (jdp.distributed_optimizer(SGD), jax.value_and_grad, {}),
    "zero1": (jdp.zero1(SGD, world=WORLD), jax.value_and_grad, {}),
    "skip_unused": (jdp.skip_unused(SGD), jdp.value_and_grad, {"used": _all_used}),
}


@pytest.mark.parametrize("name", rarely.cases(OPTIMIZERS, often=("optax",)))
def test_it_trains_with_the_optimizers_of_jdp_as_on_one_device(name):
    tx, value_and_grad, update_args = OPTIMIZERS[name]
    found = _train(_create(tx), value_and_grad, **update_args)
    chex.assert_trees_all_close(found, _alone(SGD), atol=1e-6)


def test_classes_derive_from_it_as_from_that_of_flax():
    class Own(flax_linen.TrainState):
        batch_stats: Any
        note: str = "kept"

    state = Own.create(
        apply_fn=NET.apply,
        params=VARIABLES["params"],
        tx=SGD,
        batch_stats=VARIABLES["batch_stats"],
    )
    assert state.note == "kept" and state.key is None and state.collections == {}
    assert isinstance(state, train_state.TrainState)
    grads = jax.tree.map(jnp.ones_like, state.params)
    after = state.apply_gradients(grads=grads, batch_stats=3)
    assert after.batch_stats == 3 and after.tx is state.tx and int(after.step) == 1


class Redeclared(flax_linen.TrainState):
    """Class of a script with a field of its own that `TrainState` has, too."""

    batch_stats: Any
    key: jax.Array | None = None


class RedeclaredAgain(Redeclared):
    averages: Any
    dynamic_scale: Any


def test_a_class_may_declare_optional_fields_anew_before_others():
    options = {"apply_fn": None, "params": {"w": jnp.ones(2)}, "tx": optax.sgd(0.1)}
    state = Redeclared.create(**options, batch_stats=1)
    assert (state.batch_stats, state.key) == (1, None)
    state = RedeclaredAgain.create(
        **options, batch_stats=1, averages=2, dynamic_scale=3, key=KEY
    )
    assert (state.averages, state.dynamic_scale, state.key) == (2, 3, KEY)
    assert set(state.rngs("dropout")) == {"dropout"}
    with pytest.raises(TypeError, match="dynamic_scale"):
        RedeclaredAgain.create(**options, batch_stats=1, averages=2)


def test_the_first_step_is_the_program_of_all_steps():
    state = _create(SGD)
    assert state.step.dtype == jnp.int32 and not state.step.weak_type
    # A state that is made again, as after a restart, is of the same program.
    assert jax.tree.structure(state) == jax.tree.structure(_create(SGD))


def test_batch_norms_stay_those_of_flax_if_asked():
    assert _create(SGD, sync_batch_norm=False).apply_fn == NET.apply

    def alone(state, x):
        variables = state.variables()
        return state.apply_fn(
            variables, x, mutable=["batch_stats"], rngs={"dropout": KEY}
        )

    x = BATCHES[0]["x"]
    synced, plain = _create(SGD), _create(SGD, sync_batch_norm=False)
    # Where there are no replicas, both are the same.
    chex.assert_trees_all_close(alone(synced, x), alone(plain, x), atol=1e-5)


def test_a_step_that_is_not_finite_changes_neither_parameters_nor_optimizer():
    state = _create(optax.adam(0.1))
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.params)
    after = state.apply_gradients(grads=grads, is_finite=jnp.asarray(False))
    chex.assert_trees_all_equal(after.params, state.params)
    chex.assert_trees_all_equal(after.opt_state, state.opt_state)
    assert int(after.step) == 1
    after = state.apply_gradients(grads=state.params, is_finite=jnp.asarray(True))
    expected = state.apply_gradients(grads=state.params)
    chex.assert_trees_all_equal(after.params, expected.params)


@pytest.mark.parametrize("is_finite", [False, True])
def test_collections_of_a_step_that_is_not_finite_stay_where_they_would_not_be(
    is_finite,
):
    old = {"mean": jnp.ones(2), "var": jnp.ones(2), "count": jnp.int32(3)}
    new = {
        "mean": jnp.array([2, jnp.nan]),
        "var": jnp.full(2, 3.0),
        "count": jnp.int32(4),
    }
    # A collection that comes up later has nothing to stay at.
    state = _create(SGD).replace(collections={"batch_stats": old, "other": {}})
    after = state.apply_gradients(
        grads=state.params,
        is_finite=jnp.asarray(is_finite),
        collections={"batch_stats": new, "other": {"x": jnp.array(jnp.inf)}},
    )
    expected = new if is_finite else new | {"mean": old["mean"]}
    chex.assert_trees_all_equal(after.collections["batch_stats"], expected)
    assert float(after.collections["other"]["x"]) == jnp.inf


def test_it_goes_to_bytes_and_back():
    state = _create(SGD, dynamic_scale=flax_linen.DynamicScale())
    state = state.replace(key=jax.random.key_data(state.key))
    read = flax.serialization.from_bytes(state, flax.serialization.to_bytes(state))
    chex.assert_trees_all_equal(read, state)
    assert type(read.dynamic_scale) is flax_linen.DynamicScale


def test_keys_of_a_step_differ_by_name_and_step():
    state = _create(SGD)
    keys = [*state.rngs("dropout", "noise").values()]
    keys += state.replace(step=state.step + 1).rngs("dropout").values()
    data = {tuple(np.asarray(jax.random.key_data(key))) for key in keys}
    assert len(data) == 3
    alone = state.rngs("noise")["noise"]  # In another call than "dropout".
    assert jax.random.key_data(alone).tolist() in map(list, data)
    with pytest.raises(ValueError, match="The state has no key. Pass `key=jax.random"):
        state.replace(key=None).rngs("dropout")


def test_what_is_no_optimizer_is_named():
    with pytest.raises(TypeError, match="`tx` must be an optax transformation"):
        _create(0.1)
    with pytest.raises(TypeError, match="`tx` is a `jdp.LocalTraining`, whose"):
        _create(jdp.local_sgd(SGD, period=2, world=WORLD))


def test_the_inside_of_a_collection_is_not_taken_for_collections():
    state = _create(SGD)
    stats = VARIABLES["batch_stats"]
    after = state.apply_gradients(
        grads=state.params, collections={"batch_stats": stats}
    )
    chex.assert_trees_all_equal(
        after.collections, {**state.collections, "batch_stats": stats}
    )
    with pytest.raises(ValueError, match="'BatchNorm_0', which is not a collection"):
        state.apply_gradients(grads=state.params, collections=stats)
    sown = {"batch_stats": stats, "intermediates": {"h": (jnp.ones(2),)}}
    with pytest.raises(ValueError, match="such as `intermediates`"):
        state.apply_gradients(grads=state.params, collections=sown)
    # A state without collections gets its first ones in a step.
    bare = state.replace(collections={}).apply_gradients(
        grads=state.params, collections=sown
    )
    assert bare.collections.keys() == sown.keys()


@pytest.mark.parametrize(
    "inner",
    [
        {},
        {"batch_stats": VARIABLES["batch_stats"]},
        VARIABLES["batch_stats"]["BatchNorm_0"],
    ],
)
def test_a_collection_at_another_level_is_refused(inner):
    state = _create(SGD)
    with pytest.raises(ValueError, match=r"lacks the variable `\['BatchNorm_0'\]"):
        state.apply_gradients(grads=state.params, collections={"batch_stats": inner})


def test_a_collection_that_is_a_field_of_the_state_is_refused():
    params = VARIABLES["params"]
    stats = VARIABLES["batch_stats"]
    state = Redeclared.create(apply_fn=None, params=params, tx=SGD, batch_stats=stats)
    with pytest.raises(ValueError, match="'batch_stats', which is a field"):
        state.apply_gradients(grads=params, collections={"batch_stats": stats})


def test_collections_do_not_have_the_parameters():
    options = {"apply_fn": None, "params": VARIABLES["params"], "tx": SGD}
    with pytest.raises(ValueError, match='has "params"'):
        flax_linen.TrainState.create(**options, collections=VARIABLES)
    state = flax_linen.TrainState.create(**options)
    with pytest.raises(ValueError, match='has "params"'):
        state.apply_gradients(grads=state.params, collections=VARIABLES)
    state = state.replace(collections=VARIABLES)
    assert state.variables({"w": 1})["params"] == {"w": 1}


@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
def test_parameters_in_boxes_train_unboxed(box):
    """Flax constrains a boxed parameter to axes that the mesh may not have."""
    init = box(nn.initializers.lecun_normal(), (None, "model"))
    net = nn.Dense(1, kernel_init=init)
    boxed = net.init(jax.random.key(0), BATCHES[0]["x"])["params"]

    def run(params):
        state = flax_linen.TrainState.create(apply_fn=net.apply, params=params, tx=SGD)

        @jdp.data_parallel(world=WORLD, donate_state=False)
        def step(state, batch):
            def loss_fn(params):
                y = state.apply_fn({"params": params}, batch["x"])[:, 0]
                return ((y - batch["y"]) ** 2).mean()

            loss, grads = jdp.value_and_grad(loss_fn)(state.params)
            return state.apply_gradients(grads=grads), {"loss": loss}

        return step(state, BATCHES[0])[0].params

    expected = run(nn.unbox(boxed))
    if box is nn.with_logical_partitioning:  # Without rules, no axis of a mesh.
        chex.assert_trees_all_equal(nn.unbox(run(boxed)), expected)
        return
    with pytest.raises(ValueError, match="Resource axis: model") as raised:
        run(boxed)
    assert "`flax.linen.unbox(variables)`" in raised.value.__notes__[0]
