"""Checks of what moves data: gather, broadcast, exchange, and scattered sums."""

import jax
import jax.numpy as jnp
import numpy as np

from jdp import eager
from tests.eager import checks
from tests.eager.checks import DTYPES, Process, combine, scale

_ROWS = (17, 32, 81, 12)  # of ranks, as in Horovod's tests.
_ALL = (*DTYPES, "bool")


def _full(shape, value, dtype):
    """Shape, filled with a number; of bools whether it is odd."""
    return np.full(shape, value % 2 if dtype == "bool" else value, np.dtype(dtype))


def _filled(me: Process, rows_of, dtypes=_ALL):
    """By rank, a tree of arrays whose values are the rank."""
    dtypes = me.only(dtypes)
    return [
        {
            f"{dtype} {ndim}": _full((rows, *(17,) * (ndim - 1)), rank, dtype)
            for dtype in dtypes
            for ndim in (1, 2, 3)
        }
        for rank, rows in enumerate(rows_of)
    ]


def _concatenated(trees):
    return {key: np.concatenate([tree[key] for tree in trees]) for key in trees[0]}


# Gather


def equal_arrays_are_concatenated_in_the_order_of_ranks(me: Process):
    trees = _filled(me, [5] * me.size)
    found = eager.all_gather(trees[me.rank], name=me.name())
    me.expect(found, _concatenated(trees))


def arrays_of_different_lengths_are_concatenated(me: Process):
    trees = _filled(me, _ROWS[: me.size])
    found = eager.all_gather(trees[me.rank], name=me.name("fused"))
    me.expect(found, _concatenated(trees), "fused")
    for key in ("float32 2", "bool 1", "bfloat16 3"):
        found = eager.all_gather(trees[me.rank][key], name=me.name(key))
        me.expect(found, _concatenated(trees)[key], key)
    # Other lengths under the same names.
    trees = _filled(me, _ROWS[: me.size][::-1], dtypes=("float32", "int8"))
    found = eager.all_gather(trees[me.rank], name=me.name("fused"))
    me.expect(found, _concatenated(trees), "other lengths")


def gathers_under_way_at_once_do_not_mix(me: Process):
    trees = _filled(me, _ROWS[: me.size], dtypes=("int32", "float64"))
    keys = list(trees[0])
    order = np.random.default_rng(me.rank).permutation(len(keys))
    handles = {
        keys[i]: eager.all_gather_async(trees[me.rank][keys[i]], name=me.name(keys[i]))
        for i in order
    }
    found = {key: eager.synchronize(handles[key]) for key in keys}
    me.expect(found, _concatenated(trees))


def a_rank_may_have_no_rows(me: Process):
    for without in me.ranks:
        rows = [0 if rank == without else 3 + rank for rank in me.ranks]
        trees = _filled(me, rows, dtypes=("float32",))
        found = eager.all_gather(trees[me.rank], name=me.name())
        me.expect(found, _concatenated(trees), f"rank {without}")
    nothing = np.zeros((0, 2, 3), np.int16)
    me.expect(eager.all_gather(nothing, name=me.name("none")), nothing, "no rows")
    narrow = np.zeros((2, 0), np.float32)
    found = eager.all_gather(narrow, name=me.name("narrow"))
    me.expect(found, np.zeros((2 * me.size, 0), np.float32), "rows of nothing")


def arrays_of_jax_are_gathered_as_such(me: Process):
    trees = [checks.for_jax(me, tree) for tree in _filled(me, _ROWS[: me.size])]
    with jax.enable_x64(True):
        found = eager.all_gather(checks.as_jax(trees[me.rank]), name=me.name())
        me.expect(found, checks.as_jax(_concatenated(trees)))


# Broadcast


def every_root_gives_its_values_and_keeps_them(me: Process):
    last = me.size - 1
    trees = [
        checks.tensors(rank, me.only(DTYPES))
        | {"bool": checks.numbers(rank, (9,)) % 2 == 0, "scalar": np.array(1.5 * rank)}
        for rank in me.ranks
    ]
    for root in me.ranks:
        # All dtypes of one root; XLA compiles a program for each.
        keys = [key for key in trees[0] if root == last or "loat32" in key]
        given = {key: trees[me.rank][key].copy() for key in keys}
        found = eager.broadcast(given, root=root, name=me.name(str(root)))
        me.expect(found, {key: trees[root][key] for key in keys}, f"root {root}")
        mine = {key: trees[me.rank][key] for key in keys}
        me.expect(given, mine, "the argument")


def every_bit_of_the_root_arrives(me: Process):
    patterns = {
        "float32": np.array([0x7FC00001, 0xFF800000, 0x80000000, 1], np.uint32),
        "float64": np.array([0x7FF8000000000123, 1 << 63], np.uint64),
        "float16": np.array([0x7E01, 0x8000, 1, 0xFC00], np.uint16),
        "bfloat16": np.array([0x7FC1, 0x8000, 1, 0xFF80], np.uint16),
        "complex64": np.array([0x7FC00001, 0x80000000], np.uint32),
    }
    for dtype, bits in patterns.items():
        mine = bits if me.rank == me.size - 1 else bits[::-1] ^ bits.dtype.type(3)
        found = eager.broadcast(
            mine.copy().view(np.dtype(dtype)), root=me.size - 1, name=me.name(dtype)
        )
        me.expect(found.view(bits.dtype), bits, dtype)


def arrays_of_jax_are_broadcast_as_such(me: Process):
    trees = [
        checks.for_jax(me, checks.tensors(rank, shapes=((17,),))) for rank in me.ranks
    ]
    with jax.enable_x64(True):
        last = me.size - 1
        given = checks.as_jax(trees[me.rank])
        found = eager.broadcast(given, root=last, name=me.name())
        me.expect(found, checks.as_jax(trees[last]))


# Exchange


def rows_go_where_the_splits_say(me: Process):
    for dtype in me.only(_ALL):
        for ndim in (1, 2, 3):
            rest = (3,) * (ndim - 1)
            rows = [_full((me.rank + 1, *rest), i, dtype) for i in me.ranks]
            found, received = eager.all_to_all(
                np.concatenate(rows),
                np.full(me.size, me.rank + 1, np.int32),
                name=me.name(f"{dtype} {ndim}"),
            )
            total = me.size * (me.size + 1) // 2
            me.expect(found, _full((total, *rest), me.rank, dtype), dtype)
            me.expect(received, np.arange(1, me.size + 1, dtype=np.int32), "counts")


def without_splits_all_get_the_same(me: Process):
    for dtype in ("float32", "int8"):
        x = np.repeat(np.arange(me.size), 2)[:, None] * np.ones((1, 3)) + 10 * me.rank
        found = eager.all_to_all(x.astype(dtype), name=me.name(dtype))
        expected = np.repeat(np.arange(me.size), 2)[:, None] * 10 + np.full(3, me.rank)
        me.expect(found, expected.astype(dtype), dtype)


def splits_may_be_zero_and_rows_may_stay(me: Process):
    last = me.size - 1
    row = np.ones((1, 4), np.float32) * me.rank
    every = [np.full((1, 4), rank, np.float32) for rank in me.ranks]
    # The last rank sends nothing.
    splits = [0 if me.rank == last else 1] * me.size
    found, received = eager.all_to_all(
        np.repeat(row, sum(splits), 0), splits, name=me.name("sends nothing")
    )
    me.expect(found, np.concatenate(every[:-1]), "sends nothing")
    me.expect(received, np.array([1] * last + [0], np.int32))
    # It gets nothing, and two rows more are sent to nobody.
    splits = [1] * last + [0]
    found, received = eager.all_to_all(
        np.repeat(row, last + 2, 0), splits, name=me.name("gets nothing")
    )
    whole = np.concatenate(every)
    me.expect(found, whole[:0] if me.rank == last else whole, "gets nothing")
    me.expect(received, np.full(me.size, int(me.rank != last), np.int32))
    # Nobody sends anything.
    found, received = eager.all_to_all(row, [0] * me.size, name=me.name("nothing"))
    me.expect(found, row[:0], "nothing")
    me.expect(received, np.zeros(me.size, np.int32))
    found = eager.all_to_all(row[:0], name=me.name("no rows"))
    me.expect(found, row[:0], "no rows")


def rows_of_jax_are_exchanged_as_such(me: Process):
    x = checks.as_jax(np.repeat(np.arange(me.size, dtype=np.float32), me.rank + 1))
    found, received = eager.all_to_all(x, [me.rank + 1] * me.size, name=me.name())
    total = me.size * (me.size + 1) // 2
    me.expect(found, checks.as_jax(np.full(total, me.rank, np.float32)))
    me.expect(received, np.arange(1, me.size + 1, dtype=np.int32))


# Scattered sums


def _trees(me: Process, num_rows, dtypes=DTYPES):
    shapes = [(num_rows,) + (3,) * (ndim - 1) for ndim in (1, 2, 3)]
    return [checks.tensors(rank, me.only(dtypes), shapes) for rank in me.ranks]


def _part(me: Process, tree):
    """The rows of this rank; `np.array_split` cuts as Horovod does."""
    return {key: np.array_split(x, me.size)[me.rank].copy() for key, x in tree.items()}


def each_rank_gets_its_rows_of_the_sum(me: Process):
    trees = _trees(me, 4 * me.size)
    found = eager.reduce_scatter(trees[me.rank], op="sum", name=me.name("sum"))
    me.expect(found, _part(me, combine(sum, trees)), "sum")
    trees = _trees(me, 4 * me.size, dtypes=("int32", "bfloat16", "float32"))
    found = eager.reduce_scatter(trees[me.rank], name=me.name("average"))
    expected = _part(me, checks.mean(trees))
    me.expect(found, expected, "average", ulps=me.ulps_of_mean)
    me.expect(len(next(iter(found.values()))), 4)


def the_first_ranks_get_one_row_more(me: Process):
    for num_rows in (4 * me.size + me.size // 2, me.size + 1, 1, 0):
        trees = _trees(me, num_rows, dtypes=("float32", "int64", "float16"))
        name = me.name(str(num_rows))
        found = eager.reduce_scatter(trees[me.rank], op="sum", name=name)
        me.expect(found, _part(me, combine(sum, trees)), f"{num_rows} rows")
        (some,) = [x for key, x in found.items() if "float32" in key and x.ndim == 1]
        count = num_rows // me.size + (me.rank < num_rows % me.size)
        me.expect(len(some), count, "rows")


def scattered_sums_are_scaled_as_whole_ones(me: Process):
    trees = _trees(me, 2 * me.size + 1)
    for factor in (0.75, 0.5):
        found = eager.reduce_scatter(
            trees[me.rank], op="sum", prescale=factor, name=me.name(f"pre {factor}")
        )
        scaled = [scale(tree, factor) for tree in trees]
        me.expect(found, _part(me, combine(sum, scaled)), f"pre {factor}")
        found = eager.reduce_scatter(
            trees[me.rank], op="sum", postscale=factor, name=me.name(f"post {factor}")
        )
        expected = scale(combine(sum, trees), factor)
        me.expect(found, _part(me, expected), f"post {factor}")
    trees = _trees(me, me.size, dtypes=("int32",))
    found = eager.reduce_scatter(
        trees[me.rank], postscale=0.75, name=me.name("average")
    )
    expected = scale(combine(sum, trees), 0.75 / me.size)
    me.expect(found, _part(me, expected), "average")


def scattered_sums_under_way_at_once_do_not_mix(me: Process):
    trees = _trees(me, 3 * me.size + 1, dtypes=("int32", "float64"))
    keys = list(trees[0])
    handles = {
        key: eager.reduce_scatter_async(
            trees[me.rank][key], op="sum", name=me.name(key)
        )
        for key in (keys if me.rank % 2 else keys[::-1])
    }
    found = {key: eager.synchronize(handles[key]) for key in keys}
    me.expect(found, _part(me, combine(sum, trees)))


def rows_of_jax_are_scattered_as_such(me: Process):
    trees = [checks.for_jax(me, tree) for tree in _trees(me, 2 * me.size)]
    with jax.enable_x64(True):
        given = checks.as_jax(trees[me.rank])
        found = eager.reduce_scatter(given, op="sum", name=me.name())
        me.expect(found, checks.as_jax(_part(me, combine(sum, trees))))


def groups_of_rows_come_together_or_not_at_all(me: Process):
    x = np.full((me.rank + 1, 2), me.rank, np.float32)
    y = np.arange(2 * me.size, dtype=np.int32)
    begin = {
        "gather": lambda tree, name: eager.grouped_all_gather_async(tree, name=name),
        "scatter": lambda tree, name: eager.grouped_reduce_scatter_async(
            tree, op="sum", name=name
        ),
    }
    for call in begin.values():
        name = me.name("group")
        if me.rank == 0:
            handle = call({"y": y, "z": y}, name)
            eager.barrier()
            me.expect(eager.poll(handle), False, "the others have not come")
            eager.barrier()
        else:
            eager.barrier()
            eager.barrier()  # Rank 0 has looked.
            handle = call({"y": y, "z": y}, name)
        eager.synchronize(handle)
    found = eager.grouped_all_gather({"x": x, "y": y}, name=me.name("gathered"))
    expected = [np.full((rank + 1, 2), rank, np.float32) for rank in me.ranks]
    me.expect(found["x"], np.concatenate(expected))
    me.expect(found["y"], np.concatenate([y] * me.size))
    found = eager.grouped_reduce_scatter([y, x[:1]], op="sum", name=me.name("sums"))
    me.expect(found[0], (y * me.size)[2 * me.rank : 2 * me.rank + 2])
    total = np.full((1, 2), sum(me.ranks), np.float32)
    me.expect(found[1], total if me.rank == 0 else total[:0], "one row")
    # What one of the group cannot do, none does.
    for call in begin.values():
        bad = call({"a": y, "b": np.ones(me.rank + 2 if me.rank else 2, "i1")}, "bad")
        if call is begin["gather"]:
            eager.synchronize(bad)  # Rows may differ.
            bad = call({"a": y, "b": np.ones((2, me.rank + 1))}, "bad too")
        me.expect_error(RuntimeError, ["Mismatched"], bad.result)
    me.expect_it_works()


def every_dtype_moves_as_it_is(me: Process):
    names = ("int4", "uint2", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn")
    names += ("bool", "bfloat16", "longdouble", "complex64", "complex128")
    ones = {name: np.ones((me.size, 3), jnp.dtype(name)) for name in me.only(names)}
    moved = {
        "gather": eager.all_gather(
            {name: x[:1] for name, x in ones.items()}, name=me.name("gather")
        ),
        "broadcast": eager.broadcast(ones, root=1, name=me.name("broadcast")),
        "exchange": {
            name: eager.all_to_all(x, name=me.name(f"exchange {name}"))
            for name, x in ones.items()
        },
    }
    for kind, found in moved.items():
        for name, x in found.items():
            given = ones[name]
            is_same = x.shape == given.shape and bool((x == given).all())
            me.expect_equal((x.dtype, is_same), (given.dtype, True), f"{kind} {name}")


GATHERS = (
    equal_arrays_are_concatenated_in_the_order_of_ranks,
    arrays_of_different_lengths_are_concatenated,
    gathers_under_way_at_once_do_not_mix,
    a_rank_may_have_no_rows,
    arrays_of_jax_are_gathered_as_such,
)
CHECKS = GATHERS + (
    every_dtype_moves_as_it_is,
    every_root_gives_its_values_and_keeps_them,
    every_bit_of_the_root_arrives,
    arrays_of_jax_are_broadcast_as_such,
    rows_go_where_the_splits_say,
    without_splits_all_get_the_same,
    groups_of_rows_come_together_or_not_at_all,
    splits_may_be_zero_and_rows_may_stay,
    rows_of_jax_are_exchanged_as_such,
    each_rank_gets_its_rows_of_the_sum,
    the_first_ranks_get_one_row_more,
    scattered_sums_are_scaled_as_whole_ones,
    scattered_sums_under_way_at_once_do_not_mix,
    rows_of_jax_are_scattered_as_such,
)
