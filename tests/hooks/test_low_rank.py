"""Low rank: gradients of any rank and scale, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp import hooks
from jdp.hooks import base
from tests import harness, rarely
from tests.transforms import AXIS

SHAPE = (40, 30)
N = 2
RANKS = [1, 2, 4, 8]
SCALES = [1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e20, 1e30]
# Numbers of which products and sums of sqrt(a) or sqrt(b) terms are in range.
SMALLEST = float(np.finfo(np.float32).tiny) * max(SHAPE) ** 0.5
LARGEST = float(np.finfo(np.float32).max) / (N * max(SHAPE) ** 0.5)
EPS = float(np.finfo(np.float32).eps)


def _runner(hook):
    """Returns the state of both replicas, and a compiled step of the hook."""
    aval = jdp.trees.buckets.BucketAval([SHAPE], np.dtype("float32"))

    def step(x, state):
        wire = base.Wire(AXIS, None)
        (total,), state = hook.apply([x.ravel()], state, wire)
        return total.reshape(SHAPE), state

    def start(_):
        return hook.init([aval])

    on_all = jax.vmap(step, axis_name=AXIS)
    return jax.vmap(start)(jnp.arange(N)), harness.jit_fast(on_all)


def _low(rank, seed=0):
    rng = np.random.default_rng(seed)
    left, right = rng.normal(size=(SHAPE[0], rank)), rng.normal(size=(rank, SHAPE[1]))
    return left @ right / np.abs(left @ right).max()


def _on_replicas(x):
    return np.broadcast_to(x.astype(np.float32), (N, *SHAPE))


def _error(found, expected):
    assert np.isfinite(found).all()
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("rank", rarely.cases(RANKS, often=(2,)))
def test_a_gradient_of_no_higher_rank_arrives_whole_at_every_scale(rank):
    start, step = _runner(hooks.power_sgd(rank))
    for low in (low for low in (1, 2) if low <= rank):
        for scale in SCALES:
            x, state = _low(low) * scale, start
            for _ in range(3):
                total, state = step(_on_replicas(x), state)
                np.testing.assert_array_equal(total[0], total[1])
                assert _error(np.float64(total[0]), N * x) <= 30 * EPS, (low, scale)


@pytest.mark.parametrize("scale", [SMALLEST, 0.9 * LARGEST])
def test_so_it_does_at_both_ends_of_the_range(scale):
    start, step = _runner(hooks.power_sgd(1))
    x, state = np.ones(SHAPE) * scale, start
    for _ in range(3):
        total, state = step(_on_replicas(x), state)
        assert _error(np.float64(total[0]), N * x) <= 30 * EPS


def test_what_is_below_the_range_is_fed_back():
    start, step = _runner(hooks.power_sgd(1))
    x, sent, state = np.ones(SHAPE) * SMALLEST / 4, 0.0, start
    for _ in range(64):
        total, state = step(_on_replicas(x), state)
        sent = sent + np.float64(total[0])
    assert np.abs(sent - 64 * N * x).max() <= N * SMALLEST


@pytest.mark.parametrize("rank", rarely.cases(RANKS, often=(2,)))
def test_what_is_sent_is_the_projection_onto_what_q_finds(rank):
    start, step = _runner(hooks.power_sgd(rank, error_feedback=False))
    x = np.random.default_rng(0).normal(size=SHAPE) * np.geomspace(1, 1e-9, SHAPE[1])
    total, state = step(_on_replicas(x), start)
    for _ in range(3):
        # The oracle takes one step from the same Q: a basis by Householder.
        (factors,) = state.factors
        q, _ = np.linalg.qr(np.float64(factors[0]).reshape(rank, SHAPE[1]).T)
        p, _ = np.linalg.qr(x @ q)
        total, state = step(_on_replicas(x), state)
        assert _error(np.float64(total[0]), N * p @ p.T @ x) <= 100 * EPS


@pytest.mark.parametrize("rank", rarely.cases(RANKS, often=(2,)))
def test_what_is_sent_sums_up_to_the_gradients(rank):
    # A rank that changes from step to step, zero among them.
    lows = [3, 1, 0, 2, 1, 1, 5, 0, 1]
    xs = [_low(low, seed) if low else np.zeros(SHAPE) for seed, low in enumerate(lows)]
    start, step = _runner(hooks.power_sgd(rank))
    sent, given, state = np.zeros(SHAPE), np.zeros(SHAPE), start
    for x in [*xs, *[np.zeros(SHAPE)] * 60]:
        total, state = step(_on_replicas(x), state)
        sent, given = sent + np.float64(total[0]), given + N * x
        left = np.float64(state.residuals.value[0]).sum(0).reshape(SHAPE)
        assert _error(sent + left, given) <= 100 * EPS
    # All has come in the end.
    assert _error(sent, given) <= 1e-3


@pytest.mark.parametrize("rank", [1, 2])
def test_a_direction_that_was_never_there_is_found_again(rank):
    start, step = _runner(hooks.power_sgd(rank))
    first, other = np.zeros(SHAPE), np.zeros(SHAPE)
    first[:, 0], other[:, 1] = np.arange(40) + 1, np.arange(40) - 5
    state = start
    for x in (first, first, np.zeros(SHAPE), other):
        total, state = step(_on_replicas(x), state)
    again, _ = step(_on_replicas(other), state)
    # The first step sends a part, which depends on Q, and the second one the rest.
    sent = np.float64(total[0]) + np.float64(again[0])
    assert _error(sent, N * 2 * other) <= 30 * EPS


def test_an_epsilon_is_added_to_the_norms():
    start, step = _runner(hooks.power_sgd(1, orthogonalization_epsilon=1e3))
    x = _low(1)
    total, _ = step(_on_replicas(x), start)
    (factors,) = start.factors
    q = np.float64(factors[0]).reshape(SHAPE[1], 1)
    q /= np.linalg.norm(q) + 1e3
    p = N * x @ q
    p /= np.linalg.norm(p) + 1e3
    assert _error(np.float64(total[0]), N * p @ p.T @ x) <= 30 * EPS


def _program(num_matrices):
    hook = hooks.power_sgd(2)
    aval = jdp.trees.buckets.BucketAval([SHAPE] * num_matrices, np.dtype("float32"))

    def step(x):
        wire = base.Wire(AXIS, None)
        return hook.apply([x], hook.init([aval]), wire)[0][0]

    x = jax.ShapeDtypeStruct((N, aval.size), np.float32)
    return str(jax.make_jaxpr(jax.vmap(step, axis_name=AXIS))(x))


def test_matrices_of_one_shape_share_their_products_and_draws():
    few, many = _program(2), _program(40)
    for name in ("dot_general", "scan"):  # a `fori_loop` is a scan.
        assert few.count(f"{name}[") == many.count(f"{name}[") > 0, name


def test_a_first_state_is_drawn_at_once_for_matrices_of_all_shapes():
    hook = hooks.power_sgd(2)

    def num_equations(num_shapes):
        shapes = [(40 + i, 30 + i) for i in range(num_shapes)]
        aval = jdp.trees.buckets.BucketAval(shapes, np.dtype("float32"))
        return len(jax.make_jaxpr(lambda: hook.init([aval]))().eqns)

    assert num_equations(2) == num_equations(100)
