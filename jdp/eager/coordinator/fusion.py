"""Fusion: which of the operations that are ready run as one?"""

import functools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jdp.eager.messages import Spec, decode_spec, num_bytes_of

_FUSED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


class FusionItem(NamedTuple):
    """Operation, or group that runs together, that is ready on all ranks."""

    key: Hashable  # items with the same key may be fused; None: never fused.
    num_bytes: int


def fuse(items: Sequence[FusionItem], threshold_bytes: int) -> list[list[int]]:
    """Fuses items with the same key, up to a threshold.

    An item that does not fit is passed over, and later items may still fit, as in
    Horovod (`Controller::FuseResponses`). An item larger than the threshold runs alone.

    Args:
      items: in the order in which they became ready.
      threshold_bytes: most bytes of fused items; 0: no fusion.

    Returns:
      One list of ascending indices of `items` per fused operation, ordered by their
      first indices; every index once.
    """
    by_key: dict[Hashable, list[int]] = {}
    fused: list[list[int]] = []
    for i, item in enumerate(items):
        if item.key is None or item.num_bytes >= threshold_bytes:
            fused.append([i])
        else:
            by_key.setdefault(item.key, []).append(i)
    for waiting in by_key.values():
        while waiting:
            together, left, num_bytes = [], [], 0
            for i in waiting:
                if num_bytes + items[i].num_bytes <= threshold_bytes:
                    together.append(i)
                    num_bytes += items[i].num_bytes
                else:
                    left.append(i)
            fused.append(together)
            waiting = left
    return sorted(fused)


def key_of(process_set: int, spec: Spec) -> tuple[object, ...] | None:
    """Returns the key of operations that may run as one; None: never fused.

    Args:
      process_set: the processes that take part.
      spec: spec of the operation.
    """
    if spec.kind not in _FUSED:
        return None
    rest = (spec.op, spec.prescale, spec.postscale, spec.root)
    return (process_set, spec.kind, spec.dtype, spec.device, *rest)


def item_of(
    process_set: int, spec: bytes, locals_: tuple[tuple[int, ...], ...]
) -> FusionItem:
    """Returns the item of a name.

    Args:
      process_set: the processes that take part.
      spec: spec of the operation, encoded.
      locals_: by member, `Request.local`; () for kinds without it.
    """
    item = _item_without_locals(process_set, spec)
    if not locals_:
        return item
    return item._replace(num_bytes=num_bytes_of(decode_spec(spec), locals_))


# Many names have the same properties. Rows differ by call, so they are not kept.
@functools.lru_cache(maxsize=4096)
def _item_without_locals(process_set: int, spec: bytes) -> FusionItem:
    decoded = decode_spec(spec)
    return FusionItem(key_of(process_set, decoded), num_bytes_of(decoded, ()))
