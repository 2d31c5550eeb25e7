"""What custom rules are told to be differentiated, against `jax.grad`."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

import jdp
from jdp.backward.loss import trace_loss

TABLE = np.linspace(-1, 1, 3, dtype=np.float32)
PARAMS = {"a": np.float32([0.5, 2, -1]), "b": np.float32([1, 3, 2])}
X = np.float32([0.25, -2, 1.5])


def _noting_vjp(seen):
    """A product of two that notes which ones are perturbed."""

    @jax.custom_vjp
    def product(h, k):
        return h * k

    def forward(h, k):
        seen.add((h.perturbed, k.perturbed))
        return h.value * k.value, (h.value, k.value)

    def backward(saved, ct):
        h, k = saved
        return ct * k, ct * h

    product.defvjp(forward, backward, symbolic_zeros=True)
    return product


def _noting_jvp(seen):
    @jax.custom_jvp
    def product(h, k):
        return h * k

    def rule(primals, tangents):
        (h, k), (dh, dk) = primals, tangents
        are_zero = [isinstance(t, SymbolicZero) for t in tangents]
        seen.add((not are_zero[0], not are_zero[1]))
        made = jnp.zeros_like(h)
        made = made if are_zero[0] else made + dh * k
        return h * k, made if are_zero[1] else made + dk * h

    product.defjvp(rule, symbolic_zeros=True)
    return product


def _calls(product, p, x):
    cut = lax.stop_gradient(p["b"])
    return [
        product(p["a"], x),
        product(x, p["a"]),
        product(x, x),
        product(p["a"], cut),
        product(lax.floor(p["a"]), p["b"]),
        product(product(cut, x), p["b"]),
        jax.jit(product)(x, p["b"]),
    ]


def _scan(product, p, x):
    """The second carry is perturbed from the second turn on."""

    def body(carry, k):
        h, late, never = carry
        return (product(late, k), h, product(never, never)), product(never, k)

    start = p["a"], jnp.zeros(()), jnp.ones(())
    start = jax.tree.map(lambda v: jnp.broadcast_to(v, (3,)), start)
    carry, stacked = lax.scan(body, start, jnp.stack([x] * 3))
    return [*carry, stacked * p["b"]]


def _cond(product, p, x):
    branches = [
        lambda h, k, x: (product(h, x), x),
        lambda h, k, x: (product(x, k), product(x, x)),
    ]
    first, second = lax.switch(jnp.argmax(x), branches, p["a"], p["b"], x)
    return [first, product(second, p["a"])]


def _inner(product, p, x):
    @jax.jit
    def twice(h, k):
        return product(h, k), product(k, k)

    @jax.checkpoint
    def again(h, k):
        return jax.vmap(product)(h, k)

    x, y = twice(p["a"], x)
    return [x, again(p["b"], y)]


def _order(product, p, x):
    """Values of a sort, and integers, pass what is perturbed only to themselves."""
    keys, values = lax.sort_key_val(x, p["a"])
    bits = lax.bitcast_convert_type(p["a"], jnp.int32)
    return [product(keys, values), product(p["b"], bits.astype(jnp.float32))]


@pytest.mark.parametrize("make", [_noting_vjp, _noting_jvp])
@pytest.mark.parametrize("made_of", [_calls, _scan, _cond, _inner, _order])
def test_rules_are_told_the_same_as_by_jax(make, made_of):
    def loss_noting(seen):
        product = make(seen)
        return lambda p, x: sum(jnp.sum(v * v) for v in made_of(product, p, x))

    expected, found = set(), set()
    grads = jax.grad(loss_noting(expected))(PARAMS, X)
    program = trace_loss(loss_noting(found), PARAMS, (X,))
    chex.assert_trees_all_close(
        jax.grad(lambda p: program.evaluate_marked(p)[0])(PARAMS), grads, rtol=1e-5
    )
    assert program.timeline and expected  # Order and use have asked the rules too.
    assert found == expected


def _closing_over(value):
    @jax.custom_vjp
    def scaled(h):
        return h * value

    scaled.defvjp(lambda h: (scaled(h), None), lambda _, ct: (ct * 3,))
    return scaled


def _over_table(p, x):
    return _closing_over(TABLE)(p["a"])


def _over_batch(p, x):
    return _closing_over(x)(p["a"])


def _over_what_is_cut(p, x):
    cut = lax.stop_gradient(p["b"])

    @jax.custom_vjp
    def scaled(h):
        return h * cut

    scaled.defvjp(lambda h: (h * TABLE, None), lambda _, ct: (ct * 3,))
    return scaled(p["a"])


def _over_table_in_scan(p, x):
    scaled = _closing_over(TABLE)
    return lax.scan(lambda h, _: (scaled(h), None), p["a"], length=2)[0]


def _inside_another(p, x):
    """A rule of its own within a function whose rule JAX takes."""
    inner = _closing_over(x)

    @jax.custom_vjp
    def outer(h):
        return inner(h) * TABLE

    outer.defvjp(lambda h: (outer(h), None), lambda _, ct: (ct * 5,))
    return outer(p["a"])


@pytest.mark.parametrize(
    "made_of",
    [
        _over_table,
        _over_batch,
        _over_what_is_cut,
        _over_table_in_scan,
        _inside_another,
    ],
)
@pytest.mark.parametrize("differentiate", ["value_and_grad", "mean_loss"])
def test_a_function_with_a_rule_closes_over_what_has_no_gradient(
    made_of, differentiate
):
    def loss(p, x):
        # A collective, so that what the rules exchange is looked for.
        return made_of(p, x).sum() + 0 * lax.psum(p["b"].sum(), "data")

    def grads(p, x):
        if differentiate == "mean_loss":
            return jax.grad(jdp.mean_loss(loss))(p, x)
        return jdp.value_and_grad(loss)(p, x)[1]

    mesh = jax.make_mesh((2,), ("data",))
    found = jax.jit(
        jax.shard_map(
            grads,
            mesh=mesh,
            in_specs=(jax.P(), jax.P()),
            out_specs=jax.P(),
            check_vma=False,
        )
    )(PARAMS, X)
    expected = jax.grad(lambda p: made_of(p, X).sum())(PARAMS)
    chex.assert_trees_all_close(found, expected)


def _holding(kind, rate):
    """The identity, with a rule that closes over `rate`."""
    if kind == "custom_jvp":
        same = jax.custom_jvp(lambda h: h)
        same.defjvp(lambda primals, tangents: (primals[0], tangents[0] * rate))
        return same
    if kind == "custom_gradient":
        return jax.custom_gradient(lambda h: (h, lambda ct: (ct * rate,)))
    same = jax.custom_vjp(lambda h: h)
    if kind == "forward":
        same.defvjp(lambda h: (h * 1, rate), lambda saved, ct: (ct * saved,))
    else:
        same.defvjp(
            lambda h: (h, None), lambda _, ct: (jax.jit(jnp.multiply)(ct, rate),)
        )
    return same


def _loss_with_rate(kind, p, x):
    """The rule closes over what only the loss knows; a branch uses `b` or not."""
    rate = jnp.exp(x).mean()
    used = lax.cond(x[0] > 0, lambda: p["b"].sum(), lambda: 0.0)
    return (_holding(kind, rate)(p["a"] * x) ** 2).sum() + used


@pytest.mark.parametrize(
    "kind", ["custom_jvp", "custom_gradient", "forward", "backward"]
)
def test_a_rule_may_close_over_a_value_of_the_loss(kind):
    loss = functools.partial(_loss_with_rate, kind)

    def evaluate(p):
        loss_of, _, used = trace_loss(loss, p, (X,)).evaluate_marked(p)
        return loss_of, used

    found, used = jax.jit(jax.grad(evaluate, has_aux=True))(PARAMS)
    chex.assert_trees_all_close(found, jax.jit(jax.grad(loss))(PARAMS, X), rtol=1e-5)
    assert jax.tree.map(bool, used) == {"a": True, "b": True}


def test_a_rule_that_closes_over_a_value_refuses_weights_with_a_collective():
    def loss(p, x):
        shared = lax.psum(p["a"].sum(), "data")
        return _loss_with_rate("backward", p, x) + shared

    def grads(p, x):
        weight = 1.0 + lax.axis_index("data")
        return jdp.value_and_grad(loss, weight=weight)(p, x)[1]

    with pytest.raises(ValueError, match="closes over a value that the loss computes"):
        jax.eval_shape(
            jax.shard_map(
                grads,
                mesh=jax.make_mesh((2,), ("data",)),
                in_specs=(jax.P(), jax.P()),
                out_specs=jax.P(),
                check_vma=False,
            ),
            PARAMS,
            X,
        )
