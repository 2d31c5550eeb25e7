"""Arguments of a wrong type are refused by name, where jdp is called."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from tests import harness

PARAMS = {"a": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
X = np.ones((2, 4, 2), np.float32)
SGD = optax.sgd(0.1)
NO_NUMBERS = {"dict": {}, "object": object(), "function": len, "text": "a"}


def _loss(params, x):
    return jnp.mean((x @ params["a"] + params["b"]) ** 2)


def _on_replicas(fn):
    return jax.eval_shape(jax.vmap(fn, axis_name="data"), X)


STATES = {
    "local_sgd": lambda w: jdp.local_sgd(SGD, period=2, world=w).init(PARAMS),
    "diloco": lambda w: jdp.diloco(SGD, period=2, world=w).init(PARAMS),
    "zero1": lambda w: jdp.zero1(SGD, world=w).init(PARAMS),
    "hooks": lambda w: jdp.hooks.init_state(jdp.hooks.top_k(0.5), PARAMS, world=w),
    "copies": lambda w: jdp.copy_per_replica(PARAMS, world=w),
}


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_a_state_is_made_on_a_world(make):
    for world in (3, "w", object()):
        with pytest.raises(TypeError, match="`world` must be what `jdp.init` returned"):
            make(world)


def test_the_state_of_a_hook_takes_a_hook_gradients_and_a_plan():
    hook, world = jdp.hooks.top_k(0.5), harness.local_world(2)
    for wrong in (3, "int8", jdp.hooks.int8):
        with pytest.raises(TypeError, match="`hook` must be a `jdp.hooks.CommHook`"):
            jdp.hooks.init_state(wrong, PARAMS, world=world)
    with pytest.raises(TypeError, match="`plan` must be what `jdp.plan_buckets`"):
        jdp.hooks.init_state(hook, PARAMS, plan=3, world=world)
    with pytest.raises(TypeError, match=r"`\['a'\]` must be an array or a number"):
        jdp.hooks.init_state(hook, {"a": "x"}, world=world)


def test_a_template_is_made_from_arrays():
    for leaf in ("x", 3, object()):
        with pytest.raises(TypeError, match=r"`state\['a'\]` must be an array, got"):
            jdp.checkpoint_template({"a": leaf}, num_replicas=2)


WEIGHED = {
    "value_and_grad": lambda w: jdp.value_and_grad(_loss, weight=w),
    "mean_loss": lambda w: jdp.mean_loss(_loss, weight=w),
    "accumulate": lambda w: jdp.accumulate_gradients(_loss, 2, weight=w),
    "average": lambda w: lambda params, x: jdp.average(x.sum(), weight=w),
}


@pytest.mark.parametrize("make", WEIGHED.values(), ids=WEIGHED)
@pytest.mark.parametrize("weight", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_a_weight_is_a_number(make, weight):
    message = f"`weight` must be a real number.*{re.escape(repr(weight))}"
    with pytest.raises(TypeError, match=message):
        _on_replicas(lambda x: make(weight)(PARAMS, x))


@pytest.mark.parametrize(
    "weight", [np.ones(4, complex), jax.random.split(jax.random.key(0), 4)]
)
def test_weights_of_samples_are_real_numbers(weight):
    grad_fn = jdp.accumulate_gradients(_loss, 2, weight=weight)
    with pytest.raises(TypeError, match="`weight` must be a real number, got"):
        _on_replicas(lambda x: grad_fn(PARAMS, x))


def test_an_average_is_of_numbers():
    key = jax.random.key(0)
    for leaf, found in (("a", "'a'"), (key, "a PRNG key"), (len, "<built-in fun")):
        message = rf"`jdp.average` .* the leaf `\['m'\]` is {found}.*has no mean"
        with pytest.raises(TypeError, match=message):
            _on_replicas(lambda x, leaf=leaf: jdp.average({"l": x, "m": leaf}))


@pytest.mark.parametrize("order", [[1.0, 0.0], "ab", 3])
def test_an_order_is_of_integers(order):
    with pytest.raises(TypeError, match="`order` must be a list of integers, .* got"):
        jdp.plan_buckets(PARAMS, order=order)
    assert jdp.plan_buckets(PARAMS, order=np.array([1, 0])).buckets


def test_a_number_of_steps_is_no_truth_value():
    for make in (jdp.local_sgd, jdp.diloco):
        with pytest.raises(TypeError, match="`period` must be an integer, .* got True"):
            make(SGD, period=True)
