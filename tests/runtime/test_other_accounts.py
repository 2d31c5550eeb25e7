"""Other accounts of a host: what can they do to a job? Root lends them its rights."""

import contextlib
import os
import pathlib
import select
import socket
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import jdp
from jdp import eager
from jdp.parameter_server import keys
from jdp.runtime import coordination, environment, private_folder
from jdp.runtime.lifeline import star_line
from jdp.runtime.transport import rendezvous, zmq_link
from tests import harness

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]
OTHER = 54321
# Opens connections that say nothing to "@name", "/path" or a port, and holds them.
_KNOCK = f"""
import os, resource, socket, sys
os.setgroups([])
os.setgid({OTHER})
os.setuid({OTHER})
resource.setrlimit(resource.RLIMIT_NOFILE, (20000, 20000))
num, held, refused = int(sys.argv[1]), [], 0
for i in range(num):
    for place in sys.argv[2:]:
        is_port = place.isdecimal()
        line = socket.socket(socket.AF_INET if is_port else socket.AF_UNIX)
        line.settimeout(0.5)
        try:
            where = "\\0" + place[1:] if place[0] == "@" else place
            line.connect(("127.0.0.1", int(place)) if is_port else where)
            held.append(line)
        except OSError:
            refused += 1
print(len(held), refused, flush=True)
sys.stdin.read()
"""


def _listen_where(ports):
    """Returns where this process listens, as `_KNOCK` takes it; None: at all ports."""
    own = psutil.Process().net_connections("all")
    if ports is None:
        ports = {c.laddr[1] for c in own if c.status == psutil.CONN_LISTEN}
    paths = {c.laddr for c in own if isinstance(c.laddr, str) and "jdp-" in c.laddr}
    return sorted({*map(str, ports)} | paths)


def _note_ports(ports):
    """Adds to `ports` where jdp listens in this process; gloo and JAX do beside it."""
    listen, bind = star_line.listen, zmq_link.ZmqLink.listen

    def listen_and_note(host, port):
        sock = listen(host, port)
        ports.append(sock.getsockname()[1])
        return sock

    def bind_and_note(link, endpoint, secret_key):
        found = bind(link, endpoint, secret_key)
        ports.extend(e.rpartition(":")[2] for e in found if e.startswith("tcp"))
        return found

    star_line.listen, zmq_link.ZmqLink.listen = listen_and_note, bind_and_note


def _reduce_until_told(folder, way):
    """Reduces until a file says stop; another tells where process 0 listens."""
    ports = []
    _note_ports(ports)
    if way == "name":
        private_folder._find_parents = lambda: ["/no/such/folder"]
        os.environ.pop(environment.LAUNCH_FOLDER, None)
    elif way == "tcp":
        endpoints = ["tcp://127.0.0.1:*"]
        rendezvous.find_endpoints = lambda *_: endpoints
    world = jdp.init()
    eager.init(world)
    stop, steps = pathlib.Path(folder, "stop"), 0
    while True:
        is_over = stop.exists() if world.process_index == 0 else False
        x = jnp.full((8,), 1.0 if is_over else 0.0)
        steps += 1
        if np.asarray(eager.all_reduce(x, name="x", op="sum"))[0] > 0:
            break
        if world.process_index == 0:
            if steps == 1:
                found = _listen_where(None if way == "all" else ports)
                pathlib.Path(folder, "places").write_text(" ".join(found) + " ")
            # libzmq accepts before connections can be cut: for a moment, there may be
            # no descriptor for a file.
            with contextlib.suppress(OSError):
                pathlib.Path(folder, "steps").write_text(f"{steps} ")
        time.sleep(0.01)


def _wait_for(condition, job):
    deadline_s = time.monotonic() + 120.0
    while not condition():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def _limited(limits, *arguments):
    """Returns the command that runs Python with a soft and a hard limit of files."""
    # No `preexec_fn`, for which Python forks: JAX, once it runs, warns of that.
    code = (
        "import os, resource, sys; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {limits}); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    return [sys.executable, "-c", code, *arguments]


@pytest.mark.parametrize("way", ["name", "tcp", "all"])
@pytest.mark.slow
def test_another_account_that_connects_everywhere_does_not_end_a_job(tmp_path, way):
    (tmp_path / "program.py").write_text(
        "from tests.runtime import test_other_accounts as t; "
        f"t._reduce_until_told({str(tmp_path)!r}, {way!r})"
    )
    most = 20_000 if way == "all" else 1024
    limits = min(1024, most), most
    job = subprocess.Popen(
        _limited(limits, "-m", "jdp.cli.main", "launch", "-n", "2", "program.py"),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": harness.python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    places, steps = tmp_path / "places", tmp_path / "steps"
    _wait_for(lambda: places.exists() and steps.exists(), job)
    _wait_for(lambda: places.read_text().endswith(" "), job)
    found = places.read_text().split()
    hubs = [place for place in found if place[0] == "@" and place.endswith("-pulse")]
    assert bool(hubs) == (way == "name")
    num = 1500  # More than a process may have here, before the limit is raised.
    stranger = subprocess.Popen(
        [sys.executable, "-c", _KNOCK, str(num), *found],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for(lambda: _can_read(stranger), job)
        held, refused = map(int, stranger.stdout.readline().split())
        assert held + refused == num * len(found)
        before = _read_steps(steps)
        _wait_for(lambda: _read_steps(steps) > before + 20, job)
    finally:
        (tmp_path / "stop").touch()
        output = job.communicate(timeout=60.0)[0]
        stranger.communicate(timeout=60.0)
    assert job.returncode == 0, output


def _can_read(process):
    return bool(select.select([process.stdout], [], [], 0.0)[0])


def _read_steps(path):
    said = path.read_text()
    return int(said) if said.endswith(" ") else 0


def _join_slowly(folder):
    """Says where JAX's coordination service is, and ends when it is told to."""
    with coordination.make_path(is_one_launch=True) as path:
        pathlib.Path(folder, f"path{os.environ[environment.PROCESS_ID]}").write_text(
            path + " "
        )
        while not pathlib.Path(folder, "stop").exists():
            time.sleep(0.02)


def test_no_command_line_tells_another_account_what_a_job_keeps_to_itself(tmp_path):
    (tmp_path / "program.py").write_text(
        "from tests.runtime import test_other_accounts as t; "
        f"t._join_slowly({str(tmp_path)!r})"
    )
    job = subprocess.Popen(
        [sys.executable, "-m", "jdp.cli.main", "launch", "-n", "1", "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": harness.python_path(), "TMPDIR": "/tmp"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = tmp_path / "path0"
    try:
        _wait_for(lambda: said.exists() and said.read_text().endswith(" "), job)
        processes = psutil.Process(job.pid).children(recursive=True)
        (worker,) = (p for p in processes if "program.py" in p.cmdline())
        environ = worker.environ()
        folder = environ[environment.LAUNCH_FOLDER]
        assert said.read_text().strip() == f"{folder}/coordination"
        names = environment.LAUNCH_ID, environment.LAUNCH_FOLDER, environment.JOB_KEY
        secrets = [environ[name] for name in names]
        # The guard holds these too: another account can read what `ps` shows.
        assert any("guard.py" in " ".join(p.cmdline()) for p in processes)
        for process in (psutil.Process(job.pid), *processes):
            shown = " ".join(process.cmdline())
            assert not [s for s in secrets if s in shown or s[:12] in shown], shown
        code = f"import os; os.setuid({OTHER}); os.listdir({folder!r})"
        tried = subprocess.run([sys.executable, "-c", code], capture_output=True)
        assert b"PermissionError" in tried.stderr
    finally:
        (tmp_path / "stop").touch()
        output = job.communicate(timeout=60.0)[0]
    assert job.returncode == 0, output
    assert not os.path.exists(folder)


_SERVE = """
import sys, time
import numpy as np
from jdp.parameter_server import keys, messages, sockets
found = keys.read_keys(sys.argv[1])
address = sys.argv[2]
server = sockets.ServerSocket(address, found, most_bytes=1 << 20)
client = sockets.ClientSockets([address], found, most_bytes=1 << 20)
num = 0
while True:  # Until this process is killed.
    client.send(0, b"%d" % num)
    server.poll(0.05)
    for message in server.receive():
        num += 1
        if num % 20 == 0:
            print(num, flush=True)
"""


def test_another_account_that_connects_to_a_server_does_not_end_it(tmp_path):
    keys.make_keys(str(tmp_path / "keys"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    limits = 1024, 1024
    server = subprocess.Popen(
        _limited(limits, "-c", _SERVE, str(tmp_path / "keys"), f"127.0.0.1:{port}"),
        env=os.environ | {"PYTHONPATH": harness.python_path()},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout.readline() == "20\n"
    stranger = subprocess.Popen(
        [sys.executable, "-c", _KNOCK, "1500", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for(lambda: _can_read(stranger), server)
        num_held = len(psutil.Process(server.pid).net_connections("tcp"))
        before = int(server.stdout.readline())
        while int(server.stdout.readline()) < before + 200:
            assert server.poll() is None
        assert len(psutil.Process(server.pid).net_connections("tcp")) < 512, num_held
    finally:
        server.kill()
        stranger.communicate(timeout=60.0)
        server.communicate()
