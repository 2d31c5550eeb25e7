"""Autotune: which options of the engine move the most bytes per second?

The counterpart of Horovod's `ParameterManager`. While the engine runs, its throughput
is measured, and Bayesian optimisation chooses the next options to try. It is pure
except for the log; the clock is an argument. Only the coordinator has an `Autotuner`,
and sends its choices to all ranks.
"""

import collections
import csv
import dataclasses
import math
import statistics
from collections.abc import Collection, Hashable

import msgspec

from jdp.eager.coordinator.autotune_search import ParameterSearch
from jdp.eager.messages import Tunable
from jdp.eager.options import EagerOptions

# Measurements per sample, as Horovod's SAMPLES. The median ignores one in which the
# caller paused, or operations still ran with the previous options.
_NUM_MEASUREMENTS = 5
# A measurement ends with a name that recurs, or after this many names.
_MOST_NAMES = 1 << 16
_HIERARCHICAL = ("hierarchical_all_reduce", "hierarchical_all_gather")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutotuneOptions:
    """Options of the search.

    A sample is one choice of options and its score: the median of five measurements of
    `steps_per_sample` steps each. Names in capitals are Horovod's variables.

    Attributes:
      warmup_samples: number of samples discarded at the beginning.
        HOROVOD_AUTOTUNE_WARMUP_SAMPLES.
      steps_per_sample: steps per measurement. HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE.
      max_samples: number of samples before the best is kept for good; fewer if there
        is nothing else to try. HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES.
      noise: standard deviation of the noise in the scores, from 0 to 1, relative to
        the standard deviation of the scores. HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE.
      fixed: fields of `Tunable` that are not tuned. Horovod fixes those whose variable
        is set.
      log_path: CSV file with one line per sample; None: no file. HOROVOD_AUTOTUNE_LOG.
      seed: seed of the search; the same seed and scores give the same choices.
    """

    warmup_samples: int = 3
    steps_per_sample: int = 10
    max_samples: int = 20
    noise: float = 0.8
    fixed: tuple[str, ...] = ()
    log_path: str | None = None
    seed: int = 0

    def __post_init__(self):
        least = {"warmup_samples": 0, "steps_per_sample": 1, "max_samples": 1}
        for name, low in (least | {"seed": 0}).items():
            if getattr(self, name) < low:
                raise ValueError(
                    f"`{name}` must be at least {low}, got {getattr(self, name)}."
                )
        if not 0 <= self.noise <= 1:
            raise ValueError(f"`noise` must be from 0 to 1, got {self.noise}.")
        fields = Tunable.__struct_fields__
        unknown = [name for name in self.fixed if name not in fields]
        if unknown:
            raise ValueError(
                f"`fixed` must name fields of `Tunable`, got {unknown}.\n"
                f"There are {', '.join(fields)}."
            )


class Autotuner:
    """Tries options while the engine runs, and keeps the best.

    Args:
      start: the present options; they are the first sample.
      options: options of the search.
      can_be_hierarchical: whether the world has two axes; if not, the hierarchical
        fields are not tuned.

    Attributes:
      best: options with the best score so far; `start` before the first sample.
      is_done: whether the best options are kept for good.

    Raises:
      ValueError: `start` has a value below 0, or all fields are fixed.
      RuntimeError: the optimiser is not installed.
      OSError: the log cannot be written.
    """

    def __init__(
        self, start: Tunable, options: AutotuneOptions, *, can_be_hierarchical: bool
    ):
        _check(start)
        fixed = {*options.fixed, *(() if can_be_hierarchical else _HIERARCHICAL)}
        tuned = [name for name in Tunable.__struct_fields__ if name not in fixed]
        if not tuned:
            raise ValueError(
                f"All fields of `Tunable` are `fixed`, got {options.fixed}; there is "
                "nothing to tune. Do not make an `Autotuner`."
            )
        self.best = start
        self.is_done = False
        self._current = start
        self._best_score = -math.inf
        self._num_samples = -options.warmup_samples
        self._max_samples = options.max_samples
        self._meter = _Meter(options.steps_per_sample)
        self._search = ParameterSearch(
            start,
            tuned,
            max_samples=options.max_samples,
            noise=options.noise,
            seed=options.seed,
        )
        self._log = None if options.log_path is None else _Log(options.log_path)

    def observe(
        self, num_bytes: int, *, now_s: float, names: Collection[Hashable] = ()
    ) -> Tunable | None:
        """Measures a batch; the coordinator calls it for each batch that moves bytes.

        Choosing the next options after a sample takes about a tenth of a second, which
        is not measured.

        Args:
          num_bytes: bytes of all operations of the batch.
          now_s: when the batch was decided, on a monotonic clock.
          names: names of the operations. A step ends when a name recurs, so that a
            measurement has whole steps, whatever number of batches they take. Without
            names every batch counts as a step.

        Returns:
          The options of all ranks from the next batch on, or None if nothing changes.
          The last ones are the best, and stay.
        """
        if self.is_done:
            return None
        score = self._meter.observe(num_bytes, names, now_s=now_s)
        if score is None:
            return None
        self._num_samples += 1
        if self._num_samples <= 0:
            return None
        self._search.tell(self._current, score)
        if score > self._best_score:
            self.best, self._best_score = self._current, score
        if self._log is not None:
            self._log.write(self._num_samples, self._current, score)
        following = None
        if self._num_samples < self._max_samples:
            following = self._search.ask(self.best)
        if following is None:
            self.is_done = True
            self.close()
        self._current = following or self.best
        return self._current

    def close(self) -> None:
        """Closes the log; may be called more than once."""
        if self._log is not None:
            self._log.close()
            self._log = None


def make_autotuner(options: EagerOptions, *, can_be_hierarchical: bool) -> Autotuner:
    """Returns the autotuner for the options of an engine; see `Autotuner`."""
    start = Tunable(
        options.fusion_bytes,
        options.cycle_time_s,
        options.cache_capacity > 0,
        options.hierarchical_all_reduce,
        options.hierarchical_all_gather,
    )
    how = AutotuneOptions(
        warmup_samples=options.autotune_warmup_samples,
        steps_per_sample=options.autotune_steps_per_sample,
        max_samples=options.autotune_max_samples,
        noise=options.autotune_noise,
        log_path=options.autotune_log or None,
    )
    return Autotuner(start, how, can_be_hierarchical=can_be_hierarchical)


class _Meter:
    """Bytes per microsecond: the median of several measurements."""

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self._scores: list[float] = []
        self._begin(None)

    def _begin(self, now_s: float | None) -> None:
        self._since_s = now_s
        self._num_bytes = 0
        self._counts: collections.Counter[Hashable] = collections.Counter()

    def observe(
        self, num_bytes: int, names: Collection[Hashable], *, now_s: float
    ) -> float | None:
        """Returns the score when a sample is complete, and None before.

        The bytes of a batch belong to the time after it was decided. The batch that
        completes a sample belongs to no sample, as the options change with it.
        """
        names = names or ("",)
        if self._since_s is None or now_s < self._since_s:
            self._begin(now_s)
        elif now_s > self._since_s and self._is_over(names):
            elapsed_us = (now_s - self._since_s) * 1e6
            self._scores.append(self._num_bytes / elapsed_us)
            if len(self._scores) == _NUM_MEASUREMENTS:
                score = statistics.median(self._scores)
                self._scores = []
                self._begin(None)
                return score
            self._begin(now_s)
        self._num_bytes += num_bytes
        self._counts.update(names)
        return None

    def _is_over(self, names: Collection[Hashable]) -> bool:
        if len(self._counts) >= _MOST_NAMES:
            return True
        return any(self._counts[name] >= self._num_steps for name in names)


class _Log:
    """CSV file with one line per sample, written as soon as its score is known."""

    def __init__(self, path: str):
        # Buffered by line: it is read while the job runs, and after a crash.
        self._file = open(path, "w", newline="", buffering=1)
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(["sample", "score", *Tunable.__struct_fields__])

    def write(self, sample: int, tunable: Tunable, score: float) -> None:
        self._writer.writerow([sample, score, *msgspec.structs.astuple(tunable)])

    def close(self) -> None:
        self._file.close()


def _check(start: Tunable) -> None:
    for name in ("fusion_bytes", "cycle_time_s"):
        value = getattr(start, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"`start.{name}` must be at least 0, got {value}.")
