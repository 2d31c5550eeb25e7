"""Stragglers: which process is slower than the others, and what does that cost?

Pure: samples of all processes in, shares and stragglers out. The work of a process in a
step is the time of the step without waits for others. Its reductions through shared
memory measure the waits that hold up its main thread. For reductions of XLA, a process
has waited from the moment it came to the program until the last process came, if the
devices had nothing else to do by then: differences within the program are not seen.
"""

import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from jdp.watch.shares import StepSample

_LIMIT = 1.15  # times the work of the others.
_NEARLY = 1.12  # Above this, what was slow stays so.
_GONE = 1.08  # below this, a straggler has recovered.
_WINDOW = 20  # samples whose median counts.
_LASTS = 10  # samples after the median was first above the limit.
_SHARE_STEPS = 100
_EWMA_STEPS = 20.0
_MOST_PENDING = 512  # steps that some processes have not come to.


class StepShares(msgspec.Struct, frozen=True, array_like=True):
    """Time of a process per step, in seconds.

    Attributes:
      total_s: the step.
      compute_s: all but the others; reductions of XLA, and a loader that jdp does not
        know, are in it.
      reducing_s: reducing and copying through shared memory.
      waiting_s: waiting for other processes.
      loading_s: in loaders that jdp knows.
    """

    total_s: float = 0.0
    compute_s: float = 0.0
    reducing_s: float = 0.0
    waiting_s: float = 0.0
    loading_s: float = 0.0

    def share(self, time_s: float) -> float:
        """Returns what part of a step `time_s` is."""
        return time_s / self.total_s if self.total_s else 0.0

    @property
    def work_s(self) -> float:
        """The step without waits for others."""
        return self.compute_s + self.reducing_s + self.loading_s


class Straggler(NamedTuple):
    """A process that is slower than the others.

    Attributes:
      process: its index.
      since_step: the first slow step.
      shares: its median step.
      others_s: the work of the median of the processes, in seconds.
      others_loading_s: time of that process in its loader, in seconds.
    """

    process: int
    since_step: int
    shares: StepShares
    others_s: float
    others_loading_s: float

    @property
    def cost(self) -> float:
        """Part of the time of the job that its slowness takes."""
        return self.shares.share(max(0.0, self.shares.work_s - self.others_s))


class _Mean(NamedTuple):
    """Mean over the steps between two samples."""

    step: int
    num_steps: int
    shares: StepShares


class _History:
    """Knowledge about one process."""

    def __init__(self, most_means: int) -> None:
        self._most, self._num_steps = most_means, 0
        self.means = collections.deque[_Mean]()
        self.ewma: StepShares | None = None
        self.num_slow = 0  # samples since its median came above the limit.
        self.since_step = 0
        self.is_named = False

    def add(self, mean: _Mean) -> None:
        self.means.append(mean)
        self._num_steps += mean.num_steps
        while len(self.means) > _WINDOW and self._num_steps > self._most:
            self._num_steps -= self.means.popleft().num_steps
        before = mean.shares if self.ewma is None else self.ewma
        left = (1.0 - 1.0 / _EWMA_STEPS) ** mean.num_steps
        self.ewma = _combine([(before, left), (mean.shares, 1.0 - left)])

    def window(self) -> list[_Mean]:
        first = max(0, len(self.means) - _WINDOW)
        return [self.means[i] for i in range(first, len(self.means))]

    def mean(self) -> StepShares:
        """Returns the mean over the steps that are kept."""
        total = self._num_steps
        return _combine([(each.shares, each.num_steps / total) for each in self.means])


class Stragglers:
    """Compares the processes of a job."""

    def __init__(self, num_processes: int, *, most_means: int = _SHARE_STEPS):
        """Starts without a sample.

        Args:
          num_processes: number of processes of the job.
          most_means: over how many steps `mean` goes.
        """
        self._num_processes = num_processes
        self._pending: dict[int, dict[int, StepSample]] = {}
        self._last: dict[int, StepSample] | None = None
        self._histories = {i: _History(most_means) for i in range(num_processes)}
        self._found: list[Straggler] = []

    def add(
        self, process: int, samples: Iterable[StepSample], *, offset_ns: int = 0
    ) -> None:
        """Takes samples of a process, in their order.

        Args:
          process: its index.
          samples: its new samples.
          offset_ns: difference from its clock to the clock of the first host.
        """
        for sample in samples:
            here = msgspec.structs.replace(sample, at_ns=sample.at_ns + offset_ns)
            row = self._pending.setdefault(sample.step, {})
            row[process] = here
            if len(row) == self._num_processes:
                self._complete(sample.step, row)
        while len(self._pending) > _MOST_PENDING:
            del self._pending[next(iter(self._pending))]

    def take_found(self) -> list[Straggler]:
        """Returns the stragglers that were found since the last call."""
        found, self._found = self._found, []
        return found

    def ewma(self, process: int) -> StepShares:
        """Returns the moving average of a process, over about 20 steps."""
        return self._histories[process].ewma or StepShares()

    def mean(self, process: int) -> StepShares:
        """Returns the mean of a process over the last steps, 100 by default."""
        history = self._histories[process]
        return history.mean() if history.means else StepShares()

    def slow_since(self, process: int) -> int:
        """Returns the step since which a process is slower; 0: it is not."""
        history = self._histories[process]
        return history.since_step if history.is_named else 0

    def _complete(self, step: int, row: Mapping[int, StepSample]) -> None:
        for earlier in [each for each in self._pending if each <= step]:
            del self._pending[earlier]
        last, self._last = self._last, dict(row)
        if last is None or step <= last[0].step:
            return  # The job has begun, or has begun anew.
        if any(row[i].num_compiled != last[i].num_compiled for i in row):
            return  # All have waited for a compilation.
        shares = _divide(row, last)
        if shares is None:
            return
        for process, each in shares.items():
            mean = _Mean(step, step - last[0].step, each)
            self._histories[process].add(mean)
        self._judge()

    def _judge(self) -> None:
        windows = {i: each.window() for i, each in self._histories.items()}
        if any(len(window) < _WINDOW for window in windows.values()):
            return
        works = {i: [m.shares.work_s for m in w] for i, w in windows.items()}
        medians = {i: statistics.median(each) for i, each in works.items()}
        # With an even number of processes, the quicker of the two in the middle.
        typical = sorted(medians, key=medians.__getitem__)[(len(medians) - 1) // 2]
        others_s = medians[typical]
        for process, history in self._histories.items():
            slow_s = medians[process]
            if slow_s < _GONE * others_s:
                history.num_slow, history.is_named = 0, False
            elif slow_s <= _LIMIT * others_s or slow_s - others_s <= max(
                _spread(works[process]), _spread(works[typical])
            ):
                if not history.is_named and slow_s <= _NEARLY * others_s:
                    history.num_slow = 0
            else:
                if history.num_slow == 0:
                    half_s = (slow_s + others_s) / 2
                    history.since_step = _find_begin(windows[process], half_s)
                history.num_slow += 1
                if history.num_slow == _LASTS and not history.is_named:
                    history.is_named = True
                    found = _describe(process, history, windows, typical, others_s)
                    self._found.append(found)


def _describe(
    process: int,
    history: _History,
    windows: Mapping[int, Sequence[_Mean]],
    typical: int,
    others_s: float,
) -> Straggler:
    return Straggler(
        process,
        history.since_step,
        _median([mean.shares for mean in windows[process]]),
        others_s,
        statistics.median(mean.shares.loading_s for mean in windows[typical]),
    )


def _find_begin(means: Sequence[_Mean], limit_s: float) -> int:
    """Returns the step that best parts quicker steps from slower ones."""
    are_slow = [mean.shares.work_s > limit_s for mean in means]
    rights = [
        are_slow[:i].count(False) + are_slow[i:].count(True) for i in range(len(means))
    ]
    return means[rights.index(max(rights))].step


def _divide(
    row: Mapping[int, StepSample], last: Mapping[int, StepSample]
) -> dict[int, StepShares] | None:
    """Returns the time per step of each process between two samples."""
    count = row[0].step - last[0].step
    measured = any(row[i].reduced_ns > last[i].reduced_ns for i in row)
    latest = max(row, key=lambda i: row[i].at_ns)
    shares = {}
    for process, now in row.items():
        before = last[process]
        total_ns = (now.at_ns - before.at_ns) / count
        if total_ns <= 0:
            return None
        waiting_ns = (now.waited_ns - before.waited_ns) / count
        if measured:
            waiting_ns += (now.reduced_ns - before.reduced_ns) / count
        elif row[latest].is_idle and now.is_idle:
            waiting_ns += row[latest].at_ns - now.at_ns
        loading_ns = (now.loaded_ns - before.loaded_ns) / count
        # While its own loader works, a process would wait without the others too.
        own_ns = min(max(0.0, now.read_ns - (total_ns - waiting_ns)), waiting_ns)
        waiting_ns, loading_ns = waiting_ns - own_ns, loading_ns + own_ns
        waiting_ns = min(max(waiting_ns, 0.0), total_ns)
        loading_ns = min(max(loading_ns, 0.0), total_ns - waiting_ns)
        rest_ns = total_ns - waiting_ns - loading_ns
        reducing_ns = min(max((now.sent_ns - before.sent_ns) / count, 0.0), rest_ns)
        times = total_ns, rest_ns - reducing_ns, reducing_ns, waiting_ns, loading_ns
        shares[process] = StepShares(*(each * 1e-9 for each in times))
    return shares


def _combine(parts: Sequence[tuple[StepShares, float]]) -> StepShares:
    """Returns a weighted sum."""
    rows = [(msgspec.structs.astuple(shares), weight) for shares, weight in parts]
    return StepShares(
        *(sum(weight * values[i] for values, weight in rows) for i in range(5))
    )


def _median(each: Sequence[StepShares]) -> StepShares:
    columns = zip(*map(msgspec.structs.astuple, each), strict=True)
    return StepShares(*map(statistics.median, columns))


def _spread(values: Sequence[float]) -> float:
    """Returns the distance between the quartiles."""
    low, _, high = statistics.quantiles(values, n=4)
    return high - low
