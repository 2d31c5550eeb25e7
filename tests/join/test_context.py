"""Loops in which processes have different numbers of iterations."""

import functools
import logging
import os
import signal
import threading
import time
import warnings

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jdp
from jdp.join import context, progress_exchange
from jdp.join.context import JoinTask
from jdp.join.progress_exchange import ProcessProgress
from tests import harness

# --- Threads with a store in memory -------------------------------------------------


class _ThreadSum:
    """An all-reduce among threads: whoever is missing makes all others fail."""

    def __init__(self, num_processes):
        self._barrier = threading.Barrier(num_processes, timeout=10.0)
        self._values = [0.0] * num_processes

    def __call__(self, process, value):
        self._values[process] = value
        self._barrier.wait()
        total = sum(self._values)
        self._barrier.wait()
        return total


class _Counter(jdp.Joinable):
    """Sums ones over the processes that go on, `num_all_reduces` an iteration."""

    def __init__(self, world, all_reduce, *, log=None):
        self.world, self.all_reduce = world, all_reduce
        self.total, self.log, self.num_all_reduces = 0.0, log or [], 1
        self.post = []

    @property
    def join_world(self):
        return self.world

    def join_hook(self, **kwargs):
        self.num_all_reduces = kwargs.get("num_all_reduces", 1)
        return _CounterHook(self)

    def __call__(self):
        jdp.Join.notify_join_context(self)
        for _ in range(self.num_all_reduces):
            self.total += self.all_reduce(self.world.process_index, 1.0)


class _CounterHook(jdp.JoinHook):
    def __init__(self, counter):
        self.counter = counter

    def main_hook(self):
        counter = self.counter
        counter.log.append(counter)
        for _ in range(counter.num_all_reduces):
            counter.all_reduce(counter.world.process_index, 0.0)

    def post_hook(self, is_last_joiner):
        self.counter.post.append(is_last_joiner)


def _count(counts, world, *, num_joinables=1, delays=None, all_reduces=None, **options):
    counters = [_Counter(world, f) for f in all_reduces[:num_joinables]]
    rng = np.random.default_rng([world.process_index, delays or 0])
    with jdp.Join(counters, **options) as join:
        for _ in range(counts[world.process_index]):
            if delays:
                time.sleep(rng.exponential(1e-3))
            for counter in counters:
                counter()
    posts = [counter.post for counter in counters]
    return [counter.total for counter in counters], posts, join.last_joiner


def _run_counts(counts, **options):
    sums = [_ThreadSum(len(counts)) for _ in range(3)]
    fn = functools.partial(_count, counts, all_reduces=sums, **options)
    found = harness.run_threads(fn, len(counts))
    for value in found:
        if isinstance(value, Exception):
            raise value
    return found


def _total(counts, process):
    """In each of its iterations it counts the processes that go on."""
    return sum(sum(c > k for c in counts) for k in range(counts[process]))


@pytest.mark.parametrize("num_joinables", [1, 3])
@pytest.mark.parametrize("counts", [[3, 4, 5], [0, 2], [2, 2], [0, 0, 0], [7, 0, 7, 1]])
def test_those_that_joined_stand_in(counts, num_joinables):
    found = _run_counts(counts, num_joinables=num_joinables)
    last = max(i for i, c in enumerate(counts) if c == max(counts))
    for process, (totals, posts, last_joiner) in enumerate(found):
        assert totals == [_total(counts, process)] * num_joinables
        assert posts == [[counts[process] == max(counts)]] * num_joinables
        assert last_joiner == last


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 1 << 20))
def test_any_counts_end_together(counts, seed):
    found = _run_counts(counts, delays=seed)
    assert [totals for totals, *_ in found] == [
        [_total(counts, p)] for p in range(len(counts))
    ]


def test_main_hooks_run_in_the_order_of_the_list():
    order = []

    class Hook(jdp.JoinHook):
        def __init__(self, name):
            self.name = name

        def main_hook(self):
            order.append(self.name)

    class Quiet(_Counter):
        def join_hook(self, **kwargs):
            return Hook(kwargs["names"].pop(0))

    def run(world):
        quiet = [Quiet(world, lambda process, value: 0.0) for _ in range(3)]
        with jdp.Join(quiet, names=list("abc")):
            for _ in range(2 * world.process_index):
                quiet[1]()  # only the first of the list notifies.
                quiet[0]()

    assert harness.run_threads(run, 2) == [None, None]
    assert order == list("abc") * 2


def test_arguments_reach_every_hook():
    found = _run_counts([1, 3], num_joinables=2, num_all_reduces=2)
    assert [totals for totals, *_ in found] == [[4, 4], [8, 8]]


def test_a_context_that_is_disabled_does_nothing():
    found = _run_counts([3, 3], enable=False)
    assert found == [([6.0], [[]], None)] * 2


def test_a_process_alone_is_the_last_joiner():
    world = harness.local_world(1)
    counter = _Counter(world, lambda process, value: value)
    with jdp.Join([counter]) as join:
        counter()
    assert (counter.total, counter.post, join.last_joiner) == (1.0, [True], 0)


@pytest.mark.parametrize("counts", [[3, 4, 5], [0, 1], [5, 3, 3]])
def test_all_throw_as_soon_as_one_has_no_more_input(counts):
    sums = [_ThreadSum(len(counts))]
    totals = [0.0] * len(counts)

    def run(world):
        counter = _Counter(world, sums[0])
        try:
            with jdp.Join([counter], throw_on_early_termination=True):
                for _ in range(counts[world.process_index]):
                    counter()
        finally:
            totals[world.process_index] = counter.total

    found = harness.run_threads(run, len(counts))
    for process, error in enumerate(found):
        assert isinstance(error, RuntimeError)
        if counts[process] == min(counts):
            assert str(error) == f"Rank {process} exhausted all inputs."
        else:
            assert str(error) == (
                "Detected at least one rank that exhausted inputs. Throwing across all "
                "ranks."
            )
    assert totals == [len(counts) * min(counts)] * len(counts)


def test_what_was_posted_in_each_iteration_does_not_pile_up():
    sizes = []

    def run(world):
        counter = _Counter(world, lambda process, value: 0.0)
        with jdp.Join([counter], throw_on_early_termination=True):
            for _ in range(50):
                counter()
                sizes.append(len(world.store.list_directory("jdp")))

    assert harness.run_threads(run, 2) == [None, None]
    assert max(sizes) <= 2 * 3  # two of each process, and one more that is new.


def test_nobody_throws_where_all_end_together():
    found = _run_counts([3, 3], throw_on_early_termination=True)
    assert found == [([6.0], [[True]], 1)] * 2


def test_an_exception_reaches_those_that_go_on_and_those_that_joined():
    began = threading.Event()

    def run(world):
        counter = _Counter(world, lambda process, value: 0.0)
        with jdp.Join([counter]):
            if world.process_index == 1:
                counter()
                began.wait(10.0)
                raise KeyError("Intentional error")
            if world.process_index == 0:
                began.set()
                for _ in range(2000):
                    time.sleep(0.005)
                    counter()
        return counter.post

    one, failed, joined = harness.run_threads(run, 3)
    assert isinstance(failed, KeyError)
    for error in (one, joined):
        assert isinstance(error, RuntimeError)
        assert "Process 1 left the `jdp.Join` after 1 iteration" in str(error)
        assert "KeyError: 'Intentional error'" in str(error)


def test_a_hook_that_fails_reaches_the_others():
    class Broken(_Counter):
        def join_hook(self, **kwargs):
            hook = jdp.JoinHook()
            hook.main_hook = lambda: 1 / 0
            return hook

    def run(world):
        broken = Broken(world, lambda process, value: 0.0)
        with jdp.Join([broken]):
            for _ in range(2000 * world.process_index):
                time.sleep(0.005)
                broken()

    failed, other = harness.run_threads(run, 2)
    assert isinstance(failed, ZeroDivisionError)
    assert "Process 0 left the `jdp.Join` after 1 iteration, ZeroDivision" in str(other)


def test_a_wait_that_is_long_is_logged_and_goes_on(caplog):
    def run(world):
        counter = _Counter(world, lambda process, value: 0.0)
        with jdp.Join([counter]):
            if world.process_index == 1:
                counter()
                time.sleep(0.5)
                counter()
        return counter.post

    with caplog.at_level(logging.WARNING, "jdp"):
        found = harness.run_threads(run, 2, timeout_s=0.3)
    assert found == [[False], [True]]
    assert "waited more than 0.3 s for the next iteration of process 1" in caplog.text


@pytest.mark.parametrize("skew", [1000, 1001, 1500])
def test_a_skew_of_over_a_thousand_iterations_warns_once(skew):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _run_counts([0, skew])
    messages = [str(w.message) for w in caught]
    expected = int(skew > 1000)
    assert len(messages) == expected
    if messages:
        assert "uneven input skew of greater than 1000" in messages[0]


def _threads_of_contexts():
    # A process that has left with an error posts that again till its program ends.
    names = [t.name for t in threading.enumerate() if t.name.startswith("jdp-")]
    return [name for name in names if name != "jdp-departures-keeper"]


def test_contexts_follow_each_other_and_leave_nothing_in_the_store():
    keys = []

    def run(world):
        for counts in ([1, 3], [4, 0], [2, 2]):
            _count(counts, world, all_reduces=[lambda process, value: 0.0])
        barrier.wait(10.0)
        keys.append(sorted(world.store.list_directory("jdp")))

    barrier = threading.Barrier(2)
    assert harness.run_threads(run, 2) == [None, None]
    # Those of the last context go with the next.
    assert {key.split("/")[1] for key in keys[0]} == {"2"}
    assert not _threads_of_contexts()


def test_threads_end_with_a_context_that_fails():
    def run(world):
        with jdp.Join([_Counter(world, None)]):
            raise ValueError("Intentional error")

    found = harness.run_threads(run, 2)
    assert [type(error) for error in found] == [ValueError] * 2
    assert not _threads_of_contexts()


def test_what_cannot_be_joined_is_refused():
    with pytest.raises(ValueError, match="`joinables` is empty"):
        jdp.Join([])
    counters = [_Counter(harness.local_world(n), None) for n in (1, 2)]
    with pytest.raises(ValueError, match="`joinables` belong to several worlds"):
        jdp.Join(counters)
    with jdp.Join(counters[:1]):
        with pytest.raises(RuntimeError, match="in another `Join` already"):
            with jdp.Join(counters[:1]):
                pass
    with pytest.raises(TypeError, match="abstract"):
        jdp.Joinable()


class _Named(_Counter):
    """A joinable with an option of its own, as the tutorial of torch has one."""

    def join_hook(self, *, sync_max_count=False):
        self.sync_max_count = sync_max_count
        return jdp.JoinHook()


def _step_to_join():
    return jdp.data_parallel(lambda w, b: (w, {}), world=harness.local_world(1))


@pytest.mark.parametrize(
    "option,message",
    [
        ({"divide_bye": "world"}, "`divide_bye`.* mean `divide_by`"),
        ({"dividby": "active"}, "`dividby`.* mean `divide_by`"),
        ({"enabel": False}, "`enabel`.* mean `enable`"),
        ({"throw_on_early_terminaton": True}, "mean `throw_on_early_termination`"),
        ({"divide_by_initial_world_size": True}, "True is `divide_by='world'`"),
        ({"divide_by_initial_world_size": False}, "False is `divide_by='active'`"),
        ({"exampel": ()}, "mean `example`"),
        ({"sync_max_cout": True}, "mean `sync_max_count`"),
        ({"q": 1}, "no option `q`.* options are `divide_by`, `enable`, `example`,"),
    ],
)
def test_an_option_that_no_joinable_takes_is_named_with_the_nearest(option, message):
    step, named = _step_to_join(), _Named(harness.local_world(1), None)
    with pytest.raises(TypeError, match=message):
        jdp.Join([step, named], **option)


def test_each_joinable_gets_the_options_that_it_takes():
    world = harness.local_world(1)
    step, named, any_option = _step_to_join(), _Named(world, None), _Counter(world, 0)
    jdp.Join([step, named], divide_by="world", sync_max_count=True)
    assert named.sync_max_count
    jdp.Join([step, any_option, named], num_all_reduces=3, divide_by="world")
    assert any_option.num_all_reduces == 3 and not named.sync_max_count
    with pytest.raises(ValueError, match="`divide_by` must be"):
        jdp.Join([step, any_option], divide_by="wrld")


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda step: step, r"must be a list.* `jdp.Join\(\[step\]\)`"),
        (lambda step: [step, len], r"`joinables\[1\]` must be a `jdp.Joinable`"),
        (lambda step: 3, "must be a list.* got int"),
    ],
)
def test_what_is_no_list_of_joinables_is_named(make, message):
    with pytest.raises(TypeError, match=message):
        jdp.Join(make(_step_to_join()))


def test_a_joinable_outside_of_a_context_is_free():
    counter = _Counter(harness.local_world(1), lambda process, value: value)
    counter()
    assert counter.total == 1.0
    assert counter.join_device == jax.devices()[0]


@pytest.mark.parametrize(
    "num_shadowed, progress, task",
    [
        (3, [(3, True), (4, False)], JoinTask("shadow")),
        (3, [(3, True), (4, True)], JoinTask("shadow")),
        (3, [(3, True), (3, False), (2, False)], JoinTask("wait", 1)),
        (3, [(3, True), (1, True)], JoinTask("end")),
        (0, [(0, True)], JoinTask("end")),
    ],
)
def test_what_follows_from_how_far_all_are(num_shadowed, progress, task):
    found = context.next_task(num_shadowed, [ProcessProgress(*p) for p in progress])
    assert found == task


# --- Real processes -----------------------------------------------------------------


def _device_sum(world, value):
    local = jdp.global_batch(world, np.full(world.num_local_replicas, value, "f4"))
    total = jax.jit(lambda x: x.sum(), out_shardings=world.replicated)(local)
    return float(total)


class _TutorialCounter(_Counter):
    """The Counter of torch's tutorial on Join."""

    def __init__(self, world):
        super().__init__(world, lambda process, value: _device_sum(world, value))
        self.max_count = 0.0

    def join_hook(self, **kwargs):
        return _TutorialHook(self, kwargs.get("sync_max_count", False))


class _TutorialHook(_CounterHook):
    def __init__(self, counter, sync_max_count):
        super().__init__(counter)
        self.sync_max_count = sync_max_count

    def post_hook(self, is_last_joiner):
        counter = self.counter
        if self.sync_max_count:
            is_source = counter.world.process_index == counter.join_context.last_joiner
            mine = counter.total if is_source else 0.0
            counter.max_count = _device_sum(counter.world, mine)


def _count_as_in_the_tutorial():
    world = jdp.init()
    counter = _TutorialCounter(world)
    with jdp.Join([counter], sync_max_count=True):
        for _ in range(5 + world.process_index):
            counter()
    return counter.total, counter.max_count


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_counter_of_the_tutorial():
    values = harness.run_checked(_count_as_in_the_tutorial, 2)
    assert values == [(10.0, 11.0), (11.0, 11.0)]


def _fail_in_the_loop(is_caught):
    world = jdp.init(timeout_s=3.0)
    counter = _TutorialCounter(world)
    try:
        with jdp.Join([counter]):
            for k in range(50):
                if (k, world.process_index) == (3, 1):
                    raise ValueError("Intentional error")
                counter()
    except ValueError:
        if not is_caught:
            raise
        time.sleep(30.0)  # it lives on, elsewhere: no launcher would end the job.


@pytest.mark.multiprocess
@pytest.mark.slow
def test_those_that_wait_in_a_collective_end_in_bounded_time():
    outcome = harness.run_processes(_fail_in_the_loop, 2, True)
    assert outcome.exit_code != 0 and outcome.seconds < 25.0
    assert "Process 1 left the `jdp.Join` after 3 iterations, ValueError" in (
        outcome.output
    )


def _die_while_joined():
    world = jdp.init()
    counter = _TutorialCounter(world)
    with jdp.Join([counter]):
        if world.process_index == 0:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for _ in range(3 + 10_000 * world.process_index):
            time.sleep(0.005)
            counter()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_process_killed_while_it_stands_in_ends_the_job():
    outcome = harness.run_processes(_die_while_joined, 2)
    assert outcome.exit_code == 128 + signal.SIGKILL and outcome.seconds < 30.0
    assert "process 0" in outcome.output


# --- Strangers at the store, and processes that say what cannot be ------------------


@pytest.mark.parametrize("throws", [False, True])
def test_what_a_stranger_deletes_in_the_store_is_posted_again(throws):
    has_ended = threading.Event()

    def delete(store):
        while not has_ended.wait(0.01):
            store.delete("jdp/context/0/progress")

    def run(world):
        if world.process_index == 2:
            threads.append(threading.Thread(target=delete, args=[world.store]))
            threads[0].start()
        # It goes away after a while: without that nothing could be read.
        threading.Timer(1.0, has_ended.set).start()
        counter = _Counter(world, lambda process, value: 0.0)
        with jdp.Join([counter], throw_on_early_termination=throws):
            for _ in range(4 if throws else 4 * (1 + world.process_index)):
                counter()
                time.sleep(0.05)
        return counter.post

    threads = []
    found = harness.run_threads(run, 3, timeout_s=2.0)
    has_ended.set()
    threads[0].join()
    assert found == [[True]] * 3 if throws else [[False], [False], [True]]


def test_a_wait_for_another_process_ends_with_its_name(monkeypatch):
    monkeypatch.setattr(progress_exchange, "_MOST_WAITS", 2)

    def run(world):
        with jdp.Join([_Counter(world, lambda process, value: 0.0)]):
            if world.process_index == 1:
                has_raised.wait(20.0)
        has_raised.set()

    has_raised = threading.Event()

    def run_and_tell(world):
        try:
            run(world)
        finally:
            has_raised.set()

    error, _ = harness.run_threads(run_and_tell, 2, timeout_s=0.5)
    assert "for the next iteration of process 1, 2 times `timeout_s`" in str(error)
    assert "store, see docs/security.md" in str(error)


@pytest.mark.parametrize(
    "said",
    [
        ProcessProgress(-1),
        ProcessProgress(10**12),
        ProcessProgress(10**12, is_joined=True),
    ],
)
def test_a_progress_that_cannot_be_is_refused(said):
    def run(world):
        counter = _Counter(world, lambda process, value: 0.0)
        with jdp.Join([counter]):
            if world.process_index == 1:
                store = world.store
                data = msgspec.msgpack.encode(said)
                for number in range(2):  # It may have posted the first already.
                    key = f"jdp/context/0/progress/1/{number}"
                    store.set(key, data, overwrite=True)
                raise SystemError("Enough.")

    error, _ = harness.run_threads(run, 2)
    assert f"had begun 0 iterations before, and now {said.num_begun}" in str(error)
