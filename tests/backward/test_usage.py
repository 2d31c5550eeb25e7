"""Which parameters a loss uses, against the gradients of each path traced apart."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback

import jdp
from jdp.backward.flow import FlowAnalysis
from jdp.backward.loss import trace_loss
from tests import harness, rarely

ONES = np.ones(3, np.float32)


def _params(names):
    return {name: ONES for name in names}


def _used(loss_fn, names, *args):
    """Checks what is static, and returns the mask as Python bools."""
    eager = jdp.used_parameters(loss_fn, _params(names), *args)
    jitted = harness.jit_fast(lambda *args: jdp.used_parameters(loss_fn, *args))
    compiled = jitted(_params(names), *args)
    chex.assert_trees_all_equal(jax.tree.map(bool, compiled), jax.tree.map(bool, eager))
    return {name: bool(value) for name, value in eager.items()}


def _static(loss_fn, names, *args):
    """The mask, where every leaf must be decided by the program."""
    used = jdp.used_parameters(loss_fn, _params(names), *args)
    assert all(isinstance(value, bool) for value in used.values()), used
    return used


# --- What the program decides -------------------------------------------------


def test_a_program_without_control_flow_gives_python_bools():
    def loss(p):
        return (p["a"] * 2).sum() + jax.jit(jnp.sum)(p["b"])

    assert _static(loss, "abc") == {"a": True, "b": True, "c": False}


def test_nothing_is_run_where_the_program_decides():
    def loss(p, x):
        return jax.pure_callback(_fail, x, x) @ p["a"]

    assert _static(loss, "ab", ONES) == {"a": True, "b": False}


def _fail(x):
    raise AssertionError("the loss was run")


@pytest.mark.parametrize(
    "cut",
    [
        lax.stop_gradient,
        jnp.floor,
        jnp.ceil,
        jnp.round,
        jnp.sign,
        lambda x: x.astype(jnp.int32).astype(jnp.float32),
        lambda x: (x > 0).astype(jnp.float32),
        lambda x: jnp.zeros_like(x),
        lambda x: jnp.argsort(x).astype(jnp.float32),
    ],
)
def test_what_has_no_derivative_cuts(cut):
    def loss(p):
        return (p["a"] * cut(p["b"])).sum()

    assert not jax.grad(loss)(_params("ab"))["b"].any()  # JAX agrees
    assert _static(loss, "ab") == {"a": True, "b": False}


def test_the_sign_of_a_complex_number_has_a_derivative_where_jax_gives_one():
    def loss(p):
        return jnp.sign(p["a"] + 1j * p["b"]).real.sum()

    grad = jax.grad(loss)({"a": ONES, "b": 2 * ONES})
    if np.any(grad["a"]):
        assert _static(loss, "ab") == {"a": True, "b": True}


def test_operands_of_a_sort_go_their_own_ways():
    def loss(p):
        _, b = lax.sort([p["a"], p["b"]], num_keys=1)
        return b.sum()

    assert _static(loss, "ab") == {"a": False, "b": True}


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: f])
def test_calls_pass_on_only_what_their_results_need(wrap):
    @wrap
    def both(a, b):
        return a * 2, b * 3

    def loss(p):
        return both(p["a"], p["b"])[0].sum()

    assert _static(loss, "ab") == {"a": True, "b": False}


def test_custom_vjp_is_read_from_its_backward_rule():
    @jax.custom_vjp
    def straight_through(x, scale):
        return jnp.round(x) * scale

    straight_through.defvjp(
        lambda x, scale: (straight_through(x, scale), scale),
        lambda scale, g: (g * scale, jnp.zeros_like(scale)),
    )

    def loss(p):
        return straight_through(p["a"], p["b"]).sum()

    assert _static(loss, "ab") == {"a": True, "b": False}


def test_custom_jvp_is_read_from_its_rule():
    @jax.custom_jvp
    def product(x, y):
        return x * y

    @product.defjvp
    def _(primals, tangents):
        return product(*primals), tangents[0]

    def loss(p):
        return product(p["a"], p["b"]).sum()

    assert _static(loss, "ab") == {"a": True, "b": False}


def test_a_scan_passes_values_for_as_many_turns_as_it_has():
    def loss(length, p):
        def turn(carry, _):
            a, b, c, d = carry
            return (b * 2, c * 2, d * 2, a * 2), None

        carry = p["a"], p["b"], p["c"], p["d"]
        (first, *_), _ = lax.scan(turn, carry, length=length)
        return first.sum()

    for length in (1, 2, 3, 4, 5, 10**9 + 2):
        used = _static(functools.partial(loss, length), "abcd")
        assert used == {name: i == length % 4 for i, name in enumerate("abcd")}


def test_the_stacked_results_of_a_scan_unite_its_turns():
    def loss(p):
        def turn(carry, x):
            a, b = carry
            return (b, a), (a * x, x)

        _, (ys, xs) = lax.scan(turn, (p["a"], p["b"]), jnp.stack([p["c"]] * 2))
        return ys.sum()

    assert _static(loss, "abcd") == {"a": True, "b": True, "c": True, "d": False}


@pytest.mark.parametrize("index", [0, 1, 7])
def test_a_branch_that_the_program_chooses_is_static(index):
    def by_switch(p):
        return lax.switch(index, [lambda: p["a"], lambda: p["b"]]).sum()

    def by_cond(p):
        return lax.cond(index == 0, lambda: p["a"], lambda: p["b"]).sum()

    expected = {"a": index == 0, "b": index != 0}
    assert _static(by_switch, "ab") == _static(by_cond, "ab") == expected


def test_what_all_branches_use_is_static():
    def loss(p, x):
        return lax.cond(
            x.sum() > 0, lambda: p["a"] * p["b"], lambda: p["a"] * p["c"]
        ).sum()

    used = jdp.used_parameters(loss, _params("abc"), jnp.asarray(ONES))
    assert used["a"] is True
    assert not isinstance(used["b"], bool) and not isinstance(used["c"], bool)
    assert _used(loss, "abc", ONES) == {"a": True, "b": True, "c": False}
    assert _used(loss, "abc", -ONES) == {"a": True, "b": False, "c": True}


def test_values_that_go_through_memory_count_as_used():
    def loss(p):
        ref = jax.new_ref(p["a"])
        ref[...] = ref[...] * p["b"]
        return ref[...].sum()

    assert _static(loss, "ab") == {"a": True, "b": True}


# --- What control flow decides ------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "wrap",
    {
        "plain": lambda f: f,
        "jit": jax.jit,
        "remat": jax.checkpoint,
        "remat with a policy": lambda f: jax.checkpoint(
            f, policy=jax.checkpoint_policies.dots_saveable
        ),
        "vmap": lambda f: lambda p, x: jax.vmap(f, (None, 0))(p, x[None])[0],
    }.items(),
    ids=lambda item: item[0],
)
def test_a_branch_uses_its_own(wrap, sign):
    name, wrap = wrap

    @wrap
    def branch(p, x):
        return lax.cond(x.sum() > 0, lambda: p["a"] * x, lambda: p["b"] * x)

    def loss(p, x):
        return branch(p, x).sum()

    expected = {"a": sign > 0, "b": sign < 0}
    if name == "vmap":  # a batched predicate runs both branches.
        expected = {"a": True, "b": True}
    assert _used(loss, "ab", sign * ONES) == expected


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_switch_uses_the_branch_that_it_takes(index):
    def loss(p, i):
        branches = [lambda: p["a"], lambda: p["b"], lambda: lax.stop_gradient(p["a"])]
        return lax.switch(i, branches).sum()

    assert _used(loss, "ab", index) == {"a": index == 0, "b": index == 1}


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_while_loop_uses_what_its_turns_use(turns):
    def loss(p, n):
        def turn(carry):
            i, a, b, c = carry
            return i + 1, b * p["d"], c, a

        carry = 0, p["a"], p["b"], p["c"]
        _, a, _, _ = lax.while_loop(lambda carry: carry[0] < n, turn, carry)
        return a.sum()

    # The lanes change places; `d` is met on the way from the second to the first.
    expected = {"a": turns % 3 == 0, "b": turns % 3 == 1, "c": turns % 3 == 2}
    assert _used(loss, "abcd", turns) == expected | {"d": turns > 0}


@pytest.mark.parametrize(
    ("unroll", "reverse"),
    rarely.cases(
        itertools.product([1, 2], [False, True]), often=[(1, True), (2, False)]
    ),
)
def test_conditions_inside_of_a_scan_are_united(reverse, unroll):
    def loss(p, choices):
        def turn(h, choice):
            h = lax.switch(choice, [lambda: h, lambda: h * p["a"], lambda: h * p["b"]])
            return h, lax.cond(choice == 2, lambda: p["c"] * 1, lambda: h * 0)

        h, ys = lax.scan(turn, ONES, choices, reverse=reverse, unroll=unroll)
        return h.sum() + ys.sum()

    for choices in ([0, 0], [1, 0], [0, 2], [1, 2], [1, 1, 1]):
        expected = {"a": 1 in choices, "b": 2 in choices, "c": 2 in choices}
        assert _used(loss, "abc", np.array(choices)) == expected


def test_what_a_later_turn_throws_away_is_not_used():
    def loss(p, choices):
        def turn(h, choice):
            return lax.cond(choice, lambda: h * p["a"], lambda: p["b"]), None

        return lax.scan(turn, p["c"], choices)[0].sum()

    cases = {(True, True): "ac", (True, False): "b", (False, True): "ab"}
    for choices, expected in cases.items():
        used = _used(loss, "abc", np.array(choices))
        assert {name for name in used if used[name]} == set(expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rule", ["custom_vjp", "custom_jvp"])
def test_control_flow_inside_of_custom_derivatives(rule, sign):
    def mixture(x, a, b):
        return lax.cond(x.sum() > 0, lambda: x * a, lambda: x * b)

    if rule == "custom_vjp":
        mixture = jax.custom_vjp(mixture)

        def forward(x, a, b):
            return mixture(x, a, b), (x, a, b)

        def backward(kept, g):
            x, a, b = kept
            zeros = jnp.zeros_like(x)
            return lax.cond(
                x.sum() > 0,
                lambda: (g * a, g * x, zeros),
                lambda: (g * b, zeros, g * x),
            )

        mixture.defvjp(forward, backward)
    else:
        mixture = jax.custom_jvp(mixture)

        @mixture.defjvp
        def _(primals, tangents):
            (x, a, b), (dx, da, db) = primals, tangents
            tangent = lax.cond(
                x.sum() > 0, lambda: dx * a + x * da, lambda: dx * b + x * db
            )
            return mixture(*primals), tangent

    def loss(p, x):
        return mixture(x, p["a"], p["b"]).sum() + p["c"].sum()

    expected = {"a": sign > 0, "b": sign < 0, "c": True}
    assert _used(loss, "abc", sign * ONES) == expected


def test_what_is_recomputed_stays_recomputed():
    def loss(p, x):
        @jax.checkpoint
        def block(x):
            return lax.cond(x.sum() > 0, lambda: x * p["a"], lambda: x * p["b"])

        return jnp.sin(block(jnp.tanh(x))).sum()

    def grads(p, x):
        program = trace_loss(loss, p, (x,))
        return jax.grad(lambda p: program.evaluate_marked(p)[0])(p)

    text = str(jax.make_jaxpr(grads)(_params("ab"), jnp.asarray(ONES)))
    assert "remat2[" in text or "checkpoint[" in text


def test_values_of_a_sort_depend_on_all_of_its_operands():
    jaxpr = jax.make_jaxpr(lambda a, b: lax.sort([a, b], num_keys=1))(ONES, ONES)
    assert FlowAnalysis(by_value=True).of_jaxpr(jaxpr).may == (0b11, 0b11)
    assert FlowAnalysis().of_jaxpr(jaxpr).may == (0b01, 0b10)


# --- The whole against gradients of each path -----------------------------------

NAMES = "abcdef"
WIDTH = 3


CALLS = ("jit", "remat", "custom_vjp")


def statements(depth, *, has_while=True, others=(), calls=CALLS):
    """Statements on two lanes (h, g); only h ends in the loss."""
    simple = st.one_of(
        *others,
        st.tuples(st.just("use"), st.sampled_from(NAMES)),
        st.tuples(st.just("stop"), st.sampled_from(NAMES)),
        st.tuples(st.just("aside"), st.sampled_from(NAMES)),
        st.tuples(st.just("reset"), st.sampled_from(NAMES)),
        st.tuples(st.just("swap")),
    )
    if depth == 0:
        return simple
    inner = statements(depth - 1, has_while=has_while, others=others, calls=calls)
    block = st.lists(inner, min_size=1, max_size=3)
    loops = [st.tuples(st.just("while"), st.integers(0, 3), block)] * has_while
    return st.one_of(
        simple,
        *loops,
        st.tuples(st.just("cond"), st.integers(0, 3), block, block),
        st.tuples(st.just("switch"), st.integers(0, 3), block, block, block),
        st.tuples(st.just("scan"), st.integers(0, 3), block),
        st.tuples(st.sampled_from(calls), block),
    )


PROGRAMS = st.lists(statements(3), min_size=1, max_size=4)
FLAGS = st.tuples(*[st.integers(0, 2)] * 4)


def _step(statement, params, lanes):
    h, g = lanes
    match statement:
        case ("use", name):
            return jnp.tanh(h * params[name] + 0.5), g
        case ("stop", name):
            return h + lax.stop_gradient(params[name]), g
        case ("aside", name):
            return h, jnp.tanh(g * params[name] + 0.5)
        case ("reset", name):
            return params[name] * 0.9, g
        case ("swap",):
            return g, h
        case (rule, name) if callable(rule):
            return rule(h, g, params[name])
    raise AssertionError(statement)


def run_compiled(block, params, flags, lanes):
    """With JAX's control flow."""
    for statement in block:
        kind, *rest = statement
        run = functools.partial(run_compiled, params=params, flags=flags)
        match kind:
            case "cond":
                flag, a, b = rest
                lanes = lax.cond(
                    flags[flag] > 0,
                    lambda x, a=a, run=run: run(a, lanes=x),
                    lambda x, b=b, run=run: run(b, lanes=x),
                    lanes,
                )
            case "switch":
                flag, *blocks = rest
                branches = [lambda x, b=b, run=run: run(b, lanes=x) for b in blocks]
                lanes = lax.switch(flags[flag], branches, lanes)
            case "scan":
                flag, body = rest

                def turn(carry, offset, body=body):
                    # Each turn decides by flags of its own.
                    turned = (flags + offset) % 3
                    return run_compiled(body, params, turned, carry), None

                lanes, _ = lax.scan(turn, lanes, jnp.arange(2))
            case "while":
                flag, body = rest

                def turn_while(carry, body=body):
                    i, lanes = carry
                    return i + 1, run_compiled(body, params, (flags + i) % 3, lanes)

                _, lanes = lax.while_loop(
                    lambda c, flag=flag: c[0] < flags[flag], turn_while, (0, lanes)
                )
            case "jit":
                lanes = jax.jit(lambda x, b=rest[0], run=run: run(b, lanes=x))(lanes)
            case "remat":
                block_fn = jax.checkpoint(lambda x, b=rest[0], run=run: run(b, lanes=x))
                lanes = block_fn(lanes)
            case "custom_vjp":
                lanes = _custom(rest[0], params, flags, lanes)
            case _:
                lanes = _step(statement, params, lanes)
    return lanes


def _custom(block, params, flags, lanes):
    @jax.custom_jvp
    def fn(params, flags, lanes):
        return run_compiled(block, params, flags, lanes)

    @fn.defjvp
    def _(primals, tangents):
        params, flags, lanes = primals
        return jax.jvp(
            lambda params, lanes: run_compiled(block, params, flags, lanes),
            (params, lanes),
            (tangents[0], tangents[2]),
        )

    return fn(params, flags, lanes)


def run_python(block, params, flags, lanes):
    """With Python's control flow: one path."""
    for statement in block:
        kind, *rest = statement
        match kind:
            case "cond":
                flag, a, b = rest
                chosen = a if flags[flag] > 0 else b
                lanes = run_python(chosen, params, flags, lanes)
            case "switch":
                flag, *blocks = rest
                lanes = run_python(blocks[flags[flag]], params, flags, lanes)
            case "scan":
                for offset in range(2):
                    turned = tuple((f + offset) % 3 for f in flags)
                    lanes = run_python(rest[1], params, turned, lanes)
            case "while":
                flag, body = rest
                for i in range(flags[flag]):
                    turned = tuple((f + i) % 3 for f in flags)
                    lanes = run_python(body, params, turned, lanes)
            case "jit" | "remat" | "custom_vjp":
                lanes = run_python(rest[0], params, flags, lanes)
            case _:
                lanes = _step(statement, params, lanes)
    return lanes


def start():
    """Parameters and lanes with which a chain of tanh keeps its derivative."""
    rng = np.random.default_rng(0)
    params = {n: rng.uniform(0.6, 0.9, WIDTH).astype(np.float32) for n in NAMES}
    return params, (np.full(WIDTH, 0.4, np.float32), np.full(WIDTH, 0.3, np.float32))


@settings(max_examples=8, deadline=None)
@given(PROGRAMS, st.lists(FLAGS, min_size=2, max_size=3))
def test_random_nests_use_what_their_path_gives_a_gradient(program, runs):
    _check_nest(program, runs)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(PROGRAMS, st.lists(FLAGS, min_size=2, max_size=3))
def test_many_random_nests_use_what_their_path_gives_a_gradient(program, runs):
    _check_nest(program, runs)


def _check_nest(program, runs):
    params, lanes = start()

    def loss(params, flags):
        return run_compiled(program, params, flags, lanes)[0].sum()

    def one_path(params, flags):
        return run_python(program, params, flags, lanes)[0].sum()

    masks = harness.jit_fast(lambda *args: jdp.used_parameters(loss, *args))
    static = jdp.used_parameters(loss, params, jnp.array(runs[0]))
    for flags in runs:
        grads = jax.grad(one_path)(params, flags)
        # A chain of tanh of numbers near 0.8 has a derivative that is not zero.
        expected = {name: bool(np.any(grads[name] != 0)) for name in NAMES}
        found = masks(params, jnp.array(flags))
        assert {name: bool(found[name]) for name in NAMES} == expected
        for name, value in static.items():
            assert not isinstance(value, bool) or value == expected[name]


# --- Bad input ------------------------------------------------------------------


@pytest.mark.parametrize("function", [jdp.used_parameters, jdp.gradient_order])
@pytest.mark.parametrize(
    "loss_fn,params,error,message",
    [
        (lambda p: p["a"], {"a": ONES}, ValueError, r"scalar loss, got shape \(3,\)"),
        (lambda p: (p["a"].sum(), 1), {"a": ONES}, TypeError, r"`has_aux=True`"),
        (lambda p: 3, {"a": ONES}, TypeError, "scalar loss, got int"),
        (lambda p: p["a"].sum() * 1j, {"a": ONES}, TypeError, "real loss, got complex"),
        (
            lambda p: p["a"].sum(),
            {"a": ONES, "n": {"steps": np.int32(3)}},
            TypeError,
            r"`\['n'\]\['steps'\]` is int32, which has no gradient",
        ),
        (
            lambda p: p["a"].sum(),
            {"a": ONES, "key": jax.random.key(0)},
            TypeError,
            r"`\['key'\]` is a PRNG key",
        ),
    ],
)
def test_what_has_no_gradient_is_named(function, loss_fn, params, error, message):
    with pytest.raises(error, match=message):
        function(loss_fn, params)


@pytest.mark.parametrize(
    "effect,name",
    [
        (lambda x: io_callback(lambda x: None, None, x), "IO"),
        (lambda x: jax.debug.print("{}", x), "Debug"),
    ],
)
def test_side_effects_are_refused(effect, name):
    def loss(p):
        effect(p["a"])
        return p["a"].sum()

    with pytest.raises(ValueError, match=f"would repeat: {name}"):
        jdp.used_parameters(loss, _params("a"))
