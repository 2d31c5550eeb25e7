"""The order of gradients, against the program of the gradient itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

import jdp
from jdp.backward.loss import trace_loss

D = 4


def _matrices(names):
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=(D, D)).astype(np.float32) * 0.3 for n in names}


X = np.ones((2, D), np.float32)


def _order(loss_fn, params, *args):
    """The paths in order, without brackets and quotes."""
    paths = jdp.plan_buckets(params).leaf_paths()
    order = jdp.gradient_order(loss_fn, params, *args)
    return [paths[i].strip("[]'").replace("']['", ".") for i in order]


def _gradient_steps(loss_fn, params, *args):
    """When each gradient is made, in the program of the gradient itself.

    A second way to the same: the equations of `jax.grad` with calls opened; a value is
    made at the last multiplication or loop that it depends on, and then at its own
    equation.
    """
    grads = jax.make_jaxpr(jax.grad(loss_fn))(params, *args)
    step = 0

    def walk(jaxpr, times):
        nonlocal step
        known = dict(zip(jaxpr.invars, times, strict=True))

        def read(var):
            return (0, 0) if isinstance(var, Literal) else known.get(var, (0, 0))

        for eqn in jaxpr.eqns:
            times = [read(v) for v in eqn.invars]
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if inner is not None and eqn.primitive.name not in ("scan", "shard_map"):
                made = walk(getattr(inner, "jaxpr", inner), times)
                known |= zip(eqn.outvars, made, strict=True)
                continue
            step += 1
            is_heavy = eqn.primitive.name in ("dot_general", "scan", "while")
            heavy = step if is_heavy else max([t[0] for t in times], default=0)
            known |= dict.fromkeys(eqn.outvars, (heavy, step))
        return [read(v) for v in jaxpr.outvars]

    times = [(0, 0)] * len(grads.jaxpr.invars)
    return walk(grads.jaxpr, times)


def _layers(params, x):
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return x


# --- Models: (loss, params) ---------------------------------------------------


def _stack(p, x):
    return _layers(p, x).sum()


def _jitted(p, x):
    run = jax.jit(lambda w, x: jnp.tanh(x @ w))
    for name in ("c", "a", "b"):
        x = run(p[name], x)
    return x.sum()


def _nested_calls(p, x):
    @jax.jit
    def outer(p, x):
        x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p["b"], x)
        return jax.jit(lambda x: x @ p["a"] @ p["d"])(x)

    return (outer(p, x) @ p["c"]).sum()


def _tied(p, x):
    x = jnp.tanh(x @ p["a"])
    x = jnp.tanh(x @ p["b"])
    x = jnp.tanh(x @ p["c"])
    return (x @ p["a"].T).sum()


def _cast_up_front(p, x):
    p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    for name in ("b", "c", "a"):
        x = jnp.tanh(x @ p[name])
    return x.astype(jnp.float32).sum()


def _two_towers(p, x):
    a, b = x, x
    for name in ("a", "b"):
        a = jnp.tanh(a @ p[name])
    for name in ("c", "d"):
        b = jnp.tanh(b @ p[name])
    return (a * b).sum()


def _scanned(p, x):
    x = x @ p["a"]
    x, _ = lax.scan(lambda h, _: (jnp.tanh(h @ p["b"]), None), x, length=3)
    return (x @ p["c"]).sum()


def _activations(p, x):
    for name in ("d", "b", "a", "c"):
        x = jax.nn.gelu(jax.nn.relu(x @ p[name]))
    return jax.nn.logsumexp(x)


MODELS = {
    "stack": (_stack, "abcdef"),
    "jit": (_jitted, "abc"),
    "nested calls": (_nested_calls, "abcd"),
    "tied": (_tied, "abc"),
    "cast up front": (_cast_up_front, "abc"),
    "two towers": (_two_towers, "abcd"),
    "scan": (_scanned, "abc"),
    "activations": (_activations, "abcd"),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_order_is_that_of_the_gradient_itself(model):
    loss_fn, names = MODELS[model]
    params = _matrices(names)
    found = jdp.gradient_order(loss_fn, params, X)
    times = _gradient_steps(loss_fn, params, X)
    expected = sorted(range(len(names)), key=lambda i: times[i])
    assert list(found) == expected


def test_the_last_layer_comes_first_whatever_its_name():
    assert _order(_jitted, _matrices("abc"), X) == ["b", "a", "c"]


def test_a_tied_leaf_counts_at_its_last_contribution():
    # Used first and last: its gradient is finished when the first layer's is.
    assert _order(_tied, _matrices("abc"), X) == ["c", "b", "a"]


def test_a_leaf_waits_for_its_slowest_contribution():
    def loss(p, x):
        quick = p["b"].sum()  # its gradient is there at once.
        return (x @ p["a"] @ p["b"] @ p["c"]).sum() + quick

    assert _order(loss, _matrices("abc"), X) == ["c", "b", "a"]


def test_a_cast_of_all_parameters_up_front_does_not_hold_them_back():
    assert _order(_cast_up_front, _matrices("abc"), X) == ["a", "c", "b"]


def test_leaves_that_cannot_receive_a_gradient_come_last():
    def loss(p, x):
        return (x @ p["b"] @ p["d"] @ lax.stop_gradient(p["e"])).sum()

    assert _order(loss, _matrices("abcde"), X) == ["d", "b", "e", "c", "a"]


def test_what_control_flow_makes_is_finished_when_it_ends():
    def loss(p, x):
        x = x @ p["a"]
        x = lax.cond(
            x.sum() > 0, lambda: (x @ p["b"]) @ p["c"], lambda: (x @ p["c"]) @ p["d"]
        )
        return (x @ p["e"]).sum()

    # Equal ones in reverse, as if they were layers.
    assert _order(loss, _matrices("abcde"), X) == ["e", "d", "c", "b", "a"]
    assert _order(loss, _matrices("abcde"), jnp.asarray(X))[-1] == "a"


def test_a_while_loop_has_an_order():
    def loss(p, x):
        x = x @ p["b"]
        x = lax.while_loop(lambda h: h.sum() > 1, lambda h: h @ p["c"] * 0.1, x)
        return (x @ p["a"]).sum()

    assert _order(loss, _matrices("abc"), jnp.asarray(X)) == ["a", "c", "b"]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_custom_vjp_is_followed_into_its_backward_rule(order):
    @jax.custom_vjp
    def two(x, a, b):
        return x @ a @ b

    def backward(kept, g):
        x, w = kept[0], dict(zip("ab", kept[1:], strict=True))
        made = {}
        for name in order:  # the rule decides which comes first.
            made[name] = x.T @ g @ w[name]
        return g @ w["a"], made["a"], made["b"]

    two.defvjp(lambda x, a, b: (two(x, a, b), (x, a, b)), backward)

    def loss(p, x):
        return two(x @ p["c"], p["a"], p["b"]).sum()

    assert _order(loss, _matrices("abc"), X) == [*order, "c"]


def test_shapes_are_enough():
    params = _matrices("abc")
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert jdp.gradient_order(_jitted, avals, x) == jdp.gradient_order(
        _jitted, params, X
    )


def test_arguments_that_are_no_arrays_stay_what_they_are():
    def loss(p, x, name):
        assert isinstance(name, str)
        return (x @ p[name]).sum()

    assert _order(loss, _matrices("ab"), X, "a") == ["a", "b"]


def test_work_done_grows_from_the_first_gradient_to_the_last():
    loss_fn, names = MODELS["stack"]
    program = trace_loss(loss_fn, _matrices(names), (X,))
    timeline = program.timeline
    shares = [timeline.ready_after[i] for i in timeline.order()]
    assert shares == sorted(shares)
    # Equal layers: the k-th gradient is ready after k of n of the work; what is not a
    # multiplication is a little less than 1 / D of it.
    steps = np.arange(1, len(names) + 1) / len(names)
    np.testing.assert_allclose(shares, steps, atol=1 / D)


def test_the_order_of_a_transformer_is_from_the_head_to_the_embedding():
    def block(p, x):
        q, k, v = (x @ p[n] for n in ("q", "k", "v"))
        x = x + jax.nn.softmax(q @ k.T) @ v @ p["o"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def loss(p, tokens):
        x = p["embedding"][tokens]
        for layer in p["layers"]:
            x = jax.checkpoint(block)(layer, x)
        return jax.nn.logsumexp(x @ p["head"], axis=-1).mean()

    rng = np.random.default_rng(0)
    matrix = functools.partial(rng.normal, size=(D, D))
    names = ("q", "k", "v", "o", "up", "down")
    params = {
        "embedding": rng.normal(size=(7, D)),
        "layers": [{n: matrix() for n in names} for _ in range(2)],
        "head": matrix(),
    }
    found = _order(loss, params, np.arange(3))
    layer = ["down", "up", "o", "v", "k", "q"]
    assert [path.split("]")[-1].strip(".[']") for path in found] == (
        ["head", *layer, *layer, "embedding"]
    )
