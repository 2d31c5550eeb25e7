import dataclasses

import pytest

import jdp
from jdp.launch import guard
from jdp.runtime import environment

PLACE = environment.LaunchEnvironment(
    coordinator_address="10.0.0.1:29500",
    num_processes=4,
    process_id=3,
    local_process_id=1,
    num_local_processes=2,
    node_rank=1,
    devices_per_process=8,
)


@pytest.mark.parametrize("devices_per_process", [None, 8])
def test_from_environ_inverts_to_environ(devices_per_process):
    place = dataclasses.replace(PLACE, devices_per_process=devices_per_process)
    assert environment.LaunchEnvironment.from_environ(place.to_environ()) == place


def test_no_variables_mean_no_launcher():
    assert environment.LaunchEnvironment.from_environ({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    "name", sorted(set(PLACE.to_environ()) - {environment.DEVICES_PER_PROCESS})
)
def test_a_missing_variable_is_named(name):
    environ = PLACE.to_environ()
    del environ[name]
    with pytest.raises(ValueError, match=rf"but \['{name}'\] are not"):
        environment.LaunchEnvironment.from_environ(environ)


def test_a_variable_that_is_no_number_is_named():
    environ = PLACE.to_environ() | {environment.NODE_RANK: "one"}
    with pytest.raises(ValueError, match="`JDP_NODE_RANK` must be a whole number"):
        environment.LaunchEnvironment.from_environ(environ)


def test_variables_lists_every_variable():
    names = {
        value
        for value in vars(environment).values()
        if isinstance(value, str) and value.startswith("JDP_")
    }
    # The name of a job is the user's, so a launcher hands it on as it is.
    assert {*environment.VARIABLES, environment.JOB_ID} == names
    beside = {environment.LAUNCH_ID, environment.LAUNCH_FOLDER, environment.JOINED}
    beside |= {environment.GRACE_S, environment.JOB_KEY, environment.JOB_ID}
    beside |= {environment.RECORD}
    assert set(PLACE.to_environ()) | beside == names


def test_a_child_of_a_process_that_has_joined_is_refused():
    place = PLACE.to_environ()
    environment.check_place_is_free(place, 8)
    environment.check_place_is_free(place | {environment.JOINED: "8"}, 8)
    with pytest.raises(
        ValueError, match=r"Process 3 .* \(pid 7\).*`if __name__ == .*`num_processes=1`"
    ):
        environment.check_place_is_free(place | {environment.JOINED: "7"}, 8)


def test_the_guard_looks_for_the_launch_id():
    assert guard._LAUNCH_ID == environment.LAUNCH_ID


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"SLURM_PROCID": "abc"}, "`SLURM_PROCID='abc'`: invalid literal"),
        ({"SLURM_NTASKS": ""}, "`SLURM_NTASKS=''`: invalid literal"),
        ({"SLURM_JOB_ID": "x"}, "`SLURM_JOB_ID='x'`"),
        ({"SLURM_PROCID": "7"}, "`SLURM_PROCID='7'`"),
        ({"SLURM_STEP_NODELIST": ""}, "`SLURM_STEP_NODELIST=''`"),
    ],
)
def test_garbage_of_a_cluster_is_refused_with_the_name_of_the_variable(
    monkeypatch, changed, text
):
    right = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    for name, value in (right | changed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="cannot be read from") as refused:
        jdp.init(timeout_s=5)
    assert text in str(refused.value)


def test_garbage_of_open_mpi_names_what_is_not_set(monkeypatch):
    uri = "1531576320.0;tcp://10.96.0.1:34911"
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", uri)
    with pytest.raises(ValueError, match="'OMPI_COMM_WORLD_SIZE' is not set"):
        jdp.init(timeout_s=5)


_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
_MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2"}
_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


_MVAPICH = {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}
_HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
_JAXJOB = {"PROCESS_ID": "1", "NUM_PROCESSES": "2", "COORDINATOR_ADDRESS": "job-0"}
_KNOWN = [_TORCHRUN, _OPEN_MPI, _MVAPICH]  # See `launchers`.
_OTHERS = [*_KNOWN, _MPICH, _HOROVOD, _JAXJOB]
_INDEXED_JOB = {"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
_PMIX = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "a.1"}
# In a step of one task, as by `srun -n1`.
_STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
_SHELL = _STEP | {"SLURM_NTASKS": "4"}  # of `salloc` with an interactive step.


@pytest.mark.parametrize("environ", _OTHERS)
def test_one_of_several_that_jax_does_not_find_is_refused(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="one of several") as refused:
        jdp.init()
    for name, value in environ.items():
        assert f"`{name}={value!r}`" in str(refused.value)


@pytest.mark.filterwarnings("ignore:.*Kubernetes environment")  # Of JAX.
@pytest.mark.parametrize(
    ("environ", "text"), [(_INDEXED_JOB, "package `kubernetes`"), (_PMIX, "MPI")]
)
def test_one_with_a_number_that_jax_does_not_find_is_refused(
    monkeypatch, environ, text
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="in an? .*, whose other processes") as refused:
        jdp.init()
    assert text in str(refused.value) and "`num_processes=1`" in str(refused.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # A pod of no indexed Job.
        {"JOB_COMPLETION_INDEX": "0"},
        _PMIX | _OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},  # `mpirun -n 1`.
    ],
)
def test_one_without_a_number_or_with_a_count_is_no_part_of_a_job(environ):
    environment.check_not_numbered(environ)


@pytest.mark.parametrize("other", _OTHERS)
@pytest.mark.parametrize("step", [_STEP, _SHELL])
def test_one_of_several_in_a_step_of_one_task_is_refused(monkeypatch, step, other):
    for name, value in (step | other).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="one of several") as refused:
        jdp.init(timeout_s=1)
    for name, value in other.items():
        assert f"`{name}={value!r}`" in str(refused.value)
    # The variables of a launcher that jdp knows count, whatever Slurm says; only the
    # address is missing.
    is_known = other in _KNOWN
    assert ("`JAX_COORDINATOR_ADDRESS=host:port`" in str(refused.value)) == is_known
    is_compared = step is _STEP and not is_known
    assert ("finds 1 by `SLURM_NTASKS='1'`" in str(refused.value)) == is_compared


def test_a_launcher_in_each_task_of_a_step_is_refused():
    # `srun -N2 horovodrun -np 4`.
    environ = _STEP | {"SLURM_NTASKS": "2"} | _HOROVOD | {"HOROVOD_SIZE": "4"}
    with pytest.raises(ValueError, match="HOROVOD_SIZE='4'.*2 by `SLURM_NTASKS='2'`"):
        environment.check_count(environ, 2)


def test_launchers_that_agree_are_taken():
    environment.check_count(_STEP | {"SLURM_NTASKS": "2"} | _MPICH, 2)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (_SHELL, True),
        (_STEP, False),
        ({}, False),
        (_SHELL | {"SLURM_STEP_NUM_TASKS": "4"}, False),
        (_SHELL | {"SLURM_HET_SIZE": "4"}, False),
        (_SHELL | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.96.0.1:34911"}, False),
    ],
)
def test_the_shell_of_an_allocation_is_told_from_a_task(environ, expected):
    assert environment.is_in_shell_of_slurm(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        _TORCHRUN | {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2", "RANK": "0"},  # Of nobody in particular.
        _MPICH | {"PMI_SIZE": "x"},
        # `python train.py` in the shell of `salloc`.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"},
    ],
)
def test_what_is_left_of_an_allocation_is_no_job(environ):
    environment.check_count(environ, 1)
