"""A weighted mean is as precise as its dtype, and finite where the exact one is."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jdp
from tests import rarely
from tests.transforms import AXIS, COMPILED_FAST

N = 4
WEIGHTS = np.array([3, 1, 0, 2], np.float32)


def _loss(params, x):
    return (params * x).sum()


def _exchanged(params, x):
    return _loss(params, x) + 0 * lax.psum(params.sum(), AXIS)


def _through_zero1(params, x, hook=None, **options):
    tx = jdp.zero1(optax.sgd(-1.0), hook=hook)
    _, grads = jdp.local_gradients(_loss)(params, x)
    return tx.update(grads, tx.init(params), params, **options)[0]


def _through_accumulation(params, x, weight):
    twice = functools.partial(jax.tree.map, lambda x: jnp.stack([x, x]))
    loss_fn = lambda p, x: _exchanged(p, x.mean(0))  # noqa: E731
    grad_fn = jdp.accumulate_gradients(loss_fn, 2, weight=twice(weight))
    return grad_fn(params, twice(x))[1]


# By what the mean of gradients is taken; each of (params, x, weight).
WAYS = {
    "sync_gradients": lambda p, x, w: jdp.sync_gradients(x, weight=w),
    "hook": lambda p, x, w: jdp.sync_gradients(x, weight=w, hook=jdp.hooks.none()),
    "average": lambda p, x, w: jdp.average(x, weight=w),
    "loss": lambda p, x, w: jdp.value_and_grad(_loss, weight=w)(p, x)[1],
    "exchange": lambda p, x, w: jdp.value_and_grad(_exchanged, weight=w)(p, x)[1],
    "mean_loss": lambda p, x, w: jax.grad(jdp.mean_loss(_loss, weight=w))(p, x),
    "in backward": lambda p, x, w: jdp.value_and_grad(
        lambda p, x: _loss(jdp.sync_in_backward(p, weight=w), x), weight=w
    )(p, x)[1],
    "accumulation": _through_accumulation,
    "zero1": lambda p, x, w: _through_zero1(p, x, weight=w),
    "zero1 with a hook": lambda p, x, w: _through_zero1(
        p, x, jdp.hooks.none(), weight=w
    ),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
transforms = pytest.mark.parametrize("name", ["shard_map", "shard_map unchecked"])


def _mean(name, way, x, amounts):
    fn = lambda p, local: way(p, *local)  # noqa: E731
    zeros = np.zeros(x.shape[1:], x.dtype)
    return np.asarray(COMPILED_FAST[name](fn, N, zeros, (x, amounts)))


def _expected(x, amounts):
    return np.tensordot(np.float64(amounts), np.float64(x), 1) / amounts.sum()


@transforms
@ways
def test_float16_is_finite_where_the_mean_is(way, name):
    # The largest is times n w / W = 2.
    x = np.zeros((N, 3), np.float16)
    x[0] = [50000, -65504, 1]
    found = _mean(name, way, x, WEIGHTS)
    assert found.dtype == np.float16
    expected = _expected(x, WEIGHTS)
    np.testing.assert_allclose(np.float64(found), expected, rtol=2**-10)


@pytest.mark.parametrize("divide_by", ["active", "world"])
def test_so_it_is_where_each_replica_counts_the_same(divide_by):
    x = np.zeros((N, 2), np.float16)
    x[0] = [60000, -60000]
    ways = [
        lambda p, x, w: jdp.sync_gradients(x, weight=w, divide_by=divide_by),
        lambda p, x, w: jax.grad(jdp.mean_loss(_loss, weight=w, divide_by="active"))(
            p, x
        ),
    ]
    divisor = 1 if divide_by == "active" else N
    for way, by in zip(ways, (divisor, 1), strict=True):
        found = _mean("shard_map unchecked", way, x, np.float32([5, 0, 0, 0]))
        np.testing.assert_array_equal(np.float64(found), x[0] / by)


@ways
def test_float16_keeps_what_it_holds_near_zero(way):
    tiny = float(jnp.finfo(jnp.float16).smallest_subnormal)
    x = np.full((N, 3), 5 * tiny, np.float16)
    # All have the mean. Micro-batches are added up in the dtype of the parameters.
    error = 1 if way is _through_accumulation else 0
    found = _mean("shard_map unchecked", way, x, np.float32([4, 4, 0, 4]))
    assert np.abs(np.float64(found) - 5 * tiny).max() <= error * tiny
    # Replicas that count less may lose half of the smallest number.
    found = _mean("shard_map unchecked", way, x, WEIGHTS)
    assert np.abs(np.float64(found) - 5 * tiny).max() <= (1 + error) * tiny


@ways
@pytest.mark.parametrize("amounts", [[3, 1, 0, 2], [0.1, 0.3, 0.0, 0.7]])
def test_float64_keeps_its_digits(way, amounts):
    with _x64():
        x = np.random.default_rng(0).normal(size=(N, 5))
        amounts = np.array(amounts)
        found = _mean("shard_map unchecked", way, x, amounts)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, _expected(x, amounts), rtol=0, atol=4e-15)


@contextlib.contextmanager
def _x64():
    with jax.enable_x64(True):
        yield


@ways
@pytest.mark.parametrize("bad", [np.nan, -1.0])
def test_a_weight_that_is_no_number_of_samples_makes_nan(way, bad):
    found = _mean(
        "shard_map unchecked",
        way,
        np.ones((N, 2), np.float32),
        np.float32([1, bad, 0, 2]),
    )
    assert np.isnan(found).all()


@pytest.mark.parametrize("divide_by", ["weight", "active", "world"])
@pytest.mark.parametrize("bad", rarely.cases([np.nan, -1.0, -np.inf], often=(-1.0,)))
@pytest.mark.parametrize("n", [1, 3])
def test_it_does_so_whatever_divides(divide_by, bad, n):
    amounts = np.array([bad, 2, 1][:n], np.float32)

    def fn(p, local):
        x, weight = local
        options = {"weight": weight, "divide_by": divide_by}
        mean = jdp.mean_loss(_loss, **options)
        tx = jdp.distributed_optimizer(optax.sgd(1.0), divide_by=divide_by)
        zero = jdp.zero1(optax.sgd(1.0), divide_by=divide_by)
        return [
            jdp.sync_gradients(x, **options),
            jdp.sync_gradients(x, **options, hook=jdp.hooks.none()),
            jdp.average(x, **options),
            jdp.value_and_grad(_loss, **options)(p, x),
            jdp.value_and_grad(_exchanged, **options)(p, x),
            jax.value_and_grad(mean)(p, x),
            tx.update(x, tx.init(p), p, weight=weight)[0],
            zero.update(x, zero.init(p), p, weight=weight)[0],
        ]

    ones = np.ones(2, np.float32)
    found = COMPILED_FAST["shard_map unchecked"](
        fn, n, ones, (np.ones((n, 2), np.float32), amounts)
    )
    assert all(np.isnan(x).all() for x in jax.tree.leaves(found)), found


def test_a_sample_of_a_negative_weight_makes_nan_however_it_is_cut():
    def fn(p, local):
        x, weight = local
        return [
            jdp.accumulate_gradients(_loss, k, weight=weight)(p, x) for k in (1, 2, 4)
        ]

    weight = np.ones((2, 4), np.float32)
    weight[1, 2] = -0.5
    found = COMPILED_FAST["vmap"](
        fn, 2, np.ones((), np.float32), (np.ones((2, 4), np.float32), weight)
    )
    assert all(np.isnan(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("weight", [-1, -0.5, np.float32(-2), np.array(-3)])
def test_a_negative_constant_is_refused(weight):
    calls = [
        lambda p, x: jdp.sync_gradients(x, weight=weight),
        lambda p, x: jdp.average(x, weight=weight),
        lambda p, x: jdp.value_and_grad(_loss, weight=weight)(p, x),
        lambda p, x: jdp.mean_loss(_loss, weight=weight)(p, x),
        lambda p, x: jdp.accumulate_gradients(_loss, 1, weight=np.full(2, weight))(
            p, x
        ),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="`weight` must be at least 0"):
            COMPILED_FAST["vmap"](call, 2, np.ones(2), np.ones((2, 2)))


@pytest.mark.parametrize(
    "name",
    rarely.cases(
        ["shard_map", "shard_map unchecked", "pmap", "vmap"],
        often=("shard_map", "vmap"),
    ),
)
def test_derivatives_of_any_order_of_a_float16_loss_are_those_of_the_mean(name):
    def fn(p, local):
        x, weight = local
        mean = jdp.mean_loss(lambda p, x: (p**3 * x).sum(), weight=weight)
        f = lambda p: mean(p, x)  # noqa: E731
        square = jax.grad(lambda p: jax.grad(lambda p: f(p) ** 2)(p).sum())(p)
        points = jax.vmap(jax.grad(f))(jnp.stack([p, p]))
        hessian = jax.grad(lambda p: jax.grad(f)(p).sum())(p)
        tangent = jax.jvp(jax.grad(f), (p,), (jnp.ones_like(p),))[1]
        return f(p), jax.grad(f)(p), hessian, tangent, square, points[1]

    x = np.float16([[1, 2], [3, 4], [np.nan, 0], [5, 6]])
    p = np.float16([1, 0.5])
    found = COMPILED_FAST[name](fn, N, p, (x, WEIGHTS))
    mean = _expected(np.nan_to_num(x), WEIGHTS)
    q = np.float64(p)
    second = 6 * q * mean
    value, first = (q**3 * mean).sum(), 3 * q**2 * mean
    of_square = 2 * (first.sum() * first + value * second)
    expected = value, first, second, second, of_square, first
    found = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
    chex.assert_trees_all_close(found, expected, rtol=2**-8)


@pytest.mark.parametrize(
    "dtype", rarely.cases([jnp.bfloat16, np.float16, np.float32], often=(jnp.bfloat16,))
)
def test_strict_promotion_finds_nothing_to_promote(dtype):
    hooks = jdp.hooks
    x = {"w": np.ones((N, 16, 12), dtype), "b": np.ones((N, 3), np.float32)}
    made = [
        hooks.none(),
        hooks.cast(np.float16),
        hooks.int8(),
        hooks.power_sgd(1),
        hooks.power_sgd(1, orthogonalization_epsilon=1e-8, start_step=2),
        hooks.rows(1),
        hooks.top_k(0.1),
        hooks.chain(hooks.power_sgd(1), hooks.cast(jnp.bfloat16)),
    ]

    def fn(p, local):
        x, weight = local
        found = []
        for hook in made:
            for options in ({}, {"weight": weight}):
                state = hooks.init_state(hook, x)
                found.append(
                    jdp.sync_gradients(x, hook=hook, hook_state=state, **options)[0]
                )
        for options in ({}, {"weight": weight}):
            tx = jdp.zero1(optax.sgd(1.0))
            found.append(tx.update(x, tx.init(p), p, **options)[0])
        return jax.tree.map(lambda x: jnp.isfinite(x).all(), found)

    p = jax.tree.map(lambda x: x[0], x)
    with jax.numpy_dtype_promotion("strict"):
        found = jax.eval_shape(
            lambda p, x: jax.vmap(fn, in_axes=(None, 0), axis_name=AXIS)(p, x),
            p,
            (x, WEIGHTS),
        )
    assert jax.tree.leaves(found)
