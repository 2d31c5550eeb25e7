"""The cost model against the programs, counted, and against the textbook formulas."""

import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jdp import collectives
from jdp.collectives import Links, Node
from jdp.collectives.cost_model import ALGORITHMS, Work, predict

pytestmark = pytest.mark.slow

LINKS = Links(latency_s=1e-5, bandwidth_bytes_per_s=1e9, compute_s_per_byte=1e-10)
FLAT = [name for name in ALGORITHMS if name != "hierarchical"]
IN_CHUNKS = ("ring", "bidirectional_ring", "halving_doubling", "butterfly", "chain")


def _equations(jaxpr, times=1):
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner = times * eqn.params.get("length", 1)
        for param in eqn.params.values():
            inner_jaxpr = getattr(param, "jaxpr", param)
            if hasattr(inner_jaxpr, "eqns"):
                yield from _equations(inner_jaxpr, inner)


def _count(fn, mesh_shape, num_elements, dtype):
    """Counts messages, the bytes that each replica sends, and those that are reduced.

    Returns:
      Messages, bytes of them one after another, bytes by replica, bytes reduced.
    """
    names = tuple(mesh_shape)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    mesh = jax.sharding.AbstractMesh(tuple(mesh_shape.values()), names, axis_types=auto)
    mapped = jax.shard_map(
        lambda x: fn(x, names if len(names) > 1 else names[0]),
        mesh=mesh,
        in_specs=P(names),
        out_specs=P(),
    )
    num_replicas = math.prod(mesh_shape.values())
    x = jax.ShapeDtypeStruct((num_elements * num_replicas,), dtype)
    ranks = np.arange(num_replicas).reshape(tuple(mesh_shape.values()))
    num_messages, serial, reduced = 0, 0, 0
    sent = np.zeros(num_replicas, int)
    for eqn, times in _equations(jax.make_jaxpr(mapped)(x).jaxpr):
        if eqn.primitive.name == "ppermute":
            num_bytes = (
                times * eqn.invars[0].aval.size * eqn.invars[0].aval.dtype.itemsize
            )
            num_messages += times
            serial += num_bytes
            axes = [names.index(n) for n in eqn.params["axis_name"]]
            group_size = math.prod(ranks.shape[a] for a in axes)
            groups = np.moveaxis(ranks, axes, range(len(axes))).reshape(group_size, -1)
            for source, _ in eqn.params["perm"]:
                sent[groups[source]] += num_bytes
        elif eqn.primitive.name in ("add", "add_any") and eqn.outvars[0].aval.ndim:
            aval = eqn.outvars[0].aval
            if jnp.issubdtype(aval.dtype, jnp.floating):
                reduced += times * aval.size * aval.dtype.itemsize
    return num_messages, serial, sent, reduced


def _program(algorithm, num_chunks):
    fn = ALGORITHMS[algorithm].all_reduce
    is_cut = algorithm in IN_CHUNKS
    return functools.partial(fn, num_chunks=num_chunks) if is_cut else fn


def _check(work: Work, counted, num_lanes=1):
    num_messages, serial, sent, _ = counted
    assert work.num_messages == num_messages
    assert work.num_rounds * num_lanes == num_messages
    assert work.serial_bytes * num_lanes == serial
    assert work.sent_bytes == sent.max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 21, 32, 33])
@pytest.mark.parametrize("algorithm", FLAT)
def test_rounds_and_bytes_are_those_of_the_program(algorithm, n, dtype):
    if algorithm == "adasum" and n & (n - 1):
        with pytest.raises(ValueError, match=f"power of two of replicas, got {n}"):
            predict(algorithm, 1, n, LINKS)
        return
    for num_elements in (0, 1, 5, 1000, 4096):
        for num_chunks in (1, 3) if algorithm in IN_CHUNKS else (1,):
            work = predict(
                algorithm,
                num_elements * jnp.dtype(dtype).itemsize,
                n,
                LINKS,
                dtype=dtype,
                num_chunks=num_chunks,
            ).work
            counted = _count(
                _program(algorithm, num_chunks), {"data": n}, num_elements, dtype
            )
            _check(work, counted, 2 if algorithm == "bidirectional_ring" else 1)
            if algorithm != "adasum" and dtype == "float32":
                assert work.reduced_bytes == counted[3]


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 3), (3, 2), (4, 4), (6, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounds_and_bytes_of_the_hierarchical_one(shape, dtype):
    num_nodes, replicas_per_node = shape
    node = Node(replicas_per_node, Links(1e-7, 1e11))
    across = functools.partial(collectives.halving_doubling_all_reduce, num_chunks=1)
    within = collectives.RING

    def program(x, names):
        return collectives.hierarchical_all_reduce(
            x, names, within=within, across=across
        )

    for num_elements in (0, 1, 1000):
        work = predict(
            "hierarchical",
            num_elements * jnp.dtype(dtype).itemsize,
            math.prod(shape),
            LINKS,
            dtype=dtype,
            node=node,
        ).work
        mesh_shape = {"node": num_nodes, "data": replicas_per_node}
        _check(work, _count(program, mesh_shape, num_elements, dtype))


@pytest.mark.parametrize("n", [2, 16, 1024, 65536])
def test_the_textbook_formulas(n):
    size = 4 * 65536
    a, bandwidth, c = 1e-5, 1e9, 1e-10
    log_n = math.log2(n)
    share = (n - 1) / n
    # Rounds, communication and computation in seconds, as the docstring has them.
    expected = {
        "ring": (
            2 * (n - 1),
            2 * (n - 1) * a + 2 * share * size / bandwidth,
            share * size * c,
        ),
        "bidirectional_ring": (
            2 * (n - 1),
            2 * (n - 1) * a + share * size / bandwidth,
            share * size * c,
        ),
        "halving_doubling": (
            2 * log_n,
            2 * log_n * a + 2 * share * size / bandwidth,
            share * size * c,
        ),
        "butterfly": (log_n, log_n * (a + size / bandwidth), log_n * size * c),
        "star": (
            2 * (n - 1),
            2 * (n - 1) * (a + size / bandwidth),
            (n - 1) * size * c,
        ),
        "tree": (
            2 * log_n,
            2 * log_n * (a + size / bandwidth),
            log_n * size * c,
        ),
        "adasum": (log_n, log_n * (a + size / bandwidth), 4 * log_n * size * c),
    }
    for algorithm, (rounds, communication_s, computation_s) in expected.items():
        if algorithm == "bidirectional_ring" and n == 65536:
            continue  # An element a part does not divide into two lanes.
        cost = predict(algorithm, size, n, LINKS)
        assert cost.work.num_rounds == rounds
        assert cost.communication_s == pytest.approx(communication_s)
        assert cost.computation_s == pytest.approx(computation_s)
        assert cost.total_s == cost.communication_s + cost.computation_s
    k = 8
    cost = predict("chain", size, n, LINKS, num_chunks=k)
    assert cost.work.num_rounds == 2 * (n - 2 + k)
    rounds = n - 2 + k
    assert cost.communication_s == pytest.approx(
        2 * rounds * (a + size / (k * bandwidth))
    )
    assert cost.computation_s == pytest.approx(rounds / k * size * c)


def test_any_cluster_is_predicted_at_once():
    start_s = time.perf_counter()
    for n in (99_999, 100_000, 131_072):
        for algorithm in ALGORITHMS:
            if algorithm == "adasum" and n != 131_072:
                continue
            node = Node(1 if n % 8 else 8, Links(1e-6, 1e11))
            cost = predict(algorithm, 100 << 20, n, LINKS, node=node)
            assert 0 < cost.total_s < math.inf
    assert time.perf_counter() - start_s < 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "rings"}, "`algorithm` must be one of ring, "),
        ({"num_bytes": -1}, "`num_bytes` must be at least 0"),
        ({"num_replicas": 0}, "`num_replicas` and `num_chunks` at least 1"),
        ({"num_chunks": 0}, "`num_replicas` and `num_chunks` at least 1"),
        ({"algorithm": "hierarchical"}, "needs `node=Node"),
        (
            {"algorithm": "hierarchical", "node": Node(3, LINKS)},
            "8 replicas do not divide into nodes of 3",
        ),
    ],
)
def test_bad_arguments(change, message):
    arguments = {"algorithm": "ring", "num_bytes": 8, "num_replicas": 8} | change
    with pytest.raises(ValueError, match=message):
        predict(links=LINKS, **arguments)


def test_links_that_cannot_be():
    with pytest.raises(ValueError, match="`bandwidth_bytes_per_s` must be positive"):
        Links(1e-6, 0.0)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="`latency_s` must be at least 0"):
            Links(bad, 1e9)
    with pytest.raises(ValueError, match="`num_replicas` of a node"):
        Node(0, LINKS)
