"""On one replica, collectives give the right values, and most leave no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdp
from tests import harness, rarely

X = np.arange(1.0, 13.0, dtype=np.float32).reshape(4, 3)
PARAMS = np.float32([0.1, 0.2, 0.3])
KEPT_SHAPE = {
    "psum": lambda x, a: lax.psum(x, a),
    "psum of bool": lambda x, a: -lax.psum(x > 0, a),
    "pmean": lambda x, a: lax.pmean(x, a),
    "pmax": lambda x, a: lax.pmax(lax.stop_gradient(x), a),
    "all_gather": lambda x, a: lax.all_gather(x, a, tiled=True),
    "all_gather, axis 1": lambda x, a: lax.all_gather(x, a, axis=1, tiled=True),
    "psum_scatter": lambda x, a: lax.psum_scatter(x, a, tiled=True),
    "all_to_all": lambda x, a: lax.all_to_all(x, a, 0, 1, tiled=True),
    "ppermute": lambda x, a: lax.ppermute(x, a, [(0, 0)]),
    "in a scan": lambda x, a: lax.scan(lambda c, r: (c, lax.psum(r, a)), 0.0, x)[1],
    "in a branch": lambda x, a: lax.cond(
        x[0, 0] > 0, lambda: lax.psum(x, a), lambda: x
    ),
    "in a jit": lambda x, a: jax.jit(lambda x: lax.psum(x, a))(x),
    "in a remat": lambda x, a: jax.checkpoint(lambda x: lax.psum(jnp.sin(x), a))(x),
    "under vmap": lambda x, a: jax.vmap(lambda r: lax.psum(r, a))(x),
}
OTHER_SHAPE = {
    "all_gather, untiled": lambda x, a: lax.all_gather(x, a),
    "all_gather, untiled, axis 1": lambda x, a: lax.all_gather(x, a, axis=1),
    "psum_scatter, untiled": lambda x, a: lax.psum_scatter(x[None], a),
    "all_to_all, untiled": lambda x, a: lax.all_to_all(x[None], a, 0, 0),
    "ppermute to none": lambda x, a: lax.ppermute(x, a, []),
}
COLLECTIVES = KEPT_SHAPE | OTHER_SHAPE
AXES = {"one axis": ("data", 1), "two axes": (("node", "data"), 1)}


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize(
    "name", rarely.cases(COLLECTIVES, often=list(COLLECTIVES)[::2])
)
def test_values_and_derivatives_are_the_ones_of_shard_map(name, axes):
    axis_name, _ = axes
    collective = COLLECTIVES[name]
    if isinstance(axis_name, tuple) and name == "all_to_all, untiled":
        pytest.skip("JAX takes one axis there.")

    def loss(params, x):
        y = collective(jnp.tanh(x * params), axis_name)
        factors = jnp.arange(1.0, y.size + 1, dtype=x.dtype).reshape(y.shape)
        return (y * factors).sum(), y

    def step(params, x):
        (_, y), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
        return grads, {"y": y[None]}

    world = harness.local_world(1, *axes)
    spec = jax.sharding.PartitionSpec()
    plain = jax.shard_map(
        step, mesh=world.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    expected = jax.jit(plain)(PARAMS, X)
    wrapped = jdp.data_parallel(step, world=world, donate_state=False)
    grads, metrics = wrapped(PARAMS, X)
    np.testing.assert_array_equal(grads, expected[0])
    np.testing.assert_array_equal(metrics["y"], expected[1]["y"])
    assert metrics["y"].dtype == expected[1]["y"].dtype


@pytest.mark.parametrize("weight", [None, 2.0])
def test_a_loss_may_gather_without_tiles(weight):
    def loss(params, x):
        return lax.all_gather(jnp.tanh(x * params).mean(0), "data").sum()

    @jdp.data_parallel(world=harness.local_world(1), donate_state=False)
    def step(params, x):
        return jdp.value_and_grad(loss, weight=weight)(params, x)[1], {}

    expected = jax.grad(lambda p: jnp.tanh(X * p).mean(0).sum())(PARAMS)
    np.testing.assert_allclose(step(PARAMS, X)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("name", KEPT_SHAPE)
def test_a_collective_that_keeps_the_shape_is_not_in_the_program(name):
    @jdp.data_parallel(world=harness.local_world(1), donate_state=False)
    def step(params, x):
        y = KEPT_SHAPE[name](jnp.tanh(x * params), "data")
        return params, {"y": y.astype(jnp.float32).sum()}

    text = step.lower(PARAMS, X).as_text()
    words = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "permute")
    assert not [word for word in words if f"stablehlo.{word}" in text]


def test_a_linear_solve_whose_product_averages_runs_on_one_replica():
    matrix = np.array([[3.0, 1.0], [1.0, 2.0]], np.float32)

    def solve(b):
        return jax.scipy.sparse.linalg.cg(lambda v: lax.pmean(matrix @ v, "data"), b)[0]

    step = jdp.data_parallel(
        lambda state, b: (state, {"x": lax.pmean(solve(b[0]), "data")}),
        world=harness.local_world(1),
    )
    b = np.array([[1.0, 2.0]], np.float32)
    found = step(0.0, b)[1]["x"]
    np.testing.assert_allclose(found, np.linalg.solve(matrix, b[0]), rtol=1e-5)
