"""Forked children: they cannot take the place of their parent in its job."""

import json
import os
import signal

import numpy as np
import pytest

import jdp
from jdp.replicas import forked, mesh
from tests import harness

pytestmark = pytest.mark.multiprocess

_LIMIT_S = 60  # for a child that waits for ever.
_NUM_STEPS = 30


@jdp.data_parallel
def _step(params, batch):
    _, grads = jdp.value_and_grad(lambda p, b: (b @ p).mean())(params, batch)
    return params - grads, {}


@jdp.replicated
def _evaluate(params, batch):
    return {"mean": (batch @ params).mean()}


def _call_all(params, batch):
    """Calls all that needs other processes in a child; returns errors by call."""
    world = mesh.current_world()
    calls = {
        "step": lambda: _step(params, batch),
        "evaluation": lambda: _evaluate(params, batch),
        "evaluation over": lambda: _evaluate.over(params, [batch]),
        "replicate": lambda: jdp.replicate(world, np.ones(3)),
        "check_replicas": lambda: jdp.check_replicas(params, world=world),
        "check_same_program": lambda: jdp.check_same_program(
            lambda x: x, batch, world=world
        ),
        "join_batches": lambda: list(jdp.join_batches([batch], world=world)),
        "buffer": lambda: jdp.collectives.create_shared_buffer(world, 1 << 16),
        "store": lambda: world.store.set("child", b"") if world.store else None,
    }
    return {name: harness.error_text(call)[0] for name, call in calls.items()}


def _fork(own):
    """Forks a child in process `own` that calls everything while its parent trains."""
    world = jdp.init(timeout_s=60.0)
    rank = world.process_index
    batch = np.full((2, 3), rank + 1.0, np.float32)
    params = jdp.replicate(world, np.zeros(3, np.float32))
    params, _ = _step(params, batch)
    _evaluate(params, batch)
    params.block_until_ready()
    found, reader, writer, pid = {}, *os.pipe(), 0
    if rank == own:
        pid = os.fork()
        if pid == 0:
            signal.alarm(_LIMIT_S)
            try:
                os.write(writer, json.dumps(_call_all(params, batch * 100)).encode())
            finally:
                os._exit(0)
    os.close(writer)
    values = []
    for _ in range(_NUM_STEPS):
        params, _ = _step(params, batch)
        values.append(float(params[0]))
    with open(reader, "rb") as pipe:
        found = json.loads(pipe.read() or b"{}")
    status = os.waitpid(pid, 0)[1] if pid else 0
    return found, status, values


@pytest.mark.parametrize("own", [0, 1])
def test_a_forked_child_is_refused_and_its_parent_trains_as_before(own):
    for rank, (found, status, values) in enumerate(harness.run_checked(_fork, 2, own)):
        assert values == [-1.5 * (2 + i) for i in range(_NUM_STEPS)]
        assert status == 0
        assert bool(found) == (rank == own)
        for name, text in found.items():
            assert "This process was forked from a process of a job" in text, name


def _fork_alone():
    world = jdp.init(num_processes=1)
    params = jdp.replicate(world, np.zeros(3, np.float32))
    pid = os.fork()
    if pid == 0:
        signal.alarm(_LIMIT_S)
        try:
            forked.check_is_not_child()
            os._exit(7)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), float(params[0])


def test_a_child_of_a_process_alone_is_not_refused():
    assert harness.run_checked(_fork_alone, 1) == [(7, 0.0)]
