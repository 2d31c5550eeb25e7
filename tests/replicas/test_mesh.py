import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jdp
from jdp.replicas import host_arrays, mesh, replication
from tests import harness


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_batch_is_split_over_the_replicas_in_order(n):
    world = harness.local_world(n)
    batch = {"x": np.arange(8.0, dtype=np.float32), "ids": np.arange(16).reshape(8, 2)}
    placed = jdp.global_batch(world, batch)
    assert placed["x"].shape == (8,)
    for k, shard in enumerate(placed["x"].addressable_shards):
        assert shard.device == world.mesh.devices.flat[k]
        np.testing.assert_array_equal(shard.data, np.split(batch["x"], n)[k])


def test_what_is_split_already_is_returned_as_it_is():
    world = harness.local_world(2)
    placed = jdp.global_batch(world, np.ones((4, 2), np.float32))
    assert jdp.global_batch(world, {"x": placed})["x"] is placed
    other = jax.device_put(jnp.ones((4, 2)), jax.devices()[3])
    assert jdp.global_batch(world, other).sharding == world.split


def _memory(shape, dtype, offset):
    """Returns zeros that begin `offset` bytes after where JAX keeps memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 128, np.uint8)
    first = -raw.ctypes.data % 64 + offset
    return raw[first : first + size].view(dtype).reshape(shape)


_PLACES = {
    "batch": lambda world, x: jdp.global_batch(world, x),
    "memory view": lambda world, x: jdp.global_batch(world, memoryview(x)),
    "state": lambda world, x: jdp.replicate(world, x),
    "rows": lambda world, x: jdp.replicate(world, jdp.PerReplica(x)).value,
    "argument": lambda world, x: replication.place_own_value(world, x, "x"),
}


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("offset", [0, 16])
@pytest.mark.parametrize("num_columns", [4, 1 << 15])
@pytest.mark.parametrize("n", [1, 2])
def test_the_caller_may_go_on_writing_to_an_array(n, num_columns, offset, place):
    x = _memory((n, num_columns), np.float32, offset)
    x[:] = 1
    placed = _PLACES[place](harness.local_world(n), x)
    x[:] = 2
    assert (np.asarray(placed) == 1).all()


def test_memory_that_was_read_only_during_the_call_is_copied():
    world = harness.local_world(1)
    x = np.ones(1 << 17, np.float32)
    view = x[:]
    x.flags.writeable = False
    placed = jdp.global_batch(world, x)
    view[:] = 2
    assert (np.asarray(placed) == 1).all()


def test_a_copy_is_equal_in_every_layout_and_dtype():
    for x in (
        np.arange(60_000.0).reshape(300, 200).T,
        np.arange(60_000).astype(jnp.bfloat16)[::-1],
        np.float32(3),
        np.zeros((0, 4)),
    ):
        copy = host_arrays.own_copy(np.asarray(x))
        assert copy.dtype == x.dtype and not np.shares_memory(copy, x)
        np.testing.assert_array_equal(copy, x)


@pytest.mark.parametrize("num_samples,n", [(7, 2), (1, 4), (6, 4)])
def test_a_batch_that_does_not_divide_names_the_leaf_and_the_numbers(num_samples, n):
    batch = {"image": np.ones((num_samples, 3), np.float32)}
    expected = rf"`\['image'\]` has {num_samples} samples.* the {n} replicas"
    with pytest.raises(ValueError, match=expected):
        jdp.global_batch(harness.local_world(n), batch)


def test_an_empty_batch_and_a_scalar_are_named():
    world = harness.local_world(2)
    with pytest.raises(ValueError, match=r"`\['x'\]` has no samples: shape \(0, 3\)"):
        jdp.global_batch(world, {"x": np.ones((0, 3))})
    with pytest.raises(ValueError, match=r"`\(root\)` is a scalar"):
        jdp.global_batch(world, 3.0)


def test_a_pair_of_names_makes_a_node_axis_and_a_data_axis():
    world = harness.local_world(8, ("node", "data"), num_nodes=2)
    assert dict(world.mesh.shape) == {"node": 2, "data": 4}
    assert world.num_replicas == world.num_local_replicas == 8
    batch = jdp.global_batch(world, np.arange(8.0))
    assert [float(s.data[0]) for s in batch.addressable_shards] == list(range(8))


def test_nodes_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="got 8 devices on 3 nodes"):
        mesh.make_mesh(jax.devices()[:8], ("node", "data"), num_nodes=3)


@pytest.mark.parametrize("axis_name", [("a", "b", "c"), "", (), ("a", "a")])
def test_other_numbers_of_names_are_refused(axis_name):
    with pytest.raises(ValueError, match="one name or a pair of names"):
        mesh.make_mesh(jax.devices(), axis_name, num_nodes=1)


def test_without_a_world_the_error_says_what_to_call():
    with pytest.raises(RuntimeError, match=r"Call `jdp.init\(\)` once"):
        mesh.current_world()


@pytest.mark.parametrize("n", [1, 4])
def test_replicate_copies_to_every_replica(n):
    world = harness.local_world(n)
    mine = jnp.arange(3.0)
    tree = {"w": mine, "n": 2, "key": jax.random.key(1), "host": np.ones(2, np.int8)}
    placed = jdp.replicate(world, tree)
    for leaf in jax.tree.leaves(placed):
        assert leaf.sharding == world.replicated
        assert len(leaf.addressable_shards) == n
    np.testing.assert_array_equal(placed["w"], mine)
    assert placed["host"].dtype == jnp.int8
    assert jax.random.key_data(placed["key"]).tolist() == [0, 1]
    for leaf in jax.tree.leaves(placed):
        leaf.delete()
    np.testing.assert_array_equal(mine, np.arange(3.0))


def test_replicate_returns_what_is_replicated_already():
    world = harness.local_world(2)
    placed = jdp.replicate(world, {"w": np.ones(3)})
    assert jdp.replicate(world, placed)["w"] is placed["w"]
    split = jax.device_put(
        np.ones(4, np.float32), NamedSharding(world.mesh, PartitionSpec("data"))
    )
    assert jdp.replicate(world, split).sharding == world.replicated


MASKED = np.ma.array(np.ones(2, np.float32), mask=[0, 1])


def _identity_step(world):
    return jdp.data_parallel(
        lambda state, x, more=0.0: (state, {}), world=world, replicated_argnames="more"
    )


@pytest.mark.parametrize(
    "take",
    [
        lambda world: jdp.global_batch(world, {"x": MASKED}),
        lambda world: jdp.replicate(world, {"x": MASKED}),
        lambda world: _identity_step(world)({}, {"x": MASKED}),
        lambda world: _identity_step(world)({"x": MASKED}, np.ones(2)),
        lambda world: _identity_step(world)({}, np.ones(2), more={"x": MASKED}),
        lambda world: jdp.copy_per_replica({"x": MASKED}, world=world),
        lambda world: list(jdp.join_batches([{"x": MASKED}], world=world)),
    ],
    ids=["batch", "replicate", "step", "state", "argument", "own", "join_batches"],
)
def test_a_mask_is_not_lost(take):
    text = r"\['x'\]` .*is a masked array of numpy|\['x'\]` is a masked array of numpy"
    with pytest.raises(TypeError, match=text):
        take(harness.local_world(2))


@pytest.mark.parametrize(
    "x", [np.ones(2, ">f4"), np.zeros(2, [("a", "f4")]), np.array(["a", "b"])]
)
def test_a_batch_of_a_dtype_that_jax_has_not_is_named(x):
    with pytest.raises(TypeError, match=r"`\['x'\]` has dtype .*which JAX does not"):
        jdp.global_batch(harness.local_world(2), {"x": x})


def test_a_batch_that_was_deleted_is_named():
    world = harness.local_world(2)
    for batch in (jdp.global_batch(world, np.ones(2)), jnp.ones(2)):
        batch.delete()
        with pytest.raises(RuntimeError, match=r"`\['x'\]` was deleted"):
            jdp.global_batch(world, {"x": batch})
