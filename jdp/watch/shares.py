"""Shares: where has the time of the steps of a process gone, by its record?

Pure: entries in, samples out. A sample holds totals since the start of the process, so
samples may be left out: two of them tell about all steps between them.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from jdp.replicas import stamps
from jdp.watch.record import Entry

# Waits that end only with the other processes.
_WAITS = (stamps.MEETING_BEGUN, stamps.ITERATION_BEGUN, stamps.EAGER_BEGUN)
_WAITS_ENDED = tuple(kind + 1 for kind in _WAITS)


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """Totals of a process when it comes to the program of a step.

    Attributes:
      step: number of the step.
      at_ns: when it came to it, on the monotonic clock of its host.
      waited_ns: time in which its main thread has waited for others on the host.
      reduced_ns: time in which its reductions through shared memory have waited.
      sent_ns: time that these reductions took besides.
      loaded_ns: time of its main thread in loaders that jdp knows.
      read_ns: time that the thread of `jdp.join_batches` took for its last batch.
      num_compiled: number of programs that were compiled.
      is_idle: whether the program of the step before had ended by then.
    """

    step: int
    at_ns: int
    waited_ns: int = 0
    reduced_ns: int = 0
    sent_ns: int = 0
    loaded_ns: int = 0
    read_ns: int = 0
    num_compiled: int = 0
    is_idle: bool = False


class SharesState(NamedTuple):
    """Totals so far, and what is under way; times are on the clock of the host.

    Attributes:
      totals: the totals, as of the last entry.
      finished: number of the last step that was seen to end.
      waits_ns: since when each wait under way lasts, outermost first.
      is_iteration: whether the innermost wait is for a batch.
      loads_ns: since when the main thread loads; 0: it does not.
      reads_ns: since when the thread of `jdp.join_batches` reads; 0: it does not.
    """

    totals: StepSample = StepSample(0, 0)
    finished: int = 0
    waits_ns: tuple[int, ...] = ()
    is_iteration: bool = False
    loads_ns: int = 0
    reads_ns: int = 0


def follow(
    state: SharesState, entries: Iterable[Entry]
) -> tuple[SharesState, list[StepSample]]:
    """Returns the state after some more entries, and a sample for each step in them."""
    samples = []
    for entry in entries:
        state = _follow(state, entry)
        if entry.kind == stamps.STEP_PLACED:
            samples.append(state.totals)
    return state, samples


def thin(samples: Sequence[StepSample], most: int) -> list[StepSample]:
    """Returns at most `most` samples, of steps whose numbers have a common divisor.

    The divisor is a power of two, so that processes which leave out different numbers
    of samples still have steps in common.
    """
    divisor = 1
    kept = list(samples)
    while len(kept) > most:
        divisor *= 2
        kept = [sample for sample in kept if sample.step % divisor == 0]
    return kept


def _follow(state: SharesState, entry: Entry) -> SharesState:
    kind, at_ns, totals = entry.kind, entry.at_ns, state.totals
    if kind == stamps.STEP_BEGUN:
        # Earlier waits have ended, even if an entry was lost.
        totals = _renew(totals, step=entry.number)
        return state._replace(totals=totals, waits_ns=(), loads_ns=0)
    if kind == stamps.STEP_PLACED:
        is_idle = state.finished >= totals.step - 1
        return state._replace(totals=_renew(totals, at_ns=at_ns, is_idle=is_idle))
    if kind == stamps.STEP_FINISHED:
        return state._replace(finished=max(state.finished, entry.number))
    if kind == stamps.REDUCTIONS_WAITED:
        return state._replace(totals=_renew(totals, reduced_ns=entry.number))
    if kind == stamps.REDUCTIONS_WORKED:
        return state._replace(totals=_renew(totals, sent_ns=entry.number))
    if kind == stamps.COMPILE_ENDED:
        num_compiled = totals.num_compiled + 1
        return state._replace(totals=_renew(totals, num_compiled=num_compiled))
    if kind in _WAITS:
        waits_ns = (*state.waits_ns, at_ns)
        is_iteration = kind == stamps.ITERATION_BEGUN
        return state._replace(waits_ns=waits_ns, is_iteration=is_iteration)
    if kind in _WAITS_ENDED and state.waits_ns:
        *outer, since_ns = state.waits_ns
        if not outer:
            totals = _renew(totals, waited_ns=totals.waited_ns + at_ns - since_ns)
        return state._replace(totals=totals, waits_ns=tuple(outer), is_iteration=False)
    return _load(state, entry)


def _load(state: SharesState, entry: Entry) -> SharesState:
    kind, at_ns, totals = entry.kind, entry.at_ns, state.totals
    if kind == stamps.LOAD_BEGUN:
        return state._replace(loads_ns=at_ns)
    if kind == stamps.LOAD_ENDED and state.loads_ns:
        totals = _renew(totals, loaded_ns=totals.loaded_ns + at_ns - state.loads_ns)
        return state._replace(totals=totals, loads_ns=0)
    if kind == stamps.READ_BEGUN:
        return state._replace(reads_ns=at_ns)
    if kind == stamps.READ_ENDED and state.reads_ns:
        totals = _renew(totals, read_ns=at_ns - state.reads_ns)
        if state.waits_ns and state.is_iteration:
            # The main thread has waited for its own reader, not for the others.
            *outer, since_ns = state.waits_ns
            loaded_ns = totals.loaded_ns + at_ns - max(since_ns, state.reads_ns)
            totals = _renew(totals, loaded_ns=loaded_ns)
            state = state._replace(waits_ns=(*outer, at_ns))
        return state._replace(totals=totals, reads_ns=0)
    return state


def _renew(totals: StepSample, **changes: int) -> StepSample:
    return msgspec.structs.replace(totals, **changes)
