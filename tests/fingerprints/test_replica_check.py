"""Replica checks: a replica with other bits is named, with the first leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jdp
import jdp.flax_nnx
from tests import harness

# Bits that the step leaves alone, so that a wrong one stays.
STATE = {
    "a": np.arange(6, dtype="f4").reshape(2, 3),
    "table": np.arange(8, dtype="i4").reshape(4, 2),
    "w": np.linspace(-1, 1, 6, dtype="f4").reshape(2, 3),
}


def _make_step(world, **options):
    @jdp.data_parallel(world=world, **options)
    def step(state, x):
        grads = jdp.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])[1]
        return {**state, "w": state["w"] - 0.1 * grads}, {}

    return step


def _flip(x, devices, bit=0):
    """The array with one bit of its second element changed on some devices."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device in devices:
            data.reshape(-1).view(np.uint32)[1] ^= np.uint32(1 << bit)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def _train(world, replicas, *, leaf="table", at=4, num_steps=8, every=2, **options):
    """Takes steps, before one of which a bit of a leaf changes on some replicas."""
    step = _make_step(world, check_every=every, **options)
    state = jdp.replicate(world, options.pop("state", STATE))
    x = np.ones((2 * len(world.local_replicas), 2), "f4")
    for i in range(num_steps):
        if i == at:
            devices = {device for r in replicas for device in world.grid[r]}
            state = {**state, leaf: _flip(state[leaf], devices)}
        state, _ = step(state, x)
    return state


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_replicas_that_are_the_same_pass(num_replicas):
    _train(harness.local_world(num_replicas), [])


@pytest.mark.parametrize("replica", [0, 2, 3])
@pytest.mark.parametrize("donates", [True, False])
def test_the_replica_that_differs_is_named(replica, donates):
    world = harness.local_world(4)
    with pytest.raises(RuntimeError) as caught:
        _train(world, [replica], donate_state=donates)
    device = world.grid[replica, 0]
    assert str(caught.value).startswith(
        f"After call 6 of the step `step`, `['table']` differs on replica {replica} "
        f"({device} of process 0) from the other 3. After call 4 all were the same."
    )


def test_of_two_replicas_both_are_named():
    world = harness.local_world(2)
    with pytest.raises(RuntimeError) as caught:
        _train(world, [1], at=0)
    first, second = (f"{device} of process 0" for device in world.grid[:, 0])
    assert str(caught.value).startswith(
        f"After call 2 of the step `step`, `['table']` differs between replica 0 "
        f"({first}) and replica 1 ({second}), without a majority. It was not compared "
        "before."
    )


def test_several_replicas_and_leaves_are_counted():
    world = harness.local_world(5)
    step = _make_step(world, check_every=1)
    state = jdp.replicate(world, STATE)
    state["a"] = _flip(state["a"], {world.grid[4, 0], world.grid[1, 0]}, bit=31)
    state["w"] = _flip(state["w"], {world.grid[0, 0]}, bit=31)
    with pytest.raises(RuntimeError) as caught:
        step(state, np.ones((10, 2), "f4"))
    text = str(caught.value)
    assert (
        f"`['a']` differs on replica 1 ({world.grid[1, 0]} of process 0) and " in text
    )
    assert "from the other 3. Leaves that differ after it: 1." in text


@pytest.mark.parametrize("bit", [0, 22, 31])
def test_a_wrong_parameter_is_found_though_its_gradients_are_averaged(bit):
    world = harness.local_world(3)
    step = _make_step(world, check_every=1)
    state = jdp.replicate(world, STATE)
    state["w"] = _flip(state["w"], {world.grid[1, 0]}, bit=bit)
    with pytest.raises(RuntimeError, match=r"`\['w'\]` differs on replica 1 "):
        step(state, np.ones((6, 2), "f4"))


def test_without_the_option_nothing_is_compared():
    _train(harness.local_world(4), [2], every=None)


def test_parts_of_one_replica_each_are_not_compared():
    world = harness.local_world(3)

    @jdp.data_parallel(world=world, check_every=1)
    def step(state, x):
        return {**state, "own": jdp.PerReplica(state["own"].value + x.sum())}, {}

    state = {"own": jdp.PerReplica(np.zeros((3, 1), "f4")), "w": STATE["w"]}
    state, _ = step(state, np.arange(6, dtype="f4"))
    assert len(np.unique(state["own"].value)) == 3
    state["w"] = _flip(state["w"], {world.grid[2, 0]})
    with pytest.raises(RuntimeError, match=r"`\['w'\]` differs on replica 2 "):
        step(state, np.arange(6, dtype="f4"))


@pytest.mark.parametrize("column", [0, 1])
def test_a_part_of_a_replica_on_several_devices_is_compared(column):
    world = harness.mesh_world((3, 2))
    step = _make_step(world, check_every=1)
    specs = {"a": None, "table": P("model"), "w": P("model")}
    state = jdp.replicate(world, STATE, specs=specs)
    state, _ = step(state, np.ones((6, 2), "f4"))
    state["table"] = _flip(state["table"], {world.grid[2, column]})
    with pytest.raises(RuntimeError, match=r"`\['table'\]` differs on replica 2 "):
        step(state, np.ones((6, 2), "f4"))


def test_steps_of_modules_are_checked():
    world = harness.local_world(3)
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    @jdp.flax_nnx.data_parallel(world=world, check_every=2)
    def step(model, optimizer, x):
        grad_fn = jdp.flax_nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))
        loss, grads = grad_fn(model, x)
        optimizer.update(model, grads)
        return loss

    x = np.ones((6, 4), "f4")
    step(model, optimizer, x)
    step(model, optimizer, x)
    kernel = model.kernel.get_value()
    model.kernel.set_value(_flip(kernel, {world.grid[1, 0]}, bit=31))
    step(model, optimizer, x)
    with pytest.raises(
        RuntimeError, match=r"`\['model.kernel'\]` differs on replica 1 "
    ):
        step(model, optimizer, x)


@pytest.mark.parametrize("every", [0, -1])
def test_the_period_must_be_positive(every):
    with pytest.raises(ValueError, match="`check_every` must be at least 1"):
        _make_step(None, check_every=every)


# --- Several processes ---------------------------------------------------------


def _train_in_processes(replica):
    world = jdp.init()
    return harness.error_text(lambda: _train(world, [replica]))[0]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes, num_devices", [(2, 1), (3, 1), (2, 2)])
def test_every_process_names_the_replica(num_processes, num_devices):
    texts = harness.run_checked(
        _train_in_processes, num_processes, 1, devices_per_process=num_devices
    )
    assert len(set(texts)) == 1
    text, num_replicas = texts[0], num_processes * num_devices
    assert "After call 6 of the step `step`, `['table']` " in text
    if num_replicas == 2:
        assert "differs between replica 0 (" in text and "and replica 1 (" in text
    else:
        process = 1 // num_devices
        assert "['table']` differs on replica 1 (" in text
        assert f" of process {process}) from the other {num_replicas - 1}." in text
