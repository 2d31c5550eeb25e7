"""Checks of join: ranks that have no more data, and what the others get."""

import jax.numpy as jnp
import numpy as np

from jdp import eager
from jdp.eager import session
from tests.eager import checks
from tests.eager.checks import Process, combine, scale

_DTYPES = ("int32", "int64", "float16", "float32", "float64")


def _others(me: Process, first: int, **kwargs):
    dtypes = me.only(_DTYPES)
    return [checks.tensors(r, dtypes, **kwargs) for r in me.ranks if r != first]


def _end(me: Process, first: int) -> None:
    """All join; the last one is the same for all, and not the first."""
    last = eager.join()
    every = eager.all_gather(np.array([last]), name=me.name("last"))
    me.expect(every, np.full(me.size, last), "the last to join")
    me.expect(last != first and last in me.ranks, True, f"{last} is the last")


def who_has_joined_counts_as_zeros_and_the_divisor_stays(me: Process):
    for first in me.ranks:
        if me.rank != first:
            trees = _others(me, first)
            mine = checks.tensors(me.rank, me.only(_DTYPES))
            found = eager.all_reduce(mine, op="sum", name=me.name("sum"))
            me.expect(found, combine(sum, trees), "sum")
            found = eager.all_reduce(mine, name=me.name("average"))
            nothing = {key: np.zeros_like(x) for key, x in mine.items()}
            expected = checks.mean(trees + [nothing])
            me.expect(found, expected, "average", ulps=me.ulps_of_mean)
        _end(me, first)


def two_at_once_are_reduced_without_who_has_joined(me: Process):
    for first in me.ranks:
        if me.rank != first:
            a = np.arange(17, dtype=np.float32) + me.rank
            b = np.arange(23, dtype=np.float32) * me.rank
            handles = [
                eager.all_reduce_async(x, op="sum", name=me.name(key))
                for key, x in (("a", a), ("b", b))
            ]
            found = [eager.synchronize(handle) for handle in handles]
            rest = sum(me.ranks) - first
            count = me.size - 1
            base = np.arange(17, dtype=np.float32) * count + np.float32(rest)
            me.expect(found, [base, np.arange(23, dtype=np.float32) * rest])
        _end(me, first)


def who_has_joined_changes_no_minimum_maximum_or_product(me: Process):
    for first in me.ranks:
        if me.rank != first:
            every = _others(me, first, shapes=((17,),))
            small = {key: x % 3 + x.dtype.type(1) for key, x in every[0].items()}
            mine = checks.tensors(me.rank, me.only(_DTYPES), ((17,),))
            for op, ufunc in (("min", np.minimum), ("max", np.maximum)):
                found = eager.all_reduce(mine, op=op, prescale=2.0, name=me.name(op))
                expected = combine(lambda xs, u=ufunc: u.reduce(xs), every)
                me.expect(found, scale(expected, 2.0), op)
            found = eager.all_reduce(
                small, op="product", prescale=2.0, name=me.name("product")
            )
            expected = {key: (2 * x) ** (me.size - 1) for key, x in small.items()}
            me.expect(found, expected, "product")
        _end(me, first)


def a_group_is_reduced_without_who_has_joined(me: Process):
    if me.rank != 0:
        x = [np.full(4, me.rank, np.float32), np.full(3, 1, np.int32)]
        found = eager.grouped_all_reduce(x, op="sum", name=me.name("group"))
        total = np.full(4, sum(me.ranks), np.float32)
        me.expect(found, [total, np.full(3, me.size - 1, np.int32)])
        eager.barrier()  # It does not wait for who has joined either.
    _end(me, 0)


def what_moves_data_is_refused_once_a_rank_has_joined(me: Process):
    x = np.ones((me.size, 2), np.float32)
    calls = {
        "all_gather": eager.all_gather,
        "broadcast": eager.broadcast,
        "all_to_all": eager.all_to_all,
        "reduce_scatter": eager.reduce_scatter,
    }
    for kind, call in calls.items():
        expected = call(x, name=me.name(kind))
        if me.rank != 0:
            me.expect_error(
                RuntimeError,
                [kind, "not supported", "joined: [0]"],
                lambda c=call, k=kind: c(x, name=me.name(k)),
            )
            me.expect(
                eager.all_reduce(x, name=me.name(f"{kind} reduced")),
                x * (np.float32(me.size - 1) / np.float32(me.size)),
                kind,
                ulps=2,
            )
        _end(me, 0)
        me.expect(call(x, name=me.name(kind)), expected, f"{kind} afterwards")


def a_join_in_the_background_leaves_the_process_free(me: Process):
    last = me.size - 1
    for _ in range(2):
        eager.barrier()
        if me.rank != last:
            handle = eager.join_async()
        else:
            x = np.ones(2)
            found = eager.all_reduce(x, op="sum", name=me.name("alone"))
            me.expect(found, x, "the others count as zeros")
            handle = eager.join_async()
        me.expect(eager.synchronize(handle), last)


def names_that_nobody_gave_are_the_same_after_a_join(me: Process):
    for first in me.ranks:
        if me.rank != first:
            eager.barrier()
            eager.all_reduce(np.ones(2), op="sum")
        _end(me, first)
        eager.barrier()
        found = eager.all_reduce(np.ones(2), op="sum")
        me.expect(found, np.full(2, float(me.size)), "all are there")


def all_may_join_at_once_and_again(me: Process):
    for _ in range(3):
        last = eager.join()
        every = eager.all_gather(np.array([last]), name=me.name("last"))
        me.expect(every, np.full(me.size, last))
        me.expect_it_works()


def who_has_joined_changes_nothing_in_any_dtype(me: Process):
    names = ("int4", "uint4", "int2", "uint8", "float8_e4m3fn", "float8_e4m3fnuz")
    names += ("float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "bfloat16")
    ones = {name: np.ones(3, jnp.dtype(name)) for name in names}

    def expect_ones(found, text):
        for name, x in found.items():
            me.expect_equal(x.dtype.name, name, text)
            me.expect(x.astype(np.float32), np.ones(3, np.float32), f"{text} {name}")

    if me.rank != 0:
        for op in ("min", "max", "product"):
            expect_ones(eager.all_reduce(ones, op=op, name=me.name(op)), op)
        powers = ones.pop("float8_e8m0fnu")
        me.expect_error(
            RuntimeError,
            ["sum of float8_e8m0fnu, which has no zero", "joined: [0]"],
            lambda: eager.all_reduce(powers, op="sum", name=me.name("no zero")),
        )
        if me.size == 2:
            expect_ones(eager.all_reduce(ones, op="sum", name=me.name("sum")), "sum")
    _end(me, 0)


def sets_stay_as_they_are_once_a_rank_has_joined(me: Process):
    first = eager.add_process_set([0])
    if me.rank != 0:
        for kind, call in (
            ("add_process_set", lambda: eager.add_process_set([1])),
            ("remove_process_set", lambda: eager.remove_process_set(first)),
        ):
            words = [kind, "not supported after a rank has joined", "joined: [0]"]
            me.expect_error(RuntimeError, words, call)
    _end(me, 0)
    second = eager.add_process_set([1])
    me.expect_equal(eager.remove_process_set(second), True)
    me.expect_equal(eager.remove_process_set(first), True)


def what_a_rank_that_has_joined_is_refused_does_not_count(me: Process):
    engine = session.current_engine()
    if me.rank == 0:
        engine.intake.refusal = (
            "This process has called `join`"  # No time to join meanwhile.
        )
        for call in (
            eager.barrier,
            lambda: eager.all_reduce(np.ones(2)),
            lambda: eager.grouped_all_reduce([np.ones(2)]),
            lambda: eager.all_to_all(np.ones(me.size)),
            lambda: eager.broadcast_object(1),
            lambda: eager.add_process_set([0]),
        ):
            me.expect_error(RuntimeError, ["has called `join`"], call)
        engine.intake.refusal = ""
    eager.barrier()
    eager.all_reduce(np.ones(2))
    eager.grouped_all_reduce([np.ones(2)])
    eager.all_to_all(np.ones(me.size))
    eager.broadcast_object(1)
    eager.remove_process_set(eager.add_process_set([0]))
    me.expect_it_works()


CHECKS = (
    who_has_joined_changes_nothing_in_any_dtype,
    sets_stay_as_they_are_once_a_rank_has_joined,
    what_a_rank_that_has_joined_is_refused_does_not_count,
    who_has_joined_counts_as_zeros_and_the_divisor_stays,
    two_at_once_are_reduced_without_who_has_joined,
    who_has_joined_changes_no_minimum_maximum_or_product,
    a_group_is_reduced_without_who_has_joined,
    what_moves_data_is_refused_once_a_rank_has_joined,
    a_join_in_the_background_leaves_the_process_free,
    names_that_nobody_gave_are_the_same_after_a_join,
    all_may_join_at_once_and_again,
)
