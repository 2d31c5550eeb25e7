"""Where JAX's coordination service listens."""

import os
import pathlib
import socket

import pytest

import jdp
from jdp.runtime import addresses, coordination, environment, roll_call_sockets
from tests import harness


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


def test_a_folder_whose_name_is_too_long_for_a_socket_is_not_used(
    monkeypatch, tmp_path
):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(coordination.tempfile, "tempdir", str(long))
    with coordination.make_path(is_one_launch=True) as path:
        assert path == ""
    assert not list(long.iterdir())


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
    meeting = roll_call_sockets.Meeting(["a"], "10.0.0.1", "10.0.0.1", bind_host, b"")
    assert coordination._bind_address(process_id, meeting, 5) == expected
    is_told = process_id == 0 and expected is None
    assert ("listens on all interfaces" in caplog.text) == is_told


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
def test_nothing_listens_at_the_port_of_a_job_of_one_launcher(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert harness.run_checked(_find_who_listens, 2) == ["nobody"] * 2
    assert not list(tmp_path.glob("jdp-*"))
