"""Broken groups: whose leaves can never be ready together, on all ranks.

A rank submits all leaves of a group at once. So where ranks disagree on the group of a
name that all of them have submitted, all have submitted what they ever will of it; and
the same where more names wait under a group than it has leaves. What is left of the
group would wait for ever. It fails, on the ranks that wait for it.
"""

from collections.abc import Iterable, Iterator, Mapping

from jdp.eager.groups import Groups
from jdp.eager.hits import Hits
from jdp.eager.messages import Response, Spec, decode_spec
from jdp.eager.names import Names
from jdp.eager.slots import SlotTable, bits

Key = tuple[int, str]  # a process set, and a group of it.


def keys_of(set_id: int, specs: Iterable[Spec]) -> set[Key]:
    """Returns the groups that ranks do not agree on, of the specs of one name."""
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
    """Takes back what ranks wait for in groups that cannot run.

    Args:
      broken: groups that ranks do not agree on, with why.
      names: what ranks have said by name.
      groups: what is ready everywhere, and waits for the rest of its group.
      hits: what ranks have said by the numbers of slots.
      slots: what these stand for.

    Returns:
      By name its error; also of groups that have more names than leaves.
    """
    parts = (names, groups, hits, slots)
    for key, why in {**dict(_find_overfull(*parts)), **broken}.items():
        waiting = _find_waiting(key, *parts)
        groups.held.pop(key, None)
        for name, spec in waiting.items():
            names.tables[key[0]].pop(name, None)
            slot = slots.find(key[0], name)
            if slot is not None:
                hits.drop(slot)
            yield Response((name,), (spec,), key[0], error=why)


def _find_overfull(
    names: Names, groups: Groups, hits: Hits, slots: SlotTable
) -> Iterator[tuple[Key, str]]:
    """Finds groups with a name that is ready, and more names than they have leaves."""
    for key, held in list(groups.held.items()):
        size = decode_spec(held.ready[0].spec).group_size
        waiting = _find_waiting(key, names, groups, hits, slots)
        if len(waiting) > size:
            some = ", ".join(sorted(waiting)[:6])
            yield (
                key,
                f"Mismatched groups: {key[1]!r} has {size} leaves, but ranks have "
                f"submitted {len(waiting)} names for it: {some}.",
            )


def _find_waiting(
    key: Key, names: Names, groups: Groups, hits: Hits, slots: SlotTable
) -> dict[str, bytes]:
    """Returns the names, with their specs, that some ranks wait for in a group."""
    set_id, group = key
    if set_id not in names.tables:
        return {}  # The process set was removed, and all that waited in it failed.
    held = groups.held.get(key)
    found = {} if held is None else {each.name: each.spec for each in held.ready}
    for name, entry in names.tables[set_id].items():
        specs = (entry.spec, *entry.odd.values())
        if any([decode_spec(spec).group == group for spec in specs]):
            found[name] = entry.spec
    for slot in bits(hits.pending() & slots.of_set[set_id]):
        cached = slots.get(slot)
        if decode_spec(cached.spec).group == group:
            found[cached.name] = cached.spec
    return found
