"""Replicas beside a model axis: what is the same over it comes back as the same."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jdp
from tests import rarely

SPECS = {"w": P(None, "tp"), "v": P("tp", None), "b": P(), "c": P("tp")}
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(6, 8)).astype(np.float32),
    "v": RNG.normal(size=(8, 3)).astype(np.float32),
    "b": RNG.normal(size=3).astype(np.float32),
    "c": RNG.normal(size=8).astype(np.float32),
}
X = RNG.normal(size=(8, 6)).astype(np.float32)
# A device's part of the model; made outside, one bucket holds all of it.
PLAN = jdp.plan_buckets(
    {"w": np.ones((6, 4), "f"), "v": np.ones((4, 3), "f")}
    | {"b": np.ones(3, "f"), "c": np.ones(4, "f")}
)


def _mesh():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))


def loss_fn(params, x):
    h = jnp.tanh(x @ params["w"] + params["c"][None])
    y = lax.psum(h @ params["v"], "tp") + params["b"][None]
    return jnp.mean(y**2)


def _expected():
    def whole(params):
        h = jnp.tanh(X @ params["w"] + params["c"])
        return jnp.mean((h @ params["v"] + params["b"]) ** 2)

    return jax.value_and_grad(whole)(PARAMS)


def _run(fn, out_specs=None):
    """Runs `fn(params, x)`, which returns loss and gradients, on the mesh."""
    mapped = jax.shard_map(
        fn,
        mesh=_mesh(),
        in_specs=(SPECS, P("dp")),
        out_specs=(P(), SPECS) if out_specs is None else out_specs,
    )
    return jax.jit(mapped)(PARAMS, X)


def _weight(x):
    return jnp.float32(x.shape[0])


def _value_and_grad(**options):
    return jdp.value_and_grad(loss_fn, axis_name="dp", **options)


def _with_norms(params, x):
    return _value_and_grad(find_norms=True, weight=_weight(x))(params, x)[0]


def _with_marks(params, x):
    return _value_and_grad(find_unused=True)(params, x)[0]


def _synced(params, x, **options):
    loss, grads = jdp.local_gradients(loss_fn, axis_name="dp")(params, x)
    grads = jdp.sync_gradients(grads, axis_name="dp", **options)
    return jdp.average(loss, axis_name="dp"), grads


def _with_state(hook, params, x, **options):
    state = jdp.hooks.init_state(hook, params, axis_name="dp", **options)
    grad_fn = _value_and_grad(hook=hook, hook_state=state, **options)
    return grad_fn(params, x)[0]


def _in_backward(params, x):
    def loss(params, x):
        params = jdp.sync_in_backward(params, axis_name="dp")
        return loss_fn(params, x)

    return jdp.value_and_grad(loss, axis_name="dp")(params, x)


def _of_optimizer(wrap, params, x):
    tx = wrap(optax.sgd(1.0), axis_name="dp")
    loss, grads = jdp.local_gradients(loss_fn, axis_name="dp")(params, x)
    updates, _ = tx.update(grads, tx.init(params), params)
    return jdp.average(loss, axis_name="dp"), jax.tree.map(lambda u: -u, updates)


EXACT = {
    "default": lambda p, x: _value_and_grad()(p, x),
    "a plan": lambda p, x: _value_and_grad(plan=PLAN)(p, x),
    "flat": lambda p, x: _value_and_grad(packing="flat")(p, x),
    "tuple": lambda p, x: _value_and_grad(packing="tuple")(p, x),
    "weight": lambda p, x: _value_and_grad(weight=_weight(x))(p, x),
    "by the world": lambda p, x: _value_and_grad(weight=_weight(x), divide_by="world")(
        p, x
    ),
    "ring": lambda p, x: _value_and_grad(
        all_reduce=jdp.collectives.ring_all_reduce, plan=PLAN
    )(p, x),
    "norms": _with_norms,
    "marks": _with_marks,
    "sync_gradients": _synced,
    "sync_gradients, a plan": functools.partial(_synced, plan=PLAN),
    "sync_gradients, weight": lambda p, x: _synced(p, x, weight=_weight(x)),
    "sync_in_backward": _in_backward,
    "accumulate": lambda p, x: jdp.accumulate_gradients(loss_fn, 2, axis_name="dp")(
        p, x
    ),
    "accumulate, weights": lambda p, x: jdp.accumulate_gradients(
        loss_fn, 1, axis_name="dp", plan=PLAN, weight=jnp.ones(len(x))
    )(p, x),
    "hook": lambda p, x: _value_and_grad(hook=jdp.hooks.none(), plan=PLAN)(p, x),
    "hook with a state": functools.partial(_with_state, jdp.hooks.top_k(1.0)),
    "hook with a state, a plan": functools.partial(
        _with_state, jdp.hooks.top_k(1.0), plan=PLAN
    ),
    "power_sgd": functools.partial(_with_state, jdp.hooks.power_sgd(3)),
    "distributed_optimizer": functools.partial(
        _of_optimizer, jdp.distributed_optimizer
    ),
    "zero1": functools.partial(_of_optimizer, jdp.zero1),
    "zero1, a plan": functools.partial(
        _of_optimizer, functools.partial(jdp.zero1, plan=PLAN)
    ),
}


@pytest.mark.parametrize("case", rarely.cases(EXACT, often=list(EXACT)[::2]))
def test_loss_and_gradients_are_those_of_the_whole_model(case):
    chex.assert_trees_all_close(_run(EXACT[case]), _expected(), rtol=1e-5, atol=1e-6)


def test_what_a_hook_rounds_is_the_same_over_the_model_axis():
    """A bucket of both kinds would be rounded by what lies beside it."""
    specs = {**SPECS, "b": P("tp")}  # one copy of each half of the mesh.
    hook = jdp.hooks.int8()
    grad_fn = _value_and_grad(hook=hook, plan=PLAN)

    def apart(params, x):
        grads = grad_fn(params, x)[1]
        return {**grads, "b": lax.pcast(grads["b"][None], "tp", to="varying")}

    copies = _run(apart, specs)["b"]
    np.testing.assert_array_equal(copies[0], copies[1])


def test_metrics_of_both_kinds_are_averaged_apart():
    def fn(params, x):
        tree = {"same": x.sum(), "own": x.sum() * params["c"].sum()}
        means = jdp.average(tree, axis_name="dp", weight=_weight(x))
        return means["same"], means["own"][None]

    same, own = _run(fn, (P(), P("tp")))
    halves = PARAMS["c"].reshape(2, 4).sum(1)
    np.testing.assert_allclose(same, X.sum() / 2, rtol=1e-5)
    np.testing.assert_allclose(own, X.sum() / 2 * halves, rtol=1e-5)


def test_a_plan_made_in_the_step_keeps_kinds_apart():
    found = []

    def fn(params, x):
        found.append(jdp.plan_buckets(params, first_bucket_bytes=1 << 20).buckets)
        return x.sum()

    mapped = jax.shard_map(
        lambda p, x: lax.psum(fn(p, x), "dp"),
        mesh=_mesh(),
        in_specs=(SPECS, P("dp")),
        out_specs=P(),
    )
    jax.eval_shape(mapped, PARAMS, X)
    assert found[-1] == ((3, 2, 1), (0,))  # w, v and c, in reverse; b.
