import contextlib
import multiprocessing
import os
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp import eager
from jdp.runtime import coordination, forks
from tests import harness


def _fail(code):
    sys.exit(code)


def _fork(end):
    """Forks a child that ends in the way of `end`, and returns its exit code."""
    pid = os.fork()
    if pid == 0:
        if isinstance(end, int):
            sys.exit(end)
        raise end
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def train_beside_children():
    """Trains; one process forks children that end, before and after `jdp.init`."""
    is_forking = os.environ["JDP_PROCESS_ID"] == "1"
    codes = [_fork(0), _fork(3)] if is_forking else []
    world = jdp.init(timeout_s=60)
    eager.init(world)

    @jdp.data_parallel
    def step(w, x):
        loss, grads = jdp.value_and_grad(lambda w, x: jnp.mean((x @ w - 1) ** 2))(w, x)
        return w - 0.1 * grads, {"loss": loss}

    w = jnp.zeros(4)
    batches = [np.ones((2, 4), np.float32)] * 4
    for batch, _ in jdp.join_batches(batches, world=world):
        w, _ = step(w, batch)
        if is_forking and len(codes) == 2:
            np.asarray(w)
            codes += [_fork(end) for end in (0, 3, ValueError("of a child"))]
            for method in ("fork", "spawn"):
                child = multiprocessing.get_context(method).Process(
                    target=_fail, args=(4,)
                )
                child.start()
                child.join()
                codes.append(child.exitcode)
            time.sleep(0.5)  # The others would hear of an end.
    return codes


@pytest.mark.multiprocess
def test_children_that_a_process_forks_do_not_speak_for_it():
    got = harness.run_processes(train_beside_children, 2, ends_as_usual=True)
    assert got.exit_code == 0, got.output
    assert got.values[1] == [0, 3, 0, 3, 1, 4, 4]
    assert "ValueError: of a child" in got.output
    assert "jdp:" not in got.output


@pytest.mark.filterwarnings("ignore:os.fork")
def test_the_folder_of_the_coordination_is_of_its_maker():
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(coordination.make_path(is_one_launch=True))
        if (pid := os.fork()) == 0:
            try:
                stack.close()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert os.path.isdir(os.path.dirname(path))
    assert not os.path.exists(os.path.dirname(path))


@pytest.mark.filterwarnings("ignore:os.fork")
def test_what_is_of_one_process_does_nothing_in_its_children():
    read_fd, write_fd = os.pipe()
    write = forks.only_here(os.write)
    if (pid := os.fork()) == 0:
        try:
            write(write_fd, b"child")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    write(write_fd, b"own")
    os.close(write_fd)
    assert os.read(read_fd, 99) == b"own"
    os.close(read_fd)
