"""Requests: what a leaf may be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp.eager import argument_types


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">f2", "<f4", ">c8"])
def test_bytes_are_in_the_order_of_this_machine(dtype):
    given = np.arange(5).astype(dtype)
    array = argument_types.check_array(given, "x")
    assert array.dtype.isnative and array.dtype == given.dtype.newbyteorder("=")
    np.testing.assert_array_equal(array, given)


@pytest.mark.parametrize(
    "leaf", [3, 2.5, True, np.float32(1), [1, 2], np.zeros(3, jnp.bfloat16)]
)
def test_numbers_become_arrays(leaf):
    assert isinstance(argument_types.check_array(leaf, "x"), np.ndarray)


@pytest.mark.parametrize(
    "leaf",
    [
        "text",
        np.array(["a"]),
        np.array([None]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", "f4")]),
    ],
)
def test_what_is_no_number_is_refused(leaf):
    with pytest.raises(TypeError, match="must be an array of numbers, got"):
        argument_types.check_array(leaf, "x")


def test_a_tracer_is_refused_with_what_to_use_instead():
    with pytest.raises(TypeError, match="Inside of `jit`, use `jdp.data_parallel`"):
        jax.jit(lambda x: argument_types.check_array(x, "x"))(jnp.ones(3))
