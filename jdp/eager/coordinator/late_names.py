"""Late names: which names do some ranks wait for that others have not submitted?"""

from typing import NamedTuple

from jdp.eager.coordinator.cache_hits import Hits
from jdp.eager.coordinator.cache_slots import SlotTable, bits
from jdp.eager.coordinator.groups import Groups
from jdp.eager.coordinator.names import Names

JOIN = (-1, "join")  # the key of `join` among the names that a rank asks about.


class Stall(NamedTuple):
    """Name that only some ranks have submitted, or an incomplete group."""

    process_set: int
    name: str
    missing: tuple[int, ...]
    waited_s: float


def is_awaited(
    rank: int,
    names: Names,
    groups: Groups,
    hits: Hits,
    slots: SlotTable,
    key: tuple[int, str],
) -> bool:
    """Whether the coordinator still waits for other ranks to submit a name.

    Args:
      rank: a rank that has submitted the name.
      names: see `find_stalls`.
      groups: see `find_stalls`.
      hits: see `find_stalls`.
      slots: see `find_stalls`.
      key: process set and name, or `JOIN`.
    """
    if key == JOIN:
        return bool(names.joined >> rank & 1)
    slot = slots.find(*key)
    return (
        names.is_awaited(rank, *key)
        or slot is not None
        and bool(hits.of_rank[rank] >> slot & 1)
        or groups.is_held(*key)
    )


def find_stalls(
    names: Names,
    groups: Groups,
    hits: Hits,
    slots: SlotTable,
    *,
    now_s: float,
    after_s: float,
) -> list[Stall]:
    """Returns the names that some ranks wait for longer than `after_s` seconds.

    Args:
      names: requests by name.
      groups: names that are ready everywhere and wait for the rest of their group.
      hits: requests by slot.
      slots: the requests that slots stand for.
      now_s: the time.
      after_s: shortest wait to report.
    """
    stalls = []
    for set_id, table in names.tables.items():
        full = names.full[set_id] & ~names.joined
        for name, entry in table.items():
            waited_s = now_s - entry.since_s
            missing = full & ~entry.arrived
            if missing and waited_s >= after_s:
                stalls.append(Stall(set_id, name, tuple(bits(missing)), waited_s))
    for (set_id, group), held in groups.held.items():
        waited_s = now_s - held.since_s
        if waited_s >= after_s:
            came = ", ".join(each.name for each in held.ready)
            text = f"group {group!r}, of which only {came} came"
            stalls.append(Stall(set_id, text, (), waited_s))
    for slot, waited_s in hits.waited_s(now_s=now_s).items():
        if waited_s < after_s:
            continue
        cached = slots.get(slot)
        missing = tuple(
            rank
            for rank in names.members[cached.process_set]
            if not (hits.of_rank[rank] >> slot | names.joined >> rank) & 1
        )
        if missing:  # Otherwise it is ready, and not decided yet.
            stalls.append(Stall(cached.process_set, cached.name, missing, waited_s))
    return stalls
