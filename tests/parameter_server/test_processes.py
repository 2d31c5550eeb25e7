"""Real processes that are killed, stopped and started again, from one command line."""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading

import numpy as np
import optax
import pytest

from jdp import parameter_server
from jdp.launch import launch
from jdp.launch.endings import Exit
from jdp.parameter_server import launching
from tests import harness
from tests.parameter_server import network
from tests.parameter_server.jobs import ThreadJob, wait_for

TIMEOUT_S = 60.0


LAUNCH = [sys.executable, "-m", "jdp.cli.main", "launch"]
SCRIPT = str(harness.ROOT / "tests/parameter_server/job_process.py")


class Job:
    """A job of `job_process.py`, with its files in a folder."""

    def __init__(self, folder):
        self.folder, self.timeout_s = folder, TIMEOUT_S
        self.exit_code = None
        self.log = tempfile.TemporaryFile("w+")
        environ = harness.compile_fast_environ()
        self.environ = {**environ, "PYTHONPATH": harness.python_path()}

    def wait(self, condition):
        wait_for(lambda: condition() or self.exit_code is not None, self.timeout_s)
        assert self.exit_code is None, self.text()

    def signal(self, name, signum):
        path = self.folder / f"{name}.pid"
        self.wait(path.exists)
        pid = int(path.read_text())
        if signum == signal.SIGKILL:
            path.unlink()
        os.kill(pid, signum)

    def num_steps(self, worker):
        path = self.folder / f"worker-{worker}.steps"
        return int(path.read_text()) if path.exists() else 0

    def go_on(self, *workers, steps=15):
        """Waits until these workers have made some more steps."""
        ends = [self.num_steps(w) + steps for w in workers]
        self.wait(
            lambda: all(
                self.num_steps(w) >= end for w, end in zip(workers, ends, strict=True)
            )
        )

    def end(self):
        (self.folder / "stop").touch()
        self.join()
        text = self.text()
        self.log.close()
        paths = self.folder.glob("*.json")
        return {path.stem: json.loads(path.read_text()) for path in paths}, text

    def text(self):
        self.log.seek(0)
        return self.log.read()


class LaunchedJob(Job):
    """Started by `launch_roles`, in a thread."""

    def __init__(self, folder, mode, num_servers, num_workers, *, fd=None, **options):
        super().__init__(folder)
        command = launch.Command(
            kind="script", target=SCRIPT, arguments=(str(folder), mode)
        )
        options = launching.RoleOptions(
            num_servers=num_servers, num_workers=num_workers, grace_s=10.0, **options
        )
        fd = self.log.fileno() if fd is None else fd

        def run():
            self.exit_code = launching.launch_roles(
                command, options, environ=self.environ, stdout_fd=fd, stderr_fd=fd
            )

        self.thread = threading.Thread(target=run, name="launcher")
        self.thread.start()

    def join(self):
        self.thread.join(self.timeout_s)
        assert not self.thread.is_alive(), self.text()


class TwoHostJob(Job):
    """Server 0 and worker 0 on one host, worker 1 on another; with a launcher each."""

    def __init__(self, folder, mode, hosts):
        super().__init__(folder)
        key_file = folder / "keys"
        parameter_server.make_keys(key_file)
        address = f"{network.ADDRESSES[0]}:5555"
        common = ["--all-workers", "2", "--address", address, "--key-file", key_file]
        own = (["--servers", "1", "--workers", "1"], ["--workers", "1", "--first", "1"])
        program = [SCRIPT, folder, mode]
        self.launchers = [
            subprocess.Popen(
                [*hosts.enter(i), *LAUNCH, *common, *own[i], *program],
                env={**os.environ, **self.environ},
                stdout=self.log,
                stderr=self.log,
            )
            for i in range(2)
        ]

    def join(self):
        codes = [launcher.wait(self.timeout_s) for launcher in self.launchers]
        self.exit_code = max(codes, key=abs)


def check_steps(found, workers, *, least_epoch):
    for index in workers:
        steps = found[f"worker-{index}"]["steps"]
        versions = [(epoch, count) for epoch, count, _ in steps]
        assert versions == sorted(versions)
        assert versions[-1][0] >= least_epoch
        # One snapshot of all servers, with each update in it once.
        assert all(values == [-count] for _, count, values in steps)
        counts = found[f"worker-{index}"]["counts"]
        assert sum(counts.values()) == len(steps) and counts["rejected"] == 0


@pytest.mark.multiprocess
def test_a_job_survives_stopped_and_killed_workers_and_a_killed_server(tmp_path):
    job = LaunchedJob(tmp_path, "async", 1, 2)
    try:
        job.go_on(0, 1)
        job.signal("worker-1", signal.SIGSTOP)
        job.wait(lambda: "Worker 1 has been silent for 1 s; it is l" in job.text())
        job.go_on(0)
        job.signal("worker-1", signal.SIGCONT)
        job.go_on(0, 1)
        job.signal("server-0", signal.SIGKILL)
        job.go_on(0, 1)
        job.signal("worker-1", signal.SIGKILL)
        job.go_on(0)
    finally:
        found, text = job.end()
    assert job.exit_code == 0, text
    assert "process 0 was killed by SIGKILL; it is started again" in text
    assert "process 2 was killed by SIGKILL; the others go on" in text
    assert re.search(
        r"Server 0 goes on from .* of update \d+: of \d+ updates, \d", text
    )
    check_steps(found, [0], least_epoch=2)
    assert found["worker-0"]["counts"]["late"] == 0
    assert "worker-1" not in found


@pytest.mark.multiprocess
@pytest.mark.slow
def test_servers_go_back_together_when_one_is_killed_and_rounds_lose_a_worker(
    tmp_path,
):
    job = LaunchedJob(tmp_path, "sync", 2, 2)
    try:
        job.go_on(0, 1)
        job.signal("worker-1", signal.SIGKILL)
        job.go_on(0)
        job.signal("server-1", signal.SIGKILL)
        job.go_on(0)
        # The one that decides for all; the other has what it decided last.
        job.signal("server-0", signal.SIGKILL)
        job.go_on(0)
    finally:
        found, text = job.end()
    assert job.exit_code == 0, text
    assert "Worker 1 has been silent for 1 s; it is left out" in text
    assert "Server 1 started again: all servers return to a checkpoint" in text
    assert "process 0 was killed by SIGKILL; it is started again" in text
    for server in range(2):
        assert text.count(f"Server {server} goes on from the checkpoint of up") == 2
    assert "SIGTERM" not in text
    check_steps(found, [0], least_epoch=3)


@pytest.mark.multiprocess
def test_a_server_writes_a_checkpoint_when_it_is_told_to_end(tmp_path):
    job = LaunchedJob(tmp_path, "async", 1, 1)
    job.go_on(0, steps=3)
    job.signal("server-0", signal.SIGTERM)
    job.wait((tmp_path / "server-0.json").exists)
    job.signal("worker-0", signal.SIGKILL)  # It would wait for a server.
    found, text = job.end()
    assert job.exit_code == 128 + signal.SIGKILL, text
    epoch, count = found["server-0"]["version"].split(".")
    assert epoch == "1" and int(count) >= 3
    assert (tmp_path / "checkpoints/server-0-of-1" / f"updates-{count}").is_dir()


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_launcher_with_a_terminal_draws_the_table_in_place(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    master_fd, slave_fd = os.openpty()
    fcntl.ioctl(slave_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 60, 0, 0))
    job = LaunchedJob(tmp_path, "async", 1, 1, fd=slave_fd, report="table")
    shown = b""
    try:
        os.set_blocking(master_fd, False)

        def reads_a_table_again():
            nonlocal shown
            with contextlib.suppress(BlockingIOError):
                shown += os.read(master_fd, 1 << 16)
            return shown.count(b"updates per second") >= 2

        job.wait(reads_a_table_again)
    finally:
        (tmp_path / "stop").touch()
        while job.thread.is_alive():
            reads_a_table_again()
            job.thread.join(0.02)
    job.log.close()
    os.close(master_fd)
    os.close(slave_fd)
    assert job.exit_code == 0, shown
    # Between two tables, the rows of the first one are erased.
    between = shown.split(b"updates per second")[1]
    assert between.count(b"\x1b[A\x1b[2K") >= 10
    assert b"staleness 0" in shown and b"[0]" not in shown


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.skipif(not network.is_allowed(), reason="no network namespaces here")
def test_a_worker_behind_a_link_that_is_cut_and_mended_comes_back(tmp_path):
    with network.Network() as hosts:
        job = TwoHostJob(tmp_path, "async", hosts)
        try:
            job.go_on(0, 1)
            hosts.cut()
            job.wait(lambda: "Worker 1 has been silent for 1 s; it is l" in job.text())
            before = job.num_steps(1)
            job.go_on(0)
            assert job.num_steps(1) == before
            hosts.mend()
            job.go_on(0, 1)
        finally:
            found, text = job.end()
    assert job.exit_code == 0, text
    check_steps(found, [0, 1], least_epoch=1)
    assert found["worker-1"]["counts"]["late"] == 0


def _fork_a_worker(folder):
    """Uses a worker in a forked child; returns its errors, and what its parent sees."""
    params = {"w": np.zeros(3, np.float32)}
    with ThreadJob(
        pathlib.Path(folder),
        params,
        optax.sgd(1.0),
        mode=parameter_server.asynchronous(),
    ) as job:
        worker = job.worker()
        worker.pull()
        calls = {
            "pull": worker.pull,
            "push": lambda: worker.push({"w": np.full(3, 100, np.float32)}),
            "flush": worker.flush,
            "close": worker.close,
        }
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(TIMEOUT_S))
            try:
                found = {
                    name: harness.error_text(call)[0] for name, call in calls.items()
                }
                os.write(writer, json.dumps(found).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            found = json.loads(pipe.read() or b"{}")
        os.waitpid(pid, 0)
        worker.push({"w": np.ones(3, np.float32)})
        worker.flush()
        value = float(worker.pull()["w"][0])
        worker.close()
    return found, value


def test_a_forked_child_of_a_worker_is_refused_and_the_worker_goes_on(tmp_path):
    ((found, value),) = harness.run_checked(_fork_a_worker, 1, str(tmp_path))
    assert value == -1.0
    assert found.pop("close") == ""
    assert set(found) == {"pull", "push", "flush"}
    for name, text in found.items():
        assert text.startswith("RuntimeError: This process was forked"), name


def test_what_the_end_of_a_process_means():
    policy = launching.RolePolicy(num_servers=2, num_workers=2, restarts=1)
    everybody = [0, 1, 2, 3]
    assert policy.judge(Exit(1, -9), everybody) == "restart"
    assert policy.judge(Exit(1, -9), everybody) == "count"
    assert policy.judge(Exit(0, 1), everybody) == "count"
    assert policy.judge(Exit(3, 1), everybody) == "count"
    assert policy.judge(Exit(3, -9), [0, 1, 2]) == "forgive"
    assert policy.judge(Exit(2, -9), [0, 1]) == "count"
    assert policy.find_superfluous([0, 1, 2]) == []
    assert policy.judge(Exit(2, 0), [0, 1]) == "count"
    assert policy.find_superfluous([0, 1]) == [0, 1]
    assert policy.judge(Exit(0, -15), [1]) == "forgive"
    alone = launching.RolePolicy(num_servers=1, num_workers=0, restarts=0)
    assert alone.find_superfluous([0]) == []


@pytest.mark.parametrize(
    "options,message",
    [
        (
            {"num_servers": 1, "num_workers": 0},
            "`num_workers` must be at least 1, got 1 and 0",
        ),
        ({"num_servers": 0, "num_workers": 0}, "a server or a worker to start"),
        ({"num_servers": 1, "addresses": ("a:1",)}, "`addresses` needs a `key_file`"),
        ({"num_servers": 2, "addresses": ("a:1",), "key_file": "k"}, "must name every"),
        ({"num_servers": 1, "report": "xml"}, '"table" or "json", got \'xml\''),
        ({"num_servers": 1, "restarts": -1}, "`restarts` must be at least 0"),
        (
            {
                "num_servers": 0,
                "first": 2,
                "all_workers": 2,
                "addresses": ("a:1",),
                "key_file": "k",
            },
            "`all_workers` must be at least 3, .* got 2",
        ),
    ],
)
def test_options_of_a_launch_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        launching.RoleOptions(**{"num_workers": 1, **options})


def test_places_of_several_hosts_are_counted_on():
    addresses = ("a:1", "b:1")
    servers = launching.RoleOptions(
        num_servers=1, num_workers=2, addresses=addresses, key_file="k", first=1
    ).find_places(addresses, "k")
    assert [(p.role, p.index) for p in servers] == [
        ("server", 1),
        ("worker", 0),
        ("worker", 1),
    ]
    workers = launching.RoleOptions(
        num_servers=0,
        num_workers=2,
        addresses=addresses,
        key_file="k",
        first=2,
        all_workers=4,
    ).find_places(addresses, "k")
    assert [(p.role, p.index, p.num_workers) for p in workers] == [
        ("worker", 2, 4),
        ("worker", 3, 4),
    ]
    unknown = launching.RoleOptions(
        num_servers=0, num_workers=1, addresses=addresses, key_file="k", first=2
    ).find_places(addresses, "k")
    assert [(p.index, p.num_workers) for p in unknown] == [(2, None)]
