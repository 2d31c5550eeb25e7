"""Is a slow process named, soon, and never another one?"""

import random
import re

import pytest

from jdp.watch import words
from jdp.watch.shares import StepSample
from jdp.watch.stragglers import Stragglers

ONSET, WORK_S = 100, 0.05


def simulate(
    num_processes,
    *,
    factor=1.0,
    noise=0.02,
    is_measured=True,
    has_tail=False,
    num_steps=400,
    until=10**9,
    divisor=1,
    is_idle=True,
    seed=0,
):
    """Takes steps; process 1 is slower from ONSET to `until`.

    Yields the step, the stragglers that are then found, and what compares them.
    """
    rng = random.Random(seed)
    stragglers = Stragglers(num_processes)
    begin_s, waited_s = 0.0, [0.0] * num_processes
    offsets = [rng.randrange(10**15) for _ in range(num_processes)]
    for step in range(1, num_steps):
        works = [WORK_S * (1 + noise * rng.gauss(0, 1)) for _ in range(num_processes)]
        if has_tail:
            works = [work + 0.001 * rng.paretovariate(1.1) for work in works]
        if ONSET <= step < until:
            works[1] *= factor
        arrivals = [begin_s + work for work in works]
        end_s = max(arrivals)
        for i, arrival_s in enumerate(arrivals):
            at_s = begin_s if is_measured else arrival_s
            if is_measured:
                waited_s[i] += end_s - arrival_s
            at_ns = int(at_s * 1e9) - offsets[i]
            waited_ns = int(waited_s[i] * 1e9)
            sample = StepSample(step, at_ns, reduced_ns=waited_ns, is_idle=is_idle)
            if step % divisor == 0:
                stragglers.add(i, [sample], offset_ns=offsets[i])
        begin_s = end_s
        yield step, stragglers.take_found(), stragglers


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize("num_processes", [2, 3, 4, 8])
def test_a_process_slowed_by_a_fifth_is_named_within_thirty_steps(
    num_processes, is_measured
):
    for seed in range(10):
        run = simulate(num_processes, factor=1.2, is_measured=is_measured, seed=seed)
        named = [(step, each) for step, found, _ in run for each in found]
        ((step, straggler),) = named
        assert straggler.process == 1
        assert ONSET + 19 <= step < ONSET + 30
        assert abs(straggler.since_step - ONSET) <= 2
        assert straggler.cost == pytest.approx(1 - 1 / 1.2, abs=0.03)
        assert straggler.shares.work_s == pytest.approx(1.2 * WORK_S, rel=0.03)


@pytest.mark.parametrize("noise", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("num_processes", [2, 4, 8])
def test_no_process_is_named_when_all_are_alike(num_processes, noise):
    for seed, is_measured in enumerate([True, False] * 3):
        for has_tail in (True, False):
            run = simulate(
                num_processes,
                noise=noise,
                is_measured=is_measured,
                has_tail=has_tail,
                seed=seed,
            )
            assert not any(found for _, found, _ in run)


def test_a_process_that_is_slower_by_a_tenth_is_not_named():
    assert not any(found for _, found, _ in simulate(4, factor=1.1))


def test_one_that_recovers_and_is_slow_again_is_named_again():
    *_, (_, _, last) = simulate(3, factor=1.3, until=200)
    assert last.slow_since(1) == 0
    for step, _, stragglers in simulate(3, factor=1.3, until=200):
        if step == 150:
            assert abs(stragglers.slow_since(1) - ONSET) <= 2
            assert stragglers.slow_since(0) == stragglers.slow_since(2) == 0


def test_with_samples_of_every_eighth_step_the_totals_still_tell():
    run = simulate(2, factor=1.2, divisor=8, num_steps=1000)
    named = [(step, each.process) for step, found, _ in run for each in found]
    ((_, process),) = named
    assert process == 1


def test_a_process_that_comes_late_to_devices_that_are_busy_is_not_slow():
    run = simulate(2, factor=1.3, is_measured=False, is_idle=False)
    assert not any(found for _, found, _ in run)


def test_the_shares_of_a_process_add_up():
    *_, (_, _, last) = simulate(3, factor=1.5, num_steps=300)
    for process in range(3):
        for shares in (last.mean(process), last.ewma(process)):
            parts = shares.compute_s + shares.reducing_s
            parts += shares.waiting_s + shares.loading_s
            assert parts == pytest.approx(shares.total_s)
            assert shares.total_s == pytest.approx(1.5 * WORK_S, rel=0.03)
    assert last.mean(0).share(last.mean(0).waiting_s) == pytest.approx(1 / 3, abs=0.02)
    assert last.mean(1).share(last.mean(1).waiting_s) < 0.01


def test_a_step_in_which_one_compiles_does_not_count():
    stragglers = Stragglers(2)
    for step in range(1, 5):
        for process in range(2):
            at_ns = step * 10**7 + (10**10 if step > 2 else 0)
            num_compiled = int(step > 2 and process == 1)
            sample = StepSample(step, at_ns, num_compiled=num_compiled)
            stragglers.add(process, [sample])
    assert stragglers.mean(0).total_s == pytest.approx(0.01)


def test_a_process_whose_samples_do_not_come_costs_no_memory():
    stragglers = Stragglers(2)
    stragglers.add(0, (StepSample(step, step) for step in range(10_000)))
    assert len(stragglers._pending) <= 512
    assert stragglers.mean(0).total_s == 0.0


def test_the_words_say_since_when_how_slow_and_what_it_costs():
    run = simulate(2, factor=1.25)
    (straggler,) = [each for _, found, _ in run for each in found]
    text = words.describe_straggler(straggler)
    assert re.fullmatch(
        r"process 1 has been slower than the others since step (99|10\d): 6\d(\.\d)? "
        r"ms of work per step, and theirs takes (49|5\d)(\.\d)? ms\. This costs "
        r"(19|2\d)% of the time of the job\.",
        text,
    ), text


def test_the_words_name_a_loader():
    stragglers, found = Stragglers(2), []
    for step in range(1, 60):
        for process in range(2):
            load_ns = 10**7 * (process + 1) * step
            at_ns = step * 3 * 10**7
            wait_ns = 10**7 * (1 - process) * step
            sample = StepSample(step, at_ns, wait_ns, loaded_ns=load_ns)
            stragglers.add(process, [sample])
        found += stragglers.take_found()
    (straggler,) = found
    text = words.describe_straggler(straggler)
    assert text.endswith("Its loader takes 10 ms more than theirs.")


@pytest.mark.parametrize("slow", [10, 14])
def test_a_reader_that_is_busy_all_the_time_is_work_of_its_process(slow):
    # Both read for 10 ms per batch; the batches of process 1 come 8 ms later.
    stragglers, found = Stragglers(2), []
    for step in range(1, 80):
        for process in range(2):
            total_ns = slow * 10**6
            wait_ns = 8 * 10**6 * (1 - process) * step
            read_ns = (slow if process else 10) * 10**6
            sample = StepSample(step, step * total_ns, wait_ns, read_ns=read_ns)
            stragglers.add(process, [sample])
        found += stragglers.take_found()
    assert [each.process for each in found] == ([1] if slow > 10 else [])
    expected = 0.004 if slow > 10 else 0.0
    assert stragglers.mean(0).waiting_s == pytest.approx(expected)
