"""Restoring: which checkpoint do servers return to, and what does an entry settle?"""

from collections.abc import Mapping, Sequence

from jdp.parameter_server.messages import (
    Apply,
    Discard,
    FollowerStatus,
    LogEntry,
    Restore,
    Settled,
    Version,
)


class NoCheckpointError(RuntimeError):
    """There were checkpoints, and none is left that all servers have."""


def find_common(
    own: Sequence[int],
    followers: Mapping[int, FollowerStatus],
    runs: Sequence[bytes] = (),
) -> int:
    """Returns the count of the newest checkpoint that all servers have.

    Args:
      own: counts of the checkpoints of server 0. 0 stands for the initial parameters,
        if server 0 can begin with them.
      followers: the newest status of each other server.
      runs: the run that wrote each of `own`; (): unknown.

    Raises:
      NoCheckpointError: there is no such checkpoint.
    """
    has = {0: tuple(own), **{i: f.checkpoints for i, f in sorted(followers.items())}}
    common = set(own).intersection(*map(set, has.values()))
    said = [dict(zip(own, runs or [b""] * len(own), strict=True))]
    said += [
        dict(zip(f.checkpoints, f.runs or [b""] * len(f.checkpoints), strict=True))
        for f in followers.values()
    ]
    # Equal counts are one checkpoint only if all servers wrote it in one run.
    mixed = {c for c in common if len({of[c] for of in said}) > 1}
    if common - mixed:
        return max(common - mixed)
    found = "; ".join(
        f"server {i} has {', '.join(map(str, sorted(counts))) or 'none'}"
        for i, counts in has.items()
    )
    if mixed:
        found += (
            f". The checkpoints of update {', '.join(map(str, sorted(mixed)))} are "
            "from different runs, and do not fit together"
        )
    raise NoCheckpointError(
        "No checkpoint is left that all servers have, by number of updates (0: the "
        f"initial parameters): {found}. The log names the refused ones, with reasons; "
        "they are kept as `refused-...`. Put a copy of `updates-...` back on the "
        "servers that lack it, or give an empty `checkpoint_dir` to begin again."
    )


def settle(version: Version, entry: LogEntry) -> tuple[Version, dict[bytes, Settled]]:
    """Returns the version after an entry, and the pushes that the entry settles."""
    match entry:
        case Restore():
            return entry.version, {}
        case Apply():
            version = Version(version.epoch, version.count + 1)
            return version, {s: Settled(n, "applied", version) for s, n in entry.pushes}
        case Discard():
            found = Settled(entry.sequence, entry.outcome, version)
            return version, {entry.session: found}
    return version, {}
