"""Where two ranks went apart, from their flight records."""

import random

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jdp.eager.diagnosis import divergence
from jdp.eager.diagnosis.flight_recorder import Record
from tests.eager.records import Rank, all_reduce, train

NAMES = [f"grad/{i}" for i in range(6)]


def _compare(a, b):
    """Compares both ways, which must find the same."""
    one, other = a.dump(), b.dump()
    found = divergence.find_divergence(one, other)
    mirrored = divergence.find_divergence(other, one)
    whats = [each.what for each in found.findings] if found else []
    assert whats == sorted(whats, key=["order", "mismatch", "missing", "outcome"].index)
    assert sorted(whats) == sorted(
        [each.what for each in mirrored.findings] if mirrored else []
    )
    return found, divergence.explain(one, other, found)


def _play(rng, num_steps, *, capacity, cut):
    """Two ranks that run the same, and submit in their own order.

    The second one is dumped earlier: after `cut` of what it does in the last steps.
    """
    a, b = Rank(0, capacity=capacity), Rank(1, capacity=capacity)
    todo = {a: [], b: []}
    for step in range(num_steps):
        names = rng.sample(NAMES, rng.randint(1, len(NAMES)))
        specs = {name: {"shape": (step, 2), "op": rng.choice("ab")} for name in names}
        order = [(name, 100 * step + i) for i, name in enumerate(names)]
        for rank in (a, b):
            for name in rng.sample(names, len(names)):
                todo[rank].append(("submit", name, specs[name]))
            todo[rank] += [("run", *each) for each in order]
    for rank in (a, b):
        num_events = len(todo[rank]) - (
            round(cut * len(todo[rank])) if rank is b else 0
        )
        for what, name, value in todo[rank][:num_events]:
            if what == "submit":
                rank.submit(all_reduce(name, **value))
            else:
                rank.run(name, value)
    return a, b


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_steps=st.integers(1, 8),
    capacity=st.sampled_from([1, 3, 8, 2000]),
    cut=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
)
def test_the_same_operations_in_any_order_never_diverge(seed, num_steps, capacity, cut):
    a, b = _play(random.Random(seed), num_steps, capacity=capacity, cut=cut)
    found, text = _compare(a, b)
    assert found is None, text
    assert "Nothing differs between rank 0 and rank 1." in text


def _changed(record, what):
    match what:
        case "dtype":
            record.dtype = "float64"
        case "shape":
            record.shape = (*record.shape, 7)
        case "op":
            record.op = "max"
        case "kind":
            record.kind = "broadcast"
        case "process set":
            record.process_set = 1
        case "name":
            record.name = "another"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_steps=st.integers(0, 5),
    capacity=st.sampled_from([8, 2000]),
    what=st.sampled_from(["dtype", "shape", "op", "kind", "process set", "name"]),
)
def test_one_thing_that_is_changed_is_found_and_named(seed, num_steps, capacity, what):
    rng = random.Random(seed)
    a, b = _play(rng, num_steps, capacity=capacity, cut=0.0)
    changed = rng.choice(NAMES)
    for rank in (a, b):
        for name in rng.sample(NAMES, len(NAMES)):
            record = rank.submit(all_reduce(name))
            if rank is b and name == changed:
                _changed(record, what)
    found, text = _compare(a, b)
    first = found.findings[0]
    assert first.a.name == changed and repr(changed) in text
    if what == "name":
        missing = [(f.what, (f.a or f.b).name) for f in found.findings]
        assert missing == [("missing", changed), ("missing", "another")]
    else:
        assert len(found.findings) == 1 and first.what == "mismatch"
        assert first.b.name == changed
        words = {"dtype": "data types", "kind": "operations", "op": "reduction"}
        assert f"Mismatched {words.get(what, what)}" in first.text.replace(
            "all_reduce ", ""
        )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 5))
def test_a_spec_that_differed_long_ago_is_found(seed, num_steps):
    rng = random.Random(seed)
    a, b = _play(rng, num_steps, capacity=2000, cut=0.0)
    ran = rng.choice([r for r in b.recorder._records])
    ran.dtype = "int8"
    (finding,) = _compare(a, b)[0].findings
    assert (finding.what, finding.b.number) == ("mismatch", ran.number)
    assert (finding.a.order, finding.a.name) == (ran.order, ran.name)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(2, 5))
def test_another_order_of_execution_is_found_where_it_begins(seed, num_steps):
    rng = random.Random(seed)
    a, b = _play(rng, num_steps, capacity=2000, cut=0.0)
    one, other = rng.sample(list(b.recorder._records), 2)
    assume(one.name != other.name)
    one.order, other.order = other.order, one.order
    first = _compare(a, b)[0].findings[0]
    assert first.what == "order"
    assert first.b.order == min(one.order, other.order)
    assert f"As operation {first.b.order}, rank 0 ran {first.a.name!r}" in first.text


def test_ranks_that_wait_for_each_other():
    a, b = Rank(0), Rank(1)
    train([a, b], NAMES, 3)
    a.submit(all_reduce("loss", shape=()))
    b.submit(all_reduce("metric", shape=(), dtype="int32"))
    b.submit(all_reduce("next", shape=(3,)))
    _, text = _compare(a, b)
    lines = text.splitlines()
    assert lines[0] == "Both ran 18 operations in the same order, up to 'grad/5'."
    assert lines[1].startswith(
        "Rank 0 submitted 'loss' (all_reduce sum float32[]), which rank 1 has not, and "
        "has waited for 1000.0 s"
    )
    assert lines[2].startswith("Rank 1 submitted 'metric' (all_reduce sum int32[]), ")
    assert "The last request of rank 1 is 'next', 1000.0 s before its dump." in text


def test_what_a_rank_gave_up_on_is_still_missing_from_the_other():
    a, b = Rank(0), Rank(1)
    record = a.submit(all_reduce("loss"))
    record.error, record.finished_s = "the engine ends", record.submitted_s + 5.0
    (finding,) = _compare(a, b)[0].findings
    assert finding.text.endswith("waited for 5.0 s. It failed: the engine ends")


def test_findings_beyond_a_few_are_counted():
    a, b = Rank(0), Rank(1)
    for i in range(9):
        a.submit(all_reduce(f"t{i}"))
    found, text = _compare(a, b)
    assert len(found.findings) == 9
    assert "'t4'" in text and "'t5'" not in text
    assert "... and 4 more of this kind." in text


def test_what_both_wait_for_is_a_note():
    a, b = Rank(0, size=3), Rank(1, size=3)
    for rank in (a, b):
        rank.submit(all_reduce("x"))
    found, text = _compare(a, b)
    assert found is None
    assert "Both wait for 'x'" in text and "Another rank has not submitted it." in text


def test_what_a_rank_is_in_is_a_note():
    a, b = Rank(0), Rank(1)
    train([a, b], NAMES, 1)
    running = list(a.recorder._records)[-2]
    running.finished_s = 0.0
    found, text = _compare(a, b)
    assert found is None and f"Rank 0 has been in {running.name!r}" in text


def test_the_order_of_submission_is_a_note():
    a, b = Rank(0), Rank(1)
    for rank, names in ((a, "xyz"), (b, "xzy")):
        for name in names:
            rank.submit(all_reduce(name))
    found, text = _compare(a, b)
    assert found is None
    assert "rank 0 submitted 'y' and rank 1 'z'" in text


def test_the_same_order_of_submission_is_not_mentioned():
    a, b = Rank(0), Rank(1)
    train([a, b], NAMES, 2)
    assert "different orders" not in _compare(a, b)[1]


def test_rows_of_a_gather_may_differ_and_the_rest_may_not():
    a, b = Rank(0), Rank(1)
    for rank, rows in ((a, 3), (b, 5)):
        rank.submit(Record("g", "all_gather", "float32", (rows, 2)))
        rank.submit(Record("h", "all_gather", "float32", (4, rows)))
    found, text = _compare(a, b)
    (finding,) = found.findings
    assert "shapes of 'h': rank 0 has [any, 3], but rank 1 has [any, 5]" in finding.text
    assert "Both wait for 'g'" in text and "Both wait for 'h'" not in text


def test_process_sets_of_one_rank_are_left_alone():
    a, b = Rank(0, size=4), Rank(1, size=4)
    train([a, b], NAMES, 1)
    for rank, set_id, order in ((a, 1, 6), (b, 2, 7)):
        rank.submit(all_reduce("half", process_set=set_id))
        rank.run("half", order)
        rank.submit(all_reduce("half", process_set=set_id))
    train([a, b], NAMES, 1, first_order=8)
    found, text = _compare(a, b)
    assert found is None
    assert "Both ran 12 operations in the same order" in text


def test_a_process_set_that_both_use_is_compared():
    a, b = Rank(0, size=4), Rank(1, size=4)
    for rank in (a, b):
        rank.submit(all_reduce("x", process_set=1))
        rank.run("x", 0)
    b.submit(all_reduce("y", process_set=1))
    (finding,) = _compare(a, b)[0].findings
    assert "Rank 1 submitted 'y' (all_reduce sum float32[4, 2] in process set 1)" in (
        finding.text
    )


def test_a_rank_that_has_joined_lacks_nothing():
    a, b = Rank(0), Rank(1)
    order = train([a, b], NAMES, 1)
    b.submit(Record("join", "join"))
    order = train([a], NAMES, 2, first_order=order)
    a.submit(all_reduce("x"))
    found, text = _compare(a, b)
    assert found is None and "Rank 1 has joined: it has no more data." in text
    a.run("x", order)
    a.submit(Record("join", "join"))
    for rank in (a, b):
        rank.run("join", order + 1)
    train([a, b], NAMES, 1, first_order=order + 2)
    found, text = _compare(a, b)
    assert found is None
    assert "Both ran 13 operations in the same order" in text


def test_operations_that_run_as_one_may_share_a_position():
    a, b = Rank(0), Rank(1)
    for rank, names in ((a, "xy"), (b, "yx")):
        for name in names:
            rank.submit(all_reduce(name))
        for name in names:
            rank.run(name, 0)
    assert _compare(a, b)[0] is None
    list(b.recorder._records)[0].name = "z"
    assert _compare(a, b)[0].findings[0].what == "order"


def test_what_failed_on_one_rank_only():
    a, b = Rank(0), Rank(1)
    for rank, error in ((a, ""), (b, "the disk is full")):
        rank.submit(all_reduce("x"))
        rank.run("x", 0, error)
    (finding,) = _compare(a, b)[0].findings
    assert finding.what == "outcome"
    assert "failed on rank 1, and not on rank 0: the disk is full" in finding.text


@pytest.mark.parametrize("capacity", [8, 12, 2000])
def test_older_records_may_be_gone_on_either_side(capacity):
    a, b = Rank(0, capacity=capacity), Rank(1)
    train([a, b], NAMES, 5)
    b.submit(all_reduce("loss"))
    found, text = _compare(a, b)
    (finding,) = found.findings
    assert (finding.what, finding.a, finding.b.name) == ("missing", None, "loss")
    num_common = min(capacity, 30)
    assert f"Both ran {num_common} operations in the same order" in text
    assert ("older ones are no longer recorded" in text) == (capacity < 30)


def test_records_without_a_common_stretch_are_not_compared():
    a, b = Rank(0), Rank(1, capacity=8)
    order = train([a, b], NAMES, 2)
    a.submit(all_reduce("loss"))
    b.submit(all_reduce("loss", shape=(1,)))
    b.run("loss", order)
    train([b], NAMES, 4, first_order=order + 1)
    b.submit(all_reduce("loss", shape=(9,)))
    found, text = _compare(a, b)
    assert found is None
    assert "the record of rank 0 ends before the record of rank 1 begins" in text
    assert "Waiting requests cannot be compared" in text


def test_what_waits_from_before_the_oldest_record_is_still_missing():
    a, b = Rank(0, capacity=6), Rank(1, capacity=6)
    a.submit(all_reduce("forgotten"))
    train([a, b], NAMES, 9)
    (finding,) = _compare(a, b)[0].findings
    assert (finding.what, finding.a.name) == ("missing", "forgotten")


def test_dumps_of_other_times_are_said_to_be():
    a, b = Rank(0).dump(), Rank(1).dump()
    assert "was dumped" not in divergence.explain(a, b, None)
    b = msgspec.structs.replace(b, time=a.time - 31.0)
    text = divergence.explain(a, b, None)
    assert "Rank 0 was dumped 31.0 s after rank 1." in text


def test_empty_records():
    found, text = _compare(Rank(0), Rank(1))
    assert found is None and text.startswith("No operation that has run is in")


def test_dumps_that_cannot_be_compared():
    for compare in (
        divergence.find_divergence,
        lambda a, b: divergence.explain(a, b, None),
    ):
        with pytest.raises(ValueError, match="Both dumps are of rank 0"):
            compare(Rank(0).dump(), Rank(0).dump())
        with pytest.raises(ValueError, match="of two jobs: of 2 ranks, and of 3"):
            compare(Rank(0).dump(), Rank(1, size=3).dump())
