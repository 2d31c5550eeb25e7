"""Is a process that hangs named in a job that no launcher has started?"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import jdp
from jdp.launch import ports
from jdp.watch import job_watch
from tests import harness

PROGRAM = """
import os, sys, time
import jax.numpy as jnp, numpy as np
import jdp
from jdp.launch import ports
from jdp.watch import job_watch
job_watch._LIMITS_TO_END = 2.0
process, address, on_stall = int(sys.argv[1]), sys.argv[2], sys.argv[3]
cause, number, lasts_s = sys.argv[4], int(sys.argv[5]), float(sys.argv[6])
world = jdp.init(coordinator_address=address, num_processes=2, process_id=process,
                 timeout_s=100, stall_s=1.0, on_stall=on_stall)

@jdp.data_parallel
def train(w, x):
    loss, grads = jdp.value_and_grad(lambda w, x: jnp.mean((x @ w - 1) ** 2))(w, x)
    return w - 0.01 * grads, {"loss": loss}

def wait_for_a_file():
    time.sleep(lasts_s)

w = jdp.replicate(world, jnp.zeros(8))
for i in range(60):
    if i == 30 and process == number:
        print("fault", os.getpid(), flush=True)
        if cause == "blocked":
            wait_for_a_file()
        elif cause == "stopped":
            os.kill(os.getpid(), 19)
        elif cause == "slow":
            pass
    w, metrics = train(w, np.ones((4, 8), np.float32))
    float(metrics["loss"])
    time.sleep(0.03)
report = jdp.watch.report()
print("report", [(r.process, r.step) for r in report.processes], flush=True)
print("done", flush=True)
"""


class Job:
    """Two processes, and what they have printed."""

    def __init__(self, tmp_path, port, cause, number, *, on_stall="log", lasts_s=9.0):
        path = tmp_path / "train.py"
        path.write_text(PROGRAM)
        address = f"127.0.0.1:{port}"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("JDP_")}
        environ |= {"PYTHONPATH": harness.python_path(), "JAX_PLATFORMS": "cpu"}
        environ["TMPDIR"] = str(tmp_path)
        words = [address, on_stall, cause, str(number), str(lasts_s)]
        self.processes = []
        for i in range(2):
            with (tmp_path / f"log{i}").open("w") as log:
                job = subprocess.Popen(
                    [sys.executable, "-u", str(path), str(i), *words],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(job)
        self._tmp_path = tmp_path

    def text(self, process):
        return (self._tmp_path / f"log{process}").read_text()

    def wait_for(self, process, pattern, timeout_s=60.0):
        deadline_s = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.text(process), re.M)):
            assert time.monotonic() < deadline_s, (self.text(0), self.text(1))
            time.sleep(0.1)
        return found

    def end(self):
        return [process.wait(timeout=90) for process in self.processes]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path):
    jobs = []
    with ports.held("127.0.0.1") as port:

        def make(*args, **kwargs):
            jobs.append(Job(tmp_path, port, *args, **kwargs))
            return jobs[-1]

        yield make
        for job in jobs:
            job.kill()


def test_a_process_that_blocks_is_named_by_all_and_goes_on(start, tmp_path):
    job = start("blocked", 1)
    pattern = (
        r"^jdp: process 1 has been in Python between steps for \d+ s \(sleeping or "
        r"blocked\), after step 30; process 0 has waited \d+ s for it, in the program "
        r"of step 31 \(`train`\)\. Its main thread is at .*train\.py:\d+ in "
        r"`wait_for_a_file`\.$"
    )
    for process in (0, 1):
        job.wait_for(process, pattern)
    path = job.wait_for(0, r"last steps of all processes are in (\S+)\.$")[1]
    job.wait_for(0, r"^jdp: process 1 goes on")
    assert job.end() == [0, 0]
    with open(path) as file:
        text = file.read()
    for process in (0, 1):
        assert f"# Python stacks of process {process}" in text
        assert re.search(rf"^ +-?\d+\.\d+ +{process} step begun 30 train$", text, re.M)
    assert "wait_for_a_file" in text
    for process in (0, 1):
        assert re.search(
            r"^report \[\(0, \d+\), \(1, \d+\)\]$", job.text(process), re.M
        )


@pytest.mark.slow
def test_with_raise_the_job_ends_with_a_code_of_its_own(start):
    job = start("blocked", 0, on_stall="raise", lasts_s=300.0)
    job.wait_for(1, r"^jdp: process 0 has been in Python between steps")
    assert job.end() == [job_watch.STALLED_CODE] * 2
    for process in (0, 1):
        assert re.search(
            r"^jdp: process 0 has been in Python .*; the others have waited \d+ s for "
            r"it\. The job ends\.$",
            job.text(process),
            re.M,
        )


@pytest.mark.slow
def test_a_process_that_is_stopped_is_named_as_silent(start):
    job = start("stopped", 1)
    job.wait_for(
        0,
        r"^jdp: process 1 has not been heard for \d+ s \(its host or the network "
        r"failed, or it is stopped or in C code that holds Python's lock\)",
    )
    job.processes[1].send_signal(signal.SIGCONT)
    assert job.end() == [0, 0]


@pytest.mark.slow
def test_process_0_is_named_by_the_others_when_it_is_silent(start):
    job = start("stopped", 0)
    job.wait_for(1, r"^jdp: process 0, which watches this job, has not been heard for")
    job.processes[0].send_signal(signal.SIGCONT)
    assert job.end() == [0, 0]


@pytest.mark.slow
def test_the_status_of_such_a_job_is_found_and_gone_at_its_end(start, tmp_path):
    job = start("blocked", 1, lasts_s=9.0)
    job.wait_for(1, "^fault")
    pid = job.processes[0].pid

    def ask():
        command = [sys.executable, "-m", "jdp.cli.main", "status", "--json", "--once"]
        return subprocess.run(
            [*command, str(pid)], capture_output=True, text=True, timeout=60
        )

    time.sleep(2.0)  # The status is up to a second old, and so are reports in it.
    rows = json.loads(ask().stdout)["processes"]
    assert [row["process"] for row in rows] == [0, 1]
    assert job.end() == [0, 0]
    assert ask().returncode == 1


@pytest.mark.slow
def test_nothing_is_said_of_a_job_without_a_fault(start):
    job = start("none", 1)
    assert job.end() == [0, 0]
    for process in (0, 1):
        assert "jdp:" not in job.text(process), job.text(process)


@pytest.mark.parametrize(
    ("name", "value"),
    [("stall_s", -1.0), ("on_stall", "stop"), ("stall_s", float("inf"))],
)
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        jdp.init(**{name: value})
