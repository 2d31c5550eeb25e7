"""Messages between the processes and the coordinator of the eager engine.

A message from another process is checked before anything else sees it, even if the
process holds the key of the job. The functions at the end check its form, and `checks`
checks its meaning.
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

# Process set, name, and `Record.number` of the request on its rank.
Doubt = tuple[int, str, int]
# Prefix of names that the user did not give: they are numbered and never come again.
UNNAMED = "unnamed "
# Shape of a scalar in kinds whose first dimension may differ; there `()` is the shape
# of an array whose rows are single numbers.
SCALAR = (-1,)
OPS = {
    "all_reduce": ("average", "sum", "min", "max", "product", "adasum"),
    "reduce_scatter": ("average", "sum"),
}
# Kinds whose first dimension may differ between ranks.
HAS_LOCAL_FIRST = ("all_gather", "all_to_all")
_OF_TENSORS = ("all_reduce", "all_gather", "broadcast", "all_to_all", "reduce_scatter")
_MAX_TENSOR_BYTES = 1 << 48  # more than any host has.
_MAX_DIMS = 64  # numpy's limit.
_NAME = re.compile("[a-z][a-z0-9_]{0,31}")
_MAX_SPEC_BYTES = 1 << 17  # encoded; the longest has the ranks of a process set.


class ProtocolError(Exception):
    """A process violated the protocol; the message says how."""


class Spec(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """Properties that must be the same on all ranks that submit a name.

    Attributes:
      kind: the operation.
      dtype: dtype of the tensor, such as "float32"; "" without a tensor.
      shape: shape of the tensor; for `all_gather` and `all_to_all` without the first
        dimension, which is in `Request.local`. For `add_process_set` the ranks; for
        `remove_process_set` the set id.
      device: "cpu" or "gpu".
      op: the reduction; "" without one.
      prescale: factor of each rank's tensor before the reduction.
      postscale: factor of the result.
      root: global rank of the source of a broadcast, -1 otherwise.
      group: name of the group that runs together or not at all; "" without a group.
      group_size: number of names in the group.
      fingerprint: fingerprint of a submitted program.
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


# Messages hold no cycles, so Python's collector need not look at them (`gc=False`).
class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rank is ready to run one operation."""

    name: str
    spec: bytes  # a `Spec`, encoded: the same on all ranks, or a mistake.
    process_set: int = 0
    local: tuple[int, ...] = ()  # first dimension, or splits; may differ by rank.


class FromRank(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Message of one rank to the coordinator.

    Attributes:
      seen: number of batches that the rank has received.
      requests: requests that became ready and are not cached.
      hits: bit set of the cache slots of requests that became ready and are cached.
      data: the small tensors of the bits in `hits`, in their order: all or none.
      joined: the rank has no more data, and contributes neutral elements until all
        ranks have joined.
      leaves: the rank shuts down.
      failure: why neither this rank nor any other can go on; "" if they can.
      asks: the rank asks which ranks are late; `Batch.who_waits` is the answer.
      is_last: the answer to `Batch.closing`: the rank submits nothing after this.
      doubts: requests that the rank has sent before and waits for. See
        `Batch.unknown`.
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


class Response(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Operation that all ranks of a process set run next.

    Attributes:
      names: names of the tensors, in the order in which they are packed. If all are
        cached they may be left out; `slots` identifies them.
      specs: by name, for ranks that have joined, and for errors.
      process_set: the processes that take part.
      locals: by name and member of the set, `Request.local`, for kinds that have it;
        for `add_process_set` the id of the new set.
      slots: by name, its cache slot; -1: none.
      error: error for the members to raise instead of running.
      ranks: ranks that have submitted the names, and that the error is for. Requests of
        other ranks may be on their way. Empty: all members.
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
      fusion_bytes: most bytes of operations that run as one; 0: no fusion.
      cycle_time_s: how long the engine waits for more requests before it negotiates; 0:
        not at all.
      cache_enabled: whether negotiated requests are cached.
      hierarchical_all_reduce: whether to reduce within hosts first, then across.
      hierarchical_all_gather: the same for `all_gather`.
    """

    fusion_bytes: int = 128 << 20
    cycle_time_s: float = 0.0
    cache_enabled: bool = True
    hierarchical_all_reduce: bool = False
    hierarchical_all_gather: bool = False


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Message of the coordinator to all ranks.

    A batch with `who_waits`, `tuned` or `unknown` has no other field, and is not
    counted in `FromRank.seen`.

    Attributes:
      responses: to be executed in this order.
      data: by response, its concatenated reduced tensors if all ranks have sent theirs,
        b"" otherwise. Empty if no response has any.
      evicted: cache slots that no longer stand for their name.
      last_joined: the last rank to join, once all have; -1 otherwise.
      stop: why the engine ends on all ranks; "" if it does not.
      is_asked: whether the engine ends because a rank has shut it down. Agreed
        operations run first then.
      who_waits: the answer to `FromRank.asks`.
      tuned: options of all ranks from here on.
      unknown: for one rank: the `FromRank.doubts` that the coordinator does not wait
        for. Decisions on the others were sent before.
      closing: the rank that wants to shut down; "" if none does. Each rank answers with
        its last requests.
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
    """Decodes a message of a rank.

    Raises:
      ProtocolError: no engine sends such a message.
    """
    return decode_as(_from_rank, payload)


def decode_batch(payload: bytes) -> Batch:
    """Decodes a message of the coordinator.

    Raises:
      ProtocolError: no coordinator sends such a message.
    """
    return decode_as(_batch, payload)


def decode_as(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
    """Decodes a payload with `decoder`.

    Raises:
      ProtocolError: it is not MessagePack, or not of the decoder's type.
    """
    try:
        return wire.decode_with(decoder.decode, payload)
    except wire.DecodeError as error:
        raise ProtocolError(str(error)) from None


@functools.lru_cache(maxsize=4096)
def decode_spec(encoded: bytes) -> Spec:
    """Decodes a spec; cached, as the same few come over and over.

    Raises:
      ProtocolError: it is not a spec, or no engine makes such a spec.
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
    """Encodes a spec; equal specs give equal bytes."""
    return encode(spec)


def num_bytes_of(spec: Spec, locals_: Sequence[tuple[int, ...]]) -> int:
    """Returns the number of bytes of a tensor; for a gather, of the result.

    Args:
      spec: spec of the operation.
      locals_: by member, `Request.local`; () for kinds without it.
    """
    size = _size_of(spec)
    return size * sum(map(sum, locals_)) if locals_ else size


@functools.lru_cache(maxsize=4096)
def _size_of(spec: Spec) -> int:
    return jnp.dtype(spec.dtype).itemsize * math.prod(spec.shape) if spec.dtype else 0


def _find_fault(spec: Spec) -> str:
    """Returns the first invalid part of a spec, without any context; "" if none."""
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
    if not _NAME.fullmatch(name):  # Numpy would parse it as a structured dtype.
        return False
    try:
        dtype = jnp.dtype(name)
    except (TypeError, ValueError):
        return False
    is_number = dtype.kind in "iufcb" or jnp.issubdtype(dtype, np.number)
    return dtype.name == name and is_number


def _short(values: tuple[int, ...]) -> str:
    return f"{values[:8]}{' and more' if values[8:] else ''}"
