"""Fault program: trains, and one process meets a fault at a moment that is given.

jdp launch -n 2 tests/launch/fault_program.py FAULT WHEN PROCESS [join]
"""

import atexit
import faulthandler
import os
import resource
import signal
import sys
import time

FAULT, WHEN = sys.argv[1], sys.argv[2]
PROCESS, IS_JOINED = int(sys.argv[3]), sys.argv[4:] == ["join"]
NUM_STEPS, STEP = 30, 10
FAULTS = ("raise", "exit3", "exit0", "_exit3", "segv", "abrt", "kill", "oom")
MOMENTS = (
    *("import", "before_init", "in_init", "after_init", "compile"),
    *("loader", "step", "end", "atexit"),
)


def meet(when):
    """Comes to a moment; the fault happens if it is the one."""
    if when != WHEN or os.environ["JDP_PROCESS_ID"] != str(PROCESS):
        return
    print("fault", FAULT, "at", when, time.time(), flush=True)
    match FAULT:
        case "raise":
            raise ValueError("boom")
        case "exit3" | "exit0":
            sys.exit(int(FAULT[-1]))
        case "_exit3":
            os._exit(3)
        case "segv":
            faulthandler._sigsegv()
        case "abrt":
            os.abort()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "oom":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
            for _ in range(1000):
                hog.append(bytearray(1 << 28))


hog = []
meet("import")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jdp  # noqa: E402
from jdp.runtime import cluster  # noqa: E402

meet("before_init")
if WHEN == "in_init":
    join = cluster._join

    def join_and_meet(*args):
        meeting = join(*args)
        meet("in_init")
        return meeting

    cluster._join = join_and_meet
world = jdp.init(timeout_s=60)
meet("after_init")


def loss_fn(w, x, weight):
    meet("compile")
    return jnp.sum((x @ w - 1) ** 2 * weight) / weight.sum()


@jdp.data_parallel
def step(w, x, weight):
    loss, grads = jdp.value_and_grad(loss_fn, weight=weight.sum())(w, x, weight)
    return w - 0.01 * grads, {"loss": loss}


def batches():
    for i in range(NUM_STEPS):
        if i == STEP:
            meet("loader")
        yield np.ones((4, 8), np.float32), np.ones(4, np.float32)


w = jdp.replicate(world, jnp.zeros(8))
loader = batches()
if IS_JOINED:
    loader = ((x[0], n) for x, n in jdp.join_batches(batches(), world=world))
for i, (x, weight) in enumerate(loader):
    if i == STEP:
        meet("step")
    w, metrics = step(w, x, weight)
    if i % 5 == 0:
        float(metrics["loss"])
float(metrics["loss"])
meet("end")
if WHEN == "atexit":
    atexit.register(meet, "atexit")
