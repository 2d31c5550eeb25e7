"""Encoding: Python values as MessagePack, never as code.

Decoded values are equal to the encoded ones and have the same types, except that JAX
arrays become numpy arrays. Types that MessagePack lacks are extensions; other types are
refused.
"""

import datetime
import math
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import msgspec
import numpy as np

from jdp.eager import argument_types, messages
from jdp.eager.messages import ProtocolError
from jdp.replicas import host_arrays

# Codes of MessagePack extensions, for types that it lacks.
_ARRAY, _SET, _FROZENSET, _TUPLE, _SCALAR, _PAIRS = range(1, 7)
# Levels of nesting; decoding one level takes some of Python's 1000 frames.
_MAX_DEPTH = 100
_DTYPE = re.compile(r"[<>|=]?[A-Za-z_]\w{0,30}(\[\d{0,9}[A-Za-z]{1,2}\])?")
# Errors of decoding; numpy raises the last one for some texts that are not dtypes.
_NOT_A_VALUE = (ValueError, TypeError, OverflowError, RecursionError, SyntaxError)
_INSTEAD = {
    "bytearray": "`bytes(value)`",
    "memoryview": "`bytes(value)`",
    "complex": "`numpy.complex128(value)`",
    "datetime": "it in UTC, `value.astimezone(datetime.UTC)`",
    "date": "`value.isoformat()`",
    "time": "`value.isoformat()`",
    "timedelta": "`value.total_seconds()`",
    "Decimal": "`str(value)`",
    "Fraction": "`(value.numerator, value.denominator)`",
    "UUID": "`str(value)`",
    "OrderedDict": "`dict(value)`",
    "defaultdict": "`dict(value)`",
    "Counter": "`dict(value)`",
    "deque": "`list(value)`",
}


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_array = msgspec.msgpack.Decoder(_Array)


def encode(value: Any) -> bytes:
    """Encodes a value as MessagePack; arrays keep dtype and shape.

    Raises:
      TypeError: a part of it would not be decoded as an equal value of its type.
    """
    try:
        return msgspec.msgpack.encode(_wrap(value, _MAX_DEPTH))
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        # For example an int of more than 64 bits, or half a surrogate.
        raise TypeError(f"A value cannot be sent: {error}.") from error


def decode(data: bytes | memoryview) -> Any:
    """Decodes the result of `encode`.

    Raises:
      ProtocolError: `encode` does not produce such data.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_decode_extension)
    except _NOT_A_VALUE as error:
        raise ProtocolError(str(error)) from None


def _wrap(value: Any, depth: int) -> Any:
    """Converts a value to types of MessagePack; subclasses are refused."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if depth == 0:
        raise TypeError(
            f"A value cannot be sent: it holds values more than {_MAX_DEPTH} levels "
            "deep, or holds itself. Send its parts, or make it flat."
        )
    if kind in _WRAPPERS:
        return _WRAPPERS[kind](value, depth - 1)
    if isinstance(value, jax.Array) or isinstance(value, np.ndarray | np.generic):
        return _wrap_array(value)
    raise TypeError(_refuse(value))


def _refuse(value: Any) -> str:
    """Describes a value that cannot be sent, and what to send instead."""
    kind = type(value)
    instead = _INSTEAD.get(kind.__name__, "its parts")
    if hasattr(value, "__dataclass_fields__"):
        instead = "`dataclasses.asdict(value)`"
    elif isinstance(value, msgspec.Struct):
        instead = "`msgspec.structs.asdict(value)`"
    else:
        for base in (str, bytes, int, float, dict, list, tuple):
            if isinstance(value, base) and kind is not base:
                instead = f"`{base.__name__}(value)`"
                break
    return (
        f"A value of type {kind.__name__} cannot be sent, as it would come back as "
        "another type: only None, bools, ints, floats, strings, bytes, lists, tuples, "
        "sets, dicts, datetimes in UTC, arrays and scalars of numpy can, and no "
        f"subclasses of these. Send {instead}."
    )


def _wrap_list(value: list[Any], depth: int) -> list[Any]:
    return [_wrap(each, depth) for each in value]


def _wrap_tuple(value: tuple[Any, ...], depth: int) -> msgspec.msgpack.Ext:
    return _pack(_TUPLE, value, depth)


def _wrap_set(value: set[Any], depth: int) -> msgspec.msgpack.Ext:
    return _pack(_SET, value, depth)


def _wrap_frozenset(value: frozenset[Any], depth: int) -> msgspec.msgpack.Ext:
    return _pack(_FROZENSET, value, depth)


def _wrap_dict(value: dict[Any, Any], depth: int) -> Any:
    if all([type(key) in _AS_THEY_ARE for key in value]):
        return {key: _wrap(each, depth) for key, each in value.items()}
    pairs = [each for pair in value.items() for each in pair]
    return _pack(_PAIRS, pairs, depth)


def _pack(code: int, items: Iterable[Any], depth: int) -> msgspec.msgpack.Ext:
    wrapped = [_wrap(each, depth) for each in items]
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(wrapped))


def _wrap_datetime(value: datetime.datetime, depth: int) -> datetime.datetime:
    if value.tzinfo is not datetime.UTC or value.fold:
        raise TypeError(_refuse(value))
    return value


_AS_THEY_ARE = {type(None), bool, int, float, str, bytes}
_WRAPPERS: dict[type, Callable[[Any, int], Any]] = {
    list: _wrap_list,
    tuple: _wrap_tuple,
    dict: _wrap_dict,
    set: _wrap_set,
    frozenset: _wrap_frozenset,
    datetime.datetime: _wrap_datetime,
}


def _wrap_array(value: Any) -> msgspec.msgpack.Ext:
    host_arrays.check_has_no_mask(value, "An array that is sent")
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
        raise TypeError(_refuse(value))
    if argument_types.is_key(value):
        raise TypeError(
            f"An array of keys, {value.dtype}, cannot be sent. Send "
            "`jax.random.key_data(keys)`, and wrap the result with "
            "`jax.random.wrap_key_data`."
        )
    if isinstance(value, jax.Array) and not (
        value.is_fully_addressable or value.is_fully_replicated
    ):
        raise TypeError("An array that is split over the processes cannot be sent.")
    array = np.asarray(value)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.itemsize == 0:  # An empty string has no bytes to decode.
        array = array.astype(f"{array.dtype.kind}1")
    name = _find_name(array.dtype)
    packed = _Array(name, array.shape, array.tobytes())
    code = _SCALAR if isinstance(value, np.generic) else _ARRAY
    return msgspec.msgpack.Ext(code, messages.encode(packed))


def _find_name(dtype: np.dtype) -> str:
    """Returns a name that numpy parses as this dtype; `str` of bfloat16 is not one."""
    name = dtype.str if dtype.kind in "SU" else dtype.name
    if dtype.hasobject or dtype.kind == "V" and dtype.type is np.void:
        raise TypeError(f"An array of {dtype} cannot be sent.")
    return name


def _decode_extension(code: int, data: memoryview) -> Any:
    if code == _ARRAY:
        return _decode_array(data)
    if code == _SCALAR:
        return _decode_array(data)[()]
    make = _MAKERS.get(code)
    if make is None:
        raise ProtocolError(f"extension {code} of MessagePack is not one of jdp's")
    return make(msgspec.msgpack.decode(data, type=list, ext_hook=_decode_extension))


def _make_dict(pairs: list[Any]) -> dict[Any, Any]:
    if len(pairs) % 2:
        raise ProtocolError(f"a dict has {len(pairs)} keys and values")
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


_MAKERS: dict[int, Callable[[list[Any]], Any]] = {
    _SET: set,
    _FROZENSET: frozenset,
    _TUPLE: tuple,
    _PAIRS: _make_dict,
}


def _decode_array(data: memoryview) -> np.ndarray:
    packed = messages.decode_as(_array, bytes(data))
    if not _DTYPE.fullmatch(packed.dtype):
        raise ProtocolError(f"{packed.dtype!r} is not a dtype")
    dtype = np.dtype(packed.dtype)
    num_bytes = dtype.itemsize * math.prod(packed.shape)
    if min(packed.shape, default=0) < 0 or num_bytes != len(packed.data):
        raise ProtocolError(
            f"an array of {packed.dtype}{list(packed.shape[:8])} has "
            f"{len(packed.data)} bytes"
        )
    if dtype.kind == "U":
        codes = np.frombuffer(packed.data, dtype.str[0] + "u4")
        if codes.max(initial=0) > sys.maxunicode:  # Python would raise SystemError.
            raise ProtocolError("a text of numpy has characters that do not exist")
    return np.frombuffer(packed.data, dtype).reshape(packed.shape).copy()
