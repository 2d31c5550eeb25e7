"""Numerics: every dtype that is taken, in every reduction, with ranks that joined."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jdp.collectives.host import arithmetic
from jdp.eager import checks, numerics, submission
from jdp.eager.execution import fused, host_adasum, small_tensors
from jdp.eager.execution.base import SetMembers
from jdp.eager.execution.fused import FusedJob, Scratch
from jdp.eager.messages import Spec, decode_spec, encode_spec
from tests import harness

OPS = ("sum", "average", "min", "max", "product", "adasum")


def _dtypes():
    """All numbers that numpy and `ml_dtypes` have."""
    names = [getattr(ml_dtypes, name) for name in dir(ml_dtypes)]
    kinds = {np.dtype(x) for x in names if isinstance(x, type) and x not in (float,)}
    kinds |= {np.dtype(code) for code in np.typecodes["AllInteger"]}
    kinds |= {np.dtype(code) for code in np.typecodes["AllFloat"]}
    return sorted(
        {x.name for x in kinds if jnp.issubdtype(x, np.number)} - {"clongdouble"}
    )


DTYPES = _dtypes()
# No second rank can give these, and the first one cannot either.
_IS_COMPLEX = [name for name in DTYPES if name.startswith("complex")]


def _takes(dtype, op, has_joined):
    """Whether the engine takes a reduction; it refuses others by name."""
    if dtype in _IS_COMPLEX:
        return op not in ("min", "max", "adasum")
    if op == "adasum" and numerics.is_integer(jnp.dtype(dtype)):
        return False
    adds = op in ("sum", "average", "adasum")
    return not (adds and dtype == "float8_e8m0fnu" and (has_joined or op == "adasum"))


def _limits(dtype):
    """Lowest and highest finite value, as numbers of Python."""
    if numerics.is_integer(dtype):
        info = jnp.iinfo(dtype)
        return int(info.min), int(info.max)
    info = jnp.finfo(dtype) if dtype.itemsize == 1 else np.finfo(dtype)
    return float(info.min), float(info.max)


def _values(name, rank):
    """Numbers that `name` holds exactly: limits of narrow ones, and small ones."""
    dtype = jnp.dtype(name)
    if dtype.itemsize > 1 and not numerics.is_integer(dtype):
        # Limits overflow elsewhere in float64; thirds of these are exact.
        return np.array([[768, -384, 3, 0.75], [3, 96, -0.75, 1.5]][rank]).astype(dtype)
    low, high = _limits(dtype)
    small = [x for x in (1, 2, -1, -2, 3) if low <= x <= high and x != 3 or rank]
    values = [low, high, *small][:5] if rank == 0 else [1, high, low, *small][:5]
    if name == "float8_e8m0fnu":
        values = [[0.25, 2.0, 4.0, 2.0**100], [0.25, 1.0, 0.5, 2.0**90]][rank]
    values = [x for x in values if low <= x <= high]
    values = (values * 5)[:4]
    if numerics.is_integer(dtype):
        return np.array([dtype.type(x) for x in values])
    with np.errstate(over="ignore"):
        return np.array(values, np.float64).astype(dtype)


def _cast(exact, dtype, *, has_wrapped):
    """Casts what was computed in float64, or of integers exactly, to `dtype`."""
    if not numerics.is_integer(dtype):
        with np.errstate(all="ignore"):
            kind = np.complex128 if dtype.kind == "c" else np.float64
            return np.array(exact, kind).astype(dtype)
    low, high = _limits(dtype)
    if has_wrapped:
        span = high - low + 1
        exact = [(int(x) - low) % span + low for x in exact]
    return np.array([dtype.type(int(x)) for x in exact])


def _reduce(arrays, op, count, dtype):
    """Reduces rank by rank in float64, or exactly."""
    is_integer = numerics.is_integer(dtype)
    columns = [[int(x) if is_integer else complex(x) for x in a] for a in arrays]
    if not is_integer and dtype.kind != "c":
        columns = [[x.real for x in column] for column in columns]
    found = []
    for values in zip(*columns, strict=True):
        total = values[0]
        for x in values[1:]:
            if op in ("min", "max"):
                total = min(total, x) if op == "min" else max(total, x)
            else:
                total = total * x if op == "product" else total + x
        found.append(total)
    if op != "average":
        return _cast(found, dtype, has_wrapped=True)
    if not is_integer:
        return _cast([x / count for x in found], dtype, has_wrapped=False)
    wrapped = _cast(found, dtype, has_wrapped=True)
    cut = [abs(int(x)) // count * (1 if x >= 0 else -1) for x in map(int, wrapped)]
    return _cast(cut, dtype, has_wrapped=False)


class _Here:
    """All members in one thread: it has what the others give already."""

    def __init__(self, others):
        self._others = others

    def all_reduce(self, arrays, op):
        for i, array in enumerate(arrays if self._others else []):
            every = [array.copy(), *[other[i] for other in self._others]]
            arithmetic.reduce(every, op, out=array)
        return arrays

    def adaptive_sum(self, array):
        for (other,) in self._others:
            array = host_adasum.combine(array, other)
        return array


def _run(name, arrays, op, **factors):
    """Reduces one tensor of some ranks; None stands for one that has joined."""
    spec = Spec("all_reduce", name, arrays[0].shape, op=op, **factors)
    spec = decode_spec(encode_spec(spec))
    own, others = [], []
    for i, array in enumerate(arrays):
        flat = fused._own_flat(array, spec, spec.prescale)
        (own if i == 0 else others).append([flat])
    members = SetMembers(harness.local_world(1), 0, tuple(range(len(arrays))))
    members.__dict__["place"] = 0
    job = FusedJob([spec], [()], [arrays[0]])
    (found,) = fused.run(job, _Here(others), members, Scratch())
    assert found.dtype == jnp.dtype(name) and found.shape == arrays[0].shape
    return found


def _assert_same(found, expected, text):
    wide = np.complex128 if found.dtype.kind == "c" else np.float64
    if numerics.is_integer(found.dtype):
        assert [int(x) for x in found] == [int(x) for x in expected], text
    else:
        np.testing.assert_array_equal(found.astype(wide), expected.astype(wide), text)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_has_joined_changes_nothing_in_any_dtype(name, op):
    if not _takes(name, op, has_joined=True):
        spec = Spec("all_reduce", name, (4,), op=op)
        array = np.ones(4, jnp.dtype(name))
        if name == "float8_e8m0fnu":
            assert "has no zero" in checks.find_join_fault(spec)
        else:
            options = type("O", (), {"arguments": spec, "wire": None})
            with pytest.raises(TypeError, match=r"is not defined|must be floating"):
                submission._make_kind(options, "x", array, ())
        return
    dtype, first = jnp.dtype(name), _values(name, 0)
    found = _run(name, [first, None], op)
    if op == "adasum":
        return _assert_same(found, first, "adasum")
    count = 2
    if op == "average":
        expected = _reduce([first], op, count, dtype)
    else:
        expected = first
    _assert_same(found, expected, f"{first}")
    second = _values(name, 1)
    found = _run(name, [first, None, second], op)
    _assert_same(found, _reduce([first, second], op, 3, dtype), f"{first} {second}")


@pytest.mark.parametrize("name", DTYPES)
def test_factors_are_not_rounded_to_the_dtype(name):
    for factor in (0.5, 1 / 1024, 3.0, 1000.0, -1.0, 0.1):
        _check_factor(name, factor)


def _check_factor(name, factor):
    dtype, x = jnp.dtype(name), _values(name, 0)
    if numerics.is_integer(dtype):
        low, high = _limits(dtype)
        exact = [int(np.float64(int(v)) * factor) for v in x]
        # What overflows is undefined in C, and in numpy.
        is_held = np.array([low <= e <= high for e in exact])
        expected = [e if held else 0 for e, held in zip(exact, is_held, strict=True)]
    else:
        wide = np.float32 if dtype.itemsize <= 2 else dtype
        with np.errstate(all="ignore"):
            product = x.astype(wide) * np.asarray(factor).astype(wide)
            expected, is_held = product.astype(dtype), np.ones(4, bool)
    op = "product" if dtype.kind == "c" else "max"
    for factors in ({"prescale": factor}, {"postscale": factor}):
        found = _run(name, [x], op, **factors)
        _assert_same(
            found[is_held], np.array(expected).astype(dtype)[is_held], f"{factors} {x}"
        )


@pytest.mark.parametrize("name", [x for x in DTYPES if "int" in x])
def test_the_scaled_average_of_integers_is_one_factor(name):
    dtype = jnp.dtype(name)
    spec = Spec("all_reduce", name, (1,), op="average", postscale=0.5)
    assert small_tensors.split_average(spec, dtype, 4) == ("sum", 0.125)


@pytest.mark.parametrize("name", ["int1", "uint1", "int2", "int4", "int8", "uint8"])
def test_an_average_over_more_ranks_than_the_dtype_counts_to(name):
    dtype = jnp.dtype(name)
    arrays = [np.array([0, 0], dtype) for _ in range(300)]
    arrays[7] = np.array([_limits(dtype)[0], _limits(dtype)[1]]).astype(dtype)
    out = np.empty(2, dtype)
    arithmetic.reduce(arrays, "mean", out=out)
    assert [int(x) for x in out] == [0, 0]


@pytest.mark.parametrize("name", [x for x in DTYPES if "int" not in x])
@pytest.mark.parametrize("op", OPS)
def test_what_is_out_of_range_or_no_number_warns_of_nothing(name, op):
    if not _takes(name, op, has_joined=False):
        return
    low, high = numerics.limits(jnp.dtype(name)) if op != "product" else (1, 1)
    given = [[high, low, high], [low, low, np.nan]]
    with np.errstate(all="ignore"):
        arrays = [np.array(x).astype(name) for x in given]
    for factor in (1.0, 1e300):  # Warnings are errors.
        _run(name, arrays, op, prescale=factor, postscale=factor)
