"""Objects: what is sent of Python's values, and how it arrives."""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import uuid
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest

from jdp.eager import objects
from jdp.eager.messages import ProtocolError


@dataclasses.dataclass
class Point:
    x: int
    y: float


class Struct(msgspec.Struct):
    x: int


class Pair(NamedTuple):
    a: int
    b: int


class Level(enum.IntEnum):
    LOW = 1


class Colour(enum.Enum):
    RED = 1


class Text(str):
    pass


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
        datetime.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
        (),
        (1, (2, [3, (4,)])),
        {"a": (1, {"b": (2,)})},
        {True: 1, 2: "two", 3.0: b"x"},
        {frozenset({1}): (1,), (1, (2, None)): [], np.int8(3): 1},
        {datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC): 1},
        {np.float32(1.5), np.int64(1 << 40)},
        [np.float64(0.1), np.bool_(True), np.str_("text"), np.str_(""), np.bytes_(b"")],
        [np.datetime64("2020-01-02"), np.timedelta64(3, "ns"), np.complex64(1j)],
        [ml_dtypes.bfloat16(1.5), ml_dtypes.int4(-3)],
    ],
)
def test_values_come_back_equal_and_of_their_types(value):
    found = objects.decode(objects.encode(value))
    assert found == value and _types(found) == _types(value)


def _types(value):
    """Types of a value, and of all that is in it."""
    parts = []
    if isinstance(value, dict):
        parts = [(_types(k), _types(v)) for k, v in value.items()]
    elif isinstance(value, list | tuple):
        parts = [_types(each) for each in value]
    elif isinstance(value, set | frozenset):
        parts = sorted(str(_types(each)) for each in value)
    return type(value), parts


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "A value of type object cannot be sent, as .*: only None, bools"),
        (lambda: 0, "A value of type function cannot be sent"),
        (1 + 2j, "complex"),
        (np.array([object()]), "An array of object cannot be sent"),
        (np.zeros(2, [("a", "f4")]), r"An array of \[\('a', '<f4'\)\] cannot be sent"),
        (np.zeros(2, "V4"), "An array of |V4 cannot be sent"),
        (1 << 64, "A value cannot be sent: can't serialize ints"),
        (LOOP, "A value cannot be sent: it holds values more than 100 levels deep"),
        (Point(1, 2.0), r"type Point cannot be sent.* `dataclasses.asdict\(value\)`"),
        (Struct(1), r"type Struct cannot be sent.* `msgspec.structs.asdict\(value\)`"),
        (Pair(1, 2), r"type Pair cannot be sent.*no subclasses.* `tuple\(value\)`"),
        (Level.LOW, r"type Level cannot be sent.* `int\(value\)`"),
        (Colour.RED, r"type Colour cannot be sent"),
        (Text("x"), r"type Text cannot be sent.* `str\(value\)`"),
        (collections.OrderedDict(a=1), r"OrderedDict cannot be sent.* `dict\(value\)`"),
        (collections.defaultdict(int), r"defaultdict cannot .* `dict\(value\)`"),
        (collections.Counter("a"), r"Counter cannot be sent.* `dict\(value\)`"),
        (collections.deque([1]), r"deque cannot be sent.* `list\(value\)`"),
        (bytearray(b"x"), r"bytearray cannot be sent.* `bytes\(value\)`"),
        (memoryview(b"x"), r"memoryview cannot be sent.* `bytes\(value\)`"),
        (datetime.datetime(2020, 1, 2), r"datetime cannot be sent.*astimezone"),
        (
            datetime.datetime(
                2020, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=1))
            ),
            r"datetime cannot be sent.*astimezone",
        ),
        (datetime.date(2020, 1, 2), r"date cannot be sent.*isoformat"),
        (datetime.time(1, 2), r"time cannot be sent.*isoformat"),
        (datetime.timedelta(1), r"timedelta cannot be sent.*total_seconds"),
        (decimal.Decimal("1.5"), r"Decimal cannot be sent.* `str\(value\)`"),
        (fractions.Fraction(1, 2), r"Fraction cannot be sent.*numerator"),
        (uuid.UUID(int=1), r"UUID cannot be sent.* `str\(value\)`"),
        (pathlib.PurePosixPath("a"), r"PurePosixPath cannot be sent"),
        (range(3), r"range cannot be sent"),
        (np.zeros(1).view(np.recarray), r"recarray cannot be sent"),
        ({Level.LOW: 1}, r"type Level cannot be sent"),
        ({Level.LOW}, r"type Level cannot be sent"),
        ("\ud800", "A value cannot be sent: .*surrogates"),
        (jax.random.key(0), "An array of keys, .*jax.random.key_data"),
    ],
)
def test_what_cannot_be_sent_is_a_type_error(value, text):
    with pytest.raises(TypeError, match=text):
        objects.encode({"x": [value]})


def test_an_unknown_extension_is_refused():
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(9, b"x"))
    with pytest.raises(
        ProtocolError, match="extension 9 of MessagePack is not one of jdp's"
    ):
        objects.decode(data)
