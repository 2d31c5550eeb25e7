"""A traced loss that is run again leaves the program that it left directly."""

import collections
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from jdp.backward.evaluation import ProgramRunner
from jdp.backward.loss import trace_loss

D = 6


def _params(n=4):
    rng = np.random.default_rng(0)
    return [
        {
            "w": rng.normal(size=(D, D)).astype(np.float32) * 0.4,
            "b": rng.normal(size=D).astype(np.float32),
        }
        for _ in range(n)
    ]


def _layers(params, x):
    for k, p in enumerate(params):
        with jax.named_scope(f"layer{k}"):
            h = jax.nn.gelu((x - x.mean(-1, keepdims=True)) @ p["w"] + p["b"])
            x = x + h * lax.rsqrt(1.0 + (h**2).mean(-1, keepdims=True))
    return x


def _plain(params, x):
    return (_layers(params, x) ** 2).mean()


def _with_loops(params, x):
    x = _layers(params, x)
    x, _ = lax.scan(lambda h, _: (jnp.tanh(h @ params[0]["w"]), None), x, length=3)
    x = lax.cond(x.sum() > 0, lambda: x * 2, lambda: x @ params[1]["w"])
    x = jax.checkpoint(lambda x: jnp.sin(x) @ params[2]["w"])(x)
    return jax.nn.logsumexp(x) + jax.nn.relu(x).sum()


def _with_several_results(params, x):
    values, indices = lax.top_k(x @ params[0]["w"], 3)
    a, b = jnp.split(values @ jnp.ones((3, 4)), 2, axis=-1)
    low, high = jnp.linalg.qr(params[1]["w"])
    return (a * b).sum() + indices.sum() * low.sum() + high.sum()


def _with_randomness(params, x):
    key = jax.random.key(3)
    noise = jax.random.normal(key, x.shape)
    keep = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, x.shape)
    return jnp.where(keep, (x + noise) @ params[0]["w"], 0).sum()


def _outer_constant(params, x):
    return params[0]["w"].sum() * 3.0  # nothing of a batch, and an unused one.


LOSSES = [
    _plain,
    _with_loops,
    _with_several_results,
    _with_randomness,
    _outer_constant,
]


def _count(jaxpr):
    """Equations by name, those of inner programs too."""
    counts = collections.Counter()
    for eqn in jaxpr.eqns:
        counts[eqn.primitive.name] += 1
        for inner in jaxprs_in_params(eqn.params):
            counts += _count(getattr(inner, "jaxpr", inner))
    return counts


X = np.random.default_rng(1).normal(size=(5, D)).astype(np.float32)


def _again(loss_fn):
    def run(params, x):
        program = trace_loss(loss_fn, params, (x,))
        return jax.value_and_grad(lambda p: program.evaluate(p)[0])(params)

    return run


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_the_gradient_is_the_same(loss_fn):
    again = jax.jit(_again(loss_fn))(_params(), X)
    direct = jax.jit(jax.value_and_grad(loss_fn))(_params(), X)
    # XLA may fuse equations otherwise that come in another order.
    chex.assert_trees_all_close(again, direct, rtol=16 * 1.2e-7, atol=1e-7)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_the_program_has_the_same_equations(loss_fn):
    again = jax.make_jaxpr(_again(loss_fn))(_params(), X)
    direct = jax.make_jaxpr(jax.value_and_grad(loss_fn))(_params(), X)
    found, expected = _count(again.jaxpr), _count(direct.jaxpr)
    assert found["dot_general"] == expected["dot_general"]
    # What is computed for nobody may be left out.
    assert sum((found - expected).values()) <= 0.02 * sum(expected.values())


@pytest.mark.parametrize("loss_fn", [_plain, _with_loops])
def test_the_compiled_program_costs_no_more(loss_fn):
    def compiled(fn):
        return jax.jit(fn).lower(_params(), X).compile()

    again, direct = compiled(_again(loss_fn)), compiled(jax.value_and_grad(loss_fn))
    assert again.cost_analysis()["flops"] <= direct.cost_analysis()["flops"]
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (again, direct)]
    assert sizes[0] <= sizes[1]


def _scopes(fn):
    """How many equations are in each named scope."""
    jaxpr = jax.make_jaxpr(fn)(_params(), X).jaxpr
    stacks = [str(eqn.source_info.name_stack) for eqn in jaxpr.eqns]
    found = [re.findall(r"layer\d", stack) for stack in stacks]
    return collections.Counter(tuple(names) for names in found)


def test_named_scopes_stay_with_their_layers():
    again, direct = _scopes(_again(_plain)), _scopes(jax.value_and_grad(_plain))
    assert set(direct) == {(), *[(f"layer{k}",) for k in range(4)]}
    assert again == direct


def test_like_layers_share_one_function():
    program = trace_loss(_plain, _params(12), (X,))
    runner = ProgramRunner()
    operands = jax.tree.leaves(_params(12))
    jax.make_jaxpr(lambda *xs: runner.run(program.jaxpr, xs))(*operands)
    few = trace_loss(_plain, _params(4), (X,))
    small = ProgramRunner()
    operands = jax.tree.leaves(_params(4))
    jax.make_jaxpr(lambda *xs: small.run(few.jaxpr, xs))(*operands)
    assert len(runner._functions) == len(small._functions) < 30


@pytest.mark.slow
def test_a_long_program_without_multiplications_is_cut():
    def loss_fn(params, x):
        for _ in range(200):
            x = jnp.sin(x) * params["s"]
        return x.sum()

    # XLA takes half a minute to fuse a chain of this length.
    options = {"xla_disable_hlo_passes": "fusion"}
    params = {"s": np.float32(0.9)}
    again, direct = (
        jax.jit(fn, compiler_options=options)(params, X)
        for fn in (_again(loss_fn), jax.value_and_grad(loss_fn))
    )
    # A product of 200 numbers, each rounded.
    chex.assert_trees_all_close(again, direct, rtol=200 * 1.2e-7)
