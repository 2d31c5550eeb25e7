"""Groups: which names run together or not at all?"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jdp.eager.coordinator import fusion
from jdp.eager.coordinator.fusion import FusionItem
from jdp.eager.messages import decode_spec


class Ready(NamedTuple):
    """Name that is ready on all ranks."""

    process_set: int
    name: str
    spec: bytes
    locals: tuple[tuple[int, ...], ...]
    slot: int = -1
    error: str = ""
    is_alone: bool = False  # whether it does not wait for the rest of its group.
    ranks: tuple[int, ...] = ()  # see `Response.ranks`.


Key = tuple[int, str]  # process set, and name of the group.


class _Held(NamedTuple):
    """Leaves of a group that are ready."""

    ready: list[Ready]
    since_s: float


class Groups:
    """Groups of which only some names are ready on all ranks."""

    def __init__(self) -> None:
        self.held: dict[Key, _Held] = {}

    def complete(
        self, ready: Iterable[Ready], has_more: Callable[[Key], bool], *, now_s: float
    ) -> list[Ready]:
        """Holds back names of a group until all names of the group are ready.

        Args:
          ready: names that have become ready.
          has_more: whether ranks wait for other leaves of a group of which as many are
            held as it has. The group stays held then, as it cannot run.
          now_s: the time.

        Returns:
          Names without a group, and whole groups. An error of one name becomes the
          error of its whole group.
        """
        complete = []
        for each in ready:
            spec = decode_spec(each.spec)
            # A group on which ranks do not agree never becomes complete.
            if not spec.group or each.is_alone:
                complete.append(each)
                continue
            key = (each.process_set, spec.group)
            held = self.held.setdefault(key, _Held([], now_s)).ready
            held.append(each)
            if len(held) < spec.group_size or has_more(key):
                continue
            del self.held[key]
            error = next((one.error for one in held if one.error), "")
            complete += [one._replace(error=error) for one in held]
        return complete

    def forget(self, set_id: int) -> dict[str, bytes]:
        """Drops the held names of a process set; returns them with their specs."""
        gone = {key: held for key, held in self.held.items() if key[0] == set_id}
        for key in gone:
            del self.held[key]
        return {each.name: each.spec for held in gone.values() for each in held.ready}

    def is_held(self, set_id: int, name: str) -> bool:
        """Whether a name is ready and waits for the rest of its group."""
        return any(
            each.name == name
            for key, held in self.held.items()
            if key[0] == set_id
            for each in held.ready
        )

    def slots(self) -> int:
        """Returns the slots of the held names, as a bit set."""
        in_use = 0
        for held in self.held.values():
            for each in held.ready:
                in_use |= 1 << each.slot if each.slot >= 0 else 0
        return in_use


def fuse(
    ready: Sequence[Ready], *, fusion_bytes: int, fuse_groups: bool
) -> list[list[Ready]]:
    """Fuses names that are ready; see `fusion.fuse`.

    Args:
      ready: names without errors, in whole groups.
      fusion_bytes: most bytes of operations that run as one.
      fuse_groups: whether a group may be fused with operations outside of it.
    """
    units: list[list[Ready]] = []
    by_group: dict[tuple[int, str], list[Ready]] = {}
    for each in ready:
        group = decode_spec(each.spec).group
        if group:
            key = (each.process_set, group)
            if key not in by_group:
                units.append(by_group.setdefault(key, []))
            by_group[key].append(each)
        else:
            units.append([each])
    items = [_item(unit, fuse_groups) for unit in units]
    fused = []
    for together in fusion.fuse(items, fusion_bytes):
        # The kinds of a group run one after another, with nothing in between.
        by_key: dict[object, list[Ready]] = {}
        for each in (each for i in together for each in units[i]):
            by_key.setdefault(_item_of(each).key, []).append(each)
        fused += by_key.values()
    return fused


def _item(unit: Sequence[Ready], fuse_groups: bool) -> FusionItem:
    if not decode_spec(unit[0].spec).group:
        return _item_of(unit[0])
    items = [_item_of(each) for each in unit]
    keys = {item.key for item in items}
    is_alone = len(keys) > 1 or not fuse_groups
    num_bytes = sum([item.num_bytes for item in items])
    return FusionItem(None if is_alone else keys.pop(), num_bytes)


def _item_of(ready: Ready) -> FusionItem:
    return fusion.item_of(ready.process_set, ready.spec, ready.locals)
