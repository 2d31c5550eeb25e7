"""Checks of process sets: operations of some ranks, beside those of others."""

import contextlib
import time

import jax
import numpy as np
import optax

from jdp import eager
from jdp.eager import ProcessSet
from tests.eager import checks
from tests.eager.checks import Process, combine


@contextlib.contextmanager
def added(*sets):
    """Process sets that all ranks add, and remove at the end."""
    made = [eager.add_process_set(ranks) for ranks in sets]
    yield made
    for each in made:
        eager.remove_process_set(each)


def _even_and_odd(me: Process):
    return me.ranks[::2], me.ranks[1::2]


def every_collective_is_that_of_the_set(me: Process):
    with added(*_even_and_odd(me)) as sets:
        mine = sets[me.rank % 2]
        # Both sets use the same names.
        dtypes = ("int8", "int64", "bfloat16", "float32")
        trees = [checks.tensors(rank, dtypes) for rank in mine.ranks]
        tree = checks.tensors(me.rank, dtypes)
        place, count = mine.ranks.index(me.rank), len(mine.ranks)
        found = eager.all_reduce(tree, op="sum", name=me.name(), process_set=mine)
        me.expect(found, combine(sum, trees), "sum")
        found = eager.all_reduce(tree, name=me.name("mean"), process_set=mine)
        me.expect(found, checks.mean(trees), "average", ulps=me.ulps_of_mean)
        found = eager.grouped_all_reduce(
            list(tree.values()), op="max", name=me.name("group"), process_set=mine
        )
        expected = combine(lambda xs: np.maximum.reduce(xs), trees)
        me.expect(found, list(expected.values()), "group")

        x = np.full((me.rank + 1, 3), me.rank, np.int32)
        every = [np.full((rank + 1, 3), rank, np.int32) for rank in mine.ranks]
        found = eager.all_gather(x, name=me.name("gather"), process_set=mine)
        me.expect(found, np.concatenate(every), "gather")
        for root in mine.ranks:
            found = eager.broadcast(
                np.array([me.rank]), root=root, name=me.name("root"), process_set=mine
            )
            me.expect(found, np.array([root]), "broadcast")
        found, received = eager.all_to_all(
            np.repeat(np.arange(count), me.rank + 1),
            [me.rank + 1] * count,
            name=me.name("exchange"),
            process_set=mine,
        )
        me.expect(found, np.full(sum(rank + 1 for rank in mine.ranks), place), "exch.")
        me.expect(received, np.array([rank + 1 for rank in mine.ranks], np.int32))
        found = eager.reduce_scatter(
            np.arange(2 * count + 1), op="sum", name=me.name("sc"), process_set=mine
        )
        expected = np.array_split(np.arange(2 * count + 1) * count, count)[place]
        me.expect(found, expected, "scatter")
        found = eager.all_gather_object({"rank": me.rank}, process_set=mine)
        me.expect(found, [{"rank": rank} for rank in mine.ranks], "objects")
        eager.barrier(process_set=mine)


def a_set_does_not_wait_for_the_ranks_that_are_not_in_it(me: Process):
    with added(*_even_and_odd(me)) as sets:
        mine = sets[me.rank % 2]
        for turn in range(2):
            if me.rank % 2 == turn:
                for i in range(5):
                    x = np.full(3, me.rank + i)
                    found = eager.all_reduce(
                        x, op="sum", name=me.name("x"), process_set=mine
                    )
                    total = sum(mine.ranks) + i * len(mine.ranks)
                    me.expect(found, np.full(3, total))
            eager.barrier()


def sets_may_overlap_and_ranks_submit_in_any_order(me: Process):
    first, last = me.ranks[:-1], me.ranks[1:]
    with added(first, last) as sets:
        mine = [each for each in sets if me.rank in each.ranks]
        if me.rank % 2:
            mine.reverse()
        handles = {
            each: eager.all_reduce_async(
                np.array([me.rank, -me.rank]), name=me.name(), process_set=each
            )
            for each in mine
        }
        whole = eager.all_reduce(np.array([me.rank]), op="sum", name=me.name())
        me.expect(whole, np.array([sum(me.ranks)]), "all")
        for each, handle in handles.items():
            mean = sum(each.ranks) // len(each.ranks)
            me.expect(eager.synchronize(handle), np.array([mean, -mean]), f"{each}")


def a_set_of_one_rank_has_what_it_gives(me: Process):
    with added(*([rank] for rank in me.ranks)) as sets:
        mine = sets[me.rank]
        x = np.arange(6.0).reshape(3, 2) + me.rank
        given = x.copy()
        for call in (
            eager.all_reduce,
            eager.all_gather,
            eager.reduce_scatter,
            eager.all_to_all,
        ):
            found = call(given, name=me.name(call.__name__), process_set=mine)
            me.expect(found, x, call.__name__)
            found[...] = -1
        found = eager.broadcast(given, root=me.rank, name=me.name(), process_set=mine)
        me.expect(found, x, "broadcast")
        found[...] = -1
        me.expect(given, x, "the argument")
        found, received = eager.all_to_all(
            x, [2], name=me.name("two"), process_set=mine
        )
        me.expect(found, x[:2], "two rows")
        me.expect(received, np.array([2], np.int32))


def sets_are_what_their_ranks_are(me: Process):
    unsorted = ProcessSet([2, 0, 2])
    me.expect(list(unsorted.ranks), [0, 2])
    me.expect(
        [
            unsorted.process_set_id,
            unsorted.size(),
            unsorted.rank(),
            unsorted.included(),
        ],
        [None] * 4,
        "before it is added",
    )
    me.expect(eager.add_process_set(unsorted) is unsorted, True, "the same object")
    first = unsorted.process_set_id
    me.expect(unsorted.size(), 2)
    me.expect(unsorted.included(), me.rank in (0, 2))
    me.expect(unsorted.rank(), {0: 0, 2: 1}.get(me.rank), "place")
    me.expect(str(unsorted), f"ProcessSet(process_set_id={first}, ranks=[0, 2])")
    for ranks in ([0, 2], [2, 0], [0, 0, 2], me.ranks, list(me.ranks)[::-1]):
        me.expect_error(
            ValueError,
            ["Attempted to add a duplicate process set"],
            lambda r=ranks: eager.add_process_set(r),
        )
    me.expect_it_works()
    other = eager.add_process_set([1])
    ids = eager.all_gather(np.array([unsorted.process_set_id, other.process_set_id]))
    me.expect(
        ids, np.array([first, first + 1] * me.size), "the same numbers on all ranks"
    )
    # A number is given once.
    me.expect(eager.remove_process_set(unsorted), True)
    me.expect(unsorted.process_set_id, None)
    me.expect(unsorted.size(), None)
    fresh = eager.add_process_set([3, 0]).process_set_id
    me.expect(fresh, first + 2, "a new number")
    again = eager.add_process_set(unsorted)
    me.expect(again.process_set_id, first + 3)
    if unsorted.included():
        me.expect_it_works(unsorted)
    for each in (again, other):
        me.expect(eager.remove_process_set(each), True)
        me.expect(eager.remove_process_set(each), False, "removed twice")
    me.expect(eager.remove_process_set(ProcessSet([1, 2])), False, "not added")
    me.expect(eager.remove_process_set(eager.global_process_set), False, "that of all")
    everybody = eager.global_process_set
    me.expect(everybody.process_set_id, 0)
    me.expect([everybody.size(), everybody.rank()], [me.size, me.rank])
    me.expect(list(everybody.ranks), list(me.ranks))
    three = ProcessSet([0, 3])
    three.process_set_id = fresh
    me.expect(eager.remove_process_set(three), True, "by its number and ranks")
    me.expect_it_works()


def a_new_set_counts_calls_without_a_name_from_the_start(me: Process):
    # Rank 1 is in all sets, and the others each in some, so that their counts differ.
    for ranks in ((0, 1), (1, 2), (0, 1, 3), (1, 3)):
        with added(ranks) as (mine,):
            if not mine.included():
                continue
            for call in (eager.all_reduce_async, eager.grouped_all_reduce_async):
                handles = [
                    call([np.array(x)], op="sum", process_set=mine) for x in (1, 10)
                ]
                found = [eager.synchronize(handle) for handle in handles]
                expected = [[np.array(x * len(ranks))] for x in (1, 10)]
                me.expect(found, expected, call.__name__)
            everybody = eager.all_gather_object(me.rank, process_set=mine)
            me.expect(everybody, list(ranks), "objects")
            eager.barrier(process_set=mine)


def a_rank_that_adds_a_set_where_others_remove_one_is_an_error_of_all(me: Process):
    mine = eager.add_process_set([0, 1])

    def change():
        if me.rank == 0:
            eager.remove_process_set(mine)
        else:
            eager.add_process_set([0, 2])

    me.expect_error(
        RuntimeError,
        ["rank 0 has remove_process_set", "has add_process_set"],
        change,
    )
    if mine.included():
        me.expect_it_works(mine)
    me.expect(eager.remove_process_set(mine), True)
    me.expect_it_works()


def training_on_a_set_leaves_the_others_alone(me: Process):
    with added(me.ranks[:2]) as (mine,):
        tx = optax.sgd(0.5)
        params = jax.device_put({"w": np.ones(3, "f4"), "b": np.zeros((), "f4")})
        state = tx.init(params)
        for step in range(3):
            grads = jax.device_put(
                jax.tree.map(
                    lambda p, s=step: np.full(p.shape, me.rank + s, "f4"), params
                )
            )
            if mine.included():
                grads = eager.all_reduce(grads, name=me.name(), process_set=mine)
            updates, state = tx.update(grads, state)
            params = optax.apply_updates(params, updates)
        rank = 0.5 if mine.included() else me.rank  # The mean of 0 and 1.
        moved = np.float32(-0.5 * (3 * rank + 0 + 1 + 2))
        expected = {"w": np.ones(3, np.float32) + moved, "b": np.array(moved)}
        me.expect(jax.tree.map(np.array, params), expected)


def who_has_joined_is_missed_in_its_sets_alone(me: Process):
    with added(*_even_and_odd(me)) as sets:
        mine = sets[me.rank % 2]
        x = np.full(4, me.rank + 1.0)
        if me.rank != 0:
            rest = [rank for rank in mine.ranks if rank != 0]
            found = eager.all_reduce(x, op="sum", name=me.name(), process_set=mine)
            me.expect(found, np.full(4, sum(rest) + float(len(rest))), "sum")
            if me.rank % 2:
                found = eager.all_gather(x, name=me.name("g"), process_set=mine)
                me.expect(found, np.repeat([r + 1.0 for r in rest], 4), "gather")
            else:
                me.expect_error(
                    RuntimeError,
                    ["all_gather", "joined: [0]"],
                    lambda: eager.all_gather(x, name=me.name("g"), process_set=mine),
                )
        me.expect(eager.join() != 0, True, "the last to join")


def a_barrier_waits_for_the_ranks_of_its_set_alone(me: Process):
    with added(*_even_and_odd(me)) as sets:
        mine = sets[me.rank % 2]
        eager.barrier()
        if me.rank == 0:
            time.sleep(0.5)
        came_s = time.monotonic()
        eager.barrier(process_set=mine)
        left_s = time.monotonic()
        # One clock for all processes of a host.
        times = eager.all_gather(np.array([[came_s, left_s]]), name=me.name())
        came, left = times.T
        me.expect(bool((left[::2] >= came[0]).all()), True, "left before 0 came")
        me.expect(bool((left[1::2] < came[0]).all()), True, "the odd ones waited too")


def a_barrier_does_not_disturb_what_is_under_way(me: Process):
    handles = []
    for i in range(6):
        x = np.full(100, me.rank + i)
        handles.append(eager.all_reduce_async(x, op="sum", name=me.name(f"{i}")))
        if (i + me.rank) % 3 == 0:
            eager.barrier()
    total = sum(me.ranks)
    expected = [np.full(100, total + i * me.size) for i in range(6)]
    me.expect([eager.synchronize(handle) for handle in handles], expected)


CHECKS = (
    every_collective_is_that_of_the_set,
    a_set_does_not_wait_for_the_ranks_that_are_not_in_it,
    sets_may_overlap_and_ranks_submit_in_any_order,
    a_set_of_one_rank_has_what_it_gives,
    sets_are_what_their_ranks_are,
    a_new_set_counts_calls_without_a_name_from_the_start,
    a_rank_that_adds_a_set_where_others_remove_one_is_an_error_of_all,
    training_on_a_set_leaves_the_others_alone,
    who_has_joined_is_missed_in_its_sets_alone,
    a_barrier_waits_for_the_ranks_of_its_set_alone,
    a_barrier_does_not_disturb_what_is_under_way,
)
