"""Parameters that are tried while the engine runs."""

import csv
import math
import random
import sys

import msgspec
import pytest

from jdp.eager.coordinator.autotune import AutotuneOptions, Autotuner
from jdp.eager.messages import Tunable

pytestmark = pytest.mark.slow

# As few samples as the search can do with.
QUICK = {"warmup_samples": 1, "steps_per_sample": 2, "max_samples": 12, "noise": 0.3}
SWITCHES = ("cache_enabled", "hierarchical_all_reduce", "hierarchical_all_gather")
NUM_MEASUREMENTS = 5
START = Tunable()


class Engine:
    """What a step of `num_tensors` takes, with a clock of its own.

    A collective takes `latency_s` and its bytes by the bandwidth, and a step half a
    cycle, at which its last tensor waits. What is fused into fewer than
    `num_overlapped` waits for the backward pass, and is not hidden by it.
    """

    def __init__(self, *, num_bytes, num_tensors, latency_s, bandwidth, groups=1.0):
        self.num_bytes, self.num_tensors = num_bytes, num_tensors
        self.latency_s, self.bandwidth, self.groups = latency_s, bandwidth, groups
        self.now_s = 0.0

    def step_s(self, params):
        tensor_bytes = self.num_bytes / self.num_tensors
        together = max(1, params.fusion_bytes // tensor_bytes)
        num_collectives = math.ceil(self.num_tensors / together)
        wire_s = self.num_bytes / self.bandwidth
        if params.hierarchical_all_reduce:
            wire_s *= self.groups
        negotiation_s = 0 if params.cache_enabled else self.num_tensors * 1e-4
        exposed_s = wire_s / num_collectives  # the last one, which nothing hides.
        return (
            num_collectives * self.latency_s
            + wire_s
            + exposed_s
            + negotiation_s
            + params.cycle_time_s / 2
        )

    def run(self, tuner, params, *, noise=0.0, seed=0):
        """Trains until the tuner is done; returns what it decided, in order."""
        rng = random.Random(seed)
        decided = []
        while not tuner.is_done:
            changed = tuner.observe(self.num_bytes, now_s=self.now_s)
            if changed is not None:
                decided.append(changed)
                params = changed
            self.now_s += self.step_s(params) * math.exp(noise * rng.gauss(0, 1))
        return decided

    def best_s(self, *, can_be_hierarchical=False):
        sizes = [0, *(1 << i for i in range(12, 29))]
        cycles = [0, 1e-3, 3e-3, 1e-2, 3e-2, 0.1]
        groups = [False, True] if can_be_hierarchical else [False]
        return min(
            self.step_s(Tunable(size, cycle, True, is_grouped))
            for size in sizes
            for cycle in cycles
            for is_grouped in groups
        )


MANY_SMALL = {
    "num_bytes": 20 << 20,
    "num_tensors": 400,
    "latency_s": 3e-4,
    "bandwidth": 4e9,
}
FEW_LARGE = {
    "num_bytes": 1 << 30,
    "num_tensors": 64,
    "latency_s": 1e-3,
    "bandwidth": 1e10,
}


def _tuner(start=START, *, can_be_hierarchical=False, **options):
    options = AutotuneOptions(**{**QUICK, **options})
    return Autotuner(start, options, can_be_hierarchical=can_be_hierarchical)


def _rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize(
    "world, start, seed",
    [
        (MANY_SMALL, Tunable(fusion_bytes=0, cycle_time_s=0.005), 0),
        (MANY_SMALL, Tunable(fusion_bytes=1 << 20, cycle_time_s=0.1), 1),
        (FEW_LARGE, Tunable(fusion_bytes=256 << 20, cycle_time_s=0.05), 2),
    ],
)
def test_what_is_kept_is_near_the_best_of_a_grid(world, start, seed):
    engine = Engine(**world)
    tuner = _tuner(start, seed=seed, fixed=SWITCHES)
    kept = engine.run(tuner, start)[-1]
    assert engine.step_s(kept) <= engine.best_s() / 0.85
    assert engine.step_s(kept) < engine.step_s(start)
    assert kept == tuner.best


def test_the_cache_and_groups_are_switched_on_where_they_help():
    engine = Engine(**FEW_LARGE, groups=0.5)
    start = Tunable(cycle_time_s=0.02, cache_enabled=False)
    tuner = _tuner(start, can_be_hierarchical=True)
    kept = engine.run(tuner, start)[-1]
    assert kept.hierarchical_all_reduce
    best_s = engine.best_s(can_be_hierarchical=True)
    assert engine.step_s(kept) <= best_s / 0.85


def test_noise_in_the_scores_leaves_it_near_the_best():
    engine = Engine(**MANY_SMALL)
    start = Tunable(fusion_bytes=0, cycle_time_s=0.05)
    tuner = _tuner(start, fixed=SWITCHES, noise=0.8)
    kept = engine.run(tuner, start, noise=0.1)[-1]
    assert engine.step_s(kept) <= engine.best_s() / 0.85


def test_the_start_is_kept_where_nothing_is_better():
    engine = Engine(**MANY_SMALL)
    start = Tunable(fusion_bytes=256 << 20, cycle_time_s=0.0)
    engine.step_s = lambda params: 0.01 if params == start else 0.02
    tuner = _tuner(start, max_samples=5)
    decided = engine.run(tuner, start)
    assert decided[-1] == start and start not in decided[:-1]


def test_groups_are_left_alone_where_there_are_none():
    for start in (START, Tunable(hierarchical_all_gather=True)):
        engine = Engine(**MANY_SMALL, groups=0.1)
        for tried in engine.run(_tuner(start, max_samples=8), start):
            assert not tried.hierarchical_all_reduce
            assert tried.hierarchical_all_gather == start.hierarchical_all_gather


def test_what_is_fixed_is_left_alone():
    start = Tunable(fusion_bytes=12345, cycle_time_s=0.02)
    tuner = _tuner(start, max_samples=8, fixed=("fusion_bytes", "cache_enabled"))
    decided = Engine(**MANY_SMALL).run(tuner, start)
    assert {tried.fusion_bytes for tried in decided} == {12345}
    assert {tried.cache_enabled for tried in decided} == {True}
    assert len({tried.cycle_time_s for tried in decided}) > 3


def test_no_choice_is_tried_twice_while_there_are_others():
    # More of the same is a corner, to which the optimiser comes back.
    engine = Engine(**MANY_SMALL)
    start = Tunable(fusion_bytes=0, cycle_time_s=0.1)
    tried = engine.run(_tuner(start, fixed=SWITCHES, noise=0.8), start)[:-1]
    assert len(set(tried)) == len(tried)


def test_it_is_done_early_where_all_has_been_tried():
    fixed = ("fusion_bytes", "cycle_time_s")
    start = Tunable(cache_enabled=False)
    tried = Engine(**MANY_SMALL).run(_tuner(start, fixed=fixed), start)
    assert [each.cache_enabled for each in tried] == [True, True]  # once for good.


def test_values_stay_in_their_range_which_contains_the_start():
    start = Tunable(fusion_bytes=1 << 30, cycle_time_s=0.5)
    for tried in Engine(**MANY_SMALL).run(_tuner(start, max_samples=8), start):
        assert isinstance(tried.fusion_bytes, int)
        assert 0 <= tried.fusion_bytes <= 1 << 30
        assert 0 <= tried.cycle_time_s <= 0.5


@pytest.mark.parametrize("warmup_samples", [0, 3])
@pytest.mark.parametrize("steps_per_sample", [1, 4])
def test_parameters_change_only_between_samples(warmup_samples, steps_per_sample):
    tuner = _tuner(
        warmup_samples=warmup_samples, steps_per_sample=steps_per_sample, max_samples=3
    )
    calls = range(200)
    changed = [i for i in calls if tuner.observe(1, now_s=float(i)) is not None]
    # One batch more than there are steps: the one that ends the last.
    sample = NUM_MEASUREMENTS * steps_per_sample + 1
    assert changed == [(warmup_samples + i) * sample - 1 for i in (1, 2, 3)]


def test_warm_up_is_not_counted(tmp_path):
    path = tmp_path / "log.csv"
    tuner = _tuner(warmup_samples=2, max_samples=2, log_path=str(path))
    warmup = 2 * (NUM_MEASUREMENTS * 2 + 1)
    for i in range(200):
        # What is fast while it warms up is not what is kept.
        tuner.observe(10**9 if i < warmup else 1000, now_s=float(i))
    rows = _rows(path)
    assert [float(row["score"]) for row in rows] == [pytest.approx(1e-3)] * 2


def test_the_end_is_the_end():
    engine = Engine(**MANY_SMALL)
    tuner = _tuner(max_samples=4)
    assert not tuner.is_done
    decided = engine.run(tuner, START)
    assert len(decided) == 4 and decided[-1] == tuner.best
    best = tuner.best
    for i in range(1000):
        assert tuner.observe(1 << 40, now_s=engine.now_s + i) is None
    assert tuner.is_done and tuner.best == best


def test_score_is_the_median_of_bytes_per_microsecond(tmp_path):
    path = tmp_path / "log.csv"
    tuner = _tuner(
        warmup_samples=0, steps_per_sample=1, max_samples=1, log_path=str(path)
    )
    now_s = 0.0
    # A pause of the caller, and a step that took no time to speak of.
    for took_s in (1e-3, 100.0, 2e-3, 1e-6, 2e-3, 0.0):
        tuner.observe(4000, now_s=now_s)
        now_s += took_s
    (row,) = _rows(path)
    assert float(row["score"]) == pytest.approx(4000 / 2e3)


def test_a_measurement_has_whole_steps_of_many_batches(tmp_path):
    # Ten batches come at once, and then the step computes. A tenth of it has no score
    # of its own: its names have not come again.
    path = tmp_path / "log.csv"
    options = {"warmup_samples": 0, "steps_per_sample": 2, "max_samples": 1}
    tuner = _tuner(**options, log_path=str(path))
    for step in range(20):
        for i in range(10):
            tuner.observe(1000, now_s=step * 0.1 + i * 1e-4, names=[f"grad/{i}"])
    (row,) = _rows(path)
    assert float(row["score"]) == pytest.approx(10_000 / 1e5)


def test_names_that_never_come_again_end_a_measurement(monkeypatch):
    monkeypatch.setattr("jdp.eager.coordinator.autotune._MOST_NAMES", 7)
    tuner = _tuner(warmup_samples=0, max_samples=1)
    for i in range(100):
        tuner.observe(1, now_s=float(i), names=[f"noname.{i}"])
    assert tuner.is_done


def test_a_clock_that_stands_still_decides_nothing():
    tuner = _tuner(warmup_samples=0, steps_per_sample=1)
    assert all(tuner.observe(1000, now_s=7.0) is None for _ in range(100))
    # Nor does one that goes back, and it measures when it goes on.
    assert tuner.observe(1000, now_s=6.0) is None
    calls = [tuner.observe(1000, now_s=6.0 + i) for i in range(1, 6)]
    assert [call is None for call in calls] == [True] * 4 + [False]


def test_a_seed_repeats_what_is_tried():
    def run(seed):
        tuner = _tuner(seed=seed, max_samples=10, fixed=SWITCHES)
        return Engine(**MANY_SMALL).run(tuner, Tunable(), noise=0.05)

    first = run(3)
    assert run(3) == first
    assert run(4)[:-1] != first[:-1]


def test_log_has_a_line_for_each_sample_as_soon_as_it_is_known(tmp_path):
    path = tmp_path / "log.csv"
    tuner = _tuner(max_samples=3, warmup_samples=0, log_path=str(path))
    header = "sample,score," + ",".join(Tunable.__struct_fields__)
    assert path.read_text().splitlines() == [header]
    current, lines = START, []
    for i in range(100):
        changed = tuner.observe(1000, now_s=i * 1e-3)
        if changed is not None:
            lines.append(
                [str(len(lines) + 1), *map(str, msgspec.structs.astuple(current))]
            )
            current = changed
        rows = _rows(path)
        assert all(float(row.pop("score")) == pytest.approx(1.0) for row in rows)
        assert [list(row.values()) for row in rows] == lines
    assert len(lines) == 3
    tuner.close()
    tuner.close()


def test_a_log_that_is_closed_early_is_not_written_to(tmp_path):
    path = tmp_path / "log.csv"
    tuner = _tuner(max_samples=3, warmup_samples=0, log_path=str(path))
    tuner.close()
    Engine(**MANY_SMALL).run(tuner, START)
    assert len(path.read_text().splitlines()) == 1


def test_what_is_decided_can_be_sent():
    decided = Engine(**MANY_SMALL).run(
        _tuner(can_be_hierarchical=True, max_samples=9), Tunable()
    )
    for tried in decided:
        encoded = msgspec.msgpack.encode(tried)
        assert msgspec.msgpack.decode(encoded, type=Tunable) == tried


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("warmup_samples", -1, "`warmup_samples` must be at least 0, got -1"),
        ("steps_per_sample", 0, "`steps_per_sample` must be at least 1, got 0"),
        ("max_samples", 0, "`max_samples` must be at least 1, got 0"),
        ("seed", -1, "`seed` must be at least 0, got -1"),
        ("noise", -0.1, "`noise` must be from 0 to 1, got -0.1"),
        ("noise", 1.5, "`noise` must be from 0 to 1, got 1.5"),
        ("noise", math.nan, "`noise` must be from 0 to 1, got nan"),
        ("fixed", ("fusion",), r"`fixed` must name fields of `Tunable`, got \['fusion"),
    ],
)
def test_options_out_of_range_are_named(option, value, message):
    with pytest.raises(ValueError, match=message):
        AutotuneOptions(**{option: value})


def test_a_start_out_of_range_is_named():
    with pytest.raises(ValueError, match="`start.fusion_bytes` must be at least 0"):
        _tuner(Tunable(fusion_bytes=-1))
    with pytest.raises(ValueError, match="`start.cycle_time_s` must be at least 0"):
        _tuner(Tunable(cycle_time_s=math.nan))


def test_there_must_be_something_to_tune():
    fixed = ("fusion_bytes", "cycle_time_s", "cache_enabled")
    with pytest.raises(ValueError, match="there is nothing to tune"):
        _tuner(fixed=fixed)
    _tuner(fixed=fixed, can_be_hierarchical=True)


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    with pytest.raises(RuntimeError, match=r"pip install 'bayesian-optimization"):
        _tuner()
