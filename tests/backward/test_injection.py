"""Gradients that a `custom_vjp` makes by itself, against `jax.grad`."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax

import jdp
from jdp.backward.loss import trace_loss
from jdp.trees import tree_paths
from tests import harness
from tests.backward import test_usage

QUICK = [Phase.explicit, Phase.reuse, Phase.generate]  # to shrink compiles often.
RATE = 0.25  # of an injected gradient.

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*can never receive a gradient"),
    pytest.mark.filterwarnings("ignore:.*may be left out of a step"),
]


def _rule(backward, *, residuals=lambda h, g, x: x, **options):
    """A `custom_vjp` of (h, g, x) that is the identity of h and g."""

    @jax.custom_vjp
    def rule(h, g, x):
        return h, g

    def forward(h, g, x):
        values = [getattr(v, "value", v) for v in (h, g, x)]
        return (values[0], values[1]), residuals(*values)

    rule.defvjp(forward, backward, **options)
    return rule


def _decided(x, ct):
    """A gradient of its own in one branch of the rule, none in the other."""
    return lax.cond(x.sum() > 0, lambda: jnp.full_like(x, RATE), lambda: x + RATE)


def _nondiff(h, g, x):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def attach(rate, h, x):
        return h

    attach.defvjp(
        lambda rate, h, x: (h, x), lambda rate, x, ct: (ct, rate * jnp.ones_like(x))
    )
    return attach(RATE, h, x), g


def _nested(h, g, x):
    @jax.custom_vjp
    def outer(h, x):
        return _nondiff(h, h, x)[0]

    outer.defvjp(
        lambda h, x: jax.vjp(lambda h, x: _nondiff(h, h, x)[0], h, x),
        lambda vjp, ct: vjp(ct),
    )
    return outer(h, x), g


def _seen_whole(x, cts):
    """Returns what arrives, where `symbolic_zeros` tells what does not."""
    return tuple(
        jnp.zeros_like(x) if type(ct) is jax.custom_derivatives.SymbolicZero else ct
        for ct in cts
    )


RULES = {
    "of residuals alone": _rule(lambda x, ct: (*ct, RATE * x)),
    "a constant": _rule(lambda x, ct: (*ct, jnp.full_like(x, RATE))),
    "with the cotangent": _rule(lambda x, ct: (*ct, ct[1] + RATE)),
    "times the cotangent": _rule(lambda x, ct: (*ct, ct[0] * x + ct[0].sum())),
    "of a scan": _rule(
        lambda x, ct: (
            *ct,
            lax.scan(lambda c, y: (c + y, c + y), ct[1][0], ct[0] * x)[1],
        )
    ),
    "of a loop": _rule(
        lambda x, ct: (*ct, lax.fori_loop(0, 2, lambda i, c: c + RATE, ct[0]))
    ),
    "decided": _rule(lambda x, ct: (*ct, _decided(x, ct))),
    "nothing": _rule(lambda x, ct: (*ct, None)),
    "zeros": _rule(lambda x, ct: (*ct, jnp.zeros_like(x) * 2)),
    "into a lane": _rule(lambda x, ct: (ct[0] + RATE, ct[1], None)),
    "remat": _rule(lambda x, ct: (*ct, RATE * x), optimize_remat=True),
    "nondiff": _nondiff,
    "nested": _nested,
}
SYMBOLIC = {
    "symbolic": _rule(
        lambda x, ct: (*_seen_whole(x, ct), jnp.full_like(x, RATE)),
        symbolic_zeros=True,
    ),
    "only without a cotangent": _rule(
        lambda x, ct: (
            *_seen_whole(x, ct),
            jnp.full_like(x, RATE)
            if type(ct[1]) is jax.custom_derivatives.SymbolicZero
            else jnp.zeros_like(x),
        ),
        symbolic_zeros=True,
    ),
}


def _statements(rules, calls):
    injecting = st.tuples(
        st.sampled_from(list(rules.values())), st.sampled_from(test_usage.NAMES)
    )
    inner = test_usage.statements(
        1, has_while=False, others=[injecting] * 3, calls=calls
    )
    return st.lists(inner, min_size=1, max_size=3)


def _compare(program, flags, *, is_exact):
    """Compares masks and gradients with those of JAX."""
    params, lanes = test_usage.start()
    flags = jnp.array(flags)

    def loss(params, flags):
        return test_usage.run_compiled(program, params, flags, lanes)[0].sum()

    @harness.jit_fast
    def both(params, flags):
        def replica(_):
            local = jdp.local_gradients(loss, find_unused=True)
            return local(params, flags)

        found = jax.vmap(replica, axis_name="data")(jnp.zeros(1))
        return jax.value_and_grad(loss)(params, flags), found

    expected, found = both(params, flags)
    found, used = jax.tree.map(lambda x: x[0], found)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)
    static = trace_loss(loss, params, (flags,))
    paths = tree_paths.format_paths(static.key_paths)
    never = {paths[i] for i in static.never_used}
    for name, is_used in used.items():
        has_gradient = np.any(expected[1][name] != 0)
        assert is_used or not has_gradient, name
        assert not is_exact or bool(is_used) == has_gradient, name
        assert f"['{name}']" not in never or not has_gradient


@settings(max_examples=20, deadline=None, phases=QUICK)
@given(_statements(RULES, ["jit", "remat"]), test_usage.FLAGS)
def test_random_programs_use_what_jax_gives_a_gradient(program, flags):
    _compare(program, flags, is_exact=True)


@settings(max_examples=4, deadline=None, phases=QUICK)
@given(_statements(RULES | SYMBOLIC, test_usage.CALLS), test_usage.FLAGS)
def test_what_is_never_used_has_no_gradient(program, flags):
    _compare(program, flags, is_exact=False)


@pytest.mark.parametrize("calls", [[], ["jit"], ["remat"], ["scan"]])
def test_a_carry_that_no_iteration_reads_gets_a_cotangent(calls):
    """JAX's `scan` returns zeros for it, so the rule before the loop runs."""
    body = [("reset", "f")]
    for kind in calls:
        body = [(kind, 0, body) if kind == "scan" else (kind, body)]
    program = [(RULES["of residuals alone"], "a"), ("scan", 0, body)]
    _compare(program, (2, 1, 0, 2), is_exact=True)


# --- One case each -------------------------------------------------------------


@jax.custom_vjp
def attach(y, aux):
    """Returns y; backwards it adds a gradient to aux, whatever comes to y."""
    return y


attach.defvjp(lambda y, aux: (y, aux), lambda aux, ct: (ct, jnp.full_like(aux, RATE)))


def _scan(turn, start, length=2):
    return lax.scan(lambda carry, _: turn(carry), start, None, length=length)


CASES = {
    "its result is not used": lambda p: (attach(p["w"], p["r"]), p["w"])[1],
    "its result is stopped": lambda p: lax.stop_gradient(attach(p["w"], p["r"])),
    "its result is rounded": lambda p: jnp.round(attach(p["w"], p["r"])),
    "its result is a comparison": lambda p: p["w"] * (attach(p["w"], p["r"]) > 0),
    "the loss drops it behind jit": lambda p: jax.jit(
        lambda p: (attach(p["w"], p["r"]), p["w"])
    )(p)[1],
    "its branch is taken": lambda p: lax.cond(
        p["w"] > 0, lambda: attach(p["w"], p["r"]), lambda: p["w"]
    ),
    "its branch is not taken": lambda p: lax.cond(
        p["w"] < 0, lambda: attach(p["w"], p["r"]), lambda: p["w"]
    ),
    "a branch that is not taken would use it": lambda p: (
        p["w"]
        + lax.cond(p["w"] < 0, lambda y: y, lambda y: 0.0, attach(p["w"], p["r"]))
    ),
    "a loop keeps it in a carry that is dropped": lambda p: _scan(
        lambda c: ((c[0] + p["w"], attach(c[1], p["r"])), None), (p["w"], p["w"])
    )[0][0],
    "a loop stacks it and nothing reads the stack": lambda p: _scan(
        lambda c: (c + p["w"], attach(c, p["r"])), p["w"]
    )[0],
    "two carries change places": lambda p: _scan(
        lambda c: ((c[1], attach(c[0], p["r"])), None), (p["w"], p["w"])
    )[0][0],
    "a loop does not run": lambda p: _scan(
        lambda c: (attach(c, p["r"]), None), p["w"], length=0
    )[0],
    "only the second turn takes it": lambda p: _scan(
        lambda c: (
            (
                c[0] + 1,
                lax.cond(c[0] > 0, lambda y: attach(y, p["r"]), lambda y: y, c[1]),
            ),
            None,
        ),
        (0, p["w"]),
    )[0][1],
    "no turn takes it": lambda p: _scan(
        lambda c: (
            (
                c[0] + 1,
                lax.cond(c[0] > 5, lambda y: attach(y, p["r"]), lambda y: y, c[1]),
            ),
            None,
        ),
        (0, p["w"]),
    )[0][1],
    "it is given no parameter": lambda p: p["w"] * attach(jnp.float32(2), p["c"]),
    "what it attaches is attached to": lambda p: attach(p["w"], attach(p["c"], p["r"])),
    "under vmap": lambda p: jax.vmap(lambda x: attach(x * p["w"], p["r"]))(
        jnp.ones(3)
    ).sum(),
    "under remat": jax.checkpoint(lambda p: attach(p["w"], p["r"] * p["c"])),
    "another rule of the same function": lambda p: _linear(p["w"], p["r"]),
}


def _linear(y, aux):
    """`attach` before, and the same function with a rule that adds nothing after."""
    plain = jax.custom_vjp(attach.fun)
    plain.defvjp(lambda y, aux: (y, aux), lambda aux, ct: (ct, 0.0 * aux))
    return plain(y, aux)


@pytest.mark.parametrize("case", CASES)
def test_what_is_used_is_what_jax_gives_a_gradient(case):
    params = {"w": jnp.float32(2), "r": jnp.float32(3), "c": jnp.float32(-1)}
    grads = jax.grad(CASES[case])(params)
    used = jdp.used_parameters(CASES[case], params)
    assert {k: bool(v) for k, v in used.items()} == {
        k: g != 0 for k, g in grads.items()
    }


@pytest.mark.parametrize("find_unused", [False, True])
def test_an_auxiliary_gradient_reaches_an_expert_of_a_branch_not_taken(find_unused):
    """As in mixtures of experts; the mean over replicas, of which one takes it."""
    world = harness.local_world(2)
    params = {name: np.full(3, 0.5, np.float32) for name in "abw"}

    def loss(p, x):
        experts = [lambda y, name=name: y * p[name] for name in "ab"]
        y = lax.switch(jnp.int32(x[0, 0]), experts, x @ jnp.diag(p["w"]))
        return attach(jnp.mean(y**2), jnp.sum(p["a"]))

    @jdp.data_parallel(world=world, donate_state=False)
    def step(p, x):
        out = jdp.value_and_grad(loss, find_unused=find_unused)(p, x)
        (_, grads), used = out if find_unused else (out, {})
        return grads, used

    x = np.repeat(np.float32([[1], [1]]), 3, 1)
    grads, used = step(params, x)
    expected = jax.tree.map(
        lambda *g: sum(g) / 2, *[jax.grad(loss)(params, x[k : k + 1]) for k in range(2)]
    )
    chex.assert_trees_all_close(grads, expected, rtol=1e-6)
    np.testing.assert_array_equal(grads["a"], np.full(3, RATE, np.float32))
    assert not find_unused or bool(used["a"])
