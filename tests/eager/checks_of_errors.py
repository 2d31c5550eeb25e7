"""Checks of errors: what ranks hear that ask for different or impossible things."""

import math
import re
import time
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

from jdp import eager
from jdp.eager import ProcessSet
from tests.eager import checks_of_sets
from tests.eager.checks import Process

KINDS = {
    "all_reduce": eager.all_reduce,
    "all_gather": eager.all_gather,
    "broadcast": eager.broadcast,
    "all_to_all": eager.all_to_all,
    "reduce_scatter": eager.reduce_scatter,
}
ASYNC = {
    "all_reduce": eager.all_reduce_async,
    "all_gather": eager.all_gather_async,
    "broadcast": eager.broadcast_async,
    "all_to_all": eager.all_to_all_async,
    "reduce_scatter": eager.reduce_scatter_async,
}


def _differ(me: Process, what, value_of, call, name) -> None:
    """Calls what must fail on every rank, with two ranks and what each has.

    Args:
      what: that differs, as it is called.
      value_of: what a rank has, as it is written.
      call: with `name=`; a correct call of the name has come before, or not.
    """
    try:
        value = call(name=name)
        me.expect_equal(value, "an error", name)
    except RuntimeError as error:
        pattern = (
            r"Mismatched (.*) of '(.*)': rank (\d) has (.*), but rank (\d) has (.*)\."
        )
        match = re.fullmatch(pattern, str(error))
        if match is None:
            me.expect_equal(str(error), pattern)
        else:
            a, b = int(match[3]), int(match[5])
            found = (match[1], match[2], match[4], match[6])
            me.expect_equal(found, (what, name, value_of(a), value_of(b)))
            me.expect_equal(value_of(a) != value_of(b), True)
    me.expect_it_works()


def shapes_differ(me: Process):
    for kind in ("all_reduce", "broadcast", "reduce_scatter"):
        name = me.name(kind)
        KINDS[kind](np.ones((17, 17, 17), np.float32), name=name)
        shape = [17 + me.rank] * 3
        _differ(
            me,
            f"{kind} shapes",
            lambda rank: str([17 + rank] * 3),
            lambda name, k=kind, s=shape: KINDS[k](np.ones(s, np.float32), name=name),
            name,
        )


def as_many_elements_in_another_shape_are_not_the_same(me: Process):
    shapes = ([17, 23 * 57], [17, 23, 57])
    for kind in ("all_reduce", "broadcast", "reduce_scatter"):
        _differ(
            me,
            f"{kind} shapes",
            lambda rank: str(shapes[rank % 2]),
            lambda name, k=kind: KINDS[k](
                np.ones(shapes[me.rank % 2], np.float32), name=name
            ),
            me.name(kind),
        )


def dtypes_differ(me: Process):
    dtypes = ("int32", "float32")
    for kind in KINDS:
        name = me.name(kind)
        KINDS[kind](np.ones((me.size, 2), np.float32), name=name)
        x = np.ones((me.size, 2), dtypes[me.rank % 2])
        _differ(
            me,
            "data types",
            lambda rank: dtypes[rank % 2],
            lambda name, k=kind, x=x: KINDS[k](x, name=name),
            name,
        )


def operations_differ(me: Process):
    x = np.ones((me.size, 2), np.float32)
    kinds = ("all_reduce", "all_gather", "broadcast")
    name = me.name()
    eager.all_reduce(x, name=name)
    _differ(
        me,
        "operations",
        lambda rank: kinds[rank % 3],
        lambda name: KINDS[kinds[me.rank % 3]](x, name=name),
        name,
    )


def factors_differ(me: Process):
    x = np.ones((me.size, 2), np.float32)
    for kind in ("all_reduce", "reduce_scatter"):
        _differ(
            me,
            "prescale and postscale factors",
            lambda rank: f"({rank + 2}, 0.5)",
            lambda name, k=kind: KINDS[k](
                x, prescale=me.rank + 2.0, postscale=0.5, name=name
            ),
            me.name(f"pre {kind}"),
        )
        _differ(
            me,
            "prescale and postscale factors",
            lambda rank: f"(1, {rank + 1})",
            lambda name, k=kind: KINDS[k](x, postscale=me.rank + 1.0, name=name),
            me.name(f"post {kind}"),
        )


def reductions_differ(me: Process):
    x = np.ones((me.size, 2), np.float32)
    for kind, ops in (
        ("all_reduce", ("sum", "min", "product")),
        ("reduce_scatter", ("sum", "average", "sum")),
    ):
        _differ(
            me,
            "reduction operations",
            lambda rank, o=ops: o[rank % 3],
            lambda name, k=kind, o=ops: KINDS[k](x, op=o[me.rank % 3], name=name),
            me.name(kind),
        )


def numbers_of_dimensions_differ(me: Process):
    shapes = ("[any, 2, 2]", "[any, 4]", "[any]")
    mine = ((me.size, 2, 2), (me.size, 4), (me.size,))[me.rank % 3]
    for kind in ("all_gather", "all_to_all"):
        _differ(
            me,
            f"{kind} shapes",
            lambda rank: shapes[rank % 3],
            lambda name, k=kind: KINDS[k](np.ones(mine), name=name),
            me.name(kind),
        )


def later_dimensions_differ(me: Process):
    for kind in ("all_gather", "all_to_all"):
        _differ(
            me,
            f"{kind} shapes",
            lambda rank: f"[any, 17, {10 * (rank + 1)}]",
            lambda name, k=kind: KINDS[k](
                np.ones((me.size, 17, 10 * (me.rank + 1))), name=name
            ),
            me.name(kind),
        )


def scalars_have_no_rows(me: Process):
    for kind in ("all_gather", "all_to_all", "reduce_scatter"):
        name = me.name(kind)
        me.expect_error(
            RuntimeError,
            [kind, name, "a scalar has no first dimension"],
            lambda k=kind, n=name: KINDS[k](np.float32(me.rank), name=n),
        )
        me.expect_it_works()
    scalar = ("[any, 2]", "[]")[me.rank % 2]
    _differ(
        me,
        "all_gather shapes",
        lambda rank: ("[any, 2]", "[]")[rank % 2],
        lambda name: eager.all_gather(
            np.ones((1, 2) if scalar == "[any, 2]" else ()), name=name
        ),
        me.name("one of them"),
    )


def roots_differ(me: Process):
    _differ(
        me,
        "broadcast root ranks",
        lambda rank: str(rank),
        lambda name: eager.broadcast(np.ones(3), root=me.rank, name=name),
        me.name(),
    )


def a_root_must_be_in_the_set(me: Process):
    for root in (-1, me.size):
        me.expect_error(
            ValueError,
            [f"`root={root}`", str(list(me.ranks))],
            lambda r=root: eager.broadcast(np.ones(3), root=r),
        )
    with checks_of_sets.added([0, 1]) as (pair,):
        if pair.included():
            me.expect_error(
                ValueError,
                [f"`root={me.size - 1}`", "[0, 1]"],
                lambda: eager.broadcast(np.ones(3), root=me.size - 1, process_set=pair),
            )
            me.expect_it_works(pair)
    me.expect_it_works()


def a_name_that_is_under_way_is_refused(me: Process):
    for kind, begin in ASYNC.items():
        x = np.full((me.size, 2), me.rank, np.float32)
        expected = KINDS[kind](x, name=me.name(f"{kind} before"))
        name, late = me.name(kind), me.rank == me.size - 1
        if not late:
            handle = begin(x, name=name)
            for other in ASYNC.values():
                me.expect_error(
                    ValueError,
                    [f"`name='{name}'`", "still being processed", "another name"],
                    lambda o=other, n=name, x=x: o(x, name=n),
                )
        eager.barrier()
        if late:
            handle = begin(x, name=name)
        me.expect(eager.synchronize(handle), expected, kind)
        me.expect_it_works()


def a_group_with_a_name_twice_is_refused_as_a_whole(me: Process):
    x = np.ones(3, np.float32)
    late = me.rank == me.size - 1
    handle = (
        None if late else eager.all_reduce_async(x, op="sum", name=me.name("['b']"))
    )
    if not late:
        me.expect_error(
            ValueError,
            ["['b']", "still being processed"],
            lambda: eager.all_reduce({"a": x, "b": x}, name=me.name()),
        )
    eager.barrier()
    if late:
        handle = eager.all_reduce_async(x, op="sum", name=me.name("['b']"))
    me.expect(eager.synchronize(handle), x * me.size)
    # So that its first name is free.
    found = eager.all_reduce({"a": x, "b": x}, op="sum", name=me.name())
    me.expect(found, {"a": x * me.size, "b": x * me.size})


def a_mistake_in_a_group_is_an_error_of_all_of_it(me: Process):
    x = np.ones(4, np.float32)
    bad = np.ones(4, ("float32", "int32")[me.rank % 2])
    for _ in range(2):
        me.expect_error(
            RuntimeError,
            ["Mismatched data types", "int32", "float32"],
            lambda: eager.grouped_all_reduce([x, bad, x], name=me.name()),
        )
        found = eager.grouped_all_reduce([x, x, x], op="sum", name=me.name())
        me.expect(found, [x * me.size] * 3)
    call = eager.grouped_all_reduce if me.rank == 0 else eager.all_reduce
    me.expect_error(
        RuntimeError,
        ["Mismatched groups", " of 2", "none"],
        lambda: call([x, x], name=me.name("sizes")),
    )


def one_mistake_does_not_disturb_what_is_under_way(me: Process):
    x = np.full(100, me.rank, np.int32)
    handles = [
        eager.all_reduce_async(x + i, op="sum", name=me.name(f"{i}")) for i in (1, 2)
    ]
    bad = eager.all_reduce_async(np.ones(2 + me.rank), name=me.name("bad"))
    handles.append(eager.all_reduce_async(x + 3, op="sum", name=me.name("3")))
    for _ in range(2):  # It is raised as often as it is asked for.
        me.expect_error(
            RuntimeError,
            ["Mismatched all_reduce shapes"],
            lambda: eager.synchronize(bad),
        )
    me.expect(eager.poll(bad), True, "poll")
    total = sum(me.ranks)
    expected = [np.full(100, total + i * me.size, np.int32) for i in (1, 2, 3)]
    me.expect([eager.synchronize(handle) for handle in handles], expected)


def without_splits_rows_must_divide(me: Process):
    rows = me.size + 1
    me.expect_error(
        ValueError,
        ["`splits` is not given", f"{rows} rows do not divide", str(me.size)],
        lambda: eager.all_to_all(np.ones((rows, 2))),
    )
    me.expect_it_works()


def splits_must_fit(me: Process):
    x, n = np.ones((2 * me.size, 2), np.float32), me.size
    cases = (
        ([3] * n, ["no more than the", f"{2 * n} rows", str([3] * n)]),
        ([1] * (n + 1), ["an entry for each", str(n), str(n + 1)]),
        ([-1] + [1] * (n - 1), ["at least 0", "-1"]),
        ([1.0] * n, ["integers", "float64"]),
        ([[1] * n], ["shape (k,)", f"[1, {n}]"]),
    )
    for splits, words in cases:
        me.expect_error(ValueError, words, lambda s=splits: eager.all_to_all(x, s))
    found, received = eager.all_to_all(x, np.ones(n, np.uint8), name=me.name())
    me.expect(found, np.ones((n, 2), np.float32), "fewer rows than there are")
    me.expect(received, np.ones(n, np.int32))


def reductions_that_are_not_there_are_refused(me: Process):
    x = np.ones((me.size, 2), np.float32)
    for op in ("min", "max", "product", "adasum", "mean"):
        me.expect_error(
            ValueError,
            ["`op` of reduce_scatter must be one of average, sum", op],
            lambda o=op: eager.reduce_scatter(x, op=o),
        )
    me.expect_error(
        ValueError,
        ["`op` of all_reduce must be one of average, sum, min", "'mean'"],
        lambda: eager.all_reduce(x, op="mean"),  # pyright: ignore
    )
    for factor in (float("nan"), float("inf")):
        me.expect_error(
            ValueError,
            ["`prescale` must be finite"],
            lambda f=factor: eager.all_reduce(x, prescale=f),
        )
    me.expect_error(
        ValueError,
        ["`wire_dtype` must be a floating dtype, got int8"],
        lambda: eager.all_reduce(x, wire_dtype="int8"),
    )
    me.expect_it_works()


def sets_must_be_there_and_have_the_rank(me: Process):
    x = np.ones((2, 2), np.float32)
    unknown = ProcessSet([0, 1])
    with checks_of_sets.added([0, 1]) as (pair,):
        for kind, call in KINDS.items():
            me.expect_error(
                ValueError,
                [kind, "[0, 1] does not exist, or has been removed", "add_process_set"],
                lambda c=call: c(x, process_set=unknown),
            )
            if not pair.included():
                me.expect_error(
                    ValueError,
                    [kind, f"rank {me.rank} is not a member", "[0, 1]"],
                    lambda c=call: c(x, process_set=pair),
                )
        for call in (eager.barrier, lambda **kw: eager.all_gather_object(1, **kw)):
            me.expect_error(
                ValueError,
                ["does not exist"],
                lambda c=call: c(process_set=unknown),
            )
        if pair.included():
            me.expect_it_works(pair)
    me.expect_error(
        ValueError,
        ["has been removed"],
        lambda: eager.all_reduce(x, process_set=pair),
    )
    me.expect_error(
        ValueError,
        ["`ranks` must be below 3", "[0, 3]"],
        lambda: eager.add_process_set([0, 3]),
    )
    for ranks in ([], [-1, 0]):
        me.expect_error(
            ValueError, ["some ranks from 0"], lambda r=ranks: ProcessSet(r)
        )
    me.expect_error(
        RuntimeError,
        ["Mismatched add_process_set shapes", "[0]", "[0, 1]"],
        lambda: eager.add_process_set([0, 1] if me.rank == 1 else [0]),
    )
    me.expect_it_works()


def errors_of_a_set_are_those_of_its_ranks(me: Process):
    with checks_of_sets.added([0, 2]) as (pair,):
        name = me.name("same")
        x = np.ones(2 + me.rank)
        if pair.included():
            me.expect_error(
                RuntimeError,
                ["Mismatched all_reduce shapes", "[2]", "[4]"],
                lambda: eager.all_reduce(x, name=name, process_set=pair),
            )
            me.expect_it_works(pair)
        found = eager.all_reduce(np.ones(2), op="sum", name=name)
        me.expect(found, np.full(2, 3.0))


def adasum_is_for_powers_of_two_and_floats_of_all(me: Process):
    x = np.ones(4, np.float32)
    me.expect_error(
        NotImplementedError,
        ["Adasum", "power of two", "got 3"],
        lambda: eager.all_reduce(x, op="adasum"),
    )
    with checks_of_sets.added([0, 1]) as (pair,):
        if pair.included():
            me.expect_error(
                NotImplementedError,
                ["Adasum does not support process sets"],
                lambda: eager.all_reduce(x, op="adasum", process_set=pair),
            )
    me.expect_it_works()


def only_numbers_are_taken(me: Process):
    for leaf in ("text", np.array(["text"]), np.array([None]), object()):
        for call in KINDS.values():
            me.expect_error(
                TypeError, ["array of numbers"], lambda c=call, x=leaf: c(x)
            )
    for x in (np.ones(3, bool), jnp.ones(3, bool)):
        for kind in ("all_reduce", "reduce_scatter"):
            me.expect_error(
                TypeError,
                ["bools cannot be reduced"],
                lambda k=kind, x=x: KINDS[k](x),
            )
    me.expect_error(
        TypeError,
        ["`op='min'` is not defined for complex64"],
        lambda: eager.all_reduce(np.ones(3, np.complex64), op="min"),
    )
    me.expect_it_works()


def a_refused_call_without_a_name_does_not_count(me: Process):
    bad, rows = np.array([True]), np.ones((me.size, 2), np.float32)
    unknown = ProcessSet([0, 1])
    tree = {"w": np.array([object()])}
    too_many = np.array([1 << 63] * me.size, np.uint64)
    gradient = lambda x, **kw: jax.grad(  # noqa: E731
        lambda x: eager.all_reduce(x, **kw).sum()
    )(x)
    # What is refused on one rank, and the right call, which all make.
    calls = (
        (lambda: eager.all_reduce(bad, op="sum"), lambda: eager.all_reduce(rows)),
        (lambda: eager.all_reduce(rows, op="no"), lambda: eager.all_reduce(rows)),
        (
            lambda: eager.grouped_all_reduce([rows, bad]),
            lambda: eager.grouped_all_reduce([rows, rows]),
        ),
        (
            lambda: eager.grouped_all_reduce([rows], process_set=unknown),
            lambda: eager.grouped_all_reduce([rows]),
        ),
        (lambda: eager.all_gather(tree), lambda: eager.all_gather(rows)),
        (lambda: eager.broadcast(tree), lambda: eager.broadcast(rows)),
        (lambda: eager.reduce_scatter(bad), lambda: eager.reduce_scatter(rows)),
        (
            lambda: eager.all_to_all(rows, too_many),
            lambda: eager.all_to_all(rows, [1] * me.size),
        ),
        (lambda: eager.all_to_all(rows[:1]), lambda: eager.all_to_all(rows)),
        (lambda: eager.barrier(process_set=unknown), eager.barrier),
        (
            lambda: eager.broadcast_object(1, root=9),
            lambda: eager.broadcast_object(1, root=1),
        ),
        (
            lambda: eager.all_gather_object(1, process_set=unknown),
            lambda: eager.all_gather_object(1),
        ),
        (
            lambda: eager.broadcast_parameters({**tree, "n": 1}),
            lambda: eager.broadcast_parameters({"w": rows, "n": 1}),
        ),
        (
            lambda: eager.broadcast_parameters({"w": rows, "n": 1}, root=9),
            lambda: eager.broadcast_parameters({"w": rows, "n": 1}),
        ),
        (
            lambda: gradient(jnp.ones(2), op="no"),
            lambda: gradient(jnp.ones(2), op="sum"),
        ),
    )
    for refused, right in calls:
        for _ in range(2):
            if me.rank == 1:
                try:
                    value = refused()
                except (TypeError, ValueError):
                    pass
                else:
                    me.expect_equal(value, "an error")
        expected = None
        for _ in range(2):
            found = right()
            expected = found if expected is None else expected
            me.expect(found, expected)
    me.expect_it_works()


def a_group_of_other_leaves_leaves_nothing_behind(me: Process):
    for ours, theirs, words in (
        ("ab", "abc", ["Mismatched groups of", "of 2", "of 3"]),
        ("abc", "ab", ["Mismatched groups of", "of 2", "of 3"]),
        ("ab", "ac", ["Mismatched groups: of", "['b']", "['c']"]),
        ("ab", "cd", ["Mismatched groups: of", "['b']", "['c']"]),
        ("ab", "", ["Mismatched groups: of", "['b']", "without leaves"]),
        ("", "a", ["Mismatched groups: of", "['a']", "without leaves"]),
        ("chain", "", ["Mismatched groups: of", "['a']", "['c']"]),
    ):
        for call in (eager.grouped_all_reduce, eager.grouped_all_gather):
            keys = theirs if me.rank == 1 else ours
            if ours == "chain":  # No leaf is on all ranks.
                keys = ("ab", "bc", "ca")[me.rank]
            name = me.name(call.__name__)
            me.expect_error(
                RuntimeError,
                words,
                lambda c=call, k=keys, n=name: c(dict.fromkeys(k, np.ones(2)), name=n),
            )
            every = call({key: np.ones(2) for key in "abc"}, name=name)
            me.expect_equal(sorted(every), ["a", "b", "c"])
    me.expect_it_works()


def a_group_is_refused_while_one_of_its_name_is_under_way(me: Process):
    one, other = ({key: np.full(2, 1.0) for key in keys} for keys in ("ab", "cde"))
    calls = (eager.grouped_all_reduce_async, eager.grouped_all_gather_async)
    for second in calls:
        for _ in range(2):
            if me.rank == 1:  # It is late, so that nothing is done before.
                eager.barrier()
            first = eager.grouped_all_reduce_async(one, op="sum", name=me.name())
            if me.rank != 1:
                for tree in (other, {}):
                    me.expect_error(
                        ValueError,
                        [repr(me.name()), "name of a group", "still being processed"],
                        lambda c=second, t=tree: c(t, name=me.name()),
                    )
                eager.barrier()
            expected = {key: np.full(2, float(me.size)) for key in "ab"}
            me.expect(eager.synchronize(first), expected)
            handle = second(other, name=me.name())
            me.expect_equal(sorted(eager.synchronize(handle)), ["c", "d", "e"])
    me.expect(eager.grouped_all_reduce({}, name=me.name()), {}, "no leaves")
    # It has no name then.
    found = eager.grouped_all_reduce({"a": 1.0}, op="sum", name="")
    me.expect(found, {"a": np.array(float(me.size))})
    me.expect_it_works()


def a_wait_is_checked_before_anything_is_submitted(me: Process):
    x = np.ones(2)
    for timeout_s, kind in ((-1, ValueError), (math.nan, ValueError), ("x", TypeError)):
        if me.rank == 1:  # A barrier that had been submitted would be one too many.
            me.expect_error(
                kind, ["`timeout_s`"], lambda t=timeout_s: eager.barrier(timeout_s=t)
            )
        handle = eager.all_reduce_async(x, op="sum", name=me.name())
        for _ in range(2):  # Also when it is done.
            me.expect_error(
                kind,
                ["`timeout_s`"],
                lambda h=handle, t=timeout_s: eager.synchronize(h, timeout_s=t),
            )
            found = eager.synchronize(handle, timeout_s=math.inf)
            me.expect(found, x * me.size)
    if me.rank == 1:
        time.sleep(0.2)
    for timeout_s in (math.inf, 1e300, 60, None):
        eager.barrier(timeout_s=timeout_s)
    me.expect_it_works()


def several_threads_get_one_object(me: Process):
    for i in range(20):
        tree = {"a": np.full(3, i), "b": jnp.ones(2)} if i % 2 else np.full(4, i)
        handle = eager.all_reduce_async(tree, op="sum", name=me.name(str(i % 3)))
        with futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: eager.synchronize(handle), range(4)))  # noqa: B023
        me.expect_equal(len({id(each) for each in found}), 1)
        me.expect_equal(found[0] is eager.synchronize(handle), True)


CHECKS = (
    a_refused_call_without_a_name_does_not_count,
    a_group_of_other_leaves_leaves_nothing_behind,
    a_group_is_refused_while_one_of_its_name_is_under_way,
    a_wait_is_checked_before_anything_is_submitted,
    several_threads_get_one_object,
    shapes_differ,
    as_many_elements_in_another_shape_are_not_the_same,
    dtypes_differ,
    operations_differ,
    factors_differ,
    reductions_differ,
    numbers_of_dimensions_differ,
    later_dimensions_differ,
    scalars_have_no_rows,
    roots_differ,
    a_root_must_be_in_the_set,
    a_name_that_is_under_way_is_refused,
    a_group_with_a_name_twice_is_refused_as_a_whole,
    a_mistake_in_a_group_is_an_error_of_all_of_it,
    one_mistake_does_not_disturb_what_is_under_way,
    without_splits_rows_must_divide,
    splits_must_fit,
    reductions_that_are_not_there_are_refused,
    sets_must_be_there_and_have_the_rank,
    errors_of_a_set_are_those_of_its_ranks,
    adasum_is_for_powers_of_two_and_floats_of_all,
    only_numbers_are_taken,
)
