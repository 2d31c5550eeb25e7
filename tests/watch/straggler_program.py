"""Straggler program: trains, and one process is slower than the others.

jdp launch -n 2 tests/watch/straggler_program.py KIND FACTOR PROCESS STEPS

KIND is "gloo", "shared memory", "loader" (through `jdp.join_batches`) or "ahead" (the
loop reads no result, and comes to steps before the ones before have ended); FACTOR
multiplies the work of one process from step 40 on.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import jdp

KIND, FACTOR = sys.argv[1], float(sys.argv[2])
PROCESS, NUM_STEPS = int(sys.argv[3]), int(sys.argv[4])
ONSET, WORK_S = 40, 0.05

world = jdp.init(timeout_s=100)
all_reduce = {"all_reduce": None} if KIND == "gloo" else {}


def work(x):
    """Takes its time within the program, on the host."""
    time.sleep(float(x))
    return np.float32(1.0)


def loss_fn(w, x, work_s):
    if KIND == "shared memory":
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        x = x * jax.pure_callback(work, shape, work_s[0])
    return jnp.mean((x @ w - 1) ** 2)


@jdp.data_parallel
def train(w, x, work_s):
    loss, grads = jdp.value_and_grad(loss_fn, **all_reduce)(w, x, work_s)
    return w - 0.01 * grads, {"loss": loss}


def load():
    for i in range(NUM_STEPS):
        work_s = WORK_S
        if i >= ONSET and world.process_index == PROCESS:
            work_s *= FACTOR
        if KIND != "shared memory":
            time.sleep(work_s)
        yield np.ones((4, 8), np.float32), np.full(4, work_s, np.float32)


batches = load()
if KIND == "loader":
    batches = (batch for batch, _ in jdp.join_batches(load(), world=world))
w = jdp.replicate(world, jnp.zeros(8))
for i, (x, work_s) in enumerate(batches):
    w, metrics = train(w, x, work_s)
    if KIND != "ahead":
        float(metrics["loss"])
    if world.is_main_process:
        print("at step", i + 1, flush=True)
report = jdp.watch.report()
if report is not None and world.is_main_process:
    for row in report.processes:
        print("row", row.process, row.step, row.last_100, row.slow_since, flush=True)
print("done", flush=True)
