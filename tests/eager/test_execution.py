"""Execution: from arrays to results, with an implementation that knows everybody's."""

import threading
from concurrent import futures

import numpy as np
import pytest

from jdp.eager.execution import fused
from jdp.eager.execution.base import SetMembers
from jdp.eager.execution.fused import FusedJob, Scratch
from jdp.eager.execution.local import LocalCopy
from jdp.eager.messages import Spec
from tests import harness

_UFUNCS = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


class Table:
    """Members in threads; each puts what it has on the table, and sees all of it."""

    def __init__(self, count):
        self._barrier = threading.Barrier(count, timeout=10.0)
        self._items = [None] * count

    def exchange(self, place, item):
        self._items[place] = item
        self._barrier.wait()
        items = list(self._items)
        self._barrier.wait()
        return items


class OfAll:
    """An implementation by the contract, with results that cannot be written to."""

    name = "of all"
    is_bounded = True

    def __init__(self, table, place):
        self._table = table
        self._place = place

    def all_reduce(self, arrays, op):
        every = self._table.exchange(self._place, [x.copy() for x in arrays])
        for x in arrays:
            x[...] = 0  # They belong to the implementation.
        return [_reduce(each, op) for each in zip(*every, strict=True)]

    def adaptive_sum(self, array):
        (out,) = self.all_reduce([array], "sum")
        return out

    def all_gather(self, part):
        return _frozen(np.stack(self._table.exchange(self._place, part)))

    def reduce_scatter(self, parts, op):
        return _reduce([p[self._place] for p in self._exchange(parts)], op)

    def all_to_all(self, parts):
        return _frozen(np.stack([p[self._place] for p in self._exchange(parts)]))

    def broadcast(self, array, root):
        return _frozen(self._exchange(array)[root].copy())

    def _exchange(self, item):
        return self._table.exchange(self._place, item)


def _reduce(arrays, op):
    if op == "mean":
        mean = np.mean([x.astype(np.float64) for x in arrays], axis=0)
        is_integer = arrays[0].dtype.kind in "iu"
        return _frozen((np.trunc(mean) if is_integer else mean).astype(arrays[0].dtype))
    return _frozen(_UFUNCS[op].reduce(arrays, dtype=arrays[0].dtype))


def _frozen(x):
    x.flags.writeable = False
    return x


def _run(kind, given, *, locals_=None, jobs=1, **facts):
    """Runs tensors, by member; returns the results, by member.

    Args:
      given: by member and tensor an array, or None of one that has joined.
      locals_: by tensor and member, `Request.local`.
      jobs: how often; the last results are returned.
    """
    count = len(given)
    table, world = Table(count), harness.local_world(1)
    names = [
        next(x for x in each if x is not None) for each in zip(*given, strict=True)
    ]
    specs = [
        Spec(kind, x.dtype.name, x.shape[1:] if locals_ else x.shape, **facts)
        for x in names
    ]

    def run(place):
        members = SetMembers(world, 0, tuple(range(count)))
        members.__dict__["place"] = place
        implementation = OfAll(table, place) if count > 1 else LocalCopy(members)
        scratch = Scratch()
        job = FusedJob(specs, locals_ or [()] * len(specs), given[place])
        for _ in range(jobs):
            results = fused.run(job, implementation, members, scratch)
        return results

    with futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def _check(found, expected):
    assert found is not None
    np.testing.assert_array_equal(found, expected)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert found.flags.writeable


COUNTS = (1, 2, 3, 5)
# Few small tensors are packed into one buffer, large ones are not.
SIZES = (7, 30_000)


@pytest.mark.parametrize("op", ["sum", "min", "max", "product", "average", "adasum"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_results_belong_to_the_caller_and_arguments_stay(op, size, count):
    given = [[np.full(size, 2.0 + i), np.full((size, 1), 3.0)] for i in range(count)]
    found = _run("all_reduce", given, op=op, jobs=2)
    for each in found[1:]:
        for x, y in zip(each, found[0], strict=True):
            _check(x, y)
    for place in range(count):
        assert (given[place][0] == 2.0 + place).all()
        found[place][0][...] = -1.0
        assert (found[place][1] > 0).all() and (given[place][0] > 0).all()


@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "float16", "float64"])
@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("size", SIZES)
def test_who_has_joined_changes_nothing_whatever_the_scale(op, dtype, factor, size):
    one = np.array([2, 4, 6], dtype)[np.arange(size) % 3]
    two = np.array([8, 4, 2], dtype)[np.arange(size) % 3]
    given = [[one, one], [None, None], [two, two], [None, None]]
    found = _run("all_reduce", given, op=op, prescale=factor, postscale=0.5)
    a, b = (x.astype(np.float64) * factor for x in (one, two))
    expected = {
        "sum": (a + b) * 0.5,
        "average": (a + b) / 8,
        "min": np.minimum(a, b) * 0.5,
        "max": np.maximum(a, b) * 0.5,
        "product": a * b * 0.5,
    }[op]
    if one.dtype.kind in "iu":
        expected = np.trunc(expected)
    for each in found:
        for x in each:
            _check(x, expected.astype(dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("op", "expected"), [("min", -6.0), ("max", -2.0)])
def test_who_has_joined_changes_nothing_where_a_factor_turns_the_sign(
    op, expected, size
):
    given = [[np.full(size, x)] * 2 if x else [None] * 2 for x in (1.0, 3.0, None)]
    for each in _run("all_reduce", given, op=op, prescale=-2.0):
        for x in each:
            _check(x, np.full(size, expected))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", [(3,), (2, 0), (0, 2)])
def test_rows_of_any_width_are_gathered(count, shape):
    rows = [3 * i % 4 for i in range(count)]
    given = [
        [np.full((rows[i], *shape), i, "f4"), np.full((1, 2), i, "f4")]
        for i in range(count)
    ]
    locals_ = [tuple((n,) for n in rows), ((1,),) * count]
    found = _run("all_gather", given, locals_=locals_)
    for a, b in found:
        _check(a, np.concatenate([each[0] for each in given]))
        _check(b, np.repeat(np.arange(count, dtype="f4"), 2).reshape(count, 2))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", [(), (2,), (2, 0), (0, 2)])
def test_rows_of_any_width_are_exchanged(count, shape):
    splits = [tuple((i + 2 * j) % 3 for j in range(count)) for i in range(count)]
    given = [
        [
            np.concatenate(
                [np.full((n, *shape), 10 * i + j) for j, n in enumerate(splits[i])]
                + [np.full((2, *shape), -1)]  # to nobody.
            )
        ]
        for i in range(count)
    ]
    found = _run("all_to_all", given, locals_=[tuple(splits)])
    for j, ((received, counts),) in enumerate(found):
        assert counts == tuple(each[j] for each in splits)
        expected = [np.full((n, *shape), 10 * i + j) for i, n in enumerate(counts)]
        _check(received, np.concatenate(expected))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("num_rows", [0, 1, 4, 10])
def test_the_first_members_get_one_row_more(count, num_rows):
    x = np.arange(3.0 * num_rows).reshape(num_rows, 3)
    given = [[x + i, x[:, :0]] for i in range(count)]
    found = _run("reduce_scatter", given, op="sum", prescale=2.0)
    total = 2.0 * (x * count + sum(range(count)))
    for mine, whole in zip(found, np.array_split(total, count), strict=True):
        _check(mine[0], whole)
        _check(mine[1], whole[:, :0])


@pytest.mark.parametrize("count", COUNTS)
def test_several_tensors_of_the_root_are_given_to_all(count):
    given = [
        [np.full((2, 3), i), np.array(i), np.zeros((0, 2), int)] for i in range(count)
    ]
    found = _run("broadcast", given, root=count - 1)
    for each in found:
        for x, y in zip(each, given[-1], strict=True):
            _check(x, y)
