"""Reductions of pieces: the bits of the reduction of the whole, whatever is in it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jdp import layout, partials, pieces
from jdp.collectives import xla
from jdp.layout import Piece
from tests import harness

N, SIZE = 4, 10  # pieces of 3, the last of 1.
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
    """By name: ordinary numbers, with one or two special ones in any piece."""
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
    """`fn` of whole arrays, of each of which a replica has a piece."""
    aval = jax.ShapeDtypeStruct((SIZE,), rows.dtype)

    def on_replica(rows):
        place = layout.find_layout("data")

        def of_one(row):
            found = pieces.run(fn, (place.cut(row),), (aval,), place)
            leaves, treedef = jax.tree.flatten(
                found, is_leaf=lambda x: isinstance(x, Piece)
            )
            whole = [
                layout.gather([x], place, xla.PSUM)[0] if isinstance(x, Piece) else x
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


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
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


def test_scalars_are_no_pieces_of_their_own():
    """One replica alone has the piece of a scalar, but all need its value."""

    def fn(x, scalar):
        return x * scalar, jnp.where(scalar > 1, x, -x), jnp.exp(scalar) + jnp.sum(x)

    def on_replica(x, scalar):
        place = layout.find_layout("data")
        avals = jax.tree.map(
            lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype), (x, scalar)
        )
        args = place.cut(x), place.cut(scalar)
        found = pieces.run(fn, args, avals, place)
        gather = functools.partial(layout.gather, layout=place, halves=xla.PSUM)
        return [gather([y])[0] if isinstance(y, Piece) else y for y in found]

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
