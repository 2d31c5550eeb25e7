"""Encoding: values of Python as MessagePack, never as code."""

import dataclasses
import math
import re
from typing import Any

import jax
import msgspec
import numpy as np

from jdp import mesh
from jdp.eager import arguments, messages
from jdp.eager.messages import ProtocolError

# Extension codes of MessagePack, which has neither arrays of numbers nor sets.
_ARRAY, _SET, _FROZENSET = 1, 2, 3
_DTYPE = re.compile(r"[<>|=]?[A-Za-z_]\w{0,30}(\[\d{0,9}[A-Za-z]{1,2}\])?")
# What decoding raises; the last of numpy, for some texts that are no dtype.
_NOT_A_VALUE = (ValueError, TypeError, OverflowError, RecursionError, SyntaxError)


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_array = msgspec.msgpack.Decoder(_Array)


def encode(value: Any) -> bytes:
    """Encodes a value as MessagePack; arrays with dtype and shape.

    Raises:
      TypeError: it holds something that is neither data nor an array, or data that
        MessagePack has no place for.
    """
    try:
        return msgspec.msgpack.encode(_wrap_sets(value), enc_hook=_encode_array)
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        # An int of more than 64 bits, a list that holds itself, half a surrogate.
        raise TypeError(f"A value cannot be sent: {error}.") from error


def decode(data: bytes | memoryview) -> Any:
    """Decodes what `encode` made; tuples come back as lists, but in sets.

    Raises:
      ProtocolError: it is nothing that `encode` makes.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_decode_extension)
    except _NOT_A_VALUE as error:
        raise ProtocolError(str(error)) from None


def _wrap_sets(value: Any) -> Any:
    """Returns the value with sets as extensions, also within others."""
    if isinstance(value, set | frozenset):
        return _encode_set(value)
    if isinstance(value, list | tuple):
        return [_wrap_sets(each) for each in value]
    if isinstance(value, dict):
        return {key: _wrap_sets(each) for key, each in value.items()}
    fields = _fields_of(value)
    if fields and any(_has_set(each) for each in fields.values()):
        return {name: _wrap_sets(each) for name, each in fields.items()}
    return value


def _has_set(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_set, value))
    if isinstance(value, dict):
        return any(map(_has_set, value.values()))
    is_set = isinstance(value, set | frozenset)
    return is_set or any(map(_has_set, _fields_of(value).values()))


def _fields_of(value: Any) -> dict[str, Any]:
    """Returns what a dataclass or struct is encoded as; empty for other values."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        return {each.encode_name: getattr(value, each.name) for each in fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names}
    return {}


def _encode_set(value: set[Any] | frozenset[Any]) -> msgspec.msgpack.Ext:
    code = _FROZENSET if isinstance(value, frozenset) else _SET
    items = [_wrap_sets(each) for each in value]
    data = msgspec.msgpack.encode(items, enc_hook=_encode_array)
    try:
        is_same = len(_decode_set(data)) == len(value)
    except (TypeError, ValueError):
        is_same = False
    if not is_same:
        raise TypeError(
            "A set that is sent may hold None, bools, numbers, strings, bytes, tuples "
            "and frozensets, and nothing else."
        )
    return msgspec.msgpack.Ext(code, data)


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        raise TypeError(
            f"A value of type {type(value).__name__} cannot be sent: only None, bools, "
            "ints, floats, strings, bytes, lists, tuples, sets, dicts, dataclasses, "
            "msgspec structs and arrays can."
        )
    mesh.check_has_no_mask(value, "An array that is sent")
    if arguments.is_key(value):
        raise TypeError(
            f"An array of keys, {value.dtype}, cannot be sent. Send "
            "`jax.random.key_data(keys)`, and make keys of what comes with "
            "`jax.random.wrap_key_data`."
        )
    if isinstance(value, jax.Array) and not (
        value.is_fully_addressable or value.is_fully_replicated
    ):
        raise TypeError("An array that is split over the processes cannot be sent.")
    array = np.asarray(value)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    name = _find_name(array.dtype)
    packed = _Array(name, array.shape, array.tobytes())
    return msgspec.msgpack.Ext(_ARRAY, messages.encode(packed))


def _find_name(dtype: np.dtype) -> str:
    """A text of which numpy makes this dtype; of bfloat16, say, `str` is none."""
    name = dtype.str if dtype.kind in "SU" else dtype.name
    if dtype.hasobject or dtype.kind == "V" and dtype.type is np.void:
        raise TypeError(f"An array of {dtype} cannot be sent.")
    return name


def _decode_extension(code: int, data: memoryview) -> Any:
    if code == _ARRAY:
        return _decode_array(data)
    if code in (_SET, _FROZENSET):
        found = _decode_set(data)
        return found if code == _FROZENSET else set(found)
    raise ProtocolError(f"extension {code} of MessagePack is none of jdp's")


def _decode_array(data: memoryview) -> np.ndarray:
    packed = messages.decode_as(_array, bytes(data))
    if not _DTYPE.fullmatch(packed.dtype):
        raise ProtocolError(f"{packed.dtype!r} is no dtype")
    dtype = np.dtype(packed.dtype)
    num_bytes = dtype.itemsize * math.prod(packed.shape)
    if min(packed.shape, default=0) < 0 or num_bytes != len(packed.data):
        raise ProtocolError(
            f"an array of {packed.dtype}{list(packed.shape[:8])} has "
            f"{len(packed.data)} bytes"
        )
    return np.frombuffer(packed.data, dtype).reshape(packed.shape).copy()


def _decode_set(data: bytes | memoryview) -> frozenset[Any]:
    """Raises TypeError where an item is not hashable."""
    items = msgspec.msgpack.decode(data, type=list, ext_hook=_decode_extension)
    return frozenset(map(_as_key, items))


def _as_key(item: Any) -> Any:
    """A list in a set was a tuple."""
    return tuple(map(_as_key, item)) if isinstance(item, list) else item
