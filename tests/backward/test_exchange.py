"""Weighted losses with collectives of the user's, and with backward rules of their own.

Gradients are those of the mean of the losses, which `vmap` computes on one device with
parameters that all replicas share.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdp
from jdp.gradients import step_trace
from jdp.gradients.step_trace import StepTrace
from jdp.gradients.weighted_mean import Weighting
from tests import harness, rarely
from tests.transforms import AXIS, COMPILED_FAST

N, SIZE, FEATURES = 3, 4, 2
COUNTS = {"equal": [2, 2, 2], "unequal": [4, 1, 3], "one without": [3, 0, 1]}
RTOL = {jnp.float32: 2e-5, jnp.float16: 1e-2, jnp.bfloat16: 6e-2}


@jax.custom_vjp
def _clip(x):
    return x


_clip.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.maximum(1, 20 * abs(g).max()),))


@jax.custom_vjp
def _inject(x, auxiliary):
    return x


_inject.defvjp(lambda x, _: (x, None), lambda _, g: (g, jnp.ones(())))


@jax.custom_vjp
def _sum_both_ways(x):
    return lax.psum(x, AXIS) + 0 * x  # `vmap` takes it to differ, so that it sums once.


_sum_both_ways.defvjp(
    lambda x: (_sum_both_ways(x), None), lambda _, g: (lax.psum(g, AXIS),)
)


def _gather(h, w):
    everything = lax.all_gather(h * w, AXIS, tiled=True)
    return h - jnp.tanh(everything).sum()


def _centre(h, w, psum=lambda x: lax.psum(x, AXIS)):
    return h - psum((h * w).sum()) / lax.psum(w.sum(), AXIS).astype(h.dtype)


def _scanned(h, w):
    def body(h, _):
        return _centre(jnp.sin(h), w), None

    return lax.scan(jax.checkpoint(body), h, None, length=2)[0]


def _chosen(h, w):
    is_any = lax.psum(w.sum(), AXIS) > 0
    branches = (lambda h: _centre(jax.jit(_gather)(h, w), w), lambda h: h)
    return lax.cond(is_any, *branches, h)


LAYERS = {
    "all_gather": _gather,
    "psum": _centre,
    "scan and remat": _scanned,
    "cond and jit": _chosen,
    "a rule that sums": functools.partial(_centre, psum=_sum_both_ways),
    "permute": lambda h, w: (
        h + (jnp.sin(lax.ppermute(h * w, AXIS, [(i, (i + 1) % N) for i in range(N)])))
    ),
    "clip": lambda h, w: _clip(h),
    "inject": lambda h, w: _inject(h, jnp.sum(h.astype(jnp.float32) ** 2 * w)),
    "clip and psum": lambda h, w: _clip(_centre(h, w)),
}


def _make_loss(layer, dtype=jnp.float32, *, is_safe=False):
    def loss_fn(params, x, w):
        h = jnp.tanh(x.astype(dtype) @ params["w"].astype(dtype) + 0.5)
        h = LAYERS[layer](h, w.astype(dtype)).astype(jnp.float32)
        total = jnp.maximum(w.sum(), 1) if is_safe else w.sum()  # 0 / 0 without data.
        return ((h - x[:, 0]) ** 2 * w).sum() / total

    return loss_fn


def _inputs(counts):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(N, SIZE, FEATURES)).astype(np.float32)
    w = np.array([[k < c for k in range(SIZE)] for c in counts], np.float32)
    return {"w": np.array([0.7, -0.4], np.float32)}, x, w


def _shares(w, divide_by):
    amounts = w.sum(1)
    active = (amounts > 0).astype(np.float32)
    if divide_by == "weight":
        return amounts / amounts.sum()
    return active / (active.sum() if divide_by == "active" else N)


def _expected(loss_fn, params, x, w, shares):
    """The gradient of the mean of the losses, of parameters that replicas share."""

    def mean(params):
        losses = jax.vmap(loss_fn, (None, 0, 0), axis_name=AXIS)(params, x, w)
        return (jnp.asarray(shares) * losses).sum()

    return np.asarray(harness.jit_fast(jax.grad(mean))(params)["w"])


def _of_each(loss_fn, params, x, w, shares):
    """The mean of the gradients that each replica has alone."""
    grad_fn = harness.jit_fast(jax.grad(loss_fn))
    each = [
        s * np.asarray(grad_fn(params, x[r], w[r])["w"])
        for r, s in enumerate(shares)
        if s
    ]
    return np.sum(each, 0)


def _weighted(loss_fn, divide_by="weight", *, accumulate=False):
    def fn(params, local):
        x, w = local
        if accumulate:
            grad_fn = jdp.accumulate_gradients(
                loss_fn, 2, weight=w, divide_by=divide_by
            )
        else:
            grad_fn = jdp.value_and_grad(loss_fn, weight=w.sum(), divide_by=divide_by)
        return grad_fn(params, x, w)[1]["w"]

    return fn


EXCHANGING = [k for k in LAYERS if k not in ("clip", "inject", "clip and psum")]


@pytest.mark.parametrize("counts", rarely.cases(COUNTS, often=("one without",)))
@pytest.mark.parametrize("layer", EXCHANGING)
def test_losses_with_collectives_are_weighed_before_the_backward_pass(layer, counts):
    params, x, w = _inputs(COUNTS[counts])
    expected = _expected(
        _make_loss(layer, is_safe=True), params, x, w, _shares(w, "weight")
    )
    fn = _weighted(_make_loss(layer))
    found = COMPILED_FAST["vmap"](fn, N, params, (x, w))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(
    "run",
    rarely.cases(["shard_map", "shard_map unchecked", "pmap"], often=["shard_map"]),
)
@pytest.mark.parametrize("divide_by", ["weight", "active", "world"])
def test_a_replica_without_data_sends_no_cotangent(run, divide_by):
    params, x, w = _inputs(COUNTS["one without"])
    shares = _shares(w, divide_by)
    expected = _expected(_make_loss("psum", is_safe=True), params, x, w, shares)
    fn = _weighted(_make_loss("psum"), divide_by)
    found = COMPILED_FAST[run](fn, N, params, (x, w))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("layer", ["all_gather", "psum"])
@pytest.mark.parametrize("counts", ["unequal", "one without"])
def test_collectives_of_16_bits_are_weighed_in_time(layer, dtype, counts):
    params, x, w = _inputs(COUNTS[counts])
    shares = _shares(w, "weight")
    expected = _expected(_make_loss(layer, is_safe=True), params, x, w, shares)
    fn = _weighted(_make_loss(layer, dtype))
    found = COMPILED_FAST["vmap"](fn, N, params, (x, w))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=RTOL[dtype] * scale)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("layer", ["clip", "inject"])
def test_a_rule_that_is_not_linear_sees_an_unweighted_loss(layer, counts):
    params, x, w = _inputs(COUNTS[counts])
    loss_fn = _make_loss(layer)
    expected = _of_each(loss_fn, params, x, w, _shares(w, "weight"))
    found = COMPILED_FAST["vmap"](_weighted(loss_fn), N, params, (x, w))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_equal_weights_change_nothing_for_a_rule_behind_a_collective():
    params, x, w = _inputs(COUNTS["equal"])
    loss_fn = _make_loss("clip and psum")

    def unweighted(params, local):
        return jdp.value_and_grad(loss_fn)(params, *local)[1]["w"]

    expected = COMPILED_FAST["vmap"](unweighted, N, params, (x, w))
    found = COMPILED_FAST["vmap"](_weighted(loss_fn), N, params, (x, w))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("divide_by", ["weight", "active", "world"])
@pytest.mark.parametrize(
    "counts", rarely.cases(["unequal", "one without"], often=("one without",))
)
def test_micro_batches_with_collectives_are_weighed_in_time(counts, divide_by):
    params, x, w = _inputs(COUNTS[counts])
    loss_fn = _make_loss("all_gather", is_safe=True)
    of_replicas = _shares(w, divide_by)
    expected = 0
    for k in range(2):
        part, own = x[:, 2 * k : 2 * k + 2], w[:, 2 * k : 2 * k + 2]
        shares = of_replicas * own.sum(1) / np.maximum(w.sum(1), 1)
        expected += _expected(loss_fn, params, part, own, shares.astype(np.float32))
    fn = _weighted(_make_loss("all_gather"), divide_by, accumulate=True)
    found = COMPILED_FAST["vmap"](fn, N, params, (x, w))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("layer", ["clip", "clip and psum"])
def test_equal_weights_of_micro_batches_change_nothing_for_a_rule(layer):
    params, x, _ = _inputs(COUNTS["equal"])
    w = np.ones((N, SIZE), np.float32)
    loss_fn = _make_loss(layer)

    def unweighted(params, local):
        return jdp.accumulate_gradients(loss_fn, 2)(params, *local)[1]["w"]

    expected = COMPILED_FAST["vmap"](unweighted, N, params, (x, w))
    fn = _weighted(loss_fn, accumulate=True)
    found = COMPILED_FAST["vmap"](fn, N, params, (x, w))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def _step_messages(step, params, *batches):
    world = harness.local_world(N)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jdp.data_parallel(step, world=world)(jdp.replicate(world, params), *batches)
    return [str(w.message) for w in caught if "weighted after" in str(w.message)]


@pytest.mark.parametrize(
    ("layer", "count"), [("all_gather", 1), ("inject", 0)], ids=["with", "without"]
)
def test_gradients_weighed_after_a_loss_with_collectives_are_warned_of(layer, count):
    def step(params, x, w):
        _, grads = jdp.local_gradients(_make_loss(layer))(params, x, w)
        return jdp.sync_gradients(grads, weight=w.sum()), {}

    params, x, w = _inputs(COUNTS["unequal"])
    messages = _step_messages(step, params, x.reshape(-1, FEATURES), w.ravel())
    assert len(messages) == count
    assert all("`lax.all_gather` (test_exchange.py:" in m for m in messages)


def test_collectives_that_no_gradient_goes_through_are_no_matter():
    def step(params, x, w):
        def loss_fn(params):
            h = x @ params["w"]
            count = lax.psum(w.sum(), AXIS)
            return (h * w).sum() / count, lax.pmean(h.mean(), AXIS)

        (_, aux), grads = jdp.local_gradients(loss_fn, has_aux=True)(params)
        return jdp.sync_gradients(grads, weight=w.sum()), {"mean": aux}

    params, x, w = _inputs(COUNTS["unequal"])
    assert not _step_messages(step, params, x.reshape(-1, FEATURES), w.ravel())


@pytest.mark.parametrize("divide_by", ["active", "world"])
def test_who_has_joined_sends_no_cotangent(divide_by):
    """As a step in a `jdp.Join`, which is told of no weight."""
    params, x, w = _inputs([SIZE, 0, SIZE])

    def loss_fn(params, x):  # NaN on zeros, which the joined ones run on.
        h = jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16))
        everything = lax.all_gather(h.astype(jnp.float32), AXIS, tiled=True)
        return (h.astype(jnp.float32).mean() - everything.mean()) ** 2 + (
            abs(x).sum() / abs(x).sum() * h.astype(jnp.float32).mean()
        )

    x = x * (w[:, :1, None] > 0)
    shares = _shares(w, divide_by)

    def mean(params):
        means = jnp.tanh(x @ params["w"]).mean(1)
        losses = (means - means.mean()) ** 2 + means
        return (shares * losses).sum()

    expected = np.asarray(jax.grad(mean)(params)["w"])

    def fn(params, local):
        x, amount = local
        with step_trace.running(StepTrace(), Weighting(amount, divide_by)):
            whole = jdp.value_and_grad(loss_fn)(params, x)[1]["w"]
            _, grads = jdp.local_gradients(loss_fn)(params, x)
            micro = jdp.accumulate_gradients(loss_fn, 1)(params, x)[1]["w"]
            return whole, jdp.sync_gradients(grads)["w"], micro

    amounts = (w[:, 0] > 0).astype(np.float32)
    for found in COMPILED_FAST["vmap"](fn, N, params, (x, amounts)):
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3)


def test_statistics_of_all_replicas_may_still_become_state():
    def step(params, x, w):
        def loss_fn(params):
            h = jnp.tanh(x @ params["w"])
            mean = lax.pmean(h.mean(), AXIS)
            return ((h - mean) ** 2 * w).sum() / w.sum(), mean

        grad_fn = jdp.value_and_grad(loss_fn, has_aux=True, weight=w.sum())
        (_, mean), grads = grad_fn(params)
        return {"w": grads["w"] + mean}, {}

    params, x, w = _inputs(COUNTS["one without"])
    world = harness.local_world(N)
    state, _ = jdp.data_parallel(step, world=world)(
        jdp.replicate(world, params), x.reshape(-1, FEATURES), w.ravel()
    )
    assert np.isfinite(np.asarray(state["w"])).all()
