"""Broken groups: which groups can never be ready on all ranks?

A rank submits all leaves of a group at once, and no other group of this name before
they are decided. So if ranks disagree on the group of a name that all of them have
submitted, no more leaves will come. The same holds once every rank has submitted as
many leaves as its group has. The remaining leaves would wait for ever, so they fail on
the ranks that wait for them. Ranks that have joined count if they submitted leaves
before: the leaves of the others run only if they are the same.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from jdp.eager.coordinator.cache_hits import Hits
from jdp.eager.coordinator.cache_slots import SlotTable, bits
from jdp.eager.coordinator.groups import Groups, Key
from jdp.eager.coordinator.names import Names
from jdp.eager.messages import Response, Spec, decode_spec

_MOST_SHOWN = 4  # leaves of a rank in an error.


def keys_of(set_id: int, specs: Iterable[Spec]) -> set[Key]:
    """Returns the groups in the specs of one name, if ranks do not agree on them."""
    groups = {(spec.group, spec.group_size) for spec in specs}
    if len(groups) == 1:
        return set()
    return {(set_id, group) for group, _ in groups if group}


def fail(
    broken: Mapping[Key, str],
    names: Names,
    groups: Groups,
    hits: Hits,
    slots: SlotTable,
) -> Iterator[Response]:
    """Takes out the leaves of groups that cannot run.

    Args:
      broken: groups that ranks do not agree on, with reasons.
      names: requests by name.
      groups: names that are ready everywhere and wait for the rest of their group.
      hits: requests by slot.
      slots: the requests that slots stand for.

    Yields:
      The error of each leaf, also in groups whose leaves differ between ranks.
    """
    parts = (names, groups, hits, slots)
    reasons = {**dict(_find_torn(*parts)), **broken}
    left = list(reasons)
    while left:
        key = left.pop(0)
        set_id, why = key[0], reasons[key]
        waiting = _find_waiting(key, *parts)
        held = groups.held.pop(key, None)
        names.came.pop(key, None)
        for name, spec in waiting.items():
            ranks: Sequence[int] = names.members[set_id] if held is not None else ()
            entry = names.tables[set_id].pop(name, None)
            slot = slots.find(set_id, name)
            if entry is not None:
                ranks = entry.ranks
                # A rank that has the leaf in another group cannot run that group.
                specs = map(decode_spec, (entry.spec, *entry.odd.values()))
                others = {(set_id, each.group) for each in specs if each.group}
                left += others - reasons.keys()
                reasons |= dict.fromkeys(others - reasons.keys(), why)
            elif slot is not None:
                ranks = hits.drop(slot) or ranks
            error = Response((name,), (spec,), set_id, error=why)
            yield msgspec.structs.replace(error, ranks=tuple(ranks))


def has_more(
    broken: dict[Key, str],
    taken: int,
    names: Names,
    groups: Groups,
    hits: Hits,
    slots: SlotTable,
    key: Key,
) -> bool:
    """Whether the held leaves of a group come from different ranks.

    No rank, joined or not, has submitted just these leaves then.

    Args:
      broken: groups that ranks do not agree on; receives the group and the reason.
      taken: slots that are ready and might not be held yet, as a bit set.
      names: see `fail`.
      groups: see `fail`.
      hits: see `fail`.
      slots: see `fail`.
      key: a group of which as many leaves are held as it has.
    """
    if key in broken:  # Another leaf has failed, and is no longer in the tables.
        return True
    if not names.joined:  # All ranks have submitted exactly these leaves.
        return False
    held = groups.held[key].ready
    leaves = {each.name for each in held}
    more = set(_find_waiting(key, names, groups, hits, slots))
    more |= {slots.get(s).name for s in bits(taken & slots.of_group.get(key, 0))}
    more -= leaves
    if not more and len(held) <= min(decode_spec(x.spec).group_size for x in held):
        return False
    what = "which are leaves of different ranks"
    if more:
        what = f"but a rank that has joined waits for {_list(more, set())}"
    broken[key] = (
        f"Mismatched groups: of {key[1]!r}, {_list(leaves, set())} came, {what}."
    )
    return True


def _find_torn(
    names: Names, groups: Groups, hits: Hits, slots: SlotTable
) -> Iterator[tuple[Key, str]]:
    """Finds incomplete groups for which no more leaves will come."""
    parts = (names, groups, hits, slots)
    touched, names.touched = names.touched, set()
    for key in touched:
        if key[0] not in names.members:
            names.came.pop(key, None)
            continue
        awaited = names.full[key[0]] & ~names.joined
        came = names.came.get(key, 0) | hits.find_ranks(slots.of_group.get(key, 0))
        if awaited & ~came:
            continue
        waiting = _find_waiting(key, *parts)
        if not waiting:
            names.came.pop(key, None)
            continue
        leaves, is_whole = _find_leaves(key, awaited, *parts)
        names.came[key] = sum(1 << rank for rank in leaves)
        if is_whole:
            yield key, _describe(key[1], leaves, waiting)


def _find_leaves(
    key: Key,
    awaited: int,
    names: Names,
    groups: Groups,
    hits: Hits,
    slots: SlotTable,
) -> tuple[dict[int, set[str]], bool]:
    """Finds the leaves of a group that each rank has submitted and waits for.

    Returns:
      The names by rank; and whether all ranks of `awaited`, a bit set, have submitted
      as many leaves as their groups have.
    """
    set_id, group = key
    leaves: collections.defaultdict[int, set[str]] = collections.defaultdict(set)
    sizes: dict[int, int] = {}

    def note(rank: int, name: str, spec: bytes) -> None:
        decoded = decode_spec(spec)
        if decoded.group == group:
            leaves[rank].add(name)
            sizes[rank] = decoded.group_size

    for name, entry in names.tables[set_id].items():
        for rank in bits(entry.arrived):
            note(rank, name, entry.odd.get(rank, entry.spec))
    for slot in bits(hits.pending() & slots.of_group.get(key, 0)):
        cached = slots.get(slot)
        for rank in bits(hits.find_ranks(1 << slot)):
            note(rank, cached.name, cached.spec)
    held = groups.held.get(key)
    for each in () if held is None else held.ready:  # All ranks have submitted them.
        for rank in bits(awaited):
            note(rank, each.name, each.spec)
    is_whole = all(len(leaves[r]) >= sizes.get(r, 1) for r in bits(awaited))
    return dict(leaves), is_whole


def _describe(
    group: str, leaves: Mapping[int, set[str]], waiting: Mapping[str, bytes]
) -> str:
    """Describes how the leaves of two ranks differ."""
    first, *others = sorted(leaves) or [-1]
    for rank in others:
        ours, theirs = leaves[first], leaves[rank]
        if ours != theirs:
            return (
                f"Mismatched groups: of {group!r}, rank {first} has "
                f"{_list(ours, ours - theirs)}, but rank {rank} has "
                f"{_list(theirs, theirs - ours)}."
            )
    return (
        f"Mismatched groups: of {group!r}, only {_list(set(waiting), set())} waited "
        "when all ranks had joined. The rest has run with other leaves."
    )


def _list(leaves: set[str], odd: set[str]) -> str:
    """Lists names, beginning with those that the other rank lacks."""
    names = [*sorted(odd), *sorted(leaves - odd)]
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _find_waiting(
    key: Key, names: Names, groups: Groups, hits: Hits, slots: SlotTable
) -> dict[str, bytes]:
    """Returns the names, with their specs, that some ranks wait for in a group."""
    set_id, group = key
    if set_id not in names.tables:
        return {}  # The process set was removed, and its requests have failed.
    held = groups.held.get(key)
    found = {} if held is None else {each.name: each.spec for each in held.ready}
    for name, entry in names.tables[set_id].items():
        specs = (entry.spec, *entry.odd.values())
        if any([decode_spec(spec).group == group for spec in specs]):
            found[name] = entry.spec
    for slot in bits(hits.pending() & slots.of_group.get(key, 0)):
        cached = slots.get(slot)
        found[cached.name] = cached.spec
    return found
