"""Does the launcher name a process that hangs, and what do processes record?"""

import os
import re
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jdp
from jdp.launch import launch, watching
from jdp.replicas import stamps
from jdp.watch import job_watch, recording
from jdp.watch.job_watch import JobWatch, Outlets, WatchOptions
from jdp.watch.local_processes import LocalProcesses
from jdp.watch.process_report import Awaited, ProcessReport
from jdp.watch.record import RecordReader
from jdp.watch.rules import Stall
from tests import harness, two_hosts
from tests.launch import test_launcher_link
from tests.watch import fault_table


def record_a_run():
    """Trains a little; returns the entries of the record of this process."""
    world = jdp.init(timeout_s=60)

    @jdp.data_parallel
    def train(w, x):
        loss, grads = jdp.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)
        return w - 0.1 * grads, {"loss": loss}

    w = jdp.replicate(world, jnp.ones(3))
    shard = world.shard(np.ones((16, 3), np.float32), shuffle=False)
    for batch, _ in jdp.join_batches(shard.batches(8), world=world):
        w, metrics = train(w, batch)
    for batch in shard.batches(8):
        w, metrics = train(w, batch)
    float(metrics["loss"])
    with pytest.raises(TypeError):
        train(w, np.ones((4, 2), np.float32))
    jdp.check_replicas(w, world=world)
    writer = recording._Recording.writer
    assert writer is not None
    entries = RecordReader(writer._memory).read_all()
    return [tuple(entry)[1:] for entry in entries], os.environ.get("JDP_RECORD")


def test_a_process_records_its_steps_meetings_loaders_and_compilations():
    for entries, variable in harness.run_checked(record_a_run, 2):
        assert variable is None  # Children must not write into the record.
        kinds = [entry[0] for entry in entries]
        assert kinds[0] == stamps.INIT_BEGUN
        assert kinds.count(stamps.INIT_ENDED) == 1
        begun = [entry[1:] for entry in entries if entry[0] == stamps.STEP_BEGUN]
        assert begun == [(number, "train") for number in (1, 2, 3, 4, 5)]
        done = [entry[1] for entry in entries if entry[0] == stamps.STEP_DISPATCHED]
        assert done == [1, 2, 3, 4]
        assert (stamps.STEP_FAILED, 5, "train") in entries
        assert kinds.count(stamps.STEP_PLACED) >= 4
        assert stamps.COMPILE_BEGUN in kinds and stamps.COMPILE_ENDED in kinds
        assert kinds.count(stamps.LOAD_BEGUN) == 2  # The others are of a thread.
        assert kinds.count(stamps.READ_BEGUN) == 3  # The third finds the end.
        topics = [entry[2] for entry in entries if entry[0] == stamps.MEETING_BEGUN]
        assert "comparison of replicas" in topics
        assert "first call of the step `train`" in topics
        # In the first call, the processes meet while it is traced.
        first = kinds.index(stamps.TRACE_BEGUN)
        assert stamps.MEETING_BEGUN in kinds[first : kinds.index(stamps.TRACE_ENDED)]


@pytest.mark.slow
def test_a_process_that_blocks_is_named_and_the_job_ends_with_a_code_of_its_own():
    found = fault_table.check("blocked", "gloo", stall_s=1.0, on_stall="raise")
    assert found.wrong is None, found
    assert re.search(r"fault_program\.py:\d+ in ", found.alarm)


def test_the_file_about_a_stall_has_all_stacks_and_all_records(tmp_path):
    command = [sys.executable, "-m", "jdp.cli.main", "launch", "-n", "2"]
    command += ["--stall-s", "1.5", "--grace-s", "1", "--log-dir", str(tmp_path)]
    command += [str(fault_table.PROGRAM), "stop", "checkpoint", "1", "60"]
    environ = os.environ | {"PYTHONPATH": harness.python_path()}
    with subprocess.Popen(
        command,
        cwd=harness.ROOT,
        env=environ | {"JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        lines = []
        for line in job.stderr:
            lines.append(line.strip())
            if "fault_program.py" not in line and "are in /" in line:
                job.terminate()
    assert job.returncode == 128 + signal.SIGTERM, lines
    (alarm,) = [line for line in lines if "process 1 has been stopped" in line]
    (path,) = tmp_path.glob("jdp_stall_*.txt")
    text = path.read_text()
    assert alarm.removeprefix("jdp launch: ") in text
    stacks = text.split("# Python stacks of process ")
    assert "fault_program.py" in stacks[1]
    assert "None: it is stopped" in stacks[2]
    for process in (0, 1):
        assert re.search(rf"^ +-?\d+\.\d+ +{process} step begun 20 train$", text, re.M)
        log = (tmp_path / f"process_{process}.log").read_text()
        assert alarm in log


@pytest.mark.slow
@pytest.mark.parametrize("moment", fault_table.MOMENTS)
@pytest.mark.parametrize("cause", fault_table.CAUSES)
def test_every_cause_is_named_at_every_moment(cause, moment):
    found = fault_table.check(cause, moment)
    assert found.wrong is None, found


@pytest.mark.slow
@pytest.mark.parametrize(("cause", "moment"), fault_table.OTHERS)
def test_causes_with_one_moment_are_named(cause, moment):
    lasts_s = 20.0 if cause == "compiling" else 60.0
    found = fault_table.check(cause, moment, lasts_s=lasts_s)
    assert found.wrong is None, found


def test_a_job_of_one_process_has_no_watch():
    watch = watching.Watch(WatchOptions(), num_processes=1, show=print)
    assert watch.environ(0) == {}
    watch.add(0, os.getpid())
    assert watch.look() is None
    watch.close()


def test_a_process_that_the_kernel_killed_for_memory_is_told(monkeypatch):
    shown = []
    counts = iter([3, 3, 4])
    monkeypatch.setattr(watching.machine, "count_oom_kills", lambda _: next(counts))
    watch = watching.Watch(WatchOptions(), num_processes=2, show=shown.append)
    watch.note_end(0, -signal.SIGKILL)  # For another reason.
    assert shown == []
    watch.note_end(1, -signal.SIGKILL)
    assert shown[0].startswith("process 1 was killed by SIGKILL when this host ran out")


def _stall(place="program", waited_s=301.0, process=1):
    late = ProcessReport(1, 0, "python", 400.0)
    waiting = ProcessReport(0, 0, place, 400.0, wait=Awaited("step", 1, "x", waited_s))
    return Stall(process, waited_s, late, (waiting,))


@pytest.mark.parametrize(
    ("on_stall", "stall", "ends"),
    [
        ("raise", _stall(), True),
        ("raise", _stall(waited_s=299.0), False),
        ("raise", _stall("init"), False),  # `timeout_s` of `jdp.init` ends that.
        ("raise", _stall(process=-1), False),  # No process is to blame.
        ("log", _stall(), False),
    ],
)
def test_a_stall_ends_the_job_when_it_has_lasted(on_stall, stall, ends):
    options = WatchOptions(on_stall=on_stall)
    watch = JobWatch(options, LocalProcesses(0), Outlets(print), num_processes=2)
    end = watch._find_end((stall,))
    if not ends:
        assert end is None
        return
    assert end.process == 1
    assert end.note.startswith("process 1 has been in Python between steps for 400 s")
    assert end.note.endswith("; the others have waited 301 s for it")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("stall_s", -1.0, "`stall_s` must be a number of seconds, 0 or more, got -1.0"),
        ("stall_s", float("nan"), "`stall_s` must be a number of seconds"),
        ("on_stall", "stop", "`on_stall` must be 'log' or 'raise', got 'stop'"),
    ],
)
def test_options_out_of_range_are_refused(field, value, text):
    with pytest.raises(ValueError, match=text):
        launch.LaunchOptions(num_processes=2, **{field: value})


@pytest.mark.slow
def test_a_process_of_another_host_is_named_on_all(tmp_path):
    address = f"127.0.0.1:{test_launcher_link.find_port()}"
    jobs = []
    for node in range(2):
        command = [sys.executable, "-m", "jdp.cli.main", "launch", "-n", "1"]
        command += ["--nodes", "2", "--node-rank", str(node), "--grace-s", "1"]
        command += ["--coordinator", address, "--stall-s", "1.2"]
        command += ["--log-dir", str(tmp_path / f"logs{node}")]
        command += [str(fault_table.PROGRAM), "blocked", "checkpoint", "1", "90"]
        environ = os.environ | {"PYTHONPATH": harness.python_path()}
        environ["JDP_JOB_KEY"] = "ab" * 32
        job = subprocess.Popen(
            command,
            cwd=harness.ROOT,
            env=environ | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        jobs.append(job)
    outputs = [job.communicate(timeout=250)[0] for job in jobs]
    for node, (job, text) in enumerate(zip(jobs, outputs, strict=True)):
        assert job.returncode == job_watch.STALLED_CODE, outputs
        alarms = [line for line in text.splitlines() if "has waited" in line]
        alarm = alarms[-1]
        assert re.search(r"process 1 on host 1 \(.+\) has been in Python", alarm)
        assert "process 0 has waited" in alarm
        *_, path = sorted((tmp_path / f"logs{node}").glob("jdp_stall_*.txt"))
        # Each host has the stacks of its own processes, and the first host has all.
        found = path.read_text()
        for process in {node, 1}:
            assert f"# Python stacks of process {process}" in found
            pattern = rf"^ +-?\d+\.\d+ +{process} step begun 20 train$"
            assert re.search(pattern, found, re.M)
            if process == 1:
                assert "fault_program.py" in found.partition("stacks of process 1")[2]


def test_the_launcher_needs_no_jax_to_watch():
    code = "import sys, jdp.launch.launch; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_a_host_whose_network_is_dead_is_named(tmp_path):
    if why := two_hosts.why_not():
        pytest.skip(why)
    with two_hosts.make("names") as hosts:
        arguments = ["-n", "1", "--grace-s", "1", "--stall-s", "5"]
        arguments += ["--log-dir", str(tmp_path)]
        arguments += [str(fault_table.PROGRAM), "network", "gloo", "1", "60"]
        environ = {"JDP_JOB_KEY": "ab" * 32, "JAX_PLATFORMS": "cpu"}
        first, second = hosts.launch(arguments, environ=environ, timeout_s=200.0)
    assert "fault network at gloo" in second.output
    expected = (
        rf"jdp launch: process 1 on host 1 \({two_hosts.NAMES[1]}\) has not been heard "
        r"for \d+ s \(its host or the network failed"
    )
    assert re.search(expected, first.output), first.output
    # The link of the launchers breaks a little later, and both hosts end.
    assert 0 not in (first.exit_code, second.exit_code)
