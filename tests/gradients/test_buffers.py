"""State that is not trained: whose wins, or that all keep their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from tests import harness
from tests.transforms import transforms_compiled_fast

N = 4


def _trees():
    """One of each dtype; NaN with a payload, -0.0, subnormals: bits that sums lose."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, size=(N, 3), dtype=np.uint32)
    return {
        "f32": bits.view(np.float32),
        "bf16": rng.integers(0, 1 << 16, size=(N, 5), dtype=np.uint16).view(
            jnp.bfloat16
        ),
        "i8": rng.integers(-128, 128, size=(N, 3), dtype=np.int8),
        "bool": rng.random((N, 2, 2)) < 0.5,
        "c64": (rng.normal(size=(N, 2)) + 1j * rng.normal(size=(N, 2))).astype(
            np.complex64
        ),
        "scalar": np.arange(N, dtype=np.int32),
        "zero": np.full((N, 1), -0.0, np.float32),
    }


def _bits(tree):
    return {k: np.asarray(x).tobytes() for k, x in tree.items()}


@pytest.mark.parametrize("source", [0, 2])
@transforms_compiled_fast
def test_all_get_the_bits_of_one(run, source):
    trees = _trees()
    found = run(lambda _, own: jdp.broadcast_from(own, source), N, 0.0, trees)
    expected = {k: x[source] for k, x in trees.items()}
    assert _bits(found) == _bits(expected)
    assert {k: x.dtype for k, x in found.items()} == {
        k: x.dtype for k, x in expected.items()
    }


def test_keys_too():
    world = harness.local_world(N)

    @jdp.data_parallel(world=world)
    def step(state, own):
        key = jax.random.fold_in(jax.random.key(0), own.sum())
        return jdp.broadcast_from(key, 3), {}

    found, _ = step(jax.random.key(9), np.arange(N))
    expected = jax.random.fold_in(jax.random.key(0), 3)
    assert (jax.random.key_data(found) == jax.random.key_data(expected)).all()


def test_it_is_one_collective():
    world = harness.local_world(N)

    @jdp.data_parallel(world=world)
    def step(state, own):
        return jdp.broadcast_from(jax.tree.map(lambda x: x[0], own), 0), {}

    trees = _trees()
    state = {k: x[0] for k, x in trees.items()}
    assert step.lower(state, trees).as_text().count("stablehlo.all_reduce") == 1


@pytest.mark.parametrize("fn", [jdp.broadcast_from, jdp.sync_buffers])
@pytest.mark.parametrize("source", [1.0, "1", N, -1])
def test_a_source_is_the_number_of_a_replica(fn, source):
    call = functools.partial(fn, source=source)
    kind = ValueError if isinstance(source, int) else TypeError
    with pytest.raises(kind, match="`source` must be"):
        jax.vmap(call, axis_name="data")(np.ones(N))


def _step(world, policy, source=0):
    @jdp.data_parallel(world=world, donate_state=False)
    def step(state, batch):
        buffers = {"mean": batch.mean(), "count": batch[0].astype(jnp.int32)}
        synced = jdp.sync_buffers(buffers, policy=policy, source=source)
        return synced, {}

    return step


@pytest.mark.parametrize("source", [0, 3])
def test_broadcast_and_mean(source):
    world, batch = harness.local_world(N), np.arange(8, dtype=np.float32)
    state = {"mean": np.float32(0), "count": np.int32(0)}
    found, _ = _step(world, "broadcast", source)(state, batch)
    assert (float(found["mean"]), int(found["count"])) == (
        2 * source + 0.5,
        2 * source,
    )
    found, _ = _step(world, "mean", source)(state, batch)
    # What is no float has no mean.
    assert (float(found["mean"]), int(found["count"])) == (3.5, 2 * source)


def test_local_stays_with_each_replica():
    world, batch = harness.local_world(N), np.arange(8, dtype=np.float32)
    buffers = {"mean": np.float32(0), "count": np.int32(0)}
    state = jdp.copy_per_replica(buffers, world=world)
    found, _ = _step(world, "local")(state, batch)
    np.testing.assert_array_equal(found.value["mean"], [0.5, 2.5, 4.5, 6.5])
    assert jax.tree.structure(found) == jax.tree.structure(state)


def _train_unevenly():
    world = jdp.init()
    rank = world.process_index

    @jdp.data_parallel
    def step(state, batch):
        won = jdp.sync_buffers(batch.sum(), policy="broadcast")
        mean = jdp.sync_buffers(batch.sum(), policy="mean")
        return {"won": won, "mean": mean}, {}

    state = {"won": np.float32(0), "mean": np.float32(0)}
    seen = []
    # Process 0 has one batch, process 1 three, process 2 two.
    with jdp.Join([step], example=(state, np.zeros(1, np.float32))):
        for _ in range([1, 3, 2][rank]):
            state, _ = step(state, np.full(1, 10.0 + rank, np.float32))
            seen.append({k: float(v.addressable_data(0)) for k, v in state.items()})
    return seen


@pytest.mark.multiprocess
def test_in_a_join_the_first_with_data_wins():
    values = harness.run_checked(_train_unevenly, 3)
    assert values[1] == [
        {"won": 10.0, "mean": 11.0},
        {"won": 11.0, "mean": 11.5},
        {"won": 11.0, "mean": 11.0},
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: jdp.sync_buffers(x, policy="sum"), "`policy` must be 'broadcast'"),
        (lambda x: jdp.sync_buffers(x, source=4), "one of the 4 replicas"),
        (lambda x: jdp.broadcast_from(x, -1), "from 0 to 3, got -1"),
    ],
)
def test_what_there_is_not_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        jax.vmap(call, axis_name="data")(np.zeros(4))
