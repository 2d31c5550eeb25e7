"""Modes: when do servers update the parameters, and who has to wait?"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sync:
    """All workers push, then the servers update once; see `sync`."""

    backup: int = 0

    def __post_init__(self) -> None:
        """Checks the number."""
        _check("backup", self.backup, 0)

    def __str__(self) -> str:
        """As it is written."""
        return f"sync(backup={self.backup})"


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """Each push is an update; see `asynchronous`."""

    def __str__(self) -> str:
        """As it is written."""
        return "asynchronous()"


@dataclasses.dataclass(frozen=True)
class Bounded:
    """Each push is an update, and nobody runs away; see `bounded`."""

    staleness: int

    def __post_init__(self) -> None:
        """Checks the number."""
        _check("staleness", self.staleness, 1)

    def __str__(self) -> str:
        """As it is written."""
        return f"bounded(staleness={self.staleness})"


Mode = Sync | Asynchronous | Bounded


def sync(*, backup: int = 0) -> Sync:
    """Updates once with the mean of all workers' gradients of one version.

    The mean is weighted with `num_samples` of each push, so the parameters are those of
    one device that has the whole batch.

    Args:
      backup: how many workers, the slowest of each round, are not waited for. Their
        gradients come late, are dropped, and are counted (Chen et al., 2016,
        "Revisiting Distributed Synchronous SGD").
    """
    return Sync(backup)


def asynchronous() -> Asynchronous:
    """Updates at each push, whoever sends it, and lets nobody wait."""
    return Asynchronous()


def bounded(*, staleness: int) -> Bounded:
    """Updates at each push, but of no worker that is too far ahead.

    The push of a worker waits while it would have made over `staleness` more updates
    than the slowest worker since that joined (Ho et al., 2013, "More Effective
    Distributed ML via a Stale Synchronous Parallel Parameter Server").

    Args:
      staleness: how many updates a worker may be ahead, at least 1.
    """
    return Bounded(staleness)


def _check(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a whole number, got {value!r}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}.")
