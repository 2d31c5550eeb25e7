"""A step that is traced again with another graph says so."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from tests import harness


def _params():
    return {k: np.eye(3, dtype=np.float32) for k in ("a", "b")}


def _x(size):
    return np.ones((2 * size, 3), np.float32)


def _loss(way):
    """Returns a loss whose graph depends on the number of samples."""

    def loss(p, x):
        is_large = x.shape[0] > 2
        if way == "unused" and is_large:
            return (x @ p["a"]).sum() + 0 * jax.lax.stop_gradient(p["b"]).sum()
        if way == "used at times" and is_large:
            return jax.lax.cond(
                x.sum() > 0, lambda: x @ p["a"] @ p["b"], lambda: x @ p["a"]
            ).sum()
        if way == "order" and is_large:
            return (x @ p["b"] @ p["a"]).sum()
        return (x @ p["a"] @ p["b"]).sum()

    return loss


def _step(way, **kwargs):
    loss = _loss(way)

    def step(params, x):
        _, grads = jdp.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {}

    return jdp.data_parallel(step, world=harness.local_world(2), **kwargs)


DIFFERENCES = {
    "unused": r"`\['b'\]` was always used and is now never used",
    "used at times": r"`\['b'\]` was always used and is now at times used",
    "order": (
        r"the gradient of `\['a'\]` is now finished where the gradient of `\['b'\]` "
        "was"
    ),
}


@pytest.mark.parametrize("way", DIFFERENCES)
def test_another_graph_is_an_error_that_names_the_difference(way):
    step = _step(way, static_graph=True)
    state, _ = step(_params(), _x(1))
    state, _ = step(state, _x(2))  # other shapes, the same graph.
    message = f"`step` was traced again, and {DIFFERENCES[way]}"
    with pytest.raises(ValueError, match=message):
        step(state, _x(3))


@pytest.mark.parametrize("way", DIFFERENCES)
def test_otherwise_it_is_one_line_in_the_log(way, caplog):
    step = _step(way)
    state, _ = step(_params(), _x(1))
    with caplog.at_level(logging.WARNING, logger="jdp"):
        state, _ = step(state, _x(2))
        assert not caplog.records
        state, _ = step(state, _x(3))
        state, _ = step(state, _x(3))
    (record,) = caplog.records
    assert "`step` was traced again, and " in record.getMessage()


def test_parameters_that_come_and_go_are_named():
    @jdp.data_parallel(world=harness.local_world(2), static_graph=True)
    def step(params, x):
        loss = lambda p: sum((x @ w).sum() for w in p.values())  # noqa: E731
        return params, jdp.value_and_grad(loss)(params)[0]

    step(_params(), _x(1))
    with pytest.raises(ValueError, match=r"`\['b'\]` were parameters and are not"):
        step({"a": _params()["a"]}, _x(1))
    with pytest.raises(ValueError, match=r"`\['c'\]` are parameters and were not"):
        step(_params() | {"c": _params()["a"]}, _x(1))


def test_another_number_of_losses_is_named():
    @jdp.data_parallel(world=harness.local_world(2), static_graph=True)
    def step(params, x):
        loss, grads = jdp.value_and_grad(lambda p: (x @ p["a"] @ p["b"]).sum())(params)
        if x.shape[0] > 1:
            jdp.value_and_grad(lambda p: (x @ p["b"] @ p["a"]).sum())(params)
        return params, loss

    step(_params(), _x(1))
    with pytest.raises(ValueError, match="2 different losses, and had 1"):
        step(_params(), _x(2))


def test_micro_batches_of_two_sizes_are_one_graph():
    @jdp.data_parallel(world=harness.local_world(2), static_graph=True)
    def step(params, x):
        loss = _loss("none")
        _, grads = jdp.accumulate_gradients(loss, 2)(params, x)
        return params, {}

    step(_params(), _x(4))
    step(_params(), _x(5))  # 3 and 2 samples.


def test_a_graph_that_changes_stays_refused():
    step = _step("order", static_graph=True)
    state, _ = step(_params(), _x(1))
    for _ in range(2):
        with pytest.raises(ValueError, match="traced again"):
            step(state, _x(3))
    step(state, _x(1))  # what was compiled goes on.


# --- Several processes ----------------------------------------------------------------


def _retrace(world, processes_that_change):
    is_changed = world.process_index in processes_that_change
    loss = _loss("order" if is_changed else "none")

    @jdp.data_parallel(static_graph=True)
    def step(params, x):
        _, grads = jdp.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {}

    state, _ = step(_params(), np.ones((2, 3), np.float32))
    return harness.error_text(lambda: step(state, np.ones((3, 3), np.float32)))


def _order_by_process(world):
    @jdp.data_parallel
    def step(params, x):
        a, b = ("a", "b") if world.process_index == 0 else ("b", "a")
        loss = lambda p: jnp.tanh(x @ p[a] @ p[b]).sum()  # noqa: E731
        _, grads = jdp.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {}

    return harness.error_text(lambda: step(_params(), _x(1)))


CHANGES = ((0, 1), (0,), (1,))


def _run_in_two():
    """Each mistake in a step of its own; they are refused before anything is sent."""
    world = jdp.init(timeout_s=20.0)
    found = {changes: _retrace(world, changes) for changes in CHANGES}
    return found | {"order": _order_by_process(world)}


@pytest.fixture(scope="module")
def in_two():
    return harness.run_checked(_run_in_two, 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("processes_that_change", CHANGES)
def test_every_process_hears_of_a_graph_that_changed(in_two, processes_that_change):
    for process, found in enumerate(in_two):
        text, seconds = found[processes_that_change]
        assert (
            "the gradient of `['a']` is now finished where the gradient of `['b']`"
            in text
        )
        is_own = process in processes_that_change
        assert text.startswith("ValueError" if is_own else "RuntimeError"), text
        assert seconds < 20


@pytest.mark.multiprocess
def test_an_order_that_differs_between_processes_is_refused_on_all(in_two):
    for text, _ in (found["order"] for found in in_two):
        assert "RuntimeError" in text
        assert "program" in text
