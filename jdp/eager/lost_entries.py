"""Lost: whether what this process waits for is still waited for by the coordinator.

A name that was submitted is either known to the coordinator, as one that not all ranks
have submitted, or it has been decided, and the decision is on its way or here. A name
that is neither would be waited for without end. So a process asks, now and then, about
the names that it has waited for long. Messages come in the order in which they were
sent: what the coordinator does not know when it is asked, and has not decided before,
is lost by a fault of jdp.
"""

import time
from collections.abc import Mapping, Sequence

from jdp.eager.coordinator.late_names import JOIN
from jdp.eager.entries import Entry
from jdp.eager.messages import Doubt
from jdp.runtime import user_program

PERIOD_S = 5.0  # between two questions; what waits for less is not asked about.
_MAX_NAMES = 10_000  # of one question; the next one goes on with others.


class LossWatch:
    """Questions of one process; of the engine's thread alone."""

    def __init__(self) -> None:
        self.due_s = time.perf_counter() + PERIOD_S  # when to ask next.
        self._offset = 0

    def ask(self, submitted: Sequence[Entry], join: Entry | None) -> tuple[Doubt, ...]:
        """Returns what to ask about.

        Args:
          submitted: what the coordinator was told before, and has not decided.
          join: the same, of `join`.
        """
        now_s = time.perf_counter()
        self.due_s = now_s + PERIOD_S
        late = [
            entry for entry in submitted if now_s - entry.record.submitted_s >= PERIOD_S
        ]
        if len(late) > _MAX_NAMES:
            self._offset = (self._offset + _MAX_NAMES) % len(late)
            late = (late[self._offset :] + late[: self._offset])[:_MAX_NAMES]
        doubts = [(*entry.key, entry.record.number) for entry in late]
        if join is not None and now_s - join.record.submitted_s >= PERIOD_S:
            doubts.append((*JOIN, join.record.number))
        return tuple(doubts)


def find_lost(
    unknown: Sequence[Doubt],
    pending: Mapping[tuple[int, str], Entry],
    join: Entry | None,
) -> Entry | None:
    """Returns one that is lost, or None.

    Args:
      unknown: what the coordinator does not know, of what it was asked.
      pending: what has not been decided now, by process set and name.
      join: the same, of `join`.
    """
    for process_set, name, number in unknown:
        key = process_set, name
        entry = join if key == JOIN else pending.get(key)
        # A name may have come again after it was decided.
        if entry is not None and entry.record.number == number:
            return entry
    return None


def explain(rank: int, error: Exception) -> str:
    """Says why the engine of `rank` fails, and which process is the reason."""
    culprit = user_program.find_culprit(error)
    if culprit in (None, rank):
        return f"rank {rank}: {error}"
    return f"process {culprit} failed or is gone, as rank {rank} found: {error}"


def describe(rank: int, entry: Entry) -> str:
    """Says what is lost."""
    waited_s = time.perf_counter() - entry.record.submitted_s
    return (
        f"rank {rank}: {entry.request.name!r} was submitted {waited_s:.0f} s ago, and "
        "the coordinator neither waits for it nor has decided it. It is lost by a "
        "fault of jdp; please report it with the flight records of two ranks"
    )
