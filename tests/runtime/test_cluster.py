"""`jdp.init`: every way in, and every way in which it can go wrong."""

import os
import re
import socket
import subprocess
import sys
import textwrap

import pytest

import jdp
from jdp.runtime import environment, places
from tests import harness, rarely

multiprocess = pytest.mark.multiprocess
# Garbage is looked for as in `tests.process`.
PRELUDE = """
import gc
gc.disable()
import jax, jdp
gc.freeze()
gc.enable()
def init(**kwargs):
    world = jdp.init(**kwargs)
    print("WORLD", world.process_index, world.process_count, world.num_replicas,
          dict(world.mesh.shape), world.is_main_process)
    return world
"""


def _start(code, environ=None):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("JDP_")}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(code)],
        env={**clean, "PYTHONPATH": harness.python_path(), **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(*processes):
    """Returns (exit code, output) of each; kills what takes over a minute."""
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(p.returncode, out) for p, out in zip(processes, outputs, strict=True)]


def _run(code, environ=None):
    ((returncode, output),) = _finish(_start(code, environ))
    return returncode, output


def _port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _explicit(process_id, num_processes=2, port=None, **more):
    arguments = {
        "coordinator_address": f"127.0.0.1:{port}",
        "num_processes": num_processes,
        "process_id": process_id,
        "timeout_s": 5.0,
        **more,
    }
    return f"init(**{arguments!r})"


# --- Ways in -------------------------------------------------------------------


def test_one_process_has_all_its_devices_and_reinit_returns_the_same_world():
    returncode, output = _run(
        """
        world = init(num_cpu_devices=3)
        assert jdp.init(num_cpu_devices=3) is world
        assert jdp.data_parallel(lambda s, b: (s, b.sum())).world is world
        """
    )
    assert returncode == 0, output
    assert "WORLD 0 1 3 {'data': 3} True" in output


def test_one_process_may_have_used_its_devices_before():
    returncode, output = _run("jax.devices(); init()")
    assert returncode == 0, output
    assert "WORLD 0 1 1 {'data': 1} True" in output


@multiprocess
def test_explicit_arguments_join_processes():
    port = _port()
    results = _finish(*(_start(_explicit(i, port=port)) for i in range(2)))
    for i, (returncode, output) in enumerate(results):
        assert returncode == 0, output
        assert f"WORLD {i} 2 2 {{'data': 2}} {i == 0}" in output


def _slurm(rank, port):
    return {
        "JAX_COORDINATOR_PORT": str(port),
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_NODES": "1",
    }


def _open_mpi(rank, port):
    return {
        "JAX_COORDINATOR_PORT": str(port),
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
    }


@multiprocess
@pytest.mark.parametrize("launcher", rarely.cases([_slurm, _open_mpi], often=(_slurm,)))
def test_the_variables_of_a_launcher_are_enough(launcher):
    port = _port()
    processes = [_start("init(timeout_s=20.0)", launcher(i, port)) for i in range(2)]
    for i, (returncode, output) in enumerate(_finish(*processes)):
        assert returncode == 0, output
        assert f"WORLD {i} 2 2" in output


def _num_replicas():
    return jdp.init().num_replicas


@multiprocess
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_devices_of_a_launch_are_those_asked_for(num_processes):
    values = harness.run_checked(_num_replicas, num_processes, devices_per_process=3)
    assert values == [3 * num_processes] * num_processes


def _node_world():
    world = jdp.init(axis_name=("node", "data"), num_nodes=2)
    return dict(world.mesh.shape), [d.process_index for d in world.mesh.devices.flat]


@multiprocess
def test_nodes_hold_neighbouring_processes():
    expected = ({"node": 2, "data": 2}, [0, 0, 1, 1])
    values = harness.run_checked(_node_world, 2, devices_per_process=2)
    assert values == [expected] * 2


@multiprocess
def test_each_host_of_a_launch_is_a_node():
    port = _port()
    processes = []
    for process_id in range(2):
        place = environment.LaunchEnvironment(
            coordinator_address=f"127.0.0.1:{port}",
            num_processes=2,
            process_id=process_id,
            local_process_id=0,
            num_local_processes=1,
            node_rank=process_id,
            devices_per_process=3,
        )
        code = "init(axis_name=('node', 'data'))"
        processes.append(_start(code, place.to_environ()))
    for returncode, output in _finish(*processes):
        assert returncode == 0, output
        assert "{'node': 2, 'data': 3}" in output


def test_a_process_without_a_gpu_says_which_one_it_looked_for():
    # Of two processes on a host with one GPU, the second one finds none.
    code = """
    from jax._src import xla_bridge
    def make_backend():
        raise RuntimeError("no supported devices found for platform ROCM")
    xla_bridge.register_backend_factory("rocm", make_backend, priority=400)
    init(local_device_ids=[1])
    """
    returncode, output = _run(code, {"JAX_PLATFORMS": "rocm"})
    assert returncode == 1
    assert "JAX finds no device on this host with the id 1." in output
    assert "start no more of them than the host has GPUs (`jdp launch -n`)" in output
    assert "JAX says: " in output and "found for platform ROCM" in output


def test_a_process_of_a_host_with_several_takes_its_own_gpus():
    options = places.PlaceOptions(timeout_s=1.0)

    def device_ids(num_local, local, count):
        place = environment.LaunchEnvironment(
            coordinator_address="a:1",
            num_processes=8,
            process_id=local,
            local_process_id=local,
            num_local_processes=num_local,
            node_rank=0,
            devices_per_process=count,
        )
        return places.find(options, place.to_environ()).local_device_ids

    assert device_ids(4, 3, None) == (3,)
    assert device_ids(2, 1, 4) == (4, 5, 6, 7)
    assert device_ids(1, 0, 2) == (0, 1)
    assert device_ids(1, 0, None) is None  # all there are.


# --- Wrong arguments -----------------------------------------------------------

REFUSED = [
    (
        "init(num_processes=2)",
        "ValueError: `coordinator_address`, `process_id` must",
    ),
    (_explicit(2, port=1), "ValueError: `process_id` must be from 0 to 1 .* got 2"),
    (
        _explicit(-1, port=1),
        "ValueError: `process_id` must be from 0 to 1 .* got -1",
    ),
    (
        _explicit(0, 0, port=1),
        "ValueError: `num_processes` must be at least 1, got 0",
    ),
    (
        _explicit(0, port="x"),
        "ValueError: `coordinator_address` must be 'host:port'",
    ),
    (
        _explicit(0, port=70000),
        "ValueError: `coordinator_address` must be 'host:por",
    ),
    ("init(num_cpu_devices=0)", "ValueError: `num_cpu_devices` must be at least 1"),
    (
        "init(num_cpu_devices=10**6)",
        "ValueError: `num_cpu_devices` must be at most 16384, got 1000000",
    ),
    ("init(timeout_s=0)", "ValueError: `timeout_s` must be positive, got 0"),
    ("init(axis_name='')", "ValueError: `axis_name` must be one name or a pair"),
    ("init(num_nodes=2)", "ValueError: `num_nodes` needs a pair of axis names"),
]
TOO_LATE = [
    (
        "init(); jdp.init(num_cpu_devices=2)",
        "RuntimeError: `jdp.init` was called before with `num_cpu_devices=None`, "
        "now with 2",
    ),
    (
        "jax.devices(); init(num_cpu_devices=2)",
        "RuntimeError: `num_cpu_devices=2` comes too late: JAX has already made 1",
    ),
    (
        "jax.devices(); init(local_device_ids=[0])",
        "RuntimeError: `local_device_ids` comes too late",
    ),
    (
        f"jax.devices(); {_explicit(0, port=1)}",
        "RuntimeError: `jdp.init` must come before anything that makes JAX choose",
    ),
]


@pytest.fixture(scope="module")
def refusals():
    """What each of `REFUSED` raises in one process, which makes a world after them."""
    codes = [code for code, _ in REFUSED]
    returncode, output = _run(
        f"""
        import traceback
        for code in {codes!r}:
            try:
                exec(code)
            except Exception as error:
                print(*traceback.format_exception_only(error))
            else:
                print("nothing raised")
            print("END OF A CALL")
        init(num_cpu_devices=2)
        """
    )
    assert returncode == 0, output
    *texts, after = output.split("END OF A CALL")
    assert "WORLD 0 1 2 {'data': 2} True" in after
    return dict(zip(codes, texts, strict=True))


@pytest.mark.parametrize("code,expected", REFUSED)
def test_a_wrong_call_says_what_is_wrong(code, expected, refusals):
    assert re.search(expected, refusals[code]), refusals[code]


@pytest.mark.parametrize("code,expected", rarely.cases(TOO_LATE, often=TOO_LATE[1::2]))
def test_a_call_that_comes_too_late_says_what_is_wrong(code, expected):
    returncode, output = _run(code)
    assert returncode == 1
    assert re.search(expected, output), output


def test_half_a_launch_environment_is_named():
    returncode, output = _run("init()", {"JDP_COORDINATOR_ADDRESS": "a:1"})
    assert returncode == 1
    assert "['JDP_COORDINATOR_ADDRESS'] are set" in output
    assert "'JDP_NUM_PROCESSES'" in output


# --- Wrong jobs ----------------------------------------------------------------


@multiprocess
def test_an_unreachable_coordinator_is_named_in_bounded_time():
    port = _port()
    returncode, output = _run(_explicit(1, port=port, timeout_s=1.0))
    assert returncode == 1
    assert f"no answer from the coordinator at '127.0.0.1:{port}' within 1 s" in output


@multiprocess
def test_a_missing_process_is_named_in_bounded_time():
    returncode, output = _run(_explicit(0, 3, port=_port(), timeout_s=1.0))
    assert returncode == 1
    assert "RuntimeError: 2 of 3 processes did not come in time: 1, 2." in output


@multiprocess
def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        returncode, output = _run(_explicit(0, port=port))
    assert returncode == 1
    assert f"cannot listen at the coordinator address '127.0.0.1:{port}'" in output


@multiprocess
def test_a_doubled_process_id_is_told_to_all():
    port = _port()
    processes = [_start(_explicit(i, 3, port=port)) for i in (0, 1, 1)]
    for returncode, output in _finish(*processes):
        assert returncode == 1
        assert "`process_id=1` was given twice" in output


@multiprocess
def test_different_counts_are_told_to_all():
    port = _port()
    processes = [_start(_explicit(i, n, port=port)) for i, n in ((0, 2), (1, 4))]
    for returncode, output in _finish(*processes):
        assert returncode == 1
        assert "`num_processes` is 2 in process 0" in output
        assert "and 4 in process 1" in output


@multiprocess
def test_a_process_that_fails_leaves_at_once():
    port = _port()
    fail = "\nif world.process_index == 1: raise ValueError('broken')\n"
    wait = "import time; time.sleep(30)"
    processes = [
        _start(f"world = {_explicit(i, port=port)}{fail}{wait}") for i in range(2)
    ]
    try:
        output, _ = processes[1].communicate(timeout=20)  # JAX would wait for 300 s.
        assert processes[1].returncode == 1
        assert "ValueError: broken" in output
    finally:
        for process in processes:
            process.kill()
            process.communicate()
