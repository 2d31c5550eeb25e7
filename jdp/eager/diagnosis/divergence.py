"""Divergence: where did two processes of the eager engine diverge?

The flight records of both tell. Ranks may submit names in any order, so the order of
execution and the meaning of each name must be the same.

Only process sets that both ranks use are compared: a dump does not list the members of
a set.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

from jdp.eager.coordinator import mismatch
from jdp.eager.diagnosis.flight_recorder import Dump, Record
from jdp.eager.messages import Kind, Spec

_MOST_SHOWN = 5  # findings per kind; the rest is counted.
_HAS_LOCAL_FIRST = ("all_gather", "all_to_all")
_MOST_APART_S = 1.0  # between dumps that count as simultaneous.
_Key = tuple[int, str]  # process set and name.


class DivergenceFinding(NamedTuple):
    """One difference between two dumps.

    Attributes:
      what: "order": the ranks ran different operations at one position. "mismatch": one
        name stands for different operations. "missing": one rank waits for a request
        that the other never submitted. "outcome": an operation failed on one rank only.
      a: request of the first dump, if it has one.
      b: request of the second dump, if it has one.
      text: the difference as a sentence.
    """

    what: Literal["order", "mismatch", "missing", "outcome"]
    a: Record | None
    b: Record | None
    text: str


class Divergence(NamedTuple):
    """Differences between two processes."""

    findings: tuple[DivergenceFinding, ...]  # at least one, the most telling first.


class _Matched(NamedTuple):
    """Requests of two dumps."""

    pairs: list[tuple[Record, Record]]  # of the same operation.
    alone_a: list[Record]  # waiting requests of a that b does not have.
    alone_b: list[Record]  # the converse.


class _Stretch(NamedTuple):
    """Part of the order of execution that both dumps hold."""

    positions: list[int]  # where both ranks ran the same operations.
    apart: int | None  # the first position where they did not.


def find_divergence(a: Dump, b: Dump) -> Divergence | None:
    """Returns how the records of two ranks differ, or None if they do not.

    Orders of submission may differ. One rank may have been dumped later than the other,
    and both dumps may lack older records: only records that both must hold are
    compared.

    Raises:
      ValueError: the dumps are from one rank, or from jobs of different sizes.
    """
    _check(a, b)
    shared = _shared_sets(a, b)
    matched = _match(a, b, shared)
    findings = [
        *_other_order(a, b, shared),
        *_mismatches(a, b, matched),
        *_missing(a, b, matched, shared),
        *_outcomes(a, b, matched),
    ]
    return Divergence(tuple(findings)) if findings else None


def explain(a: Dump, b: Dump, divergence: Divergence | None) -> str:
    """Describes in sentences how far two ranks agree, and how they differ.

    Args:
      a: one dump.
      b: the other.
      divergence: result of `find_divergence(a, b)`.
    """
    _check(a, b)
    shared = _shared_sets(a, b)
    lines = [_agreement(a, b, shared)]
    findings = divergence.findings if divergence else ()
    for what in ("order", "mismatch", "missing", "outcome"):
        texts = [each.text for each in findings if each.what == what]
        lines += texts[:_MOST_SHOWN]
        if texts[_MOST_SHOWN:]:
            lines.append(f"... and {len(texts) - _MOST_SHOWN} more of this kind.")
    if not findings:
        lines.append(f"Nothing differs between rank {a.rank} and rank {b.rank}.")
    return "\n".join([*lines, *_notes(a, b, shared)])


def _other_order(a: Dump, b: Dump, shared: set[int]) -> list[DivergenceFinding]:
    position = _common_stretch(a, b, shared).apart
    if position is None:
        return []
    ours = [r for r in a.records if r.order == position]
    theirs = [r for r in b.records if r.order == position]
    text = (
        f"As operation {position}, rank {a.rank} ran {_list(ours)}, and rank {b.rank} "
        f"{_list(theirs)}."
    )
    return [DivergenceFinding("order", (*ours, None)[0], (*theirs, None)[0], text)]


def _mismatches(a: Dump, b: Dump, matched: _Matched) -> list[DivergenceFinding]:
    findings = []
    for ours, theirs in matched.pairs:
        text = mismatch.explain(ours.name, {a.rank: _spec(ours), b.rank: _spec(theirs)})
        if text:
            findings.append(DivergenceFinding("mismatch", ours, theirs, text))
    for ours, theirs in _in_other_sets(a, b, matched):
        text = (
            f"Mismatched process sets of {ours.name!r}: rank {a.rank} has "
            f"{ours.process_set}, but rank {b.rank} has {theirs.process_set}."
        )
        findings.append(DivergenceFinding("mismatch", ours, theirs, text))
    return findings


def _in_other_sets(a: Dump, b: Dump, matched: _Matched) -> list[tuple[Record, Record]]:
    """Pairs requests that wait under one name in two sets, one of which both use."""
    shared = _shared_sets(a, b)
    by_name = {record.name: record for record in matched.alone_b}
    found = []
    for ours in matched.alone_a:
        theirs = by_name.get(ours.name)
        if theirs is None or theirs.process_set == ours.process_set:
            continue
        if shared & {ours.process_set, theirs.process_set}:
            found.append((ours, theirs))
    return found


def _missing(
    a: Dump, b: Dump, matched: _Matched, shared: set[int]
) -> list[DivergenceFinding]:
    if _later_without_records(a, b):
        return []
    named = {record.name for pair in _in_other_sets(a, b, matched) for record in pair}
    findings = []
    for mine, other, alone in ((a, b, matched.alone_a), (b, a, matched.alone_b)):
        if _has_joined(other):
            continue
        for record in alone:
            if record.process_set not in shared or record.name in named:
                continue
            if record.kind == "join":
                continue  # The other rank may have more data.
            text = (
                f"Rank {mine.rank} submitted {_show(record)}, which rank {other.rank} "
                f"has not, and has waited for {_waited(mine, record)}."
            )
            text += f" It failed: {record.error}" if record.error else ""
            ours, theirs = (record, None) if mine is a else (None, record)
            findings.append(DivergenceFinding("missing", ours, theirs, text))
    return findings


def _outcomes(a: Dump, b: Dump, matched: _Matched) -> list[DivergenceFinding]:
    findings = []
    for ours, theirs in matched.pairs:
        both_over = ours.finished_s and theirs.finished_s
        if not both_over or bool(ours.error) == bool(theirs.error):
            continue
        failed, well = (a, b) if ours.error else (b, a)
        text = (
            f"{_show(ours)} failed on rank {failed.rank}, and not on rank {well.rank}: "
            f"{ours.error or theirs.error}"
        )
        findings.append(DivergenceFinding("outcome", ours, theirs, text))
    return findings


def _agreement(a: Dump, b: Dump, shared: set[int]) -> str:
    stretch = _common_stretch(a, b, shared)
    if not stretch.positions:
        later = _later_without_records(a, b)
        if later is None:
            return "No operation that has run is in both records."
        earlier = b if later is a else a
        return (
            f"No operation is in both records: the record of rank {earlier.rank} ends "
            f"before the record of rank {later.rank} begins."
        )
    names = {record.order: record.name for record in a.records}
    first, last = names[stretch.positions[0]], names[stretch.positions[-1]]
    count = len(stretch.positions)
    since = ""
    if max(a.dropped_order, b.dropped_order) >= 0:
        since = f"from {first!r} (older ones are no longer recorded) "
    operations = "operation" if count == 1 else "operations"
    return f"Both ran {count:,} {operations} in the same order, {since}up to {last!r}."


def _notes(a: Dump, b: Dump, shared: set[int]) -> list[str]:
    """Returns context that is not itself a difference."""
    pairs = _match(a, b, shared).pairs
    more = " Another rank has not submitted it." if a.size > 2 else ""
    notes = [
        f"Both wait for {_show(ours)}.{more}"
        for ours, theirs in pairs
        if ours.is_waiting and theirs.is_waiting and _spec(ours) == _spec(theirs)
    ]
    notes = [*notes[:_MOST_SHOWN], *_notes_of(a), *_notes_of(b)]
    later = _later_without_records(a, b)
    if later:
        notes.append(
            f"Waiting requests cannot be compared: rank {later.rank} went on, and its "
            "record no longer has the operations that followed."
        )
    first, second = sorted((a, b), key=lambda dump: dump.time)
    apart_s = second.time - first.time
    if apart_s > _MOST_APART_S:
        notes.append(
            f"Rank {second.rank} was dumped {apart_s:.1f} s after rank {first.rank}."
        )
    other_order = _first_out_of_order(pairs)
    if other_order:
        ours, theirs = other_order
        notes.append(
            "The ranks submit in different orders, as they may: at the first "
            f"difference, rank {a.rank} submitted {ours.name!r} and rank {b.rank} "
            f"{theirs.name!r}."
        )
    return notes


def _notes_of(dump: Dump) -> list[str]:
    notes = []
    running = [r for r in dump.records if r.started_s and not r.finished_s]
    if running:
        first = min(running, key=lambda record: record.order)
        age = _age(dump, first.started_s)
        notes.append(f"Rank {dump.rank} has been in {_show(first)} for {age}.")
    if _has_joined(dump):
        notes.append(f"Rank {dump.rank} has joined: it has no more data.")
    if dump.records:
        last = dump.records[-1]
        notes.append(
            f"The last request of rank {dump.rank} is {last.name!r}, "
            f"{_age(dump, last.submitted_s)} before its dump."
        )
    return notes


def _first_out_of_order(
    pairs: Sequence[tuple[Record, Record]],
) -> tuple[Record, Record] | None:
    """Returns the first requests that two ranks submitted in different orders."""
    by_a = sorted(pairs, key=lambda pair: pair[0].number)
    by_b = sorted(pairs, key=lambda pair: pair[1].number)
    for ours, theirs in zip(by_a, by_b, strict=True):
        if ours is not theirs:
            return ours[0], theirs[1]
    return None


def _check(a: Dump, b: Dump) -> None:
    if a.size != b.size:
        raise ValueError(
            f"The dumps are of two jobs: of {a.size} ranks, and of {b.size}."
        )
    if a.rank == b.rank:
        raise ValueError(f"Both dumps are of rank {a.rank}. Compare two ranks.")


def _shared_sets(a: Dump, b: Dump) -> set[int]:
    """Returns the process sets that both ranks use; all ranks are in set 0."""
    return {0} | (
        {record.process_set for record in a.records}
        & {record.process_set for record in b.records}
    )


def _common_stretch(a: Dump, b: Dump, shared: set[int]) -> _Stretch:
    first = max(a.dropped_order, b.dropped_order) + 1
    last = min(_last_order(a), _last_order(b))
    ran_a, ran_b = _by_order(a, shared), _by_order(b, shared)
    # A rank that has joined takes part without a request.
    has_join = any(r.kind == "join" for dump in (a, b) for r in dump.records)
    positions = []
    for position in sorted(ran_a.keys() | ran_b.keys()):
        if not first <= position <= last:
            continue
        ours, theirs = ran_a.get(position), ran_b.get(position)
        if ours == theirs:
            positions.append(position)
        elif (ours and theirs) or not has_join:
            return _Stretch(positions, position)
    return _Stretch(positions, None)


def _by_order(dump: Dump, shared: set[int]) -> dict[int, set[_Key]]:
    """Returns the names at each position; several if the operation was fused."""
    ran: dict[int, set[_Key]] = {}
    for record in dump.records:
        if record.order >= 0 and record.process_set in shared:
            ran.setdefault(record.order, set()).add(_key(record))
    return ran


def _match(a: Dump, b: Dump, shared: set[int]) -> _Matched:
    ran_b = {(r.order, _key(r)): r for r in b.records if r.order >= 0}
    pairs = []
    for record in a.records:
        other = ran_b.get((record.order, _key(record)))
        if other:
            pairs.append((record, other))
    open_a, open_b = _open(a, _last_order(b)), _open(b, _last_order(a))
    if _later_without_records(a, b):
        open_a = {}  # The next request of a name may be missing from the record.
    for key in open_a.keys() & open_b.keys():
        # A name waits once at a time, so requests pair up in order. Surplus requests of
        # one rank are missing on the other.
        pairs += zip(open_a[key], open_b[key], strict=False)
    pairs.sort(key=lambda pair: pair[0].number)
    in_a, in_b = {p[0].number for p in pairs}, {p[1].number for p in pairs}
    return _Matched(
        [pair for pair in pairs if pair[0].process_set in shared],
        [r for r in a.records if r.is_waiting and r.number not in in_a],
        [r for r in b.records if r.is_waiting and r.number not in in_b],
    )


def _open(dump: Dump, last_order: int) -> dict[_Key, list[Record]]:
    """Returns by name the requests that ran after the other rank's record, or wait."""
    found: dict[_Key, list[Record]] = {}
    for record in dump.records:
        if record.order < 0 or record.order > last_order:
            found.setdefault(_key(record), []).append(record)
    return found


def _later_without_records(a: Dump, b: Dump) -> Dump | None:
    """Returns the dump that lacks operations after the last one of the other, or None.

    Waiting requests of either rank may have run, or arrived, in between.
    """
    earlier, later = sorted((a, b), key=_last_order)
    return later if later.dropped_order > _last_order(earlier) else None


def _last_order(dump: Dump) -> int:
    return max([dump.dropped_order, *(record.order for record in dump.records)])


def _has_joined(dump: Dump) -> bool:
    return any(r.kind == "join" and not r.finished_s for r in dump.records)


def _key(record: Record) -> _Key:
    return record.process_set, record.name


def _spec(record: Record) -> Spec:
    """Returns the properties that must be the same on all ranks."""
    shape = record.shape[record.kind in _HAS_LOCAL_FIRST :]
    return Spec(cast(Kind, record.kind), record.dtype, shape, op=record.op)


def _show(record: Record) -> str:
    dims = ", ".join(map(str, record.shape))
    tensor = f"{record.dtype}[{dims}]" if record.dtype else ""
    where = f"in process set {record.process_set}" if record.process_set else ""
    words = (record.kind, record.op, tensor, where)
    return f"{record.name!r} ({' '.join(filter(None, words))})"


def _list(records: Sequence[Record]) -> str:
    return ", ".join(map(_show, records)) or "nothing"


def _waited(dump: Dump, record: Record) -> str:
    until_s = record.finished_s or dump.clock_s
    return f"{max(until_s - record.submitted_s, 0):.1f} s"


def _age(dump: Dump, since_s: float) -> str:
    return f"{max(dump.clock_s - since_s, 0):.1f} s"
