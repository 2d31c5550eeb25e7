"""Stall: what is said of operations that some ranks wait for, and others do not."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from jdp.eager.coordinator.coordinator import Coordinator
from jdp.eager.coordinator.late_names import Stall
from jdp.eager.options import EagerOptions

LOOK_PERIOD_S = 1.0  # how often the coordinator looks who is late.
_logger = logging.getLogger("jdp")
_MOST_NAMES = 6  # of one rank in a warning, as in Horovod.


class StallState(NamedTuple):
    """When was looked last."""

    looked_s: float


class StallReport(NamedTuple):
    """Conclusions from one look at the pending requests."""

    warning: str | None = None  # for the log of rank 0.
    stop: str | None = None  # why the engine ends on all ranks.


def observe(
    state: StallState,
    stalls: Sequence[Stall],
    *,
    now_s: float,
    warn_after_s: float,
    stop_after_s: float | None,
) -> tuple[StallState, StallReport]:
    """Decides what to say and do about operations that wait.

    Args:
      state: of the last look.
      stalls: what waits for at least `warn_after_s`, of `Coordinator.find_stalls`.
      now_s: the time, on the clock of the coordinator.
      warn_after_s: how long an operation may wait before it is named, and how long
        after a warning the next one comes.
      stop_after_s: how long before the engine ends; None: it never does.

    Returns:
      The next state, and what follows.
    """
    late = [
        s for s in stalls if stop_after_s is not None and s.waited_s >= stop_after_s
    ]
    if not late and (not stalls or now_s - state.looked_s < warn_after_s):
        return state, StallReport()
    lines = [
        "Some ranks have submitted operations that others have not, and wait for more "
        f"than {warn_after_s:g} s. The ranks may submit different operations, or some "
        "have stopped.",
        describe(stalls, late),
    ]
    stop = None
    if late:
        longest = max(late, key=lambda stall: stall.waited_s)
        who = ", ".join(map(str, longest.missing))
        of_what = f"{longest.name!r} has waited for rank {who}"
        if not who:
            of_what = f"{longest.name}, has waited for the rest of the group"
        stop = (
            f"{of_what} for {longest.waited_s:.0f} s, "
            f"longer than {stop_after_s:g} s; shutting down"
        )
        lines.append(
            f'Ranks marked by "!" are late by more than {stop_after_s:g} s. Shutting '
            "down."
        )
    return StallState(now_s), StallReport("\n".join(lines), stop)


def describe(stalls: Sequence[Stall], late: Sequence[Stall] = ()) -> str:
    """Says which ranks have not submitted what others wait for.

    Args:
      stalls: what waits.
      late: those of them whose ranks are marked.
    """
    missing: dict[int, list[Stall]] = {}
    for stall in stalls:
        for rank in stall.missing:
            missing.setdefault(rank, []).append(stall)
    if not stalls:
        return "No rank is missing."
    lines = ["Missing ranks:"] if missing else []
    for rank in sorted(missing):
        names = [stall.name for stall in missing[rank]]
        text = ", ".join(names[:_MOST_NAMES]) + (" ..." if names[_MOST_NAMES:] else "")
        mark = "!" if any(stall in late for stall in missing[rank]) else ""
        lines.append(f"{rank}{mark}: [{text}]")
    lines += [f"Waiting: {stall.name}" for stall in stalls if not stall.missing]
    return "\n".join(lines)


class Inspector:
    """Looks after a coordinator: warns, and ends the engine where it was asked to."""

    def __init__(self, options: EagerOptions, *, now_s: float):
        """Begins to look at `now_s`."""
        self._warn_after_s = options.stall_warning_s
        self._stop_after_s = options.stall_shutdown_s or None
        self._state = StallState(now_s)
        self.due_s = now_s + LOOK_PERIOD_S  # when to look next.

    def look(self, coordinator: Coordinator, *, now_s: float) -> None:
        """Looks whether a rank is late."""
        self.due_s = now_s + LOOK_PERIOD_S
        if self._warn_after_s == 0:
            return
        self._state, verdict = observe(
            self._state,
            coordinator.find_stalls(now_s=now_s, after_s=self._warn_after_s),
            now_s=now_s,
            warn_after_s=self._warn_after_s,
            stop_after_s=self._stop_after_s,
        )
        if verdict.warning is not None:
            _logger.warning(verdict.warning)
        if verdict.stop is not None:
            coordinator.stop(verdict.stop)
