"""Optimizers that need whole matrices: each matrix has an owner, which updates it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.optimizers import region_owners, whole_regions
from tests import harness, rarely

_rng = np.random.default_rng(0)


def _matrices(**counts):
    """Matrices, e.g. `6` of `"8x24"`, and a bias, with a batch of targets for each."""
    shapes = {
        f"{shape}_{i}": tuple(map(int, shape.split("x")))
        for shape, count in counts.items()
        for i in range(count)
    }
    shapes["bias"] = (7,)
    return {k: _rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


# Two replicas get two of the first each, and one is left. 24x8 is transposed before it
# is multiplied.
PARAMS = _matrices(**{"8x24": 5, "24x8": 2, "16x16": 1})
BATCH = _rng.uniform(0.5, 2.0, size=(12, 1)).astype(np.float32)


def _loss(params, batch):
    scale = batch.mean(axis=-1)
    terms = [
        jnp.mean((p * scale[:, None] - 0.1).reshape(scale.size, -1) ** 2)
        for p in (x.reshape(-1)[None] for x in jax.tree.leaves(params))
    ]
    return sum(terms) + sum(jnp.sin(3 * x).mean() for x in jax.tree.leaves(params))


def _train(step, tx, steps=3):
    state = (PARAMS, tx.init(PARAMS))
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return state


def _on_replicas(tx, world, axis_name, **options):
    options["compiler_options"] = harness.fast_options()

    @jdp.data_parallel(world=world, donate_state=False, **options)
    def step(state, batch):
        params, opt = state
        loss, grads = jdp.local_gradients(_loss, axis_name=axis_name)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    return step


def _alone(tx):
    @harness.jit_fast
    def step(state, batch):
        params, opt = state
        loss, grads = jax.value_and_grad(_loss)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    return step


def _by_matrix(fn):
    """An optimizer whose update of a matrix is `fn` of its gradient."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: fn(g) if g.ndim == 2 else g, grads), state

    return optax.GradientTransformation(lambda params: (), update)


def _polar(g):
    u, _, v = jnp.linalg.svd(g, full_matrices=False)
    return u @ v


def _whiten(g):
    values, vectors = jnp.linalg.eigh(g @ g.T + jnp.eye(g.shape[0]))
    return (vectors / jnp.sqrt(values)) @ vectors.T @ g


def _on_host(g):
    return jax.pure_callback(lambda x: np.asarray(x)[::-1], g, g)


def _shampoo(beta=0.9):
    """A preconditioner per matrix, in a state that has no shape of a parameter."""

    def init(params):
        return jax.tree.map(lambda p: jnp.eye(p.shape[0]), params)

    def update(grads, state, params=None):
        state = jax.tree.map(
            lambda s, g: beta * s + g @ g.T if g.ndim == 2 else s, state, grads
        )
        return jax.tree.map(
            lambda g, s: _root(s) @ g if g.ndim == 2 else g, grads, state
        ), state

    return optax.GradientTransformation(init, update)


def _root(x):
    values, vectors = jnp.linalg.eigh(x)
    return (vectors * values**-0.25) @ vectors.T


muon = optax.contrib.muon
OPTIMIZERS = {
    "muon": muon(0.01, weight_decay=0.1),
    "adaptive": muon(0.01, adaptive=True, nesterov=False),
    "steps of its own": muon(0.01, preconditioning="schatten", ns_coeffs="dion"),
    "narrow momentum": muon(0.01, mu_dtype=jnp.float16),
    "every other step": optax.MultiSteps(muon(0.01), 2).gradient_transformation(),
    "a norm between": optax.chain(
        muon(0.1), optax.clip_by_global_norm(0.1), _by_matrix(_whiten)
    ),
    "factors": optax.adafactor(0.01, min_dim_size_to_factor=4),
    "centralized": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "polar": optax.chain(_by_matrix(_polar), optax.sgd(0.1)),
    "booleans": optax.chain(
        _by_matrix(lambda g: jnp.where((g > 0)[::-1], g, 2 * g)), optax.sgd(0.1)
    ),
    "a state per matrix": optax.chain(_shampoo(), optax.sgd(0.1)),
    "a host function": optax.chain(_by_matrix(_on_host), optax.sgd(0.1)),
}


def _expect(found, expected, atol=2e-6):
    for k, x in expected.items():
        np.testing.assert_allclose(found[k], x, rtol=0, atol=atol, err_msg=k)


@pytest.mark.parametrize("name", rarely.cases(OPTIMIZERS, often=("muon",)))
def test_it_steps_as_on_one_device(name):
    _expect_as_alone(OPTIMIZERS[name], harness.local_world(2))


@pytest.mark.parametrize("n", rarely.cases([1, 3, 4], often=(3,)))
def test_on_any_number_of_replicas(n):
    _expect_as_alone(muon(0.01), harness.local_world(n))


def test_empty_arrays():
    """A product of a matrix without rows is zero; its part of the mail is empty."""
    world = harness.local_world(2)
    grads = {"a": np.ones((0, 8), np.float32), "b": np.ones((8, 8), np.float32)}

    def mix(g, params=None):
        (a, b) = (g["a"].astype(jnp.float16), g["b"])
        for _ in range(4):
            b = b @ b.T / 8
        return {"a": g["a"], "b": b + (a.T @ a).astype(jnp.float32)}

    inner = optax.stateless(mix)
    tx = jdp.zero1(inner, world=world)

    def step(opt, batch):
        return opt, {"updates": tx.update(grads, opt, grads)[0]}

    step = jdp.data_parallel(step, world=world, donate_state=False)
    _, found = step(tx.init(grads), np.ones(2, np.float32))
    np.testing.assert_allclose(found["updates"]["b"], mix(grads)["b"], rtol=1e-6)


@pytest.mark.slow
def test_a_pair_of_axes():
    world = harness.local_world(4, ("node", "data"), num_nodes=2)
    _expect_as_alone(muon(0.01), world, axis_name=("node", "data"))


def test_without_types_of_what_varies():
    _expect_as_alone(muon(0.01), harness.local_world(2), check_vma=False)


def _expect_as_alone(tx, world, axis_name="data", **options):
    zero1 = jdp.zero1(tx, axis_name=axis_name, world=world)
    found, _ = _train(_on_replicas(zero1, world, axis_name, **options), zero1)
    expected, _ = _train(_alone(tx), tx)
    _expect(found, expected)


def _blocks(depth, width):
    """Matrices of a transformer with `depth` blocks."""
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    return {
        f"{name}_{i}": _rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
        for i in range(depth)
    }


def _compile_update(tx, params, world=None):
    """Compiles the update alone: the cost of the loss depends on the batch."""

    def step(state, batch):
        params, opt = state
        grads = jax.tree.map(lambda x: x * batch.mean(), params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {}

    state, batch = (params, tx.init(params)), np.ones(4, np.float32)
    if world is None:
        return harness.jit_fast(step).lower(state, batch).compile()
    options = harness.fast_options()
    step = jdp.data_parallel(step, world=world, compiler_options=options)
    return step.lower(state, batch).compile()


# 6 of each shape do not divide among 4 replicas.
@pytest.mark.parametrize("depth", rarely.cases([4, 6], often=(6,)))
def test_the_work_is_divided(depth):
    params, tx = _blocks(depth, 32), muon(0.01)
    world = harness.local_world(4)
    whole = _compile_update(tx, params)
    part = _compile_update(jdp.zero1(tx, world=world), params, world)
    ratio = part.cost_analysis()["flops"] / whole.cost_analysis()["flops"]
    assert ratio <= 0.30

    size, n = sum(x.size for x in params.values()), 4
    text = part.as_text()
    sent = sum(
        int(np.prod([int(d) for d in dims.split(",")]))
        for result in re.findall(r"= (\S.*?) (?:all-to-all)\(", text)
        for dims in re.findall(r"f32\[([\d,]+)\]", result)
    )
    # There and back, a shard of each matrix, and as much more as the rows of the
    # replica with the longest.
    assert 2 * size / n <= sent <= 2.2 * size / n
    (gathered,) = re.findall(r"= f32\[(\d+),(\d+)\]\S* all-gather\(", text)
    assert np.prod([int(d) for d in gathered]) == size


def test_regions_that_are_left_go_to_the_replica_with_the_least_to_do():
    def region(cost, signature, is_heavy=True):
        return whole_regions.Region(
            None, (), (), signature, cost, is_heavy, is_light_to_send=False
        )

    costs = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0]
    few = [region(cost, cost) for cost in costs]
    many = [region(10.0, "many") for _ in range(7)]
    cheap = [region(1.0, "cheap", is_heavy=False) for _ in range(5)]
    found = region_owners.assign([*few, *many, *cheap], 3)
    assert [len(batch) for batch in found.batches] == [6]
    loads = [sum(x.cost for x in own) for own in found.singles]
    assert sorted(loads) == [11.0, 13.0, 13.0]
    assert not any(x.signature == "cheap" for x in found.regions)
