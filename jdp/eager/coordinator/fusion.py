"""Fusion: which operations that are ready run as one."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jdp.eager.messages import Spec

_FUSED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


class FusionItem(NamedTuple):
    """An operation, or a group that runs together, that is ready everywhere."""

    key: Hashable  # what is fused has the same one; None: it runs by itself.
    num_bytes: int


def fuse(items: Sequence[FusionItem], threshold_bytes: int) -> list[list[int]]:
    """Puts items of one key together, up to the threshold.

    An item that does not fit is passed over, and what comes after it may still fit, as
    in Horovod (`Controller::FuseResponses`). An item that is larger than the threshold
    runs by itself.

    Args:
      items: in the order in which they became ready.
      threshold_bytes: most bytes of what is fused; 0: nothing is.

    Returns:
      Indices of `items`, those that run as one together, in the order of the first of
      each; every index once, ascending in its list.
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
    """Returns what is the same of operations that may run as one; None: it never does.

    Args:
      process_set: the processes that take part.
      spec: of the operation.
    """
    if spec.kind not in _FUSED:
        return None
    rest = (spec.op, spec.prescale, spec.postscale, spec.root)
    return (process_set, spec.kind, spec.dtype, spec.device, *rest)
