"""Tests that functions on the host outlive the steps that call them."""

import gc
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jdp.compat import host_collectives
from jdp.compat.host_collectives import HostCollective
from tests import harness


def _slow(x):
    """A program that is still under way when its call has returned."""

    def add(results, operands):
        time.sleep(0.3)
        results[0][...] = operands[0] + 1

    collective = HostCollective(add, lambda x: [x + 1])

    def body(x):
        work = jnp.sin(jnp.full((100, 100), x[0]))
        given = x + 0 * (work @ work @ work)[0, 0]
        token = jnp.zeros(1, jnp.uint32)
        aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
        for _ in range(3):
            token, (given,) = host_collectives.run_on_host(
                collective, token, [given], [aval], []
            )
        return given

    return jax.jit(body)(x)


def test_a_program_that_is_dropped_while_it_runs_ends():
    x = np.arange(3, dtype=np.float32)
    for _ in range(2):
        found = _slow(x)
        jax.clear_caches()
        gc.collect()
        np.testing.assert_array_equal(found, x + 3)


_KEEPS_A_FUNCTION = """
from jdp.compat import host_functions


class DroppedWithTheModules:
    kept = host_functions._Kept(None)

    def __del__(self, module=host_functions):
        module.time = None  # As Python does.
        del type(self).kept


dropped_late = DroppedWithTheModules()
"""


def test_a_function_that_outlives_the_modules_is_dropped_in_silence_when_python_ends():
    ended = subprocess.run(
        [sys.executable, "-c", _KEEPS_A_FUNCTION],
        env={**os.environ, "PYTHONPATH": harness.python_path()},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
