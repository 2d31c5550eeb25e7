"""Autotune search: which parameters to try next, given the scores so far?

The optimiser is `bayesian-optimization`: it has an ask-and-tell interface and a
Gaussian process, needs little but scikit-learn, and runs without warnings.
scikit-optimize was archived in 2024, and the Gaussian process of optuna needs torch.
"""

import math
import random
from typing import Any

import msgspec

from jdp.eager.messages import Tunable

# Samples after the first and before the optimiser's. They are spread evenly: a Gaussian
# process that has seen only one part of the range assumes that the rest is like it.
_NUM_SPREAD = 6
# Weight of the uncertainty, in standard deviations. 0.5, 1 and the library's 2.58
# reached 91, 94 and 91 % of the best point of a grid: 20 samples of six simulated
# engines, noise of 5 %, three starts, two seeds.
_KAPPA = 1.0


class _Range:
    """Maps numbers from 0 to `high` to positions from 0 to 1, by their logarithms.

    Horovod maps them linearly. But the numbers of operations and of cycles matter, and
    they are inversely proportional: 1 to 2 MiB is as far as 64 to 128. Values well
    below `unit` count as 0, which has no logarithm.
    """

    def __init__(self, high: float, unit: float):
        self._high = high
        self._unit = unit
        self._log = math.log1p(high / unit)

    def place(self, value: float) -> float:
        return min(1.0, math.log1p(value / self._unit) / self._log)

    def value(self, place: float) -> float:
        return min(self._high, self._unit * math.expm1(place * self._log))


class ParameterSearch:
    """Chooses the next trial from the past ones: first numbers, then switches.

    Switches come last, one after another, and each is kept if it helps: their effect
    does not show before the numbers are good. Horovod has the same order, but searches
    the numbers again for each switch, which takes as many samples again.
    """

    def __init__(
        self,
        start: Tunable,
        tuned: list[str],
        *,
        max_samples: int,
        noise: float,
        seed: int,
    ):
        self._start = start
        self._ranges = _ranges(start, tuned)
        self._switches = [name for name in tuned if name not in self._ranges]
        self._num_left = max_samples - len(self._switches) if self._ranges else 0
        self._optimizer = _make_optimizer(list(self._ranges), noise=noise, seed=seed)
        self._planned = _spread(list(self._ranges), seed=seed)
        self._tried: set[tuple[float, ...]] = set()

    def tell(self, tunable: Tunable, score: float) -> None:
        """Takes the score of a sample."""
        if self._num_left <= 0:
            return
        self._num_left -= 1
        places = self._places(tunable)
        self._tried.add(places)
        self._optimizer.register(dict(zip(self._ranges, places, strict=True)), score)

    def ask(self, best: Tunable) -> Tunable | None:
        """Returns the options to try after a `tell`, or None if there are none left.

        Args:
          best: the options with the best score so far.
        """
        if self._num_left > 0:
            return self._ask_numbers()
        if not self._switches:
            return None
        name = self._switches.pop(0)
        return msgspec.structs.replace(best, **{name: not getattr(best, name)})

    def _ask_numbers(self) -> Tunable:
        point = self._planned.pop(0) if self._planned else self._optimizer.suggest()
        # A corner is often suggested again, and tells little the second time.
        while self._places(tunable := self._tunable(point)) in self._tried:
            point = self._optimizer.random_sample(1)[0]
        return tunable

    def _places(self, tunable: Tunable) -> tuple[float, ...]:
        return tuple(
            r.place(getattr(tunable, name)) for name, r in self._ranges.items()
        )

    def _tunable(self, point: dict[str, Any]) -> Tunable:
        # Plain numbers can be sent; the library returns NumPy's.
        values: dict[str, float] = {
            name: self._ranges[name].value(float(place))
            for name, place in point.items()
        }
        if "fusion_bytes" in values:
            values["fusion_bytes"] = round(values["fusion_bytes"])
        return msgspec.structs.replace(self._start, **values)


def _ranges(start: Tunable, tuned: list[str]) -> dict[str, _Range]:
    """Returns the ranges by name; they include the start."""
    ranges = {
        "fusion_bytes": _Range(max(256 << 20, start.fusion_bytes), 64 << 10),
        # Horovod: 1 to 100 ms.
        "cycle_time_s": _Range(max(0.1, start.cycle_time_s), 1e-3),
    }
    return {name: r for name, r in ranges.items() if name in tuned}


def _spread(names: list[str], *, seed: int) -> list[dict[str, Any]]:
    """Returns a Latin square: each number takes each position once, ends included."""
    rng = random.Random(seed)
    places = [i / (_NUM_SPREAD - 1) for i in range(_NUM_SPREAD)]
    columns = [rng.sample(places, _NUM_SPREAD) for _ in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _make_optimizer(names: list[str], *, noise: float, seed: int) -> Any:
    try:
        from bayes_opt import BayesianOptimization, acquisition
    except ImportError as error:
        raise RuntimeError(
            "Autotuning needs bayesian-optimization, which is not installed: "
            "pip install 'bayesian-optimization>=3.1'."
        ) from error
    optimizer = BayesianOptimization(
        None,
        dict.fromkeys(names, (0.0, 1.0)),
        # Horovod uses the expected improvement. It is relative to the best score, and
        # stays there even if that score was luck.
        acquisition_function=acquisition.UpperConfidenceBound(kappa=_KAPPA),
        random_state=seed,
        verbose=0,
    )
    # A variance; the library's own 1e-6 keeps matrices regular.
    optimizer.set_gp_params(alpha=noise**2 + 1e-6)
    return optimizer
