"""The protocol without threads or clocks: any schedule, then many processes."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.join import lockstep
from jdp.join.batch_spec import BatchLeafSpec, BatchSpec
from tests.join import lockstep_fuzz
from tests.join import lockstep_simulation as simulation
from tests.join.lockstep_simulation import Job, Simulation

SPEC, OTHER, THIRD = simulation.SPECS


@st.composite
def jobs(draw, with_failures=False):
    n = draw(st.integers(1, 8))
    seconds = st.floats(0.0, 1.0) | st.sampled_from([0.0, 0.001, 100.0])
    sizes = [tuple(draw(st.lists(st.integers(0, 9), max_size=12))) for _ in range(n)]
    last = max(map(len, sizes))
    job = Job(
        sizes=sizes,
        read_s=[
            draw(st.lists(seconds, min_size=len(s) + 1, max_size=len(s) + 1))
            for s in sizes
        ],
        step_s=draw(st.lists(seconds, min_size=last, max_size=last)),
        prefetch=draw(st.lists(st.integers(1, 7), min_size=n, max_size=n)),
        message_s=np.array(draw(st.lists(seconds, min_size=1, max_size=30))),
        # Many keep-alives, but no reader that takes too long.
        timeout_s=draw(st.sampled_from([1e9, 201.0])),
        specs=((0, 0), *draw(st.sampled_from([(), ((3, 1),), ((1, 2), (4, 0))]))),
    )
    if with_failures:
        failing = draw(st.sets(st.integers(0, n - 1), min_size=1))
        job = job._replace(
            fails_at={p: draw(st.integers(0, len(sizes[p]))) for p in failing}
        )
    return job


@given(jobs())
@settings(max_examples=300, deadline=None)
def test_all_schedules_come_to_the_same_iterations(job):
    result = Simulation(job).run()
    assert simulation.find_errors(job, result) == []


@given(jobs(with_failures=True))
@settings(max_examples=150, deadline=None)
def test_all_schedules_come_to_a_failure_at_the_same_iteration(job):
    result = Simulation(job).run()
    first = min(job.fails_at.values())
    assert result.num_begun == first
    assert all(len(seen) == first for seen in result.iterations)
    # Of several, whoever said so first is named.
    assert result.error in {
        f"Process {p} could not read its batch {first} (counted from 0): "
        "ValueError: boom"
        for p, k in job.fails_at.items()
        if k == first
    }


class _Walker:
    """A process whose reader, agent and loop take their turns in any order."""

    def __init__(self, job, index):
        self.member = lockstep.MemberState(prefetch=job.prefetch[index])
        self.sizes = job.sizes[index]
        self.specs = dict(job.specs)
        self.num_read = 0
        self.queue = []
        self.steps = []
        self.seen = []
        self.num_begun = 0
        self.said = None
        self.is_over = False

    def turns(self):
        if self.num_read <= len(self.sizes) and not self.member.has_ended:
            if len(self.queue) < self.member.prefetch:
                yield self.read
        if self.steps:
            yield self.begin
        if self.said is None and not self.is_over:
            if lockstep.has_to_announce(self.member, self.num_begun):
                yield self.announce

    def read(self):
        k = self.num_read
        if k == len(self.sizes):
            self.member = lockstep.end(self.member)
            return
        change = ((0, simulation.SPECS[self.specs[k]]),) if k in self.specs else ()
        self.member = lockstep.read(self.member, (self.sizes[k],), change)
        self.queue.append(k)
        self.num_read += 1

    def begin(self):
        self.num_begun += 1
        batch = self.queue.pop(0) if self.queue else None
        self.seen.append((self.steps.pop(0), batch))

    def announce(self):
        self.member, self.said = lockstep.announce(self.member)

    def receive(self, decision):
        self.member = lockstep.receive(self.member, decision)
        self.steps += decision.sizes
        self.said, self.is_over = None, decision.is_final


@given(jobs(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_each_batch_is_seen_once_and_in_order_whoever_takes_a_turn(job, random):
    walkers = [_Walker(job, p) for p in range(len(job.sizes))]
    state = lockstep.start_coordinator(len(walkers), timeout_s=1.0)
    underway = []  # decisions that some have not received.
    while True:
        turns = [turn for walker in walkers for turn in walker.turns()]
        turns += [lambda p=p, d=d: walkers[p].receive(d) for p, d in underway]
        if turns:
            k = random.randrange(len(turns))
            if k >= len(turns) - len(underway):
                underway.pop(k - len(turns) + len(underway))
            turns[k]()
        elif all(walker.is_over for walker in walkers):
            break
        if not underway and all(w.said is not None for w in walkers):
            state, decision = lockstep.decide(state, [w.said for w in walkers])
            underway = list(enumerate([decision] * len(walkers)))
        else:
            assert turns, "deadlock"
    expected = simulation.expected_sizes(job)
    for walker in walkers:
        assert [size for size, _ in walker.seen] == expected
        own = [batch for _, batch in walker.seen if batch is not None]
        assert own == list(range(len(walker.sizes)))
        assert [batch for _, batch in walker.seen[: len(own)]] == own


def test_messages_survive_the_wire():
    spec = BatchSpec(
        "PyTreeDef([*])", b'["list","*"]', (BatchLeafSpec("[0]", "int8", (2, 3)),)
    )
    announcement = lockstep.Announcement((1, 2), ((0, spec),), True, "E", "no", 1.5)
    decision = lockstep.Decision((1,), ((0, 0),), spec, True, "E", True)
    for message in (announcement, decision):
        encoded = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(encoded, type=type(message)) == message


@pytest.mark.parametrize(
    ("decided", "begun", "fresh", "expected"),
    [
        (0, 0, 0, False),  # nothing to say
        (0, 0, 1, True),  # the loop waits
        (4, 0, 3, True),  # three quarters of `prefetch`
        (4, 0, 2, False),  # the loop has enough to do
        (4, 4, 1, True),
    ],
)
def test_a_process_announces_when_it_is_worth_a_message(
    decided, begun, fresh, expected
):
    member = lockstep.MemberState(
        prefetch=4, num_announced=decided, num_decided=decided
    )
    member = lockstep.read(member, (1,) * fresh)
    assert lockstep.has_to_announce(member, begun) is expected


def test_a_process_whose_batches_are_undecided_announces_at_once():
    member = lockstep.MemberState(prefetch=4, num_announced=2, num_decided=1)
    assert lockstep.has_to_announce(member, 0)
    assert lockstep.has_to_announce(lockstep.end(lockstep.MemberState(prefetch=4)), 0)


def _decide(*rounds, timeout_s=10.0):
    state = lockstep.start_coordinator(len(rounds[0]), timeout_s=timeout_s)
    decision = None
    for announcements in rounds:
        state, decision = lockstep.decide(state, announcements)
    return decision


def _say(*sizes, specs=None, **kwargs):
    return lockstep.Announcement(
        sizes, ((0, SPEC),) if sizes and specs is None else specs or (), **kwargs
    )


def test_sizes_never_shrink_for_a_spec():
    more = ((0, SPEC), (2, OTHER), (3, SPEC))
    decision = _decide(
        [_say(3, 1, 7, 2, specs=more), _say(2, 2, 1, 1, specs=more)],
        [_say(), _say()],
    )
    assert decision.sizes == (3, 3)
    assert decision.proposal == OTHER
    decision = _decide(
        [_say(3, 1, 7, 2, specs=more), _say(2, 2, 1, 1, specs=more)],
        [_say(), _say()],
        [_say(), _say()],
    )
    assert decision.sizes == (7, 3)
    assert decision.specs == ((0, 1), (1, 0))


def test_an_iteration_has_at_least_one_sample():
    assert _decide([_say(0), _say(0)], [_say(), _say()]).sizes == (1,)


def test_nobody_has_data():
    decision = _decide([_say(has_ended=True)] * 3)
    assert decision == lockstep.Decision(is_end=True)


def test_specs_that_differ_name_both_processes_and_the_leaf():
    specs = ((0, OTHER),)
    decision = _decide([_say(has_ended=True), _say(1), _say(1, specs=specs)])
    assert decision.sizes == ()
    assert decision.error.startswith(
        "The batches of iteration 0 (counted from 0) differ: the leaf `(root)` is "
        "float32(samples, 1) on process 1 and float32(samples, 2) on process 2."
    )


def test_a_spec_that_changes_on_one_process_only_is_an_error_there():
    change = ((0, SPEC), (2, OTHER))
    decision = _decide(
        [_say(1, 1, 1), _say(1, 1, 1, specs=change)],
        [_say(), _say()],
    )
    assert decision.sizes == (1, 1)
    assert "iteration 2 (counted from 0) differ" in decision.error


def test_an_objection_ends_the_loop_for_all():
    decision = _decide(
        [_say(1), _say(has_ended=True)],
        [_say(), _say(has_ended=True, objection="cannot. Pass `like=`.")],
    )
    assert decision.error == "Process 1 cannot. Pass `like=`."


@pytest.mark.parametrize(("reading_s", "is_error"), [(9.9, False), (10.0, True)])
def test_a_reader_that_is_stuck_is_named(reading_s, is_error):
    decision = _decide(
        [_say(1), _say(1)], [_say(), _say()], [_say(), _say(reading_s=reading_s)]
    )
    assert (decision.error is not None) is is_error
    if is_error:
        assert decision.error.startswith(
            "Process 1 has not read its batch 1 (counted from 0) within 10 s."
        )


def test_a_reader_that_takes_longer_than_the_timeout_ends_the_simulation():
    job = Job(
        sizes=[(1, 1, 1), (1, 1)],
        read_s=[[0.0] * 4, [0.0, 50.0, 0.0]],
        step_s=[0.0] * 3,
        prefetch=[2, 2],
        message_s=np.array([0.001]),
        timeout_s=10.0,
    )
    result = Simulation(job).run()
    assert result.error.startswith("Process 1 has not read its batch 1 ")
    assert result.num_begun == 1
    assert 10.0 < result.seconds < 16.0


def test_a_long_step_is_no_error():
    job = Job(
        sizes=[(1,) * 6, (1,) * 5],
        read_s=[[0.0] * 7, [0.0] * 6],
        step_s=[0.0, 0.0, 500.0, 0.0, 0.0, 0.0],
        prefetch=[2, 1],
        message_s=np.array([0.001]),
        timeout_s=10.0,
    )
    assert simulation.find_errors(job, Simulation(job).run()) == []


def test_64_processes_agree_in_simulated_time():
    iterations, _, errors = simulation.run_many(20, 64)
    assert errors == []
    assert iterations > 5000


def _ignore_the_slowest(state):
    open_totals = [
        total
        for total, ended in zip(state.num_announced, state.has_ended, strict=True)
        if not ended
    ]
    totals = sorted(open_totals)[1:] or state.num_announced
    return max(min(totals), state.num_decided)


def _stop_at_the_first_end(state):
    return min(state.num_announced)


@pytest.mark.parametrize("wrong", [_ignore_the_slowest, _stop_at_the_first_end])
def test_the_simulation_finds_a_coordinator_that_is_wrong(monkeypatch, wrong):
    monkeypatch.setattr(lockstep, "_find_limit", wrong)
    for seed in range(20):
        try:
            _, _, errors = simulation.run_many(1, 8, seed=seed)
        except (IndexError, ValueError, AssertionError):
            return  # The state makes no sense any more.
        if errors:
            return
    raise AssertionError("no error was found")


def test_the_simulation_finds_a_mark_that_shrinks():
    def forget_the_mark(state, announcements):
        state, decision = lockstep.decide(state, announcements)
        return msgspec.structs.replace(state, marks=(1,) * len(state.marks)), decision

    assert simulation.run_many(10, 8, decide=forget_the_mark)[2]


@pytest.mark.parametrize("name", lockstep_fuzz.FUZZES)
def test_what_no_process_says_is_named_and_not_gone_by(name):
    num_good = lockstep_fuzz.FUZZES[name](random.Random(2), 3000)
    assert 0 < num_good < 3000
