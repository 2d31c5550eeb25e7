"""Shares: where has the time of the steps of a process gone, by its record?

Pure: entries in, samples out. A sample holds totals since the start of the process, so
samples may be left out: two of them tell about all steps between them.
"""

import copy
import dataclasses
from collections.abc import Iterable, Sequence

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
      reduced_ns: time in which waits of its reductions on the host held up its main
        thread.
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


@dataclasses.dataclass(slots=True)
class SharesState:
    """Totals so far, and what is under way; times are on the clock of the host.

    Attributes:
      step: number of the step that was begun last.
      waited_ns: see `StepSample`, and so are the next four.
      reduced_ns: in reductions.
      sent_ns: in reductions, without waits.
      loaded_ns: in loaders.
      read_ns: time of the last batch.
      num_compiled: number of programs.
      finished: number of the last step that was seen to end.
      waits_ns: since when each wait under way lasts, outermost first.
      is_iteration: whether the innermost wait is for a batch.
      loads_ns: since when the main thread loads; 0: it does not.
      reads_ns: since when the thread of `jdp.join_batches` reads; 0: it does not.
    """

    step: int = 0
    waited_ns: int = 0
    reduced_ns: int = 0
    sent_ns: int = 0
    loaded_ns: int = 0
    read_ns: int = 0
    num_compiled: int = 0
    finished: int = 0
    waits_ns: tuple[int, ...] = ()
    is_iteration: bool = False
    loads_ns: int = 0
    reads_ns: int = 0


def follow(
    state: SharesState, entries: Iterable[Entry]
) -> tuple[SharesState, list[StepSample]]:
    """Returns the state after some more entries, and a sample for each step in them."""
    state, samples = copy.copy(state), []
    for entry in entries:
        if entry.kind == stamps.STEP_PLACED:
            samples.append(_sample(state, entry.at_ns))
        else:
            _follow(state, entry)
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


def _sample(state: SharesState, at_ns: int) -> StepSample:
    return StepSample(
        state.step,
        at_ns,
        state.waited_ns,
        state.reduced_ns,
        state.sent_ns,
        state.loaded_ns,
        state.read_ns,
        state.num_compiled,
        is_idle=state.finished >= state.step - 1,
    )


def _follow(state: SharesState, entry: Entry) -> None:
    match entry.kind:
        case stamps.STEP_BEGUN:
            # Earlier waits have ended, even if an entry was lost.
            state.step, state.waits_ns, state.loads_ns = entry.number, (), 0
        case stamps.STEP_FINISHED:
            state.finished = max(state.finished, entry.number)
        case stamps.REDUCTIONS_WAITED:
            state.reduced_ns = entry.number
        case stamps.REDUCTIONS_WORKED:
            state.sent_ns = entry.number
        case stamps.COMPILE_ENDED:
            state.num_compiled += 1
        case _:
            _wait_or_load(state, entry)


def _wait_or_load(state: SharesState, entry: Entry) -> None:
    kind, at_ns = entry.kind, entry.at_ns
    if kind in _WAITS:
        state.waits_ns = (*state.waits_ns, at_ns)
        state.is_iteration = kind == stamps.ITERATION_BEGUN
    elif kind in _WAITS_ENDED and state.waits_ns:
        *outer, since_ns = state.waits_ns
        if not outer:
            state.waited_ns += at_ns - since_ns
        state.waits_ns, state.is_iteration = tuple(outer), False
    elif kind == stamps.LOAD_BEGUN:
        state.loads_ns = at_ns
    elif kind == stamps.LOAD_ENDED and state.loads_ns:
        state.loaded_ns += at_ns - state.loads_ns
        state.loads_ns = 0
    elif kind == stamps.READ_BEGUN:
        state.reads_ns = at_ns
    elif kind == stamps.READ_ENDED and state.reads_ns:
        state.read_ns = at_ns - state.reads_ns
        if state.waits_ns and state.is_iteration:
            # The main thread has waited for its own reader, not for the others.
            *outer, since_ns = state.waits_ns
            state.loaded_ns += at_ns - max(since_ns, state.reads_ns)
            state.waits_ns = (*outer, at_ns)
        state.reads_ns = 0
