"""Where JAX's coordination service listens."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

import jdp
from jdp.launch import guard
from jdp.runtime import (
    addresses,
    coordination,
    environment,
    private_folder,
    roll_call,
)
from tests import harness, rarely


def test_the_path_is_of_this_user_alone_and_goes():
    with coordination.make_path(is_one_launch=True) as path:
        folder = pathlib.Path(path).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        coordination._check_path(path)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
    assert not folder.exists()
    with coordination.make_path(is_one_launch=False) as path:
        assert path == ""


def test_where_no_folder_can_be_made_the_log_says_what_follows(monkeypatch, caplog):
    monkeypatch.setattr(private_folder, "_find_parents", lambda: ["/no/such/folder"])
    with coordination.make_path(is_one_launch=True) as path:
        assert path == ""
    assert "/no/such/folder" in caplog.text
    assert "other accounts of this host can end the job" in caplog.text


@pytest.mark.parametrize("kind", ["open", "link", "none", "name", "relative", "other"])
def test_a_path_that_is_not_of_this_user_alone_is_refused(kind, tmp_path):
    folder = tmp_path / "jdp-abc"
    folder.mkdir(mode=0o700)
    path = f"{folder}/coordination"
    coordination._check_path(path)
    if kind == "open":
        folder.chmod(0o755)
    elif kind == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "none":
        folder.rmdir()
    elif kind == "other":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 12345, 12345)
    else:
        path = f"{folder}/x" if kind == "name" else "jdp-abc/coordination"
    with pytest.raises(RuntimeError, match="It is not in a folder of this user alone"):
        coordination._check_path(path)


@pytest.mark.parametrize(
    "process_id,bind_host,expected",
    [
        (0, "10.0.0.1", "10.0.0.1:5"),
        (0, "fd00::1", "[fd00::1]:5"),
        (0, "", None),
        (0, "fe80::1%eth0", None),
        (1, "10.0.0.1", None),
    ],
)
def test_a_port_is_bound_where_the_processes_came(
    process_id, bind_host, expected, caplog
):
    meeting = roll_call.Meeting(["a"], "10.0.0.1", "10.0.0.1", bind_host, b"")
    assert coordination._bind_address(process_id, meeting, 5) == expected
    is_told = process_id == 0 and expected is None
    assert ("listens on all interfaces" in caplog.text) == is_told


@pytest.fixture
def short_path(monkeypatch):
    """A TMPDIR whose path is short enough for sockets; `tmp_path` may not be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield pathlib.Path(folder)


def _find_who_listens():
    world = jdp.init()
    place = environment.LaunchEnvironment.from_environ(os.environ)
    world.store.set(f"here/{world.process_index}", b"")
    world.store.get(f"here/{1 - world.process_index}", timeout_s=60.0)
    try:
        socket.create_connection(addresses.split(place.coordinator_address), 5.0)
    except ConnectionRefusedError:
        return "nobody"
    return "JAX"


@pytest.mark.multiprocess
def test_nothing_listens_at_the_port_of_a_job_of_one_launcher(short_path):
    assert harness.run_checked(_find_who_listens, 2) == ["nobody"] * 2
    assert not list(short_path.glob("jdp-*"))


# --- The folder goes in every ending -------------------------------------------------


def _meet_nobody(how):
    """Process 0 waits in the roll call; process 1 ends it otherwise."""
    folder = pathlib.Path(os.environ[environment.LAUNCH_FOLDER])
    if os.environ[environment.PROCESS_ID] == "0":
        (folder.parent / "pid").write_text(str(os.getpid()))
        jdp.init(timeout_s=60.0)
    pid = folder.parent / "pid"
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.01)
    (folder / coordination._NAME).touch()
    match how:
        case "kill":
            os.kill(int(pid.read_text()), signal.SIGKILL)
            time.sleep(60.0)
        case "exit":
            sys.exit(3)
        case "raise":
            raise ValueError("no")
        case "launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60.0)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "how", rarely.cases(["kill", "exit", "raise"], often=("kill",))
)
def test_a_job_that_ends_in_the_roll_call_leaves_no_folder(how, short_path):
    outcome = harness.run_processes(_meet_nobody, 2, how)
    expected = {"kill": 137, "exit": 3, "raise": 1}[how]
    assert outcome.exit_code == expected, outcome.output
    assert not list(short_path.glob("jdp-*"))


@pytest.mark.multiprocess
def test_a_launcher_that_is_killed_leaves_no_folder(tmp_path, short_path):
    program = "from tests.runtime import test_coordination as t; t._meet_nobody('{}')"
    (tmp_path / "program.py").write_text(program.format("launcher"))
    job = subprocess.run(
        [sys.executable, "-m", "jdp.cli.main", "launch", "-n", "2", "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": harness.python_path()},
        capture_output=True,
        timeout=120.0,
    )
    assert job.returncode == -signal.SIGKILL
    # The pipes above are closed when the guard has ended the processes.
    deadline_s = time.monotonic() + 30.0
    while list(short_path.glob("jdp-*")):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("is_launched", [True, False])
def test_any_process_removes_the_socket_once_all_have_met(
    is_launched, monkeypatch, short_path
):
    folder = short_path / "jdp-5e5e5e5e5e5e"
    folder.mkdir(mode=0o700)
    monkeypatch.delenv(environment.LAUNCH_FOLDER, raising=False)
    if is_launched:
        monkeypatch.setenv(environment.LAUNCH_FOLDER, str(folder))
    with coordination.make_path(is_one_launch=True) as path:
        assert (pathlib.Path(path).parent == folder) == is_launched
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
        coordination.remove(path)
        assert not os.path.exists(path)
    # The launcher removes its own.
    assert os.path.exists(os.path.dirname(path)) == is_launched
    coordination.remove(path)
    coordination.remove("")


def test_no_link_is_followed_where_a_folder_is_removed(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    link = tmp_path / "jdp-5e5e5e5e5e5e"
    link.symlink_to(precious)
    coordination.remove(f"{link}/{coordination._NAME}")
    assert (precious / "file").exists() and link.is_symlink()
    (tmp_path / "jdp-full").mkdir()
    (tmp_path / "jdp-full" / "folder").mkdir()
    guard.remove_folder(str(tmp_path / "jdp-full"))  # None of ours; no error.


def test_a_folder_that_others_can_enter_is_not_used(monkeypatch, tmp_path):
    folder = tmp_path / "jdp-open"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv(environment.LAUNCH_FOLDER, str(folder))
    with coordination.make_path(is_one_launch=True) as path:
        assert os.path.dirname(path) != str(folder)
        coordination._check_path(path)


@pytest.mark.slow
def test_the_folder_of_a_process_that_was_killed_goes_with_the_next_one(short_path):
    """Not that of one that lives, of an earlier jdp without locks, or a young one."""
    hold = "from jdp.runtime import private_folder as p; import time\n"
    hold += "with p.make() as folder: print(folder, flush=True); time.sleep(60)"
    environ = os.environ | {"PYTHONPATH": harness.python_path()}
    command = [sys.executable, "-c", hold]
    processes = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    lives, dead, young = folders = [p.stdout.readline().strip() for p in processes]
    unlocked = short_path / "jdp-12345678"
    unlocked.mkdir(mode=0o700)
    for folder in (lives, dead, unlocked):
        os.utime(folder, (0, 0))
    for process in processes[1:]:
        process.kill()
        process.wait()
    with private_folder.make() as folder:
        assert [os.path.exists(f) for f in folders] == [True, False, True]
        assert unlocked.exists()
    os.rmdir(folder)
    processes[0].kill()
    for process in processes:
        process.wait()
        process.stdout.close()
