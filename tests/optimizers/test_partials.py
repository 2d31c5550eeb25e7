"""Reductions of shards: the bits of the reduction of the whole, whatever is in it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jdp.collectives import xla
from jdp.optimizers import partials, shard_layout, sharded_program
from jdp.optimizers.shard_layout import ArrayShard
from tests import harness, rarely

N, SIZE = 4, 10  # shards of 3, the last of 1.
NAN, INF = np.nan, np.inf


def _product(x):
    return jnp.vdot(x, x)


REDUCTIONS = {
    "max": jnp.max,
    "min": jnp.min,
    "sum": jnp.sum,
    "mean": jnp.mean,
    "product": jnp.prod,
    "dot": _product,
    "norm": jnp.linalg.norm,
    "argmax": jnp.argmax,
    "argmin": jnp.argmin,
    "sort": jnp.sort,
    "cumsum": jnp.cumsum,
    "cummax": lax.cummax,
    "top_k": lambda x: lax.top_k(x, 3),
    "median": jnp.median,
    "any": lambda x: jnp.any(x > 2),
    "all": lambda x: jnp.all(x < 2),
    "is finite": lambda x: jnp.all(jnp.isfinite(x)),
    "count": lambda x: jnp.sum(x > 2),
    "logsumexp": jax.nn.logsumexp,
    "variance": jnp.var,
    "sum times infinity": lambda x: jnp.sum(x) * jnp.inf,
    "sum over zero": lambda x: jnp.sum(x) / jnp.zeros(()),
    "sum times a vector": lambda x: jnp.sum(x) * jnp.arange(3.0, dtype=x.dtype),
    "sum and a half": lambda x: (jnp.sum(x) + 1) / 2 - jnp.max(x),
}


def _special_values():
    """By name: ordinary numbers, with one or two special ones in any shard."""
    rng = np.random.default_rng(0)
    plain = rng.normal(size=SIZE).astype(np.float32)
    yield "plain", plain
    yield "large", plain * 100
    for place in (0, 3, 8, 9):
        for name, value in (("nan", NAN), ("inf", INF), ("-inf", -INF)):
            x = plain.copy()
            x[place] = value
            yield f"{name} at {place}", x
    x = plain.copy()
    x[1], x[9] = NAN, INF
    yield "nan and inf", x
    yield "all -inf", np.full(SIZE, -INF, np.float32)
    yield "all nan", np.full(SIZE, NAN, np.float32)
    for place in (0, 5, 9):
        zeros = np.full(SIZE, -0.0, np.float32)
        zeros[place] = 0.0
        yield f"0.0 at {place} of -0.0", zeros
        yield f"-0.0 at {place} of 0.0", -zeros


CASES = dict(_special_values())


def _run_in_pieces(fn, rows, check_vma):
    """`fn` of whole arrays, of each of which a replica has a shard."""
    aval = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)

    def on_replica(rows):
        place = shard_layout.find_layout("data")

        def of_one(row):
            found = sharded_program.run(fn, (place.cut(row),), (aval,), place)
            leaves, treedef = jax.tree.flatten(
                found, is_leaf=lambda x: isinstance(x, ArrayShard)
            )
            whole = [
                shard_layout.gather([x], place, xla.PSUM)[0]
                if isinstance(x, ArrayShard)
                else x
                for x in leaves
            ]
            return jax.tree.unflatten(treedef, whole)

        return lax.map(of_one, rows)

    mesh = harness.local_world(N).mesh
    spec = PartitionSpec()
    mapped = jax.shard_map(
        on_replica, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    found = harness.jit_fast(mapped)(rows)
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(len(rows))]


def _expect_same(found, expected, dtype, is_exact, message):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), message
        a, b = a.astype(np.float64), b.astype(np.float64)
        if is_exact:
            np.testing.assert_array_equal(a, b, err_msg=message)
            # XLA leaves the sign of a zero open: on CPU, max(0.0, -0.0) is either.
            continue
        eps = float(jnp.finfo(dtype).eps)
        scale = np.abs(b)[np.isfinite(b)].max(initial=1.0)
        np.testing.assert_allclose(
            a, b, rtol=SIZE * eps, atol=SIZE * eps * scale, err_msg=message
        )


@pytest.mark.parametrize("check_vma", rarely.cases([True, False], often=(True,)))
@pytest.mark.parametrize(
    "dtype",
    rarely.cases(["float32", "bfloat16", "float16"], often=("float32", "bfloat16")),
)
def test_reductions_of_pieces_are_those_of_the_whole(dtype, check_vma):
    rows = jnp.asarray(np.stack(list(CASES.values()))).astype(dtype)

    def fn(x):
        return {name: reduction(x) for name, reduction in REDUCTIONS.items()}

    found = _run_in_pieces(fn, rows, check_vma)
    one = harness.jit_fast(fn)
    for name, row, here in zip(CASES, rows, found, strict=True):
        expected = one(row)
        for k in REDUCTIONS:
            is_exact = k in ("max", "min", "argmax", "argmin", "any", "all", "sort")
            _expect_same(here[k], expected[k], dtype, is_exact, f"{k} of {name}")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_limits_of_integers_are_not_lost(dtype):
    info = np.iinfo(dtype)
    rows = np.full((2, SIZE), [[info.min], [info.max]], dtype)
    rows[0, 9], rows[1, 0] = info.max, info.min

    def fn(x):
        return [jnp.max(x), jnp.min(x), jnp.sum(x, dtype=x.dtype), jnp.max(x == 0)]

    for row, here in zip(rows, _run_in_pieces(fn, rows, True), strict=True):
        _expect_same(here, harness.jit_fast(fn)(row), None, True, dtype)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (1,), (3, 1)])
def test_reductions_of_fewer_elements_than_replicas(shape):
    """Some replicas, or all, have padding and nothing else."""
    plain = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) - 1.5
    rows = np.stack([plain, -plain, np.full(shape, NAN, np.float32)])

    def reduce(reduction, x):
        return reduction(x, tuple(range(x.ndim)))

    def fn(x):
        whole, bits = [reduce(f, x) for f in (lax.reduce_max, lax.reduce_min)], x > 0
        whole += [jnp.sum(x), jnp.prod(x), jnp.vdot(x, x), jnp.linalg.norm(x)]
        whole += [jnp.max(x, initial=0), jnp.min(x, initial=-1), jnp.cumsum(x)]
        of_bits = lax.reduce_or, lax.reduce_and, lax.reduce_max, lax.reduce_min
        for reduction in of_bits:
            whole += [reduce(reduction, bits), reduce(reduction, x != x)]
            whole += [reduce(reduction, bits.astype(jnp.int32))]
        whole += [reduce(lax.reduce_xor, bits.astype(jnp.uint8)), jnp.any(bits, axis=0)]
        return whole + [jnp.where(jnp.isnan(x).any(), -x, x), jnp.all(bits, axis=-1)]

    for row, here in zip(rows, _run_in_pieces(fn, rows, True), strict=True):
        expected = harness.jit_fast(fn)(row)
        _expect_same(here, expected, np.float32, False, f"{row}")


# Arithmetic of sums, of which some is that of their parts and some is not.
ARITHMETIC = {
    "quotient": lambda s: lax.div(s, lax.full_like(s, 2)),
    "quotient by a literal": lambda s: lax.div(s, s.dtype.type(3)),
    "remainder": lambda s: lax.rem(s, s.dtype.type(3)),
    "multiple": lambda s: s * s.dtype.type(3),
    "sum of sums": lambda s: s + s - s.dtype.type(5),
    "negative": lambda s: -s,
    "shifts": lambda s: (
        lax.shift_left(s, s.dtype.type(1)),
        lax.shift_right_logical(s, s.dtype.type(1)),
        lax.shift_right_arithmetic(s, s.dtype.type(1)),
    ),
    "bits": lambda s: (s & s.dtype.type(5), s | s.dtype.type(5), ~s),
    "power": lambda s: lax.integer_pow(s, 2),
    "in another dtype": lambda s: [
        s.astype(kind) for kind in ("int8", "uint16", "int32", "float16", "float32")
    ],
    "half as a float": lambda s: (s.astype(jnp.float32) / 2).astype(s.dtype),
    "mean": lambda s: jnp.floor_divide(s, s.dtype.type(SIZE)),
}


@pytest.mark.parametrize(
    "dtype",
    rarely.cases(
        ["int8", "uint8", "int16", "uint16", "int32", "uint32"],
        often=("int8", "uint16", "int32"),
    ),
)
def test_arithmetic_of_integer_sums_is_that_of_the_whole(dtype):
    rng, info = np.random.default_rng(0), np.iinfo(dtype)
    rows = [np.ones(SIZE), np.arange(SIZE) % 2, rng.integers(0, 12, SIZE)]
    rows += [rng.integers(info.min, info.max, SIZE, endpoint=True)]
    rows = np.stack(rows).astype(dtype)

    def fn(x):
        total = lax.reduce(x, x.dtype.type(0), lax.add, (0,))
        return {name: of_sum(total) for name, of_sum in ARITHMETIC.items()}

    for row, here in zip(rows, _run_in_pieces(fn, rows, False), strict=True):
        expected = harness.jit_fast(fn)(row)
        for name in ARITHMETIC:
            _expect_same(here[name], expected[name], None, True, f"{name} of {row}")


@pytest.mark.parametrize(
    "value, factor",
    [(2.0**-20, 2.0**-5), (2.0**-9, 2.0**10), (6000.0, 2.0**-3)],
)
def test_parts_of_narrow_floats_are_not_rounded_to_zero(value, factor):
    """Each part of such a sum has no such multiple in float16, but the whole has."""
    rows = np.full((1, SIZE), value, np.float16)

    def fn(x):
        total = lax.reduce(x, np.float16(0), lax.add, (0,))
        return total * np.float16(factor), total / np.float16(1 / factor)

    (here,) = _run_in_pieces(fn, rows, False)
    for x in here:
        np.testing.assert_allclose(x, SIZE * value * factor, rtol=SIZE * 2.0**-10)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int4"])
def test_reductions_of_the_narrowest_numbers_are_those_of_the_whole(dtype):
    rows = jnp.asarray(np.random.default_rng(0).integers(-7, 7, (2, SIZE)), dtype)

    def fn(x):
        wide = x.astype(jnp.float32)
        return [jnp.max(x), jnp.min(x), jnp.sum(wide), lax.reduce_sum(x, (0,))]

    for row, here in zip(rows, _run_in_pieces(fn, rows, False), strict=True):
        _expect_same(here, harness.jit_fast(fn)(row), None, True, dtype)


def test_what_only_prints_sees_what_it_would_see_of_the_whole():
    heard = []

    def hear(name):
        return lambda *xs: heard.append((name, *(np.asarray(x).tolist() for x in xs)))

    def fn(x):
        jax.debug.callback(hear("sum"), jnp.sum(x))
        jax.debug.callback(hear("array and maximum"), x, jnp.max(x))
        jax.debug.callback(hear("number"), 3)
        lax.cond(
            jnp.sum(x) > 0,
            lambda x: jax.debug.callback(hear("branch"), jnp.sum(x)),
            lambda x: None,
            x,
        )
        lax.cond(
            jnp.sum(x) > 0,
            lambda total: jax.debug.callback(hear("branch of a sum"), total),
            lambda total: None,
            jnp.sum(x),
        )

        def body(carry, _):
            jax.debug.callback(hear("loop"), carry)
            return carry + 1, None

        return lax.scan(body, jnp.sum(x), length=2)[0], x + 1

    x = np.arange(SIZE, dtype=np.float32)
    (found,) = _run_in_pieces(fn, x[None], False)
    jax.effects_barrier()
    total = x.sum()
    assert found[0] == total + 2
    np.testing.assert_array_equal(found[1], x + 1)
    expected = [("sum", total), ("array and maximum", x.tolist(), 9.0), ("number", 3)]
    expected += [("branch", total), ("branch of a sum", total)]
    expected += [("loop", total), ("loop", total + 1)]
    key = str  # each replica prints, in any order
    assert sorted(heard, key=key) == sorted(N * expected, key=key)


def test_scalars_are_no_pieces_of_their_own():
    """One replica alone has the shard of a scalar, but all need its value."""

    def fn(x, scalar):
        return x * scalar, jnp.where(scalar > 1, x, -x), jnp.exp(scalar) + jnp.sum(x)

    def on_replica(x, scalar):
        place = shard_layout.find_layout("data")
        avals = jax.tree.map(
            lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), (x, scalar)
        )
        args = place.cut(x), place.cut(scalar)
        found = sharded_program.run(fn, args, avals, place)
        gather = functools.partial(shard_layout.gather, layout=place, halves=xla.PSUM)
        return [gather([y])[0] if isinstance(y, ArrayShard) else y for y in found]

    x, scalar = jnp.arange(10.0), jnp.float32(3)
    mapped = jax.shard_map(
        on_replica,
        mesh=harness.local_world(N).mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
    )
    for a, b in zip(harness.jit_fast(mapped)(x, scalar), fn(x, scalar), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_many_reductions_take_one_collective_of_each_kind():
    def combine(x):
        parts = [partials.Partial(x[k], op) for k in range(4) for op in ("sum", "max")]
        return partials.combine(parts, "data")

    mapped = jax.shard_map(
        combine,
        mesh=harness.local_world(N).mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
    )
    text = jax.jit(mapped).lower(jnp.zeros(4 * N)).as_text()
    assert text.count("stablehlo.all_reduce") == 2
