"""Stall: warnings about operations that only some ranks have submitted."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from jdp.eager.coordinator.coordinator import Coordinator
from jdp.eager.coordinator.late_names import Stall
from jdp.eager.options import EagerOptions

LOOK_PERIOD_S = 1.0  # between two checks for late ranks.
_MOST_NAMES = 6  # per rank in a warning, as in Horovod.
_logger = logging.getLogger("jdp")


class StallState(NamedTuple):
    """Time of the last warning, or of the start."""

    warned_s: float


class StallReport(NamedTuple):
    """Conclusions from one check for late ranks."""

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
    """Decides whether to warn about late ranks, and whether to end the engine.

    Args:
      state: state after the last check.
      stalls: names that wait for at least `warn_after_s`, from
        `Coordinator.find_stalls`.
      now_s: the time, on the clock of the coordinator.
      warn_after_s: longest wait without a warning, and the time between two warnings.
      stop_after_s: longest wait before the engine ends; None: no limit.

    Returns:
      The next state, and the conclusions.
    """
    late = [
        s for s in stalls if stop_after_s is not None and s.waited_s >= stop_after_s
    ]
    if not late and (not stalls or now_s - state.warned_s < warn_after_s):
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
        missing = ", ".join(map(str, longest.missing))
        culprit = f"{longest.name!r} has waited for rank {missing}"
        if not missing:
            culprit = f"{longest.name}, has waited for the rest of the group"
        stop = (
            f"{culprit} for {longest.waited_s:.0f} s, "
            f"longer than {stop_after_s:g} s; shutting down"
        )
        lines.append(
            f'Ranks marked by "!" are late by more than {stop_after_s:g} s. Shutting '
            "down."
        )
    return StallState(now_s), StallReport("\n".join(lines), stop)


def describe(stalls: Sequence[Stall], late: Sequence[Stall] = ()) -> str:
    """Describes which ranks have not submitted the names that others wait for.

    Args:
      stalls: the names.
      late: the names whose missing ranks are marked.
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
    """Watches a coordinator for late ranks: warns, and ends the engine if asked to."""

    def __init__(self, options: EagerOptions, *, now_s: float):
        self._warn_after_s = options.stall_warning_s
        self._stop_after_s = options.stall_shutdown_s or None
        self._state = StallState(now_s)
        self.due_s = now_s + LOOK_PERIOD_S  # when to check next.

    def look(self, coordinator: Coordinator, *, now_s: float) -> None:
        """Checks whether a rank is late."""
        self.due_s = now_s + LOOK_PERIOD_S
        if self._warn_after_s == 0:
            return
        self._state, report = observe(
            self._state,
            coordinator.find_stalls(now_s=now_s, after_s=self._warn_after_s),
            now_s=now_s,
            warn_after_s=self._warn_after_s,
            stop_after_s=self._stop_after_s,
        )
        if report.warning is not None:
            _logger.warning(report.warning)
        if report.stop is not None:
            coordinator.stop(report.stop)
