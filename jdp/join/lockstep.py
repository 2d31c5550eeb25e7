"""Lockstep: how do processes with unequal data agree on the same iterations?

Pure: no threads, no clock. In round i every process makes one announcement, and process
0 makes one decision from all of them. An announcement holds the sizes of the batches
read since the last one, whether the input has ended, and an error if reading failed. A
decision holds the iterations that every process has announced, or ended before.

A process announces at once if it has ended, or if a batch that it has announced is not
decided (then another process is slow). Otherwise it waits, to save messages, until what
it has read since fills three quarters of `prefetch`, or there is something and its loop
has begun all decided iterations.

No schedule deadlocks. Say a round is not complete. A process that has not announced
has not ended and has nothing undecided, so all that it holds is decided. Either it
holds fewer than `prefetch` batches, and its reader reads: that comes to something new,
an end or an error. Or its loop has decided iterations before it. What is decided is the
same for all, so a loop that is at the earliest of them need not wait, all loops can
begin all decided iterations, and then every queue has space. When the round is
complete, every process has ended or has announced a batch that is not decided, so at
least one iteration is decided, or the end or an error; a new spec takes one round more.
Time enters only as keep-alive: a process can send an empty announcement at any time.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from jdp.join import batch_spec
from jdp.join.batch_spec import BatchSpec

SpecChange = tuple[int, BatchSpec]


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """Message of one process in one round."""

    # Samples per replica of each batch read since the last announcement.
    sizes: tuple[int, ...] = ()
    specs: tuple[SpecChange, ...] = ()  # (offset in `sizes`, spec) where it changed.
    has_ended: bool = False  # there is no batch after these.
    error: str | None = None  # why not, if it is not the end of the input.
    objection: str | None = None  # why the spec that was proposed cannot be padded.
    reading_s: float = 0.0  # how long the loop has waited for the reader.


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """Answer of process 0 to all processes in one round."""

    sizes: tuple[int, ...] = ()  # samples per replica of each new iteration.
    specs: tuple[tuple[int, int], ...] = ()  # (offset in `sizes`, index of the spec).
    proposal: BatchSpec | None = None  # gets the next index unless a process objects.
    is_end: bool = False  # there is no iteration after these.
    error: str | None = None  # why not, if it is not the end of all inputs.
    is_read_error: bool = False  # processes whose reading failed raise their own error.
    culprit: int | None = None  # the process that is the reason for the error.

    @property
    def is_final(self) -> bool:
        """Whether there is no round after this one."""
        return self.is_end or self.error is not None


class MemberState(msgspec.Struct, frozen=True):
    """State of one process: batches that are read, announced and decided."""

    prefetch: int
    sizes: tuple[int, ...] = ()  # read and not announced.
    specs: tuple[SpecChange, ...] = ()
    num_announced: int = 0  # batches.
    num_decided: int = 0  # iterations.
    has_ended: bool = False
    error: str | None = None
    objection: str | None = None


class CoordinatorState(msgspec.Struct, frozen=True):
    """State of all processes, as process 0 knows it."""

    timeout_s: float  # longest wait for one batch.
    sizes: tuple[tuple[int, ...], ...]  # per process, announced and not decided.
    changes: tuple[tuple[SpecChange, ...], ...]  # per process, by iteration, the same.
    num_announced: tuple[int, ...]
    has_ended: tuple[bool, ...]
    errors: tuple[str | None, ...]
    num_decided: int = 0
    specs: tuple[BatchSpec, ...] = ()  # agreed on, by index.
    marks: tuple[int, ...] = ()  # per spec, the largest size so far.
    current: int = -1  # index of the spec of the last iteration.
    proposal: BatchSpec | None = None


class _SpecRun(NamedTuple):
    """Iterations of one spec, one after the other."""

    start: int
    spec: int  # index.


def read(
    member: MemberState, sizes: tuple[int, ...], specs: tuple[SpecChange, ...] = ()
) -> MemberState:
    """Enters batches that the reader has read; one at a time, or several at once.

    Args:
      member: the process.
      sizes: samples per replica of each.
      specs: (offset in `sizes`, spec) where it differs from the batch before.
    """
    if specs:
        shift = len(member.sizes)
        specs = member.specs + tuple((shift + i, spec) for i, spec in specs)
        return replace(member, sizes=member.sizes + sizes, specs=specs)
    return replace(member, sizes=member.sizes + sizes)


def end(member: MemberState, error: str | None = None) -> MemberState:
    """Enters that the input has ended, or that reading it failed."""
    return replace(member, has_ended=True, error=error)


def object_to(member: MemberState, reason: str) -> MemberState:
    """Enters that this process cannot pad the spec that was proposed."""
    return replace(member, objection=reason)


def has_to_announce(member: MemberState, num_begun: int) -> bool:
    """Returns whether the process announces now; see the module docstring.

    Args:
      member: the process.
      num_begun: how many iterations its loop has begun.
    """
    return (
        member.has_ended
        or member.num_announced > member.num_decided
        or len(member.sizes) >= member.prefetch - member.prefetch // 4
        or bool(member.sizes)
        and member.num_decided <= num_begun
    )


def announce(
    member: MemberState, reading_s: float = 0.0
) -> tuple[MemberState, Announcement]:
    """Makes the announcement of this round; any time is right, see `has_to_announce`.

    Args:
      member: the process.
      reading_s: how long its loop has waited for its reader.
    """
    sizes = member.sizes
    announcement = Announcement(
        sizes,
        member.specs,
        member.has_ended,
        member.error,
        member.objection,
        reading_s,
    )
    member = replace(
        member, sizes=(), specs=(), num_announced=member.num_announced + len(sizes)
    )
    return member, announcement


def receive(member: MemberState, decision: Decision) -> MemberState:
    """Enters the decision of this round."""
    return replace(member, num_decided=member.num_decided + len(decision.sizes))


def start_coordinator(num_processes: int, *, timeout_s: float) -> CoordinatorState:
    """Starts process 0's side."""
    return CoordinatorState(
        timeout_s=timeout_s,
        sizes=((),) * num_processes,
        changes=((),) * num_processes,
        num_announced=(0,) * num_processes,
        has_ended=(False,) * num_processes,
        errors=(None,) * num_processes,
    )


def decide(
    state: CoordinatorState, announcements: Sequence[Announcement]
) -> tuple[CoordinatorState, Decision]:
    """Decides on the announcements of one round, by process."""
    if state.proposal is not None:
        for process, announcement in enumerate(announcements):
            if announcement.objection is not None:
                text = f"Process {process} {announcement.objection}"
                return state, Decision(error=text, culprit=process)
        state = replace(
            state,
            specs=(*state.specs, state.proposal),
            marks=(*state.marks, 1),
            proposal=None,
        )
    state = _enter(state, announcements)
    start, limit = state.num_decided, _find_limit(state)
    segments: list[_SpecRun] = []
    proposal = error = None
    if any(state.changes):
        limit, segments, proposal, error = _follow_specs(state, limit)
    state, sizes = _take(state, limit, segments)
    is_read_error = False
    culprit = None
    if error is None and proposal is None:
        culprit, error = _find_read_error(state)
        is_read_error = error is not None
        if error is None:
            culprit, error = _find_stuck_reader(state, announcements)
    decision = Decision(
        sizes=sizes,
        specs=tuple((segment.start - start, segment.spec) for segment in segments),
        proposal=proposal,
        is_end=proposal is None
        and error is None
        and all(state.has_ended)
        and state.num_decided == max(state.num_announced),
        error=error,
        is_read_error=is_read_error,
        culprit=culprit,
    )
    return replace(state, proposal=proposal), decision


def _enter(
    state: CoordinatorState, announcements: Sequence[Announcement]
) -> CoordinatorState:
    changes = state.changes
    if any(announcement.specs for announcement in announcements):
        changes = tuple(
            known + tuple((total + i, spec) for i, spec in announcement.specs)
            for known, total, announcement in zip(
                changes, state.num_announced, announcements, strict=True
            )
        )
    totals = zip(state.num_announced, announcements, strict=True)
    return replace(
        state,
        sizes=tuple(
            known + announcement.sizes
            for known, announcement in zip(state.sizes, announcements, strict=True)
        ),
        changes=changes,
        num_announced=tuple(total + len(a.sizes) for total, a in totals),
        has_ended=tuple(announcement.has_ended for announcement in announcements),
        errors=tuple(announcement.error for announcement in announcements),
    )


def _find_limit(state: CoordinatorState) -> int:
    """Returns how many iterations can be decided by now."""
    open_totals = [
        total
        for total, has_ended, error in zip(
            state.num_announced, state.has_ended, state.errors, strict=True
        )
        if not has_ended or error is not None
    ]
    return min(open_totals) if open_totals else max(state.num_announced)


def _follow_specs(
    state: CoordinatorState, limit: int
) -> tuple[int, list[_SpecRun], BatchSpec | None, str | None]:
    """Compares the specs up to `limit`.

    A spec holds from where it was announced. Processes that have a batch at an
    iteration had one at all before it, so where none changes, they still agree.

    Returns:
      How far it goes, the specs up to there, and the spec or the error that is next.
    """
    places = sorted({i for changes in state.changes for i, _ in changes if i < limit})
    by_place = [dict(changes) for changes in state.changes]
    segments: list[_SpecRun] = []
    current = state.current
    for place in places:
        latest: dict[int, BatchSpec] = {}
        for process, total in enumerate(state.num_announced):
            if total > place:
                known = by_place[process].get(place)
                latest[process] = state.specs[current] if known is None else known
        (first, spec), *others = latest.items()
        for process, other in others:
            if other != spec:
                names = (f"process {first}", f"process {process}")
                difference = batch_spec.describe_difference(spec, other, names)
                error = (
                    f"The batches of iteration {place} (counted from 0) differ: "
                    f"{difference}. All processes need batches with the same "
                    "structure, dtypes and shapes, but for the number of samples."
                )
                return place, segments, None, error
        if spec not in state.specs:
            return place, segments, spec, None
        current = state.specs.index(spec)
        segments.append(_SpecRun(place, current))
    return limit, segments, None, None


def _take(
    state: CoordinatorState, limit: int, segments: Sequence[_SpecRun]
) -> tuple[CoordinatorState, tuple[int, ...]]:
    """Decides the iterations up to `limit`."""
    start = state.num_decided
    count = limit - start
    if count == 0:
        return state, ()
    pending = [sizes[:count] for sizes in state.sizes if sizes]
    largest = list(map(max, itertools.zip_longest(*pending, [0], fillvalue=0)))
    if not segments or segments[0].start > start:
        segments = [_SpecRun(start, state.current), *segments]
    marks = list(state.marks)
    decided: list[int] = []
    ends = [segment.start for segment in segments[1:]] + [limit]
    for (first, spec), last in zip(segments, ends, strict=True):
        part = largest[first - start : last - start]
        grown = itertools.accumulate(part, max, initial=marks[spec])
        decided.extend(itertools.islice(grown, 1, None))
        marks[spec] = decided[-1]
    state = replace(
        state,
        sizes=tuple(sizes[count:] for sizes in state.sizes),
        num_decided=limit,
        marks=tuple(marks),
        current=segments[-1].spec,
        changes=tuple(
            tuple(change for change in changes if change[0] >= limit)
            if changes
            else changes
            for changes in state.changes
        ),
    )
    return state, tuple(decided)


def _find_read_error(state: CoordinatorState) -> tuple[int | None, str | None]:
    for process, error in enumerate(state.errors):
        if error is not None and state.num_announced[process] == state.num_decided:
            return process, (
                f"Process {process} could not read its batch {state.num_decided} "
                f"(counted from 0): {error}"
            )
    return None, None


def _find_stuck_reader(
    state: CoordinatorState, announcements: Sequence[Announcement]
) -> tuple[int | None, str | None]:
    for process, announcement in enumerate(announcements):
        if announcement.reading_s >= state.timeout_s:
            return process, (
                f"Process {process} has not read its batch "
                f"{state.num_announced[process]} (counted from 0) within "
                f"{state.timeout_s:g} s. Look at what its loader waits for, or set "
                "`timeout_s` of `jdp.init` higher."
            )
    return None, None
