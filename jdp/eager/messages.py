"""Messages: what processes and the coordinator of the eager engine say.

What comes from another process is checked before anything else sees it, also where it
holds the key of the job: in form by the functions at the end, in sense by `checks`.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import msgspec
import numpy as np

from jdp.replicas import wire

Kind = Literal[
    "all_reduce",
    "all_gather",
    "broadcast",
    "all_to_all",
    "reduce_scatter",
    "barrier",
    "submit",
    "add_process_set",
    "remove_process_set",
]

# A process set, a name, and which submission of it this is on its rank.
Doubt = tuple[int, str, int]
# Prefix of names that the user did not give: they are counted, and never come again.
UNNAMED = "unnamed "
# The shape of a scalar in kinds whose first dimension may differ: `()` is that of rows
# of one number.
SCALAR = (-1,)
OPS = {
    "all_reduce": ("average", "sum", "min", "max", "product", "adasum"),
    "reduce_scatter": ("average", "sum"),
}
# Of these kinds the first dimension may differ between ranks.
HAS_LOCAL_FIRST = ("all_gather", "all_to_all")
_OF_TENSORS = ("all_reduce", "all_gather", "broadcast", "all_to_all", "reduce_scatter")
_MAX_TENSOR_BYTES = 1 << 48  # more than a machine has.
_MAX_DIMS = 64  # of numpy.
_NAME = re.compile("[a-z][a-z0-9_]{0,31}")
_MAX_SPEC_BYTES = 1 << 17  # encoded; the ranks of a process set are the longest.


class ProtocolError(Exception):
    """A process said what no engine says; the message names what."""


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """Properties that must be the same on all ranks that submit one name.

    Attributes:
      kind: the operation.
      dtype: of the tensor, such as "float32"; "" where there is none.
      shape: of the tensor. Of `all_gather` and `all_to_all` without the first
        dimension, which is in `Request.local`. Of a process set that is added its
        ranks, of one that is removed its number.
      device: "cpu" or "gpu".
      op: the reduction; "" where there is none.
      prescale: what a rank multiplies its tensor with before the reduction.
      postscale: what the result is multiplied with.
      root: global rank of the source of a broadcast, -1 otherwise.
      group: what it is executed together with, or not at all; "" for itself.
      group_size: how many names the group has.
      fingerprint: of a submitted program.
    """

    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = "cpu"
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    group: str = ""
    group_size: int = 0
    fingerprint: str = ""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One rank is ready to run one operation."""

    name: str
    spec: bytes  # a `Spec`, encoded: the same on all ranks, or a mistake.
    process_set: int = 0
    local: tuple[int, ...] = ()  # what may differ: first dimension, or splits.


class FromRank(msgspec.Struct, frozen=True, array_like=True):
    """Message of one rank to the coordinator.

    Attributes:
      seen: how many batches of responses it has got.
      requests: what became ready there and is not cached.
      hits: a bit set of cache slots: what became ready and is cached.
      data: of small tensors, in the order of the bits in `hits`: all of them or none.
      joined: the rank has no more data, and contributes zeros until all have joined.
      leaves: the rank shuts down.
      failure: why the rank cannot go on, and with it none can; "" if it can.
      asks: the rank wants to know who waits for whom.
      is_last: the answer to `Batch.closing`: the rank submits nothing after this.
      doubts: process sets and names that the rank has submitted before, and waits for,
        each with a number that is the rank's own. See `Batch.unknown`.
    """

    seen: int = 0
    requests: tuple[Request, ...] = ()
    hits: bytes = b""
    data: tuple[bytes, ...] = ()
    joined: bool = False
    leaves: bool = False
    failure: str = ""
    asks: bool = False
    is_last: bool = False
    doubts: tuple[Doubt, ...] = ()


class Response(msgspec.Struct, frozen=True, array_like=True):
    """Operation that all ranks of a process set do next.

    Attributes:
      names: of the tensors, in the order in which they are packed; those that are
        cached may be left out, and `slots` say which they are.
      specs: of each name; for ranks that have joined, and for errors.
      process_set: the processes that take part.
      locals: by name and member of the set, `Request.local`; of kinds that have one.
        Of a process set that is added, its number.
      slots: by name, the slot of the cache that it gets or has; -1 for none.
      error: why nothing is done, for the members to raise.
      ranks: the ranks that the error is for, which have submitted the names. Others may
        submit them later, or their request is on its way. Empty: all members.
    """

    names: tuple[str, ...]
    specs: tuple[bytes, ...] = ()
    process_set: int = 0
    locals: tuple[tuple[tuple[int, ...], ...], ...] = ()
    slots: tuple[int, ...] = ()
    error: str = ""
    ranks: tuple[int, ...] = ()


class Tunable(msgspec.Struct, frozen=True, array_like=True):
    """Options that may change while the engine runs, the same on all ranks.

    Attributes:
      fusion_bytes: most bytes of operations that run as one; 0: none do.
      cycle_time_s: how long the engine waits for more before it negotiates; 0: it is
        woken at once.
      cache_enabled: whether what was negotiated is cached.
      hierarchical_all_reduce: within groups first, then across.
      hierarchical_all_gather: within groups first, then across.
    """

    fusion_bytes: int = 128 << 20
    cycle_time_s: float = 0.0
    cache_enabled: bool = True
    hierarchical_all_reduce: bool = False
    hierarchical_all_gather: bool = False


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Message of the coordinator to all ranks.

    Attributes:
      responses: to be executed in this order.
      data: by response, its reduced tensors, one after the other, where all ranks have
        sent theirs; b"" where they have not. Empty if none has any, else as long as
        `responses`.
      evicted: slots of the cache that no longer stand for their name.
      last_joined: the last rank to join, once all have; -1 otherwise.
      stop: why the engine ends on all ranks; "" if it does not.
      is_asked: whether it ends since a rank has shut it down; what was agreed before
        is executed first.
      who_waits: the answer to `FromRank.asks`.
      tuned: what all ranks go by from here on.
      unknown: for one rank alone: those of its `FromRank.doubts` that the coordinator
        does not wait for. What it had decided of them was sent before.
      closing: which rank wants to shut down; "" if none does. All say what they still
        have, and that it is the last.

    A batch with one of `who_waits`, `tuned` and `unknown` has nothing else, and does
    not count.
    """

    responses: tuple[Response, ...] = ()
    data: tuple[bytes, ...] = ()
    evicted: tuple[int, ...] = ()
    last_joined: int = -1
    stop: str = ""
    is_asked: bool = False
    who_waits: str = ""
    tuned: Tunable | None = None
    unknown: tuple[Doubt, ...] = ()
    closing: str = ""


_from_rank = msgspec.msgpack.Decoder(FromRank)
_batch = msgspec.msgpack.Decoder(Batch)
encode = msgspec.msgpack.Encoder().encode


def decode_from_rank(payload: bytes) -> FromRank:
    """Decodes what a rank says.

    Raises:
      ProtocolError: it is nothing that an engine says.
    """
    return decode_as(_from_rank, payload)


def decode_batch(payload: bytes) -> Batch:
    """Decodes what the coordinator says.

    Raises:
      ProtocolError: it is nothing that a coordinator says.
    """
    return decode_as(_batch, payload)


def decode_as(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
    """Decodes with `decoder`.

    Raises:
      ProtocolError: it is not of the decoder's type, or not MessagePack.
    """
    try:
        return wire.decode_with(decoder.decode, payload)
    except wire.DecodeError as error:
        raise ProtocolError(str(error)) from None


@functools.lru_cache(maxsize=4096)
def decode_spec(encoded: bytes) -> Spec:
    """Decodes a spec; the same few come over and over.

    Raises:
      ProtocolError: it is none, or one that no engine makes.
    """
    if len(encoded) > _MAX_SPEC_BYTES:
        raise ProtocolError(f"a request is described in {len(encoded):,} bytes")
    spec = decode_as(_spec, encoded)
    fault = _find_fault(spec)
    if fault:
        raise ProtocolError(f"a request of {spec.kind} has {fault}")
    return spec


_spec = msgspec.msgpack.Decoder(Spec)


def encode_spec(spec: Spec) -> bytes:
    """Encodes a spec; like specs give like bytes."""
    return encode(spec)


def num_bytes_of(spec: Spec, locals_: Sequence[tuple[int, ...]]) -> int:
    """Returns the bytes of a tensor; of a gather, of all that comes together.

    Args:
      spec: of the operation.
      locals_: by member, `Request.local`; () for kinds that have none.
    """
    size = _size_of(spec)
    return size * sum(map(sum, locals_)) if locals_ else size


@functools.lru_cache(maxsize=4096)
def _size_of(spec: Spec) -> int:
    return jnp.dtype(spec.dtype).itemsize * math.prod(spec.shape) if spec.dtype else 0


def _find_fault(spec: Spec) -> str:
    """Returns what is senseless in a spec, whatever other ranks have; "" if nothing."""
    if spec.kind in _OF_TENSORS:
        fault = _find_tensor_fault(spec)
        if fault:
            return fault
    elif spec.dtype or spec.group and spec.kind != "barrier":
        return f"dtype {spec.dtype!r} and group {spec.group!r}"
    elif spec.kind == "add_process_set":
        ranks = spec.shape
        if not ranks or ranks[0] < 0 or list(ranks) != sorted(set(ranks)):
            return f"ranks {_short(ranks)}"
    elif spec.kind == "remove_process_set":
        if len(spec.shape) != 1 or spec.shape[0] < 1:
            return f"process set {_short(spec.shape)}"
    elif spec.shape:
        return f"shape {_short(spec.shape)}"
    if spec.op not in OPS.get(spec.kind, ("",)):
        return f"the reduction {spec.op!r}"
    if not (math.isfinite(spec.prescale) and math.isfinite(spec.postscale)):
        return f"factors {spec.prescale:g} and {spec.postscale:g}"
    if (spec.root < 0) != (spec.kind != "broadcast") or spec.root < -1:
        return f"root {spec.root}"
    if spec.group_size < 0 or bool(spec.group) != bool(spec.group_size):
        return f"group {spec.group!r} of {spec.group_size}"
    return ""


def _find_tensor_fault(spec: Spec) -> str:
    if not _is_dtype(spec.dtype):
        return f"dtype {spec.dtype!r}"
    if spec.shape == SCALAR and spec.kind in HAS_LOCAL_FIRST:
        return ""
    is_too_many = len(spec.shape) >= _MAX_DIMS or min(spec.shape, default=0) < 0
    if is_too_many or max(spec.shape, default=0) > _MAX_TENSOR_BYTES:
        return f"shape {_short(spec.shape)}"
    num_bytes = math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize
    if num_bytes > _MAX_TENSOR_BYTES:
        return f"shape {_short(spec.shape)}"
    return ""


@functools.lru_cache(maxsize=256)
def _is_dtype(name: str) -> bool:
    """Whether this is the name of a dtype of numbers or bools."""
    if not _NAME.fullmatch(name):  # Else numpy would look for a structure in it.
        return False
    try:
        dtype = jnp.dtype(name)
    except (TypeError, ValueError):
        return False
    is_number = dtype.kind in "iufcb" or jnp.issubdtype(dtype, np.number)
    return dtype.name == name and is_number


def _short(values: tuple[int, ...]) -> str:
    return f"{values[:8]}{' and more' if values[8:] else ''}"
