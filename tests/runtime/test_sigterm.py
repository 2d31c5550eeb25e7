import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

import jdp
from jdp.runtime import sigterm
from tests import harness, rarely


def _double(x):
    return 2 * x


def end_children():
    """Forks children that end at SIGTERM, as pools and `terminate` need."""
    jdp.init(timeout_s=60)
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        with context.Pool(2) as pool:
            assert pool.map(_double, range(4)) == [0, 2, 4, 6]
    codes = []
    for wait_s in (0.0, 0.0, 0.3):  # At once, too: before the child has begun.
        child = context.Process(target=time.sleep, args=(600,))
        child.start()
        time.sleep(wait_s)
        child.terminate()
        child.join(30)
        codes.append(child.exitcode)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))  # It is inherited.
    child = context.Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join(30)
    return [*codes, child.exitcode]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_children_that_a_process_forks_end_at_sigterm():
    got = harness.run_processes(end_children, 2, ends_as_usual=True)
    assert got.exit_code == 0, got.output
    assert got.values == [[-signal.SIGTERM] * 3 + [7]] * 2


def send_sigterm(kind):
    """Sends SIGTERM to itself, with or without a handler from before `jdp.init`."""
    heard = []
    if kind == "python":
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    elif kind == "ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    jdp.init(timeout_s=60)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)
    return len(heard), sigterm._address(sigterm._read()) == 1


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "num_heard", "is_ignored"),
    rarely.cases(
        [("python", 1, False), ("ignored", 0, True), ("none", 0, False)],
        often=[("python", 1, False)],
    ),
)
def test_a_handler_from_before_init_stays(kind, num_heard, is_ignored):
    got = harness.run_processes(send_sigterm, 2, kind, ends_as_usual=True)
    assert got.exit_code == 0, got.output
    assert got.values == [(num_heard, is_ignored)] * 2


IN_A_THREAD = """
import ctypes, faulthandler, os, signal, threading
from jdp.runtime import sigterm
faulthandler.register(signal.SIGTERM)  # A handler in C.
libc = ctypes.CDLL(None)
libc.signal.restype = ctypes.c_void_p
def start():
    with sigterm.kept():
        libc.signal(int(signal.SIGTERM), ctypes.c_void_p(1))  # SIG_IGN.
thread = threading.Thread(target=start)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_handler_in_c_stays_also_outside_the_main_thread():
    done = subprocess.run(
        [sys.executable, "-c", IN_A_THREAD],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": harness.python_path()},
    )
    assert "most recent call first" in done.stderr, done.stderr
