"""A program for two hosts: each way to train, a few steps of a small model.

It compares the parameters with those of one device that sees all data. With `quick`,
"auto" measures the links with small buffers; else as every job of a user does.
"""

import functools
import os
import platform
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from jdp import collectives, eager, parameter_server
from jdp.collectives import measurement

WAYS = ("auto", "hierarchical", "eager")
_RATE = 0.1
_NUM_STEPS = 3
_PER_PROCESS = 4


def _loss(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def _data(num_samples):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(num_samples, 300)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def _params():
    return {"w": jnp.zeros((300, 1)), "b": jnp.zeros((1,))}


def _expected(x, y):
    params = _params()
    for _ in range(_NUM_STEPS):
        grads = jax.grad(_loss)(params, x, y)
        params = jax.tree.map(lambda p, g: p - _RATE / 100 * g, params, grads)
    return jax.tree.map(np.asarray, params)


def train(ways: Sequence[str]) -> None:
    """Trains in each of `ways`."""
    world = jdp.init(axis_name=("node", "data"), timeout_s=60.0)
    x, y = _data(_PER_PROCESS * world.process_count)
    own = slice(world.process_index * _PER_PROCESS, None)
    own = slice(own.start, own.start + _PER_PROCESS)
    batch = jdp.global_batch(world, (x[own], y[own]))
    expected = _expected(x, y)
    all_reduces = {
        "auto": "auto",
        "hierarchical": collectives.hierarchical_all_reduce,
    }
    for name, all_reduce in all_reduces.items():
        if name not in ways:
            continue

        @jdp.data_parallel(world=world)
        def step(params, batch, all_reduce=all_reduce):
            loss, grads = jdp.value_and_grad(
                _loss, axis_name=world.axis_name, all_reduce=all_reduce
            )(params, *batch)
            new = jax.tree.map(lambda p, g: p - _RATE / 100 * g, params, grads)
            return new, loss

        params = jdp.replicate(world, _params())
        for _ in range(_NUM_STEPS):
            params, _ = step(params, batch)
        jdp.check_replicas(params, world=world)
        for key, value in expected.items():
            found = np.asarray(params[key].addressable_data(0))
            np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-6)
        print("TRAINED", name, world.process_index, platform.node(), flush=True)
    if "eager" not in ways:
        return
    eager.init(world)
    total = eager.all_reduce(np.full(1000, world.process_index, np.float32), op="sum")
    count = world.process_count
    np.testing.assert_array_equal(total, np.full(1000, count * (count - 1) / 2))
    eager.shutdown()
    print("TRAINED eager", world.process_index, world.host, flush=True)


def serve_or_push(place: parameter_server.Place) -> None:
    """A parameter server, or a worker of it."""
    if place.role == "server":
        options = parameter_server.ServerOptions(start_timeout_s=60.0)
        mode = parameter_server.sync()
        tx = optax.sgd(_RATE / 100)
        parameter_server.Server(_params(), tx, mode=mode, options=options).serve()
        return
    x, y = _data(_PER_PROCESS)
    grad = jax.jit(jax.value_and_grad(_loss))
    with parameter_server.Worker(_params()) as worker:
        batches = ((x, y) for _ in range(_NUM_STEPS))
        losses = [
            float(loss)
            for loss in worker.steps(lambda p, batch: grad(p, *batch), batches)
        ]
    assert losses[-1] < losses[0], losses
    print("TRAINED parameter server", place.index, platform.node(), flush=True)


if __name__ == "__main__":
    if "JDP_PARAMETER_SERVER_ROLE" in os.environ:
        serve_or_push(parameter_server.Place.from_environ())
    else:
        ways = [way for way in sys.argv[1:] if way != "quick"]
        if "quick" in sys.argv:
            measurement.fit_links = functools.partial(
                measurement.fit_links, sizes=(1 << 10, 1 << 20), rounds=2
            )
        train(ways or WAYS)
