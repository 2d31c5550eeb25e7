"""Members: which workers take part, and which of them do others wait for?"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from jdp.parameter_server.messages import Pull, Push
from jdp.parameter_server.modes import Bounded, Mode

_MOST_NAMED = 16


@dataclasses.dataclass
class Member:
    """A worker that takes part."""

    worker: int
    lease_end_s: float
    clock: int  # settled pushes, counted from the slowest worker when it joined.
    since_index: int  # log index; parts from before were dropped.
    push: Push | None = None  # not settled.
    pull: Pull | None = None  # not answered.


Members = Mapping[bytes, Member]  # by session.


def find_clock(members: Members) -> int:
    """Returns the clock of the slowest member; 0 if there is none."""
    return min((m.clock for m in members.values()), default=0)


def is_too_far_ahead(member: Member, members: Members, mode: Mode) -> bool:
    """Whether the push of `member` must wait for slower workers."""
    if not isinstance(mode, Bounded):
        return False
    return member.clock + 1 - find_clock(members) > mode.staleness


def find_held(
    members: Members, held: Collection[tuple[int, set[tuple[bytes, int]]]]
) -> Iterable[bytes]:
    """Yields the sessions whose push all other servers hold.

    Args:
      members: the workers that take part.
      held: per other server, the log index that it executes next, and session and
        sequence number of each push that it holds.
    """
    for session, member in members.items():
        push = member.push
        if push is None:
            continue
        part = (session, push.sequence)
        if all(i >= member.since_index and part in parts for i, parts in held):
            yield session


def find_awaited(
    members: Members, pushed: Collection[bytes] | None, *, num_expected: int
) -> tuple[int, ...]:
    """Returns the indices of the workers that others wait for.

    Args:
      members: the workers that take part.
      pushed: sessions whose push is in the synchronous round; None in other modes,
        where others wait for the slowest workers.
      num_expected: number of workers that must come before the first round closes.
    """
    here = {m.worker for m in members.values()}
    missing = set(range(min(num_expected, _MOST_NAMED + len(here)))) - here
    if pushed is None:
        clock = find_clock(members)
        found = {m.worker for m in members.values() if m.clock == clock}
    else:
        found = {m.worker for s, m in members.items() if s not in pushed}
    return tuple(sorted(found | missing)[:_MOST_NAMED])
