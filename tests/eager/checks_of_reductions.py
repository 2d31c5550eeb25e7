"""Checks of reductions: what all_reduce and reduce_scatter make of every rank's."""

import json
import pathlib
import tempfile

import jax
import numpy as np

from jdp import eager
from jdp.eager import session
from tests import harness
from tests.eager import checks
from tests.eager.checks import DTYPES, FLOATS, INTEGERS, Process, combine, scale

ADASUM = np.load(harness.REFERENCE / "horovod_adasum.npz")
_UFUNCS = {"min": np.minimum, "max": np.maximum, "product": np.multiply}


def _all(me: Process, dtypes=DTYPES, **kwargs):
    return [checks.tensors(rank, me.only(dtypes), **kwargs) for rank in me.ranks]


def a_sum_is_that_of_all_ranks_in_every_dtype_and_shape(me: Process):
    trees = _all(me)
    given = jax.tree.map(np.copy, trees[me.rank])
    found = eager.all_reduce(given, op="sum", name=me.name())
    me.expect(found, combine(sum, trees))
    me.expect(given, trees[me.rank], "the argument")


def an_average_is_the_sum_divided_and_of_integers_cut_off(me: Process):
    trees = _all(me)
    found = eager.all_reduce(trees[me.rank], op="average", name=me.name())
    me.expect(found, checks.mean(trees), ulps=me.ulps_of_mean)
    # Of the same tensors it is exact, whatever the number of ranks.
    found = eager.all_reduce(trees[0], op="average", name=me.name("same"))
    me.expect(found, checks.mean([trees[0]] * me.size), "same")
    negative = np.arange(-7, 8, dtype=np.int32) - 3 * (me.rank == 0)
    total = np.arange(-7, 8) * me.size - 3
    expected = np.trunc(total / me.size).astype(np.int32)
    me.expect(eager.all_reduce(negative, name=me.name("negative")), expected)


def without_op_it_is_the_average(me: Process):
    trees = _all(me, dtypes=("float32", "int32"))
    found = eager.all_reduce(trees[me.rank], name=me.name())
    me.expect(found, checks.mean(trees), ulps=me.ulps_of_mean)


def min_max_and_product_go_element_by_element(me: Process):
    for op, ufunc in _UFUNCS.items():
        trees = _all(me)
        if op == "product":  # Such that it is exact.
            trees = [
                {
                    key: (x.astype(np.int64) % 3 + 1).astype(x.dtype)
                    for key, x in t.items()
                }
                for t in trees
            ]
        found = eager.all_reduce(trees[me.rank], op=op, name=me.name(op))
        me.expect(found, combine(lambda xs, u=ufunc: u.reduce(xs), trees), op)


def complex_numbers_are_summed_and_averaged(me: Process):
    each = [np.array([1 + 2j, -3j], np.complex64) * (rank + 1) for rank in me.ranks]
    found = eager.all_reduce(each[me.rank], op="sum", name=me.name())
    me.expect(found, np.sum(each, axis=0, dtype=np.complex64))


def not_a_number_is_passed_on(me: Process):
    x = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    x[me.rank % 4] = [np.nan, np.inf, -np.inf, np.nan][me.rank % 4]
    every = [np.array([1.0, 2.0, 3.0, 4.0], np.float32) for _ in me.ranks]
    for rank, each in enumerate(every):
        each[rank % 4] = [np.nan, np.inf, -np.inf, np.nan][rank % 4]
    found = eager.all_reduce(x, op="sum", name=me.name())
    me.expect(found, np.sum(every, axis=0, dtype=np.float32))


def arrays_of_jax_come_back_as_such(me: Process):
    trees = [checks.for_jax(me, tree) for tree in _all(me)]
    with jax.enable_x64(True):
        given = checks.as_jax(trees[me.rank])
        found = eager.all_reduce(given, op="sum", name=me.name())
        me.expect(found, checks.as_jax(combine(sum, trees)))
        me.expect(given, checks.as_jax(trees[me.rank]), "the argument")
        is_committed = jax.device_put(given["float32 (17,)"], jax.local_devices()[0])
        found = eager.all_reduce(is_committed, name=me.name("one"))
        me.expect(found.sharding == is_committed.sharding, True, "where it lies")


def a_tree_of_all_sorts_keeps_its_structure(me: Process):
    tree = {
        "a": [np.full((2, 3), me.rank, np.float32), checks.as_jax(np.ones(4, "f4"))],
        "b": (me.rank, 1.5, None),
        "c": {},
    }
    total = sum(me.ranks)
    expected = {
        "a": [np.full((2, 3), total, np.float32), checks.as_jax(np.ones(4, "f4"))],
        "b": (np.array(total), np.array(1.5 * me.size), None),
        "c": {},
    }
    expected["a"][1] *= me.size
    found = eager.all_reduce(tree, op="sum", name=me.name())
    me.expect(found, expected)
    me.expect(eager.all_reduce({}, name=me.name("empty")), {}, "empty")


def scalars_and_empty_arrays_are_reduced(me: Process):
    tree = {
        "scalar": np.array(float(me.rank)),
        "empty": np.zeros((0, 3), np.float32),
        "wide": np.zeros((3, 0), np.int32),
    }
    expected = {**tree, "scalar": np.array(float(sum(me.ranks)))}
    me.expect(eager.all_reduce(tree, op="sum", name=me.name()), expected)


def an_array_in_any_memory_layout_is_taken(me: Process):
    whole = checks.numbers(me.rank, (6, 8)).astype(np.float32)
    exact = sum(checks.numbers(rank, (6, 8)) for rank in me.ranks).astype(np.float32)
    frozen = whole.copy()
    frozen.flags.writeable = False
    given = {
        "transposed": whole.T,
        "every second": whole[::2, ::-1],
        "fortran": np.asfortranarray(whole),
        "read only": frozen,
        "big endian": whole.astype(">f4"),
    }
    expected = {
        "transposed": exact.T.copy(),
        "every second": exact[::2, ::-1].copy(),
        "fortran": exact,
        "read only": exact,
        "big endian": exact,
    }
    for key, x in given.items():
        found = eager.all_reduce(x, op="sum", name=me.name(key))
        me.expect(found, expected[key], key)
    every = eager.all_reduce(given, op="sum", name=me.name("fused"))
    me.expect(every, expected, "fused")


def a_result_is_nobody_elses(me: Process):
    for op in ("sum", "min"):
        x = np.full((50,), 1.0 + me.rank, np.float32)
        first = eager.all_reduce([x, x], op=op, name=me.name(op))
        kept = [each.copy() for each in first]
        second = eager.all_reduce([x * 7, x * 7], op=op, name=me.name(op))
        me.expect(first, kept, f"{op}: the earlier result")
        second[0][:] = -1
        first[0][:] = -2
        me.expect(first[1], kept[1], f"{op}: what lies beside it")
        me.expect(x, np.full((50,), 1.0 + me.rank, np.float32), f"{op}: the argument")


def prescaled_integers_are_cut_off_and_floats_rounded_before_the_sum(me: Process):
    for factor in (0.75, 0.5, 2.0):
        dtypes = DTYPES if factor < 1 else FLOATS + ("int16", "int32", "int64")
        trees = _all(me, dtypes=dtypes)
        scaled = [scale(tree, factor) for tree in trees]
        found = eager.all_reduce(
            trees[me.rank], op="sum", prescale=factor, name=me.name(str(factor))
        )
        me.expect(found, combine(sum, scaled), f"{factor}")


def a_factor_that_is_no_binary_fraction_is_applied_as_horovod_does(me: Process):
    # The same tensors on all ranks: their sum is exact for up to three.
    tree = checks.tensors(0, me.only(("int32", "int64", *FLOATS)))
    scaled = scale(tree, 0.37)
    expected = {key: x * x.dtype.type(me.size) for key, x in scaled.items()}
    found = eager.all_reduce(tree, op="sum", prescale=0.37, name=me.name("pre"))
    me.expect(found, expected, "pre", ulps=0 if me.size <= 3 else 1)
    total = {key: x * x.dtype.type(me.size) for key, x in tree.items()}
    found = eager.all_reduce(tree, op="sum", postscale=0.37, name=me.name("post"))
    me.expect(found, scale(total, 0.37), "post")


def the_sum_is_postscaled_in_its_dtype(me: Process):
    for factor in (0.75, 0.5, -0.25):
        dtypes = DTYPES if factor > 0 else FLOATS + INTEGERS[1:]
        trees = _all(me, dtypes=dtypes)
        found = eager.all_reduce(
            trees[me.rank], op="sum", postscale=factor, name=me.name(str(factor))
        )
        me.expect(found, scale(combine(sum, trees), factor), f"{factor}")


def factors_multiply_with_that_of_the_average(me: Process):
    trees = _all(me, dtypes=("int32", "int64"))
    scaled = [scale(tree, 1.5) for tree in trees]
    found = eager.all_reduce(
        trees[me.rank], prescale=1.5, postscale=0.75, name=me.name("integers")
    )
    expected = scale(combine(sum, scaled), 0.75 / me.size)
    me.expect(found, expected, "integers")
    trees = _all(me, dtypes=("float32", "float64"))
    found = eager.all_reduce(
        trees[me.rank], prescale=1.5, postscale=0.75, name=me.name("floats")
    )
    exact = combine(sum, [scale(tree, 1.5) for tree in trees])
    expected = {key: x * x.dtype.type(0.75) / me.size for key, x in exact.items()}
    me.expect(found, expected, "floats", ulps=2)


def min_and_product_are_scaled_too(me: Process):
    x = np.arange(1, 9, dtype=np.float32) + me.rank
    found = eager.all_reduce(
        x, op="min", prescale=-2.0, postscale=0.5, name=me.name("min")
    )
    me.expect(found, -(np.arange(1, 9, dtype=np.float32) + me.size - 1))
    found = eager.all_reduce(
        np.full(3, 2, np.int32), op="product", prescale=2.5, name=me.name("product")
    )
    me.expect(found, np.full(3, 5**me.size, np.int32))


def all_of_a_group_come_back_in_order(me: Process):
    for op in ("sum", "average", "min", "max", "product"):
        each = [
            [
                (checks.numbers(rank, (17,) * d) % 4).astype("f4")
                for d in (1, 2, 3, 1, 2)
            ]
            for rank in me.ranks
        ]
        trees = [dict(enumerate(xs)) for xs in each]
        if op == "average":
            expected = checks.mean(trees)
        elif op == "sum":
            expected = combine(sum, trees)
        else:
            expected = combine(lambda xs, u=_UFUNCS[op]: u.reduce(xs), trees)
        found = eager.grouped_all_reduce(each[me.rank], op=op, name=me.name(op))
        me.expect(found, [expected[i] for i in range(5)], op, ulps=me.ulps_of_mean)


def a_group_of_several_dtypes_runs_together(me: Process):
    trees = _all(me)
    found = eager.grouped_all_reduce(trees[me.rank], op="sum", name=me.name())
    me.expect(found, combine(sum, trees))


def a_group_waits_for_all_of_it_and_nothing_else_waits(me: Process):
    x = np.ones(3, np.float32)
    late = me.rank == me.size - 1
    handle = None
    if not late:
        handle = eager.grouped_all_reduce_async([x, x], op="sum", name=me.name("group"))
    me.expect(eager.all_reduce(x, op="sum", name=me.name("other")), x * me.size)
    if handle is not None:
        me.expect(eager.poll(handle), False, "poll")
    eager.barrier()
    if late:
        handle = eager.grouped_all_reduce_async([x, x], op="sum", name=me.name("group"))
    me.expect(eager.synchronize(handle), [x * me.size] * 2)


def many_at_once_are_done_in_any_order_of_submission(me: Process):
    trees = _all(me, dtypes=("int32", "int64", "float16", "float32", "float64"))
    keys = list(trees[0])
    order = np.random.default_rng(me.rank).permutation(len(keys))
    handles = {
        keys[i]: eager.all_reduce_async(
            trees[me.rank][keys[i]], op="sum", name=me.name(keys[i])
        )
        for i in order
    }
    found = {key: eager.synchronize(handles[key]) for key in keys}
    me.expect(found, combine(sum, trees))
    is_same = [eager.synchronize(handles[key]) is found[key] for key in keys]
    me.expect(all(is_same), True, "the same object again")
    me.expect(all(map(eager.poll, handles.values())), True, "poll")


def a_poll_says_no_while_a_rank_is_missing(me: Process):
    tree = checks.tensors(me.rank, dtypes=("int32", "float32"))
    late = me.rank == me.size - 1
    handles = []
    for turn in range(2):
        if late == bool(turn):
            handles = [
                eager.all_reduce_async(x, op="sum", name=me.name(key))
                for key, x in tree.items()
            ]
        if not late and turn == 0:
            me.expect(any(map(eager.poll, handles)), False, "poll")
        eager.barrier()
    found = dict(zip(tree, map(eager.synchronize, handles), strict=True))
    trees = _all(me, dtypes=("int32", "float32"))
    me.expect(found, combine(sum, trees))
    me.expect(all(map(eager.poll, handles)), True, "poll afterwards")


def what_nobody_named_is_matched_in_the_order_of_calls(me: Process):
    handles = [
        eager.all_reduce_async(np.full(4, i + me.rank, np.int32), op="sum")
        for i in range(20)
    ]
    found = [eager.synchronize(handle) for handle in handles]
    total = sum(me.ranks)
    me.expect(found, [np.full(4, i * me.size + total, np.int32) for i in range(20)])


def compressed_floats_travel_narrow_and_integers_as_they_are(me: Process):
    trees = _all(me, shapes=((17,), (17, 17)))
    for wire in ("float16", "bfloat16"):
        narrow = [
            {
                key: x.astype(np.dtype(wire))
                if x.dtype.kind not in "iu" and x.dtype.itemsize > 2
                else x
                for key, x in tree.items()
            }
            for tree in trees
        ]
        whole = combine(sum, narrow)
        expected = {key: whole[key].astype(x.dtype) for key, x in trees[0].items()}
        found = eager.all_reduce(
            trees[me.rank], op="sum", wire_dtype=wire, name=me.name(wire)
        )
        me.expect(found, expected, wire)
    with jax.enable_x64(True):
        key = "float64 (17,)"
        found = eager.all_reduce(
            checks.as_jax(trees[me.rank][key]),
            op="sum",
            wire_dtype="bfloat16",
            name=me.name("jax"),
        )
        me.expect(found, checks.as_jax(expected[key]), "jax")


def what_carries_the_data_is_what_was_asked_for(me: Process):
    options = session.current_engine().options
    name = "XLA (gloo)"
    if options.hierarchical_all_reduce:
        name = "hierarchical"
    elif options.shared_memory_bytes:
        name = "shared memory"
    with tempfile.TemporaryDirectory() as folder:
        eager.start_timeline(f"{folder}/trace.json")
        x = np.ones(200, np.float32)  # Too large to travel with the agreement.
        eager.all_reduce([x, x, x], name=me.name())
        eager.stop_timeline()
        path = pathlib.Path(folder, f"trace.rank{me.rank}.json")
        events = json.loads(path.read_text())
    facts = [each["args"] for each in events if each["name"] == "ALL_REDUCE"]
    me.expect_equal([each["implementation"] for each in facts], [name] * 3)
    fused = 3 if options.fusion_bytes else 1
    me.expect_equal([each["fused"] for each in facts], [fused] * 3, "fused")


def values_do_not_depend_on_what_carried_them(me: Process):
    # Sums in the order of the ranks, of numbers of which XLA on CPU flushes some.
    for dtype in (np.float32, np.float64, np.float16, jax.numpy.bfloat16):
        dtype = np.dtype(dtype)
        tiny = float(jax.numpy.finfo(dtype).smallest_subnormal)
        for size in (5, 3000, 50_000):  # With the agreement, in one stage, in two.
            rng = np.random.default_rng(size)
            each = [rng.normal(size=size).astype(dtype) for _ in me.ranks]
            for rank, x in enumerate(each):
                x[: size // 2] = ((rank + 1) * tiny * 3, -0.0)[size == 5]
            for op in ("sum", "average", "product", "max"):
                expected = _in_order(each, op)
                name = me.name(f"{op} {dtype} {size}")
                for number in range(1 + 2 * (size == 5)):
                    found = eager.all_reduce(each[me.rank], op=op, name=name)
                    same = found.tobytes() == expected.tobytes()
                    me.expect(same, True, f"{name}, time {number}")
            found = eager.reduce_scatter(each[me.rank], op="sum", name=me.name("part"))
            part = np.array_split(_in_order(each, "sum"), me.size)[me.rank]
            me.expect(found.tobytes() == part.tobytes(), True, f"part {dtype} {size}")
            found = eager.all_gather(each[me.rank], name=me.name("all"))
            same = found.tobytes() == np.concatenate(each).tobytes()
            me.expect(same, True, f"gathered {dtype} {size}")


def _in_order(each: list[np.ndarray], op: str) -> np.ndarray:
    """The reduction rank by rank, in float32 or wider."""
    dtype = each[0].dtype
    wide = dtype if dtype.itemsize >= 4 else np.dtype(np.float32)
    ufunc = {"product": np.multiply, "max": np.maximum}.get(op, np.add)
    total = each[0].astype(wide)
    for x in each[1:]:
        total = ufunc(total, x.astype(wide))
    if op == "average":
        total = total / wide.type(len(each))
    return total.astype(dtype)


# Adasum is for powers of two of ranks.


def adasum_has_the_numbers_of_horovod(me: Process):
    cases = [k.removesuffix(".in") for k in ADASUM.files if k.endswith(".in")]
    for case in cases:
        tensors = ADASUM[f"{case}.in"]
        if len(tensors) != me.size:
            continue
        found = eager.all_reduce(tensors[me.rank], op="adasum", name=me.name(case))
        expected = ADASUM[f"{case}.out"]
        is_near = np.allclose(found, expected, rtol=2e-6, atol=2e-7)
        me.expect(bool(is_near), True, case)
        wide = found.astype(np.float64)
        same = eager.all_gather(found[None], name=me.name(f"{case} of all"))
        me.expect(same, np.stack([found] * me.size), "bitwise the same on all")
        me.expect(wide.astype(np.float32), found)


def adasum_of_orthogonal_tensors_is_the_sum_and_of_parallel_ones_the_mean(me: Process):
    for dtype in FLOATS:
        dtype = np.dtype(dtype)
        found = eager.all_reduce(
            np.eye(me.size, dtype=dtype)[me.rank],
            op="adasum",
            name=me.name(f"orthogonal {dtype}"),
        )
        me.expect(found, np.ones(me.size, dtype), f"orthogonal {dtype}")
        info = jax.numpy.finfo(dtype)
        for size in (float(info.smallest_normal) * 64, 1.0, float(info.max) / 16):
            a = (np.array([1, -0.5, 0.25, 1]) * size).astype(dtype)
            each = [a * dtype.type(rank + 1) for rank in me.ranks]
            found = eager.all_reduce(
                each[me.rank], op="adasum", name=me.name(f"parallel {dtype}")
            )
            expected = np.mean([x.astype(np.float64) for x in each], axis=0)
            error = np.abs(found.astype(np.float64) - expected)
            is_near = (error <= 4 * float(info.eps) * np.abs(expected)).all()
            me.expect(bool(is_near), True, f"parallel {dtype} {size}: {found}")


def adasum_keeps_subnormal_numbers(me: Process):
    for dtype in FLOATS:
        dtype = np.dtype(dtype)
        tiny = float(jax.numpy.finfo(dtype).smallest_subnormal)
        x = (np.array([4.0, -8.0, 0.0]) * tiny).astype(dtype)
        found = eager.all_reduce(x, op="adasum", name=me.name(f"same {dtype}"))
        me.expect(found, x, f"of the same on all, {dtype}")
        x = (np.eye(me.size) * 4 * tiny).astype(dtype)
        found = eager.all_reduce(x[me.rank], op="adasum", name=me.name(f"eye {dtype}"))
        me.expect(found, x.sum(0, dtype=dtype), f"orthogonal, {dtype}")


def adasum_combines_each_tensor_by_itself_and_scales(me: Process):
    rng = np.random.default_rng(3)
    each = [
        {"w": rng.normal(size=(3, 4)).astype("f4"), "b": rng.normal(size=5)}
        for _ in me.ranks
    ]
    found = eager.all_reduce(
        each[me.rank], op="adasum", prescale=2.0, postscale=0.25, name=me.name()
    )
    for key in each[0]:
        expected = _adasum([2.0 * x[key].astype(np.float64) for x in each]) * 0.25
        me.expect(found[key], expected.astype(each[0][key].dtype), key, ulps=16)


def _adasum(level: list[np.ndarray]) -> np.ndarray:
    """The formula, by pairs at distance 1, 2, 4, ..."""
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [
            (1 - (a * b).sum() / (2 * (a * a).sum())) * a
            + (1 - (a * b).sum() / (2 * (b * b).sum())) * b
            for a, b in pairs
        ]
    return level[0]


EXACT_CHECKS = (values_do_not_depend_on_what_carried_them,)
ADASUM_CHECKS = (
    adasum_keeps_subnormal_numbers,
    adasum_has_the_numbers_of_horovod,
    adasum_of_orthogonal_tensors_is_the_sum_and_of_parallel_ones_the_mean,
    adasum_combines_each_tensor_by_itself_and_scales,
)
CHECKS = (
    a_sum_is_that_of_all_ranks_in_every_dtype_and_shape,
    an_average_is_the_sum_divided_and_of_integers_cut_off,
    without_op_it_is_the_average,
    min_max_and_product_go_element_by_element,
    complex_numbers_are_summed_and_averaged,
    not_a_number_is_passed_on,
    arrays_of_jax_come_back_as_such,
    a_tree_of_all_sorts_keeps_its_structure,
    scalars_and_empty_arrays_are_reduced,
    an_array_in_any_memory_layout_is_taken,
    a_result_is_nobody_elses,
    prescaled_integers_are_cut_off_and_floats_rounded_before_the_sum,
    a_factor_that_is_no_binary_fraction_is_applied_as_horovod_does,
    the_sum_is_postscaled_in_its_dtype,
    factors_multiply_with_that_of_the_average,
    min_and_product_are_scaled_too,
    all_of_a_group_come_back_in_order,
    a_group_of_several_dtypes_runs_together,
    a_group_waits_for_all_of_it_and_nothing_else_waits,
    many_at_once_are_done_in_any_order_of_submission,
    a_poll_says_no_while_a_rank_is_missing,
    what_nobody_named_is_matched_in_the_order_of_calls,
    compressed_floats_travel_narrow_and_integers_as_they_are,
    what_carries_the_data_is_what_was_asked_for,
)
