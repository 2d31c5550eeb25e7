"""The contract, for every all-reduce that is a traced program."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jdp import collectives
from tests import harness, rarely
from tests.collectives import contract
from tests.transforms import AXIS

partial = functools.partial
ring = collectives.ring_all_reduce
halving_doubling = collectives.halving_doubling_all_reduce
butterfly = collectives.butterfly_all_reduce
reduce_broadcast = collectives.reduce_broadcast_all_reduce
ON_ONE_AXIS = {
    "psum": collectives.psum_all_reduce,
    "fixed tree": collectives.fixed_tree_all_reduce,
    "ring": ring,
    "ring in chunks": partial(ring, num_chunks=3),
    "bidirectional ring": partial(ring, bidirectional=True),
    "bidirectional ring in chunks": partial(ring, bidirectional=True, num_chunks=2),
    "halving doubling": halving_doubling,
    "halving doubling in chunks": partial(halving_doubling, num_chunks=3),
    "butterfly": butterfly,
    "butterfly in chunks": partial(butterfly, num_chunks=3),
    "star": reduce_broadcast,
    "tree": partial(reduce_broadcast, pattern="tree"),
    "chain": partial(reduce_broadcast, pattern="chain"),
    "chain in chunks": partial(reduce_broadcast, pattern="chain", num_chunks=4),
}


algorithms = pytest.mark.parametrize(
    "all_reduce", ON_ONE_AXIS.values(), ids=ON_ONE_AXIS
)


def _run(transform, n, all_reduce, cases):
    """Returns what the replicas hold before and after, shapes (n, size), by case."""
    values = [case.values(n) for case in cases]

    def reduce(*xs):
        return [
            all_reduce(x, AXIS, op=case.op)[None]
            for x, case in zip(xs, cases, strict=True)
        ]

    def reduce_split(*xs):
        return reduce(*(x[0] for x in xs))

    match transform:
        case "shard_map" | "shard_map unchecked":
            run = harness.jit_fast(
                jax.shard_map(
                    reduce_split,
                    mesh=harness.local_world(n).mesh,
                    in_specs=P(AXIS),
                    out_specs=P(AXIS),
                    check_vma=transform == "shard_map",
                )
            )
            reduced = run(*values)
        case "pmap":
            run = harness.jit_fast(jax.pmap(reduce, AXIS, devices=jax.devices()[:n]))
            reduced = run(*values)
        case "vmap":
            reduced = harness.jit_fast(jax.vmap(reduce, axis_name=AXIS, axis_size=n))(
                *values
            )
    return values, [np.asarray(y).reshape(n, -1) for y in reduced]


def _check(transform, n, all_reduce, cases):
    for case, before, after in zip(
        cases, *_run(transform, n, all_reduce, cases), strict=True
    ):
        assert len(after) == n
        contract.check(case, before, after)


WHOLE = {name: fn for name, fn in ON_ONE_AXIS.items() if "chunks" not in name}
IN_CHUNKS = {name: fn for name, fn in ON_ONE_AXIS.items() if "chunks" in name}
whole = pytest.mark.parametrize("all_reduce", WHOLE.values(), ids=WHOLE)
in_chunks = pytest.mark.parametrize("all_reduce", IN_CHUNKS.values(), ids=IN_CHUNKS)


@whole
def test_every_op_and_dtype(all_reduce):
    with jax.enable_x64(True):
        _check("shard_map", 3, all_reduce, contract.EVERY_KIND)


@in_chunks
def test_each_op_and_dtype_in_chunks(all_reduce):
    with jax.enable_x64(True):
        _check("shard_map", 3, all_reduce, contract.EACH_KIND)


SIZES = range(1, 10)
# What depends on the size is Python, and the same under every transform. Of them all:
# alone, a pair, an odd one, a power of two, and one between two of these.
A_FEW_SIZES = (1, 2, 3, 4, 7)


@whole
@pytest.mark.parametrize("n", rarely.cases(SIZES, often=A_FEW_SIZES))
def test_every_axis_size(all_reduce, n):
    _check("shard_map", n, all_reduce, contract.A_FEW)


@whole
@pytest.mark.parametrize("transform", rarely.cases(["pmap", "vmap"], often=("vmap",)))
@pytest.mark.parametrize("n", rarely.cases(A_FEW_SIZES, often=(3,)))
def test_every_transform(all_reduce, n, transform):
    _check(transform, n, all_reduce, contract.A_FEW)


@in_chunks
@pytest.mark.parametrize(
    "transform", rarely.cases(["shard_map", "pmap", "vmap"], often=("shard_map",))
)
@pytest.mark.parametrize("n", rarely.cases([4, 7], often=(4,)))
def test_chunks_under_every_transform(all_reduce, n, transform):
    _check(transform, n, all_reduce, contract.A_FEW)


@algorithms
@pytest.mark.parametrize("n", rarely.cases([4, 7], often=(7,)))
def test_unchecked_types_too(all_reduce, n):
    _check("shard_map unchecked", n, all_reduce, contract.A_FEW)


@algorithms
@pytest.mark.parametrize("n", rarely.cases([3, 8], often=(8,)))
def test_any_number_of_elements(all_reduce, n):
    _check("shard_map", n, all_reduce, contract.SIZES)


HIERARCHICAL = {
    "hierarchical": collectives.hierarchical_all_reduce,
    "hierarchical, halving within": partial(
        collectives.hierarchical_all_reduce, within=collectives.HALVING_DOUBLING
    ),
    "hierarchical, XLA within": partial(
        collectives.hierarchical_all_reduce,
        within=collectives.PSUM,
        across=collectives.psum_all_reduce,
    ),
}
NODES = ("node", "data")
EVERY_ONE = ON_ONE_AXIS | HIERARCHICAL
every_algorithm = pytest.mark.parametrize(
    "all_reduce", EVERY_ONE.values(), ids=EVERY_ONE
)


def _on_nodes(shape, all_reduce, cases, *, check_vma=True):
    n = shape[0] * shape[1]
    values = [case.values(n) for case in cases]

    def reduce(*xs):
        return [
            all_reduce(x[0], NODES, op=case.op)[None]
            for x, case in zip(xs, cases, strict=True)
        ]

    run = harness.jit_fast(
        jax.shard_map(
            reduce,
            mesh=harness.local_world(n, NODES, num_nodes=shape[0]).mesh,
            in_specs=P(NODES),
            out_specs=P(NODES),
            check_vma=check_vma,
        )
    )
    for case, before, after in zip(cases, values, run(*values), strict=True):
        contract.check(case, before, np.asarray(after))


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (2, 2), (3, 3), (2, 4)])
@pytest.mark.parametrize("all_reduce", HIERARCHICAL.values(), ids=HIERARCHICAL)
def test_hierarchical(all_reduce, shape):
    _on_nodes(shape, all_reduce, (*contract.A_FEW, *contract.SIZES))


@pytest.mark.parametrize("all_reduce", HIERARCHICAL.values(), ids=HIERARCHICAL)
def test_every_op_and_dtype_of_the_hierarchical(all_reduce):
    with jax.enable_x64(True):
        _on_nodes((2, 3), all_reduce, contract.EVERY_KIND, check_vma=False)


@algorithms
def test_two_axes_are_as_good_as_one(all_reduce):
    _on_nodes((3, 2), all_reduce, contract.A_FEW)


@every_algorithm
def test_two_axes_of_vmap(all_reduce):
    case = contract.Case("sum", "float32", 37)
    values = case.values(6)
    fn = jax.vmap(
        jax.vmap(lambda x: all_reduce(x, NODES), axis_name="data"), axis_name="node"
    )
    reduced = harness.jit_fast(fn)(values.reshape(2, 3, -1))
    contract.check(case, values, np.asarray(reduced).reshape(6, -1))


def test_hierarchical_needs_two_axes():
    with pytest.raises(ValueError, match="must be a pair.*got 'data'"):
        _run("vmap", 2, collectives.hierarchical_all_reduce, contract.A_FEW)


# --- The halves ---------------------------------------------------------------------

HALVES = {
    "ring": collectives.RING,
    "halving doubling": collectives.HALVING_DOUBLING,
    "XLA": collectives.PSUM,
}


@pytest.mark.parametrize("halves", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize(
    ("transform", "n"),
    rarely.cases(
        [("shard_map", n) for n in SIZES] + [("vmap", n) for n in A_FEW_SIZES],
        often=[("shard_map", n) for n in A_FEW_SIZES] + [("vmap", 3)],
    ),
)
def test_halves_give_replica_i_part_i(halves, n, transform):
    cases = contract.A_FEW[:2] if halves is collectives.PSUM else contract.A_FEW

    def reduce_and_gather(x, axis_name, *, op):
        part = halves.reduce_scatter(x, axis_name, op=op)
        assert part.shape == (-(-x.size // n),)
        assert part.dtype == x.dtype
        rank = jax.lax.axis_index(axis_name)
        alone = jax.numpy.zeros((n, part.size), part.dtype).at[rank].set(part)
        whole = halves.all_gather(part, axis_name)
        # Each replica adds what it holds itself: only part i may come from it.
        both = jax.numpy.stack([jax.lax.psum(alone, axis_name).reshape(-1), whole])
        return both[:, : x.size].reshape(-1)

    values, found = _run(transform, n, reduce_and_gather, cases)
    for case, before, both in zip(cases, values, found, strict=True):
        for each in both.reshape(n, 2, -1).transpose(1, 0, 2):
            contract.check(case, before, each)


@pytest.mark.parametrize("halves", HALVES.values(), ids=HALVES)
def test_a_part_may_stay_in_the_dtype_of_the_sum(halves):
    def reduce_scatter(x, axis_name, *, op):
        return halves.reduce_scatter(x, axis_name, op=op, dtype="float32")

    case = contract.Case("sum", "bfloat16", 3)
    values, (parts,) = _run("shard_map", 3, reduce_scatter, [case])
    expected = values[0].astype(np.float64).sum(0)
    np.testing.assert_array_equal(parts[:, 0].astype(np.float64), expected)
    assert (expected != case.expected(values[0])).any()  # Rounded, it is another.


# --- Types, derivatives, errors -----------------------------------------------------


@algorithms
@pytest.mark.parametrize("n", [1, 3])
def test_the_result_is_typed_as_the_same_on_all_replicas(all_reduce, n):
    x = np.arange(3.0 * n, dtype=np.float32)
    reduce = jax.shard_map(
        lambda x: all_reduce(x, AXIS),
        mesh=harness.local_world(n).mesh,
        in_specs=P(AXIS),
        out_specs=P(),
    )
    np.testing.assert_array_equal(harness.jit_fast(reduce)(x), x.reshape(n, 3).sum(0))


@functools.cache
def _derivatives(reduce):
    """Of a function of the sum, and of the square of its gradient."""
    n = 3

    def objective(x):
        body = jax.shard_map(
            lambda x: jax.numpy.sin(reduce(x, AXIS)),
            mesh=harness.local_world(n).mesh,
            in_specs=P(AXIS),
            out_specs=P(),
        )
        return body(x).sum()

    def square_of_gradient(x):
        return (jax.grad(objective)(x) ** 2).sum()

    def both(x):
        return jax.grad(objective)(x), jax.grad(square_of_gradient)(x)

    return harness.jit_fast(both)(np.linspace(-1, 1, 5 * n, dtype=np.float32))


@algorithms
def test_the_derivative_is_that_of_the_sum(all_reduce):
    for found, expected in zip(
        _derivatives(all_reduce), _derivatives(jax.lax.psum), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@every_algorithm
def test_errors(all_reduce):
    x = np.ones(3, np.float32)
    axis_name = NODES if all_reduce in HIERARCHICAL.values() else AXIS
    with pytest.raises(ValueError, match="is not bound here; bound axes: none"):
        all_reduce(x, axis_name)

    def run(x, **options):
        return jax.make_jaxpr(
            lambda x: all_reduce(x, axis_name, **options),
            axis_env=[(name, 2) for name in NODES],
        )(x)

    with pytest.raises(ValueError, match="`op` must be one of sum, .*, got 'add'"):
        run(x, op="add")
    with pytest.raises(ValueError, match=r"`x` must be a flat buffer.*shape \(1, 3\)"):
        run(x[None])
    with pytest.raises(TypeError, match="`x` must be of a number's dtype, got bool"):
        run(x > 0)
    with pytest.raises(TypeError, match="'max'` is not defined for complex64"):
        run(x * 1j, op="max")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pattern": "stars"},
            "`pattern` must be one of star, tree, chain, got 'stars'",
        ),
        ({"root": 2}, "`root` must be a rank, 0 to 1, got 2"),
        ({"root": -1}, "`root` must be a rank, 0 to 1, got -1"),
        ({"num_chunks": 2}, "and 1 unless `pattern='chain'`, got 2 with"),
        ({"num_chunks": 0, "pattern": "chain"}, "must be at least 1, .* got 0"),
    ],
)
def test_errors_of_reduce_and_broadcast(options, message):
    with pytest.raises(ValueError, match=message):
        _run("vmap", 2, partial(reduce_broadcast, **options), contract.A_FEW)


@pytest.mark.parametrize(
    "all_reduce",
    [ring, halving_doubling, butterfly],
    ids=["ring", "halving doubling", "butterfly"],
)
def test_no_chunks_are_refused(all_reduce):
    with pytest.raises(ValueError, match="`num_chunks` must be at least 1, got 0"):
        _run("vmap", 2, partial(all_reduce, num_chunks=0), contract.A_FEW)


@pytest.mark.parametrize("pattern", ["star", "tree", "chain"])
@pytest.mark.parametrize("n", [2, 5])
def test_any_replica_may_be_the_root(pattern, n):
    for root in range(n):
        all_reduce = partial(reduce_broadcast, pattern=pattern, root=root)
        _check("vmap", n, all_reduce, contract.A_FEW[:1])


@pytest.mark.parametrize("name", ["ring", "halving doubling", "butterfly"])
def test_a_program_does_not_grow_with_the_chunks(name):
    def lines(num_chunks):
        all_reduce = partial(ON_ONE_AXIS[name], num_chunks=num_chunks)
        return len(
            str(
                jax.make_jaxpr(lambda x: all_reduce(x, AXIS), axis_env=[(AXIS, 64)])(
                    np.ones(1 << 16, np.float32)
                )
            ).splitlines()
        )

    assert lines(1000) < lines(10) + 10
