"""Selection: the largest elements of long buffers, against a sort by numpy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp import hooks
from jdp.hooks import base, selection
from jdp.trees.buckets import BucketAval
from tests import harness, rarely
from tests.transforms import AXIS

SIZE = 70_001  # not a multiple of 32, and the sample takes every third element.
N = 2


def _buffers():
    rng = np.random.default_rng(0)
    normal, place = rng.normal(size=SIZE), np.arange(SIZE)
    is_sampled = place % 3 == 0
    return {
        "normal": normal,
        "zeros": np.zeros(SIZE),
        "equal": np.full(SIZE, -2.0),
        "few that are not zero": np.where(rng.random(SIZE) < 1e-3, normal, 0),
        "many scales": np.exp(8 * normal),
        "larger where the sample is": np.where(is_sampled, 1e3, 1) * normal,
        "smaller where the sample is": np.where(is_sampled, 1e-3, 1) * normal,
        "equal where the sample is": np.where(is_sampled, 1, normal),
        "one large block": np.where(place // 512 == 40, 1e3, 1) * normal,
        "NaN": np.where(rng.random(SIZE) < 0.3, np.nan, normal),
        "infinity": np.where(rng.random(SIZE) < 0.01, -np.inf, normal),
        "NaN and infinity": np.where(place < 5, np.nan, np.where(place < 9, np.inf, 1)),
    }


@functools.cache
def _finder(least, most):
    return harness.jit_fast(
        functools.partial(selection.find_largest, least=least, most=most)
    )


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    rarely.cases(
        [
            ("float32", 526, 701),
            ("float32", 1, 1),
            ("float32", SIZE // 2, SIZE // 2),
            ("float32", SIZE, SIZE),
            ("bfloat16", 526, 701),
            ("float16", 5, 7),
        ],
        often=[("float32", SIZE, SIZE), ("bfloat16", 526, 701), ("float16", 5, 7)],
    ),
)
def test_no_element_is_larger_than_one_that_is_found(dtype, least, most):
    for name, buffer in _buffers().items():
        with np.errstate(over="ignore"):
            x = jnp.asarray(buffer, dtype)
        places = np.asarray(_finder(least, most)(x))
        assert places.shape == (most,) and len(set(places.tolist())) == most, name
        places = places[places < SIZE]
        assert least <= len(places) <= most and (places >= 0).all(), name
        magnitudes = np.abs(np.float64(x))
        # In the order of numpy, too, NaN comes last.
        order = np.argsort(np.argsort(magnitudes, kind="stable"))
        smallest = magnitudes[places[np.argmin(order[places])]]
        rest = np.delete(magnitudes, places)
        if np.isnan(smallest) or not rest.size:
            continue
        assert not np.isnan(rest).any() and rest.max() <= smallest, name


@functools.cache
def _runner(fraction):
    hook = hooks.top_k(fraction)
    aval = BucketAval([(SIZE,)], np.dtype("float32"))

    def step(x, state):
        (total,), state = hook.apply([x], state, base.Wire(AXIS, None))
        return total, state

    start = jax.vmap(lambda _: hook.init([aval]))(jnp.arange(N))
    return start, harness.jit_fast(jax.vmap(step, axis_name=AXIS))


def _integers(buffer):
    """Integers, whose sums are exact."""
    x = np.nan_to_num(np.round(8 * buffer), posinf=64, neginf=-64)
    return np.clip(x, -64, 64).astype(np.float32)


@pytest.mark.parametrize("name", rarely.cases(_buffers(), often=list(_buffers())[::4]))
def test_all_arrives_exactly_within_a_bounded_number_of_steps(name):
    fraction = 0.05
    most = math.ceil(fraction * SIZE)
    least = math.ceil(0.75 * most)
    x = _integers(_buffers()[name])
    start, step = _runner(fraction)
    state, sent, given = start, np.zeros(SIZE), np.zeros(SIZE)
    num_steps = 3 + math.ceil(SIZE / least)
    for k in range(num_steps):
        grads = np.stack([x, -2 * x[::-1]]) if k < 3 else np.zeros((N, SIZE))
        before = np.asarray(state.residuals.value[0], np.float64)
        total, state = step(np.float32(grads), state)
        np.testing.assert_array_equal(total[0], total[1])
        sent, given = sent + np.float64(total[0]), given + grads.sum(0)
        left = np.asarray(state.residuals.value[0], np.float64)
        # What is not sent is kept, to the last bit.
        np.testing.assert_array_equal(sent + left.sum(0), given)
        for own, kept in zip(before + grads, left, strict=True):
            is_sent = own != kept
            assert is_sent.sum() <= most
            assert is_sent.sum() >= min(least, np.count_nonzero(own))
            if is_sent.any():
                assert np.abs(own[is_sent]).min() >= np.abs(kept).max()
    np.testing.assert_array_equal(left, 0)
    np.testing.assert_array_equal(sent, given)


def test_an_element_that_is_small_in_every_step_is_sent_in_its_turn():
    fraction, num_steps = 0.05, 40
    x = np.where(np.arange(SIZE) % 3 == 0, 1, 2).astype(np.float32)
    state, step = _runner(fraction)
    is_sent = np.zeros(SIZE, bool)
    for _ in range(num_steps):
        total, state = step(np.stack([x, x]), state)
        is_sent |= np.asarray(total[0]) != 0
    # 1.5 times the 1 / 0.0375 steps that sending all of them once takes.
    assert is_sent.all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("num_bad", [1, 100, SIZE // 2])
def test_what_is_not_finite_arrives_and_does_not_stay(bad, num_bad):
    start, step = _runner(0.05)
    grads = np.ones((N, SIZE), np.float32)
    places = np.random.default_rng(0).permutation(SIZE)[:num_bad]
    grads[1, places] = bad
    total, state = step(grads, start)
    found = np.flatnonzero(~np.isfinite(total[0]))
    assert set(found) <= set(places)
    assert len(found) >= min(num_bad, math.ceil(0.75 * 0.05 * SIZE))
    residual = np.asarray(state.residuals.value[0])
    assert np.isfinite(residual).all()
    np.testing.assert_array_equal(residual[1, places], 0)
