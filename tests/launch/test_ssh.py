"""`jdp launch -H`: hosts over ssh, here a real sshd of this account on the loopback."""

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from jdp.launch import ssh_hosts
from jdp.launch.ssh_hosts import Host
from tests import harness

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
# After a failure of one host, how long the job may take to end: for every launcher to
# hear of it 3 s, and as much again on a machine that is busy.
SOON_S = 6.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Starts an sshd; returns the command of ssh for its hosts a, b and others."""
    for tool in (SSHD, shutil.which("ssh"), shutil.which("ssh-keygen")):
        if tool is None or not os.path.exists(tool):
            pytest.skip("needs the server and the client of OpenSSH")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user", "stranger"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(keygen, check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    with socket.socket() as probe, socket.socket() as silent:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)  # Takes connections and never answers.
        silent_port = silent.getsockname()[1]
        probe.close()
        _write_configs(folder, port, silent_port)
        if os.geteuid() == 0:
            pathlib.Path("/run/sshd").mkdir(exist_ok=True)
        with open(folder / "log", "wb") as log:
            sshd = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=log
            )
        try:
            _wait_for_port(port, sshd, folder / "log")
            yield f"ssh -F {folder / 'ssh_config'}"
        finally:
            sshd.terminate()
            sshd.wait(30)


def _write_configs(folder, port, silent_port):
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\n"
        f"AuthorizedKeysFile {folder / 'authorized'}\nPidFile none\nUsePAM no\n"
        "StrictModes no\nPasswordAuthentication yes\nMaxStartups 100\n"
    )
    common = (
        "  HostName 127.0.0.1\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    user, stranger = (f"  IdentityFile {folder / n}\n" for n in ("user", "stranger"))
    (folder / "ssh_config").write_text(
        f"Host a b\n{common}{user}  Port {port}\n"
        f"Host asks\n{common}{stranger}  Port {port}\n"
        f"Host silent\n{common}{user}  Port {silent_port}\n"
        f"Host closed\n{common}{user}  Port 1\n"
    )


def _wait_for_port(port, sshd, log):
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s and sshd.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    pytest.skip(f"sshd does not start here: {log.read_text()}")


@pytest.fixture
def start(server, tmp_path):
    """Starts `jdp launch -H`; no process of it may be left in the end."""
    started = []

    def run(hosts, program, *options, cwd=tmp_path, script="program.py", environ=()):
        (tmp_path / "program.py").write_text(program)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "jdp.cli.main", "launch", "-H", hosts),
                *("--ssh", server, "--grace-s", "1", *options, script),
            ],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": harness.python_path(), **dict(environ)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    deadline_s = time.monotonic() + 20
    while left := _find(str(tmp_path)) + _find(server.split()[-1]):
        left = [each for each in left if "sshd_config" not in each]
        if not left:
            break
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


def _find(text):
    """Returns the command lines of processes that belong to a test, by a path."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if any(text in word for word in words) or process.cwd().startswith(text):
                found.append(" ".join(words))
        except psutil.Error:
            continue
    return found


WAITS = """
import os, signal, time
print("ready", os.environ["JDP_PROCESS_ID"], flush=True)
time.sleep(100)
"""


def wait_until_ready(process, count):
    lines = []
    while len([line for line in lines if "ready" in line]) < count:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        lines.append(line)


TRAINS = """
import jax.numpy as jnp
import numpy as np
import jdp

world = jdp.init()
step = jdp.data_parallel(lambda w, x: (w + jdp.average(x.mean()), {}))
w, _ = step(jnp.zeros(()), np.full(2, world.process_index, np.float32))
print("mean", float(w), "of", world.process_count, flush=True)
"""


@pytest.mark.multiprocess
def test_processes_of_two_hosts_train_together_with_logs(start, tmp_path):
    process = start("a:2,b:2", TRAINS, "--log-dir", "logs")
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    for i in range(4):
        assert f"[{i}] mean 1.5 of 4\n" in out
        assert "mean 1.5 of 4" in (tmp_path / f"logs/process_{i}.log").read_text()


SHOWS = """
import os, sys, psutil
found = []
for each in psutil.process_iter():
    try:
        found += [each.cmdline()]
    except psutil.Error:
        continue
key = os.environ["JDP_JOB_KEY"]
print("key is seen:", key in str(found), "secret" in str(found), len(key))
print(os.environ["JAX_TEXT"], sys.argv[1:], os.getcwd())
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_variables_come_along_and_no_secret_is_on_a_command_line(start, tmp_path):
    process = start("a", SHOWS, environ={"JAX_TEXT": "a secret 'word'"})
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "key is seen: False False 64" in out
    assert f"a secret 'word' [] {tmp_path}" in out


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "text", "code"),
    [
        ("os._exit(7)", "failed with exit code 7", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL", 137),
    ],
)
def test_a_process_that_fails_ends_all_hosts(start, fault, text, code):
    fails = f"if os.environ['JDP_PROCESS_ID'] == '1':\n    time.sleep(1)\n    {fault}\n"
    process = start("a,b", WAITS.replace("time.sleep(100)", fails + "time.sleep(100)"))
    wait_until_ready(process, 2)
    start_s = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - start_s < 1 + SOON_S
    assert process.returncode == code
    assert f"jdp launch on b: process 1 {text}.\n" in err
    assert f"jdp launch on a: process 1 on node 1 {text}.\n" in err


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("closed", "host closed (node 1) cannot be reached by ssh"),
        ("silent", "host silent (node 1) cannot be reached by ssh"),
        ("asks", "host asks (node 1) cannot be reached by ssh"),
        ("no.invalid", "host no.invalid (node 1) cannot be reached by ssh"),
    ],
)
def test_a_host_that_cannot_be_reached_is_named_and_ends_the_others(start, host, text):
    start_s = time.monotonic()
    process = start(f"a,{host}", WAITS, "--coordinator", f"127.0.0.1:{free_port()}")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"jdp launch: {text}" in err
    assert time.monotonic() - start_s < 10 + SOON_S
    if host == "asks":
        assert "Permission denied" in err


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_host_without_such_a_python_or_without_jdp_says_so(start, tmp_path):
    process = start("a", WAITS, "--python", "/no/python")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "host a (node 0) has no such Python: " in err and "/no/python" in err
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    bare.chmod(0o755)
    process = start("a", WAITS, "--python", str(bare))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "could not start jdp: jdp cannot be imported by" in err


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_script_that_is_missing_or_a_log_that_cannot_be_written_is_named(
    start, tmp_path
):
    process = start("a,b", WAITS, script="missing.py")
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and "missing.py" in err
    (tmp_path / "file").write_text("")
    process = start("a,b", WAITS, "--log-dir", "file/logs")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    # Both hosts have the fault; the first that tells is named.
    named = r"\(node [01]\) failed: --log-dir 'file/logs' cannot be written"
    assert re.search(named, err), err


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_an_ssh_that_is_killed_ends_all_hosts(start, signum):
    process = start("a,b", WAITS)
    wait_until_ready(process, 2)
    (second,) = [
        child
        for child in psutil.Process(process.pid).children()
        if child.name() == "ssh" and "b" in child.cmdline()
    ]
    start_s = time.monotonic()
    second.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - start_s < SOON_S
    assert process.returncode == 1
    assert "jdp launch: the connection to host b (node 1) was lost, or its" in err


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_launcher_that_is_killed_ends_all_hosts(start, tmp_path):
    process = start("a,b", WAITS)
    wait_until_ready(process, 2)
    (launcher,) = [
        each
        for each in psutil.process_iter()
        if each.name().startswith("python")
        and "ssh_end" not in each.name()
        and is_launcher_of(each, tmp_path, "1")
    ]
    start_s = time.monotonic()
    launcher.kill()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - start_s < SOON_S
    assert process.returncode == 1
    assert "the launcher of node 1 is gone" in err
    assert "(node 1) was lost, or its launcher was killed" in err


def is_launcher_of(process, folder, node):
    """Whether a child of the process is the process of `node` in `folder`."""
    try:
        return any(
            child.environ().get("JDP_NODE_RANK") == node and child.cwd() == str(folder)
            for child in process.children()
        )
    except psutil.Error:
        return False


@pytest.mark.multiprocess
@pytest.mark.slow
def test_unfinished_and_endless_lines_are_shown_and_noise_of_a_shell_is_no_order(
    start, tmp_path
):
    noisy = tmp_path / "noisy"
    noisy.write_text(f'#!/bin/sh\nprintf "welcome "\nexec "{sys.executable}" "$@"\n')
    noisy.chmod(0o755)
    program = (
        "import sys, time\nprint('x' * 300_000)\n"
        "print('asks? ', end='', flush=True)\ntime.sleep(60)"
    )
    process = start("a", program, "--python", str(noisy))
    seen = ""
    while "asks? " not in seen:
        piece = os.read(process.stdout.fileno(), 1 << 16).decode()
        assert piece, process.stderr.read()
        seen += piece
    assert seen.startswith("[a] welcome ") and "x" * 300_000 in seen
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_job(start):
    process = start("a,b", "while True: print('line' * 100)")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 141


SAVES = """
import os, pathlib, sys, time
print("ready", flush=True)
try:
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(0.5)
    pathlib.Path("saved" + os.environ["JDP_PROCESS_ID"]).touch()
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_ctrl_c_lets_all_processes_save(start, tmp_path):
    process = start("a,b", SAVES, "--grace-s", "8")
    wait_until_ready(process, 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert {p.name for p in tmp_path.glob("saved*")} == {"saved0", "saved1"}


IGNORES = """
import signal, time
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_second_interrupt_kills_on_all_hosts(start):
    process = start("a,b", IGNORES, "--grace-s", "50")
    wait_until_ready(process, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    start_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - start_s < SOON_S


@pytest.mark.multiprocess
@pytest.mark.slow
def test_nothing_is_left_where_the_starter_is_killed(start):
    process = start("a,b", WAITS)
    wait_until_ready(process, 2)
    process.kill()  # The fixture looks for what is left.


@pytest.mark.parametrize(
    "text", ["", "a:0", "a b", "-oProxyCommand=x", "a:1,", "a:x", "fd77::1:2", "a;ls"]
)
def test_hosts_of_another_form_are_refused(text):
    with pytest.raises(ValueError, match="`hosts` must be host:slots"):
        ssh_hosts.parse(text)


def test_hosts_are_read_with_their_slots():
    found = ssh_hosts.parse("me@gpu-1.cluster:4, [fd77::1]:4")
    assert found == (Host("me@gpu-1.cluster", 4), Host("[fd77::1]", 4))
    assert ssh_hosts.parse("a,b") == (Host("a", 1), Host("b", 1))
    with pytest.raises(ValueError, match="must have equal slots"):
        ssh_hosts.parse("a:1,b:2")


def test_words_of_the_user_come_before_the_options_of_jdp():
    ssh = ssh_hosts.SshOptions(command="ssh -o 'ConnectTimeout 30'", python="/a b/py")
    words = ssh_hosts.ssh_arguments(ssh, Host("[fd77::1]", 1))
    assert words[:3] == ["ssh", "-o", "ConnectTimeout 30"]
    assert words[-3:-1] == ["--", "fd77::1"]
    assert words[-1].startswith("exec '/a b/py' -u -c ")
    assert words.index("ConnectTimeout=3") > 2 and "BatchMode=yes" in words


@pytest.mark.parametrize("command", ["", "ssh 'x"])
def test_a_command_of_ssh_that_is_none_is_refused(command):
    with pytest.raises(ValueError, match="`ssh` must be a command"):
        ssh_hosts.SshOptions(command=command, python="python")


def test_a_program_takes_along_its_variables_and_not_the_place_of_another_job():
    environ = {"JAX_A": "1", "JDP_JOB_KEY": "k", "HOME": "h", "PYTHONPATH": "p"}
    found = ssh_hosts.kept_environ(environ, ["JDP_JOB_KEY"])
    assert found == {"JAX_A": "1", "PYTHONPATH": "p"}
