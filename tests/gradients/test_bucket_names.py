"""Bucket names: profilers and dumps of XLA show which bucket a collective is of."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jdp
from jdp import collectives
from jdp.trees import bucket_names
from tests import harness

PARAMS = {
    "layers": [
        {"b": np.ones(8, "f4"), "w": np.ones((8, 8), "f4")},
        {"b": np.ones(8, "f4"), "w": np.ones((8, 8), "f4")},
    ],
    "out": np.ones(8, "f4"),
}
NAMES = [
    "jdp/bucket_0/layers.0.b",
    "jdp/bucket_1/layers.1.b",
    "jdp/bucket_2/out",
]


def _plan():
    return jdp.plan_buckets(
        PARAMS, bucket_bytes=288, first_bucket_bytes=288, order=range(5)
    )


def _loss(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params["out"]) ** 2)


def _collectives(step, *args, kinds="all-reduce|reduce-scatter|all-gather|all-to-all"):
    """The names of the collectives of a compiled step, each once, in order."""
    text = step.lower(*args).compile().as_text()
    pattern = rf' (?:{kinds}|collective-permute)(?:-start)?\(.*op_name="([^"]*)"'
    names = re.findall(pattern, text)
    found = (re.search(r"jdp/(bucket_\d+/[\w.]+|values)", name) for name in names)
    return list(dict.fromkeys(match[0] if match else "" for match in found))


def _step(**options):
    @jdp.data_parallel(world=harness.local_world(4))
    def step(params, x):
        grad_fn = jdp.value_and_grad(_loss, plan=_plan(), **options)
        loss, grads = grad_fn(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), {"loss": loss}

    return step, PARAMS, np.ones((8, 8), "f4")


@pytest.mark.parametrize("packing", ["flat", "tuple"])
@pytest.mark.parametrize("weight", [None, 2.0])
def test_each_bucket_has_its_number_and_its_first_path(packing, weight):
    options = {"packing": packing, "all_reduce": None, "weight": weight}
    assert sorted(_collectives(*_step(**options))) == NAMES


@pytest.mark.parametrize(
    "all_reduce", [collectives.ring_all_reduce, collectives.halving_doubling_all_reduce]
)
def test_an_all_reduce_of_many_messages_has_the_names(all_reduce):
    assert set(_collectives(*_step(all_reduce=all_reduce))) == {*NAMES}


@pytest.mark.parametrize(
    "hook",
    [
        jdp.hooks.none(),
        jdp.hooks.cast(jnp.bfloat16),
        jdp.hooks.int8(),
        jdp.hooks.power_sgd(1, min_compression_rate=1),
        jdp.hooks.power_sgd(1, min_compression_rate=1, start_step=3),
        jdp.hooks.top_k(0.1),
        jdp.hooks.rows(2),
        pytest.param(
            jdp.hooks.chain(
                jdp.hooks.power_sgd(1, min_compression_rate=1), jdp.hooks.int8()
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda hook: hook.name,
)
def test_the_messages_of_a_hook_have_the_names(hook):
    world = harness.local_world(4)

    @jdp.data_parallel(world=world)
    def step(state, x):
        params, hook_state = state
        grads = jax.grad(_loss)(params, x)
        grads, hook_state = jdp.sync_gradients(
            grads, plan=_plan(), hook=hook, hook_state=hook_state
        )
        return (jax.tree.map(lambda p, g: p - g, params, grads), hook_state), {}

    hook_state = jdp.hooks.init_state(hook, PARAMS, plan=_plan(), world=world)
    found = _collectives(step, (PARAMS, hook_state), np.ones((8, 8), "f4"))
    assert set(found) == {*NAMES}


def test_the_scatter_of_a_sharded_optimizer_has_the_names():
    world = harness.local_world(4)
    tx = jdp.zero1(optax.sgd(0.1, momentum=0.9), plan=_plan(), world=world)

    @jdp.data_parallel(world=world, num_states=2)
    def step(params, opt_state, x):
        grads = jax.grad(_loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {}

    args = PARAMS, tx.init(PARAMS), np.ones((8, 8), "f4")
    assert sorted(_collectives(step, *args, kinds="reduce-scatter")) == NAMES


def test_what_is_reduced_in_the_backward_pass_has_names():
    stack = {"b": np.ones((3, 8), "f4"), "w": np.ones((3, 8, 8), "f4")}

    def loss_fn(params, x):
        def layer(x, params):
            params = jdp.sync_in_backward(params)
            return jnp.tanh(x @ params["w"] + params["b"]), None

        return jnp.mean(lax.scan(layer, x, params)[0])

    @jdp.data_parallel(world=harness.local_world(4))
    def step(params, x):
        loss, grads = jdp.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), {"loss": loss}

    found = _collectives(step, stack, np.ones((8, 8), "f4"))
    assert set(found) == {"jdp/bucket_0/w", "jdp/values"}


def test_averages_without_gradients_have_a_name():
    @jdp.data_parallel(world=harness.local_world(4))
    def step(state, x):
        return state + jdp.average(x.mean()), {}

    assert _collectives(step, np.ones(()), np.ones((8, 8), "f4")) == ["jdp/values"]


@pytest.mark.parametrize("packing", ["flat", "tuple"])
def test_a_weight_that_fits_no_group_travels_under_a_name_of_its_own(packing):
    world = harness.mesh_world((2, 2), manual=("model",))

    @jdp.data_parallel(world=world)
    def step(w, x):
        own = w + lax.axis_index("model")  # Differs over the model axis as well.
        grads = jdp.sync_gradients(
            {"w": own * x.sum()}, weight=x.sum(), packing=packing, all_reduce=None
        )
        return w + lax.psum(grads["w"], "model"), {}

    found = _collectives(step, np.ones(3, "f4"), np.ones((4, 3), "f4"))
    assert {"jdp/bucket_0/w", "jdp/values"} <= {*found}


def test_trees_without_paths_have_numbers():
    class OnlyArrays:
        def __init__(self, x):
            self.x = x

    def unflatten(_, children):
        if isinstance(children[0], int):
            raise TypeError("only arrays")
        return OnlyArrays(*children)

    jax.tree_util.register_pytree_node(OnlyArrays, lambda x: ((x.x,), None), unflatten)
    plan = jdp.plan_buckets(OnlyArrays(np.ones(3, "f4")))
    assert bucket_names.scope_names(plan, plan.buckets) == ["jdp/bucket_0/leaf_0"]
    plan = jdp.plan_buckets(np.ones(3, "f4"))
    assert bucket_names.scope_names(plan, plan.buckets) == ["jdp/bucket_0/leaf_0"]


def _lower_in_process():
    world = jdp.init()

    @jdp.data_parallel
    def step(params, x):
        loss, grads = jdp.value_and_grad(_loss, plan=_plan())(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), {"loss": loss}

    text = step.lower(PARAMS, np.ones((8, 8), "f4")).compile().as_text()
    lines = [line for line in text.splitlines() if "custom-call(" in line]
    return world.process_count, sorted({n for n in NAMES for x in lines if n in x})


@pytest.mark.slow
@pytest.mark.multiprocess
def test_shared_memory_has_the_names():
    assert harness.run_checked(_lower_in_process, 2) == [(2, NAMES)] * 2
