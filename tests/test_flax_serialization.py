"""Flax's serialization: every state of jdp goes to bytes and comes back."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp import hooks
from tests import harness, rarely

N = 2
PARAMS = harness.oracle_params()
BATCHES = harness.oracle_batches(4)


def _optimizer(tx, *, used=False):
    """A state and its step: that of `tx`, which takes local gradients."""

    def step(state, batch):
        params, opt = state
        _, grads = jdp.local_gradients(harness.oracle_loss)(params, batch)
        extra = {"used": jax.tree.map(lambda _: True, grads)} if used else {}
        updates, opt = tx.update(grads, opt, params, **extra)
        return (optax.apply_updates(params, updates), opt), {}

    return (PARAMS, tx.init(PARAMS)), step


def _local(training):
    def step(state, batch):
        _, grads = jdp.local_gradients(harness.oracle_loss)(state.params.value, batch)
        return training.update(grads, state), {}

    return training.init(PARAMS), step


def _noise_scale():
    scale = jdp.noise_scale(decay=0.9)

    def step(state, batch):
        grad_fn = jdp.value_and_grad(harness.oracle_loss, find_norms=True)
        _, norms = grad_fn(PARAMS, batch)
        return scale.update(norms, state)[1], {}

    return scale.init(), step


def _per_replica():
    def step(state, batch):
        return jax.tree.map(lambda x: x + batch["x"].sum(), state), {}

    return jdp.copy_per_replica(PARAMS, world=harness.local_world(N)), step


def _hooked_gradients(hook):
    """The state of a hook that a step holds itself."""

    def step(state, batch):
        params, hook_state = state
        grad_fn = jdp.value_and_grad(
            harness.oracle_loss, hook=hook, hook_state=hook_state
        )
        (_, grads), hook_state = grad_fn(params, batch)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), hook_state), {}

    world = harness.local_world(N)
    return (PARAMS, hooks.init_state(hook, PARAMS, world=world)), step


def _buffers():
    def step(state, batch):
        mine = jax.tree.map(lambda x: x + batch["x"].sum(), state.value)
        return jdp.sync_buffers(mine, policy="local"), {}

    return jdp.copy_per_replica(PARAMS, world=harness.local_world(N)), step


def _accumulated():
    tx = optax.MultiSteps(optax.adam(0.01), 2)
    return _optimizer(jdp.distributed_optimizer(tx))


def _states():
    world = harness.local_world(N)
    zero1 = functools.partial(jdp.zero1, world=world)
    hooked = functools.partial(
        jdp.distributed_optimizer, optax.sgd(0.1, momentum=0.9), world=world
    )
    adam = optax.adam(0.01)
    return {
        "zero1": lambda: _optimizer(zero1(adam)),
        "zero1 with a hook": lambda: _optimizer(zero1(adam, hook=hooks.top_k(0.1))),
        "zero1 in a chain": lambda: _optimizer(
            optax.chain(zero1(adam), optax.ema(0.9))
        ),
        "skip_unused": lambda: _optimizer(
            jdp.distributed_optimizer(jdp.skip_unused(adam)), used=True
        ),
        "skip_unused in pieces": lambda: _optimizer(
            zero1(jdp.skip_unused(adam)), used=True
        ),
        "MultiSteps": _accumulated,
        "top_k": lambda: _optimizer(hooked(hook=hooks.top_k(0.1))),
        "int8": lambda: _optimizer(hooked(hook=hooks.int8())),
        "rows": lambda: _optimizer(hooked(hook=hooks.rows(3))),
        "a chain of hooks": lambda: _hooked_gradients(
            hooks.chain(hooks.cast(jnp.bfloat16), hooks.top_k(0.2))
        ),
        "the state of rows": lambda: _hooked_gradients(hooks.rows(3)),
        "power_sgd in zero1": lambda: _optimizer(zero1(adam, hook=hooks.power_sgd(1))),
        "dynamic_loss_scale": lambda: _optimizer(
            jdp.distributed_optimizer(jdp.dynamic_loss_scale(adam, growth_interval=2))
        ),
        "dynamic_loss_scale in zero1": lambda: _optimizer(
            zero1(jdp.dynamic_loss_scale(adam, init_scale=4.0))
        ),
        "power_sgd": lambda: _optimizer(hooked(hook=hooks.power_sgd(1))),
        "power_sgd without a warm start": lambda: _optimizer(
            hooked(hook=hooks.power_sgd(1, warm_start=False, start_step=1))
        ),
        "local_sgd": lambda: _local(jdp.local_sgd(adam, period=2, world=world)),
        "diloco": lambda: _local(
            jdp.diloco(adam, period=4, num_fragments=2, delay=2, world=world)
        ),
        "noise_scale": _noise_scale,
        "diloco at once": lambda: _local(jdp.diloco(adam, period=2, world=world)),
        "PerReplica": _per_replica,
        "sync_buffers": _buffers,
    }


# "zero1", "diloco", "rows" and "power_sgd" have states of the same kinds.
RARELY = ("power_sgd without a warm start", "diloco at once", "the state of rows")
OFTEN = [name for name in _states() if "zero1 " not in name and name not in RARELY]


@pytest.mark.parametrize("name", rarely.cases(_states(), often=OFTEN))
def test_training_goes_on_from_bytes_bit_for_bit(name):
    start, step = _states()[name]()
    step = jdp.data_parallel(
        step,
        world=harness.local_world(N),
        donate_state=False,
        compiler_options=harness.fast_options(),
    )
    state = start
    for batch in BATCHES[:2]:
        state, _ = step(state, batch)
    read = flax.serialization.from_bytes(start, flax.serialization.to_bytes(state))
    assert jax.tree.structure(read) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, read, state)
    for batch in BATCHES[2:]:
        state, _ = step(state, batch)
        read, _ = step(read, batch)
    jax.tree.map(np.testing.assert_array_equal, read, state)
    changed = [
        bool((np.asarray(a) != np.asarray(b)).any())
        for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(state), strict=True)
    ]
    assert any(changed)


STATES = {
    jdp.LossScaleState,
    jdp.NoiseScaleState,
    jdp.PerReplica,
    jdp.ZeroState,
    hooks.ErrorFeedbackState,
    hooks.PowerSGDState,
    hooks.RowsState,
}


def test_every_public_state_is_written_by_a_test():
    public = {
        value
        for module in (jdp, hooks)
        for name, value in vars(module).items()
        if name.endswith("State") or name == "PerReplica"
    }
    assert public == STATES
    found = set()
    for make in _states().values():
        start, _ = make()
        jax.tree.map(lambda _: None, start, is_leaf=lambda x: bool(found.add(type(x))))
    assert STATES <= found


def test_a_state_of_other_parameters_is_refused_by_the_step():
    """Flax takes any values; the step then says which array is not there."""
    world = harness.local_world(N)
    tx = jdp.zero1(optax.adam(0.01), world=world)
    other = {**PARAMS, "w0": jnp.zeros((16, 5))}
    data = flax.serialization.to_bytes(tx.init(other))
    state = flax.serialization.from_bytes(tx.init(PARAMS), data)

    def step(state, batch):
        _, grads = jdp.local_gradients(harness.oracle_loss)(PARAMS, batch)
        return tx.update(grads, state, PARAMS)[1], {}

    with pytest.raises(ValueError, match=r"missing: `\[0\].mu\['w0'\] \[5, 16\]`"):
        jdp.data_parallel(step, world=world)(state, BATCHES[0])
