"""The protocol of the eager engine: one order for all, whoever comes when."""

import collections
import itertools
import random
import re
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.eager.coordinator.coordinator import ProtocolError
from jdp.eager.messages import FromRank, Request, Spec, encode_spec
from tests import rarely
from tests.eager.simulation import Job, all_gather, all_reduce

ORDERS = list(itertools.permutations(range(3)))


def _names(job, rank=0):
    return [name for _, names, _ in job.executed[rank] for name in names]


@pytest.mark.parametrize("order", ORDERS)
def test_a_name_runs_once_all_have_submitted_it(order):
    job = Job(3)
    for i, rank in enumerate(order):
        job.submit(rank, all_reduce("a"))
        job.settle()
        assert _names(job) == (["a"] if i == 2 else [])
    assert job.executed == [[(0, ("a",), "")]] * 3


def test_all_execute_in_one_order_whatever_the_order_of_submission():
    job = Job(2, fusion_bytes=0)
    job.submit(0, all_reduce("a"), all_reduce("b"), all_reduce("c"))
    job.submit(1, all_reduce("c"), all_reduce("a"), all_reduce("b"))
    job.settle()
    assert _names(job, 0) == _names(job, 1) == ["c", "a", "b"]


def test_like_operations_run_as_one():
    job = Job(2)
    names = [all_reduce(x) for x in "ab"] + [all_reduce("c", dtype="float64")]
    for rank in range(2):
        job.submit(rank, *names, all_gather("d", 1), all_reduce("e"))
    job.settle()
    assert [names for _, names, _ in job.executed[1]] == [
        ("a", "b", "e"),
        ("c",),
        ("d",),
    ]


def test_a_warm_step_sends_no_names():
    job = Job(4)
    step = [all_reduce(f"grad{i}") for i in range(100)]
    for k in range(5):
        order = random.Random(k)
        for rank in range(4):
            job.submit(rank, *order.sample(step, len(step)))
        job.settle()
        assert job.num_full == 400
        assert sorted(_names(job, 3)[100 * k :]) == sorted(r.name for r in step)
    warm = job.submit(0, *step) or job.to_coordinator[0][0]
    assert warm.requests == () and len(warm.hits) <= 13


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"dtype": "int32"},
            "data types of 'a': rank 0 has float32, but rank 1 has",
        ),
        (
            {"kind": "broadcast", "op": "", "root": 0},
            "operations of 'a': rank 0 has all_reduce, but rank 1",
        ),
        (
            {"shape": (5,)},
            "shapes of 'a': rank 0 has [4], but rank 1 has [5]",
        ),
        ({"shape": (2, 2)}, "rank 0 has [4], but rank 1 has [2, 2]"),
        ({"prescale": 2.0}, "factors of 'a': rank 0 has (1, 1), but rank 1 has (2,"),
        (
            {"op": "min"},
            "operations of 'a': rank 0 has sum, but rank 1 has min",
        ),
        ({"device": "gpu"}, "devices of 'a': rank 0 has cpu, but rank 1 has gpu"),
        ({"group": "g", "group_size": 2}, "groups of 'a': rank 0 has none, but rank 1"),
        ({"fingerprint": "f"}, "programs of 'a'"),
    ],
)
def test_what_differs_is_an_error_on_every_rank_and_nothing_else(changes, text):
    job = Job(3)
    for rank in range(3):
        job.submit(rank, all_reduce("a", **(changes if rank == 1 else {})))
        job.submit(rank, all_reduce("b"))
    job.settle()
    for rank in range(3):
        errors = [error for _, names, error in job.executed[rank] if names == ("a",)]
        assert len(errors) == 1 and errors[0].startswith("Mismatched ")
        assert text in errors[0]
        assert "b" in _names(job, rank)
        job.submit(rank, all_reduce("a"))  # The engine goes on.
    job.settle()
    assert job.executed[2][-1] == (0, ("a",), "")


def test_roots_that_differ_are_an_error():
    job = Job(3)
    for rank in range(3):
        changes = {"kind": "broadcast", "op": "", "root": rank // 2}
        job.submit(rank, all_reduce("a", **changes))
    job.settle()
    assert "root ranks of 'a': rank 0 has 0, but rank 2 has 1" in job.executed[1][0][2]


def test_first_dimensions_of_a_gather_may_differ_and_all_are_told():
    job = Job(3)
    for _ in range(2):  # The second time from the cache.
        for rank in range(3):
            job.submit(rank, all_gather("g", 10 + rank))
        batch_before = job.num_full
        job.settle()
    assert batch_before == job.num_full == 3
    whole = job.caches[1]._slots[0]
    assert whole.locals == ((10,), (11,), (12,))
    # Another number of rows is another request.
    for rank in range(3):
        job.submit(rank, all_gather("g", 10 + rank + (rank == 2)))
    job.settle()
    assert job.caches[0]._slots[job.caches[0]._slot_of[0, "g"]].locals[2] == (13,)
    assert len(_names(job)) == 3


def test_a_spec_that_changes_takes_its_slot_back():
    job = Job(2)
    for shape in ((4,), (4,), (8,), (8,), (4,)):
        for rank in range(2):
            job.submit(rank, all_reduce("a", shape=shape))
        job.settle()
    assert len(_names(job)) == 5
    # One rank alone has changed: an error, from its request and the other's bit.
    job.submit(0, all_reduce("a", shape=(4,)))
    job.submit(1, all_reduce("a", shape=(6,)))
    job.settle()
    assert "[4], but rank 1 has [6]" in job.executed[0][-1][2]


def test_a_bit_that_is_on_its_way_when_its_slot_is_taken_back_counts():
    job = Job(2)
    for rank in range(2):
        job.submit(rank, all_reduce("a"))
    job.settle()
    job.submit(0, all_reduce("a"))  # a bit, late.
    job.submit(1, all_reduce("a", shape=(9,)))
    job.deliver(1)
    job.decide()
    job.hear(1)
    job.settle()
    assert "[9], but rank 0 has [4]" in job.executed[0][-1][2]
    assert len(job.executed[0]) == len(job.executed[1]) == 2


@pytest.mark.parametrize("capacity", [0, 1, 2, 5])
def test_a_small_cache_is_only_slower(capacity):
    job = Job(3, cache_capacity=capacity)
    rng = random.Random(capacity)
    for _ in range(30):
        names = rng.sample("abcdefgh", 4)
        for rank in range(3):
            job.submit(rank, *(all_reduce(n) for n in rng.sample(names, 4)))
        job.settle()
    for rank in range(3):
        assert len(job.caches[rank]._slots) <= capacity
        assert len(_names(job, rank)) == 120
    assert job.executed[0] == job.executed[1] == job.executed[2]


def _cpu_s_of_new_names(num_names, num_rounds):
    """CPU time of rounds of names that fill a cache, and never come again."""
    job = Job(1, cache_capacity=num_names)
    begin_s = time.process_time()
    for step in range(num_rounds):
        job.submit(0, *[all_reduce(f"{step}.{i}") for i in range(num_names)])
        job.settle()
    return time.process_time() - begin_s


def test_a_new_name_costs_no_more_where_there_are_many():
    _cpu_s_of_new_names(512, 8)
    few_s = _cpu_s_of_new_names(512, 96)
    many_s = _cpu_s_of_new_names(16_384, 3)
    assert many_s < 3 * few_s


def test_what_is_used_most_recently_stays():
    job = Job(1, cache_capacity=2)
    for name in "abacac":
        job.submit(0, all_reduce(name))
        job.settle()
    assert (0, "a") in job.caches[0]._slot_of


def test_a_group_runs_together_or_not_at_all():
    job = Job(2, fusion_bytes=0)
    group = [all_reduce(x, group="g", group_size=3) for x in "abc"]
    for _ in range(2):  # The second time from the cache.
        before = len(_names(job))
        job.submit(0, *group, all_reduce("x"))
        job.submit(1, group[2], all_reduce("x"), group[0])
        job.settle()
        assert _names(job)[before:] == ["x"]
        job.submit(1, group[1])
        job.settle()
        assert sorted(_names(job)[before + 1 :]) == ["a", "b", "c"]


def test_a_mistake_in_a_group_is_an_error_of_all_of_it():
    job = Job(2)
    for rank, dtype in enumerate(("float32", "int32")):
        group = [all_reduce(x, group="g", group_size=2) for x in "a"]
        group.append(all_reduce("b", group="g", group_size=2, dtype=dtype))
        job.submit(rank, *group)
    job.settle()
    errors = {names: error for _, names, error in job.executed[1]}
    assert set(errors) == {("a",), ("b",)}
    assert all("data types of 'b'" in error for error in errors.values())


def _group(names, *, size=None, dtypes=None, group="g"):
    return [
        all_reduce(
            name,
            group=group if size != 0 else "",
            group_size=len(names) if size is None else size,
            dtype=(dtypes or {}).get(name, "float32"),
        )
        for name in names
    ]


_BROKEN = {
    "one has more leaves": ("ab", "abc", {}, "Mismatched groups of 'a'"),
    "one has fewer leaves": ("abc", "ab", {}, "Mismatched groups of 'a'"),
    "one has another leaf": (
        "ab",
        "ac",
        {},
        "of 'g', rank 0 has [bc], a, but rank [12] has",
    ),
    "dtypes differ too": ("ab", "abc", {"a": "int32"}, "Mismatched"),
    "one has no group": ("ab", "a", None, "Mismatched groups of 'a'.*has none"),
}


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("case", _BROKEN)
def test_nothing_is_left_of_a_group_that_ranks_do_not_agree_on(
    case, is_cached, is_turned
):
    ours, theirs, dtypes, text = _BROKEN[case]
    requests = [_group(ours)] * 2
    requests.append(_group(theirs, size=0 if dtypes is None else None, dtypes=dtypes))
    if is_turned:
        requests.reverse()
    _check_that_nothing_is_left(requests, text, is_cached=is_cached)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "leaves", [("ab", "bc", "ca"), ("ab", "cd", "ef"), ("ab", "ab", "c"), "abc"]
)
def test_nothing_is_left_of_a_group_without_a_leaf_on_all_ranks(
    leaves, order, is_cached
):
    requests = [_group(leaves[i]) for i in order]
    text = "Mismatched groups: of 'g', rank 0 has .*, but rank [12] has .*\\."
    _check_that_nothing_is_left(requests, text, is_cached=is_cached)


def _check_that_nothing_is_left(requests, text, *, is_cached):
    job = Job(3)
    if is_cached:
        for each in requests:  # All agree on the one, and then on the other.
            for rank in range(3):
                job.submit(rank, *each)
            job.settle()
    for rank, each in enumerate(requests):
        before = len(job.executed[rank])
        job.submit(rank, *each)
        if rank < 2:  # No rank hears of it before all have come.
            job.settle()
            assert len(job.executed[rank]) == before
    job.settle()
    for rank, each in enumerate(requests):
        mine = {request.name for request in each}
        failed = {
            name: error
            for _, names, error in job.executed[rank][before:]
            for name in names
        }
        assert mine <= failed.keys() and all(failed.values())
        assert re.search(text, " ".join(failed.values()))
    assert not job.coordinator.has_waiting
    for rank in range(3):
        job.submit(rank, *_group("abc"))
    job.settle()
    for executed in job.executed:
        assert sorted(executed[-1][1]) == ["a", "b", "c"] and not executed[-1][2]


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("theirs", ["ac", "cd", "a", "abc", "c", "cde"])
@pytest.mark.parametrize("when", ["before", "after", "last"])
def test_other_leaves_than_those_of_a_rank_that_has_joined_are_an_error(
    theirs, when, is_cached
):
    job = Job(3)
    if is_cached:
        for names in ("ab", theirs):
            for rank in range(3):
                job.submit(rank, *_group(names))
            job.settle()
    before = len(job.executed[2])
    if when == "before":
        job.submit(2, *_group("ab"), joined=True)
        job.settle()
    # At last all have joined before the coordinator decides anything.
    for rank in range(2):
        job.submit(rank, *_group(theirs), joined=when == "last")
    if when == "before":
        job.settle()
    else:
        job.submit(2, *_group("ab"), joined=True)
    job.settle()
    for executed in job.executed:
        failed = {n: error for _, names, error in executed[before:] for n in names}
        assert set(failed) == {*"ab", *theirs}
        assert all("Mismatched groups" in error for error in failed.values())
    if when != "last":
        for rank in range(2):
            job.submit(rank, joined=True)
        job.settle()
    assert len(set(map(tuple, job.last_joined))) == 1 and len(job.last_joined[0]) == 1
    assert not job.coordinator.has_waiting
    before = len(job.executed[2])
    for rank in range(3):
        job.submit(rank, *_group("ab"))
    job.settle()
    for executed in job.executed:
        ran = [name for _, names, error in executed[before:] for name in names]
        assert sorted(ran) == ["a", "b"] and not executed[-1][2]


@pytest.mark.parametrize("cached", rarely.cases(["", "a", "b", "ab"], often=("", "a")))
def test_leaves_of_ranks_that_have_all_joined_run_only_if_they_are_the_same(cached):
    """All ways in which three ranks can submit leaves of a group before they join."""
    choices = ["", "a", "b", "c", "ab", "ac", "bc", "abc"]
    for leaves in itertools.product(choices, repeat=3):
        for order in itertools.permutations(range(3)):
            job = Job(3)
            for names in {cached, *cached} - {""}:
                for rank in range(3):
                    job.submit(rank, *_group(names))
                job.settle()
            before = len(job.executed[0])
            for rank in order:
                job.submit(rank, *_group(leaves[rank]), joined=True)
            job.settle()
            (done, *others) = [executed[before:] for executed in job.executed]
            assert all(other == done for other in others), (leaves, order)
            found = {name: error for _, names, error in done for name in names}
            assert found.keys() == set("".join(leaves)), (leaves, order)
            is_same = len({*leaves} - {""}) == 1
            assert all(bool(error) != is_same for error in found.values()), (
                leaves,
                order,
            )
            assert not job.coordinator.has_waiting


@pytest.mark.parametrize("when", ["before", "last"])
def test_the_same_leaves_as_those_of_a_rank_that_has_joined_run(when):
    job = Job(3)
    for k in range(3):  # By name, and then by slot.
        job.submit(2, *_group("ab"), joined=True)
        if when == "before":
            job.settle()
        for rank in range(2):
            job.submit(rank, *_group("ab"), joined=when == "last")
        job.settle()
        for rank in range(2) if when == "before" else ():
            job.submit(rank, *_group("cd"))
            job.submit(rank, joined=True)
        job.settle()
        assert all(len(each) == k + 1 for each in job.last_joined)
    assert not any(error for executed in job.executed for *_, error in executed)
    assert not job.coordinator.has_waiting


def test_those_that_have_not_joined_hear_that_their_leaves_differ():
    job = Job(3)
    for rank, names in ((0, "ab"), (1, "bc")):
        job.submit(rank, *_group(names))
    job.settle()
    assert not job.executed[0]
    job.submit(2, joined=True)
    job.settle()
    for rank in range(2):
        assert len(job.executed[rank]) == 3
        assert all("rank 0 has a, b, but" in text for *_, text in job.executed[rank])
        job.submit(rank, *_group("ab"))
    job.settle()
    assert job.executed[1][-1] == (0, ("a", "b"), "")


def test_a_group_whose_process_set_goes_with_it_fails():
    job = Job(2, sets={1: (0, 1)})
    for rank, names in enumerate(("ab", "abc")):
        group = [request_of(each, 1) for each in _group(names)]
        removal = Request("r", encode_spec(Spec("remove_process_set", shape=(1,))))
        job.submit(rank, removal, *group)
    job.settle()
    for executed in job.executed:
        failed = {name for _, names, error in executed for name in names if error}
        assert {"a", "b"} <= failed
    assert not job.coordinator.has_waiting


def test_a_leaf_that_fails_with_one_group_fails_the_group_that_another_rank_has_it_in():
    job = Job(3)
    job.submit(0, *_group("ac"))
    others = [all_reduce(name, group="h", group_size=2) for name in "cd"]
    job.submit(1, *_group("ab"), *others)
    job.submit(2, all_reduce("a"))
    job.settle()
    failed = {names: error for _, names, error in job.executed[1]}
    assert set(failed) == {("a",), ("b",), ("c",), ("d",)} and all(failed.values())
    assert not job.coordinator.has_waiting


@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_ready_in_the_turn_in_which_its_process_set_goes_breaks_nothing(
    is_first,
):
    job = Job(2, sets={1: (0, 1)})
    both = [
        all_reduce("x", process_set=1),
        Request("r", encode_spec(Spec("remove_process_set", shape=(1,)))),
    ]
    for rank in range(2):
        job.submit(rank, *(both if is_first else both[::-1]))
    job.settle()
    for executed in job.executed:
        errors = {name: error for _, names, error in executed for name in names}
        assert not errors["r"] and is_first == (not errors["x"])
    assert not job.coordinator.has_waiting
    for rank in range(2):
        job.submit(rank, all_reduce("y"))
    job.settle()
    assert [each[-1] for each in job.executed] == [(0, ("y",), "")] * 2


def request_of(request, process_set):
    return Request(request.name, request.spec, process_set)


def test_a_group_that_never_completes_is_named():
    job = Job(2)
    for rank in range(2):
        job.submit(rank, all_reduce("a", group="g", group_size=2))
    job.settle()
    assert not job.executed[0]
    (stall,) = job.coordinator.find_stalls(now_s=61.0, after_s=60.0)
    assert stall.name == "group 'g', of which only a came" and stall.missing == ()


def test_slots_of_a_held_group_are_not_given_away():
    job = Job(1, cache_capacity=2)
    group = [all_reduce(x, group="g", group_size=2) for x in "ab"]
    job.submit(0, *group)
    job.settle()
    job.submit(0, group[0])
    for name in "xyz":
        job.submit(0, all_reduce(name))
        job.settle()
    job.submit(0, group[1])
    job.settle()
    assert sorted(_names(job)) == ["a", "a", "b", "b", "x", "y", "z"]


@pytest.mark.parametrize("fuse_groups", [True, False])
def test_an_option_keeps_groups_to_themselves(fuse_groups):
    job = Job(1, fuse_groups=fuse_groups)
    job.submit(0, all_reduce("x"), all_reduce("a", group="g", group_size=1))
    job.settle()
    runs = [names for _, names, _ in job.executed[0]]
    assert runs == ([("x", "a")] if fuse_groups else [("x",), ("a",)])


# --- Join ---------------------------------------------------------------------------


def test_who_has_joined_is_not_waited_for():
    job = Job(3)
    job.submit(0, all_reduce("a"))
    job.submit(1, joined=True)
    job.settle()
    assert not job.executed[0]
    job.submit(2, all_reduce("a"))
    job.settle()
    # Also on the rank that has joined: it contributes zeros.
    assert job.executed == [[(0, ("a",), "")]] * 3
    for rank in (0, 2):
        job.submit(rank, all_reduce("a"))  # from the cache.
    job.settle()
    assert job.executed[1] == [(0, ("a",), "")] * 2


def test_what_waited_for_the_one_that_joins_runs():
    job = Job(3)
    job.submit(0, all_reduce("a"))
    job.submit(2, all_reduce("a"))
    job.settle()
    job.submit(1, joined=True)
    job.settle()
    assert _names(job) == ["a"]


@pytest.mark.parametrize("order", ORDERS)
def test_join_returns_the_last_rank_everywhere_and_can_be_done_again(order):
    job = Job(3)
    for _ in range(2):
        for rank in order:
            job.submit(rank, joined=True)
            job.settle()
    assert job.last_joined == [[order[-1]] * 2] * 3
    for rank in range(3):
        job.submit(rank, all_reduce("a"))
    job.settle()
    assert _names(job) == ["a"]


def test_what_joined_ranks_cannot_take_part_in_is_an_error():
    job = Job(2)
    job.submit(1, joined=True)
    job.submit(0, all_gather("g", 3))
    job.settle()
    (error,) = [error for _, _, error in job.executed[0]]
    assert error == (
        "all_gather of 'g' is not supported after a rank has joined; joined: [1]."
    )
    job.submit(0, joined=True)
    job.settle()
    assert job.last_joined == [[0], [0]]
    for rank in range(2):
        job.submit(rank, all_gather("g", 3))
    job.settle()
    assert job.executed[0][-1] == (0, ("g",), "")
    job.submit(1, joined=True)
    job.submit(0, all_gather("g", 3))  # from the cache.
    job.settle()
    assert job.executed[0][-1] == (0, ("g",), error)


# --- Process sets -------------------------------------------------------------------


def test_sets_run_in_parallel_under_like_names():
    job = Job(4, sets={1: (0, 2), 2: (1, 3)})
    for _ in range(2):
        job.submit(0, all_reduce("a", process_set=1))
        job.submit(2, all_reduce("a", process_set=1))
        job.submit(1, all_reduce("a", process_set=2))
        job.settle()
        assert job.executed[0][-1] == (1, ("a",), "")
        job.submit(3, all_reduce("a", process_set=2))
        job.settle()
    assert job.executed[0] == job.executed[2] == [(1, ("a",), "")] * 2
    assert job.executed[1] == job.executed[3] == [(2, ("a",), "")] * 2


# --- Who says what it must not, or is late ------------------------------------------


def test_a_rank_that_breaks_the_protocol_is_named():
    job = Job(2, sets={1: (1,)})
    job.submit(0, all_reduce("a"))
    job.deliver(0)
    with pytest.raises(ProtocolError, match="rank 0 has submitted 'a' twice"):
        job.coordinator.receive(0, FromRank(0, (all_reduce("a"),)), now_s=0.0)
    with pytest.raises(ProtocolError, match="rank 0 is not in process set 1"):
        job.coordinator.receive(
            0, FromRank(0, (all_reduce("b", process_set=1),)), now_s=0.0
        )
    with pytest.raises(ProtocolError, match="rank 1 has submitted the empty slot 3"):
        job.coordinator.receive(1, FromRank(0, (), b"\x08"), now_s=0.0)


def test_who_is_missing_is_named_also_for_cached_names():
    job = Job(3)
    for rank in range(3):
        job.submit(rank, all_reduce("a"))
    job.settle()
    job.submit(0, all_reduce("a"), all_reduce("new"))
    job.submit(2, all_reduce("new"))
    job.settle()
    find = job.coordinator.find_stalls
    assert find(now_s=1.0, after_s=60.0) == []
    found = {stall.name: stall for stall in find(now_s=70.0, after_s=60.0)}
    assert found["new"].missing == (1,) and found["a"].missing == (1, 2)
    assert found["new"].waited_s == 70.0 and found["a"].waited_s == 69.0
    for rank in (1, 2):
        job.submit(rank, all_reduce("a"))
    job.settle()
    assert {stall.name for stall in find(now_s=99.0, after_s=60.0)} == {"new"}


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_name_of_each_step_that_waits_at_each_look_is_no_stall(is_cached):
    job = Job(2, cache_capacity=1024 if is_cached else 0)
    find = job.coordinator.find_stalls
    for step in range(100):
        job.now_s = float(step)
        job.submit(0, all_reduce("loss"))
        job.settle()
        late = find(now_s=job.now_s, after_s=0.0)
        assert [stall.missing for stall in late] == [(1,)]
        assert late[0].waited_s == 0.0
        job.submit(1, all_reduce("loss"))
        job.settle()
    # One that then waits is counted from its own submission.
    job.submit(0, all_reduce("loss"))
    job.settle()
    assert [stall.waited_s for stall in find(now_s=99.0, after_s=0.0)] == [0.0]
    assert [stall.waited_s for stall in find(now_s=160.0, after_s=60.0)] == [61.0]


def test_a_slot_that_is_ready_and_not_decided_is_no_stall():
    job = Job(2)
    for rank in range(2):
        job.submit(rank, all_reduce("a"))
    job.settle()
    for rank in range(2):
        job.submit(rank, all_reduce("a"))
        job.deliver(rank)
    assert job.coordinator.find_stalls(now_s=99.0, after_s=0.0) == []


def test_what_is_refused_is_not_taken_for_lost_before_it_is_said():
    job = Job(2, sets={1: (0, 1)})
    remove = Request("r", encode_spec(Spec("remove_process_set", shape=(1,))))
    for rank in range(2):
        job.submit(rank, remove)
        job.deliver(rank)
    job.decide()
    job.submit(0, all_reduce("late", process_set=1))  # It has not heard of it.
    job.deliver(0)
    doubts = ((1, "late", 7), (1, "never said", 8))
    assert job.coordinator.find_unknown(0, doubts) == doubts[1:]
    (response,) = job.decide().responses
    assert response.names == ("late",) and "was removed" in response.error
    assert job.coordinator.find_unknown(0, doubts) == doubts


def test_one_that_leaves_ends_all():
    job = Job(2)
    why = "rank 1 has shut the engine down"
    job.submit(1, all_reduce("a"), leaves=True)
    job.deliver(1)
    assert job.decide().closing == why
    # What the other one has submitted meanwhile runs first.
    job.submit(0, all_reduce("a"), is_last=True)
    job.deliver(0)
    batch = job.decide()
    assert [r.names for r in batch.responses] == [("a",)]
    assert batch.stop == why and batch.is_asked


# --- All orders ---------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    capacity=st.integers(0, 6),
    fusion_bytes=st.sampled_from([0, 16, 40, 1 << 20]),
)
def test_every_schedule_runs_everything_once_in_one_order(
    seed, size, capacity, fusion_bytes
):
    rng = random.Random(seed)
    job = Job(size, cache_capacity=capacity, fusion_bytes=fusion_bytes)
    # Every rank submits every name as often, in an order of its own; now and then a
    # name changes its shape, everywhere.
    rounds = []
    for _ in range(rng.randint(1, 6)):
        names = rng.sample("abcdefg", rng.randint(1, 7))
        rounds.append([all_reduce(n, shape=(rng.randint(1, 2),)) for n in names])
    plans = [
        [x for each in rounds for x in rng.sample(each, len(each))] for _ in range(size)
    ]
    job.run_randomly(plans, rng)
    assert all(executed == job.executed[0] for executed in job.executed)
    assert not any(error for _, _, error in job.executed[0])
    expected = collections.Counter(x.name for each in rounds for x in each)
    assert collections.Counter(_names(job)) == expected
    assert all(len(cache._slots) <= capacity for cache in job.caches)


def test_256_ranks_negotiate_1000_names_in_a_second():
    size, names = 256, [f"layers.{i}.weight" for i in range(1000)]
    spec = encode_spec(Spec("all_reduce", "float32", (1024,), op="average"))
    rng = random.Random(0)
    messages = [
        msgspec.msgpack.encode(
            FromRank(0, tuple(Request(n, spec) for n in rng.sample(names, len(names))))
        )
        for _ in range(size)
    ]
    job = Job(size)
    decoder = msgspec.msgpack.Decoder(FromRank)
    start_s = time.process_time()
    for rank, message in enumerate(messages):
        job.coordinator.receive(rank, decoder.decode(message), now_s=0.0)
    batch = job.coordinator.decide(now_s=0.0)
    seconds = time.process_time() - start_s
    assert sum(len(response.names) for response in batch.responses) == 1000
    assert seconds < 1.0, seconds
