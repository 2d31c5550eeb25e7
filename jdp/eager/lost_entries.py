"""Lost entries: does the coordinator still know the names that this process waits for?

The coordinator either waits for other ranks to submit a name, or it has decided it and
the decision has been sent. This process would wait for ever for a name that is neither.
So it asks, now and then, about the names that it has waited for long. Messages arrive
in the order in which they were sent: a name that the coordinator does not know when it
is asked, and has not decided before, is lost through a bug in jdp.
"""

import time
from collections.abc import Mapping, Sequence

from jdp.eager.coordinator.late_names import JOIN
from jdp.eager.entries import Entry
from jdp.eager.messages import Doubt
from jdp.runtime import user_program

PERIOD_S = 5.0  # between two questions, and the shortest wait that is asked about.
_MAX_NAMES = 10_000  # per question; the next one continues with others.


class LossWatch:
    """Questions of one process to the coordinator; used by the engine's thread."""

    def __init__(self) -> None:
        self.due_s = time.perf_counter() + PERIOD_S  # when to ask next.
        self._offset = 0

    def ask(self, submitted: Sequence[Entry], join: Entry | None) -> tuple[Doubt, ...]:
        """Returns the names to ask about.

        Args:
          submitted: requests that were sent to the coordinator and are not decided.
          join: the `join` of this process, if it is one of them.
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
    """Returns a lost request, or None.

    Args:
      unknown: the names of a question that the coordinator does not know.
      pending: requests that are not decided yet, by process set and name.
      join: the `join` of this process, if it is not decided yet.
    """
    for process_set, name, number in unknown:
        key = process_set, name
        entry = join if key == JOIN else pending.get(key)
        # The name may have been decided and submitted again.
        if entry is not None and entry.record.number == number:
            return entry
    return None


def explain(rank: int, error: Exception) -> str:
    """Describes why the engine of `rank` fails, and which process is at fault."""
    culprit = user_program.find_culprit(error)
    if culprit in (None, rank):
        return f"rank {rank}: {error}"
    return f"process {culprit} failed or is gone, as rank {rank} found: {error}"


def describe(rank: int, entry: Entry) -> str:
    """Describes a lost request."""
    waited_s = time.perf_counter() - entry.record.submitted_s
    return (
        f"rank {rank}: {entry.request.name!r} was submitted {waited_s:.0f} s ago, and "
        "the coordinator neither waits for it nor has decided it. It is lost by a "
        "fault of jdp; please report it with the flight records of two ranks"
    )
