"""Process sets: operations among some of the processes."""

from collections.abc import Iterable

from jdp.eager import argument_types, session
from jdp.eager.diagnosis.flight_recorder import Record
from jdp.eager.entries import Entry
from jdp.eager.messages import Request, Spec, encode_spec


class ProcessSet:
    """Some of the ranks, in ascending order; see `add_process_set`.

    Args:
      ranks: ranks of processes, in any order; duplicates count once.

    Attributes:
      process_set_id: number of the set; None while it is not added.

    Raises:
      TypeError: a rank is not an integer.
      ValueError: there are no ranks, or one is negative.
    """

    def __init__(self, ranks: Iterable[int]):
        self._ranks = argument_types.check_ranks(ranks)
        self.process_set_id: int | None = None
        if not self._ranks or self._ranks[0] < 0:
            raise ValueError(f"`ranks` must be some ranks from 0, got {self._ranks}.")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the set; the global set has none before `init`."""
        if self.process_set_id != 0:
            return self._ranks
        engine = session.find_engine()
        return () if engine is None else tuple(range(engine.size))

    def size(self) -> int | None:
        """Number of ranks; None while the set is not added."""
        return len(self.ranks) if self._is_added() else None

    def rank(self) -> int | None:
        """Position of this process in the set; None if it has none."""
        if not self.included():
            return None
        return self.ranks.index(session.rank())

    def included(self) -> bool | None:
        """Whether this process is in the set; None while the set is not added."""
        return session.rank() in self.ranks if self._is_added() else None

    def _is_added(self) -> bool:
        return self.process_set_id is not None and bool(self.ranks)

    def __repr__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, "
            f"ranks={list(self.ranks)})"
        )


# The set of all processes, which exists from `init` to `shutdown`.
global_process_set = ProcessSet([0])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Lets some ranks run operations that do not wait for other ranks.

    Every process calls it, also the processes that are not in the set. All processes
    add and remove sets in the same order.

    Args:
      process_set: the set, or its ranks.

    Returns:
      The set, with a `process_set_id` that is the same on all processes.

    Raises:
      ValueError: a set with these ranks exists, or a rank is not in this job.
      RuntimeError: on all processes, if they do not agree on the ranks or one of them
        removes a set instead.
    """
    engine = session.current_engine()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks
    if ranks[-1] >= engine.size:
        raise ValueError(
            f"`ranks` must be below {engine.size}, the number of processes, got "
            f"{list(ranks)}."
        )
    if ranks in engine.executor.known_sets.values():
        raise ValueError(
            f"Attempted to add a duplicate process set: there is one of {list(ranks)}."
        )
    process_set.process_set_id = _agree(Spec("add_process_set", shape=ranks))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set; its number is not used again.

    Every process calls it, when no operation of the set is under way.

    Args:
      process_set: returned by `add_process_set`.

    Returns:
      Whether the set was removed. The global set and sets that do not exist are not.

    Raises:
      RuntimeError: on all processes, if they do not agree on the set or one of them
        adds a set instead.
    """
    engine = session.current_engine()
    set_id = process_set.process_set_id
    if not set_id or engine.executor.known_sets.get(set_id) != process_set.ranks:
        return False
    _agree(Spec("remove_process_set", shape=(set_id,)))
    session.forget_counts(set_id)
    process_set.process_set_id = None
    return True


def _agree(spec: Spec) -> int:
    engine = session.current_engine()
    # One count for both kinds: adding on one rank and removing on another must clash.
    with session.numbered("change of process sets", 0) as name:
        entry = Entry(Request(name, encode_spec(spec)), Record(name, spec.kind))
        engine.submit([entry])
    value = session.wait_for([entry])[0]
    engine.known_options.clear()
    return value
