"""Adasum, against Horovod's numbers and the properties that define it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jdp
from jdp import collectives
from tests import harness
from tests.transforms import AXIS, transforms_compiled_fast

pytestmark = pytest.mark.slow

REFERENCE = np.load(harness.REFERENCE / "horovod_adasum.npz")
CASES = sorted(k.removesuffix(".in") for k in REFERENCE.files if k.endswith(".in"))


def _run(run, tensors):
    """Combines what the replicas hold, shape (n, ...) a leaf."""
    n = len(jax.tree.leaves(tensors)[0])
    return run(lambda _, local: collectives.adasum(local, AXIS), n, 0, tensors)


def _by_hand(tensors):
    """The formula, by pairs at distance 1, 2, 4, ..., in float64."""
    level = [np.asarray(x, np.float64) for x in tensors]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [
            (1 - (a * b).sum() / (2 * (a * a).sum())) * a
            + (1 - (a * b).sum() / (2 * (b * b).sum())) * b
            for a, b in pairs
        ]
    return level[0]


@transforms_compiled_fast
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_horovod(run, case):
    tensors, expected = REFERENCE[case + ".in"], REFERENCE[case + ".out"]
    np.testing.assert_allclose(_run(run, tensors), expected, rtol=2e-6, atol=2e-7)


@transforms_compiled_fast
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_each_tensor_is_combined_by_itself(run, n):
    rng = np.random.default_rng(n)
    shapes = {"w": (3, 4), "b": (5,), "s": ()}
    tensors = {
        k: rng.normal(size=(n, *shape)).astype(np.float32)
        for k, shape in shapes.items()
    }
    combined = _run(run, tensors)
    for k in shapes:
        assert combined[k].shape == shapes[k]
        np.testing.assert_allclose(
            combined[k], _by_hand(tensors[k]), rtol=1e-5, atol=1e-6
        )


@transforms_compiled_fast
def test_parallel_is_the_mean_and_orthogonal_is_the_sum(run):
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    np.testing.assert_allclose(
        _run(run, np.stack([x, 2 * x, 3 * x, 6 * x])), 3 * x, rtol=1e-6
    )
    units = np.eye(4, dtype=np.float32)
    np.testing.assert_allclose(_run(run, units), np.ones(4), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("scale", ["tiny", "one", "large"])
def test_it_is_stable_at_both_ends_of_a_dtype(dtype, scale):
    """Horovod's test_stability: gradients r a, with numbers near the limits."""
    with jax.enable_x64(True):
        info = jnp.finfo(dtype)
        scales = {
            "tiny": float(info.smallest_normal) * 64,  # XLA flushes subnormals.
            "one": 1.0,
            "large": float(info.max) / 16,
        }
        x = np.array([1, -0.5, 0.25, 1], np.float64) * scales[scale]
        tensors = np.stack([x, 2 * x, 3 * x, 4 * x]).astype(jnp.dtype(dtype))
        fn = jax.vmap(lambda x: collectives.adasum(x, AXIS), axis_name=AXIS)
        combined = np.asarray(jax.jit(fn)(tensors)).astype(np.float64)
        expected = tensors.astype(np.float64).mean(0)
        error = np.abs(combined - expected)
        assert (error <= 4 * float(info.eps) * np.abs(expected)).all(), (
            combined,
            expected,
        )


@transforms_compiled_fast
def test_zeros_count_for_nothing(run):
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    nothing = np.zeros_like(x)
    np.testing.assert_array_equal(_run(run, np.stack([x, nothing])), x)
    np.testing.assert_array_equal(_run(run, np.stack([nothing, x])), x)
    np.testing.assert_array_equal(_run(run, np.stack([nothing, nothing])), nothing)


@transforms_compiled_fast
def test_a_tensor_without_elements_stays(run):
    tensors = {"w": np.ones((2, 3), np.float32), "e": np.ones((2, 0), np.float32)}
    assert _run(run, tensors)["e"].shape == (0,)


def test_all_replicas_have_bitwise_the_same():
    world = harness.local_world(8)
    tensors = np.random.default_rng(0).normal(size=(8, 1000)).astype(np.float32)
    run = jax.shard_map(
        lambda x: collectives.adasum(x, AXIS),
        mesh=world.mesh,
        in_specs=P(AXIS),
        out_specs=P(AXIS),
        check_vma=False,
    )
    combined = np.asarray(jax.jit(run)(tensors))
    for each in combined:
        np.testing.assert_array_equal(each, combined[0])


def test_errors():
    def run(tensors, n):
        fn = jax.vmap(lambda x: jdp.collectives.adasum(x, AXIS), axis_name=AXIS)
        return fn(jax.tree.map(lambda x: np.stack([x] * n), tensors))

    x = np.ones(3, np.float32)
    for n in (3, 6):
        with pytest.raises(
            ValueError, match=f"needs a power of two of replicas, got {n}"
        ):
            run(x, n)
    with pytest.raises(TypeError, match=r"`\['w'\]\['i'\]` must be floating.*int32"):
        run({"w": {"i": np.ones(3, np.int32)}}, 2)
    with pytest.raises(ValueError, match="`axis_name='data'` is not bound here"):
        collectives.adasum(x)
