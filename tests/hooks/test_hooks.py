"""Every hook: one table of what they share, and the bound that each one states."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax import lax

import jdp
from jdp import hooks
from jdp.hooks import base
from jdp.hooks.state import avals_of
from tests import harness, rarely
from tests.transforms import AXIS, COMPILED_FAST

SHAPES = {"w": (24, 16), "conv": (3, 3, 4, 8), "b": (16,), "scale": ()}
HOOKS = {
    "none": hooks.none(),
    "cast to bfloat16": hooks.cast(jnp.bfloat16),
    "cast to float16": hooks.cast("float16"),
    "int8": hooks.int8(),
    "int8 in small chunks": hooks.int8(chunk_size=7),
    "top_k": hooks.top_k(0.1),
    "rows": hooks.rows(2),
    "rows in bfloat16": hooks.chain(hooks.cast(jnp.bfloat16), hooks.rows(30)),
    "power_sgd": hooks.power_sgd(2),
    "power_sgd without extras": hooks.power_sgd(
        1, warm_start=False, error_feedback=False
    ),
    "power_sgd that begins later": hooks.power_sgd(2, start_step=1),
    "power_sgd in bfloat16": hooks.chain(
        hooks.power_sgd(2, start_step=1), hooks.cast(jnp.bfloat16)
    ),
    "float16 in power_sgd": hooks.chain(hooks.cast("float16"), hooks.power_sgd(2)),
    "three": hooks.chain(
        hooks.power_sgd(2), hooks.cast(jnp.bfloat16), hooks.top_k(0.5)
    ),
}
TRANSFORMS_AND_SIZES = {
    **{name: (run, 3) for name, run in COMPILED_FAST.items()},
    "1": (COMPILED_FAST["shard_map"], 1),
    "8": (COMPILED_FAST["shard_map"], 8),
}
transforms_and_sizes = pytest.mark.parametrize(
    ("run", "n"),
    rarely.cases(
        TRANSFORMS_AND_SIZES.values(),
        often=[TRANSFORMS_AND_SIZES[name] for name in ("shard_map",)],
    ),
    ids=TRANSFORMS_AND_SIZES,
)
# "three" has the parts of those that are run rarely.
RARELY = (
    "power_sgd without extras",
    "power_sgd that begins later",
    "power_sgd in bfloat16",
    "float16 in power_sgd",
)
every_hook = pytest.mark.parametrize(
    "hook",
    [
        pytest.param(hook, marks=[pytest.mark.slow] * (name in RARELY))
        for name, hook in HOOKS.items()
    ],
    ids=HOOKS,
)


def _grads(n, seed=0, dtype=np.float32):
    """Gradients of n replicas, (n, ...) each; of equal size, so that all count."""
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(n, *s)).astype(dtype) for k, s in SHAPES.items()}


def _plan(dtype=np.float32):
    tree = {k: jax.ShapeDtypeStruct(s, dtype) for k, s in SHAPES.items()}
    return jdp.plan_buckets(tree, first_bucket_bytes=100)


def _sums(grads):
    plan = _plan(jax.tree.leaves(grads)[0].dtype)
    totals = jax.tree.map(lambda x: x.astype(np.float64).sum(0), grads)
    leaves = jax.tree.leaves(totals)
    return [
        np.concatenate([leaves[i].ravel() for i in bucket]) for bucket in plan.buckets
    ]


def _run_steps(run, hook, n, grads, num_steps=2):
    """Sums the same gradients several times; returns by step the sums of every
    replica, shape (n, size) each, and their residuals."""
    plan = _plan(jax.tree.leaves(grads)[0].dtype)

    def all_of(x):
        return lax.psum(jnp.zeros((n, *x.shape), x.dtype).at[place()].set(x), AXIS)

    def place():
        return lax.axis_index(AXIS)

    def fn(_, own):
        state = hooks.init_state(hook, own, plan=plan)
        wire = base.Wire(AXIS, None)
        found = []
        for _ in range(num_steps):
            sums, state = hook.apply(jdp.flatten_buckets(plan, own), state, wire)
            residuals = getattr(state, "residuals", None)
            kept = [] if residuals is None else residuals.value
            found.append(jax.tree.map(all_of, (sums, kept)))
        return found

    return run(fn, n, 0.0, grads)


@functools.cache
def _run_two_steps(run, hook, n):
    """One program for all that is asked of its results; nothing may change them."""
    return _run_steps(run, hook, n, _grads(n))


def _on_all(fn):
    return harness.jit_fast(jax.vmap(fn, axis_name=AXIS))


def _norm(x):
    return np.linalg.norm(np.asarray(x, np.float64))


@every_hook
@transforms_and_sizes
def test_all_replicas_get_the_same_sum_in_shape_and_dtype(run, n, hook):
    found = _run_two_steps(run, hook, n)
    for sums, _ in found:
        for total, aval in zip(sums, _plan().bucket_avals(), strict=True):
            assert total.shape == (n, *aval.shape) and total.dtype == aval.dtype
            np.testing.assert_array_equal(total, np.broadcast_to(total[0], total.shape))
            assert np.isfinite(total).all()


@transforms_and_sizes
def test_none_is_the_sum(run, n):
    grads = _grads(n)
    ((sums, _),) = _run_steps(run, hooks.none(), n, grads, num_steps=1)
    for total, expected in zip(sums, _sums(grads), strict=True):
        np.testing.assert_allclose(total[0], expected, rtol=0, atol=n * 2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@transforms_and_sizes
def test_the_error_of_cast_is_within_its_bound(run, n, dtype):
    grads = _grads(n)
    ((sums, _),) = _run_steps(run, hooks.cast(dtype), n, grads, num_steps=1)
    magnitudes = _sums(jax.tree.map(np.abs, grads))
    unit = float(jnp.finfo(dtype).eps) / 2
    for total, expected, magnitude in zip(sums, _sums(grads), magnitudes, strict=True):
        bound = 1.01 * unit * (magnitude + np.abs(expected)) + 1e-7
        assert (np.abs(total[0] - expected) <= bound).all()
        assert (np.abs(total[0] - expected) > 0).any()  # it was rounded at all.


@pytest.mark.parametrize("chunk_size", [5, 256])
@transforms_and_sizes
def test_the_error_of_int8_is_within_its_bound(run, chunk_size, n):
    grads = _grads(n)
    hook = hooks.int8(chunk_size=chunk_size)
    ((sums, _),) = _run_steps(run, hook, n, grads, num_steps=1)
    peak = max(np.abs(x).max() for x in grads.values())
    for total, expected in zip(sums, _sums(grads), strict=True):
        # No chunk has a larger scale than the largest element gives.
        bound = 0.5 * n * peak / 127 + 0.5 * np.abs(total).max() / 127 + 1e-5
        assert np.abs(total[0] - expected).max() <= bound


def test_a_chunk_of_int8_has_a_scale_of_its_own():
    x = np.concatenate([np.full(4, 1e-3), np.full(4, 1e3)]).astype(np.float32)

    def fn(x):
        return hooks.int8(chunk_size=4).apply([x], (), base.Wire(AXIS, None))[0][0]

    total = _on_all(fn)(np.stack([x, x]))
    np.testing.assert_allclose(total[0], 2 * x, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_arrives_as_nan_in_its_chunk(bad):
    x = np.ones((4, 16), np.float32)
    x[2, 5] = bad

    def fn(x):
        return hooks.int8(chunk_size=4).apply([x], (), base.Wire(AXIS, None))[0][0]

    total = np.asarray(_on_all(fn)(x))
    assert np.isnan(total[:, 4:8]).all()
    np.testing.assert_allclose(np.delete(total, range(4, 8), axis=1), 4.0, rtol=1e-6)


@pytest.mark.parametrize("name", ["top_k", "power_sgd"])
@transforms_and_sizes
def test_what_is_not_sent_is_kept_for_the_next_step(run, n, name):
    grads = _grads(n)
    found = _run_two_steps(run, HOOKS[name], n)
    for k, expected in enumerate(_sums(grads)):
        sent = sum(np.asarray(sums[k][0], np.float64) for sums, _ in found)
        residuals = np.asarray(found[-1][1][k], np.float64)
        left = residuals.sum(0) if residuals.size else 0.0
        # Of all that was given, what is not sent is what is left.
        np.testing.assert_allclose(sent + left, 2 * expected, rtol=0, atol=2e-5 * n)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
def test_top_k_leaves_no_more_than_its_share_of_the_squared_norm(fraction):
    x = np.random.default_rng(0).normal(size=(1, 1000)).astype(np.float32)

    def fn(x):
        hook = hooks.top_k(fraction)
        state = hook.init(
            [jdp.trees.buckets.BucketAval([(1000,)], np.dtype("float32"))]
        )
        (total,), state = hook.apply([x], state, base.Wire(AXIS, None))
        return total, state.residuals.value[0]

    total, residual = _on_all(fn)(x)
    num_sent = math.ceil(fraction * 1000)
    assert np.count_nonzero(total) == num_sent
    assert np.abs(total[total != 0]).min() >= np.abs(residual).max()
    np.testing.assert_array_equal(total + residual, x)
    assert _norm(residual) ** 2 <= (1 - num_sent / 1000) * _norm(x) ** 2


@transforms_and_sizes
def test_power_sgd_is_exact_for_a_mean_of_its_rank(run, n):
    rng = np.random.default_rng(0)
    grads = _grads(n)
    # Sums of rank 2, though each replica's matrix has full rank.
    noise = rng.normal(size=(n, 24, 16))
    noise -= noise.mean(0)
    low = rng.normal(size=(24, 2)) @ rng.normal(size=(2, 16))
    grads["w"] = (noise + low).astype(np.float32)
    found = _run_steps(run, hooks.power_sgd(2, error_feedback=False), n, grads, 2)
    leaves = jdp.unflatten_buckets(_plan(), [x[0] for x in found[-1][0]])
    np.testing.assert_allclose(leaves["w"], n * low, rtol=0, atol=2e-5 * n)
    np.testing.assert_allclose(leaves["b"], grads["b"].sum(0), rtol=0, atol=2e-6 * n)


def test_power_sgd_converges_to_the_best_approximation_of_its_rank():
    x = np.random.default_rng(0).normal(size=(1, 24, 16)).astype(np.float32)
    x = x * np.geomspace(1, 1e-3, 16, dtype=np.float32)  # a spectrum with gaps.
    aval = jdp.trees.buckets.BucketAval([(24, 16)], np.dtype("float32"))
    hook = hooks.power_sgd(3, error_feedback=False)

    def fn(x):
        state = hook.init([aval])
        for _ in range(10):
            (total,), state = hook.apply([x.ravel()], state, base.Wire(AXIS, None))
        return total

    total = np.asarray(_on_all(fn)(x))[0].reshape(24, 16)
    singular = np.linalg.svd(x[0], compute_uv=False)
    assert _norm(x[0] - total) <= 1.001 * _norm(singular[3:])


def test_a_bucket_that_cannot_be_compressed_travels_as_it_is():
    # 2 x 3 by rank 2 would be larger than it is; so would a vector.
    avals = [
        jdp.trees.buckets.BucketAval([(2, 3), (7,)], np.dtype("float32")),
        jdp.trees.buckets.BucketAval([(8, 8)], np.dtype("complex64")),
        jdp.trees.buckets.BucketAval([(0, 8)], np.dtype("float32")),
    ]
    hook = hooks.power_sgd(2)
    xs = [np.arange(2 * a.size, dtype=a.dtype).reshape(2, -1) for a in avals]

    def fn(*xs):
        return hook.apply(list(xs), hook.init(avals), base.Wire(AXIS, None))[0]

    for total, x in zip(_on_all(fn)(*xs), xs, strict=True):
        np.testing.assert_array_equal(total[0], x.sum(0))
    meter = base.measure(hook, avals, 2)
    assert meter.num_bytes == sum(a.size * a.dtype.itemsize for a in avals)


@every_hook
def test_a_step_that_is_not_finite_does_not_stay_in_the_state(hook):
    n, plan, good = 2, _plan(), _grads(2)

    def step(grads, state):
        buckets = jdp.flatten_buckets(plan, grads)
        sums, state = hook.apply(buckets, state, base.Wire(AXIS, None))
        return jdp.unflatten_buckets(plan, sums), state

    step = _on_all(step)
    state = jax.vmap(lambda _: hook.init(plan.bucket_avals()))(jnp.arange(n))
    # Of one element, of a whole replica, and of more elements than `top_k` sends.
    for name, value, where in (
        ("w", np.nan, (1, 3, 3)),
        ("conv", np.inf, 0),
        ("w", -np.inf, slice(None)),
        ("w", np.nan, 1),
    ):
        bad = jax.tree.map(np.copy, good)
        bad[name][where] = value
        total, state = step(bad, state)
        assert not np.isfinite(total[name]).all()
        for _ in range(2):
            total, state = step(good, state)
        for x in jax.tree.leaves((total, state)):
            if jnp.issubdtype(x.dtype, jnp.floating):
                assert np.isfinite(x).all()


def test_a_nan_makes_the_whole_matrix_nan_in_power_sgd_and_its_place_in_top_k():
    plan, bad = _plan(), _grads(2)
    bad["w"][1, 3, 3] = np.nan

    def send(hook):
        def fn(grads):
            buckets = jdp.flatten_buckets(plan, grads)
            state = hook.init(plan.bucket_avals())
            sums, _ = hook.apply(buckets, state, base.Wire(AXIS, None))
            return jdp.unflatten_buckets(plan, sums)

        return jax.tree.map(np.asarray, _on_all(fn)(bad))

    matrix, element = send(hooks.power_sgd(2)), send(hooks.top_k(0.1))
    assert np.isnan(matrix["w"]).all()
    np.testing.assert_array_equal(np.argwhere(np.isnan(element["w"][0])), [[3, 3]])
    for name in ("conv", "b", "scale"):
        assert np.isfinite(matrix[name]).all() and np.isfinite(element[name]).all()


@every_hook
def test_no_state_holds_an_empty_array(hook):
    avals = [
        *_plan().bucket_avals(),
        jdp.trees.buckets.BucketAval([(5,)], np.dtype("int32")),
        jdp.trees.buckets.BucketAval([(0, 5)], np.dtype("float32")),
    ]
    assert all(x.size for x in jax.tree.leaves(hook.init(avals)))


@every_hook
def test_a_bucket_without_elements_is_reduced_like_any_other(hook):
    dtypes = "float32", "bfloat16", "float16", "int32"
    avals = [
        jdp.trees.buckets.BucketAval([(0, 5)], np.dtype(dtype)) for dtype in dtypes
    ]

    def fn(*xs):
        return hook.apply([*xs], hook.init(avals), base.Wire(AXIS, None))[0]

    xs = [jax.ShapeDtypeStruct((3, 0), aval.dtype) for aval in avals]
    found = jax.eval_shape(jax.vmap(fn, axis_name=AXIS), *xs)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in xs]


@pytest.mark.parametrize(
    "hook",
    [HOOKS["power_sgd"], hooks.chain(hooks.power_sgd(1), hooks.int8())],
    ids=["power_sgd", "power_sgd and int8"],
)
def test_orbax_saves_a_state_with_a_bucket_that_is_not_compressed(hook, tmp_path):
    world = harness.local_world(2)
    params = {"w": np.ones((64, 64), np.float32), "scale": np.ones(64, jnp.bfloat16)}
    state = hooks.init_state(hook, params, world=world)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "state", state)
    jax.tree.map(np.testing.assert_array_equal, found, state)

    @jdp.data_parallel(world=world)
    def step(state, batch):
        grads = jax.tree.map(lambda x: x * batch.mean().astype(x.dtype), params)
        return jdp.sync_gradients(grads, hook=hook, hook_state=state)[1], {}

    step(found, np.ones(2, np.float32))


def test_plain_steps_come_before_the_start_step():
    grads = _grads(2)
    found = _run_steps(
        COMPILED_FAST["vmap"], hooks.power_sgd(1, start_step=2), 2, grads, 3
    )
    for step, (sums, _) in enumerate(found):
        error = sum(_norm(x[0] - y) for x, y in zip(sums, _sums(grads), strict=True))
        assert (error < 1e-4) == (step < 2), step


def test_without_warm_start_other_factors_are_drawn_at_each_step():
    grads = _grads(2)
    hook = hooks.power_sgd(1, warm_start=False, error_feedback=False)
    (first, _), (second, _) = _run_steps(COMPILED_FAST["vmap"], hook, 2, grads, 2)
    assert any((a != b).any() for a, b in zip(first, second, strict=True))
    again = _run_steps(COMPILED_FAST["vmap"], hook, 2, grads, 1)[0][0]
    jax.tree.map(np.testing.assert_array_equal, first, again)
    other = hooks.power_sgd(1, warm_start=False, error_feedback=False, seed=1)
    assert any(
        (a != b).any()
        for a, b in zip(
            first,
            _run_steps(COMPILED_FAST["vmap"], other, 2, grads, 1)[0][0],
            strict=True,
        )
    )


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (hooks.none(), 1.0),
        (hooks.cast(jnp.bfloat16), 0.5),
        (hooks.cast("float16"), 0.5),
        (hooks.cast("float64"), 1.0),  # not narrower.
        (hooks.int8(), (1 + 4 / 256) / 4),
        (hooks.power_sgd(4), None),
        (hooks.chain(hooks.cast("float16"), hooks.cast("float16")), 0.5),
    ],
    ids=lambda x: getattr(x, "name", None),
)
@pytest.mark.parametrize("n", [2, 8])
def test_bytes_on_the_wire_of_a_deep_model(hook, expected, n):
    layer = {"w": (256, 256), "b": (256,), "scale": (256,)}
    tree = {k: [jax.ShapeDtypeStruct(s, np.float32)] * 48 for k, s in layer.items()}
    plan = jdp.plan_buckets(tree)
    found = base.measure(hook, avals_of(plan), n).num_bytes
    ratio = found / (2 * (n - 1) / n * plan.num_bytes)
    if expected is None:  # (a + b) * r of a * b, and vectors as they are.
        expected = (512 * 4 + 512) / (256 * 256 + 512)
        assert ratio <= 0.06
    assert ratio == pytest.approx(expected, rel=1e-3)


def test_top_k_sends_a_position_with_each_element():
    aval = jdp.trees.buckets.BucketAval([(1000,)], np.dtype("float32"))
    for n in (2, 4):
        found = base.measure(hooks.top_k(0.05), [aval], n).num_bytes
        assert found == (n - 1) * 50 * (4 + 4)


def test_sixteen_bit_gradients_are_summed_in_float32():
    # 2048 ones in bfloat16 would end at 256.
    x = np.ones((512, 4), jnp.bfloat16)

    def fn(x):
        return hooks.none().apply([x], (), base.Wire(AXIS, None))[0][0]

    total = _on_all(fn)(x)
    assert total.dtype == jnp.bfloat16
    np.testing.assert_array_equal(total.astype(np.float32), 512.0)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 64, 65])
def test_rows_are_summed_in_float32_whatever_their_number(num_rows):
    rows = jnp.arange(num_rows * 5.0).reshape(num_rows, 5) % 7
    found = base.sum_rows((rows + 256).astype(jnp.bfloat16))
    rounded = np.asarray((rows + 256).astype(jnp.bfloat16), np.float32)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, rounded.sum(0))


def test_all_reduces_of_the_collectives_sum_what_hooks_send():
    grads, plan = _grads(4), _plan()
    for all_reduce in (
        jdp.collectives.ring_all_reduce,
        jdp.collectives.halving_doubling_all_reduce,
    ):

        def fn(own, all_reduce=all_reduce):
            wire = base.Wire(AXIS, jdp.AllReduce(all_reduce))
            return hooks.none().apply(jdp.flatten_buckets(plan, own), (), wire)[0]

        sums = _on_all(fn)(grads)
        for total, expected in zip(sums, _sums(grads), strict=True):
            np.testing.assert_allclose(total[0], expected, rtol=0, atol=8e-6)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: hooks.top_k(0), ValueError, "`fraction` must be above 0"),
        (lambda: hooks.top_k(1.5), ValueError, "at most 1, got 1.5"),
        (lambda: hooks.power_sgd(0), ValueError, "`rank` must be at least 1"),
        (lambda: hooks.power_sgd(1, start_step=-1), ValueError, "`start_step`"),
        (lambda: hooks.int8(chunk_size=0), ValueError, "`chunk_size`"),
        (lambda: hooks.cast("int8"), TypeError, "`dtype` must be a floating dtype"),
        (lambda: hooks.rows(0), ValueError, "`max_rows` must be at least 1, got 0"),
        (lambda: hooks.rows(0.5), TypeError, "`max_rows` must be an integer"),
        (lambda: hooks.chain(), ValueError, "`chain` needs at least one hook"),
        (lambda: hooks.chain(hooks.int8), TypeError, "`chain` takes hooks"),
        (lambda: hooks.cast("bf16"), TypeError, "got 'bf16'. Pass one such"),
        (lambda: hooks.int8(chunk_size=2.5), TypeError, "`chunk_size` must be an int"),
        (lambda: hooks.power_sgd("4"), TypeError, "`rank` must be an integer"),
        (lambda: hooks.power_sgd(1, start_step=0.5), TypeError, "`start_step` must be"),
        (
            lambda: hooks.power_sgd(1, min_compression_rate="2"),
            TypeError,
            "`min_compression_rate` must be a number",
        ),
        (lambda: hooks.top_k("0.1"), TypeError, "`fraction` must be a number"),
    ],
)
def test_options_out_of_range_are_named(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    "first",
    [
        hooks.int8(),
        hooks.top_k(0.5),
        hooks.rows(1),
        hooks.chain(hooks.cast(jnp.bfloat16), hooks.int8()),
    ],
)
def test_what_does_not_sum_belongs_at_the_end_of_a_chain(first):
    with pytest.raises(ValueError, match="Put `int8`, `top_k` or `rows` at the end"):
        hooks.chain(first, hooks.cast(jnp.bfloat16))


def test_a_hook_of_ones_own_that_does_not_sum_is_found_by_init():
    own = hooks.int8()._replace(only_sums=True)
    hook = hooks.chain(own, hooks.cast(jnp.bfloat16))
    with pytest.raises(ValueError, match="Put `int8`, `top_k` or `rows` at the end"):
        hook.init(_plan().bucket_avals())


@pytest.mark.parametrize("scale", [1.5e-38, 1e-36, 1e-20, 1.0, 1e20, 8e37])
def test_int8_sends_every_magnitude_of_float32(scale):
    x = np.array([[1, -0.5, 0.25, 1], [1, 1, -1, 0.5]] * 2, np.float32) * scale

    def fn(x):
        return hooks.int8(chunk_size=2).apply([x], (), base.Wire(AXIS, None))[0][0]

    total = np.asarray(_on_all(fn)(x), np.float64)
    # Half a step of each replica, and of the sum; and what is subnormal becomes zero.
    bound = 4 * scale * (1 / 127) + 4 * 1.2e-38
    assert np.abs(total - np.float64(x).sum(0)).max() <= bound
    assert np.abs(total[:, 0] / scale - 4).max() <= 4 / 127


@pytest.mark.parametrize("scale", [1.5e-38, 1e-36, 8e37])
def test_so_it_does_in_a_step_that_xla_rearranges(scale):
    # What tests leave out otherwise.
    optimized = {
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    }
    world = harness.local_world(4)

    @jdp.data_parallel(world=world, donate_state=False, compiler_options=optimized)
    def step(state, x):
        grads = {"w": jnp.ones((64, 64)) * x[0]}
        return jdp.sync_gradients(grads, hook=hooks.int8()), {}

    x = np.full(4, scale, np.float32)
    found, _ = step({"w": jnp.zeros((64, 64))}, x)
    np.testing.assert_allclose(found["w"], scale, rtol=1e-5)
