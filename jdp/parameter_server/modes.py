"""Modes: when do servers update the parameters, and which workers wait?"""

import dataclasses

from jdp.parameter_server import option_checks


@dataclasses.dataclass(frozen=True)
class Sync:
    """All workers push, then the servers update once; see `sync`."""

    backup: int = 0

    def __post_init__(self) -> None:
        count = option_checks.check_count("backup", self.backup, 0)
        object.__setattr__(self, "backup", count)

    def __str__(self) -> str:
        return f"sync(backup={self.backup})"


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """Each push is an update; see `asynchronous`."""

    def __str__(self) -> str:
        return "asynchronous()"


@dataclasses.dataclass(frozen=True)
class Bounded:
    """Each push is an update, and no worker runs far ahead; see `bounded`."""

    staleness: int

    def __post_init__(self) -> None:
        count = option_checks.check_count("staleness", self.staleness, 1)
        object.__setattr__(self, "staleness", count)

    def __str__(self) -> str:
        return f"bounded(staleness={self.staleness})"


Mode = Sync | Asynchronous | Bounded


def sync(*, backup: int = 0) -> Sync:
    """Updates once with the mean of all workers' gradients of one version.

    The mean is weighted with `num_samples` of each push, so the parameters equal those
    of one device with the whole batch.

    Args:
      backup: number of workers, the slowest of each round, that a round does not wait
        for. Their late gradients are dropped and counted (Chen et al., 2016,
        "Revisiting Distributed Synchronous SGD").
    """
    return Sync(backup)


def asynchronous() -> Asynchronous:
    """Updates at each push of any worker; no worker waits."""
    return Asynchronous()


def bounded(*, staleness: int) -> Bounded:
    """Updates at each push, unless the worker is too far ahead.

    A push waits while its worker would be more than `staleness` pushes ahead of the
    slowest worker, counted since the later of both joined. Rejected pushes count (Ho et
    al., 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server").

    Args:
      staleness: largest number of pushes that a worker can be ahead, at least 1.
    """
    return Bounded(staleness)


def check_num_workers(mode: object, num_workers: int | None) -> None:
    """Checks that `mode` is a mode, and waits for at least one worker.

    Raises:
      TypeError: `mode` is not a mode.
      ValueError: `backup` is not less than `num_workers`.
    """
    if not isinstance(mode, Mode):
        raise TypeError(
            "`mode` must be `sync()`, `asynchronous()` or `bounded(staleness=)`, got "
            f"{mode!r}."
        )
    backup = mode.backup if isinstance(mode, Sync) else 0
    if num_workers is not None and backup >= num_workers:
        raise ValueError(
            f"`backup` must be less than the number of workers, {num_workers}, got "
            f"{backup}: a round would wait for none of them."
        )
