"""Push selection: which pushes make the next update, and how stale is it?"""

from collections.abc import Sequence

from jdp.parameter_server.members import Members, is_too_far_ahead
from jdp.parameter_server.messages import Apply, Push, Version
from jdp.parameter_server.modes import Mode

_MOST_STALENESS = (1 << 31) - 1  # the optimizer gets an int32.


def split_ready(
    ready: Sequence[bytes], members: Members, version: Version
) -> tuple[list[Push], list[Push]]:
    """Returns the ready pushes for this version, and the late ones."""
    in_time, late = [], []
    for session in ready:
        push = members[session].push
        assert push is not None
        (in_time if push.version == version else late).append(push)
    return in_time, late


def sort_round(pushes: Sequence[Push], members: Members) -> list[Push]:
    """Sorts the pushes of a round by worker: a sum of floats depends on the order."""
    workers = {session: member.worker for session, member in members.items()}
    return sorted(pushes, key=lambda p: (workers.get(p.session, 0), p.session))


def find_next(
    ready: Sequence[bytes], members: Members, mode: Mode
) -> tuple[bytes, Push] | None:
    """Returns the first ready push that need not wait for slower workers, if any."""
    for session in ready:
        member = members[session]
        if not is_too_far_ahead(member, members, mode):
            assert member.push is not None
            return session, member.push
    return None


def make_update(pushes: Sequence[Push], version: Version) -> Apply:
    """Returns the entry that applies pushes to the parameters of `version`."""
    # A count of an earlier epoch only shows that the push is not newer.
    oldest = min(push.version.count for push in pushes)
    return Apply(
        tuple((push.session, push.sequence) for push in pushes),
        tuple(push.weight for push in pushes),
        min(max(0, version.count - oldest), _MOST_STALENESS),
    )
