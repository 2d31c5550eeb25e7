"""Core shares: which cores each process gets, on machines made up and on this one."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile

import pytest

from jdp.launch import core_shares, launch
from jdp.launch.core_shares import Core
from jdp.parameter_server import launching
from jdp.runtime import environment
from tests import harness

REPORT = """
import json, os
names = ("OMP_NUM_THREADS", "PJRT_NPROC")
print(json.dumps([sorted(os.sched_getaffinity(0)), [os.environ.get(n) for n in names]]))
"""
# A server is ended once all workers have ended.
AFTER_SERVER = """
import pathlib, time
path = pathlib.Path(__file__).with_name("server has reported")
if os.environ["JDP_PARAMETER_SERVER_ROLE"] == "server":
    path.touch()
while not path.exists():
    time.sleep(0.01)
"""
THREADS = """
import glob
import jax.numpy as jnp
(jnp.ones((8, 8)) + 1).block_until_ready()
names = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
print(sum(name.startswith("tf_XLAEigen") for name in names))
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs affinity")
on_two_cores = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores",
)


def machine(num_domains, num_cores, *, num_threads=1, kind=0):
    """Numbered as Linux does it: first threads of all cores come first."""
    return [
        Core(
            id=(thread * num_domains + domain) * num_cores + core,
            domain=domain,
            package=domain,
            physical=core,
            kind=kind,
        )
        for thread in range(num_threads)
        for domain in range(num_domains)
        for core in range(num_cores)
    ]


def shares_of(cores, num_shares):
    shares, num_own = core_shares.share_out(cores, num_shares)
    return [sorted(share) for share in shares], num_own


@pytest.mark.parametrize(
    ("cores", "num_shares", "expected"),
    [
        (machine(1, 4), 2, ([[0, 1], [2, 3]], 2)),
        (machine(1, 2), 3, ([], 0)),
        # What does not divide is for all.
        (machine(1, 4), 3, ([[0, 3], [1, 3], [2, 3]], 1)),
        # Hardware threads of a core stay together while there are cores.
        (machine(1, 2, num_threads=2), 2, ([[0, 2], [1, 3]], 2)),
        (machine(1, 2, num_threads=2), 4, ([[0], [2], [1], [3]], 1)),
        # A share is in one NUMA domain, for which it may be a little smaller.
        (machine(2, 4), 2, ([[0, 1, 2, 3], [4, 5, 6, 7]], 4)),
        (machine(2, 4), 4, ([[0, 1], [2, 3], [4, 5], [6, 7]], 2)),
        (machine(2, 8), 3, ([[0, 1, 2, 3], [4, 5, 6, 7], list(range(8, 16))], 4)),
        # Not where it would be half as large or less.
        (machine(4, 2), 2, ([[0, 1, 2, 3], [4, 5, 6, 7]], 4)),
    ],
)
def test_shares_are_neighbours_of_one_size(cores, num_shares, expected):
    assert shares_of(cores, num_shares) == expected


def test_every_share_has_as_many_large_cores_as_the_others():
    large = machine(1, 2, num_threads=2, kind=1)
    small = [Core(id=4 + i, physical=2 + i) for i in range(4)]
    found = [[0, 2, 4, 5], [1, 3, 6, 7]]
    assert shares_of(large + small, 2) == (found, 4)
    # No share gets the only large core for itself.
    found = [[0, 1], [0, 2], [0, 3], [0, 4]]
    one = [Core(id=i, physical=i, kind=int(i == 0)) for i in range(5)]
    assert shares_of(one, 4) == (found, 1)


@pytest.mark.parametrize("num_shares", range(2, 20))
@pytest.mark.parametrize("num_threads", [1, 2])
def test_own_cores_are_disjoint_and_none_is_idle(num_shares, num_threads):
    cores = machine(2, 6, num_threads=num_threads)
    shares, num_own = shares_of(cores, num_shares)
    if num_shares > len(cores):
        assert shares == []
        return
    assert len(shares) == num_shares
    used_by = [sum(core.id in share for share in shares) for core in cores]
    assert num_own * num_shares <= used_by.count(1) <= len(cores)
    for share in shares:
        assert sum(used_by[core] == 1 for core in share) >= num_own


def test_cores_are_read_as_the_kernel_shows_them(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    write("system/node/node0/cpulist", "0-1,8")
    write("system/node/node1/cpulist", "2-3")
    write("system/cpu/cpu2/topology/physical_package_id", 1)
    write("system/cpu/cpu2/topology/core_id", 7)
    write("system/cpu/cpu8/cpu_capacity", 512)
    write("cpu_atom/cpus", "3")
    assert core_shares.find_cores([0, 2, 3, 8], tmp_path) == [
        Core(0),
        Core(2, domain=1, package=1, physical=7),
        Core(3, domain=1, physical=3, kind=1),
        Core(8, physical=8, kind=512),
    ]
    assert core_shares.find_cores([4], tmp_path / "none") == [Core(4, physical=4)]


@on_linux
def test_accelerators_are_not_shared_out():
    assert environment.has_accelerator({"JAX_PLATFORMS": "cuda,cpu"})
    assert not environment.has_accelerator({"JAX_PLATFORMS": "cpu"})
    found = core_shares.find_shares(2, {"JAX_PLATFORMS": "tpu"})
    assert found == core_shares.CoreShares()


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name in ("OMP_NUM_THREADS", "PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def restricted_to(cores):
    """Takes all other cores from this thread."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run(tmp_path, num_processes, program=REPORT, **options):
    """Launches `program`; returns what each process printed, in order."""
    (tmp_path / "program.py").write_text(program)
    command = launch.Command(kind="script", target=str(tmp_path / "program.py"))
    launched = launch.LaunchOptions(num_processes=num_processes, **options)
    return run_with(lambda **fds: launch.launch(command, launched, **fds))


def run_with(start):
    with tempfile.TemporaryFile() as out:
        before = os.sched_getaffinity(0)
        assert start(stdout_fd=out.fileno()) == 0
        assert os.sched_getaffinity(0) == before
        out.seek(0)
        lines = out.read().decode().splitlines()
    return [json.loads(line.partition("] ")[2]) for line in sorted(lines)]


@on_two_cores
@pytest.mark.multiprocess
def test_each_process_gets_cores_of_its_own_and_as_many_threads(tmp_path):
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with restricted_to({first, second}):
        found = run(tmp_path, 2)
        assert found == [[[first], ["1", "1"]], [[second], ["1", "1"]]]
        assert (
            run(tmp_path, 2, has_shares=False) == [[[first, second], [None, None]]] * 2
        )
        # One process may use all cores, and three cannot have one each.
        assert run(tmp_path, 1) == [[[first, second], [None, None]]]
        assert run(tmp_path, 3) == [[[first, second], ["1", None]]] * 3


@on_two_cores
@pytest.mark.multiprocess
def test_xla_computes_on_the_cores_of_the_process(tmp_path):
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with restricted_to({first, second}):
        assert run(tmp_path, 2, THREADS) == [1, 1]


@on_two_cores
@pytest.mark.multiprocess
def test_numbers_of_threads_that_are_given_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert [found[1] for found in run(tmp_path, 2)] == [["4", "3"]] * 2
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.setenv("NPROC", "3")
    assert [found[1] for found in run(tmp_path, 2)] == [["4", None]] * 2


@on_two_cores
@pytest.mark.multiprocess
def test_only_the_cores_of_the_launcher_are_shared_out(tmp_path):
    second = sorted(os.sched_getaffinity(0))[1]
    with restricted_to({second}):
        assert run(tmp_path, 2) == [[[second], ["1", None]]] * 2


@on_two_cores
@pytest.mark.multiprocess
def test_the_command_leaves_the_cores_to_all_if_asked(tmp_path):
    (tmp_path / "program.py").write_text(REPORT)
    command = [sys.executable, "-m", "jdp.cli.main", "launch", "-n", "2", "--no-pin"]
    found = subprocess.run(
        [*command, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": harness.python_path()},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.partition("] ")[2] for line in found.stdout.splitlines()]
    every = [sorted(os.sched_getaffinity(0)), [None, None]]
    assert [json.loads(line) for line in lines] == [every, every]


@on_two_cores
@pytest.mark.multiprocess
def test_workers_share_out_the_cores_and_servers_run_on_all(tmp_path):
    first, second, *_ = sorted(os.sched_getaffinity(0))
    (tmp_path / "program.py").write_text(REPORT + AFTER_SERVER)
    command = launch.Command(kind="script", target=str(tmp_path / "program.py"))
    server = [[first, second], [None, None]]
    with restricted_to({first, second}):
        for has_shares in (True, False):
            roles = launching.RoleOptions(
                num_servers=1, num_workers=2, has_shares=has_shares
            )
            found = run_with(
                lambda roles=roles, **fds: launching.launch_roles(command, roles, **fds)
            )
            workers = [[[first], ["1", "1"]], [[second], ["1", "1"]]]
            assert found == [server, *(workers if has_shares else [server] * 2)]
            (tmp_path / "server has reported").unlink()
