"""Restoring: what do servers go back to, and what does an entry of the log settle?"""

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
      own: counts of the checkpoints of server 0. 0 stands for the parameters that
        servers are given, which they may begin with where it is among them.
      followers: of each other server, what it has said last.
      runs: of each of `own`, in which log it was written; (): not known.

    Raises:
      NoCheckpointError: there is none.
    """
    has = {0: tuple(own), **{i: f.checkpoints for i, f in sorted(followers.items())}}
    common = set(own).intersection(*map(set, has.values()))
    said = [dict(zip(own, runs or [b""] * len(own), strict=True))]
    said += [
        dict(zip(f.checkpoints, f.runs or [b""] * len(f.checkpoints), strict=True))
        for f in followers.values()
    ]
    # One number is one checkpoint only where all wrote it by one log.
    mixed = {c for c in common if len({of[c] for of in said}) > 1}
    if common - mixed:
        return max(common - mixed)
    found = "; ".join(
        f"server {i} has {', '.join(map(str, sorted(counts))) or 'none'}"
        for i, counts in has.items()
    )
    if mixed:
        found += (
            f". Those of update {', '.join(map(str, sorted(mixed)))} are of different "
            "runs, and do not fit together"
        )
    raise NoCheckpointError(
        "No checkpoint is left that all servers have, by number of updates (0: the "
        f"parameters that it was given): {found}. The log says which were refused, and "
        "why; they are kept as `refused-...`. Put a copy of `updates-...` back on the "
        "servers that lack it, or give an empty `checkpoint_dir` to begin anew."
    )


def settle(version: Version, entry: LogEntry) -> tuple[Version, dict[bytes, Settled]]:
    """Returns the version after an entry, and the pushes that it settles."""
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
