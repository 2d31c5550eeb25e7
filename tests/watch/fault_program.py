"""Fault program: trains, and one process hangs at a moment that is given.

jdp launch -n 2 tests/watch/fault_program.py CAUSE MOMENT PROCESS SECONDS
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time

CAUSE, MOMENT = sys.argv[1], sys.argv[2]
PROCESS, LASTS_S = int(sys.argv[3]), float(sys.argv[4])
STEP, NUM_STEPS = 10, 20


def meet(moment):
    """Comes to a moment; the process hangs if it is the one."""
    if moment != MOMENT or os.environ["JDP_PROCESS_ID"] != str(PROCESS):
        return
    print("fault", CAUSE, "at", moment, time.time(), flush=True)
    hang()


def hang():
    match CAUSE:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "loop":
            end_s = time.monotonic() + LASTS_S
            while time.monotonic() < end_s:
                pass
        case "blocked":
            time.sleep(LASTS_S)
        case "network":  # In a network namespace of its own.
            shown = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True)
            for name in re.findall(r"^\d+: (j[^@:]+)", shown.stdout, re.MULTILINE):
                subprocess.run(["ip", "link", "set", name, "down"], check=True)
        case "lock":  # Called with Python's lock held; signals do not end the wait.
            mutex = ctypes.create_string_buffer(64)
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)


meet("start")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jdp  # noqa: E402

world = jdp.init(timeout_s=200)
is_other = world.process_index == PROCESS
reduce = {} if MOMENT == "shared memory" else {"all_reduce": None}


def loss_fn(w, x):
    meet("compile")
    return jnp.mean((x @ w - 1) ** 2)


@jdp.data_parallel
def train(w, x):
    loss, grads = jdp.value_and_grad(loss_fn, **reduce)(w, x)
    return w - 0.01 * grads, {"loss": loss}


def load():
    for i in range(NUM_STEPS):
        if i == STEP:
            meet("join_batches")
        yield np.ones((4, 8), np.float32)


def compile_for_long():
    """Compiles one program until the time is over."""
    begin_s, size = time.monotonic(), 4
    while time.monotonic() - begin_s < LASTS_S:
        size *= 2

        def chain(x, size=size):
            for i in range(size):
                x = jnp.sort(jnp.sin(x) * i)[::-1]
            return x

        jax.jit(chain).lower(jnp.ones(8)).compile()


batches = load()
if MOMENT == "join_batches":
    batches = (batch for batch, _ in jdp.join_batches(load(), world=world))
w = jdp.replicate(world, jnp.zeros(8))
for i, x in enumerate(batches):
    if i == STEP and is_other and CAUSE == "fewer":
        print("fault fewer at", MOMENT, time.time(), flush=True)
        continue
    if i == STEP and is_other and CAUSE == "swallowed":
        print("fault swallowed at", MOMENT, time.time(), flush=True)
        try:
            train(w, np.ones((4, 7), np.float32))
        except TypeError:
            pass
        time.sleep(LASTS_S)
        continue
    if i == STEP and is_other and CAUSE == "compiling":
        print("fault compiling at", MOMENT, time.time(), flush=True)
        compile_for_long()
    if i == STEP and is_other and CAUSE == "exit":
        print("fault exit at", MOMENT, time.time(), flush=True)
        os._exit(0)
    in_step = i == STEP and MOMENT in ("gloo", "shared memory")
    if in_step and CAUSE == "stop":  # While the step is called, or runs.
        threading.Timer(0.001, meet, (MOMENT,)).start()
    w, metrics = train(w, x)
    if in_step:
        meet(MOMENT)  # The next step is without this process.
    if i % 5 == 0:
        float(metrics["loss"])
float(metrics["loss"])
meet("checkpoint")
jdp.check_replicas(w, world=world)
if world.is_main_process:
    np.asarray(w)
print("done", flush=True)
