"""Objects: what is sent of Python's values, and how it arrives."""

import dataclasses
import datetime

import chex
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jdp.eager import objects
from jdp.eager.messages import ProtocolError


@dataclasses.dataclass
class Point:
    x: int
    y: float


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(1 << 63),
        (1 << 64) - 1,
        0.1,
        float("inf"),
        "text \u00e9",
        b"\x00\xff",
        [],
        [1, [2.0, "x"]],
        {1, "x", (2, (3.0, None)), frozenset({b"y"})},
        frozenset({1.5}),
        [set(), {"nested": [{1}, frozenset()]}],
        {"a": 1, 2: "b", None: [3], 1.5: True, (1, 2): 0},
        datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
    ],
)
def test_values_come_back(value):
    found = objects.decode(objects.encode(value))
    assert found == value and type(found) is type(value)


def test_what_comes_back_as_something_simpler():
    value = {"tuple": (1, (2,)), "dataclass": Point(1, 2.0), "both": Point({3}, 4)}
    assert objects.decode(objects.encode(value)) == {
        "tuple": [1, [2]],
        "dataclass": {"x": 1, "y": 2.0},
        "both": {"x": {3}, "y": 4},
    }


@pytest.mark.parametrize(
    "dtype",
    "bool int8 uint8 int16 int32 int64 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128 float8_e4m3fn int4 >f4 >i8 U5 >U3 S3 datetime64[D]".split(),
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_arrays_of_every_dtype_come_back(dtype, shape):
    kind = jnp.dtype(dtype) if dtype in ("bfloat16", "int4") else np.dtype(dtype)
    value = np.arange(6)[: int(np.prod(shape))].reshape(shape).astype(kind)
    found = objects.decode(objects.encode([value]))[0]
    assert found.dtype == kind.newbyteorder("=") and found.shape == shape
    assert (found == value).all() and found.flags.writeable


def test_arrays_of_jax_and_of_any_layout_come_back_as_those_of_numpy():
    value = {"jax": jnp.ones((2, 2), jnp.bfloat16), "t": np.ones((2, 3)).T}
    found = objects.decode(objects.encode(value))
    assert all(isinstance(x, np.ndarray) for x in found.values())
    chex.assert_trees_all_equal(found, jax.tree.map(np.asarray, value))


def test_a_number_of_numpy_comes_back_as_an_array():
    found = objects.decode(objects.encode(np.float32(1.5)))
    assert found.shape == () and found.dtype == np.float32 and found == 1.5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "A value of type object cannot be sent: only None, bools"),
        (lambda: 0, "A value of type function cannot be sent"),
        (1 + 2j, "complex"),
        (np.array([object()]), "An array of object cannot be sent"),
        (np.zeros(2, [("a", "f4")]), r"An array of \[\('a', '<f4'\)\] cannot be sent"),
        (np.zeros(2, "V4"), "An array of |V4 cannot be sent"),
        (1 << 64, "A value cannot be sent: can't serialize ints"),
        (LOOP, "A value cannot be sent: maximum recursion"),
        ("\ud800", "A value cannot be sent: .*surrogates"),
        (jax.random.key(0), "An array of keys, .*jax.random.key_data"),
    ],
)
def test_what_cannot_be_sent_is_a_type_error(value, text):
    with pytest.raises(TypeError, match=text):
        objects.encode({"x": [value]})


def test_an_unknown_extension_is_refused():
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(5, b"x"))
    with pytest.raises(
        ProtocolError, match="extension 5 of MessagePack is none of jdp's"
    ):
        objects.decode(data)
