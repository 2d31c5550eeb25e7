"""Held ends: has each end waited long enough for the end that it follows from?

A process that fails because another one is gone can be seen to end first: the memory
of the other takes a while to free.
"""

from collections.abc import Collection, Mapping

from jdp.launch import endings, failure_pipe
from jdp.launch.endings import Exit

_SETTLE_S = 0.2
_SETTLE_HOSTS_S = 0.6  # where other hosts may report what came before.
SETTLE_RAISED_S = 2.0  # where another process has reported that its program raised.


class HeldEnds:
    """Ends of processes that were seen and not released yet."""

    def __init__(self, failures: failure_pipe.FailurePipe, *, has_link: bool) -> None:
        """Holds nothing yet.

        Args:
          failures: the reports of this host's processes.
          has_link: whether other hosts report their failures too.
        """
        self._failures = failures
        self._settle_s = _SETTLE_HOSTS_S if has_link else _SETTLE_S
        self._held: list[Exit] = []
        self._since_s = 0.0

    def add(self, end: Exit, *, now_s: float) -> None:
        """Holds an end until `release` returns it."""
        if not self._held:
            self._since_s = now_s
        self._held.append(end)

    def release(
        self,
        running: Collection[int],
        process_ids: Collection[int],
        silent: Mapping[int, float],
        *,
        now_s: float,
        is_urgent: bool,
        has_cause: bool,
    ) -> list[Exit]:
        """Returns the held ends, once the ends they follow from had time to come.

        Args:
          running: ids of the processes that still run.
          process_ids: ids of all processes on this host.
          silent: when each process ended that skipped its exit handlers.
          now_s: the time of a monotonic clock.
          is_urgent: whether to release them now.
          has_cause: whether it is decided already why the job ends.
        """
        if not self._held:
            return []
        failures = self._failures.read()
        blamed = {failure.culprit for failure in failures.values()}
        has_raised = not set(running).isdisjoint(failures.keys() | blamed)
        settle_s = SETTLE_RAISED_S if has_raised else self._settle_s
        has_settled = now_s - self._since_s >= settle_s or not running
        if not (has_settled or is_urgent or has_cause):
            return []
        held, self._held = self._held, []
        ends: list[Exit] = []
        lost = dict(self._failures.lost)
        for end in held:
            if not end.note and end.node is None:
                end = endings.as_it_said(end, failures.get(end.process_id))
                end = endings.as_it_heard(end, lost)
            if end.process_id == 0:  # JAX's coordination service has ended with it.
                lost = dict.fromkeys(process_ids, 0) | lost
            ends.append(end)
        if not has_cause:
            ends += endings.find_blamed(ends, failures)
            found = endings.find_silent(ends, silent)
            ends += [] if found is None else [found]
        return ends
