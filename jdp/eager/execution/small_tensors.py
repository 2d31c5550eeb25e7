"""Small tensors: which tensors travel with the agreement, without a second exchange?

A rank sends them with the bits that say that they are ready. If all ranks have done so,
the coordinator reduces them and sends the result with the response.
"""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jdp.collectives.base import Op
from jdp.collectives.host import arithmetic
from jdp.eager import numerics
from jdp.eager.entries import Entry
from jdp.eager.messages import Response, Spec, decode_spec

NAME = "with the agreement"  # in a timeline, in place of an implementation.
# Larger tensors are faster through an implementation: here every process copies the
# data on its way, and one process reduces it.
MAX_BYTES = 512  # per tensor.
_MAX_TENSORS = 16  # per message.


def is_small(spec: Spec, num_bytes: int) -> bool:
    """Whether a tensor may travel with the agreement."""
    return (
        spec.kind == "all_reduce"
        and num_bytes <= MAX_BYTES
        and spec.device == "cpu"
        and spec.op != "adasum"
        and spec.prescale == 1.0
    )


def collect(entries: Sequence[Entry], slots: Sequence[int]) -> tuple[bytes, ...]:
    """Returns the tensors of entries in the order of slots; () if one is not small."""
    if len(entries) > _MAX_TENSORS or not all([entry.is_small for entry in entries]):
        return ()
    if len(entries) == 1:
        return (entries[0].array.tobytes(),)
    by_slot = sorted(zip(slots, entries, strict=True), key=lambda pair: pair[0])
    return tuple([entry.array.tobytes() for _, entry in by_slot])


def reduce(spec: Spec, given: Sequence[bytes]) -> bytes:
    """Reduces the tensors of the ranks, without the postscale.

    Args:
      spec: spec of one of the tensors; fused tensors have the same dtype and reduction.
      given: by rank, its concatenated tensors.
    """
    op, _ = split_average(spec, jnp.dtype(spec.dtype), len(given))
    arrays = [np.frombuffer(part, jnp.dtype(spec.dtype)) for part in given]
    if len(arrays) == 1:
        return given[0]
    out = np.empty_like(arrays[0])
    arithmetic.reduce(arrays, op, out=out)
    return out.tobytes()


def reduce_taken(
    response: Response, taken: Mapping[int, Sequence[bytes]], specs: Mapping[int, bytes]
) -> bytes:
    """Reduces the tensors of a response; returns b"" if a rank has not sent one.

    Args:
      response: a response that has slots only.
      taken: by slot, the tensors that came with its bits, by rank.
      specs: by slot, its spec.
    """
    slots = list(response.slots)
    if not taken or not slots or not all([slot in taken for slot in slots]):
        return b""
    parts = taken[slots[0]]
    if len(slots) > 1:
        by_rank = zip(*[taken[slot] for slot in slots], strict=True)
        parts = [b"".join(tensors) for tensors in by_rank]
    return reduce(decode_spec(specs[slots[0]]), parts)


def split_average(spec: Spec, dtype: np.dtype, count: int) -> tuple[Op, float]:
    """Returns the reduction of a spec, and the factor for its result.

    The mean of integers is rounded towards zero. If it is scaled too, division and
    scaling are one factor, so that it is rounded once.
    """
    if spec.op != "average":
        return spec.op, spec.postscale  # pyright: ignore[reportReturnType]
    if spec.postscale != 1.0 and numerics.is_integer(dtype):
        return "sum", spec.postscale / count
    return "mean", spec.postscale


def unpack(data: bytes, arrays: list[np.ndarray], op: Op) -> list[np.ndarray]:
    """Returns the reduced tensors of `data`, with the sizes and the dtype of `arrays`.

    After `data` it has the arguments of `Implementation.all_reduce`: the ranks have
    sent `arrays` already, and the coordinator has applied `op`.
    """
    whole = np.frombuffer(data, arrays[0].dtype)
    if len(arrays) == 1:
        return [whole]
    ends = np.cumsum([x.size for x in arrays])
    return np.split(whole, ends[:-1])
