"""The contract, for every all-reduce that is a traced program."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jdp import collectives
from jdp.collectives.cost_model import ALGORITHMS
from tests import harness
from tests.collectives import contract
from tests.transforms import AXIS

partial = functools.partial
ring = collectives.ring_all_reduce
halving_doubling = collectives.halving_doubling_all_reduce
reduce_broadcast = collectives.reduce_broadcast_all_reduce
ON_ONE_AXIS = {
    "psum": collectives.psum_all_reduce,
    "ring": ring,
    "ring in chunks": partial(ring, num_chunks=3),
    "bidirectional ring": partial(ring, bidirectional=True),
    "bidirectional ring in chunks": partial(ring, bidirectional=True, num_chunks=2),
    "halving doubling": halving_doubling,
    "halving doubling in chunks": partial(halving_doubling, num_chunks=3),
    "butterfly": collectives.butterfly_all_reduce,
    "star": reduce_broadcast,
    "tree": partial(reduce_broadcast, pattern="tree"),
    "chain": partial(reduce_broadcast, pattern="chain"),
    "chain in chunks": partial(reduce_broadcast, pattern="chain", num_chunks=4),
}
TRANSFORMS = ("shard_map", "shard_map unchecked", "pmap", "vmap")


@pytest.fixture(autouse=True, scope="module")
def compile_fast():
    """There are hundreds of programs; how fast each runs does not matter."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


algorithms = pytest.mark.parametrize(
    "all_reduce", ON_ONE_AXIS.values(), ids=ON_ONE_AXIS
)


def _run(transform, n, all_reduce, cases):
    """Returns what the replicas hold before and after, shapes (n, size), by case."""
    values = [case.values(n) for case in cases]

    def reduce(*xs):
        return [
            all_reduce(x, AXIS, op=case.op)[None] for x, case in zip(xs, cases, strict=True)
        ]

    def reduce_split(*xs):
        return reduce(*(x[0] for x in xs))

    match transform:
        case "shard_map" | "shard_map unchecked":
            run = jax.jit(
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
            reduced = jax.pmap(reduce, AXIS, devices=jax.devices()[:n])(*values)
        case "vmap":
            reduced = jax.jit(jax.vmap(reduce, axis_name=AXIS, axis_size=n))(*values)
    return values, [np.asarray(y).reshape(n, -1) for y in reduced]


def _check(transform, n, all_reduce, cases):
    for case, before, after in zip(
        cases, *_run(transform, n, all_reduce, cases), strict=True
    ):
        assert len(after) == n
        contract.check(case, before, after)


@algorithms
@pytest.mark.parametrize("n", [3, 4])
def test_every_op_and_dtype(all_reduce, n):
    with jax.enable_x64(True):
        _check("shard_map", n, all_reduce, contract.EVERY_KIND)


@algorithms
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("n", range(1, 10))
def test_every_axis_size_under_every_transform(all_reduce, n, transform):
    _check(transform, n, all_reduce, contract.A_FEW)


@algorithms
@pytest.mark.parametrize("n", [1, 3, 8])
def test_any_number_of_elements(all_reduce, n):
    _check("shard_map", n, all_reduce, contract.SIZES)
