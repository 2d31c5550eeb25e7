import contextlib
import os
import socket
import subprocess
import sys

import pytest

from jdp.launch import ports
from tests import harness, rarely

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="ports are held on Linux alone"
)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_ports_that_are_held_are_for_servers_alone(host):
    with ports.held(host, count=2) as first:
        for port in (first, first + 1):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)):
                pass
    with contextlib.closing(socket.create_server(("127.0.0.1", first))):
        pass


@pytest.mark.slow
def test_ports_in_a_row_that_do_not_exist_are_an_error():
    with pytest.raises(OSError, match="no 70000 ports in a row"):
        with ports.held("127.0.0.1", count=70000):
            pass


# As if the system had given the port to another program since the launcher found it.
TAKE = """
import os, socket, sys
from jdp import parameter_server
address = os.environ.get("JDP_COORDINATOR_ADDRESS")
address = address or parameter_server.Place.from_environ().addresses[0]
host, port = address.rsplit(":", 1)
try:
    socket.socket().bind((host, int(port)))
except OSError as error:
    print(error.strerror)
else:
    sys.exit("the port was free")
"""


@pytest.mark.parametrize(
    "job",
    rarely.cases(
        [["-n", "2"], ["--servers", "1", "--workers", "1"]], often=(["-n", "2"],)
    ),
)
def test_no_other_program_gets_the_port_of_a_job_that_begins(job, tmp_path):
    program = tmp_path / "take.py"
    program.write_text(TAKE)
    ended = subprocess.run(
        [sys.executable, "-m", "jdp.cli.main", "launch", *job, str(program)],
        env=os.environ | {"PYTHONPATH": harness.python_path(), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Address already in use") == 2
