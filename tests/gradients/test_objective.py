"""`jdp.mean_loss` and its derivatives are those of the whole batch on one device."""

import functools
import inspect

import chex
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
from tests.transforms import AXIS, COMPILED_FAST, transforms_compiled_fast

N = 4
# Sums of 16 terms of order 1 in another order, and what comes of them.
ATOL = 64 * np.finfo(np.float32).eps
PARAMS, (BATCH,) = harness.oracle_params(), harness.oracle_batches(1)
SPLIT = jax.tree.map(lambda x: x.reshape(N, -1, *x.shape[1:]), BATCH)
_rng = np.random.default_rng(1)
TANGENT = jax.tree.map(lambda x: _rng.normal(size=x.shape).astype(x.dtype), PARAMS)


def _dot(a, b):
    return sum(
        jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def _of_points(fn, params):
    """Several points at once, as a search may look at them."""
    return jax.vmap(lambda s: fn(jax.tree.map(lambda x: s * x, params)))(
        jnp.arange(1.0, 4.0)
    )


def _stepped(fn, params):
    return jax.tree.map(lambda x, g: x - 0.1 * g, params, jax.grad(fn)(params))


def _descend(fn, params):
    """Steps in a `while`, some of them in a `cond`, for as long as the value says."""

    def body(state):
        params, value, k = state
        params = lax.cond(value > 0.1, lambda p: _stepped(fn, p), lambda p: p, params)
        return params, fn(params), k + 1

    start = params, fn(params), 0
    return lax.while_loop(lambda s: (s[1] > 1e-3) & (s[2] < 3), body, start)[:2]


def _through_a_scan(fn, params):
    """A gradient through a loop of steps that use gradients."""

    def unrolled(params):
        def body(p, _):
            return _stepped(fn, p), fn(p)

        end, values = lax.scan(body, params, length=2)
        return fn(end) + values.sum()

    return jax.grad(unrolled)(params)


DERIVATIVES = {
    "value and gradient": lambda fn, p: jax.value_and_grad(fn)(p),
    "forwards": lambda fn, p: jax.jvp(fn, (p,), (TANGENT,)),
    "forwards over backwards": lambda fn, p: jax.jvp(jax.grad(fn), (p,), (TANGENT,)),
    "backwards over backwards": lambda fn, p: jax.grad(
        lambda q: _dot(jax.grad(fn)(q), TANGENT)
    )(p),
    "remat": lambda fn, p: jax.grad(jax.checkpoint(fn))(p),
    "vmap": lambda fn, p: _of_points(jax.value_and_grad(fn), p),
    "while and cond": _descend,
    "scan": _through_a_scan,
}


def _all_of(fn, params):
    return {name: derive(fn, params) for name, derive in DERIVATIVES.items()}


@functools.cache
def _expected():
    return jax.jit(lambda p: _all_of(lambda q: harness.oracle_loss(q, BATCH), p))(
        PARAMS
    )


def _assert_as_on_one_device(found, expected):
    chex.assert_trees_all_close(found, expected, atol=ATOL, rtol=ATOL)
    chex.assert_trees_all_equal_dtypes(found, expected)


@transforms_compiled_fast
def test_all_derivatives_are_those_of_the_whole_batch(run):
    def fn(params, batch):
        mean = jdp.mean_loss(harness.oracle_loss)
        return _all_of(lambda p: mean(p, batch), params)

    _assert_as_on_one_device(run(fn, N, PARAMS, SPLIT), _expected())


OPTIONS = {
    "tuple": {"packing": "tuple"},
    "small buckets": {"plan": jdp.plan_buckets(PARAMS, bucket_bytes=64)},
    "ring": {"all_reduce": jdp.collectives.ring_all_reduce},
    "small tuples": {
        "packing": "tuple",
        "plan": jdp.plan_buckets(PARAMS, bucket_bytes=64),
    },
}


@pytest.mark.parametrize(
    "options",
    rarely.cases(OPTIONS.values(), often=list(OPTIONS.values())[::2]),
    ids=OPTIONS,
)
def test_and_so_they_are_however_gradients_travel(options):
    def fn(params, batch):
        mean = jdp.mean_loss(harness.oracle_loss, **options)
        return _all_of(lambda p: mean(p, batch), params)

    run = COMPILED_FAST["shard_map unchecked"]
    _assert_as_on_one_device(run(fn, N, PARAMS, SPLIT), _expected())


def _count_sums(options):
    def fn(params, batch):
        return jax.grad(jdp.mean_loss(harness.oracle_loss, **options))(params, batch)

    local = jax.tree.map(lambda x: x[0], SPLIT)
    jaxpr = jax.make_jaxpr(fn, axis_env=[(AXIS, N)])(PARAMS, local)
    return [len(e.invars) for e in jaxpr.eqns if e.primitive.name.startswith("psum")]


def test_gradients_travel_in_buckets():
    # The mean of the losses travels, too; its transpose sums the cotangent of it.
    assert len(_count_sums({"plan": jdp.plan_buckets(PARAMS)})) == 3
    per_leaf = jdp.plan_buckets(PARAMS, bucket_bytes=0, first_bucket_bytes=0)
    assert len(_count_sums({"plan": per_leaf})) == 2 + len(PARAMS)


COUNTS = [3, 0, 4, 1]  # samples of the replicas.
WEIGHT = np.array([[k < c for k in range(4)] for c in COUNTS], np.float32)


def _weighed_loss(params, batch, weight):
    """Divides by zero where there is no data."""
    h = jnp.tanh(batch["x"] @ params["w0"] + params["b0"])
    errors = ((h @ params["w1"] + params["b1"] - batch["y"]) ** 2).mean(-1)
    return (errors * weight).sum() / weight.sum()


@transforms_compiled_fast
@pytest.mark.parametrize("divide_by", ["weight", "active"])
def test_replicas_count_by_their_samples_and_not_at_all_without(run, divide_by):
    def fn(params, local):
        batch, weight = local
        mean = jdp.mean_loss(_weighed_loss, weight=weight.sum(), divide_by=divide_by)
        return _some_of(lambda p: mean(p, batch, weight), params)

    def alone(params):
        share = WEIGHT.sum(1) if divide_by == "weight" else WEIGHT.any(1)
        with_data = [r for r in range(N) if COUNTS[r]]
        local = [jax.tree.map(lambda x, r=r: x[r], SPLIT) for r in range(N)]
        losses = [
            share[r] * _weighed_loss(params, local[r], WEIGHT[r]) for r in with_data
        ]
        return sum(losses) / share.sum()

    found = run(fn, N, PARAMS, (SPLIT, WEIGHT))
    _assert_as_on_one_device(found, jax.jit(lambda p: _some_of(alone, p))(PARAMS))


@transforms_compiled_fast
@pytest.mark.parametrize("divide_by", ["weight", "active"])
def test_replicas_without_data_send_nothing_through_a_collective(run, divide_by):
    def loss_fn(params, local, divide):
        batch, weight = local
        h = batch["x"] @ params["w0"]
        total = lax.psum((h * weight[:, None]).sum(0), AXIS)
        h = jnp.tanh(h - total / lax.psum(weight.sum(), AXIS)) ** 3
        return divide((h.mean(-1) * weight).sum(), weight.sum())

    def fn(params, local):
        mean = jdp.mean_loss(
            lambda p: loss_fn(p, local, jnp.divide),  # By zero, in one replica.
            weight=local[1].sum(),
            divide_by=divide_by,
        )
        return _some_of(mean, params)

    def whole(params):
        def own(batch, weight):
            def divide(x, y):
                return x / jnp.where(y > 0, y, 1)

            return loss_fn(params, (batch, weight), divide)

        share = WEIGHT.sum(1) if divide_by == "weight" else WEIGHT.any(1)
        losses = jax.vmap(own, axis_name=AXIS)(SPLIT, WEIGHT)
        return (losses * share).sum() / share.sum()

    found = run(fn, N, PARAMS, (SPLIT, WEIGHT))
    _assert_as_on_one_device(found, jax.jit(lambda p: _some_of(whole, p))(PARAMS))


def _some_of(fn, params):
    names = ("value and gradient", "forwards over backwards")
    return [DERIVATIVES[name](fn, params) for name in names]


@transforms_compiled_fast
def test_without_any_data_value_and_gradient_are_zero(run):
    def fn(params, local):
        batch, weight = local
        mean = jdp.mean_loss(_weighed_loss, weight=weight.sum())
        return jax.value_and_grad(mean)(params, batch, weight)

    found = run(fn, N, PARAMS, (SPLIT, np.zeros_like(WEIGHT)))
    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, PARAMS)
    chex.assert_trees_all_equal(found, zeros)


@transforms_compiled_fast
def test_a_loss_with_statistics_of_all_samples_has_the_gradient_through_them(run):
    def loss_fn(params, batch, mean):
        h = batch["x"] @ params["w0"]
        h = h - mean(h.mean(0)) + mean((batch["y"] ** 2).mean())
        return (jnp.tanh(h) ** 3).mean()

    def fn(params, batch):
        mean = jdp.mean_loss(lambda p, b: loss_fn(p, b, lambda x: lax.pmean(x, AXIS)))
        return _some_of(lambda p: mean(p, batch), params)

    expected = _some_of(lambda p: loss_fn(p, BATCH, lambda x: x), PARAMS)
    _assert_as_on_one_device(run(fn, N, PARAMS, SPLIT), expected)


@transforms_compiled_fast
def test_in_a_loss_of_jdp_it_is_the_mean_that_it_is(run):
    def fn(params, batch):
        mean = jdp.mean_loss(harness.oracle_loss)

        def loss_fn(params, batch):
            own = harness.oracle_loss(params, batch)
            return own * mean(params, batch) + own

        return jdp.value_and_grad(loss_fn)(params, batch)

    def alone(params):
        loss = harness.oracle_loss(params, BATCH)
        return loss * loss + loss

    expected = jax.value_and_grad(alone)(PARAMS)
    _assert_as_on_one_device(run(fn, N, PARAMS, SPLIT), expected)


@transforms_compiled_fast
def test_the_places_of_parameters_are_those_of_argnums(run):
    def loss_fn(batch, scale, params):
        return scale * harness.oracle_loss(params, batch)

    def fn(params, batch):
        mean = jdp.mean_loss(loss_fn, argnums=(2, 1))
        return jax.grad(mean, argnums=(1, 2))(batch, 2.0, params)

    expected = jax.grad(loss_fn, argnums=(1, 2))(BATCH, 2.0, PARAMS)
    _assert_as_on_one_device(run(fn, N, PARAMS, SPLIT), expected)


def test_where_a_replica_is_known_to_have_no_data_it_needs_no_weight():
    has_data = np.float32([1, 1, 0, 1])

    def fn(params, local):
        batch, amount = local
        mean = jdp.mean_loss(lambda p, b: harness.oracle_loss(p, b) * jnp.log(amount))
        with step_trace.running(StepTrace(), Weighting(amount, "weight")):
            return _some_of(lambda p: mean(p, batch) + _own(p, batch), params)

    def _own(params, batch):
        return jdp.mean_loss(harness.oracle_loss)(params, batch)

    run = COMPILED_FAST["shard_map unchecked"]
    found = run(fn, N, PARAMS, (SPLIT, has_data))
    with_data = jax.tree.map(lambda x: x[has_data > 0].reshape(12, -1), SPLIT)
    expected = _some_of(lambda p: harness.oracle_loss(p, with_data), PARAMS)
    _assert_as_on_one_device(found, expected)


def test_a_parameter_that_is_not_used_is_seen_through_it():
    def loss_fn(params, batch):
        return jdp.mean_loss(lambda p, b: (b["x"] @ p["w0"]).mean())(params, batch)

    def fn(params, batch):
        grad_fn = jdp.value_and_grad(loss_fn, find_unused=True)
        _, used = grad_fn(params, batch)
        assert used == {"w0": True, "b0": False, "w1": False, "b1": False}
        return 0.0

    with pytest.warns(UserWarning, match="3 of 4 parameters can never receive"):
        COMPILED_FAST["vmap"](fn, N, PARAMS, SPLIT)


def _whole_step(state, batch):
    fn = jdp.mean_loss(harness.oracle_loss)
    value, grads = jax.value_and_grad(fn)(state, batch)
    new = jax.tree.map(lambda x, g: x - g, state, grads)
    return new, {"before": value, "after": fn(new, batch)}


def test_a_step_shows_what_it_sends_and_nothing_of_this_process():
    world = harness.local_world(N)
    step = jdp.data_parallel(_whole_step, world=world)
    text = jdp.describe(step, PARAMS, BATCH)
    (made,) = text.synchronizations
    assert [leaf.path for b in made.buckets for leaf in b.leaves] == [
        "['b1']",
        "['w1']",
        "['b0']",
        "['w0']",
    ]
    local = jax.tree.map(lambda x: x[0], SPLIT)
    program = str(jax.make_jaxpr(_whole_step, axis_env=[(AXIS, N)])(PARAMS, local))
    assert "transpose=mean_over_replicas" in program and "0x" not in program


def test_it_looks_like_the_loss_to_what_reads_its_arguments():
    mean = jdp.mean_loss(harness.oracle_loss)
    assert inspect.signature(mean) == inspect.signature(harness.oracle_loss)


def test_of_one_replica_it_is_the_loss():
    fn = COMPILED_FAST["shard_map unchecked"]

    def both(params, batch):
        mean = jdp.mean_loss(harness.oracle_loss)
        return jax.value_and_grad(mean)(params, batch)

    found = fn(both, 1, PARAMS, jax.tree.map(lambda x: x[None], BATCH))
    expected = jax.value_and_grad(harness.oracle_loss)(PARAMS, BATCH)
    _assert_as_on_one_device(found, expected)


def _take_step(make_step, check_vma):
    step = jdp.data_parallel(
        make_step, world=harness.local_world(N), check_vma=check_vma
    )
    return jax.tree.map(np.asarray, step(PARAMS, BATCH)[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_may_use_plain_jax_and_is_seen_to_be_the_same_on_all(check_vma):
    def step(params, batch):
        loss, grads = jax.value_and_grad(jdp.mean_loss(harness.oracle_loss))(
            params, batch
        )
        return jax.tree.map(lambda x, g: x - g, params, grads), {"loss": loss}

    grads = jax.grad(harness.oracle_loss)(PARAMS, BATCH)
    expected = jax.tree.map(lambda x, g: x - g, PARAMS, grads)
    _assert_as_on_one_device(_take_step(step, check_vma), expected)


def test_parameters_that_may_differ_are_refused_by_name():
    def step(params, batch):
        own = jax.grad(harness.oracle_loss)(params, batch)
        params = jax.tree.map(lambda x, g: x - g, params, own)
        return params, {"loss": jdp.mean_loss(harness.oracle_loss)(params, batch)}

    with pytest.raises(ValueError, match=r"The parameter `\['b0'\]` of a `jdp.mean"):
        _take_step(step, False)


def test_a_mean_in_the_backward_pass_that_would_weight_twice_is_refused():
    def loss_fn(params, batch):
        return harness.oracle_loss(jdp.sync_in_backward(params), batch)

    def grad(weight):
        mean = jdp.mean_loss(loss_fn, weight=weight)
        return lambda params, batch: jax.grad(mean)(params, batch)

    run = COMPILED_FAST["shard_map unchecked"]
    expected = jax.grad(harness.oracle_loss)(PARAMS, BATCH)
    _assert_as_on_one_device(run(grad(None), N, PARAMS, SPLIT), expected)
    with pytest.raises(ValueError, match="weight their gradients again"):
        run(grad(2.0), N, PARAMS, SPLIT)


def test_outside_of_a_step_and_for_no_scalar_it_says_so():
    with pytest.raises(ValueError, match="is not bound here"):
        jdp.mean_loss(harness.oracle_loss)(PARAMS, BATCH)
    run = COMPILED_FAST["vmap"]
    with pytest.raises(ValueError, match="must return a scalar loss"):
        run(lambda p, b: jdp.mean_loss(lambda p, b: p["b0"])(p, b), N, PARAMS, SPLIT)


MESSAGES = {
    "the state": lambda fn, p: jax.tree.map(jnp.subtract, p, jax.grad(fn)(p)),
    "a branch": lambda fn, p: lax.cond(
        jax.grad(fn)(p)["b0"][0] > 0,
        lambda: jax.tree.map(lambda x: x * fn(p), p),
        lambda: p,
    ),
    "a loop": lambda fn, p: lax.while_loop(
        lambda q: jax.grad(fn)(q)["b0"][0] > 0, lambda q: _scaled(q, fn(q)), p
    ),
}


def _scaled(tree, x):
    return jax.tree.map(lambda leaf: leaf * x, tree)


@pytest.mark.parametrize("use", MESSAGES.values(), ids=MESSAGES)
def test_the_gradient_of_an_average_is_refused_with_the_way_that_works(use):
    def step(params, batch):
        def average(params):
            return jdp.average(harness.oracle_loss(params, batch))

        return use(average, params), {}

    with pytest.raises(ValueError, match="jdp.mean_loss"):
        _take_step(step, False)
