"""Is the status of a job what its processes do, wherever it is asked for?"""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import msgspec
import numpy as np
import pytest
import rich.console

import jdp
from jdp.cli import status as status_command
from jdp.launch import launch, prometheus
from jdp.watch import status
from jdp.watch.status import JobStatus, ProcessStatus
from jdp.watch.stragglers import StepShares
from tests import harness
from tests.watch import straggler_jobs

ROW = ProcessStatus(
    process=1,
    host="a",
    place="loader",
    place_s=3.2,
    state="well",
    step=1234,
    recent=StepShares(0.05, 0.02, 0.01, 0.005, 0.015),
    last_100=StepShares(0.1, 0.04, 0.03, 0.01, 0.02),
    slow_since=77,
)
OTHER = msgspec.structs.replace(ROW, process=0, slow_since=0, state="stopped")
STATUS = JobStatus(at_s=1e9, pid=os.getpid(), processes=(OTHER, ROW))
ENVIRON = {"JAX_PLATFORMS": "cpu"}


def show(found):
    console = rich.console.Console(width=150, record=True, file=io.StringIO())
    console.print(status_command.make_table(found))
    return console.export_text()


def test_what_is_written_is_read(tmp_path):
    status.write(str(tmp_path), STATUS)
    assert status.read(tmp_path) == STATUS
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    assert (tmp_path / "status.json").stat().st_mode & 0o077 == 0


def test_jobs_that_have_ended_and_other_files_are_not_found(tmp_path):
    with subprocess.Popen(["true"]) as ended:
        pass
    for name, text in {
        "live": msgspec.json.encode(STATUS),
        "ended": msgspec.json.encode(msgspec.structs.replace(STATUS, pid=ended.pid)),
        "garbage": b"\xff{",
        "other": b'{"at_s": 1}',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_bytes(text)
    (tmp_path / "empty").mkdir()
    assert status.find_all(map(str, tmp_path.iterdir())) == [STATUS]


def test_no_folder_and_a_full_disk_change_nothing(tmp_path):
    status.write(str(tmp_path / "none"), STATUS)
    status.write("", STATUS)


def test_the_table_has_shares_places_and_who_is_slow():
    lines = show(STATUS).splitlines()
    (late,) = [line for line in lines if "1,234" in line and "slower" in line]
    for cell in ("loader for 3 s", "50", "40%", "30%", "10%", "20%", "since step 77"):
        assert cell in late
    assert any("stopped, loader for 3 s" in line for line in lines)
    assert "s ago" in lines[0]


def test_the_table_names_hosts_where_there_are_several_and_shows_alarms():
    assert "host" not in show(STATUS)
    two = msgspec.structs.replace(ROW, host="b")
    alarm = "process 1 [x] has been stopped at train.py:[3]"
    text = show(
        msgspec.structs.replace(STATUS, processes=(OTHER, two), alarms=(alarm,))
    )
    assert "host" in text and alarm in text


def test_without_a_job_the_command_says_so():
    command = [sys.executable, "-m", "jdp.cli.main", "status", "--once", "999999999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("The process 999999999 has no job that runs here")


def report_of_own_job():
    """Trains until the status has all processes; returns it."""
    world = jdp.init(timeout_s=60)
    step = jdp.data_parallel(lambda w, x: (w, {"x": jdp.average(x.mean())}))
    w, x = jdp.replicate(world, 1.0), np.ones((4, 2), np.float32)
    for _ in range(150):
        w, metrics = step(w, x)
        float(metrics["x"])
        time.sleep(0.02)
    found = jdp.watch.report()
    jdp.shutdown()
    return found and msgspec.to_builtins(found)


def test_a_program_gets_the_status_of_its_job():
    for found in harness.run_checked(report_of_own_job, 2):
        assert [row["process"] for row in found["processes"]] == [0, 1]
        for row in found["processes"]:
            assert row["step"] > 20
            total_s, *parts = row["last_100"]
            assert total_s == pytest.approx(sum(parts))
            assert 0.02 < total_s < 0.2


def test_a_program_alone_has_no_status():
    code = "import jdp; jdp.init(); assert jdp.watch.report() is None"
    environ = os.environ | ENVIRON | {"PYTHONPATH": harness.python_path()}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environ)


def _free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_a_running_job_is_shown_by_the_command_and_to_prometheus():
    port = _free_port()
    command = [sys.executable, "-m", "jdp.cli.main", "launch", "-n", "2"]
    command += ["--prometheus-port", str(port), str(straggler_jobs.PROGRAM)]
    environ = os.environ | ENVIRON | {"PYTHONPATH": harness.python_path()}
    with subprocess.Popen(
        [*command, "gloo", "1.0", "1", "100000"],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            for line in job.stdout:
                if "at step 60" in line:
                    break
            time.sleep(1.5)  # The status is a second old at most.
            lines = _ask("status", "--json", "--once", str(job.pid))
            (found,) = map(json.loads, lines.splitlines())
            assert found["pid"] == job.pid
            assert min(row["step"] for row in found["processes"]) >= 60
            assert all(row["recent"][0] > 0.04 for row in found["processes"])
            table = _ask("status", "--once", str(job.pid))
            assert f"job {job.pid}" in table and "computes" in table
            url = f"http://127.0.0.1:{port}/metrics"
            text = urllib.request.urlopen(url, timeout=10).read().decode()
        finally:
            job.send_signal(signal.SIGTERM)
            job.stdout.read()
    for process in (0, 1):
        labels = rf'\{{host="[^"]+",process="{process}"\}}'
        steps = re.search(rf"^jdp_steps_total{labels} ([\d.]+)$", text, re.M)
        assert float(steps[1]) >= 60
        seconds = re.search(rf"^jdp_step_seconds{labels} ([\d.e-]+)$", text, re.M)
        assert 0.04 < float(seconds[1]) < 1.0
        assert re.search(rf"^jdp_is_straggler{labels} 0.0$", text, re.M)
    assert 'state="well"' in text


def _ask(*words):
    command = [sys.executable, "-m", "jdp.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_endpoint_is_on_loopback_alone():
    port = _free_port()
    exporter = prometheus.Exporter(port)
    try:
        assert exporter._server.server_address == ("127.0.0.1", port)
        with pytest.raises(OSError, match=f"port {port} of `prometheus_port` is not"):
            prometheus.Exporter(port)
        exporter.found = STATUS
        url = f"http://127.0.0.1:{port}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
    finally:
        exporter.close()
    assert 'jdp_is_straggler{host="a",process="1"} 1.0' in text
    assert 'jdp_loading_seconds{host="a",process="1"} 0.015' in text


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_out_of_range_is_refused(port):
    with pytest.raises(ValueError, match="`prometheus_port` must be from 1 to 65535"):
        launch.LaunchOptions(num_processes=2, prometheus_port=port)


def test_without_the_library_the_port_is_refused(monkeypatch):
    monkeypatch.setattr(prometheus.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=re.escape("pip install 'jdp[prometheus]'")):
        launch.LaunchOptions(num_processes=2, prometheus_port=9400)
    launch.LaunchOptions(num_processes=2)
