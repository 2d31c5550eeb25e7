"""Results: arrays of the kind that was given, whatever holds where they are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jdp import eager
from jdp.eager import results
from tests import harness


@pytest.fixture(scope="module", autouse=True)
def alone():
    eager.init(harness.local_world(1))
    yield
    eager.shutdown()


def _vjp(call):
    def run(x):
        out, backward = jax.vjp(call, x)
        return backward(out)[0]

    return run


CALLS = {
    "all_reduce": eager.all_reduce,
    "compressed": lambda x: eager.all_reduce(x, wire_dtype="float16"),
    "grouped": lambda x: eager.grouped_all_reduce({"x": x})["x"],
    "all_gather": eager.all_gather,
    "broadcast_parameters": lambda x: eager.broadcast_parameters({"x": x, "n": 2})["x"],
    "gradient of all_reduce": _vjp(eager.all_reduce),
    "gradient of all_gather": _vjp(eager.all_gather),
    "gradient of broadcast": _vjp(eager.broadcast),
    "gradient of reduce_scatter": _vjp(eager.reduce_scatter),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_transfer_is_implicit(call):
    x = jnp.arange(4.0)
    with jax.transfer_guard("disallow"):
        found = call(x)
    np.testing.assert_array_equal(found, x)
    assert found.sharding == x.sharding


def test_an_array_may_be_donated_before_its_result_is_read():
    x = jnp.arange(3.0)
    handles = eager.all_reduce_async(x), eager.all_reduce_async({"x": x})
    others = eager.all_to_all_async(x), eager.grouped_all_reduce_async([x])
    x.delete()
    for found in jax.tree.leaves([eager.synchronize(h) for h in (*handles, *others)]):
        np.testing.assert_array_equal(found, [0.0, 1.0, 2.0])


def test_64_bits_are_kept_where_jax_has_32():
    with jax.enable_x64(True):
        handle = eager.all_reduce_async(jnp.array([1 + 2.0**-40]))
    found = eager.synchronize(handle)
    assert found.dtype == np.float64 and np.asarray(found)[0] == 1 + 2.0**-40


def test_a_result_lies_where_its_array_lay_within_a_mesh_and_in_other_memory():
    device = jax.local_devices()[0]
    mesh = Mesh(np.array(jax.local_devices()[:2]), ("d",))
    for kind in {each.kind for each in device.addressable_memories()}:
        x = jax.device_put(np.arange(4.0), SingleDeviceSharding(device, kind))
        for found in (eager.all_reduce(x), _within(mesh, eager.all_reduce, x)):
            np.testing.assert_array_equal(found, x)
            assert found.sharding == x.sharding


def _within(mesh, call, x):
    with jax.set_mesh(mesh):
        return call(x)


@pytest.mark.parametrize("num_rows", [0, 3, 4])
def test_a_split_result_whose_rows_do_not_divide_is_whole_on_each_device(num_rows):
    mesh = Mesh(np.array(jax.local_devices()[:2]), ("d",))
    given = jax.device_put(np.arange(4.0), NamedSharding(mesh, PartitionSpec("d")))
    value = np.arange(num_rows, dtype=np.float32)
    found = results.restore(value, results.kind_of(given))
    np.testing.assert_array_equal(found, value)
    assert found.sharding.device_set == given.sharding.device_set
    assert found.sharding.is_fully_replicated == (num_rows == 3)


@pytest.mark.parametrize("call", [eager.all_reduce, eager.grouped_all_reduce])
def test_what_overflows_as_it_travels_is_infinite_and_warns_of_nothing(call):
    found = call({"x": np.array([1e300, -1e300, 1.0])}, wire_dtype="float16")["x"]
    np.testing.assert_array_equal(found, [np.inf, -np.inf, 1.0])
