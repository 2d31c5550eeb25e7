"""Replicas of several devices: a step beside a model axis trains as one device does."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from jdp.replicas import mesh
from tests import harness, rarely

SPECS = {"w": P(None, "model"), "v": P("model"), "b": P(), "c": P("model")}
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(6, 8)).astype(np.float32) * 0.3,
    "v": RNG.normal(size=(8, 3)).astype(np.float32) * 0.3,
    "b": RNG.normal(size=3).astype(np.float32),
    "c": RNG.normal(size=8).astype(np.float32),
}
BATCHES = [RNG.normal(size=(8, 6)).astype(np.float32) for _ in range(3)]
ADAM = optax.adam(0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), ADAM)
MODES = {"jax partitions": (), "the step communicates": ("model",)}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def loss_fn(params, x):
    h = jnp.tanh(x @ params["w"] + params["c"])
    return jnp.mean((h @ params["v"] + params["b"]) ** 2)


def loss_of_device(params, x):
    """The same, where each device has some of the columns of `w`."""
    h = jnp.tanh(x @ params["w"] + params["c"])
    return jnp.mean((lax.psum(h @ params["v"], "model") + params["b"]) ** 2)


def alone(tx, batches=BATCHES, weigh=None):
    """Parameters and optimizer state after training on one device."""
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    for x in batches:
        grads = jax.grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def loss_in(world):
    return loss_of_device if world.manual_axes else loss_fn


def make_step(world, tx, grad_fn, **options):
    """A step of (params, opt) with `grad_fn(loss_fn)(params, x) -> (loss, grads)`."""

    @jdp.data_parallel(world=world, **options)
    def step(state, x):
        params, opt = state
        loss, grads = grad_fn(loss_in(world))(params, x)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    return step


def _weighted(loss_fn):
    def grad_fn(params, x):
        weight = jnp.float32(x.shape[0])
        return jdp.value_and_grad(loss_fn, weight=weight)(params, x)

    return grad_fn


def _marked(loss_fn):
    return lambda p, x: jdp.value_and_grad(loss_fn, find_unused=True)(p, x)[0]


def _synced(loss_fn):
    def grad_fn(params, x):
        loss, grads = jdp.local_gradients(loss_fn)(params, x)
        return jdp.average(loss), jdp.sync_gradients(grads)

    return grad_fn


def _by_hand(loss_fn):
    """As under `pmap`: `jax.grad` in a step is the gradient of one replica."""

    def grad_fn(params, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return loss, lax.pmean(grads, "data")

    return grad_fn


def _in_backward(loss_fn):
    def synced(params, x):
        return loss_fn(jdp.sync_in_backward(params), x)

    return jdp.value_and_grad(synced)


GRADIENTS = {
    "value_and_grad": jdp.value_and_grad,
    "flat": lambda f: jdp.value_and_grad(f, packing="flat"),
    "ring": lambda f: jdp.value_and_grad(f, all_reduce=jdp.collectives.ring_all_reduce),
    "weight": _weighted,
    "find_unused": _marked,
    "sync_gradients": _synced,
    "by hand": _by_hand,
    "in the backward pass": _in_backward,
    "micro-batches": lambda f: jdp.accumulate_gradients(f, 2),
    "hook": lambda f: jdp.value_and_grad(f, hook=jdp.hooks.none()),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "gradients", rarely.cases(GRADIENTS, often=list(GRADIENTS)[::2])
)
def test_training_equals_one_device(gradients, mode):
    world = harness.mesh_world((2, 2), manual=MODES[mode])
    step = make_step(world, ADAM, GRADIENTS[gradients])
    params = jdp.replicate(world, PARAMS, specs=SPECS)
    state = params, ADAM.init(params)
    for x in BATCHES:
        state, _ = step(state, x)
    chex.assert_trees_all_close(state, alone(ADAM), **CLOSE)
    # Each array is cut as before, so that the program is compiled once.
    found = {k: x.sharding.spec for k, x in state[0].items()}
    assert found == SPECS
    assert step._program.compiled(None)._cache_size() == 1
    jdp.check_replicas(state, world=world)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap", [jdp.distributed_optimizer, jdp.zero1])
def test_optimizers_that_average_equal_one_device(wrap, mode):
    world = harness.mesh_world((2, 2), manual=MODES[mode])
    mesh.set_current_world(world)
    try:
        tx = wrap(ADAM)
        step = make_step(world, tx, jdp.local_gradients)
        params = jdp.replicate(world, PARAMS, specs=SPECS)
        state = params, tx.init(params)
        for x in BATCHES:
            state, _ = step(state, x)
        expected = alone(ADAM)
        chex.assert_trees_all_close(state[0], expected[0], **CLOSE)
        if wrap is not jdp.zero1:
            return
        for leaf in state[1].own.value:  # A quarter on each of four devices.
            if leaf.size > 4:
                assert leaf.addressable_shards[0].data.size * 4 == leaf.size
        plain = jdp.consolidate(state[1], like=ADAM.init(params))
        chex.assert_trees_all_close(plain, expected[1], **CLOSE)
        assert plain[0].mu["w"].sharding.spec == P(None, "model")
        chex.assert_trees_all_equal(jdp.spread(plain, like=state[1]), state[1])
        host = jax.tree.map(np.asarray, state[1])
        whole = jdp.consolidate(host, like=jax.eval_shape(ADAM.init, PARAMS))
        chex.assert_trees_all_equal(whole, plain)
    finally:
        mesh.set_current_world(None)


@pytest.mark.parametrize("mode", MODES)
def test_a_sharded_state_goes_to_another_number_of_replicas(mode):
    tx = jdp.zero1(ADAM)
    states = {}
    try:
        for n in (2, 4):
            world = harness.mesh_world((n, 2), manual=MODES[mode])
            mesh.set_current_world(world)
            step = make_step(world, tx, jdp.local_gradients)
            params = jdp.replicate(world, PARAMS, specs=SPECS)
            state = params, tx.init(params)
            if n == 4:
                template = jdp.checkpoint_template(state, num_replicas=2)
                saved = jax.tree.map(np.asarray, states[2])
                shapes = [jax.tree.map(np.shape, x) for x in (template, saved)]
                assert shapes[0] == shapes[1]
                state = jdp.reshard(saved, like=state)
            state, _ = step(state, BATCHES[len(states)])
            states[n] = state
    finally:
        mesh.set_current_world(None)
    expected, _ = alone(ADAM, BATCHES[:2])
    chex.assert_trees_all_close(states[4][0], expected, **CLOSE)


def test_jax_partitions_what_mixes_parameters():
    """The norm of all gradients needs the parts of all devices."""
    world = harness.mesh_world((2, 2))
    step = make_step(world, CLIPPED, jdp.value_and_grad)
    params = jdp.replicate(world, PARAMS, specs=SPECS)
    state = params, CLIPPED.init(params)
    for x in BATCHES:
        state, _ = step(state, x)
    chex.assert_trees_all_close(state, alone(CLIPPED), **CLOSE)


HOOKS = {
    "top_k": jdp.hooks.top_k(1.0),
    "power_sgd": jdp.hooks.power_sgd(3, min_compression_rate=0.1, start_step=1),
    "chain": jdp.hooks.chain(jdp.hooks.power_sgd(3), jdp.hooks.top_k(1.0)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", rarely.cases(HOOKS, often=("top_k", "chain")))
def test_the_state_of_a_hook_keeps_its_layout(name, mode):
    world, hook, tx = harness.mesh_world((2, 2), manual=MODES[mode]), HOOKS[name], ADAM

    @jdp.data_parallel(world=world)
    def step(state, x):
        params, opt, kept = state
        grad_fn = jdp.value_and_grad(loss_in(world), hook=hook, hook_state=kept)
        (_, grads), kept = grad_fn(params, x)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt, kept), {}

    params = jdp.replicate(world, PARAMS, specs=SPECS)
    kept = jdp.hooks.init_state(hook, params, world=world)
    before = [x.sharding.spec for x in jax.tree.leaves(kept)]
    state = params, tx.init(params), kept
    for x in BATCHES:
        state, _ = step(state, x)
    assert [x.sharding.spec for x in jax.tree.leaves(state[2])] == before
    assert step._program.compiled(None)._cache_size() == 1
    if name == "top_k":  # All of the gradient.
        chex.assert_trees_all_close(state[:2], alone(tx), **CLOSE)


LOCAL = {
    "local_sgd": (jdp.local_sgd, {"period": 1}),
    "diloco": (jdp.diloco, {"period": 1, "outer": optax.sgd(1.0)}),
    "diloco, delayed": (
        jdp.diloco,
        {"period": 2, "num_fragments": 2, "delay": 1, "mixing": 0.0},
    ),
}


@pytest.mark.parametrize("name", rarely.cases(LOCAL, often=("local_sgd", "diloco")))
def test_local_training_is_the_same_in_both_modes(name):
    make, options = LOCAL[name]
    found = []
    for manual in MODES.values():
        world = harness.mesh_world((2, 2), manual=manual)
        local = make(optax.sgd(0.1, momentum=0.9), world=world, **options)

        @jdp.data_parallel(world=world)
        def step(state, x, world=world, local=local):
            loss, grads = jdp.local_gradients(loss_in(world))(state.params.value, x)
            return local.update(grads, state), {"loss": loss}

        state = local.init(jdp.replicate(world, PARAMS, specs=SPECS))
        before = [x.sharding.spec for x in jax.tree.leaves(state)]
        for x in BATCHES:
            state, metrics = step(state, x)
        assert [x.sharding.spec for x in jax.tree.leaves(state)] == before
        assert step._program.compiled(None)._cache_size() == 1
        found.append((metrics["loss"], np.asarray(state.params.value["b"])))
    chex.assert_trees_all_close(*found, **CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_replicas_and_metrics(mode):
    """A row per replica, or per device where devices differ."""
    world = harness.mesh_world((2, 2), manual=MODES[mode])

    @jdp.data_parallel(world=world)
    def step(state, x):
        params, own = state
        own = {k: v + x.mean() for k, v in own.value.items()}
        sums = jdp.sync_buffers({"mean": x.mean(0)}, policy="mean")
        first = jdp.broadcast_from(x[0], 1)
        metrics = {**sums, "first": first, "rows": jdp.PerReplica(x[:, 0])}
        return (params, jdp.PerReplica(own)), metrics

    params = jdp.replicate(world, PARAMS, specs=SPECS)
    own = jdp.copy_per_replica({"c": params["c"], "b": params["b"]}, world=world)
    (_, own), metrics = step((params, own), BATCHES[0])
    halves = BATCHES[0].reshape(2, 4, 6)
    c = PARAMS["c"] + halves.mean((1, 2))[:, None]
    expected = {
        "c": c.reshape(4, 4) if MODES[mode] else c,
        "b": PARAMS["b"] + halves.mean((1, 2))[:, None],
    }
    chex.assert_trees_all_close(own.value, expected, **CLOSE)
    np.testing.assert_allclose(metrics["mean"], BATCHES[0].mean(0), **CLOSE)
    np.testing.assert_array_equal(metrics["first"], BATCHES[0][4])
    np.testing.assert_array_equal(metrics["rows"].value, halves[:, :, 0])


def test_a_pair_of_data_axes_goes_beside_two_model_axes():
    axes = ("model", "node", "pipe", "data")
    world = harness.mesh_world(
        (2, 2, 1, 2), axes, axis_name=("node", "data"), manual=("model",)
    )
    assert (world.num_replicas, world.model_axes) == (4, ("model", "pipe"))
    params = jdp.replicate(world, PARAMS, specs=SPECS)

    @jdp.data_parallel(world=world)
    def step(params, x):
        grad_fn = jdp.value_and_grad(loss_of_device, axis_name=("node", "data"))
        loss, grads = grad_fn(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), {
            "loss": loss,
            "sums": jdp.PerReplica(x.sum()),
        }

    params, metrics = step(params, BATCHES[0])
    loss, grads = jax.value_and_grad(loss_fn)(PARAMS, BATCHES[0])
    expected = jax.tree.map(lambda p, g: p - g, PARAMS, grads)
    chex.assert_trees_all_close(params, expected, **CLOSE)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    sums = BATCHES[0].reshape(4, -1).sum(1)
    np.testing.assert_allclose(metrics["sums"].value, sums, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_one_replica_of_several_devices(mode):
    world = harness.mesh_world((1, 2), manual=MODES[mode])
    step = make_step(world, ADAM, jdp.value_and_grad)
    params = jdp.replicate(world, PARAMS, specs=SPECS)
    state = params, ADAM.init(params)
    for x in BATCHES:
        state, _ = step(state, x)
    chex.assert_trees_all_close(state, alone(ADAM), **CLOSE)


def test_arrays_of_the_users_own_mesh_are_in_their_place():
    """`jax.make_mesh` makes axes of other types than `World.mesh` has."""
    world = harness.mesh_world((2, 2))
    own = Mesh(
        world.mesh.devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2
    )
    step = make_step(world, ADAM, jdp.value_and_grad)
    params = {
        k: jax.device_put(v, NamedSharding(own, SPECS[k])) for k, v in PARAMS.items()
    }
    state = params, ADAM.init(params)
    with jax.set_mesh(own):
        for x in BATCHES:
            state, _ = step(state, x)
    chex.assert_trees_all_close(state, alone(ADAM), **CLOSE)
    assert state[0]["w"].sharding == NamedSharding(world.mesh, SPECS["w"])


def test_what_is_cut_along_the_data_axis_is_gathered_along_it_alone():
    world = harness.mesh_world((2, 2))
    both = NamedSharding(world.mesh, P("data", "model"))
    x = jax.device_put(PARAMS["w"], both)
    found = jdp.replicate(world, {"x": x})["x"]
    assert found.sharding.spec == P(None, "model")
    np.testing.assert_array_equal(found, PARAMS["w"])
    whole = jdp.replicate(world, {"x": found}, specs=P())["x"]
    assert whole.sharding == world.replicated
    cut = jdp.replicate(world, {"x": whole}, specs={"x": P("model")})["x"]
    assert cut.sharding.spec == P("model")
    np.testing.assert_array_equal(cut, PARAMS["w"])


def test_keys_numbers_and_other_dtypes_are_cut_too():
    world = harness.mesh_world((2, 2))
    tree = {"key": jax.random.split(jax.random.key(0), 4), "n": 3, "i": np.arange(4)}
    specs = {"key": P("model"), "n": None, "i": P("model")}
    found = jdp.replicate(world, tree, specs=specs)

    @jdp.data_parallel(world=world)
    def step(state, x):
        return {**state, "i": state["i"] + 1}, {"x": x.sum()}

    found, _ = step(found, BATCHES[0])
    assert found["key"].sharding.spec == P("model")
    data = jax.random.key_data(tree["key"])
    np.testing.assert_array_equal(jax.random.key_data(found["key"]), data)
    assert (int(found["n"]), found["i"].tolist()) == (3, [1, 2, 3, 4])


def test_different_bits_of_a_cut_array_are_found():
    world = harness.mesh_world((2, 2))
    good = jdp.replicate(world, {"w": PARAMS["w"]}, specs=P(None, "model"))
    shards = [s.data for s in good["w"].addressable_shards]
    shards[3] = shards[3].at[0, 1].add(1)
    bad = jax.make_array_from_single_device_arrays((6, 8), good["w"].sharding, shards)
    jdp.check_replicas(good, world=world)
    with pytest.raises(
        RuntimeError, match=r"`\['w'\]` differs between replicas of one"
    ):
        jdp.check_replicas({"w": bad}, world=world)


def test_a_description_counts_what_a_device_sends():
    found = []
    for manual in MODES.values():
        world = harness.mesh_world((2, 2), manual=manual)
        step = make_step(world, ADAM, jdp.value_and_grad)
        params = jdp.replicate(world, PARAMS, specs=SPECS)
        found.append(jdp.describe(step, (params, ADAM.init(params)), BATCHES[0]))
    partitioned, own = (x.synchronizations[0] for x in found)
    assert partitioned.packing == "tuple"  # Packing would move the parts of devices.
    numbers = [{leaf.path for leaf in bucket.leaves} for bucket in own.buckets]
    assert {"['b']"} in numbers and {"['c']", "['v']", "['w']"} in numbers
    # A device has half of w, v and c.
    assert sum(b.num_bytes for b in own.buckets) == 4 * (24 + 12 + 4 + 3)


# --- Wrong steps ---------------------------------------------------------------------


def _run(world, loss=None, metrics=None, update=None, specs=SPECS):
    @jdp.data_parallel(world=world)
    def step(params, x):
        value, grads = jdp.value_and_grad(loss or loss_in(world))(params, x)
        new = jax.tree.map(lambda p, g: p - g, params, grads)
        if update is not None:
            new = update(params, grads)
        return new, {"loss": value, **(metrics(params) if metrics else {})}

    return step(jdp.replicate(world, PARAMS, specs=specs), BATCHES[0])


def _clip(params, grads):
    clipped, _ = optax.clip_by_global_norm(0.1).update(grads, optax.EmptyState())
    return optax.apply_updates(params, clipped)


REFUSED_STEPS = {
    "the loss of a part": (
        {"loss": loss_fn},
        "The loss may differ along the model axis 'model'.*lax.psum.*leave "
        "`manual_axes` out",
    ),
    "a metric of a part": (
        {"metrics": lambda p: {"norm": jnp.sum(p["w"] ** 2)}},
        r"metric `\['norm'\]` may differ along the model axis 'model' \(test_model",
    ),
    "a norm of parts": (
        {"update": _clip},
        r"leaf `\['b'\]` may differ along the model axis 'model'.*clip_by_global_norm",
    ),
    "a new leaf": (
        {"update": lambda p, g: {**p, "new": g["w"]}},
        r"leaf `\['new'\]` may differ along the model axis 'model'",
    ),
    "a collective that some devices reach": (
        {
            "metrics": lambda p: {
                "n": lax.cond(
                    p["c"].sum() > 0,
                    lambda: lax.psum(p["c"].sum(), "model"),
                    lambda: p["b"].sum(),
                )
            }
        },
        "is in a branch of a `cond`",
    ),
}


@pytest.mark.parametrize("case", REFUSED_STEPS)
def test_a_step_of_one_device_that_forgets_the_others_is_refused(case):
    options, message = REFUSED_STEPS[case]
    world = harness.mesh_world((2, 2), manual=("model",))
    with pytest.raises(ValueError, match=message):
        _run(world, **options)


def test_a_step_that_does_not_average_is_refused_in_both_modes():
    for manual in MODES.values():
        world = harness.mesh_world((2, 2), manual=manual)

        @jdp.data_parallel(world=world)
        def step(params, x, world=world):
            grads = jax.grad(loss_in(world))(params, x)
            return jax.tree.map(lambda p, g: p - g, params, grads), {}

        with pytest.raises(ValueError, match="depends on a replica's own samples"):
            step(jdp.replicate(world, PARAMS, specs=SPECS), BATCHES[0])


@pytest.mark.parametrize(
    "name",
    [lambda x: lax.psum(x, "model"), lambda x: jdp.average(x, axis_name="model")],
)
def test_the_name_of_an_axis_that_jax_partitions_is_explained(name):
    world = harness.mesh_world((2, 2))
    with pytest.raises((NameError, ValueError)) as info:
        _run(world, loss=lambda p, x: jnp.mean(name(x @ p["w"])))
    assert "manual_axes='model'" in "".join(info.value.__notes__)


WRONG_SPECS = {
    "the data axis": (
        {"w": P("data")},
        ValueError,
        r"`tree\['w'\]` along 'data', which",
    ),
    "no axis": (
        {"w": P("pipe")},
        ValueError,
        "along 'pipe', which is not a model axis",
    ),
    "a size": (
        {"w": P("model"), "b": P("model")},
        ValueError,
        r"`tree\['b'\]`, shape \(3",
    ),
    "a rank": ({"b": P(None, "model")}, ValueError, r"`tree\['b'\]`, shape \(3,\), as"),
    "a text": ({"b": "model"}, TypeError, r"got 'model' for `tree\['b'\]`"),
}


@pytest.mark.parametrize("case", WRONG_SPECS)
def test_specs_that_do_not_fit_are_named(case):
    specs, kind, message = WRONG_SPECS[case]
    world = harness.mesh_world((2, 2))
    with pytest.raises(kind, match=message):
        jdp.replicate(world, PARAMS, specs={**dict.fromkeys(PARAMS), **specs})


def test_specs_of_another_tree_and_of_rows_are_refused():
    world = harness.mesh_world((2, 2))
    with pytest.raises(ValueError, match="neither a tree like `tree` nor a prefix"):
        jdp.replicate(world, PARAMS, specs={"w": P()})
    rows = jdp.PerReplica(np.ones((2, 4), np.float32))
    with pytest.raises(ValueError, match="is in a `jdp.PerReplica`"):
        jdp.replicate(world, rows, specs=P("model"))
    with pytest.raises(ValueError, match="there is none"):
        jdp.replicate(harness.local_world(2), PARAMS, specs=P("model"))


# --- In processes --------------------------------------------------------------------


def _train(world, tx, wrap=lambda tx: tx):
    """Trains on this process' samples; returns the parameters on the host."""
    grad_fn = jdp.local_gradients if wrap is jdp.zero1 else jdp.value_and_grad
    tx = wrap(tx)
    step = make_step(world, tx, grad_fn)
    params = PARAMS if world.is_main_process else jax.tree.map(np.zeros_like, PARAMS)
    params = jdp.replicate(world, params, specs=SPECS)
    state = params, jdp.replicate(world, tx.init(params))
    for x in BATCHES:
        rows = x.reshape(world.num_replicas, -1, 6)[list(world.local_replicas)]
        state, _ = step(state, rows.reshape(-1, 6))
    jdp.check_replicas(state, world=world)
    everywhere = jax.jit(lambda x: x, out_shardings=world.replicated)
    cuts = {k: str(x.sharding.spec) for k, x in state[0].items()}
    return jax.tree.map(lambda x: np.asarray(everywhere(x)), state[0]), cuts


def _join(world):
    """Processes with 1 and 3 batches, padded and weighted."""
    mine = BATCHES[: 1 if world.is_main_process else 3]
    seen = []

    @jdp.data_parallel(world=world)
    def step(params, x, weight):
        def loss(params, x, weight):
            y = jnp.tanh(x @ params["w"]).sum(1)
            return (y * weight).sum() / weight.sum()

        grad_fn = jdp.value_and_grad(loss, weight=weight.sum())
        value, grads = grad_fn(params, x, weight)
        return jax.tree.map(lambda p, g: p - g, params, grads), {"loss": value}

    params = jdp.replicate(world, {"w": PARAMS["w"]}, specs=P(None, "model"))
    for batch, weight in jdp.join_batches([{"x": x} for x in mine], world=world):
        params, metrics = step(params, batch["x"], weight)
        seen.append(float(metrics["loss"]))
    return seen


def _checks_in_processes():
    shape = {"data": 2, "model": 2}
    world = jdp.init(
        mesh=lambda: jax.make_mesh(tuple(shape.values()), tuple(shape)),
    )
    assert (world.num_replicas, world.num_local_replicas) == (2, 1)
    assert world.local_replicas == (world.process_index,)
    found = {"zero1": _train(world, ADAM, jdp.zero1), "join": _join(world)}
    manual = dataclasses.replace(world, manual_axes=("model",))
    # The devices of each replica belong to both processes.
    turned = Mesh(world.mesh.devices.T, ("data", "model"))
    across = dataclasses.replace(world, mesh=turned)
    assert across.local_replicas == (0, 1) and not across.has_whole_replicas
    both = dataclasses.replace(across, manual_axes=("model",))
    found |= {
        "partitioned": _train(world, CLIPPED),
        "own": _train(manual, ADAM),
        "partitioned across": _train(across, CLIPPED),
        "own across": _train(both, ADAM),
    }
    for name, each in (("bits", world), ("bits across", across)):
        w = jdp.replicate(each, {"w": PARAMS["w"]}, specs=P(None, "model"))["w"]
        shards = [s.data for s in _shards(w)]
        if not world.is_main_process:  # The same place, on the last device of all.
            shards[1] = shards[1].at[2, 1].set(7.0)
        bad = jax.make_array_from_single_device_arrays((6, 8), w.sharding, shards)
        with pytest.raises(RuntimeError) as info:
            jdp.check_replicas({"w": bad}, world=each)
        found[name] = str(info.value)

    @jdp.data_parallel(world=across)
    def step(params, x):
        return params, {"x": x.sum()}

    with pytest.raises(RuntimeError) as info:
        step({}, {"x": BATCHES[world.process_index][:2]})
    found["samples"] = str(info.value)
    return found


def _shards(x):
    return sorted(x.addressable_shards, key=lambda shard: shard.device.id)


@pytest.mark.multiprocess
def test_two_processes_of_two_devices():
    first, second = harness.run_checked(_checks_in_processes, 2, devices_per_process=2)
    across = first.pop("bits across"), second.pop("bits across")
    chex.assert_trees_all_equal(first, second)
    cuts = {"b": "P()", "c": "P('model',)", "v": "P('model',)", "w": "P(None, 'model')"}
    expected = {
        "zero1": ADAM,
        "partitioned": CLIPPED,
        "own": ADAM,
        "partitioned across": CLIPPED,
        "own across": ADAM,
    }
    for name, tx in expected.items():
        params, found = first[name]
        chex.assert_trees_all_close(params, alone(tx)[0], **CLOSE)
        assert found == cuts, name
    losses, w = [], PARAMS["w"]
    for k, x in enumerate(BATCHES):  # Both processes pass the same batches.
        del k
        value, grads = jax.value_and_grad(lambda w, x: jnp.tanh(x @ w).sum(1).mean())(
            w, x
        )
        losses.append(float(value))
        w = w - grads
    np.testing.assert_allclose(first["join"], losses, rtol=1e-5)
    assert re.search(r"`\['w'\]` differs .* at \(2, 5\) .*, 7.0 on pro", first["bits"])
    # The second replica, which both processes have gathered.
    assert all("`['w']` differs between replicas of one" in text for text in across)
    assert "Processes 0 and 1 have devices of replica 0" in first["samples"]
    assert "`batch[0]['x']` differs" in first["samples"]
