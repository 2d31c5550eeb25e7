"""Messages: what processes and the coordinator of the eager engine say."""

import functools
from typing import Literal

import msgspec

from jdp.eager.autotune import Tunable

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

# What names begin with that nobody gave: they are counted, and never come again.
UNNAMED = "unnamed "


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """What must be the same on all ranks that submit one name.

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
    """What one rank says.

    Attributes:
      seen: how many batches of responses it has got.
      requests: what became ready there and is not cached.
      hits: a bit set of cache slots: what became ready and is cached.
      data: of small tensors, in the order of the bits in `hits`: all of them or none.
      joined: the rank has no more data, and contributes zeros until all have joined.
      leaves: the rank shuts down.
      failure: why the rank cannot go on, and with it none can; "" if it can.
      asks: the rank wants to know who waits for whom.
    """

    seen: int = 0
    requests: tuple[Request, ...] = ()
    hits: bytes = b""
    data: tuple[bytes, ...] = ()
    joined: bool = False
    leaves: bool = False
    failure: str = ""
    asks: bool = False


class Response(msgspec.Struct, frozen=True, array_like=True):
    """What all ranks of a process set do next.

    Attributes:
      names: of the tensors, in the order in which they are packed; those that are
        cached may be left out, and `slots` say which they are.
      specs: of each name; for ranks that have joined, and for errors.
      process_set: who takes part.
      locals: by name and member of the set, `Request.local`; of kinds that have one.
        Of a process set that is added, its number.
      slots: by name, the slot of the cache that it gets or has; -1 for none.
      error: why nothing is done, for all members to raise.
    """

    names: tuple[str, ...]
    specs: tuple[bytes, ...] = ()
    process_set: int = 0
    locals: tuple[tuple[tuple[int, ...], ...], ...] = ()
    slots: tuple[int, ...] = ()
    error: str = ""


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator says to all ranks, one batch after another.

    Attributes:
      responses: to be executed in this order.
      data: by response, its reduced tensors, one after the other, where all ranks have
        sent theirs; b"" where they have not. Empty if none has any.
      evicted: slots of the cache that no longer stand for their name.
      last_joined: the last rank to join, once all have; -1 otherwise.
      stop: why the engine ends on all ranks; "" if it does not.
      is_asked: whether it ends since a rank has shut it down; what was agreed before
        is executed first.
      who_waits: the answer to `FromRank.asks`.
      tuned: what all ranks go by from here on. A batch with this or the one above has
        nothing else, and does not count.
    """

    responses: tuple[Response, ...] = ()
    data: tuple[bytes, ...] = ()
    evicted: tuple[int, ...] = ()
    last_joined: int = -1
    stop: str = ""
    is_asked: bool = False
    who_waits: str = ""
    tuned: Tunable | None = None


@functools.lru_cache(maxsize=4096)
def decode_spec(encoded: bytes) -> Spec:
    """Decodes a spec; the same few come over and over."""
    return msgspec.msgpack.decode(encoded, type=Spec)


def encode_spec(spec: Spec) -> bytes:
    """Encodes a spec; like specs give like bytes."""
    return msgspec.msgpack.encode(spec)
